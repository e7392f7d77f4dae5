"""The stress test gives the figures of the paper, and those that go past it."""

import json

import pytest
import torch

from bmfa.cli import main
from bmfa.evidence.methods import DEFAULT_METHODS
from bmfa.evidence.score_methods import estimate
from bmfa.evidence.synthetic import run as synthetic
from bmfa.records import Record


@pytest.fixture(scope="module")
def rows():
    record = synthetic.run(scatter_seeds=20)
    return {(row["placement"], row["method"]): row for row in record.rows}


def figures(row):
    return tuple(round(row[name], 3) for name in ("mean_gap", "p95_gap", "leaf_percent"))


def test_there_are_396_settings_split_as_recovered():
    counts = [sum(cells == k for cells, _ in synthetic.settings()) for k in synthetic.CELLS]
    assert counts == [35, 42, 49, 56, 63, 71, 80]


def test_the_paper_is_reproduced_to_three_decimals(rows):
    assert rows["corner", "gamma:0.005"]["count"] == 396
    assert figures(rows["corner", "block-mean"]) == (2.582, 5.114, 0.391)
    assert figures(rows["corner", "fixed-depth:2"])[::2] == (1.129, 6.250)
    assert figures(rows["corner", "gamma:0.005"]) == (0.261, 2.035, 5.794)
    assert figures(rows["corner", "edge-aware"]) == (0.0, 0.0, 100.0)


def test_what_the_paper_does_not_print(rows):
    assert figures(rows["corner", "mean-variance"])[:2] == (1.320, 3.476)
    assert round(rows["corner", "mean-variance"]["min_gap"], 2) == -2.23
    assert figures(rows["corner", "fixed-depth:1"])[:2] == (1.901, 4.399)


def test_the_headline_depends_on_the_placement(rows):
    for placement, mean, p95, leaves in (
        ("shifted-1-1", 0.553, 3.070, 15.63),
        ("shifted-4-4", 0.768, 3.885, 5.99),
        ("centred", 2.582, 5.114, 0.39),
    ):
        row = rows[placement, "gamma:0.005"]
        assert figures(row)[:2] == (mean, p95) and round(row["leaf_percent"], 2) == leaves


def test_the_optimal_tree_closes_the_gap_wherever_the_minority_lies(rows):
    most = {"corner": 6.5, "shifted-1-1": 17.1, "shifted-4-4": 8.1, "centred": 10.5}
    for placement in (*most, "scattered"):
        row = rows[placement, "optimal:0.001"]
        assert row["mean_gap"] <= 0.002 and row["leaf_percent"] <= most.get(placement, 100.0)


def test_one_penalty_for_all_settings_at_the_leaves_of_algorithm_1():
    outcome = estimate(
        "optimal-leaves-pooled:0.05794", synthetic.score_grids("corner"), synthetic.GRID
    )
    assert float(outcome.leaf_percent.mean()) <= 5.794
    assert float(outcome.gap.mean()) <= 0.010


def test_the_root_is_never_split_for_one_cell():
    scores = 14.50 * torch.eye(256, dtype=torch.float64)[:1]
    assert not bool(estimate("gamma:0.005", scores, synthetic.GRID).root_split)
    assert bool(estimate("gamma:0.005", scores * 14.52 / 14.50, synthetic.GRID).root_split)


def test_masks_have_their_cells():
    for placement in synthetic.PLACEMENTS:
        for cells in synthetic.CELLS:
            assert (synthetic.masks(placement, cells, 0, 3).sum((1, 2)) == cells).all()
    with pytest.raises(ValueError, match="'middle' is unknown"):
        synthetic.masks("middle", 4)


def test_the_failure_curve_passes_the_critical_point():
    rows = synthetic.failure_curve(["block-mean", "optimal:0.001"]).rows
    before, after = (
        next(r for r in rows if r["cells"] == 4 and round(r["delta"], 1) == d) for d in (4.1, 4.2)
    )
    assert before["minority_mass"] < 0.5 <= after["minority_mass"]
    assert {row["cells"] for row in rows} == {1, 4}


def test_the_command_prints_the_record(capsys):
    main(["synthetic", "--placement", "corner", "--json", "-"])
    record = Record.from_json(capsys.readouterr().out)
    assert record.settings["settings"] == 396
    assert [row["method"] for row in record.rows] == list(DEFAULT_METHODS)


def test_a_run_is_the_same_twice():
    first, second = (synthetic.run(scatter_seeds=2, placements=["scattered"]) for _ in range(2))
    assert json.dumps(first.rows) == json.dumps(second.rows)
