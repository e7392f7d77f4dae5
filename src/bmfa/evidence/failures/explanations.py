"""One sentence for every rule that fails, from `explanations.toml`, with the numbers of its record."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bmfa.energy import gap, gibbs, refinement_score
from bmfa.evidence.methods import family
from bmfa.evidence.page.panels import read_grid
from bmfa.grid import Grid
from bmfa.records import Row

IDLE_MASS = 0.01  # of the softmax mass: leaves that together hold less are called idle
EXPLANATIONS: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("explanations.toml").read_text("utf-8")
)


def explain(row: Row) -> str:
    """Return why the rule of a row with the role "fails" fails, "" for an unknown rule."""
    text = EXPLANATIONS.get(family(str(row["rule"])), "").strip()
    # Numbers do not part from their signs.
    text = text.format(**describe(row)).replace("%", "\u00a0%").replace(" \u00a0", "\u00a0")
    return text.replace(" = ", "\u00a0=\u00a0")


def describe(row: Row) -> dict[str, Any]:
    """Return the numbers of a tree that the explanations show."""
    scores = read_grid(row, "scores")
    weights = gibbs(torch.from_numpy(scores.ravel())).numpy().reshape(scores.shape)

    def part(top: int, left: int, bottom: int, right: int) -> dict[str, Any]:
        inside = np.ascontiguousarray(scores[top:bottom, left:right])
        return {
            "scores": inside,
            "size": f"{bottom - top}\u00a0×\u00a0{right - left}",
            "gap": float(gap(torch.from_numpy(inside.ravel()))),
            "mass": float(weights[top:bottom, left:right].sum()),
            "variance": float(inside.var()),
        }

    leaves = [part(*box) for box in row["boxes"]]
    # A leaf of mass p and gap G holds p exp(-G) of it and loses the rest.
    worst = min(leaves, key=lambda leaf: leaf["mass"] * np.expm1(-leaf["gap"]))
    block = worst["scores"]
    tokens, grid = torch.from_numpy(block.ravel()), Grid(*block.shape)
    (height, width), (middle, centre) = scores.shape, np.array(scores.shape) // 2
    quarters = [
        [top, left, bottom, right]
        for top, bottom in ((0, middle), (middle, height))
        for left, right in ((0, centre), (centre, width))
    ]
    kept = [part(*box) for box in quarters if box not in row["boxes"]]
    lost = [part(*box) for box in quarters if box in row["boxes"]]
    return {
        "leaves": len(leaves),
        "idle": int((np.sort([leaf["mass"] for leaf in leaves]).cumsum() < IDLE_MASS).sum()),
        "worst": worst,
        "gamma": [float(refinement_score(tokens, grid.partition(levels))) for levels in range(3)],
        "half_variance": float(scores.var()) / 2,
        "kept_count": len(kept),
        "kept_mass": sum(one["mass"] for one in kept),
        "kept": max(kept, key=lambda one: one["variance"], default=worst),
        "lost": max(lost, key=lambda one: one["mass"], default=worst),
    }
