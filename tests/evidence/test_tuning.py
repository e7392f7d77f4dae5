"""The figure of a plan, drawn from its record alone."""

from dataclasses import replace

import pytest
from tests.models.test_plan import plan_for, small_model

from bmfa.models.plan import LayerSetting
from bmfa.records import Record

pytest.importorskip("matplotlib")
from bmfa.evidence.tuning.figures import tuning

DENSE = tuple(LayerSetting(i, None, 1.0, 0.0) for i in range(3))


def plan(layers: int = 3, errors=(0.01, 0.02, 0.03, 0.05, 0.1, 0.2)):
    dense = [LayerSetting(i, None, 2.0, 0.0) for i in range(layers)]
    tiled = [
        LayerSetting(i, e, 2.0 - 5 * e, e / (i + 2) if i else None)
        for i in range(layers)
        for e in errors
    ]
    chosen = (dense[0], *(s for s in tiled if s.layer and s.error == 0.03))
    made = plan_for(small_model(), {})
    return replace(made, layers=chosen, candidates=(*dense, *tiled))


def test_the_figure_shows_targets_tolerance_and_speed():
    svg = tuning(plan().to_record())
    for text in (".01", ".2", "1.33x", "1.60x", "layer", "1.6", "1.7", "112x112 px, float32, cpu"):
        assert text in svg


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"measure": "logits"},
        {"measure": "lost_overlap", "predicted_change": None},
        {"candidates": DENSE, "layers": DENSE},
    ],
)
def test_every_kind_of_plan_can_be_drawn(change, narrow):
    made = replace(plan(), **change)
    predicted = made.predicted_change
    checks = tuple(
        made.checks[0]
        | {"predicted_change": predicted, "measured_change": measured, "chosen": measured == 0.01}
        for measured in (0.05, 0.04, 0.01)
    )
    assert tuning(replace(made, checks=checks).to_record(), narrow=narrow).startswith("<svg")


def test_a_plan_of_many_layers_can_be_drawn():
    assert tuning.png(plan(48).to_record()).startswith(b"\x89PNG")


def test_a_record_of_another_experiment_is_refused():
    with pytest.raises(ValueError, match="bmfa tune --json"):
        tuning(Record("synthetic", {}, [{"method": "a"}]))
