"""Summaries of patched and reduced models: what ran, why, and at what cost to the forward pass."""

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bmfa
from bmfa.attention.result import ErrorEstimate
from bmfa.models import BlockSummary, LayerSummary, patch, record, reduce, summary, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.screened_layer import observe
from models.host_models import CPU_BACKEND, TIMM, TRANSFORMERS, images, make_model, pixels_of, run
from models.packed_models import pixtral_inputs
from models.supported_models import make_supported

SMALL, LARGE = 32, 256  # 64 tokens run dense, 4,096 tokens use tiles


def layer_rows(model: nn.Module) -> list[LayerSummary]:
    return [row for row in summary(model) if isinstance(row, LayerSummary)]


@pytest.mark.parametrize("name", ["vit", "hf-dinov2"])
@torch.no_grad()
def test_a_summary_says_what_ran_with_its_density_and_error(name: str) -> None:
    model = patch(make_model(name), leaves=0.2, layers=[0, 2])
    assert [row.form for row in layer_rows(model)] == ["unknown"] * 3
    assert "not finished a forward pass in this thread" in str(summary(model))

    run(model, pixels_of(SMALL))
    first, unpatched, _ = rows = layer_rows(model)
    assert [(row.form, row.backend, row.density) for row in rows] == [("dense", "host", 1.0)] * 3
    assert first.reason.startswith("auto: dense attention is as fast below")
    assert unpatched.reason == "the layer is not patched" and unpatched.settings is None
    assert first.error is None and first.settings == "leaves=0.2"

    with record(model, trees=False) as recording:
        run(model, pixels_of(LARGE))
    first, unpatched, last = layer_rows(model)
    for row in (first, last):
        stats = recording[row.layer].stats[0]
        assert (row.form, row.backend) == (stats.form, stats.backend)
        assert row.reason == f"{stats.call.expand} of 64 tiles are expanded"
        assert row.density == pytest.approx(stats.density)
        assert row.error == stats.error and isinstance(row.error, ErrorEstimate)
        assert row.density < 1 and row.error.estimate > 0
    assert last.density > 0
    assert unpatched.backend == "host"

    run(model, pixels_of(SMALL))
    assert [row.backend for row in layer_rows(model)] == ["host"] * 3


@torch.no_grad()
def test_rules_and_densecalls_inside_bmfa() -> None:
    model = patch(make_model("vit"), rule="optimal:0.005", layers=[1])
    run(model, images())
    row = layer_rows(model)[1]
    assert (row.form, row.density, row.error) == ("tree", None, None)
    assert "rule=optimal:0.005" in row.settings
    patch(model, error=0.1, layers=[1])
    with observe(model, lambda *_: None):  # an observed layer calls bmfa where it runs dense
        run(model, images())
    row = layer_rows(model)[1]
    assert (row.form, row.backend, row.density) == ("dense", "dense", 1.0)
    assert row.error is not None and row.error.estimate == 0


@torch.no_grad()
def test_the_density_counts_valid_tokens_as_the_statistics_do() -> None:
    model: Any = patch(make_model("vit"), leaves=0.3, allow_dense=False, layers=[1])
    # Block 1 receives a mask; the others run without one.
    valid = torch.ones(2, 1 + 64, dtype=torch.bool)
    valid[0, 40:] = False
    block = model.blocks[1].attn
    forward = type(block).forward
    block.forward = lambda x, **_: forward(block, x, attn_mask=valid[:, None, None])
    with record(model, trees=False) as recording:
        run(model, images())
    stats = recording[1].stats[0]
    assert stats.density == pytest.approx(layer_rows(model)[1].density)


@torch.no_grad()
def test_tables_say_what_a_target_came_to_also_in_notebooks() -> None:
    model = patch(make_model("vit"), error=0.5, allow_dense=False, layers=[1])
    run(model, pixels_of(LARGE))
    row = layer_rows(model)[1]
    assert row.reason == f"error 0.5 expands {100 * row.density:.0f} %"
    page = summary(model)._repr_html_()
    assert page.count("<tr>") == 4 and f"<td>{row.reason}</td>" in page
    patch(model, error=1e-6, allow_dense=False, layers=[1])
    run(model, pixels_of(LARGE))
    assert "attention is exact, because" in layer_rows(model)[1].reason


@torch.no_grad()
def test_only_a_finished_pass_is_shown() -> None:
    model: Any = patch(make_model("vit"), leaves=0.05, layers="all")
    run(model, pixels_of(LARGE))
    before = str(summary(model))

    def fail(*_: Any) -> None:
        raise ValueError("stop")

    for size in (SMALL, LARGE):
        handle = model.blocks[1].register_forward_hook(fail)
        with pytest.raises(ValueError, match="stop"):
            run(model, pixels_of(size, 2))
        handle.remove()
        assert str(summary(model)) == before
    run(model, pixels_of(SMALL, 2))
    assert "tokens (2, 65, 24)" in str(summary(model))


@torch.no_grad()
def test_passes_interleaved_block_by_block_keep_their_own_entries() -> None:
    model: Any = patch(make_model("vit"), leaves=0.05, layers="all")
    x, y = (
        model.norm_pre(model._pos_embed(model.patch_embed(pixels_of(size))))
        for size in (LARGE, LARGE + 32)
    )
    for block in model.blocks:
        x, y = block(x), block(y)
    assert "tokens (1, 5185, 24)" in str(summary(model))  # the pass of y finished last
    counts = [row.calls[0].stats.expanded_count.shape[-1] for row in layer_rows(model)]
    assert counts == [81] * 3  # 72 x 72 tokens in 9 x 9 tiles, not 64


