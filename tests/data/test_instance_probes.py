"""Score grids against a step-by-step oracle, and across processes."""

import os
from collections.abc import Iterator
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
    InstanceSource,
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


def test_crop_contour_and_edges() -> None:
    mask = np.zeros((100, 200), dtype=bool)
    mask[40:50, 100:121] = True
    assert crop_box(mask) == (94, 29, 127, 61)
    mask[:] = True
    assert crop_box(mask) == (0, 0, 200, 100)
    mask = np.zeros((12, 12), dtype=bool)
    mask[:, 6:] = True
    band = contour_band(mask)  # none where the crop cuts the object
    assert band[:, 5:8].all() and not band[:, 8:].any()
    assert not contour_band(np.ones((12, 12), dtype=bool)).any()
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
        memory, others, disk = (
            np.concatenate([getattr(block, field) for block in blocks])
            for blocks in (one, two, read)
        )
        np.testing.assert_array_equal(memory, others)
        np.testing.assert_array_equal(memory, disk)


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


class DyingSource(InstanceSource):
    """A source whose worker process ends at once."""

    def __len__(self) -> int:
        return 1

    def read(self, index: int, tally: Tally) -> Iterator[Instance]:
        os._exit(1)


def test_a_worker_that_dies_is_explained() -> None:
    with pytest.raises(RuntimeError, match=r"2 worker processes ended early.*workers=1"):
        list(probe_blocks(DyingSource(), workers=2))
