"""Score grids against a step-by-step oracle, against reference values, and across processes."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bmfa.data import (
    AnnotationError,
    EmbeddedScenes,
    Instance,
    InstanceFiles,
    InstanceImage,
    ProbeBlock,
    ProbeSettings,
    Tally,
    probe_blocks,
)
from bmfa.data.probes import contour_band, crop_box, gradient_magnitude, probe_block, relative_edge
from coco_files import write_coco

FIELDS = tuple(ProbeBlock.__dataclass_fields__)


def instance(mask: np.ndarray, pixels: np.ndarray | None = None, **changes: object) -> Instance:
    if pixels is None:
        pixels = np.random.default_rng(1).integers(0, 256, (*mask.shape, 3), dtype=np.uint8)
    fields = {"annotation_id": 1, "category": "cat", "frequency": None, "crowd": False}
    area = float(mask.sum())
    return Instance(
        InstanceImage(1, "a.png", pixels), **(fields | {"area": area, "mask": mask} | changes)
    )


def disc(height: int = 90, width: int = 120, radius: float = 20.0) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return (x - 70) ** 2 + (y - 40) ** 2 < radius**2


def joined(blocks: list[ProbeBlock], mode: str) -> np.ndarray:
    return np.concatenate([block.scores(mode) for block in blocks])


def neighbours(values: np.ndarray, **padding: object) -> np.ndarray:
    """All 3x3 neighbourhoods, (rows, columns, 3, 3)."""
    return np.lib.stride_tricks.sliding_window_view(np.pad(values, 1, **padding), (3, 3))


def oracle(one: Instance, grid: int, size: int) -> np.ndarray:
    """The image-edge scores step by step, as the protocol words them."""
    rows, columns = np.nonzero(one.mask)
    half = 1.5 * max(np.ptp(rows) + 1, np.ptp(columns) + 1) / 2
    middle_y, middle_x = (rows.min() + rows.max() + 1) / 2, (columns.min() + columns.max() + 1) / 2
    height, width = one.mask.shape
    top, bottom = max(0, int(np.floor(middle_y - half))), min(height, int(np.ceil(middle_y + half)))
    left, right = max(0, int(np.floor(middle_x - half))), min(width, int(np.ceil(middle_x + half)))
    grey = Image.fromarray(one.image.pixels[top:bottom, left:right]).convert("L")
    grey = np.asarray(grey.resize((size, size), Image.Resampling.BILINEAR)) / 255.0
    mask = Image.fromarray(one.mask[top:bottom, left:right])
    mask = np.asarray(mask.resize((size, size), Image.Resampling.NEAREST))
    inner = mask & ~neighbours(mask, constant_values=True).all((2, 3))
    band = neighbours(inner, constant_values=False).any((2, 3))
    kernel = np.outer([1, 2, 1], [-1, 0, 1])
    around = neighbours(grey, mode="edge")
    magnitude = np.hypot((around * kernel).sum((2, 3)), (around * kernel.T).sum((2, 3)))
    cells = (grid, size // grid, grid, size // grid)
    minority = band.reshape(cells).any((1, 3))
    means = magnitude.reshape(cells).mean((1, 3))
    edge = np.clip(means / np.percentile(means, 95), 0, 1)
    return np.where(minority, 3.6 + 2.2 * edge, 0.35 * edge).ravel()


def test_scores_are_the_protocols() -> None:
    for grid, size in [(16, 256), (8, 256), (32, 256), (4, 60), (1, 9)]:
        for radius in (3.0, 20.0, 60.0):
            one = instance(disc(radius=radius))
            block = probe_block([one], ProbeSettings(grid, size), Tally())
            wanted = oracle(one, grid, size)
            np.testing.assert_allclose(block.scores("image-edge")[0], wanted, atol=2e-6)
            expected = np.where(wanted > 3, 4.25, 0.0)
            np.testing.assert_array_equal(block.scores("mask-only")[0], expected)
    with pytest.raises(ValueError, match="image-edge, mask-only"):
        block.scores("edges")
    for grid, said in ((0, "grid is 0"), (7, "which 7 cells do not divide")):
        with pytest.raises(ValueError, match=said):
            ProbeSettings(grid, 256)


def test_the_crop_is_a_square_around_the_masks_own_pixels_clipped_to_the_image() -> None:
    mask = np.zeros((100, 200), dtype=bool)
    mask[40:50, 100:121] = True
    assert crop_box(mask) == (94, 29, 127, 61)
    mask[:] = True
    assert crop_box(mask) == (0, 0, 200, 100)


def test_no_contour_appears_where_the_crop_cuts_the_object() -> None:
    mask = np.zeros((12, 12), dtype=bool)
    mask[:, 6:] = True
    band = contour_band(mask)
    assert band[:, 5:8].all()
    assert not band[:, 8:].any()
    assert not contour_band(np.ones((12, 12), dtype=bool)).any()


def test_gradients_are_sobels_and_a_flat_image_has_no_edge() -> None:
    ramp = np.tile(np.arange(10, dtype=np.uint8), (10, 1))
    assert (gradient_magnitude(ramp)[:, 1:-1] == 8).all()
    np.testing.assert_array_equal(relative_edge(np.zeros((3, 4, 4))), np.zeros((3, 4, 4)))
    flat = instance(disc(), np.full((90, 120, 3), 77, dtype=np.uint8))
    scores = probe_block([flat], ProbeSettings(), Tally()).scores("image-edge")
    assert set(np.unique(scores)) == {0.0, 3.6}


def test_what_the_protocol_leaves_out_is_counted() -> None:
    tally, whole = Tally(strict=True), np.ones((30, 30), dtype=bool)
    left_out = [instance(disc(), crowd=True), instance(disc(), area=19.0), instance(whole)]
    kept = probe_block([instance(disc()), *left_out], ProbeSettings(), tally)
    assert len(kept) == 1
    assert sorted(tally.left_out.values()) == [1, 1, 1] and not tally.faults
    assert probe_block([], ProbeSettings(), Tally()) is None


def test_one_process_two_processes_and_written_files_give_the_same(tmp_path: Path) -> None:
    scenes = EmbeddedScenes(images=20)
    seen: list[tuple[int, int]] = []
    one = list(probe_blocks(scenes, progress=lambda done, total: seen.append((done, total))))
    files = InstanceFiles(write_coco(tmp_path, images=20), tmp_path / "images")
    two = list(probe_blocks(scenes, workers=2))
    read = list(probe_blocks(files, workers=2))
    assert seen == [(16, 20), (20, 20)]
    for field in FIELDS:
        memory = [getattr(block, field) for block in one]
        for mine, theirs in zip(memory, (getattr(block, field) for block in two), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        disk = [getattr(block, field) for block in read]
        np.testing.assert_array_equal(np.concatenate(memory), np.concatenate(disk))


def test_a_limit_ends_the_stream_at_the_instance() -> None:
    scenes = EmbeddedScenes(images=18)
    whole = joined(list(probe_blocks(scenes)), "image-edge")
    assert len(whole) > 80
    for limit in (1, 80, len(whole)):
        cut = joined(list(probe_blocks(scenes, limit=limit)), "image-edge")
        np.testing.assert_array_equal(cut, whole[:limit])


def test_strict_faults_and_counts_cross_processes(tmp_path: Path) -> None:
    file = write_coco(tmp_path, images=18)
    (tmp_path / "images" / "000000000003.png").unlink()
    files = InstanceFiles(file, tmp_path / "images")
    tallies = [Tally(), Tally()]
    for workers, tally in enumerate(tallies, start=1):
        list(probe_blocks(files, workers=workers, tally=tally))
    assert tallies[0] == tallies[1]
    assert list(tallies[0].names["missing image"]) == ["000000000003.png"]
    with pytest.raises(AnnotationError, match=r"000000000003\.png: missing image"):
        list(probe_blocks(files, workers=2, tally=Tally(strict=True)))


@dataclass(frozen=True)
class DyingSource:
    """A source whose worker process ends at once."""

    def __len__(self) -> int:
        return 1

    def parts(self, instances: int) -> Iterator["DyingSource"]:
        yield self

    def instances(self, tally: Tally) -> Iterator[Instance]:
        os._exit(1)


def test_a_worker_that_dies_is_explained() -> None:
    with pytest.raises(RuntimeError, match=r"2 worker processes ended early.*workers=1"):
        list(probe_blocks(DyingSource(), workers=2))


def free_energy(values: np.ndarray) -> np.ndarray:
    top = values.max(-1)
    return top + np.log(np.exp(values - top[..., None]).mean(-1))


def block_means(scores: np.ndarray, depth: int) -> np.ndarray:
    side = 16 >> depth
    return scores.reshape(-1, 1 << depth, side, 1 << depth, side).mean((2, 4))


def gamma_gap(scores: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Gap and leaf percent of Algorithm 1 on 16x16 grids."""
    count = len(scores)
    reached = np.ones((count, 1, 1), dtype=bool)
    mass, leaves = np.zeros(count), np.zeros(count)
    for depth in range(5):
        means, side = block_means(scores, depth), 1 << depth
        split = np.zeros_like(reached)
        if depth < 4:
            children = block_means(scores, depth + 1).reshape(count, side, 2, side, 2)
            children = children.transpose(0, 1, 3, 2, 4).reshape(count, side, side, 4)
            split = reached & (free_energy(children) - means > epsilon)
        leaf = reached & ~split
        mass += (np.exp(means) * leaf).sum((1, 2)) / 4**depth
        leaves += leaf.sum((1, 2))
        reached = split.repeat(2, 1).repeat(2, 2)
    return free_energy(scores) - np.log(mass), 100 * leaves / 256


