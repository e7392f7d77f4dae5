"""The figure of a plan, drawn from its record alone."""

from dataclasses import replace

import pytest
from tests.models.tuned_models import plan_for, small_model

from bmfa.models.search import LayerSetting
from bmfa.records import Record

pytest.importorskip("matplotlib")
from bmfa.evidence.tuning.figures import tuning

DENSE = tuple(LayerSetting(i, None, 1.0, 0.0) for i in range(3))


def plan(errors=(0.01, 0.02, 0.03, 0.05, 0.1, 0.2)):
    layers = 3
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


def test_every_kind_of_plan_can_be_drawn():
    for change in (
        {"measure": "logits"},
        {"measure": "lost_overlap", "predicted_change": None},
        {"candidates": DENSE, "layers": DENSE},
    ):
        made = replace(plan(), **change)
        checks = tuple(
            replace(
                made.checks[0],
                predicted_change=made.predicted_change,
                validation_change=measured,
                chosen=measured == 0.01,
            )
            for measured in (None, 0.05, 0.01)
        )
        record = replace(made, checks=checks).to_record()
        for narrow in (False, True):
            assert tuning(record, narrow=narrow).startswith("<svg")


def test_a_record_of_another_experiment_is_refused():
    with pytest.raises(ValueError, match="bmfa tune --json"):
        tuning.png(Record("synthetic", {}, [{"method": "a"}]))
