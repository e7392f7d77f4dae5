"""The numbers printed in the paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bmfa.records import Row

NAME = "paper"
# Titles of the data sets, in the order of the page.
DATASETS: Mapping[str, str] = {
    "coco": "COCO",
    "lvis": "LVIS",
    "embedded": "Embedded images",
}
# Titles of the names that load the paper's model.
MODELS: Mapping[str, str] = {
    "timm:deit_tiny_patch16_224": "DeiT-Tiny",
    "hf:facebook/deit-tiny-patch16-224": "DeiT-Tiny",
}
# Instances of each data set in the paper.
INSTANCES: Mapping[str, int] = {"coco": 36149, "lvis": 20000}


@dataclass(frozen=True)
class Point:
    """One method in the synthetic and the probe tables; None if the paper prints no number."""

    mean_gap: float
    p95_gap: float | None
    leaf_percent: float | None


@dataclass(frozen=True)
class AblationPoint:
    """One setting in the ablation table; None if the paper prints no number."""

    mean_gap: float
    leaf_percent: float | None = None
    milliseconds: float | None = None


ALGORITHM_1 = "gamma:0.005"

SYNTHETIC: Mapping[str, Point] = {
    "block-mean": Point(2.582, 5.114, 0.391),
    "fixed-depth:2": Point(1.129, None, 6.250),
    ALGORITHM_1: Point(0.261, 2.035, 5.794),
    "edge-aware": Point(0.0, 0.0, 100.0),
}

PROBES: Mapping[tuple[str, str], Mapping[str, Point]] = {
    ("coco", "image-edge"): {
        "block-mean": Point(2.254, 2.551, 0.391),
        "mean-variance": Point(0.787, 1.162, 0.391),
        "fixed-depth:1": Point(2.200, 2.524, 1.563),
        "fixed-depth:2": Point(1.840, 2.241, 6.250),
        ALGORITHM_1: Point(0.526, 2.434, 30.810),
        "edge-aware": Point(0.0, 0.0, 100.0),
    },
    ("lvis", "image-edge"): {
        "block-mean": Point(2.277, 2.613, 0.391),
        "mean-variance": Point(0.824, 1.248, 0.391),
        "fixed-depth:1": Point(2.233, 2.590, 1.563),
        "fixed-depth:2": Point(1.865, 2.313, 6.250),
        ALGORITHM_1: Point(0.596, 2.509, 29.225),
        "edge-aware": Point(0.0, 0.0, 100.0),
    },
    ("coco", "mask-only"): {
        "mean-variance": Point(0.600, 0.835, None),
        ALGORITHM_1: Point(0.534, 1.830, None),
    },
}

ABLATION: Mapping[tuple[str, float], AblationPoint] = {
    ("epsilon", 0.05): AblationPoint(1.644, 9.26, 0.697),
    ("epsilon", 0.005): AblationPoint(0.549, 29.08, 2.099),
    ("epsilon", 0.001): AblationPoint(0.120, 53.24, 3.350),
    ("depth", 2): AblationPoint(1.917),
    ("depth", 4): AblationPoint(0.549, 29.08, 2.099),
    ("depth", 5): AblationPoint(0.549, 29.08),
    ("grid", 8): AblationPoint(0.403, 56.03),
    ("grid", 16): AblationPoint(0.549, 29.08, 2.099),
    ("grid", 32): AblationPoint(0.910, 12.39, 3.553),
}


@dataclass(frozen=True)
class ClosedLoopPoint:
    """One method in the last four layers of DeiT-Tiny, on COCO."""

    leaf_percent: float
    agreement_percent: float
    output_kl: float | None = None


@dataclass(frozen=True)
class ImageNetPoint:
    """One method on ImageNet-1K; None if the paper prints no number."""

    top1_percent: float
    drop_pp: float
    agreement_percent: float | None
    leaf_percent: float | None
    speedup: float


MODEL = "DeiT-Tiny"
COCO_IMAGES, IMAGENET_IMAGES = 5_000, 50_000
# The rule that the paper calls BMFA in its model tables: our fit to the leaf ratios it prints.
BMFA = "quadrant-gap:0.8"
# Random retention at the budget of BMFA.
RANDOM = "random-quadrants:0.25"
FIXED = "fixed-blocks:2"
# Algorithm 1 at the threshold of these tables.
PRINTED_THRESHOLD = "gamma:0.8"
# The paper states no threshold for its variance-only row. Of the thresholds measured here, this one
# has the leaf ratio in DeiT-Tiny nearest to the printed one.
VARIANCE = "variance:0.2"
FIT_NOTE = (
    "quadrant-gap stands for the paper's rule: it is our fit to the leaf ratios, because the paper does "
    "not define the rule"
)
LAYER_CHOICES = ("last-2", "last-4", "last-8", "all")

CLOSED_LOOP: Mapping[str, ClosedLoopPoint] = {
    FIXED: ClosedLoopPoint(25.00, 73.50, 0.196),
    "random-quadrants:0.25": ClosedLoopPoint(26.53, 61.54, 0.406),
    "random-quadrants:0.5": ClosedLoopPoint(51.00, 72.40, 0.189),
    "quadrant-gap:0.8": ClosedLoopPoint(30.82, 75.98, 0.149),
    "quadrant-gap:0.5": ClosedLoopPoint(52.66, 87.00, 0.041),
    VARIANCE: ClosedLoopPoint(97.57, 99.02),
}

IMAGENET: Mapping[str, ImageNetPoint] = {
    "full": ImageNetPoint(72.084, 0.000, None, None, 1.000),
    "tome:8": ImageNetPoint(71.666, 0.418, 94.122, None, 1.187),
    FIXED: ImageNetPoint(69.322, 2.762, 87.322, 25.000, 0.940),
    "quadrant-gap:0.8": ImageNetPoint(69.820, 2.264, 88.146, 34.868, 0.864),
    "quadrant-gap:0.5": ImageNetPoint(71.520, 0.564, 93.646, 55.861, 0.860),
    "random-quadrants:0.25": ImageNetPoint(65.146, 6.938, 79.458, 26.530, 0.916),
    "random-quadrants:0.5": ImageNetPoint(69.148, 2.936, 86.908, 51.024, 0.920),
}


@dataclass(frozen=True)
class FigureBlock:
    """One block of the paper's first figure: the minority's area and mass, and the gap of the mean."""

    area_percent: float
    mass_percent: float
    gap: float


FIRST_FIGURE = (FigureBlock(12.5, 97.6, 2.923), FigureBlock(10.5, 97.1, 2.854))
# The four cases of the paper's last figure: areas in %, lower bound of the mass in %, gaps.
CASE_AREAS, CASE_MASS, CASE_GAPS = (9.8, 12.5), 97.0, (2.854, 3.091)
# The tree of the paper's overview figure, on a crop of a kite.
OVERVIEW_EPSILON, OVERVIEW_LEAVES, OVERVIEW_TOKENS = 0.004, 82, 256


def imagenet_rows() -> list[Row]:
    """Return the ImageNet results that have a leaf ratio, as rows."""
    return [
        {"method": name, **vars(point)}
        for name, point in IMAGENET.items()
        if point.leaf_percent is not None
    ]


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


def sort_datasets(names: Sequence[str]) -> list[str]:
    """Sort data sets, those of the paper first and in its order."""
    known = list(DATASETS)
    return sorted(names, key=lambda name: [*known, name].index(name))
