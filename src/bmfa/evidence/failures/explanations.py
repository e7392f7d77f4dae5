"""One sentence for every rule that fails, with the numbers of its record."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bmfa.energy import gap, gibbs, refinement_score
from bmfa.evidence.methods import family
from bmfa.evidence.page.drawing import Array, Box
from bmfa.evidence.page.record_set import get_text
from bmfa.evidence.page.score_maps import read_boxes, read_grid
from bmfa.grid import Grid
from bmfa.records import Row

IDLE_MASS = 0.01  # of the softmax mass: leaves that together hold less are called idle


@dataclass(frozen=True)
class _Leaf:
    """One leaf: its box, its gap, and its share of the softmax mass."""

    box: Box
    gap: float
    mass: float

    @property
    def size(self) -> str:
        top, left, bottom, right = self.box
        return f"{bottom - top}\u00a0×\u00a0{right - left}"


@dataclass(frozen=True)
class Failure:
    """The tree of a rule that fails: scores (H, W), and its leaves by the mass that they lose."""

    row: Row
    scores: Array
    leaves: list[_Leaf]

    @classmethod
    def of(cls, row: Row) -> "Failure":
        """Read a row of the record."""
        scores = read_grid(row, "scores")
        weights = gibbs(torch.from_numpy(scores.ravel())).numpy().reshape(scores.shape)
        leaves = []
        for box in read_boxes(row, scores.shape):
            inside = _part(scores, box)
            share = float(_part(weights, box).sum())
            leaves.append(_Leaf(box, float(gap(torch.from_numpy(inside.ravel()))), share))
        # A leaf of mass p and gap G holds p exp(-G) of it and loses the rest.
        leaves.sort(key=lambda leaf: leaf.mass * np.expm1(-leaf.gap))
        return cls(row, scores, leaves)

    @property
    def worst(self) -> _Leaf:
        """The leaf that loses the most mass."""
        return self.leaves[0]

    @property
    def idle(self) -> int:
        """The number of leaves that together hold less than `IDLE_MASS` of the mass."""
        masses = np.sort([leaf.mass for leaf in self.leaves])
        return int((masses.cumsum() < IDLE_MASS).sum())

    def gamma(self, levels: int) -> float:
        """Gamma of the worst leaf from the means `levels` levels below."""
        block = _part(self.scores, self.worst.box)
        partition = Grid(*block.shape).partition(levels)
        return float(refinement_score(torch.from_numpy(block.ravel()), partition))

    def quarters(self) -> list[tuple[_Leaf, bool, float]]:
        """The quarters of the grid: mass and gap, True if kept token by token, and the variance."""
        found = []
        height, width = self.scores.shape
        weights = gibbs(torch.from_numpy(self.scores.ravel())).numpy().reshape(self.scores.shape)
        leaf_tops = {(leaf.box[0], leaf.box[1]): leaf.box for leaf in self.leaves}
        for top in (0, height // 2):
            for left in (0, width // 2):
                bottom, right = (height if top else height // 2), (width if left else width // 2)
                box = (top, left, bottom, right)
                inside = _part(self.scores, box)
                leaf = _Leaf(
                    box,
                    float(gap(torch.from_numpy(inside.ravel()))),
                    float(_part(weights, box).sum()),
                )
                found.append((leaf, leaf_tops.get((top, left)) != box, float(inside.var())))
        return found


def _part(values: Array, box: Box) -> Array:
    top, left, bottom, right = box
    return np.ascontiguousarray(values[top:bottom, left:right])


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:.0f}\u00a0%" if value >= 1 else f"{value:.1f}\u00a0%"


def _blind(levels: int, why: str) -> Callable[[Failure], str]:
    """A score from means that cancel: a block with mass stays one leaf."""

    def explain(failure: Failure) -> str:
        worst = failure.worst
        return (
            f"{why} The {worst.size} block with {_percent(worst.mass)} of the mass has Γ\u00a0=\u00a0"
            f"{failure.gamma(levels):.2g} but a gap of {worst.gap:.2f}, and stays one leaf."
        )

    return explain


def _rare(failure: Failure) -> str:
    worst = failure.worst
    return (
        f"One token hardly moves the means two levels below: the {worst.size} block with "
        f"{_percent(worst.mass)} of the mass has Γ\u00a0=\u00a0{failure.gamma(2):.2g} but a gap of "
        f"{worst.gap:.2f}, and {failure.idle} of {len(failure.leaves)} leaves together hold less than "
        f"{_percent(IDLE_MASS)}."
    )


def _no_mass(why: str) -> Callable[[Failure], str]:
    """A score without mass: leaves where there is nothing to lose."""

    def explain(failure: Failure) -> str:
        worst = failure.worst
        return (
            f"{why} {failure.idle} of its {len(failure.leaves)} leaves together hold less than "
            f"{_percent(IDLE_MASS)} of the mass, and a {worst.size} block with "
            f"{_percent(worst.mass)} stays one leaf with a gap of {worst.gap:.2f}."
        )

    return explain


def _optimal(failure: Failure) -> str:
    worst = failure.worst
    return (
        "It is optimal among quadtrees only. The borders of these tiles are no borders of a quadtree, "
        f"so that a {worst.size} block with {_percent(worst.mass)} of the mass mixes several tiles."
    )


def _quadrants(failure: Failure) -> str:
    quarters = failure.quarters()
    kept = [leaf for leaf, is_kept, _ in quarters if is_kept]
    lost = [leaf for leaf, is_kept, _ in quarters if not is_kept]
    return (
        "A quarter is kept token by token, or is one mean. "
        f"{_count(kept, 'quarter')} with {_percent(sum(leaf.mass for leaf in kept))} of the mass "
        f"{'takes' if len(kept) == 1 else 'take'} nearly all leaves, and {_count(lost, 'mean').lower()} "
        f"{'stands' if len(lost) == 1 else 'stand'} for the rest."
    )


def _coin(failure: Failure) -> str:
    kept = [leaf for leaf, is_kept, _ in failure.quarters() if is_kept]
    return (
        f"The coin does not read the scores: it keeps {_count(kept, 'quarter').lower()} with "
        f"{_percent(sum(leaf.mass for leaf in kept))} of the mass."
    )


def _variance(failure: Failure) -> str:
    quarters = failure.quarters()
    kept = max((q for q in quarters if q[1]), key=lambda q: q[2], default=quarters[0])
    lost = max((q for q in quarters if not q[1]), key=lambda q: q[0].mass, default=quarters[-1])
    return (
        "Variance counts low tokens as much as high ones: it keeps a quarter of variance "
        f"{kept[2]:.1f} with {_percent(kept[0].mass)} of the mass, and not that of variance "
        f"{lost[2]:.1f} with {_percent(lost[0].mass)} and a gap of {lost[0].gap:.2f}."
    )


def _corrected(failure: Failure) -> str:
    variance = float(failure.scores.var())
    return (
        f"Half of the variance, {variance / 2:.1f}, is added to the mean, but the gap is "
        f"{failure.worst.gap:.2f}: dark tokens far below the others are no mass that is missing."
    )


def _count(leaves: list[_Leaf], noun: str) -> str:
    words = ("No", "One", "Two", "Three", "Four")
    return f"{words[len(leaves)]} {noun}{'' if len(leaves) == 1 else 's'}"


_EXPLANATIONS: dict[str, Callable[[Failure], str]] = {
    "gamma": _blind(1, "Γ compares the means of the quarters of a block, here equal ones."),
    "gamma-h2": _rare,
    "exact-gap": _no_mass("It reads gaps, but no mass."),
    "certified": _no_mass("It reads a bound on the gap, but no mass."),
    "mass": _blind(1, "Mass multiplies Γ, which is zero if the quarters have equal means."),
    "mass-coarse": _blind(1, "Mass multiplies Γ, which is zero if the quarters have equal means."),
    "optimal": _optimal,
    "quadrant-gap": _quadrants,
    "variance": _variance,
    "random-quadrants": _coin,
    "fixed-depth": _no_mass("All blocks have one size."),
    "fixed-blocks": _no_mass("All blocks have one size."),
    "block-mean": lambda failure: (
        "One mean has no setting: it loses the whole gap. Half of the variance, "
        f"{float(failure.scores.var()) / 2:.2f}, happens to be near to it here."
    ),
    "mean-variance": _corrected,
}


def explain(row: Row) -> str:
    """Return why the rule of a row fails, "" for a rule without an explanation.

    Args:
        row: A row of the record with the role "fails".
    """
    write = _EXPLANATIONS.get(family(get_text(row, "rule")))
    return "" if write is None else write(Failure.of(row))
