"""Score grids from instances: a fitted reconstruction of the paper's probe, not its published code.

A square crop around the mask, resized; the cells that the mask's contour crosses are the minority,
and the picture's edges say how strongly each cell scores.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bmfa.data.instances import Instance, Tally
from bmfa.packages import load_package

Mode = Literal["image-edge", "mask-only"]
MODES: tuple[Mode, ...] = get_args(Mode)
CROWD, SMALL, NO_CONTOUR = "crowd", "smaller than the least area", "no contour inside the crop"

CROP_FACTOR = 1.5
LEAST_AREA = 20.0
EDGE_PERCENTILE = 95.0
MINORITY_BASE, MINORITY_EDGE, MAJORITY_EDGE = 3.6, 2.2, 0.35
MASK_ONLY_SCORE = 4.25


def multiples(size: int, step: int) -> str:
    """The sizes next to this one that a step divides, in words."""
    below = size // step * step
    near = " or ".join(str(fit) for fit in (below, below + step) if fit)
    return f"a multiple of {step}, such as {near}"


@dataclass(frozen=True)
class ProbeSettings:
    """Cells along a side of the grid, and the side in pixels to which every crop is resized."""

    grid: int = 16
    picture_size: int = 256

    def __post_init__(self) -> None:
        # Checked here and not at the top: worker processes need no torch, which `checks` imports.
        from bmfa.checks import check_integer

        check_integer("grid", self.grid, low=1)
        check_integer("picture_size", self.picture_size, low=1, high=8192)
        if self.picture_size % self.grid:
            raise ValueError(
                f"picture_size (--img-size) is {self.picture_size}, which {self.grid} cells do not "
                f"divide; pass {multiples(self.picture_size, self.grid)}"
            )


@dataclass(frozen=True, eq=False)
class ProbeBlock:
    """Probes of several instances, stacked: `edge` in [0, 1] and `minority` are (count, n, n)."""

    edge: NDArray[np.float64]
    minority: NDArray[np.bool_]
    box: NDArray[np.int64]
    picture_id: NDArray[np.int64]
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
        """The score grids in raster order, (count, n * n)."""
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; pass one of {', '.join(MODES)}")
        if mode == "mask-only":
            grids = np.where(self.minority, MASK_ONLY_SCORE, 0.0)
        else:
            bright = MINORITY_BASE + MINORITY_EDGE * self.edge
            grids = np.where(self.minority, bright, MAJORITY_EDGE * self.edge)
        return grids.reshape(len(self), -1)


def probe_block(
    instances: Iterable[Instance], settings: ProbeSettings, tally: Tally
) -> ProbeBlock | None:
    """The probes of all instances that the protocol keeps; None where it keeps none."""
    kept: list[_Cells] = []
    for instance in instances:
        reason = _left_out(instance)
        cells = None if reason else _cells(instance, settings)
        if cells is None:
            name = f"annotation {instance.annotation_id} of {instance.picture.name}"
            tally.leave_out(reason or NO_CONTOUR, name)
        else:
            kept.append(cells)
    return _stacked(kept) if kept else None


@dataclass(frozen=True, eq=False)
class _Cells:
    """One instance's cells, without the picture they came from."""

    gradient: NDArray[np.float64]
    minority: NDArray[np.bool_]
    box: tuple[int, int, int, int]
    picture_id: int
    annotation_id: int
    area: float
    category: str
    size: str
    frequency: str | None


def _left_out(instance: Instance) -> str | None:
    if instance.crowd:
        return CROWD
    return SMALL if instance.area < LEAST_AREA else None


def _cells(instance: Instance, settings: ProbeSettings) -> _Cells | None:
    box = crop_box(instance.mask)
    mask = resized_mask(instance.mask, box, settings.picture_size)
    minority = _per_cell(contour_band(mask), settings.grid) > 0
    if not minority.any():
        return None
    grey = resized_grey(instance.picture.grey, box, settings.picture_size)
    return _Cells(
        _per_cell(gradient_magnitude(grey), settings.grid),
        minority,
        box,
        instance.picture.id,
        instance.annotation_id,
        instance.area,
        instance.category,
        instance.size,
        instance.frequency,
    )


