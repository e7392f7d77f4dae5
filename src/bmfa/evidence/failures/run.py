"""A seeded search for fields and images on which a rule is clearly worse than another.

Two trees are compared at equal leaves: the other rule has no more leaves than the rule that fails.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from bmfa.checks import check_integer
from bmfa.data import EmbeddedObjects, EmbeddedScenes, ProbeSettings
from bmfa.data.drawn.objects import OBJECT_CATEGORIES
from bmfa.data.instances import Tally
from bmfa.data.probes import Mode, probe_block
from bmfa.energy import gap
from bmfa.evidence.failures.fields import FIELDS, SIDE, draw_field
from bmfa.evidence.images.thumbnails import crop_uri
from bmfa.evidence.methods import family
from bmfa.evidence.score_methods import estimate_all, tree_columns
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
        'fixed-blocks:3'
    """
    for name, value in (("fields", fields), ("poses", poses), ("scenes", scenes)):
        check_integer(name, value, low=1)
    pool = _Pool(fields, poses, scenes, seed)
    taken: list[int] = []  # rows of the pool, so that no rule is shown on the field of another
    rows = [row for rule in SETTINGS for row in _failure(pool, rule, taken)]
    rows += _summaries(pool)
    settings = {
        "dataset": "embedded",
        "grid": [SIDE, SIDE],
        "tau": 1.0,
        "mode": MODE,
        "fields": fields,
        "poses": poses,
        "scenes": scenes,
        "searched": len(pool.scores),
        "settings": len(pool.names),
        "least_leaves": LEAST_LEAVES,
        "most_leaves": MOST_LEAVES,
        "clearly_less": CLEARLY_LESS,
        "image_preference": IMAGE_PREFERENCE,
        "seed": seed,
        "protocol": PROTOCOL,
    }
    return Record("failures", settings, rows, environment("cpu"))


class _Pool:
    """The images and fields that are searched (rows), and every setting of every rule (columns).

    Attributes:
        scores: (count, 256) float64, those of images first.
        titles: What each image or field shows.
        probes: Source, block and index in it of every image.
        names: The rules with their settings, and the two summaries.
        error: (count, names) E of every setting, leaves their leaves.
    """

    def __init__(self, fields: int, poses: int, scenes: int, seed: int) -> None:
        blocks = [
            (source, block)
            for source in (EmbeddedObjects(poses, seed), EmbeddedScenes(scenes, seed))
            if (block := probe_block(source.instances(), ProbeSettings(SIDE), Tally())) is not None
        ]
        drawn = [
            draw_field(kind, seed, index).ravel() for kind in FIELDS for index in range(fields)
        ]
        scores = np.concatenate([*(block.scores(MODE) for _, block in blocks), np.stack(drawn)])
        # Rounded as in the record, so that the record alone gives the same trees.
        self.scores = torch.from_numpy(scores).round(decimals=DIGITS)
        categories = [name for _, block in blocks for name in block.category]
        self.titles = [n if n in OBJECT_CATEGORIES else f"{n} object" for n in categories]
        self.titles += [kind for kind in FIELDS for _ in range(fields)]
        self.probes = [(source, block, i) for source, block in blocks for i in range(len(block))]
        self.images, self.seed = len(self.probes), seed
        rules = [f"{rule}:{value:g}" for rule, values in SETTINGS.items() for value in values]
        self.names = [*rules, MEAN, CORRECTED_MEAN]
        found = estimate_all(self.names, self.scores, GRID, seed=seed)
        self.error = torch.stack([one.gap for one in found], 1).numpy()
        leaves = torch.stack([one.leaf_percent for one in found], 1) * (GRID.size / 100)
        self.leaves = leaves.round().long().numpy()

    def columns(self, *rules: str) -> NDArray[np.int64]:
        return np.flatnonzero([family(name) in rules for name in self.names])

    def rows(self, index: int, rule: str, methods: dict[str, str]) -> list[Row]:
        """Return the rows of one rule on one image or field, of a method for each role."""
        scores = self.scores[index]
        shared: Row = {
            "rule": rule,
            "title": self.titles[index],
            "source": "image" if index < self.images else "field",
            "height": SIDE,
            "width": SIDE,
            "scores": [round(score, DIGITS) for score in scores.tolist()],
            "gap": float(gap(scores)),
        }
        if index < self.images:
            shared["image"] = crop_uri(*self.probes[index], IMAGE_BYTES)
        return [
            {**shared, "role": role, "method": name, **self._result(index, name)}
            for role, name in methods.items()
        ]

    def _result(self, index: int, name: str) -> Row:
        if name in (MEAN, CORRECTED_MEAN):
            error = float(self.error[index, self.names.index(name)])
            whole = {"boxes": [[0, 0, SIDE, SIDE]], "error": error, "leaves": 1}
            return {**whole, "leaf_percent": 100 / GRID.size}
        # Random rules draw one coin for every row of a batch, so all rows of the pool are screened.
        drawn, scores = family(name) == "random-quadrants", self.scores[index]
        trees = screen(self.scores if drawn else scores[None], GRID, parse(name, self.seed))
        return tree_columns(trees[index if drawn else 0], scores)


def _failure(pool: _Pool, rule: str, taken: list[int]) -> list[Row]:
    """Return the rows of one rule: its tree, that of the other rule, and the optimal one.

    Its row of the pool is added to `taken`.
    """
    allowed = max(1, READS[rule])
    # A rule that is better by chance explains nothing.
    excluded = (rule, "optimal", "random-quadrants")
    others = [other for other in SETTINGS if other not in excluded and READS[other] <= allowed]
    columns, rivals = pool.columns(rule), pool.columns(*others)
    error, leaves = pool.error[:, columns], pool.leaves[:, columns]  # (rows, settings)
    affordable = pool.leaves[:, None, rivals] <= leaves[:, :, None]
    rival_errors = np.where(affordable, pool.error[:, None, rivals], np.inf)
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
    names = {"fails": pool.names[columns[fails]], "better": pool.names[better]}
    if rule != "optimal":
        names["optimal"] = f"optimal-leaves:{leaves[row, fails]}"
    return pool.rows(int(row), rule, names)


def _summaries(pool: _Pool) -> list[Row]:
    """Return rows for the two summaries of one leaf: where one is nearer to F than the other."""
    rows = []
    for fails, better in ((MEAN, CORRECTED_MEAN), (CORRECTED_MEAN, MEAN)):
        size = {name: np.abs(pool.error[:, pool.names.index(name)]) for name in (fails, better)}
        margin = size[fails] - size[better]
        chosen = int(margin[: pool.images].argmax())
        if margin[chosen] <= 0:
            chosen = int(margin.argmax())
        rows += pool.rows(chosen, fails, {"fails": fails, "better": better})
    return rows
