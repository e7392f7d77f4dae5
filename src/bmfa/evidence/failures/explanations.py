"""One sentence for every rule that fails, with the numbers of its record."""

from typing import Any

import numpy as np
import torch

from bmfa.energy import gap, gibbs, refinement_score
from bmfa.evidence.methods import family
from bmfa.evidence.page.panels import read_grid
from bmfa.evidence.page.record_set import get_text
from bmfa.grid import Grid
from bmfa.records import Row

IDLE_MASS = 0.01  # of the softmax mass: leaves that together hold less are called idle

# The fields are those of `describe`: `worst` is the leaf that loses the most mass, `kept` and `lost` are
# quarters of the grid that are computed token by token, or as one mean.
EQUAL_MEANS = (
    "The {worst[size]} block with {worst[mass]:.0%} of the mass has Γ\u00a0=\u00a0{gamma[1]:.2g} but "
    "a gap of {worst[gap]:.2f}, and stays one leaf."
)
NO_MASS = (
    "{idle} of its {leaves} leaves together hold less than 1 % of the mass, and a {worst[size]} block "
    "with {worst[mass]:.0%} stays one leaf with a gap of {worst[gap]:.2f}."
)
MASS = f"Mass multiplies Γ, which is zero if the quarters have equal means. {EQUAL_MEANS}"
EXPLANATIONS = {
    "gamma": f"Γ compares the means of the quarters of a block, here equal ones. {EQUAL_MEANS}",
    "gamma-h2": "One token hardly moves the means two levels below: the {worst[size]} block with "
    "{worst[mass]:.0%} of the mass has Γ\u00a0=\u00a0{gamma[2]:.2g} but a gap of {worst[gap]:.2f}, and "
    "{idle} of {leaves} leaves together hold less than 1 %.",
    "exact-gap": f"It reads gaps, but no mass. {NO_MASS}",
    "certified": f"It reads a bound on the gap, but no mass. {NO_MASS}",
    "mass": MASS,
    "mass-coarse": MASS,
    "optimal": "It is optimal among quadtrees only. The borders of these tiles are no borders of a "
    "quadtree, so that a {worst[size]} block with {worst[mass]:.0%} of the mass mixes several tiles.",
    "quadrant-gap": "A quarter is kept token by token, or is one mean. Kept: {kept_count} of 4, with "
    "{kept_mass:.0%} of the mass and nearly all leaves.",
    "variance": "Variance counts low tokens as much as high ones: it keeps a quarter of variance "
    "{kept[variance]:.1f} with {kept[mass]:.0%} of the mass, and not that of variance "
    "{lost[variance]:.1f} with {lost[mass]:.0%} and a gap of {lost[gap]:.2f}.",
    "random-quadrants": "The coin does not read the scores: it keeps {kept_count} of 4 quarters, with "
    "{kept_mass:.1%} of the mass.",
    "fixed-depth": f"All blocks have one size. {NO_MASS}",
    "fixed-blocks": f"All blocks have one size. {NO_MASS}",
    "block-mean": "One mean has no setting: it loses the whole gap. Half of the variance, "
    "{half_variance:.2f}, happens to be near to it here.",
    "mean-variance": "Half of the variance, {half_variance:.1f}, is added to the mean, but the gap is "
    "{worst[gap]:.2f}: dark tokens far below the others are no mass that is missing.",
}


def explain(row: Row) -> str:
    """Return why the rule of a row with the role "fails" fails, "" for an unknown rule."""
    text = EXPLANATIONS.get(family(get_text(row, "rule")), "")
    return text.format(**describe(row)).replace("%", "\u00a0%").replace(" \u00a0", "\u00a0")


def describe(row: Row) -> dict[str, Any]:
    """Return the numbers of a tree that the explanations show."""
    scores = read_grid(row, "scores")
    weights = gibbs(torch.from_numpy(scores.ravel())).numpy().reshape(scores.shape)

    def part(box: tuple[int, int, int, int]) -> dict[str, Any]:
        top, left, bottom, right = box
        inside = np.ascontiguousarray(scores[top:bottom, left:right])
        return {
            "scores": inside,
            "size": f"{bottom - top}\u00a0×\u00a0{right - left}",
            "gap": float(gap(torch.from_numpy(inside.ravel()))),
            "mass": float(weights[top:bottom, left:right].sum()),
            "variance": float(inside.var()),
        }

    boxes = [(box[0], box[1], box[2], box[3]) for box in row["boxes"]]
    leaves = [part(box) for box in boxes]
    # A leaf of mass p and gap G holds p exp(-G) of it and loses the rest.
    worst = min(leaves, key=lambda leaf: leaf["mass"] * np.expm1(-leaf["gap"]))
    block = worst["scores"]
    gamma = [
        float(
            refinement_score(torch.from_numpy(block.ravel()), Grid(*block.shape).partition(levels))
        )
        for levels in range(3)
    ]
    (height, width), (middle, centre) = scores.shape, np.array(scores.shape) // 2
    quarters = [
        (top, left, bottom, right)
        for top, bottom in ((0, middle), (middle, height))
        for left, right in ((0, centre), (centre, width))
    ]
    kept = [part(box) for box in quarters if box not in boxes]
    lost = [part(box) for box in quarters if box in boxes]
    return {
        "leaves": len(leaves),
        "idle": int((np.sort([leaf["mass"] for leaf in leaves]).cumsum() < IDLE_MASS).sum()),
        "worst": worst,
        "gamma": gamma,
        "half_variance": float(scores.var()) / 2,
        "kept_count": len(kept),
        "kept_mass": sum(one["mass"] for one in kept),
        "kept": max(kept, key=lambda one: one["variance"], default=worst),
        "lost": max(lost, key=lambda one: one["mass"], default=worst),
    }
