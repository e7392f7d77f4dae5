"""Dense or tiles, decided for each call from its shapes: bits, sizes in turn, recording, graphs."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bmfa
from bmfa.attention.dispatch import LEAST_EXACT_SCORES, LEAST_TOKENS, NATIVE
from bmfa.models import patch, record, summary, unpatch
from bmfa.models.screened_layer import observe
from models.host_models import (
    CPU_BACKEND,
    HF,
    MODELS,
    SIZED,
    VIT,
    hf_model,
    image_size,
    images,
    make_model,
    pixels_of,
    run,
    timm_model,
)

# Sides of images in pixels, with patches of 4x4: 64 tokens run dense, 324 exactly by the native kernel,
# 4,096 tokens use tiles.
SMALL, NATIVE_SIZE, LARGE = 32, 72, 256
TILES = {"leaves": 0.05, "layers": "all"}
HOSTS = ["vit", "hf-dinov2"]
needs_native = pytest.mark.skipif(CPU_BACKEND != "native", reason="needs the native kernels")


def forms(model: nn.Module) -> set[tuple[str, str]]:
    return {(row.form, row.backend) for row in summary(model).rows}


def test_the_sizes_of_this_file_are_on_both_sides_of_the_threshold() -> None:
    assert (SMALL // 4) ** 2 < LEAST_TOKENS[NATIVE] <= (LARGE // 4) ** 2
    scores = 3 * (1 + (SMALL // 4) ** 2) ** 2  # of the heads of the models here
    assert scores < min(LEAST_EXACT_SCORES.values())


def test_dense_layers_have_the_bits_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BMFA_NATIVE", "off")
    for name, autocast in itertools.product(MODELS, (False, True)):
        model, pixels = make_model(name), images(image_size(name), image_size(name))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = run(model, pixels)
            patch(model, layers="all")
            assert torch.equal(run(model, pixels), expected), name
        assert forms(model) == {("dense", "host")}
        assert not any("bmfa" in k for m in unpatch(model).modules() for k in vars(m))


@pytest.mark.parametrize("name", [*HOSTS, pytest.param("eva", marks=pytest.mark.slow)])
def test_one_model_decides_at_every_size(name: str) -> None:
    model, options = make_model(name), SIZED[name]
    full = {size: run(model, pixels_of(size), **options) for size in (SMALL, LARGE)}
    forced = patch(copy.deepcopy(model), allow_dense=False, **TILES)
    tiled = run(forced, pixels_of(LARGE), **options)
    assert not torch.equal(tiled, full[LARGE])
    patch(model, **TILES)
    for size in (SMALL, LARGE, SMALL, LARGE):
        expected = full[SMALL] if size == SMALL else tiled
        assert torch.equal(run(model, pixels_of(size), **options), expected)
        ran = ("dense", "host") if size == SMALL else ("tiled", CPU_BACKEND)
        assert forms(model) == {ran}
    assert torch.equal(run(unpatch(model), pixels_of(LARGE), **options), full[LARGE])


def test_settings_that_force_tiles_or_trees_run_at_every_size() -> None:
    for options, backend in (
        ({"allow_dense": False}, CPU_BACKEND),
        ({"allow_dense": False, "leaves": 0.1}, CPU_BACKEND),
        ({"backend": "eager"}, "eager"),
        ({"rule": "gamma:0.005"}, "eager"),
    ):
        model = patch(make_model("vit"), layers="all", **options)
        with record(model, trees=False) as recording:
            run(model, pixels_of(SMALL))
        assert recording[0].stats[0].backend == backend


def test_recording_at_both_sizes_says_why() -> None:
    model, pixels = make_model("vit"), pixels_of(SMALL)
    full = run(model, pixels)
    patch(model, **TILES)
    with record(model, attention=True) as recording:
        assert torch.equal(run(model, pixels), full)
    stats = recording[2].stats[0]
    assert (stats.backend, stats.form) == ("dense", "dense")
    assert stats.reason.startswith("auto: ") and "64" in stats.reason
    assert recording[2].trees[0].grid == bmfa.Grid(8, 8)
    run(model, pixels)
    assert len(recording[2].stats) == 1
    assert {row.reason for row in summary(model).rows} == {stats.reason}
    with record(model, trees=False) as outer, record(model, trees=False) as recording:
        for size in (LARGE, SMALL, LARGE):
            run(model, pixels_of(size))
    assert [stats.form for stats in recording[0].stats] == ["tiled", "dense", "tiled"]
    assert not outer.layers


def test_a_copied_attention_does_not_copy_the_model() -> None:
    model = patch(make_model("vit"), **TILES)
    part = copy.deepcopy(model.blocks[0].attn)
    assert len(pickle.dumps(part)) < len(pickle.dumps(model)) / 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("vit", SMALL),
        pytest.param("hf-dinov2", SMALL, marks=pytest.mark.slow),
        pytest.param("vit", LARGE, marks=pytest.mark.slow),
        pytest.param("hf-dinov2", LARGE, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_compiled_models_switch_between_sizes(name: str, first: int) -> None:
    model = make_model(name)
    reference = copy.deepcopy(model)
    forced = patch(copy.deepcopy(model), allow_dense=False, **TILES)
    patch(model, **TILES)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    second = SMALL + LARGE - first
    for size, count in ((first, 1), (second, 1), (first, 2)):
        pixels = pixels_of(size, count)
        expected = run(reference if size == SMALL else forced, pixels)
        torch.testing.assert_close(run(compiled, pixels), expected)
        torch.testing.assert_close(run(model, pixels), expected)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_a_compiled_dense_model_has_the_operations_of_the_model() -> None:
    model = make_model("vit")

    def operations(model: nn.Module) -> list[Any]:
        graphs: list[list[Any]] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            nodes = [node for node in graph.graph.nodes if node.op.startswith("call")]
            graphs.append([str(node.target) for node in nodes])
            return graph

        torch.compiler.reset()
        torch.compile(model, fullgraph=True, backend=backend)(pixels_of(SMALL))
        assert len(graphs) == 1
        return graphs[0]

    expected = operations(model)
    assert operations(patch(model, **TILES)) == expected
    torch.compiler.reset()


@torch.no_grad()
def test_exported_models_of_both_sizes() -> None:
    for size in (SMALL, LARGE):
        model = patch(timm_model("vit_tiny_patch16_224", **VIT | {"img_size": size}), **TILES)
        shapes = ({0: torch.export.Dim("batch", min=1, max=16)},)
        example, pixels = pixels_of(size, 2), pixels_of(size, 3)
        program = torch.export.export(model.eval(), (example,), dynamic_shapes=shapes).module()
        torch.testing.assert_close(program(pixels), model(pixels))


def test_dense_layers_accept_what_the_model_does() -> None:
    """Dropout, any mask and attention weights, which tiles and trees refuse."""
    torch.manual_seed(0)
    model = timm_model("vit_tiny_patch16_224", **VIT, attn_drop_rate=0.1).train()
    pixels, tokens = pixels_of(SMALL), torch.randn(2, 65, 24)
    attention = model.blocks[0].attn
    causal = torch.ones(65, 65, dtype=torch.bool).tril()[None, None]

    def outputs() -> list[Tensor]:
        torch.manual_seed(1)
        return [
            model(pixels),
            attention(tokens, attn_mask=causal),
            attention(tokens, is_causal=True),
            model.blocks(torch.randn(2, 30, 24)),
        ]

    expected = outputs()
    patch(model, layers="all")
    assert all(torch.equal(x, y) for x, y in zip(outputs(), expected, strict=True))
    with observe(model, lambda *_: None), pytest.raises(ValueError, match=r"dropout of 0\.1"):
        model(pixels)

    weights = hf_model("ViTConfig", "ViTModel", attn_implementation="eager").eval()
    sizes = {"interpolate_pos_encoding": True, "output_attentions": True}
    for size in (SMALL, NATIVE_SIZE):
        expected = weights(pixels_of(size), **sizes).attentions
        patch(weights, **TILES | {"leaves": 1.0})
        found = weights(pixels_of(size), **sizes).attentions
        assert len(found) == HF["num_hidden_layers"]
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        unpatch(weights)


@needs_native
@pytest.mark.parametrize("name", ["vit", "hf-dinov2", "embedded"])
def test_exact_attention_is_native_where_it_is_faster(name: str) -> None:
    sizes = SIZED.get(name, {})
    model, size = make_model(name), NATIVE_SIZE if name in SIZED else 112
    pixels = pixels_of(size)
    full = run(model, pixels, **sizes)
    for options in ({}, {"error": 0.0}, {"leaves": 1.0}):
        patch(model, layers="all", **options)
        output = run(model, pixels, **sizes)
        assert not torch.equal(output, full)
        torch.testing.assert_close(output, full, atol=1e-4, rtol=1e-4)
        assert torch.equal(run(model, pixels, **sizes), output)
        rows = summary(model).rows
        assert {(row.form, row.backend, row.density) for row in rows} == {("dense", "native", 1.0)}
        with record(model, trees=False) as recording:
            assert torch.equal(run(model, pixels, **sizes), output)
        stats = recording[0].stats[0]
        assert (stats.form, stats.backend) == ("dense", "native")
        assert {row.reason for row in rows} == {stats.reason}
        assert torch.equal(run(unpatch(model), pixels, **sizes), full)


def first_tensor(output: Any) -> Tensor:
    """The output of a model, which transformers wraps."""
    return output if isinstance(output, Tensor) else output[0]


@needs_native
@pytest.mark.parametrize("name", HOSTS)
def test_what_the_native_kernel_cannot_run_has_the_bits_of_the_model(name: str) -> None:
    """Gradients and float64."""
    model, pixels, sizes = make_model(name), pixels_of(NATIVE_SIZE), SIZED[name]
    with_gradients = first_tensor(model(pixels, **sizes))
    double = run(copy.deepcopy(model).double(), pixels.double(), **sizes)
    patch(model, layers="all")
    run(model, pixels, **sizes)
    found = first_tensor(model(pixels, **sizes))
    assert torch.equal(found, with_gradients) and found.requires_grad
    assert {row.backend for row in summary(model).rows} == {"host"}
    assert torch.equal(run(copy.deepcopy(model).double(), pixels.double(), **sizes), double)


@needs_native
def test_native_attention_refuses_nan_and_obeys_autocast() -> None:
    model, pixels = make_model("vit"), pixels_of(NATIVE_SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        full = run(model, pixels)
        patch(model, layers="all")
        torch.testing.assert_close(run(model, pixels), full, atol=0.05, rtol=0.05)
        assert {row.backend for row in summary(model).rows} == {"native"}
    with pytest.raises(ValueError, match="queries hold"):
        run(model, torch.full_like(pixels, torch.nan))


def test_an_interrupted_pass_leaves_nothing_behind() -> None:
    """After an exception or Ctrl-C anywhere, or a call of the embedding alone, the next image runs."""
    model: Any = make_model("vit")
    patch(model, rule=bmfa.rules.GlobalMean(), layers="all")
    wide, tall = images(16, 32), images(32, 16)
    expected = run(model, tall)
    for module in (
        model.patch_embed.proj,
        model.pos_drop,
        model.blocks[1].attn.qkv,
        model.blocks[1],
    ):

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        handle = module.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(wide)
        handle.remove()
        assert torch.equal(run(model, tall), expected)
    model.patch_embed(wide)
    assert torch.equal(run(model, tall), expected)
    assert torch.equal(run(model, tall), expected)


@torch.no_grad()
def test_a_clone_between_interleaved_blocks_is_refused() -> None:
    model: Any = patch(make_model("vit"), rule=bmfa.rules.GlobalMean(), layers="all")
    x = model._pos_embed(model.patch_embed(images(16, 32)))
    expected = model.blocks(x)
    first = model.blocks[0](x)
    assert torch.equal(model.blocks[1:](first.clone()), expected)  # one pass alone
    first = model.blocks[0](x)
    second = model.blocks[0](model._pos_embed(model.patch_embed(images(32, 16))))
    with pytest.raises(RuntimeError, match="block 0 did not return, so their grid is unknown"):
        model.blocks[1](first.clone())
    assert torch.equal(model.blocks[1:](first), expected) and second is not None


def test_models_with_fewer_layers_than_the_default() -> None:
    model = timm_model("vit_tiny_patch16_224", **VIT | {"depth": 2}).eval()
    with record(patch(model, rule="fixed-depth:1")) as recording:
        run(model, images())
    assert sorted(recording.layers) == [0, 1]
