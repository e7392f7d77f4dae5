"""Methods by name: what each one estimates of the free energy of a batch of grids, and at what size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bmfa import energy
from bmfa.grid import Grid
from bmfa.rules import parse
from bmfa.screening import screen
from bmfa.tree import Tree

# The paper's six, then what goes past them.
DEFAULT_METHODS = (
    "sparge-mean",
    "mean-variance",
    "fixed-depth:1",
    "fixed-depth:2",
    "gamma:0.005",
    "edge-aware",
    "gamma-h2:0.005",
    "exact-gap:0.005",
    "certified:0.005",
    "mass:0.002",
    "optimal:0.001",
)
SUMMARIES = ("sparge-mean", "mean-variance", "edge-aware")


@dataclass(frozen=True)
class Outcome:
    """Gap F - estimate of every grid (mean-variance may overestimate), and its leaves in percent."""

    gap: Tensor  # (B,)
    leaf_percent: Tensor  # (B,)
    tree: Tree | None = None


def check_method(name: str, seed: int = 0) -> str:
    """The name, if it is one of the summaries or of a rule."""
    if name not in SUMMARIES:
        try:
            parse(name, seed)
        except ValueError as error:
            raise ValueError(f"{error}; or one of {', '.join(SUMMARIES)}") from None
    return name


def apply(
    method: str,
    scores: Tensor,
    grid: Grid,
    *,
    tau: float = 1.0,
    max_depth: int | None = None,
    seed: int = 0,
) -> Outcome:
    """Run one method on (B, N) scores.

    sparge-mean summarises the grid by its mean, mean-variance by mean + variance / (2 tau), signed,
    and edge-aware keeps every position and is exact: the paper's full-retention oracle.
    """
    one = torch.full(scores.shape[:-1], 100.0 / grid.size, dtype=torch.float64)
    if method == "edge-aware":
        return Outcome(torch.zeros_like(one), torch.full_like(one, 100.0))
    if method == "sparge-mean":
        return Outcome(energy.gap(scores, tau=tau), one)
    if method == "mean-variance":
        correction = energy.cumulant_gap(scores, 2, tau=tau)
        return Outcome(energy.gap(scores, tau=tau) - correction, one)
    tree = screen(scores, grid, parse(method, seed), tau=tau, max_depth=max_depth)
    return Outcome(tree.error(scores), 100 * tree.leaf_ratio, tree)


def percentile(values: Tensor, percent: float) -> float:
    """A linearly interpolated percentile."""
    ordered = values.double().sort().values
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(torch.lerp(ordered[low], ordered[high], place - low))
