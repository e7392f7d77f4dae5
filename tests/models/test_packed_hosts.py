"""Hosts that pack pictures of several sizes into one call: order of tokens, grids, dense layers."""

import copy
import pickle
import threading
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if find_spec("timm") is None or find_spec("transformers") is None:
    pytest.skip("needs timm and transformers: pip install 'bmfa[models]'", allow_module_level=True)

import bmfa
from bmfa import Grid, rules
from bmfa.models import patch, record, unpatch
from bmfa.models.hosts import find_host
from bmfa.models.packing import pack, raster_order
from bmfa.models.screened_layer import LayerInputs, observe, screened_layers
from models.packed_models import PACKED, SIZES, Inputs, make_packed

EXACT: tuple[dict[str, Any], ...] = (
    {"leaves": 1.0, "form": "tiled"},
    {"rule": rules.ExactGap(0.0)},
)
COARSE: dict[str, Any] = {"rule": rules.FixedDepth(1)}
TOLERANCE = 5e-6  # of the largest output, in float32


@pytest.fixture(params=sorted(PACKED))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def inputs_of(name: str, seed: int = 1) -> Inputs:
    return PACKED[name][1](seed)


def features(model: nn.Module, inputs: Inputs) -> Tensor:
    output = model(**inputs)
    return output if isinstance(output, Tensor) else output.last_hidden_state