def _stacked(cells: Sequence[_Cells]) -> ProbeBlock:
    return ProbeBlock(
        edge=relative_edge(np.stack([one.gradient for one in cells])),
        minority=np.stack([one.minority for one in cells]),
        box=np.array([one.box for one in cells], dtype=np.int64),
        picture_id=np.array([one.picture_id for one in cells], dtype=np.int64),
        annotation_id=np.array([one.annotation_id for one in cells], dtype=np.int64),
        area=np.array([one.area for one in cells], dtype=np.float64),
        category=tuple(one.category for one in cells),
        size=tuple(one.size for one in cells),
        frequency=tuple(one.frequency for one in cells),
    )


def crop_box(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the crop: a square 1.5 times the longer side of the mask's own
    pixels, centred on them, widened to whole pixels and clipped to the picture."""
    (top, bottom), (left, right) = _extent(mask, 1), _extent(mask, 0)
    half = CROP_FACTOR * max(bottom - top, right - left) / 2
    middle_x, middle_y = (left + right) / 2, (top + bottom) / 2
    height, width = mask.shape
    return (
        max(0, math.floor(middle_x - half)),
        max(0, math.floor(middle_y - half)),
        min(width, math.ceil(middle_x + half)),
        min(height, math.ceil(middle_y + half)),
    )


def _extent(mask: NDArray[np.bool_], axis: int) -> tuple[int, int]:
    line = np.asarray(mask.any(axis))
    return int(line.argmax()), len(line) - int(line[::-1].argmax())


def resized_mask(
    mask: NDArray[np.bool_], box: tuple[int, int, int, int], size: int
) -> NDArray[np.bool_]:
    """The crop of a mask, (size, size), by the nearest pixel."""
    image = load_package("PIL.Image")
    left, top, right, bottom = box
    crop = image.fromarray(np.ascontiguousarray(mask[top:bottom, left:right]).view(np.uint8))
    return np.asarray(crop.resize((size, size), image.Resampling.NEAREST)).view(bool)


def resized_grey(grey: Any, box: tuple[int, int, int, int], size: int) -> NDArray[np.uint8]:
    """The crop of a grey Pillow image, (size, size), by Pillow's antialiased bilinear filter."""
    # Cropped first: with `box=` the filter would reach pixels outside the crop.
    crop = grey.crop(box).resize((size, size), load_package("PIL.Image").Resampling.BILINEAR)
    return np.asarray(crop)


def contour_band(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The mask's inner contour, dilated by a 3x3 square; no contour where the crop cuts the object."""
    inner = mask & ~_square3(mask, outside=True, combine=np.logical_and)
    return _square3(inner, outside=False, combine=np.logical_or)


def _square3(mask: NDArray[np.bool_], *, outside: bool, combine: np.ufunc) -> NDArray[np.bool_]:
    padded = np.pad(mask, 1, constant_values=outside)
    rows = combine(combine(padded[:-2], padded[1:-1]), padded[2:])
    result: NDArray[np.bool_] = combine(combine(rows[:, :-2], rows[:, 1:-1]), rows[:, 2:])
    return result


def gradient_magnitude(grey: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Sobel's gradient magnitude, edges replicated."""
    padded = np.pad(grey, 1, mode="edge").astype(np.int16)
    down = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    along = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    across_x = (down[:, 2:] - down[:, :-2]).astype(np.float32)
    across_y = (along[2:] - along[:-2]).astype(np.float32)
    # Squares stay below 2^24, so single precision holds them exactly.
    return np.sqrt(across_x * across_x + across_y * across_y)


def _per_cell(values: NDArray[Any], grid: int) -> NDArray[np.float64]:
    """Sums over the cells of a square array, (grid, grid)."""
    side = len(values) // grid
    rows = values.reshape(grid, side, -1).sum(1, dtype=np.float32)
    cells: NDArray[np.float64] = rows.reshape(grid, grid, side).sum(2, dtype=np.float64)
    return cells


def relative_edge(gradient: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cell gradients (..., n, n), sums or means alike, over the 95th percentile of their grid, clipped
    to [0, 1]."""
    strong = np.percentile(gradient, EDGE_PERCENTILE, axis=(-2, -1), keepdims=True)
    return np.clip(
        np.divide(gradient, strong, out=np.zeros_like(gradient), where=strong > 0), 0.0, 1.0
    )
