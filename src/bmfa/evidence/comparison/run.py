"""Rules at equal leaves and merging policies at equal operations, on the drawn task with masks.

Every method sees the same images. Thresholds of rules are matched to a share of leaves on other
images, budgets of policies to the operations of a baseline on one image. Differences from the
baseline are of the same images, and their intervals are from the bootstrap over images.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa.checks import check_integer
from bmfa.data.classification import EmbeddedImages
from bmfa.evidence.methods import FULL, family, is_kind
from bmfa.evidence.model_methods import Layers, LeafCounter, count_leaves, parse
from bmfa.models import LoadedModel, patch, reduce, unpatch
from bmfa.models.embedded import EmbeddedViT, mask_iou
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
MATCHING_IMAGES = 6
MATCHING_SEED = 1_000_003  # far from the seeds of the images that are measured
RESAMPLES = 10_000  # of the bootstrap: the ends of a 95 % interval repeat to a tenth of a point


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a method gives on every image; the arrays are (images,)."""

    agrees: NDArray[np.bool_]  # with the class of the full model
    right: NDArray[np.bool_]
    output_kl: NDArray[np.float64]  # KL(full || method), nats
    mask_iou: NDArray[np.float64]  # with the object
    leaves: NDArray[np.float64]  # share of the spatial keys, 0 to 1; zeros without a tree


