"""Score grids of instances: a plausible reconstruction of the paper's probe, fitted to its table.

An instance is cropped by a square around its mask and resized. The cells that the contour of the
mask crosses are the minority, and the edges of the image determine how high each cell scores.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import max_pool2d

from bmfa.checks import check_integer
from bmfa.data.instances import Instance, InstanceSource, Tally
from bmfa.data.workers import iterate, make_loader
from bmfa.packages import load_package

Box = tuple[int, int, int, int]  # left, top, right, bottom
Mode = Literal["image-edge", "mask-only"]
MODES: tuple[Mode, ...] = get_args(Mode)
CROWD, SMALL, NO_CONTOUR = "crowd", "smaller than the least area", "no contour inside the crop"

# Fitted to the table of the paper over 553 COCO images; `bmfa probe --dataset coco` measures them.
CROP_FACTOR = 1.5  # side of the crop over the longer side of the mask
MIN_AREA = 20.0  # square pixels
EDGE_PERCENTILE = 95.0  # a cell at this percentile of its grid has edge 1
MINORITY_BASE = 3.6  # score of a minority cell without edge
MINORITY_EDGE = 2.2  # its increase per unit of edge
MAJORITY_EDGE = 0.35  # score of other cells per unit of edge
MASK_ONLY_SCORE = 4.25  # score of minority cells in the mask-only mode; others have 0

PART_IMAGES = 16


def multiples(size: int, step: int) -> str:
    """Describe the multiples of `step` next to `size`, for error messages."""
    below = size // step * step
    near = " or ".join(str(fit) for fit in (below, below + step) if fit)
    return f"a multiple of {step}, such as {near}"


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of the probe.

    Args:
        grid: cells along a side of the grid.
        image_size: side in pixels to which every crop is resized, a multiple of `grid`.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> from bmfa.data import ProbeSettings
        >>> ProbeSettings(grid=8).image_size
        256
    """

    grid: int = 16
    image_size: int = 256

    def __post_init__(self) -> None:
        check_integer("grid", self.grid, low=1)
        check_integer("image_size", self.image_size, low=1, high=8192)
        if self.image_size % self.grid:
            raise ValueError(
                f"image_size (--img-size) is {self.image_size}, which {self.grid} cells do not "
                f"divide; pass {multiples(self.image_size, self.grid)}"
            )


