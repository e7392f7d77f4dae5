"""The search for failures: equal leaves, errors by their definition, and sentences that hold."""

import numpy as np
import pytest
import torch

from bmfa.energy import gap, refinement_score
from bmfa.evidence.failures.chapter import failures
from bmfa.evidence.failures.explanations import describe, explain
from bmfa.evidence.failures.fields import FIELDS, draw_field
from bmfa.evidence.failures.run import LEAST_LEAVES, READS, SETTINGS, run
from bmfa.evidence.methods import family
from bmfa.evidence.page.build import build_page
from bmfa.grid import Grid
from bmfa.records import Record
from model_records import page_text

SUMMARIES = ("block-mean", "mean-variance")


@pytest.fixture(scope="module")
def record() -> Record:
    return run(fields=24, poses=8, scenes=6)


def roles(record: Record, rule: str) -> dict[str, dict]:
    return {row["role"]: row for row in record.rows if row["rule"] == rule}


def attention_error(row: dict) -> float:
    """E of the leaves by its definition, in NumPy."""
    scores = np.array(row["scores"]).reshape(row["height"], row["width"])
    means = np.empty_like(scores)
    covered = np.zeros(scores.shape, dtype=int)
    for top, left, bottom, right in row["boxes"]:
        means[top:bottom, left:right] = scores[top:bottom, left:right].mean()
        covered[top:bottom, left:right] += 1
    assert (covered == 1).all()
    return float(np.log(np.exp(scores).sum()) - np.log(np.exp(means).sum()))


def test_every_rule_is_clearly_worse_than_another_at_equal_leaves(record: Record) -> None:
    assert list(dict.fromkeys(row["rule"] for row in record.rows)) == [*SETTINGS, *SUMMARIES]
    for rule in SETTINGS:
        found = roles(record, rule)
        fails, better = found["fails"], found["better"]
        assert family(fails["method"]) == rule
        assert READS[family(better["method"])] <= max(1, READS[rule])
        assert better["leaves"] <= fails["leaves"]
        assert fails["leaves"] >= LEAST_LEAVES
        # Half of the error and at least 0.2 nats, or 18 % of the mass, are clear.
        assert better["error"] < fails["error"] / 2
        assert fails["error"] - better["error"] > 0.2
        if rule != "optimal":
            assert found["optimal"]["leaves"] <= fails["leaves"]
        for row in found.values():
            assert len(row["boxes"]) == row["leaves"]
            assert row["error"] == pytest.approx(attention_error(row), abs=1e-9)
            assert row["gap"] == pytest.approx(float(gap(torch.tensor(row["scores"]).double())))


def test_no_field_is_shown_twice(record: Record) -> None:
    shown = [tuple(roles(record, rule)["fails"]["scores"]) for rule in SETTINGS]
    assert len(set(shown)) == len(shown)


def test_one_leaf_summaries_fail_where_the_other_is_nearer(record: Record) -> None:
    for rule, other in (SUMMARIES, SUMMARIES[::-1]):
        found = roles(record, rule)
        assert found["better"]["method"] == other
        assert abs(found["better"]["error"]) < abs(found["fails"]["error"]) / 2
    assert roles(record, "mean-variance")["fails"]["error"] < 0


def test_the_search_is_deterministic(record: Record) -> None:
    assert record.rows == run(fields=24, poses=8, scenes=6).rows
    assert Record.from_json(record.to_json()).rows == record.rows


def test_sentences_have_the_numbers_of_the_record(record: Record) -> None:
    fails = roles(record, "gamma")["fails"]
    tokens = torch.from_numpy(describe(fails)["worst"]["scores"]).contiguous()
    score = refinement_score(tokens.ravel(), Grid(*tokens.shape).partition(1))
    # It is not split because its score is at most the threshold, and yet its gap is large.
    assert float(score) <= float(fails["method"].partition(":")[2])
    assert f"a gap of {float(gap(tokens.ravel())):.2f}, and stays one leaf" in explain(fails)
    for rule in (*SETTINGS, *SUMMARIES):
        text = explain(roles(record, rule)["fails"])
        assert 40 < len(text) < 300 and text.endswith(".")
        assert "nan" not in text and "{" not in text
    coin = roles(record, "random-quadrants")["fails"]
    kept = describe(coin)["kept_count"]
    assert len(coin["boxes"]) == 64 * kept + 4 - kept
    assert explain({**coin, "rule": "unknown"}) == ""


def test_chapter_and_figure(record: Record) -> None:
    text = page_text(build_page([record]), "failures")
    assert f"{record.settings['searched']} drawn images and seeded fields" in text
    for rule in (*SETTINGS, *SUMMARIES):
        fails = roles(record, rule)["fails"]
        assert explain(fails).replace("\u00a0", " ") in text and fails["method"] in text
    for title in ("Algorithm 1", "Optimal tree", "Random quadrants", "Mean and variance"):
        assert title in failures(record)


def test_fields_depend_on_their_key_alone() -> None:
    for kind in FIELDS:
        field = draw_field(kind, 0, 3)
        assert field.shape == (16, 16) and np.isfinite(field).all()
        assert np.array_equal(field, draw_field(kind, 0, 3))
        assert not np.array_equal(field, draw_field(kind, 0, 4))
        assert not np.array_equal(field, draw_field(kind, 1, 3))
        assert np.ptp(field) > 0.5


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="fields"):
        run(fields=0)
