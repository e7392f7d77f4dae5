"""Rules at equal leaves and policies at equal operations: matching, intervals, rows and the chapters."""

from dataclasses import replace

import pytest
import torch

import model_records
from bmfa.data import draw_badge_batch
from bmfa.evidence.comparison import run as comparison
from bmfa.evidence.comparison.run import match_value
from bmfa.evidence.metrics import mask_iou
from bmfa.evidence.page.build import all_claims, build_page
from bmfa.evidence.page.claims import Verdict
from bmfa.evidence.page.record_set import RecordSet
from bmfa.models import load_model, patch, unpatch
from bmfa.models.embedded import preprocess


def test_rows_are_matched_complete_and_those_of_the_patched_model():
    options = {"rules": ["fixed-blocks", "gamma", "optimal"], "leaves": [25.0]}
    options |= {"policies": ["free-energy", "random-pool"], "baselines": ["tome:24"]}
    record = comparison.run(load_model("embedded"), **options, images=6)
    full, fixed, gamma, optimal, tome, energy, random = record.rows
    assert record.settings["images"] == 6
    assert (full["method"], full["agreement_percent"], full["output_kl"]) == ("full", 100.0, 0.0)
    assert (fixed["method"], fixed["leaf_percent"]) == ("fixed-blocks:2", 25.0)
    for row in (gamma, optimal):
        assert abs(row["leaf_percent"] - 25.0) < 6  # matched on other images
    assert gamma["gain_pp"] == 0.0
    for row in (energy, random):
        assert row["baseline"] == tome["method"] == "tome:24"
        assert row["gflops"] == pytest.approx(tome["gflops"], rel=comparison.COST_TOLERANCE)
    assert tome["gflops"] < 0.8 * full["gflops"]
    for row in (gamma, optimal, energy, random):
        assert row["gain_low_pp"] <= row["gain_pp"] <= row["gain_high_pp"]
        base = gamma if row["kind"] == "rule" else tome
        difference = row["agreement_percent"] - base["agreement_percent"]
        assert row["gain_pp"] == pytest.approx(difference)

    model = load_model("embedded").model
    pixels, labels, masks = draw_badge_batch(0, range(6))
    with torch.inference_mode():
        before = model(preprocess(pixels)).argmax(1)
        patch(model, rule="fixed-blocks:2", layers="all")
        logits, found = model.forward_dense(preprocess(pixels))
        unpatch(model)
    agreeing = (logits.argmax(1) == before).double().mean()
    right = (logits.argmax(1) == torch.from_numpy(labels)).double().mean()
    assert fixed["agreement_percent"] == pytest.approx(100 * agreeing.item())
    assert fixed["top1_percent"] == pytest.approx(100 * right.item())
    overlap = mask_iou(found > 0, torch.from_numpy(masks)).mean().item()
    assert fixed["mask_iou"] == pytest.approx(overlap, abs=1e-3)


def test_refusals():
    model = load_model("embedded")
    few = {"policies": [], "baselines": [], "images": 1}
    with pytest.raises(TypeError, match=r"the model is Linear; pass load_model\('embedded'\)"):
        comparison.run(replace(model, model=torch.nn.Linear(1, 1)), **few)
    for rule, share in (("delta", 25.0), ("gamma", 12)):
        with pytest.raises(ValueError, match=rf"rule '{rule}' at {share} % leaves is unknown"):
            comparison.run(model, rules=[rule], leaves=[share], **few)


def test_a_value_is_found_for_rising_and_falling_measures_and_nearest_to_a_step():
    for target in (0.02, 3.0, 700.0):
        rising = match_value(lambda value: value**2, 1.0, target, 0.01 * target)
        falling = match_value(lambda value: 1 / value, 1.0, target, 0.01 * target)
        assert rising**2 == pytest.approx(target, rel=0.01)
        assert 1 / falling == pytest.approx(target, rel=0.01)
    seen = []

    def step(value):
        seen.append(value)
        return 0.0 if value < 0.3 else 1.0

    assert step(match_value(step, 0.9, 0.6, 0.01, limits=(0.1, 1.0))) == 1.0
    assert len(seen) < 30
    assert 0.1 <= min(seen) <= max(seen) <= 1.0
    assert match_value(lambda value: value, 0.9, 5.0, 0.01, limits=(0.5, 1.0)) == 1.0


def test_the_chapters_and_their_verdicts_follow_the_numbers():
    for options, leaves, merging in (
        ({}, Verdict.AHEAD, Verdict.AHEAD),
        ({"lead": 4.0, "gain": (1.0, -2.0, 4.0)}, Verdict.LEVEL, Verdict.LEVEL),
        ({"gain": (-5.0, -8.0, -2.0)}, Verdict.AHEAD, Verdict.DIFFERS),
    ):
        claims = all_claims(RecordSet([model_records.comparison(**options)]))
        found = {claim.claim: claim.verdict for claim in claims}
        assert [v for text, v in found.items() if "at equal leaves" in text] == [leaves]
        assert [v for text, v in found.items() if "Merging by free energy" in text] == [merging]
    page = build_page([model_records.comparison()])
    leaves = model_records.page_text(page, "equal-leaves")
    assert "agreement of the rules is 61.0 to 82.0 %, the output KL 0.180 to 0.390" in leaves
    assert "minus that of Algorithm 1 is 12.0 points (95 % interval 9.0 to 15.0)" in leaves
    merging = model_records.page_text(page, "equal-operations")
    assert "By agreement: free-energy:0.9 85.0 %, tome:16 80.0 %." in merging
    assert "minus that of tome:24 is 5.0 points (95 % interval 2.0 to 8.0)" in merging
