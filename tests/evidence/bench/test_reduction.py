"""bmfa bench reduction: halves, pairs of images and intervals."""

import pytest

from bmfa.data.classification import EmbeddedImages
from bmfa.evidence.bench import reduction
from bmfa.merging import parse
from bmfa.models import load_model


def test_schedules_are_reported_on_the_half_that_did_not_choose() -> None:
    loaded = load_model("embedded")
    record = reduction.run(loaded, EmbeddedImages(6), ["tome:8"])
    assert record.experiment == "reduction" and record.settings["images"] == 6
    keys = ("schedule", "chosen_on", "reported_on", "images")
    assert [tuple(row[key] for key in keys) for row in record.rows] == [
        ("baseline", None, "odd", 3),
        ("fixed", None, "odd", 3),
        ("tuned", "even", "odd", 3),
        ("baseline", None, "even", 3),
        ("fixed", None, "even", 3),
        ("tuned", "odd", "even", 3),
        ("baseline", None, "both", 6),
        ("fixed", None, "both", 6),
        ("tuned", "the other half", "both", 6),
    ]
    limit = record.rows[0]["gflops"]
    assert all(row["gflops"] <= limit * (1 + 1e-6) for row in record.rows)
    for kind in ("baseline", "fixed", "tuned"):
        odd, even, both = (row for row in record.rows if row["schedule"] == kind)
        assert both["output_kl"] == pytest.approx((odd["output_kl"] + even["output_kl"]) / 2)
        parse(odd["method"])


def test_too_few_images_are_refused() -> None:
    with pytest.raises(ValueError, match="3 images can be read; pass at least four"):
        reduction.run(load_model("embedded"), EmbeddedImages(3), ["tome:8"])
    with pytest.raises(ValueError, match="unknown"):
        reduction.run(load_model("embedded"), EmbeddedImages(4), ["nonsense:8"])
