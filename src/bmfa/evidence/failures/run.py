"""A seeded search for fields and images on which a rule is clearly worse than another.

Two trees are compared at equal leaves: the other rule has no more leaves than the rule that fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa.checks import check_integer
from bmfa.data import EmbeddedObjects, EmbeddedScenes, InstanceSource, ProbeBlock, ProbeSettings
from bmfa.data.drawn.objects import OBJECT_CATEGORIES
from bmfa.data.instances import Tally
from bmfa.data.probes import Mode, probe_block
from bmfa.energy import gap
from bmfa.evidence.failures.fields import FIELDS, SIDE, draw_field
from bmfa.evidence.images.thumbnails import crop_uri
from bmfa.evidence.methods import family
from bmfa.evidence.score_methods import estimate_all
from bmfa.grid import Grid
from bmfa.records import Record, Row, environment
from bmfa.trees.build import screen
from bmfa.trees.rules import parse

GRID = Grid(SIDE, SIDE)
MODE: Mode = "image-edge"
IMAGE_BYTES = 7000
DIGITS = 4  # decimals of scores
# Leaves of the rule that fails: with fewer, both trees are too coarse to show a difference; with more,
# every tree is nearly exact.
LEAST_LEAVES, MOST_LEAVES = 8, 130
# The other rule must have at most this share of the error of the rule that fails.
CLEARLY_LESS = 0.5
# An image is shown if its margin is at least this share of the best margin of any field.
IMAGE_PREFERENCE = 0.5
MEAN, CORRECTED_MEAN = "block-mean", "mean-variance"


def _ladder(low: float, high: float, count: int) -> tuple[float, ...]:
    """Return `count` parameters from `low` to `high` at equal ratios, rounded to three digits."""
    return tuple(float(f"{value:.3g}") for value in np.geomspace(low, high, count))


# Parameters of every rule, from nearly all tokens down to a few leaves.
SETTINGS: dict[str, tuple[float, ...]] = {
    "gamma": _ladder(1e-4, 3.0, 24),
    "gamma-h2": _ladder(1e-4, 3.0, 24),
    "exact-gap": _ladder(1e-3, 4.0, 24),
    "certified": _ladder(1e-3, 6.0, 24),
    "mass": _ladder(1e-6, 0.5, 24),
    "mass-coarse": _ladder(1e-6, 10.0, 24),
    "optimal": _ladder(1e-6, 0.2, 24),
    "quadrant-gap": _ladder(0.01, 5.0, 12),
    "variance": _ladder(0.01, 10.0, 12),
    "random-quadrants": (0.25, 0.5, 0.75),
    "fixed-depth": (1, 2, 3),
    "fixed-blocks": (3, 5, 6),  # sides of 2, 4 and 8 are a fixed depth
}
# What the decisions of a rule read: 0 nothing, 1 block means, 2 a few statistics of blocks, 3 all
# scores. A rule is compared with rules that read no more than it does, and no more than means if it
# reads nothing. The optimal tree, which reads all scores, is shown beside every pair.
READS = {
    **{"fixed-depth": 0, "fixed-blocks": 0, "random-quadrants": 0},
    **{"gamma": 1, "gamma-h2": 1, "mass-coarse": 1, "variance": 2, "certified": 2},
    **{"mass": 3, "exact-gap": 3, "quadrant-gap": 3, "optimal": 3},
}
PROTOCOL = (
    "the field or image and the two settings with the largest difference in E, among settings of "
    "another rule with no more leaves and at most half of E"
)


def run(*, fields: int = 60, poses: int = 24, scenes: int = 30, seed: int = 0) -> Record:
    """Search for a failure of every rule.

    Args:
        fields: Number of fields of each kind.
        poses: Number of drawn objects of each category.
        scenes: Number of drawn scenes; each has several objects.
        seed: Seed of fields, images and random rules.

    Returns:
        A record of rows for each rule: `role` is "fails" for its tree, "better" for the tree of the
        other rule, and "optimal" for the optimal tree of no more leaves. A rule that is nowhere clearly
        worse than another has no rows.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> record = run(fields=3, poses=1, scenes=1)
        >>> [row["method"] for row in record.rows if row["rule"] == "optimal"][1]
        'fixed-blocks:5'
    """
    check_integer("fields", fields, low=1)
    check_integer("poses", poses, low=1)
    check_integer("scenes", scenes, low=1)
    pool = _pool(fields, poses, scenes, seed)
    table = _Table(pool.scores, seed)
    taken: list[int] = []  # rows of the pool, so that no rule is shown on the field of another
    rows = [row for rule in SETTINGS for row in _failure(pool, table, rule, taken, seed)]
    rows += _summaries(pool, table)
    settings = {
        "dataset": "embedded",
        "grid": [SIDE, SIDE],
        "tau": 1.0,
        "mode": MODE,
        "fields": fields,
        "poses": poses,
        "scenes": scenes,
        "searched": len(pool.scores),
        "settings": len(table.names),
        "least_leaves": LEAST_LEAVES,
        "most_leaves": MOST_LEAVES,
        "clearly_less": CLEARLY_LESS,
        "image_preference": IMAGE_PREFERENCE,
        "seed": seed,
        "protocol": PROTOCOL,
    }
    return Record("failures", settings, rows, environment("cpu"))


@dataclass(frozen=True)
class _Pool:
    """Everything that is searched.

    Args:
        scores: (count, 256) float64.
        titles: What each field or image shows.
        probes: Source, block and index in it of every image, the first of `scores`.
    """

    scores: Tensor
    titles: Sequence[str]
    probes: Sequence[tuple[InstanceSource, ProbeBlock, int]]

    @property
    def images(self) -> int:
        return len(self.probes)


def _pool(fields: int, poses: int, scenes: int, seed: int) -> _Pool:
    sources = (EmbeddedObjects(poses, seed), EmbeddedScenes(scenes, seed))
    blocks = [
        (source, block)
        for source in sources
        if (block := probe_block(source.instances(), ProbeSettings(SIDE), Tally())) is not None
    ]
    drawn = [draw_field(kind, seed, index) for kind in FIELDS for index in range(fields)]
    scores = [*(block.scores(MODE) for _, block in blocks), np.stack(drawn).reshape(-1, GRID.size)]
    titles = [
        name if name in OBJECT_CATEGORIES else f"{name} object"
        for _, block in blocks
        for name in block.category
    ]
    titles += [kind for kind in FIELDS for _ in range(fields)]
    # Rounded as in the record, so that the record alone gives the same trees.
    rounded = torch.from_numpy(np.concatenate(scores)).round(decimals=DIGITS)
    probes = [(source, block, i) for source, block in blocks for i in range(len(block))]
    return _Pool(rounded, titles, probes)


class _Table:
    """Error and leaves of every setting (columns) on everything that is searched (rows)."""

    def __init__(self, scores: Tensor, seed: int) -> None:
        rules = [f"{rule}:{value:g}" for rule, values in SETTINGS.items() for value in values]
        self.names = [*rules, MEAN, CORRECTED_MEAN]
        found = estimate_all(self.names, scores, GRID, seed=seed)
        self.error = torch.stack([one.gap for one in found], 1).numpy()
        leaves = torch.stack([one.leaf_percent for one in found], 1) * (GRID.size / 100)
        self.leaves = leaves.round().long().numpy()

    def columns(self, *rules: str) -> NDArray[np.int64]:
        return np.flatnonzero([family(name) in rules for name in self.names])


def _failure(pool: _Pool, table: _Table, rule: str, taken: list[int], seed: int) -> list[Row]:
    """Return the rows of one rule: its tree, that of the other rule, and the optimal one.

    Its row of the pool is added to `taken`.
    """
    allowed = max(1, READS[rule])
    # A rule that is better by chance explains nothing.
    excluded = (rule, "optimal", "random-quadrants")
    others = [other for other in SETTINGS if other not in excluded and READS[other] <= allowed]
    columns, rivals = table.columns(rule), table.columns(*others)
    error, leaves = table.error[:, columns], table.leaves[:, columns]  # (rows, settings)
    affordable = table.leaves[:, None, rivals] <= leaves[:, :, None]
    rival_errors = np.where(affordable, table.error[:, None, rivals], np.inf)
    margin = error - rival_errors.min(2)
    margin[(leaves < LEAST_LEAVES) | (leaves > MOST_LEAVES)] = -np.inf
    margin[rival_errors.min(2) > CLEARLY_LESS * error] = -np.inf
    margin[taken] = -np.inf
    # The first setting, and then the first row, with the largest margin on images and on fields.
    fails, row = np.unravel_index(margin[: pool.images].T.argmax(), (len(columns), pool.images))
    best = margin[pool.images :]
    if not margin[row, fails] >= max(0.0, IMAGE_PREFERENCE * best.max()):
        fails, row = np.unravel_index(best.T.argmax(), best.T.shape)
        row += pool.images
    if margin[row, fails] <= 0:
        return []
    taken.append(int(row))
    better = rivals[rival_errors[row, fails].argmin()]
    names = {"fails": table.names[columns[fails]], "better": table.names[better]}
    if rule != "optimal":
        names["optimal"] = f"optimal-leaves:{leaves[row, fails]}"
    # Random rules draw one coin for every row of a batch, so all rows of the pool are screened.
    shared, scores = _shared(pool, int(row), rule), pool.scores[row]
    rows = []
    for role, name in names.items():
        drawn = family(name) == "random-quadrants"
        tree = screen(pool.scores if drawn else scores[None], GRID, parse(name, seed))
        tree = tree[int(row) if drawn else 0]
        result: Row = {
            "role": role,
            "method": name,
            "boxes": tree.leaf_boxes.tolist(),
            "error": float(tree.error(scores)),
            "leaves": int(tree.leaf_count),
            "leaf_percent": 100 * float(tree.leaf_ratio),
        }
        rows.append(shared | result)
    return rows


def _summaries(pool: _Pool, table: _Table) -> list[Row]:
    """Return rows for the two summaries of one leaf: where one is nearer to F than the other."""
    mean, corrected = (int(table.columns(name)[0]) for name in (MEAN, CORRECTED_MEAN))
    size = np.abs(table.error)
    rows = []
    for fails, better in ((mean, corrected), (corrected, mean)):
        chosen = int((size[:, fails] - size[:, better])[: pool.images].argmax())
        if size[chosen, fails] <= size[chosen, better]:
            chosen = int((size[:, fails] - size[:, better]).argmax())
        shared = _shared(pool, chosen, table.names[fails])
        for role, column in (("fails", fails), ("better", better)):
            result: Row = {
                "role": role,
                "method": table.names[column],
                "boxes": [[0, 0, SIDE, SIDE]],
                "error": float(table.error[chosen, column]),
                "leaves": 1,
                "leaf_percent": 100 / GRID.size,
            }
            rows.append(shared | result)
    return rows


def _shared(pool: _Pool, index: int, rule: str) -> Row:
    """Return the columns that the rows of one rule share."""
    scores = pool.scores[index]
    row: dict[str, Any] = {
        "rule": rule,
        "title": pool.titles[index],
        "source": "image" if index < pool.images else "field",
        "height": SIDE,
        "width": SIDE,
        "scores": [round(score, DIGITS) for score in scores.tolist()],
        "gap": float(gap(scores)),
    }
    if index < pool.images:
        row["image"] = crop_uri(*pool.probes[index], IMAGE_BYTES)
    return row
