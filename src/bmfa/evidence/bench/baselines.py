"""Baselines that the attention benchmark computes itself, by name, such as `mean-tiles:0.06`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from bmfa.checks import check_integer, check_number
from bmfa.evidence.bench.mean_tiles import mean_tile_attention
from bmfa.evidence.bench.mean_tiles import tiles_of as mean_tiles_of
from bmfa.evidence.bench.monarch import monarch_attention
from bmfa.evidence.bench.peers import TileOrdered
from bmfa.evidence.bench.topk import tiles_of, topk_attention
from bmfa.grid import Grid

DEFAULT_BASELINES = {
    "cuda": (
        *(f"mean-tiles:{share:g}" for share in (0, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3)),
        *("topk:0.05", "topk:0.1", "topk:0.2", "monarch:1", "monarch:2"),
    ),
    "cpu": ("mean-tiles:0", "mean-tiles:0.03", "mean-tiles:0.1", "topk:0.1", "monarch:1"),
}

Maker = Callable[[float, Grid, int, str], "Baseline"]  # value, grid, prefix, backend


@dataclass(frozen=True, eq=False)
class Baseline:
    """An attention function, the share of the tiles that it expands, and what it runs."""

    attention: Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v to outputs
    density: float | None
    ran: str


def parse(name: str) -> tuple[str, float]:
    """Return the kind and the value of `mean-tiles:SHARE`, `topk:SHARE` or `monarch:STEPS`.

    Raises:
        ValueError: If the name or its value is not valid.

    Example:
        >>> parse("topk:0.1")
        ('topk', 0.1)
    """
    kind, _, text = name.partition(":")
    if kind not in MAKERS:
        raise ValueError(
            f"baseline {name!r} is unknown; pass mean-tiles:SHARE, topk:SHARE or monarch:STEPS"
        )
    try:
        value = float(text)
    except ValueError:
        example = f"{kind}:2" if kind == "monarch" else f"{kind}:0.1"
        raise ValueError(f"baseline {name!r} has no number; pass e.g. {example}") from None
    if kind == "monarch":
        check_integer(name, int(value) if value.is_integer() else value, low=1)
    else:
        check_number(name, value, low=0.0, high=1.0, open_low=kind == "topk")
    return kind, value


def make(name: str, grid: Grid, prefix: int, backend: str) -> Baseline:
    """Return the baseline of a name for q, k, v on a grid.

    Args:
        name: A name that `parse` accepts.
        grid: Grid of the spatial tokens.
        prefix: Number of tokens before the grid.
        backend: `"triton"` or `"eager"`.

    Raises:
        ValueError: If the baseline does not support the grid.
    """
    kind, value = parse(name)
    return MAKERS[kind](value, grid, prefix, backend)


def _mean_tiles(share: float, grid: Grid, prefix: int, backend: str) -> Baseline:
    """Mean keys and values with corrections, in groups of 8x16 queries."""
    tiles = mean_tiles_of(grid)
    expand = round(share * tiles)
    call = partial(mean_tile_attention, grid=grid, prefix=prefix, expand=expand, backend=backend)
    return Baseline(call, expand / tiles, f"mean tiles, {backend}")


def _topk(share: float, grid: Grid, prefix: int, backend: str) -> Baseline:
    """The tiles with most mass for each group of 8x8 queries; the others are dropped."""
    tiles = tiles_of(grid)
    kept = max(1, round(share * tiles))
    call = TileOrdered(partial(topk_attention, tiles=tiles, kept=kept), grid, prefix)
    return Baseline(call, kept / tiles, "top-k, triton" if backend == "triton" else "top-k, torch")


def _monarch(steps: float, grid: Grid, prefix: int, backend: str) -> Baseline:
    """A Monarch matrix of rows and columns of the grid, in torch operations on every device."""
    call = partial(monarch_attention, grid=grid, prefix=prefix, steps=int(steps))
    return Baseline(call, None, "monarch, torch")


MAKERS: dict[str, Maker] = {"mean-tiles": _mean_tiles, "topk": _topk, "monarch": _monarch}
