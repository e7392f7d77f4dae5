"""Rules at equal leaves and merging policies at equal operations, on the drawn task with masks.

Every method sees the same images. Thresholds of rules are matched to a share of leaves on other
images, budgets of policies to the operations of a baseline on one image. Differences from the
baseline are of the same images, and their intervals are from the bootstrap over images.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa.checks import check_integer
from bmfa.data.classification import EmbeddedImages
from bmfa.evidence.methods import FULL, family, is_kind
from bmfa.evidence.metrics import RESAMPLES, gain_columns, mask_iou
from bmfa.evidence.model_methods import ModelMethod, applied
from bmfa.evidence.runner.batches import ImageBatches
from bmfa.evidence.runner.loop import Segmenter, observed_trees
from bmfa.models import LoadedModel
from bmfa.models.flops import count_flops
from bmfa.records import Record, Row, environment

# Shares of leaves in percent at which rules are compared: those of blocks of 4x4 and of 2x2 tokens, so
# that fixed blocks can be compared too.
LEAVES = (6.25, 25.0)
# First values of the search for a threshold with these leaves, in the order of LEAVES.
RULES: dict[str, tuple[float, ...]] = {
    "random-quadrants": (0.0476, 0.2381),
    "fixed-blocks": (4, 2),
    "variance": (8.0, 2.33),
    "gamma": (0.673, 0.164),
    "gamma-h2": (1.43, 0.231),
    "quadrant-gap": (5.38, 2.0),
    "exact-gap": (1.41, 0.252),
    "mass": (0.0119, 0.00119),
    "optimal": (0.00841, 0.000354),
}
BASELINE_RULE = "gamma"  # Algorithm 1 of the paper
# Baselines and the policies that are compared with them at their operations.
BASELINES = ("tome:16", "tome:20", "tome:24")
POLICIES = ("free-energy", "pitome", "crossget", "random-pool")
LEAF_TOLERANCE = 0.75  # percentage points of leaves within which a threshold is matched
COST_TOLERANCE = 0.01  # share of the operations within which a budget is matched
LAYERS = "all"  # that rules screen
BATCH_SIZE = 25
MATCHING_IMAGES = 6
MATCHING_SEED = 1_000_003  # far from the seeds of the images that are measured

# What a method gives on every image, (images,) each: `agreeing`, `right`, `output_kl`, `mask_iou` with
# the object, and `leaf_ratio` of rules.
Outcome = dict[str, NDArray[np.float64]]


def run(
    model: LoadedModel,
    *,
    rules: Sequence[str] = tuple(RULES),
    leaves: Sequence[float] = LEAVES,
    policies: Sequence[str] = POLICIES,
    baselines: Sequence[str] = BASELINES,
    images: int = 200,
    seed: int = 0,
    device: str = "cpu",
) -> Record:
    """Compare rules at equal leaves, and merging policies at equal operations.

    Args:
        model: The embedded model.
        rules: Names of rules without a value, from `RULES`.
        leaves: Shares of leaves in percent, from `LEAVES`.
        policies: Names of merging policies without a value.
        baselines: Reductions whose operations the policies are matched to.
        images: Number of images.
        seed: Seed of the images, of random methods and of the bootstrap.
        device: Device of the model.

    Returns:
        A record of one row for the full model, for each rule and share of leaves, and for each policy
        and baseline. `gain_pp` is the agreement minus that of Algorithm 1 or of the baseline.

    Raises:
        TypeError: If the model is not the embedded one, which has the mask head.
        ValueError: If a rule or a share of leaves is unknown.

    Example:
        >>> from bmfa.models import load_model
        >>> model = load_model("embedded")
        >>> few = {"rules": ["fixed-blocks"], "leaves": [25.0], "policies": [], "baselines": []}
        >>> record = run(model, **few, images=2)
        >>> [(row["method"], row["leaf_percent"]) for row in record.rows]
        [('full', 100.0), ('fixed-blocks:2', 25.0)]
    """
    comparison = Comparison(model, images, seed, device)
    rows = [comparison.row(FULL, comparison.measure(FULL)) | {"leaf_percent": 100.0}]
    for share in leaves:
        rows += comparison.rules(rules, share)
    for baseline in baselines:
        rows += comparison.policies(policies, baseline)
    settings = {
        "model": model.name,
        "images": images,
        "layers": LAYERS,
        "leaves": list(leaves),
        "baseline_rule": BASELINE_RULE,
        "baselines": list(baselines),
        "batch_size": BATCH_SIZE,
        "seed": seed,
        "matching": f"thresholds within {LEAF_TOLERANCE} points of leaves on {MATCHING_IMAGES} other "
        f"images, budgets within {100 * COST_TOLERANCE:g} % of the operations of the baseline",
        "interval": "95 %, bootstrap over images of the difference of agreement on the same images",
        "resamples": RESAMPLES,
        "command": "bmfa report",
    }
    return Record("comparison", settings, rows, environment(device))


class Comparison:
    """The images and the outputs of the full model, with which every method is compared."""

    def __init__(self, loaded: LoadedModel, images: int, seed: int, device: str) -> None:
        self.subject, size = Segmenter(loaded, device), loaded.preprocess.size[0]
        self.seed = seed
        drawn = list(EmbeddedImages(check_integer("images", images, low=1), seed, size))
        batches = ImageBatches(drawn, loaded.preprocess, BATCH_SIZE, workers=0)
        # Images on the device, their labels and objects, and the outputs of the full model.
        self.batches: list[tuple[Tensor, Sequence[int | None], Tensor, Tensor]] = []
        with torch.inference_mode():
            for batch in batches.read(range(len(batches.sizes))):
                pixels = self.subject.load(batch)
                objects = torch.stack([torch.from_numpy(drawn[i].mask) for i in batch.indices])
                full = self.subject.logits(pixels)
                self.batches.append((pixels, batch.labels, objects, full))
        others = EmbeddedImages(MATCHING_IMAGES, MATCHING_SEED + seed, size)
        self.matching = loaded.preprocess.batch([one.pixels for one in others]).to(device)

    def rules(self, names: Sequence[str], share: float) -> list[Row]:
        """Measure rules at a share of leaves in percent."""
        outcomes: dict[str, Outcome] = {}
        for name in names:
            if name not in RULES or share not in LEAVES:
                raise ValueError(
                    f"rule {name!r} at {share} % leaves is unknown; pass rules from "
                    f"{', '.join(RULES)} and leaves from {', '.join(map(str, LEAVES))}"
                )
            first = RULES[name][LEAVES.index(share)]
            method = match_method(name, self._leaf_percent, first, share, LEAF_TOLERANCE)
            outcomes[method] = self.measure(method)
        baseline = next((o for m, o in outcomes.items() if family(m) == BASELINE_RULE), None)
        return [
            self.row(method, outcome, baseline)
            | {"target_percent": share, "leaf_percent": 100 * float(outcome["leaf_ratio"].mean())}
            for method, outcome in outcomes.items()
        ]

    def policies(self, names: Sequence[str], baseline: str) -> list[Row]:
        """Measure a baseline, and policies at its operations."""
        target, first = self._gflops(baseline), self.measure(baseline)
        rows = [self.row(baseline, first, first) | {"gflops": target, "baseline": baseline}]
        for name in names:
            # Shares of tokens kept that all policies accept.
            tolerance = COST_TOLERANCE * target
            method = match_method(name, self._gflops, 0.9, target, tolerance, (0.5, 1.0))
            cost = {"gflops": self._gflops(method), "baseline": baseline}
            rows.append(self.row(method, self.measure(method), first) | cost)
        return rows

    @torch.inference_mode()
    def measure(self, method: str) -> Outcome:
        """Measure one method on all images."""
        found = []
        with self._applied(method):
            for pixels, labels, objects, full in self.batches:
                columns = self.subject.compare(method, pixels, full, labels)
                columns["mask_iou"] = mask_iou(self.subject.masks, objects)
                found.append(columns)
        return {
            name: torch.cat([columns[name].double().cpu() for columns in found]).numpy()
            for name in found[0]
        }

    def row(self, method: str, outcome: Outcome, baseline: Outcome | None = None) -> Row:
        """Return the means of an outcome, and its gain over a baseline."""
        row: Row = {
            "method": method,
            "kind": "rule" if is_kind(method, "rule") else "reduction",
            "images": len(outcome["agreeing"]),
            "agreement_percent": 100 * float(outcome["agreeing"].mean()),
            "output_kl": float(outcome["output_kl"].mean()),
            "top1_percent": 100 * float(outcome["right"].mean()),
            "mask_iou": float(outcome["mask_iou"].mean()),
        }
        if method == FULL:
            row |= {"kind": FULL, "gflops": self._gflops(FULL)}
        if baseline is not None:
            row |= gain_columns(outcome["agreeing"], baseline["agreeing"], self.seed)
        return row

    @torch.inference_mode()
    def _leaf_percent(self, method: str) -> float:
        model = self.subject.model.model
        with self._applied(method), observed_trees(model) as trees:
            model(self.matching)
        return 100 * float(trees()["leaf_ratio"].mean())

    def _gflops(self, method: str) -> float:
        with self._applied(method):
            return count_flops(self.subject.model.model, self.batches[0][0][:1]) / 1e9

    def _applied(self, method: str) -> AbstractContextManager[ModelMethod]:
        """Apply a method so that the masks are on the full grid."""
        return applied(self.subject.model.model, method, LAYERS, self.seed, dense=True)


def match_method(name: str, measure: Callable[[str], float], first: float, *search: Any) -> str:
    """Return a method with the value at which a measure of it has a target; see `match_value`."""
    value = match_value(lambda value: measure(f"{name}:{value:.4g}"), first, *search)
    return f"{name}:{value:.4g}"


def match_value(
    measure: Callable[[float], float],
    first: float,
    target: float,
    tolerance: float,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> float:
    """Search the value of a method at which a measure has a target.

    The measure must rise or fall with the value. The search widens a bracket from the first value by
    factors of four and then halves it on a logarithmic scale, at most 24 measurements.

    Args:
        measure: Measures a value.
        first: Where the search begins, above 0.
        target: Of the measure.
        tolerance: Accepted distance from the target.
        limits: The smallest and the largest value that may be tried.

    Returns:
        The value with the measure nearest to the target.

    Example:
        >>> round(match_value(lambda x: x * x, 1.0, 9.0, 0.01), 2)
        3.0
    """
    tried = {first: measure(first)}
    for _ in range(23):
        nearest = min(tried, key=lambda value: abs(tried[value] - target))
        if abs(tried[nearest] - target) <= tolerance:
            break
        below = [value for value, found in tried.items() if found < target]
        above = [value for value, found in tried.items() if found >= target]
        if below and above:
            pairs = [(low, high) for low in below for high in above]
            low, high = min(pairs, key=lambda pair: abs(np.log(pair[0] / pair[1])))
            new = [float(np.sqrt(low * high))] if abs(np.log(low / high)) >= 1e-4 else []
        else:
            new = [max(min(tried) / 4.0, limits[0]), min(max(tried) * 4.0, limits[1])]
        new = [value for value in new if value not in tried]
        if not new:
            break
        tried |= {value: measure(value) for value in new}
    return min(tried, key=lambda value: abs(tried[value] - target))
