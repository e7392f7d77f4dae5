"""Every model in the table of the manual: equal to the original where it must be, and not elsewhere."""

import copy
import math
import pickle
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import bmfa
from bmfa.models import final_tokens, patch, reduce, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.passes import Passes
from bmfa.models.screened_layer import LayerInputs, ScreenedLayer, observe, screened_layers
from models.host_models import in_threads
from models.supported_models import SUPPORTED, Inputs, call, inputs_of, make_supported, table

# All tiles are expanded, or every leaf is one token, or tiles do not pay at these sizes.
EXACT = (
    {"leaves": 1.0, "allow_dense": False},
    {"error": 0.1},
    {"rule": bmfa.rules.ExactGap(0.0)},
)
COARSE = {"leaves": 2, "allow_dense": False}
# A module's own forward, and the attention interface with tokens behind the grid. Compiling takes
# seconds; the slow tests compile the other models, and `test_packed_hosts.py` one that breaks the graph.
COMPILED = ("timm-vit", "yolos")
TOLERANCE = 5e-6  # of the largest output, in float32


@pytest.fixture(params=sorted(SUPPORTED))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def largest_difference(mine: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry of each output."""
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if b.is_floating_point()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def hook_counts(model: nn.Module) -> list[int]:
    return [len(module._forward_hooks) for module in model.modules()]


@torch.no_grad()
def test_exact_settings_equal_the_original_and_unpatch_restores_its_bits(name: str) -> None:
    model, inputs, case = make_supported(name), inputs_of(name), SUPPORTED[name]
    vit = find_vision_transformer(model)
    assert (vit.prefix, vit.suffix) == (case.prefix, case.suffix)
    assert (vit.layout is not None) == case.reduces
    full = call(model, inputs)
    hooks = hook_counts(model)  # transformers has some of its own
    state = list(model.state_dict())
    for options in EXACT[: 2 if case.frames else 3]:
        patch(model, layers="all", **options)
        assert largest_difference(call(model, inputs), full) < TOLERANCE
    patch(model, layers="all", **COARSE)
    assert largest_difference(call(model, inputs), full) > 1e-3
    assert len(screened_layers(model)) == len(vit.attentions) > 1
    copies = [copy.deepcopy(model)]
    if name not in ("dpt", "vitpose"):  # transformers installs local functions in these
        copies.append(pickle.loads(pickle.dumps(model)))
    for other in (*copies, model):
        assert equal(call(other, inputs), call(model, inputs))
        unpatch(other)
        assert equal(call(other, inputs), full)
        assert list(other.state_dict()) == state
        assert not any("bmfa" in key for module in other.modules() for key in vars(module))
        assert hook_counts(other) == hooks


def places(name: str, height: int, width: int) -> list[tuple[int, int]]:
    """Row and column of the patches of an image in the order of the model, from its definition."""
    patches = list(product(range(height), range(width)))
    if name in ("hunyuan", "paddleocr", "kimi") or (name == "videollama3" and height == 6):
        return patches  # in raster order: the second image of VideoLLaMA 3 is not merged
    # Blocks of 2x2 patches in raster order.
    return sorted(patches, key=lambda at: (at[0] // 2, at[1] // 2, at[0] % 2, at[1] % 2))


def with_another_patch(
    name: str, inputs: Inputs, image: int, grid: bmfa.Grid, place: tuple[int, int, int]
) -> Inputs:
    """The inputs with one patch changed, at a frame, row and column of the grid of an image."""
    first = next(iter(inputs))
    changed, (frame, row, column) = inputs[first].clone(), place
    if "grid_thw" in inputs:
        sizes = [(t, h, w) for t, h, w in inputs["grid_thw"].tolist()]
        if not SUPPORTED[name].frames:  # every frame is an image
            sizes = [(1, h, w) for t, h, w in sizes for _ in range(t)]
        start = sum(math.prod(size) for size in sizes[:image])
        start += frame * grid.height * grid.width
        index = start + places(name, grid.height, grid.width).index((row, column))
        changed.view(sum(map(math.prod, sizes)), -1)[index] *= -2
    elif name == "siglip2":
        changed[image, row * grid.width + column] *= -2
    else:
        height = inputs["image_sizes"][image, 0] if name == "pixtral" else changed.shape[-2]
        side = int(height) // grid.height
        frames = (
            changed[image].unflatten(0, (grid.frames, -1))
            if grid.frames > 1
            else changed[image, None]
        )
        part = frames[
            frame, ..., row * side : (row + 1) * side, column * side : (column + 1) * side
        ]
        part *= -2
    return inputs | {first: changed}


def values(model: nn.Module, inputs: Inputs) -> list[tuple[bmfa.Grid, Tensor]]:
    """The grid and the values (tokens, width) of every image in the first layer that is screened."""
    seen: list[tuple[bmfa.Grid, Tensor]] = []

    def keep(layer: LayerInputs, screened: bmfa.Screened) -> None:
        if layer.layer == 0:
            tokens = layer.v[:, :, layer.prefix :].transpose(1, 2).flatten(2)
            seen.extend((layer.grid, one) for one in tokens)

    with observe(model, keep):
        call(model, inputs)
    return seen


@torch.no_grad()
def test_every_token_is_at_its_place_on_the_grid(name: str) -> None:
    """A patch that is changed changes the token at its row and column most: exact settings hide this."""
    model, inputs = patch(make_supported(name), layers="all", **COARSE), inputs_of(name)
    random = np.random.default_rng(0)
    before = values(model, inputs)
    for image, (grid, _) in enumerate(before):
        place = tuple(int(random.integers(n)) for n in (grid.frames, grid.height, grid.width))
        after = values(model, with_another_patch(name, inputs, image, grid, place))
        moved = [(a - b).norm(dim=-1) for (_, a), (_, b) in zip(after, before, strict=True)]
        most = max(range(len(moved)), key=lambda index: float(moved[index].max()))
        token = int(moved[most].argmax())
        frame, rest = divmod(token, grid.height * grid.width)
        assert (most, frame, *divmod(rest, grid.width)) == (image, *place)


def layer_with_suffix(**options: Any) -> tuple[ScreenedLayer, list[Tensor]]:
    """A layer over a class token, a grid and seven tokens behind it, with q, k, v."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, 1 + 256 + 7, 8, generator=generator) for _ in range(3)]
    token_grid = Passes(prefix=1, suffix=7)
    token_grid.begin(bmfa.Grid(16, 16))
    return ScreenedLayer(0, token_grid, options), tensors


def test_queries_behind_the_grid_are_exact() -> None:
    layer, (q, k, v) = layer_with_suffix(**COARSE)
    mine, full = layer(q, k, v), scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(mine[:, :, :1], full[:, :, :1])
    torch.testing.assert_close(mine[:, :, -7:], full[:, :, -7:])
    assert (mine - full)[:, :, 1:-7].abs().max() > 0.01


def test_keys_behind_the_grid_are_exact() -> None:
    layer, (q, k, v) = layer_with_suffix(rule=bmfa.rules.GlobalMean())
    scores = q @ k.transpose(-2, -1) * 8**-0.5
    before = layer(q, k, v)
    weights = []  # of keys, from what their values change
    for key in (0, -7, -1):
        changed = v.clone()
        changed[:, :, key] += 1.0
        weights.append((layer(q, k, changed) - before)[..., 0])
    for key, weight in zip((-7, -1), weights[1:], strict=True):
        expected = (scores[..., key] - scores[..., 0]).exp()  # relative to the class token
        torch.testing.assert_close(weight / weights[0], expected, rtol=1e-3, atol=0.0)


@torch.no_grad()
def test_padded_images_are_attended_like_single_ones() -> None:
    model, inputs = make_supported("siglip2"), inputs_of("siglip2")
    patch(model, layers="all", **COARSE)
    batch = model(**inputs).last_hidden_state
    for row, (height, width) in enumerate(inputs["spatial_shapes"].tolist()):
        size = height * width
        single = model(
            pixel_values=inputs["pixel_values"][row : row + 1, :size],
            pixel_attention_mask=torch.ones(1, size),
            spatial_shapes=inputs["spatial_shapes"][row : row + 1],
        ).last_hidden_state
        torch.testing.assert_close(batch[row, :size], single[0], rtol=1e-4, atol=1e-4)


def test_padded_patches_are_not_tuned() -> None:
    with pytest.raises(TypeError, match="takes patches of images and spatial_shapes instead of"):
        bmfa.tune(make_supported("siglip2"), torch.randn(2, 3, 32, 32))


def test_another_mask_than_padding_is_refused() -> None:
    model, inputs = make_supported("siglip2"), inputs_of("siglip2")
    patch(model, layers="all", **COARSE)
    for mask in (None, torch.ones(2, 100), torch.zeros(2, 100)):
        with pytest.raises(ValueError, match=r"pass the mask of the processor"):
            model(**inputs | {"pixel_attention_mask": mask})


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # a norm of torch, in Gemma 4 of timm
@torch.no_grad()
def test_autocast(name: str) -> None:
    model, inputs = make_supported(name), inputs_of(name)
    patch(model, layers="all", **EXACT[0])
    with torch.autocast("cpu", torch.bfloat16):
        mine = call(model, inputs)
        theirs = call(unpatch(model), inputs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        # 2 ** -8 is the precision of bfloat16; every layer rounds a few times.
        assert float((a - b).abs().max()) <= 24 * 2**-8 * float(b.abs().max())


def gradients(model: nn.Module, name: str) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)  # DINOv3 changes its positions at random in training
    outputs = call(model, inputs_of(name))
    sum(output.square().mean() for output in outputs if output.requires_grad).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture
def checkpointed(name: str) -> nn.Module:
    model = make_supported(name)
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable()
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        return Checkpointed(model)
    return model


class Checkpointed(nn.Module):
    """A model without checkpointing of its own, recomputed as a whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.model, *args, use_reentrant=False, **kwargs)


def test_gradient_checkpointing(name: str, checkpointed: nn.Module) -> None:
    plain = make_supported(name)
    for model in (plain, checkpointed):
        patch(model.train(), layers="all", **COARSE)
    for mine, theirs in zip(gradients(checkpointed, name), gradients(plain, name), strict=True):
        torch.testing.assert_close(mine, theirs)


@torch.no_grad()
def test_two_threads(name: str) -> None:
    model = patch(make_supported(name), layers="all", **COARSE)
    shown = [inputs_of(name, seed) for seed in (1, 2)]
    expected = [call(model, inputs) for inputs in shown]

    def serve(index: int) -> bool:
        with torch.no_grad():
            outputs = [call(model, shown[index]) for _ in range(3)]
        return all(equal(output, expected[index]) for output in outputs)

    assert all(in_threads([partial(serve, index) for index in (0, 1)]))


@pytest.mark.parametrize(
    "name",
    [
        name if name in COMPILED else pytest.param(name, marks=pytest.mark.slow)
        for name in SUPPORTED
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_compile(name: str) -> None:
    model, inputs = make_supported(name), inputs_of(name)
    patch(model, layers="all", **COARSE)
    expected = call(model, inputs)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=SUPPORTED[name].fullgraph, backend="eager")
    assert largest_difference(call(compiled, inputs), expected) < TOLERANCE
    torch.compiler.reset()


@pytest.mark.parametrize("name", [name for name, case in SUPPORTED.items() if case.reduces])
@torch.no_grad()
def test_merging(name: str) -> None:
    model, inputs = make_supported(name), inputs_of(name)
    full = call(model, inputs)
    reduce(model, "tome:0")
    assert largest_difference(call(model, inputs), full) < TOLERANCE
    tokens = final_tokens(model)
    reduce(model, "tome:2")
    merged = call(model, inputs)
    assert final_tokens(model) == tokens - 2 * len(find_vision_transformer(model).blocks)
    assert all(tensor.isfinite().all() for tensor in merged)
    assert equal(call(unpatch(model), inputs), full)


def test_the_table_of_the_manual_is_this_list() -> None:
    manual = Path(__file__).parents[2] / "docs" / "models.md"
    assert table() in manual.read_text("utf-8")