def run(
    model: LoadedModel,
    *,
    rules: Sequence[str] = tuple(RULES),
    leaves: Sequence[float] = LEAVES,
    policies: Sequence[str] = POLICIES,
    baselines: Sequence[str] = BASELINES,
    images: int = 200,
    layers: Layers = "all",
    batch_size: int = 25,
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
        layers: Layers that the rules screen.
        batch_size: Images in a batch.
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
    comparison = Comparison(model, images, layers, batch_size, seed, device)
    rows = [comparison.row(FULL, comparison.full) | {"leaf_percent": 100.0}]
    for share in leaves:
        rows += comparison.rules(rules, share)
    for baseline in baselines:
        rows += comparison.policies(policies, baseline)
    settings = {
        "model": model.name,
        "images": images,
        "layers": layers if isinstance(layers, str) else list(layers),
        "leaves": list(leaves),
        "baseline_rule": BASELINE_RULE,
        "baselines": list(baselines),
        "batch_size": batch_size,
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

    def __init__(
        self,
        loaded: LoadedModel,
        images: int,
        layers: Layers,
        batch_size: int,
        seed: int,
        device: str,
    ) -> None:
        if not isinstance(loaded.model, EmbeddedViT):
            raise TypeError(
                f"the model is {type(loaded.model).__name__}; pass load_model('embedded'), which has "
                "a mask head"
            )
        unpatch(loaded.model)
        self.model: EmbeddedViT = loaded.model.to(device)
        self.count = check_integer("images", images, low=1)
        self.layers, self.batch_size, self.seed, self.device = layers, batch_size, seed, device
        size = loaded.preprocess.size[0]
        drawn = list(EmbeddedImages(images, seed, size))
        self.pixels = loaded.preprocess.batch([one.pixels for one in drawn])
        self.labels = torch.tensor([one.label for one in drawn])
        self.masks = torch.from_numpy(np.stack([one.mask for one in drawn if one.mask is not None]))
        others = EmbeddedImages(MATCHING_IMAGES, MATCHING_SEED + seed, size)
        self.matching = loaded.preprocess.batch([one.pixels for one in others])
        with torch.inference_mode():
            self.flops = count_flops(self.model, self.pixels[:1].to(device))
            parts = [self.model.forward_dense(part) for part in self._batches()]
        self.logits = torch.cat([logits for logits, _ in parts]).double().cpu()
        self.full = self._outcome(self.logits, torch.cat([m for _, m in parts]).cpu())

    def rules(self, names: Sequence[str], share: float) -> list[Row]:
        """Measure rules at a share of leaves in percent."""
        outcomes: dict[str, Outcome] = {}
        for name in names:
            if name not in RULES or share not in LEAVES:
                raise ValueError(
                    f"rule {name!r} at {share} % leaves is unknown; pass rules from "
                    f"{', '.join(RULES)} and leaves from {', '.join(map(str, LEAVES))}"
                )
            value = match_value(
                RULES[name][LEAVES.index(share)],
                share,
                lambda value, name=name: self._leaf_percent(f"{name}:{value:.4g}"),  # type: ignore[misc]
                LEAF_TOLERANCE,
            )
            outcomes[f"{name}:{value:.4g}"] = self.measure(f"{name}:{value:.4g}")
        baseline = next((o for m, o in outcomes.items() if family(m) == BASELINE_RULE), None)
        return [
            self.row(method, outcome, baseline)
            | {"target_percent": share, "leaf_percent": 100 * float(outcome.leaves.mean())}
            for method, outcome in outcomes.items()
        ]

    def policies(self, names: Sequence[str], baseline: str) -> list[Row]:
        """Measure a baseline, and policies at its operations."""
        target, first = self._gflops(baseline), self.measure(baseline)
        rows = [self.row(baseline, first, first) | {"gflops": target, "baseline": baseline}]
        for name in names:
            value = match_value(
                0.9,
                target,
                lambda value, name=name: self._gflops(f"{name}:{value:.4g}"),  # type: ignore[misc]
                COST_TOLERANCE * target,
                limits=(0.5, 1.0),  # the shares of tokens kept that all policies accept
            )
            method = f"{name}:{value:.4g}"
            cost = {"gflops": self._gflops(method), "baseline": baseline}
            rows.append(self.row(method, self.measure(method), first) | cost)
        return rows

    def measure(self, method: str) -> Outcome:
        """Measure one method on all images."""
        outputs: list[Tensor] = []
        masks: list[Tensor] = []
        with torch.inference_mode(), self._applied(method) as leaves:
            for part in self._batches():
                logits, mask = self.model.forward_dense(part)
                outputs.append(logits.double().cpu())
                masks.append(mask.cpu())
        ratios = _mean_over_layers(leaves, len(outputs))
        return self._outcome(torch.cat(outputs), torch.cat(masks), ratios)

    def row(self, method: str, outcome: Outcome, baseline: Outcome | None = None) -> Row:
        """Return the means of an outcome, and its gain over a baseline."""
        row: Row = {
            "method": method,
            "kind": "rule" if is_kind(method, "rule") else "reduction",
            "images": self.count,
            "agreement_percent": 100 * float(outcome.agrees.mean()),
            "output_kl": float(outcome.output_kl.mean()),
            "top1_percent": 100 * float(outcome.right.mean()),
            "mask_iou": float(outcome.mask_iou.mean()),
        }
        if method == FULL:
            row |= {"kind": FULL, "gflops": self.flops / 1e9}
        if baseline is not None:
            gain = outcome.agrees.astype(float) - baseline.agrees
            low, high = interval(gain, self.seed)
            row |= {
                "gain_pp": 100 * float(gain.mean()),
                "gain_low_pp": 100 * low,
                "gain_high_pp": 100 * high,
            }
        return row

    @contextmanager
    def _applied(self, method: str) -> Iterator[LeafCounter]:
        """Apply a method to the model inside the block and count the leaves of its trees."""
        parsed = parse(method, self.seed)
        unpatch(self.model)
        if parsed.rule is not None:
            patch(self.model, rule=parsed.rule, layers=self.layers)
        elif parsed.policy is not None:
            reduce(self.model, parsed.policy, dense=True)
        try:
            with count_leaves(self.model) as leaves:
                yield leaves
        finally:
            unpatch(self.model)

    def _leaf_percent(self, method: str) -> float:
        with torch.inference_mode(), self._applied(method) as leaves:
            self.model(self.matching.to(self.device))
        return 100 * leaves.sum / len(self.matching)

    def _gflops(self, method: str) -> float:
        with torch.inference_mode(), self._applied(method):
            return count_flops(self.model, self.pixels[:1].to(self.device)) / 1e9

    def _batches(self) -> Iterator[Tensor]:
        for start in range(0, len(self.pixels), self.batch_size):
            yield self.pixels[start : start + self.batch_size].to(self.device)

    def _outcome(
        self, logits: Tensor, masks: Tensor, leaves: NDArray[np.float64] | None = None
    ) -> Outcome:
        full, found = (x.double().log_softmax(-1) for x in (self.logits, logits))
        return Outcome(
            agrees=(found.argmax(-1) == full.argmax(-1)).numpy(),
            right=(found.argmax(-1) == self.labels).numpy(),
            output_kl=(full.exp() * (full - found)).sum(-1).numpy(),
            mask_iou=mask_iou(masks, self.masks).numpy(),
            leaves=np.zeros(self.count) if leaves is None else leaves,
        )


def _mean_over_layers(leaves: LeafCounter, batches: int) -> NDArray[np.float64] | None:
    """Return the leaf ratio of every image; None if no layer was screened."""
    if not leaves.ratios:
        return None
    layers = len(leaves.ratios) // batches
    parts = [
        torch.stack(leaves.ratios[start : start + layers]).mean(0)
        for start in range(0, len(leaves.ratios), layers)
    ]
    ratios: NDArray[np.float64] = torch.cat(parts).cpu().numpy()
    return ratios


def match_value(
    first: float,
    target: float,
    measure: Callable[[float], float],
    tolerance: float,
    *,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> float:
    """Search the value of a method at which a measure has a target.

    The measure must rise or fall with the value. The search widens a bracket from the first value by
    factors of four and then halves it on a logarithmic scale, at most 24 measurements.

    Args:
        first: Where the search begins, above 0.
        target: Of the measure.
        measure: Measures a value.
        tolerance: Accepted distance from the target.
        limits: The smallest and the largest value that may be tried.

    Returns:
        The value with the measure nearest to the target.

    Example:
        >>> round(match_value(1.0, 9.0, lambda x: x * x, 0.01), 2)
        3.0
    """
    tried = {first: measure(first)}

    def best() -> float:
        return min(tried, key=lambda value: abs(tried[value] - target))

    def attempt(value: float) -> None:
        tried[value] = measure(value)

    while abs(tried[best()] - target) > tolerance and len(tried) < 24:
        below = [v for v, m in tried.items() if m < target]
        above = [v for v, m in tried.items() if m >= target]
        if below and above:
            low, high = min(
                ((b, a) for b in below for a in above),
                key=lambda pair: abs(np.log(pair[0] / pair[1])),
            )
            middle = float(np.sqrt(low * high))
            if middle in tried or abs(np.log(low / high)) < 1e-4:
                break
            attempt(middle)
            continue
        ends = max(min(tried) / 4.0, limits[0]), min(max(tried) * 4.0, limits[1])
        if all(value in tried for value in ends):
            break
        for value in ends:
            if value not in tried:
                attempt(value)
    return best()


def interval(gain: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean of paired differences, by resampling the images.

    Args:
        gain: (images,) differences.
        seed: Seed of the resampling.

    Example:
        >>> interval(np.zeros(5), 0)
        (0.0, 0.0)
    """
    random = np.random.default_rng(seed)
    picked = random.integers(0, len(gain), (RESAMPLES, len(gain)))
    low, high = np.quantile(gain[picked].mean(1), (0.025, 0.975))
    return float(low), float(high)