def measured(scores: np.ndarray) -> dict[str, np.ndarray]:
    exact, mean = free_energy(scores), scores.mean(-1)
    gap, leaves = gamma_gap(scores, 0.005)
    return {
        "block-mean": exact - mean,
        "mean-variance": exact - mean - scores.var(-1) / 2,
        "fixed-depth:1": exact - free_energy(block_means(scores, 1).reshape(len(scores), -1)),
        "fixed-depth:2": exact - free_energy(block_means(scores, 2).reshape(len(scores), -1)),
        "gamma:0.005": gap,
        "leaves": leaves,
    }


@pytest.fixture(scope="module")
def assets() -> Path:
    folder = os.environ.get("BMFA_ASSETS")
    if not folder:
        pytest.skip("BMFA_ASSETS is unset: set it to the folder of the COCO and LVIS subsets")
    return Path(folder)


REFERENCE = {
    "image-edge": {
        "block-mean": (2.268, 2.542),
        "mean-variance": (0.783, 1.134),
        "fixed-depth:1": (2.222, 2.515),
        "fixed-depth:2": (1.863, 2.210),
        "gamma:0.005": (0.606, 2.465),
        "leaves": (28.46, None),
    },
    "mask-only": {"mean-variance": (0.585, 0.845), "gamma:0.005": (0.651, 1.833)},
}


