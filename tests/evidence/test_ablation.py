"""Ablations: the reference figures, and what theory says of each parameter."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bmfa.data import EmbeddedScenes, InstanceFiles
from bmfa.evidence.ablation import run as ablation
from bmfa.records import Record

SCENES = EmbeddedScenes(images=24)


@pytest.fixture(scope="module")
def record() -> Record:
    return ablation.run(SCENES, dataset="embedded")


def rows(record: Record, parameter: str) -> list[dict[str, Any]]:
    return [row for row in record.rows if row["parameter"] == parameter]


def figures(row: dict[str, Any]) -> tuple[float, ...]:
    return tuple(row[key] for key in ("mean_gap", "p95_gap", "leaf_percent", "unsplit_percent"))


def test_a_smaller_epsilon_means_more_leaves_and_a_smaller_gap(record: Record) -> None:
    varied = rows(record, "epsilon")
    assert [row["value"] for row in varied] == [0.05, 0.02, 0.01, 0.005, 0.002, 0.001]
    for coarse, fine in pairwise(varied):
        assert coarse["leaf_percent"] <= fine["leaf_percent"]
        assert coarse["mean_gap"] >= fine["mean_gap"]
        assert coarse["unsplit_percent"] >= fine["unsplit_percent"]


def test_depth_4_reaches_the_cells_of_a_16_grid(record: Record) -> None:
    two, three, four, five = map(figures, rows(record, "depth"))
    assert two[2] < three[2] < four[2]
    assert two[0] > three[0] > four[0]
    assert four == five == figures(rows(record, "epsilon")[3])


def test_looking_further_ahead_never_means_fewer_leaves(record: Record) -> None:
    varied = rows(record, "lookahead")
    assert [row["value"] for row in varied] == [1, 2, 3, 4]
    for near, far in pairwise(varied):
        assert near["leaf_percent"] <= far["leaf_percent"]
        assert near["mean_gap"] >= far["mean_gap"] - 1e-12
    assert varied[0]["unsplit_percent"] > 0 == varied[1]["unsplit_percent"]


def test_a_finer_grid_has_relatively_fewer_leaves(record: Record) -> None:
    varied = rows(record, "grid")
    leaves = [row["leaf_percent"] for row in varied]
    assert [row["value"] for row in varied] == [8, 16, 32]
    assert leaves == sorted(leaves, reverse=True)


def test_every_row_is_timed_on_the_same_instances(record: Record) -> None:
    assert len(record.rows) == 6 + 4 + 3 + 4
    assert len({row["instances"] for row in record.rows}) == 1
    for row in record.rows:
        assert row["microseconds_per_instance"] > 0
    assert Record.from_json(record.to_json()).rows == record.rows


def test_two_processes_a_limit_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(ablation, "VALUES", {"epsilon": (0.005,), "grid": (8,)})
    options: dict[str, Any] = {"limit": 30, "mode": "mask-only"}
    one = ablation.run(SCENES, progress=lambda done, total: seen.append((done, total)), **options)
    two = ablation.run(SCENES, workers=2, **options)
    assert [figures(row) for row in one.rows] == [figures(row) for row in two.rows]
    assert {row["instances"] for row in one.rows} == {30}
    assert [total for _, total in seen] == [48] * len(seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_bad_values_are_explained_before_any_image_is_read() -> None:
    for changes, said in (
        ({"image_size": 48}, "32 cells do not divide; pass a multiple of 32, such as"),
        ({"mode": "edges"}, "mode is 'edges'"),
    ):
        with pytest.raises(ValueError, match=said):
            ablation.run(EmbeddedScenes(images=10**9), **changes)


def test_the_reference_figures_of_the_coco_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.environ.get("BMFA_ASSETS")
    if not folder:
        pytest.skip("BMFA_ASSETS is unset: set it to the folder of the COCO subset")
    coco = Path(folder) / "coco"
    source = InstanceFiles(coco / "instances_val2017_subset.json", coco / "images")
    values = {"epsilon": (0.05, 0.001), "depth": (2,), "grid": (16,)}
    monkeypatch.setattr(ablation, "VALUES", values)
    wide, narrow, shallow, default = ablation.run(source).rows
    assert default["instances"] == 343
    expected = ((wide, 1.708, 8.28), (narrow, 0.147, 51.54), (default, 0.606, 28.46))
    for row, gap, leaves in expected:
        assert row["mean_gap"] == pytest.approx(gap, rel=0.01, abs=0.005)
        assert row["leaf_percent"] == pytest.approx(leaves, rel=0.01)
    assert shallow["mean_gap"] == pytest.approx(1.935, rel=0.01, abs=0.005)