def change(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def test_exact_settings_equal_the_original_and_unpatch_restores_its_bits(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    full = features(model, inputs)
    for options in EXACT:
        patch(model, layers="all", **options)
        assert change(features(model, inputs), full) < TOLERANCE
    patch(model, layers="all", **COARSE)
    assert change(features(model, inputs), full) > 1e-3
    assert len(screened_layers(model)) == len(find_host(model).attentions) > 1
    patch(model, layers="all", error=0.1)  # tiles do not pay at these sizes
    assert torch.equal(features(model, inputs), full)
    unpatch(model)
    assert torch.equal(features(model, inputs), full)
    assert not any("bmfa" in key for module in model.modules() for key in vars(module))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", sorted(name for name in PACKED if name.startswith("qwen")))
@torch.no_grad()
def test_every_picture_is_attended_as_if_it_were_alone(name: str) -> None:
    """With trees, whose blocks depend on the grid, so that a wrong order or grid would change them."""
    model, inputs = make_packed(name), inputs_of(name)
    patch(model, layers="all", **COARSE)
    together = features(model, inputs)
    start = 0
    for frames, height, width in SIZES:
        for _ in range(frames):
            end = start + height * width
            alone = {
                "hidden_states": inputs["hidden_states"][start:end],
                "grid_thw": torch.tensor([[1, height, width]]),
            }
            assert change(together[start:end], features(model, alone)) < TOLERANCE
            start = end


def places(name: str, height: int, width: int) -> list[tuple[int, int]]:
    """Row and column of the tokens of a picture in the order of the model, from its definition."""
    tokens = [(row, column) for row in range(height) for column in range(width)]
    if name == "pixtral":
        return tokens
    # Blocks of 2x2 patches in raster order; in windows of 2x2 blocks (16 pixels) first, if it has some.
    window = 4 if name == "qwen2.5-vl" else max(height, width)

    def key(place: tuple[int, int]) -> tuple[int, ...]:
        row, column = place
        blocks = (row // 2, column // 2, row % 2, column % 2)
        return (row // window, column // window, *blocks)

    return sorted(tokens, key=key)


@torch.no_grad()
def test_the_tokens_of_each_picture_are_in_raster_order(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    patch(model, layers=[0], **COARSE)
    with record(model, trees=False):
        features(model, inputs)
    packing = screened_layers(model)[0].token_grid.packing
    sizes = [(h, w) for frames, h, w in SIZES for _ in range(frames)]
    sizes = [(12, 8), (6, 10)] if name == "pixtral" else sizes
    start, seen = 0, dict.fromkeys({Grid(*size) for size in sizes}, 0)
    for height, width in sizes:
        grid = Grid(height, width)
        group = next(group for group in packing.groups if group.grid == grid)
        index = group.index[seen[grid]].tolist()
        order = places(name, height, width)
        assert [order[i - start] for i in index] == sorted(order)
        seen[grid] += 1
        start += grid.size
    assert sum(group.index.numel() for group in packing.groups) == start


@torch.no_grad()
def test_pictures_of_one_grid_share_a_call(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    patch(model, layers=[0], **COARSE)
    calls: list[tuple[Grid, int]] = []

    def keep(layer: LayerInputs, screened: bmfa.Screened) -> None:
        calls.append((layer.grid, layer.q.shape[0]))

    with observe(model, keep):
        features(model, inputs)
    frames = 1 if name == "pixtral" else 2
    assert calls == [(Grid(12, 8), 1), (Grid(6, 10), frames)]


@torch.no_grad()
def test_copies_and_pickles_are_patched_on_their_own(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    full = features(model, inputs)
    patch(model, layers="all", **COARSE)
    coarse = features(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        unpatch(model)
        assert torch.equal(features(other, inputs), coarse)
        assert torch.equal(features(unpatch(other), inputs), full)
        assert not any(m._forward_pre_hooks for m in other.modules())
        patch(model, layers="all", **COARSE)


@torch.no_grad()
def test_autocast(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    patch(model, layers="all", **EXACT[0])
    with torch.autocast("cpu", torch.bfloat16):
        mine = features(model, inputs)
        theirs = features(unpatch(model), inputs)
    assert mine.dtype == theirs.dtype
    # 2 ** -8 is the precision of bfloat16; every layer rounds a few times.
    assert change(mine.float(), theirs.float()) < 24 * 2**-8


def gradients(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    features(model, inputs).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_gradient_checkpointing(name: str) -> None:
    plain, checkpointed = make_packed(name).train(), make_packed(name).train()
    if hasattr(checkpointed, "gradient_checkpointing_enable"):
        checkpointed.gradient_checkpointing_enable()
    else:
        checkpointed.set_grad_checkpointing()
    inputs = inputs_of(name)
    for model in (plain, checkpointed):
        patch(model, layers="all", **COARSE)
    pairs = zip(gradients(checkpointed, inputs), gradients(plain, inputs), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)


@torch.no_grad()
def test_two_threads(name: str) -> None:
    model = patch(make_packed(name), layers="all", **COARSE)
    shown = [inputs_of(name, seed) for seed in (1, 2)]
    expected = [features(model, inputs) for inputs in shown]
    wrong: list[object] = []
    start = threading.Barrier(2)

    def serve(index: int) -> None:
        try:
            start.wait(timeout=60)
            with torch.no_grad():
                for _ in range(3):
                    if not torch.equal(features(model, shown[index]), expected[index]):
                        wrong.append(index)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=serve, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_a_compiled_model_runs_packed_attention_outside_of_its_graphs(name: str) -> None:
    model, inputs = make_packed(name), inputs_of(name)
    patch(model, layers="all", **COARSE)
    expected = features(model, inputs)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert change(features(compiled, inputs), expected) < TOLERANCE
    torch.compiler.reset()


def test_windows_of_qwen_2_5_stay_as_they_are() -> None:
    host = find_host(make_packed("qwen2.5-vl"))
    assert len(host.attentions) == 2 and len(host.blocks) == 3
    assert "windows" in host.dense_blocks[1]


def test_a_block_alone_and_positions_that_fill_no_grid_are_refused() -> None:
    model = patch(make_packed("qwen3-vl"), layers="all", **COARSE)
    with pytest.raises(RuntimeError, match="sizes of the pictures are unknown"):
        model.blocks[0](
            torch.zeros(16, 32),
            cu_seqlens=torch.tensor([0, 16]),
            position_embeddings=(torch.ones(16, 16), torch.zeros(16, 16)),
        )
    with pytest.raises(ValueError, match="do not fill that grid"):
        raster_order(torch.tensor([[0, 0], [0, 1], [1, 1]]))
    with pytest.raises(TypeError, match="cannot be reduced: it rotates"):
        bmfa.reduce(model, "tome:2")


def test_attention_over_other_tokens_than_the_pictures_have_is_refused() -> None:
    packing = pack([(Grid(2, 2), torch.arange(4))], (1, 4), torch.device("cpu"))
    tokens = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"1 x 5 tokens.*make 1 x 4"):
        packing.attend(lambda grid, q, k, v: v, tokens, tokens, tokens)


def test_tokens_of_no_picture_get_the_mean_of_their_sequence() -> None:
    index = torch.tensor([0, 1, 3, 2])  # the last two tokens in the other order; token 4 is padding
    packing = pack([(Grid(2, 2), index)], (1, 5), torch.device("cpu"))
    v = torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(0))
    output = packing.attend(lambda grid, q, k, v: v, v, v, v)
    torch.testing.assert_close(output[:, :, :4], v[:, :, :4])
    torch.testing.assert_close(output[:, :, 4], v.mean(2))