def test_the_reference_values_of_the_coco_subset(assets: Path) -> None:
    tally = Tally(strict=True)
    files = InstanceFiles(
        assets / "coco" / "instances_val2017_subset.json", assets / "coco" / "images"
    )
    blocks = list(probe_blocks(files, tally=tally))
    assert sum(map(len, blocks)) == 343
    assert sorted(tally.left_out.values()) == [3, 6]
    for mode, methods in REFERENCE.items():
        found = measured(joined(blocks, mode))
        for method, (mean, high) in methods.items():
            assert found[method].mean() == pytest.approx(mean, rel=0.01, abs=0.005), (mode, method)
            if high is not None:
                assert np.percentile(found[method], 95) == pytest.approx(high, rel=0.01, abs=0.005)


def test_the_lvis_subset_is_read_by_its_2014_names(assets: Path) -> None:
    tally = Tally(strict=True)
    files = InstanceFiles(assets / "lvis" / "lvis_v0.5_val_subset.json", assets / "coco" / "images")
    blocks = list(probe_blocks(files, tally=tally))
    assert sum(map(len, blocks)) == 252 - sum(tally.left_out.values())
    assert {frequency for block in blocks for frequency in block.frequency} <= {"r", "c", "f"}


def test_the_embedded_probe_ranks_the_methods_as_the_paper_does() -> None:
    scores = joined(list(probe_blocks(EmbeddedScenes())), "image-edge")
    assert len(scores) >= 500
    found = measured(scores)
    ranked = ("block-mean", "fixed-depth:1", "fixed-depth:2", "mean-variance", "gamma:0.005")
    means = [found[method].mean() for method in ranked]
    assert means == sorted(means, reverse=True)
    # Blind on objects whose contour spreads evenly over the quadrants: a low mean, a high tail.
    assert np.percentile(found["gamma:0.005"], 95) > np.percentile(found["mean-variance"], 95) + 0.5
    assert 0.15 < (found["leaves"] < 0.4).mean() < 0.3
