"""The numbers that the paper prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NAME = "paper"
DATASETS: Mapping[str, str] = {
    "coco": "COCO",
    "lvis": "LVIS",
    "embedded": "Embedded pictures",
}
INSTANCES: Mapping[str, int] = {"coco": 36149, "lvis": 20000}


@dataclass(frozen=True)
class Point:
    """What the paper prints of one method; None where it prints nothing."""

    mean_gap: float
    p95_gap: float | None
    leaf_percent: float | None


@dataclass(frozen=True)
class Ablated:
    """What the paper prints of one setting; None where it prints nothing."""

    mean_gap: float
    leaf_percent: float | None = None
    milliseconds: float | None = None


ALGORITHM_1 = "gamma:0.005"

SYNTHETIC: Mapping[str, Point] = {
    "sparge-mean": Point(2.582, 5.114, 0.391),
    "fixed-depth:2": Point(1.129, None, 6.250),
    ALGORITHM_1: Point(0.261, 2.035, 5.794),
    "edge-aware": Point(0.0, 0.0, 100.0),
}

PROBES: Mapping[tuple[str, str], Mapping[str, Point]] = {
    ("coco", "image-edge"): {
        "sparge-mean": Point(2.254, 2.551, 0.391),
        "mean-variance": Point(0.787, 1.162, 0.391),
        "fixed-depth:1": Point(2.200, 2.524, 1.563),
        "fixed-depth:2": Point(1.840, 2.241, 6.250),
        ALGORITHM_1: Point(0.526, 2.434, 30.810),
        "edge-aware": Point(0.0, 0.0, 100.0),
    },
    ("lvis", "image-edge"): {
        "sparge-mean": Point(2.277, 2.613, 0.391),
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

ABLATION: Mapping[tuple[str, float], Ablated] = {
    ("epsilon", 0.05): Ablated(1.644, 9.26, 0.697),
    ("epsilon", 0.005): Ablated(0.549, 29.08, 2.099),
    ("epsilon", 0.001): Ablated(0.120, 53.24, 3.350),
    ("depth", 2): Ablated(1.917),
    ("depth", 4): Ablated(0.549, 29.08, 2.099),
    ("depth", 5): Ablated(0.549, 29.08),
    ("grid", 8): Ablated(0.403, 56.03),
    ("grid", 16): Ablated(0.549, 29.08, 2.099),
    ("grid", 32): Ablated(0.910, 12.39, 3.553),
}


def dataset_title(name: str) -> str:
    """A data set's name as people write it."""
    return DATASETS.get(name, name)


def sort_datasets(names: Sequence[str]) -> list[str]:
    """The paper's data sets first, in its order."""
    known = list(DATASETS)
    return sorted(names, key=lambda name: [*known, name].index(name))