@dataclass(frozen=True, eq=False)
class ProbeBlock:
    """Probes of several instances, stacked.

    Args:
        edge: (count, n, n) float64 in [0, 1], strength of the image's edges in each cell.
        minority: (count, n, n) bool, True in cells that the contour of the mask crosses.
        box: (count, 4) int64, left, top, right and bottom of the crop in pixels.
        image_id: (count,) int64.
        annotation_id: (count,) int64.
        area: (count,) float64, area of the instance in pixels.
        category: names of the categories.
        size: size groups, small, medium or large.
        frequency: frequencies of the categories in LVIS, r, c or f.
    """

    edge: NDArray[np.float64]
    minority: NDArray[np.bool_]
    box: NDArray[np.int64]
    image_id: NDArray[np.int64]
    annotation_id: NDArray[np.int64]
    area: NDArray[np.float64]
    category: tuple[str, ...]
    size: tuple[str, ...]
    frequency: tuple[str | None, ...]

    def __len__(self) -> int:
        return len(self.edge)

    def __getitem__(self, rows: slice) -> "ProbeBlock":
        return ProbeBlock(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def scores(self, mode: Mode) -> NDArray[np.float64]:
        """Return the score grids in raster order, (count, n * n) float64.

        Args:
            mode: "image-edge" scores cells by the edges of the image, "mask-only" by the contour.

        Raises:
            ValueError: the mode is unknown.
        """
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; pass one of {', '.join(MODES)}")
        high, low = MINORITY_BASE + MINORITY_EDGE * self.edge, MAJORITY_EDGE * self.edge
        if mode == "mask-only":
            high, low = np.full_like(high, MASK_ONLY_SCORE), np.zeros_like(low)
        return np.where(self.minority, high, low).reshape(len(self), -1)


Progress = Callable[[int, int], None]  # images done, of how many
Result = tuple[ProbeBlock | None, Tally]  # the probes of a part, and what was not used


def probe_blocks(
    source: InstanceSource,
    settings: ProbeSettings | None = None,
    *,
    workers: int = 1,
    limit: int | None = None,
    tally: Tally | None = None,
    progress: Progress | None = None,
) -> Iterator[ProbeBlock]:
    """Yield blocks of probes in the order of the source, equal for any number of worker processes.

    At most a few parts per worker are in memory.

    Args:
        source: annotated images.
        settings: grid and image size; the defaults if None.
        workers: number of processes; 1 computes in this process.
        limit: number of instances after which the blocks end.
        tally: counts the instances that are skipped; with its `strict` a fault raises.
        progress: called with the number of images done and of all images.

    Raises:
        ValueError: workers or limit are below 1.
        AnnotationError: an instance is faulty and `tally.strict` is True.
        RuntimeError: a worker process died.

    Example:
        >>> from bmfa.data import EmbeddedScenes, probe_blocks
        >>> blocks = list(probe_blocks(EmbeddedScenes(images=2)))
        >>> blocks[0].scores("mask-only").shape[1]
        256
    """
    check_integer("workers", workers, low=1)
    left = math.inf if limit is None else check_integer("limit", limit, low=1)
    tally, parts = Tally() if tally is None else tally, split_images(source)
    results = probe_parts(source, parts, settings or ProbeSettings(), tally.strict, workers)
    for part, (block, skipped) in zip(parts, results, strict=True):
        tally.merge(skipped)
        if progress is not None:
            progress(part.stop, len(source))
        if block is not None:
            yield block[: int(min(left, len(block)))]
            left -= len(block)
        if left <= 0:
            return


def split_images(source: InstanceSource) -> list[range]:
    """Return the indices of the images of a source in parts, the units of work of a process."""
    indices = range(len(source))
    return [indices[first : first + PART_IMAGES] for first in indices[::PART_IMAGES]]


def probe_parts(
    source: InstanceSource,
    parts: Sequence[range],
    settings: ProbeSettings,
    strict: bool,
    workers: int,
) -> Iterator[Result]:
    """Yield the result of every part, in order; 1 worker computes in this process."""
    compute = partial(_probe_part, source, settings, strict)
    processes = 0 if workers == 1 else workers
    # The loader collates in the workers, so that the dataset is the parts themselves.
    yield from iterate(make_loader(parts, processes, batch_size=None, collate_fn=compute))


def _probe_part(
    source: InstanceSource, settings: ProbeSettings, strict: bool, indices: range
) -> Result | Exception:
    tally = Tally(strict)
    instances = (one for index in indices for one in source.read(index, tally))
    try:
        return probe_block(instances, settings, tally), tally
    except (ValueError, OSError) as error:
        return error


def probe_block(
    instances: Iterable[Instance], settings: ProbeSettings, tally: Tally
) -> ProbeBlock | None:
    """Return the probes of all instances that the protocol includes, or None if there are none."""
    found = []  # the values of the fields of ProbeBlock, of each instance
    for one in instances:
        reason = CROWD if one.crowd else SMALL if one.area < MIN_AREA else NO_CONTOUR
        cells = _compute_cells(one, settings) if reason == NO_CONTOUR else None
        if cells is None:
            tally.leave_out(reason, f"annotation {one.annotation_id} of {one.image.name}")
            continue
        known = (one.image.id, one.annotation_id, one.area, one.category, one.size, one.frequency)
        found.append((*cells, *known))
    if not found:
        return None
    gradient, *columns = zip(*found, strict=True)
    arrays: list[Any] = [np.array(column) for column in columns[:5]]
    return ProbeBlock(relative_edge(np.stack(gradient)), *arrays, *columns[5:])


def _compute_cells(
    instance: Instance, settings: ProbeSettings
) -> tuple[NDArray[np.float64], NDArray[np.bool_], Box] | None:
    """Return gradient and minority of the cells and the crop; None without a contour in the crop."""
    image, size = load_package("PIL.Image"), (settings.image_size, settings.image_size)
    box, resampling = crop_box(instance.mask), image.Resampling
    mask = image.fromarray(instance.mask.view(np.uint8)).crop(box).resize(size, resampling.NEAREST)
    minority = _sum_cells(contour_band(np.array(mask, dtype=bool)), settings.grid) > 0
    # With `box=` of resize the filter would read pixels outside the crop.
    grey = np.asarray(instance.image.grey.crop(box).resize(size, resampling.BILINEAR))
    gradient = _sum_cells(gradient_magnitude(grey), settings.grid)
    return (gradient, minority, box) if minority.any() else None


def crop_box(mask: NDArray[np.bool_]) -> Box:
    """Return left, top, right and bottom of the crop.

    It is a square around the pixels of the mask, 1.5 times as long as their longer side, extended
    to whole pixels and clipped to the image.
    """
    image = load_package("PIL.Image").fromarray(mask.view(np.uint8))
    left, top, right, bottom = image.getbbox()
    half = CROP_FACTOR * max(bottom - top, right - left) / 2
    middle_x, middle_y = (left + right) / 2, (top + bottom) / 2
    return (
        max(0, math.floor(middle_x - half)),
        max(0, math.floor(middle_y - half)),
        min(image.width, math.ceil(middle_x + half)),
        min(image.height, math.ceil(middle_y + half)),
    )


def contour_band(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the inner contour of a mask, dilated by 3x3; the border of the crop is not a contour."""
    inside = torch.from_numpy(mask)[None].float()
    eroded = -max_pool2d(-inside, 3, stride=1, padding=1)
    band = max_pool2d(inside - eroded, 3, stride=1, padding=1)[0]
    return band.bool().numpy()


def gradient_magnitude(grey: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the Sobel gradient magnitude, with replicated borders."""
    padded = np.pad(grey, 1, mode="edge").astype(np.int16)
    down = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    along = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    across_x = (down[:, 2:] - down[:, :-2]).astype(np.float32)
    across_y = (along[2:] - along[:-2]).astype(np.float32)
    # Squares stay below 2^24, so float32 is exact.
    return np.sqrt(across_x * across_x + across_y * across_y)


def _sum_cells(values: NDArray[Any], grid: int) -> NDArray[np.float64]:
    """Sum a square array over the cells of a grid: (grid, grid)."""
    side = len(values) // grid
    rows = values.reshape(grid, side, -1).sum(1, dtype=np.float32)
    cells: NDArray[np.float64] = rows.reshape(grid, grid, side).sum(2, dtype=np.float64)
    return cells


def relative_edge(gradient: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide cell gradients (..., n, n) by the 95th percentile of their grid and clip to [0, 1]."""
    strong = np.percentile(gradient, EDGE_PERCENTILE, axis=(-2, -1), keepdims=True)
    return np.clip(
        np.divide(gradient, strong, out=np.zeros_like(gradient), where=strong > 0), 0.0, 1.0
    )
