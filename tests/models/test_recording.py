"""Recordings of screened layers: trees, errors, attention weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bmfa import rules
from bmfa.attention.result import Screened
from bmfa.models import patch, record
from bmfa.models import recording as recording_module
from bmfa.models.screened_layer import LayerInputs, observe
from models.host_models import (
    images,
    make_model,
    run,
)


def test_records_hold_trees_errors_and_attention() -> None:
    model, pixels = make_model("registers"), images()
    with pytest.raises(ValueError, match="not patched"), record(model):
        pass
    patch(model, rule=rules.Optimal(0.005), layers="last-2")
    with record(model, attention=True) as recording:
        run(model, pixels)
        run(model, pixels)
    layer = recording[2]
    assert repr(recording) == "Recording(calls by layer: {1: 2, 2: 2}, trees=True, attention=True)"
    assert repr(layer).startswith("LayerRecord(2 stats, 2 trees,") and len(repr(layer)) < 120
    assert len(layer.trees) == len(layer.errors) == len(layer.attention) == 2
    assert layer.errors[0].shape == layer.leaf_ratios[0].shape == (2, 3, 69)
    for weights in (layer.attention[0], layer.full_attention[0]):
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 69))
    spatial, coarse = (w[..., 5:] for w in (layer.full_attention[0], layer.attention[0]))
    p, q = (w / w.sum(-1, keepdim=True) for w in (spatial, coarse))
    torch.testing.assert_close((q * (q / p).log()).sum(-1), layer.errors[0], rtol=1e-2, atol=1e-5)
    ratios = torch.cat([r for index in (1, 2) for r in recording[index].leaf_ratios])
    assert recording.leaf_ratio == pytest.approx(float(ratios.mean()))
    with pytest.raises(KeyError, match="recorded are 1, 2"):
        recording[0]
    run(model, pixels)
    assert len(layer.trees) == 2


def test_recorded_attention_is_what_the_layer_used() -> None:
    model, used = make_model("vit"), []
    patch(model, rule=rules.Optimal(leaves=0.3), layers=[1])

    def watched(inputs: LayerInputs, screened: Screened) -> None:
        used.append((inputs.v, screened.output))

    with record(model, attention=True) as recording:
        run(model, images())
    with observe(model, watched):
        run(model, images())
    (value, output), layer = used[0], recording[1]
    torch.testing.assert_close(layer.attention[0] @ value, output, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(layer.attention[0], layer.full_attention[0])


def test_attention_over_tiles_has_no_weights_to_record() -> None:
    model = patch(make_model("vit"), error=0.5, allow_dense=False, layers=[1])
    with record(model) as recording:
        run(model, images())
    assert recording[1].stats[0].form == "tiled"
    with (
        record(model, attention=True) as recording,
        pytest.raises(ValueError, match=r"layer 1 attends over tiles.*record\(model\) without"),
    ):
        run(model, images())
    patch(model, error=0.5, layers=[1])  # "auto" is dense on a grid this small
    with record(model, attention=True) as recording:
        run(model, images())
    assert recording[1].stats[0].form == "dense"
    assert torch.equal(recording[1].attention[0], recording[1].full_attention[0])


def test_random_rules_differ_between_layers() -> None:
    model = patch(make_model("vit"), rule="random-quadrants:0.5", layers="all")
    with record(model) as recording:
        run(model, images())
    first, second = (recording[index].trees[0].split for index in (0, 1))
    assert not torch.equal(first, second)


def test_statistics_alone_build_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(make_model("vit"), rule=rules.Optimal(0.005), layers=[1])

    def refuse(self: Screened) -> None:
        raise AssertionError("a tree was built")

    monkeypatch.setattr(Screened, "tree", property(refuse))
    with record(model, trees=False) as recording:
        run(model, images())
    assert len(recording[1].stats) == 1 and recording[1].trees == []
    with pytest.raises(ValueError, match="no trees were recorded"):
        _ = recording.leaf_ratio


@pytest.mark.parametrize("name", ["registers", "no-class-token"])
@pytest.mark.parametrize(
    "elements", [64, 1000, 1 << 20]
)  # single queries, several, all heads at once
def test_streamed_errors_are_those_of_the_score_matrix(
    name: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patch(make_model(name), rule=rules.Optimal(0.005), layers=[1])
    monkeypatch.setattr(recording_module, "CHUNK_ELEMENTS", elements)
    expected: list[Tensor] = []

    def compare(inputs: LayerInputs, screened: Screened) -> None:
        scores = inputs.q.float() @ inputs.k.float().transpose(-2, -1) * inputs.scale
        expected.append(screened.tree.error(scores[..., inputs.prefix :]))
        torch.testing.assert_close(
            recording_module._tree_errors(inputs, screened.tree), expected[-1], rtol=1e-5, atol=1e-7
        )

    with observe(model, compare):
        run(model, images())
    with record(model) as recording:
        run(model, images())
    assert len(expected) == 1 and expected[0].min() < expected[0].max()
    torch.testing.assert_close(recording[1].errors[0], expected[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "side"), [({"leaves": 0.2}, 256), ({"rule": "fixed-depth:3"}, 128)]
)
@torch.no_grad()
def test_recording_forms_no_score_matrix(options: dict[str, Any], side: int) -> None:
    model = patch(make_model("vit"), layers=[1], **options)
    pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    tokens, largest = (side // 4) ** 2, []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
                largest.append(out.numel())
            return out

    with Products():
        run(model, pixels)
    forward = max(largest, default=0)
    with record(model) as recording, Products():
        run(model, pixels)
    assert recording[1].stats[0].form in ("tiled", "tree") and len(recording[1].trees) == 1
    assert max(largest, default=0) <= max(1 << 20, forward) < 3 * tokens**2
