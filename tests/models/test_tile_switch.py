"""A patched model runs its own forward where dense attention is faster, and tiles where it is not."""

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if find_spec("timm") is None or find_spec("transformers") is None:
    pytest.skip("needs timm and transformers: pip install 'bmfa[models]'", allow_module_level=True)

import bmfa
from bmfa.attention.dispatch import LEAST_EXACT_SCORES, LEAST_TOKENS, NATIVE
from bmfa.models import override, patch, record, summary, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.screened_layer import observe, screened_layers
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
    run,
    timm_model,
)

# Sides of images in pixels, with patches of 4x4: 64 tokens run dense, 4,096 tokens use tiles.
SMALL, LARGE = 32, 256
TILES = {"leaves": 0.05, "layers": "all"}
SOURCES = str(Path(bmfa.__file__).parent)
HOSTS = ["vit", "hf-dinov2"]
# Calls into bmfa in a forward pass at a size that is known to run dense: a hook of the patch embedding,
# and one of the last block, which notes for `bmfa.summary` that the pass is finished.
DENSE_CALLS = [
    "TileSwitch.__call__",
    "is_capturing",
    "ForwardState.forget",
    "LayerLog.__call__",
    "ForwardState.in_use",
    "decision_key",
]


def test_the_sizes_of_this_file_are_on_both_sides_of_the_threshold() -> None:
    assert (SMALL // 4) ** 2 < LEAST_TOKENS[NATIVE] <= (LARGE // 4) ** 2
    scores = 3 * (1 + (SMALL // 4) ** 2) ** 2  # of the heads of the models here
    assert scores < min(LEAST_EXACT_SCORES.values())


def pixels_of(size: int, images: int = 1, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(images, 3, size, size, generator=generator)


def is_active(model: nn.Module) -> bool:
    """True if the blocks of the model have an override in effect."""
    sources = {
        type(block).forward.__code__.co_filename for block in find_vision_transformer(model).blocks
    }
    assert len(sources) == 1
    return sources == {override.__file__}


def calls_into_bmfa(function: Callable[[], object]) -> list[str]:
    """Names of the Python functions of bmfa that run."""
    calls: list[str] = []

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def without_embedded(calls: list[str]) -> list[str]:
    """Without the forward of the embedded model, which is a part of bmfa."""
    own = ("EmbeddedViT", "PatchEmbed", "Attention.", "Mlp", "Block.")
    own += ("_check_images", "_context_ratio", "encode_positions")
    return [name for name in calls if not name.startswith(own)]


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact attention of every size is that of the host."""
    monkeypatch.setenv("BMFA_NATIVE", "off")


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_dense_layers_have_the_bits_of_the_host(name: str) -> None:
    model, pixels = make_model(name), images(image_size(name), image_size(name))
    classes = [type(module) for module in model.modules()]
    contexts = [nullcontext(), torch.autocast("cpu", torch.bfloat16)]
    expected = []
    for context in contexts:
        with context:
            expected.append(run(model, pixels))
    patch(model, layers="all")
    assert [type(module) for module in model.modules()] == classes
    for context, output in zip(contexts, expected, strict=True):
        with context:
            assert torch.equal(run(model, pixels), output)
    unpatch(model)
    assert not any("bmfa" in key for module in model.modules() for key in vars(module))
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(run(model, pixels), expected[0])


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_dense_pass_calls_bmfa_once_not_in_every_layer(name: str) -> None:
    model, pixels = make_model(name), images(image_size(name), image_size(name))
    patch(model, layers="all")
    run(model, pixels)
    calls = without_embedded(calls_into_bmfa(lambda: run(model, pixels)))
    assert calls == DENSE_CALLS


@pytest.mark.parametrize("name", HOSTS)
def test_a_dense_pass_after_tiles_calls_bmfa_once_again(name: str) -> None:
    model, pixels = make_model(name), pixels_of(SMALL)
    classes = [type(module) for module in model.modules()]
    patch(model, **TILES)
    run(model, pixels_of(LARGE))
    assert is_active(model)
    run(model, pixels)
    assert [type(module) for module in model.modules()] == classes
    assert calls_into_bmfa(lambda: run(model, pixels)) == DENSE_CALLS


@pytest.mark.parametrize("name", HOSTS)
def test_a_dense_pass_after_gradients_of_tiles_makes_few_calls_in_every_layer(name: str) -> None:
    model, pixels = make_model(name), pixels_of(SMALL)
    full = run(model, pixels)
    patch(model, **TILES)
    model(pixels_of(LARGE))  # gradient checkpointing might recompute its blocks
    assert torch.equal(run(model, pixels), full)
    assert is_active(model)
    calls = calls_into_bmfa(lambda: run(model, pixels))
    assert not any("screened_attention" in call or "compute" in call for call in calls), calls
    assert len(calls) <= len(DENSE_CALLS) + 11 * 3  # in three layers


@pytest.mark.parametrize("name", sorted(SIZED))
def test_one_model_decides_at_every_size(name: str) -> None:
    model, options = make_model(name), SIZED[name]
    full = {size: run(model, pixels_of(size), **options) for size in (SMALL, LARGE)}
    forced = patch(copy.deepcopy(model), allow_dense=False, **TILES)
    tiled = run(forced, pixels_of(LARGE), **options)
    assert is_active(forced) and not torch.equal(tiled, full[LARGE])
    patch(model, **TILES)
    for size in (SMALL, LARGE, SMALL, LARGE):
        expected = full[SMALL] if size == SMALL else tiled
        assert torch.equal(run(model, pixels_of(size), **options), expected)
    assert is_active(model)
    assert torch.equal(run(unpatch(model), pixels_of(LARGE), **options), full[LARGE])
    assert not any("bmfa" in key for module in model.modules() for key in vars(module))


@pytest.mark.parametrize(
    "options",
    [
        {"allow_dense": False},
        {"allow_dense": False, "leaves": 0.1},
        {"backend": "eager"},
        {"rule": "gamma:0.005"},
    ],
)
def test_settings_that_force_tiles_or_trees_run_at_every_size(options: dict[str, Any]) -> None:
    model = patch(make_model("vit"), layers="all", **options)
    assert is_active(model)
    with record(model, trees=False) as recording:
        run(model, pixels_of(SMALL))
    eager = "rule" in options or "backend" in options
    assert recording[0].stats[0].backend == ("eager" if eager else CPU_BACKEND)
    assert is_active(model)


@pytest.mark.parametrize("name", HOSTS)
def test_recording_a_dense_layer_says_why(name: str) -> None:
    model, pixels = make_model(name), pixels_of(SMALL)
    full = run(model, pixels)
    patch(model, **TILES)
    with record(model, attention=True) as recording:
        assert torch.equal(run(model, pixels), full)
        assert is_active(model)
    stats = recording[2].stats[0]
    assert (stats.backend, stats.form) == ("dense", "dense")
    assert "64" in stats.reason and stats.reason.startswith("auto: ")
    assert recording[2].trees[0].grid == bmfa.Grid(8, 8)
    assert not is_active(model)
    run(model, pixels)
    assert len(recording[2].stats) == 1
    choices = screened_layers(model)[0].decision.choices.values()
    assert {choice.reason for choice in choices} == {stats.reason}


def test_recording_inside_another_and_at_both_sizes() -> None:
    model = patch(make_model("vit"), **TILES)
    with record(model, trees=False) as outer, record(model, trees=False) as recording:
        for size in (LARGE, SMALL, LARGE):
            run(model, pixels_of(size))
    assert [stats.form for stats in recording[0].stats] == ["tiled", "dense", "tiled"]
    assert not outer.layers and is_active(model)
    run(model, pixels_of(SMALL))
    assert not is_active(model)
    assert not any(layer.token_grid.observers for layer in screened_layers(model))


@pytest.mark.parametrize("name", HOSTS)
def test_a_recording_that_begins_inside_a_dense_pass_does_not_disturb_it(name: str) -> None:
    model, pixels = make_model(name), pixels_of(SMALL)
    full = run(model, pixels)
    patch(model, **TILES)
    run(model, pixels_of(LARGE))  # leaves a grid in this thread
    recordings: list[Any] = []

    def begin(*_: object) -> None:
        context = record(model)
        recordings.append((context, context.__enter__()))

    handle = find_vision_transformer(model).blocks[1].register_forward_hook(begin)
    assert torch.equal(run(model, pixels), full)
    handle.remove()
    for context, recording in recordings:
        assert not recording.layers
        context.__exit__(None, None, None)
    assert torch.equal(run(model, pixels), full)


@pytest.mark.parametrize("name", HOSTS)
def test_tiles_become_active_inside_a_dense_pass(name: str) -> None:
    model, pixels = make_model(name), pixels_of(SMALL)
    full = run(model, pixels)
    expected = run(patch(copy.deepcopy(model), allow_dense=False, **TILES), pixels_of(LARGE))
    for layer in (0, 1):
        inner: list[Tensor] = []
        patch(model, **TILES)

        def run_large(*_: object, inner: list[Tensor] = inner) -> None:
            if not inner:
                inner.append(torch.empty(0))
                inner.append(run(model, pixels_of(LARGE)))

        handle = find_vision_transformer(model).blocks[layer].register_forward_hook(run_large)
        assert torch.equal(run(model, pixels), full)
        assert torch.equal(inner[1], expected)
        assert torch.equal(run(model, pixels), full)
        handle.remove()


@pytest.mark.parametrize("name", HOSTS)
def test_a_dense_pass_inside_a_tiled_one_leaves_its_tiles(name: str) -> None:
    model, pixels = make_model(name), pixels_of(LARGE)
    full = run(model, pixels_of(SMALL))
    expected = run(patch(copy.deepcopy(model), allow_dense=False, **TILES), pixels)
    patch(model, **TILES)
    host = find_vision_transformer(model)
    for module in (host.projection, host.blocks[0], host.blocks[1]):
        inner: list[Tensor] = []

        def run_small(*_: object, inner: list[Tensor] = inner) -> None:
            if not inner:
                inner.append(full)
                inner.append(run(model, pixels_of(SMALL)))

        handle = module.register_forward_hook(run_small)
        assert torch.equal(run(model, pixels), expected)
        assert torch.equal(inner[1], full)
        handle.remove()
    run(model, pixels_of(SMALL))
    assert not is_active(model)


@pytest.mark.parametrize("name", HOSTS)
def test_threads_with_dense_and_tiled_sizes(name: str) -> None:
    original = make_model(name)
    forced = patch(copy.deepcopy(original), allow_dense=False, **TILES)
    shown = {SMALL: pixels_of(SMALL), LARGE: pixels_of(LARGE)}
    expected = {SMALL: run(original, shown[SMALL]), LARGE: run(forced, shown[LARGE])}
    wrong: list[object] = []
    for _ in range(3):  # each time from a model whose layers are not active
        model = patch(copy.deepcopy(original), **TILES)
        start = threading.Barrier(4)

        def serve(size: int, times: int, model: nn.Module, start: threading.Barrier) -> None:
            try:
                start.wait(timeout=60)
                for _ in range(times):
                    if not torch.equal(run(model, shown[size]), expected[size]):
                        wrong.append(size)
            except Exception as error:
                wrong.append(error)

        work = [(SMALL, 30), (SMALL, 30), (LARGE, 2), (LARGE, 2)]
        threads = [threading.Thread(target=serve, args=(*w, model, start)) for w in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("name", HOSTS)
def test_copies_become_active_on_their_own(
    name: str, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    model = make_model(name)
    full = {size: run(model, pixels_of(size)) for size in (SMALL, LARGE)}
    patch(model, **TILES)
    keys = list(model.state_dict())
    other = duplicate(model)
    tiled = run(other, pixels_of(LARGE))
    assert is_active(other) and not is_active(model)
    assert not torch.equal(tiled, full[LARGE])
    third = duplicate(other)
    assert is_active(third) and torch.equal(run(third, pixels_of(LARGE)), tiled)
    for copied in (other, third, model):
        assert torch.equal(run(copied, pixels_of(SMALL)), full[SMALL])
        assert list(copied.state_dict()) == keys
        assert torch.equal(run(unpatch(copied), pixels_of(LARGE)), full[LARGE])


def test_a_copied_attention_does_not_copy_the_model() -> None:
    model = patch(make_model("vit"), **TILES)
    part = copy.deepcopy(model.blocks[0].attn)
    assert len(pickle.dumps(part)) < len(pickle.dumps(model)) / 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("vit", SMALL),
        ("vit", LARGE),
        ("hf-dinov2", SMALL),
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
    assert is_active(model)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_a_compiled_dense_model_has_the_graph_of_the_host() -> None:
    model = make_model("vit")

    def graph_of(model: nn.Module) -> str:
        graphs: list[str] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(str(graph.graph).replace("_orig_mod", ""))
            return graph

        torch.compiler.reset()
        torch.compile(model, fullgraph=True, backend=backend)(pixels_of(SMALL))
        assert len(graphs) == 1
        return graphs[0]

    host = graph_of(model)
    patch(model, **TILES)
    assert graph_of(model) == host
    assert not is_active(model)
    torch.compiler.reset()


@torch.no_grad()
def test_exported_models_of_both_sizes() -> None:
    for size in (SMALL, LARGE):
        model = patch(timm_model("vit_tiny_patch16_224", **VIT | {"img_size": size}), **TILES)
        shapes = ({0: torch.export.Dim("batch", min=1, max=16)},)
        example, pixels = pixels_of(size, 2), pixels_of(size, 3)
        program = torch.export.export(model.eval(), (example,), dynamic_shapes=shapes).module()
        assert is_active(model) == (size == LARGE)
        torch.testing.assert_close(program(pixels), model(pixels))


@pytest.mark.filterwarnings("ignore")
def test_a_trace_of_a_dense_model_is_refused() -> None:
    model = patch(make_model("vit"), **TILES)
    with pytest.raises(RuntimeError, match=r"torch\.compile or torch\.export"):
        torch.jit.trace(model, pixels_of(SMALL))


def gradients(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Of a dense pass and a tiled one, both before one backward pass."""
    model.zero_grad()
    first = forward(pixels_of(SMALL)).square().sum()
    second = forward(pixels_of(LARGE)).square().sum()
    (first + 1e-2 * second).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_dense_and_tiled_passes(reentrant: bool) -> None:
    expected_model = patch(make_model("vit"), **TILES)
    expected = gradients(expected_model, expected_model)
    model: Any = patch(make_model("vit"), **TILES)

    def forward(pixels: Tensor) -> Tensor:
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(pixels))))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return model.forward_head(model.norm(x))

    for mine, theirs in zip(gradients(model, forward), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert is_active(model)


def test_a_wrapper_and_hooks_of_others_run_in_both_states() -> None:
    model, calls = make_model("vit"), []
    patch(model, **TILES)
    layer = model.blocks[1].attn
    own = layer.forward

    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        calls.append("wrapper")
        return own(*args, **kwargs)

    layer.forward = wrapper
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.proj.register_forward_hook(lambda *_: calls.append("projection"))
    forced = patch(make_model("vit"), allow_dense=False, **TILES)
    for size in (SMALL, LARGE, SMALL, LARGE):
        calls.clear()
        output = run(model, pixels_of(size))
        assert calls == ["before", "wrapper", "projection"]
        if size == LARGE:
            assert torch.equal(output, run(forced, pixels_of(size)))
    unpatch(model)
    assert vars(layer)["forward"] is wrapper
    calls.clear()
    assert torch.equal(run(model, pixels_of(SMALL)), run(make_model("vit"), pixels_of(SMALL)))
    assert calls == ["before", "wrapper", "projection"]


def test_dense_layers_accept_what_their_host_does() -> None:
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
    expected = weights(pixels, output_attentions=True).attentions
    patch(weights, **TILES)
    for _ in range(2):
        found = weights(pixels, output_attentions=True).attentions
        assert len(found) == HF["num_hidden_layers"]
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        weights(pixels_of(LARGE), interpolate_pos_encoding=True)
        assert is_active(weights)


def replica_of(model: nn.Module) -> nn.Module:
    """A replica with the same weights, as nn.DataParallel makes it."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in copies.items():
        replica._parameters = dict(module._parameters)
        replica._buffers = dict(module._buffers)
        replica._modules = {
            name: None if child is None else copies[child]
            for name, child in module._modules.items()
        }
    return copies[model]


def test_replicas_are_dense_in_the_pass_that_activates_tiles() -> None:
    model, pixels = make_model("vit"), pixels_of(LARGE)
    full = run(model, pixels)
    tiled = run(patch(copy.deepcopy(model), allow_dense=False, **TILES), pixels)
    patch(model, **TILES)
    assert torch.equal(run(replica_of(model), pixels), full)
    assert is_active(model)
    assert torch.equal(run(replica_of(model), pixels), tiled)


def test_layers_with_equal_options_share_one_decision_for_each_size() -> None:
    model = patch(make_model("vit"), **TILES)
    first, second, third = screened_layers(model)
    assert first.decision is second.decision is third.decision
    run(model, pixels_of(SMALL))
    run(model, pixels_of(LARGE))
    decided = {key[1]: choice for key, choice in first.decision.choices.items()}
    assert decided.keys() == {1 + 64, 1 + 4096}
    assert decided[1 + 64].reason.startswith("auto: dense attention") and decided[1 + 4096] is None


# Sides of images whose exact attention is native: 324 tokens, in four heads.
NATIVE_SIZE = 72
needs_native = pytest.mark.skipif(CPU_BACKEND != "native", reason="needs the native kernels")


@needs_native
@pytest.mark.parametrize("options", [{}, {"error": 0.0}, {"leaves": 1.0}])
@pytest.mark.parametrize("name", ["vit", "hf-dinov2", "embedded"])
def test_exact_attention_is_native_where_it_is_faster(name: str, options: dict[str, Any]) -> None:
    sizes = SIZED.get(name, {})
    model, size = make_model(name), NATIVE_SIZE if name in SIZED else 112
    pixels = pixels_of(size)
    full = run(model, pixels, **sizes)
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
    assert (stats.form, stats.backend) == ("dense", "native") and {row.reason for row in rows} == {
        stats.reason
    }
    calls = without_embedded(calls_into_bmfa(lambda: run(model, pixels, **sizes)))
    assert not any("screened_attention" in call or "BlockGrid.run" in call for call in calls)
    assert torch.equal(run(unpatch(model), pixels, **sizes), full)


def first_tensor(output: Any) -> Tensor:
    """The output of a model, which transformers wraps."""
    return output if isinstance(output, Tensor) else output[0]


@needs_native
@pytest.mark.parametrize("name", HOSTS)
def test_what_the_native_kernel_cannot_run_has_the_bits_of_the_host(name: str) -> None:
    """Gradients, float64, masks and dropout, also while the overrides are active."""
    model, pixels, sizes = make_model(name), pixels_of(NATIVE_SIZE), SIZED[name]
    with_gradients = first_tensor(model(pixels, **sizes))
    double = run(copy.deepcopy(model).double(), pixels.double(), **sizes)
    patch(model, layers="all")
    run(model, pixels, **sizes)
    assert is_active(model)
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
