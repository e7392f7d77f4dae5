"""The numbers printed in the paper, from `paper.toml`, and the names of its data and methods."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bmfa.records import Row

NAME = "paper"
MODEL = "DeiT-Tiny"
IMAGENET_IMAGES = 50_000
ALGORITHM_1 = "gamma:0.005"
# The rule that the paper calls BMFA in its model tables: our fit to the leaf ratios it prints.
BMFA = "quadrant-gap:0.8"
# Random retention at the budget of BMFA.
RANDOM = "random-quadrants:0.25"
FIXED = "fixed-blocks:2"
# Algorithm 1 at the threshold of these tables.
PRINTED_THRESHOLD = "gamma:0.8"
VARIANCE = "variance:0.2"
FIT_NOTE = (
    "quadrant-gap stands for the paper's rule: it is our fit to the leaf ratios, because the paper does "
    "not define the rule"
)
LAYER_CHOICES = ("last-2", "last-4", "last-8", "all")


def _points(table: Mapping[str, Mapping[str, float]]) -> dict[str, SimpleNamespace]:
    """Return the numbers of each method as attributes; those that are not printed are missing."""
    return {name: SimpleNamespace(**numbers) for name, numbers in table.items()}


_PRINTED = tomllib.loads(Path(__file__).with_name("paper.toml").read_text("utf-8"))
DATASETS: Mapping[str, str] = _PRINTED["datasets"]
MODELS: Mapping[str, str] = _PRINTED["models"]
INSTANCES: Mapping[str, int] = _PRINTED["instances"]
SYNTHETIC = _points(_PRINTED["synthetic"])
PROBES = {
    (dataset, mode): _points(points)
    for dataset, modes in _PRINTED["probes"].items()
    for mode, points in modes.items()
}
ABLATION = {
    (parameter, float(value)): point
    for parameter, points in _PRINTED["ablation"].items()
    for value, point in _points(points).items()
}
CLOSED_LOOP = _points(_PRINTED["closed-loop"])
IMAGENET = _points(_PRINTED["imagenet"])
FIRST_FIGURE = [SimpleNamespace(**block) for block in _PRINTED["first-figure"]]
# The four cases of the paper's last figure: areas in %, lower bound of the mass in %, gaps.
CASE_AREAS, CASE_MASS, CASE_GAPS = (9.8, 12.5), 97.0, (2.854, 3.091)
# The tree of the paper's overview figure, on a crop of a kite.
OVERVIEW_EPSILON, OVERVIEW_LEAVES, OVERVIEW_TOKENS = 0.004, 82, 256


def imagenet_rows() -> list[Row]:
    """Return the ImageNet results that have a leaf ratio, as rows."""
    rows = [{"method": name, **vars(point)} for name, point in IMAGENET.items()]
    return [row for row in rows if "leaf_percent" in row]


def beside(row: Row, point: Any) -> Row:
    """Return a row with the numbers of a point added under keys `paper_...`; None adds nothing."""
    printed = {} if point is None else vars(point)
    return {**row, **{f"paper_{key}": value for key, value in printed.items()}}


def dataset_title(name: str) -> str:
    """Return the title of a data set."""
    return DATASETS.get(name, name)


def title(name: str) -> str:
    """Return the title of a data set of the paper or of its model; other names stay."""
    return MODELS.get(name, dataset_title(name))


def place(name: str) -> int:
    """Return the place of a data set on the page: those of the paper first and in its order."""
    return [*DATASETS, name].index(name)