def test_every_thread_has_its_own_last_pass() -> None:
    model = patch(make_model("vit"), leaves=0.05, layers="all")
    run(model, pixels_of(LARGE))
    found: list[list[str]] = []

    def other() -> None:
        found.append([row.form for row in layer_rows(model)])
        run(model, pixels_of(SMALL))
        found.append([row.form for row in layer_rows(model)])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [["unknown"] * 3, ["dense"] * 3]
    assert [row.form for row in layer_rows(model)] == ["tiled"] * 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks_are_no_pass(reentrant: bool) -> None:
    model: Any = patch(make_model("vit"), rule="fixed-depth:2", layers="all")
    x = model.norm_pre(model._pos_embed(model.patch_embed(images())))
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    before = [row.calls[0] for row in layer_rows(model)]
    x.square().sum().backward()
    after = [row.calls[0] for row in layer_rows(model)]
    assert all(x is y for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "options", [{"leaves": 0.05}, {"error": 0.1}, {"rule": "fixed-depth:2"}, {"error": 0.0}]
)
def test_queries_keys_and_values_are_not_kept(options: dict[str, Any], grad: bool) -> None:
    model = patch(make_model("vit"), layers=[1], **options)
    kept: list[weakref.ref[Any]] = []

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        kept.append(weakref.ref(output.untyped_storage()))

    model.blocks[1].attn.qkv.register_forward_hook(watch)
    with torch.set_grad_enabled(grad):
        size = SMALL if "rule" in options else LARGE
        model(pixels_of(size))
    gc.collect()
    assert len(kept) == 1 and kept[0]() is None
    assert layer_rows(model)[1].form != "unknown"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_a_compiled_pass_is_reported_as_unknown() -> None:
    for size in (SMALL, LARGE):
        model = patch(make_model("vit"), leaves=0.05, layers=[1])
        run(model, pixels_of(size))
        assert layer_rows(model)[1].form == ("dense" if size == SMALL else "tiled")
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        run(compiled, pixels_of(size))
        run(compiled, pixels_of(size))
        rows = layer_rows(model)
        assert {(row.form, row.density, row.error) for row in rows} == {("unknown", None, None)}
        assert all("ran in a compiled graph" in row.reason for row in rows)
        run(model, pixels_of(size))
        assert layer_rows(model)[1].form == ("dense" if size == SMALL else "tiled")
        assert "passes inside a compiled graph are not in this table" in str(summary(model))
    torch.compiler.reset()


@torch.no_grad()
def test_copies_and_pickles_start_without_a_pass() -> None:
    for change in (lambda m: patch(m, leaves=0.05, layers=[1]), lambda m: reduce(m, "tome:4")):
        model = change(make_model("vit"))
        run(model, pixels_of(SMALL))
        text, shown = str(summary(model)), repr(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert "not finished a forward pass" in str(summary(other))
            assert repr(other) == shown
            run(other, pixels_of(SMALL))
            assert str(summary(other)) == text
        assert str(summary(model)) == text


@torch.no_grad()
def test_reduced_models_show_the_tokens_of_each_block() -> None:
    model = reduce(make_model("vit"), bmfa.merging.FreeEnergy([0, 20, 5]))
    assert [row.tokens for row in summary(model)] == [None] * 3
    run(model, images())
    table = summary(model)
    assert table.rows[1] == BlockSummary(1, "free-energy:0,20,5", 45, 20)
    assert [row.tokens for row in table] == [65, 45, 40]
    assert table.rows[2].as_dict()["removed"] == 5
    assert str(table).splitlines()[1].split() == ["block", "tokens", "removed"]


@pytest.mark.parametrize("name", sorted(TIMM | TRANSFORMERS))
def test_the_repr_of_a_patched_layer_says_its_settings(name: str) -> None:
    model = make_model(name)
    before = repr(model)
    patch(model, rule="gamma:0.02", layers=[1], max_depth=3)
    assert repr(model).count("bmfa: rule=gamma:0.02, max_depth=3") == 1
    patch(model, layers="all")
    assert all(
        "bmfa: error=0.03" in repr(layer) for layer in find_vision_transformer(model).attentions
    )
    unpatch(model)
    assert repr(model) == before
    assert not any("extra_repr" in vars(module) for module in model.modules())


def test_the_repr_of_reduced_layers_and_of_wrapped_ones() -> None:
    model: Any = make_model("vit")
    model.blocks[0].attn.extra_repr = lambda: "mine"
    reduce(model, "tome:4")
    assert all("bmfa: tome:4" in repr(block.attn) for block in model.blocks[1:])
    unpatch(model)
    assert model.blocks[0].attn.extra_repr() == "mine" and "bmfa" not in repr(model)


def test_models_that_are_not_changed_are_refused() -> None:
    with pytest.raises(ValueError, match="neither patched nor reduced"):
        summary(make_model("vit"))
    with pytest.raises(TypeError, match="model is str"):
        summary("vit")  # type: ignore[arg-type]


@torch.no_grad()
def test_packed_images_have_a_call_for_each_grid() -> None:
    model, inputs = make_supported("pixtral"), pixtral_inputs()
    patch(model, leaves=0.5, allow_dense=False, layers=[0, 2])
    for _ in range(2):
        model(**inputs)
        first, second, _ = layer_rows(model)
        assert (first.form, first.backend) == ("tiled", CPU_BACKEND)
        assert len(first.calls) == 2 and first.density is not None and first.error is not None
        assert (second.backend, second.reason) == ("host", "the layer is not patched")
