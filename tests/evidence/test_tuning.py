"""The figure of a plan, drawn from its record alone."""

from dataclasses import replace

import pytest
from tests.models.tuned_models import plan_for, small_model

from bmfa.models.search import LayerSetting
from bmfa.records import Record

pytest.importorskip("matplotlib")
from bmfa.evidence.tuning.figures import tuning


def plan(errors=(0.01, 0.02, 0.03, 0.05, 0.1, 0.2)):
    """Layers 1 and 2 have an error of 0.03."""
    made = plan_for(small_model(), {})
    tiled = [
        LayerSetting(i, e, 2.0 - 5 * e, e / (i + 2) if i else None)
        for i in range(3)
        for e in errors
    ]
    settings = (None, 0.03, 0.03) if 0.03 in errors else (None,) * 3
    checks = (replace(made.checks[0], settings=settings),)
    dense = (LayerSetting(i, None, 2.0, 0.0) for i in range(3))
    return replace(made, candidates=(*dense, *tiled), checks=checks)


def test_the_figure_shows_targets_tolerance_and_speed():
    svg = tuning(plan().to_record())
    for text in (".01", ".2", "1.33x", "1.60x", "layer", "1.6", "1.7", "112x112 px, float32, cpu"):
        assert text in svg


def test_every_kind_of_plan_can_be_drawn():
    for made in (
        replace(plan(), measure="logits"),
        replace(plan(), measure="lost_overlap"),
        plan(errors=()),
    ):
        predicted = None if made.measure == "lost_overlap" else 0.02
        checks = tuple(
            replace(
                made.checks[0],
                predicted_change=predicted,
                validation_change=measured,
                chosen=measured == 0.01,
            )
            for measured in (0.05, 0.01)
        )
        record = replace(made, checks=checks).to_record()
        for narrow in (False, True):
            assert tuning(record, narrow=narrow).startswith("<svg")


def test_a_record_of_another_experiment_is_refused():
    with pytest.raises(ValueError, match="bmfa tune --json"):
        tuning.png(Record("synthetic", {}, [{"method": "a"}]))
