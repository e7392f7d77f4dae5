"""Choose how many tokens each block of a model removes, on a person's images."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid
from bmfa.merging import POLICY_NAMES, Policy, parse
from bmfa.merging.policies.base import BudgetPolicy
from bmfa.models.families import find_vision_transformer
from bmfa.models.flops import count_flops
from bmfa.models.image_sample import sample_images, split_images
from bmfa.models.loading import LoadedModel, find_preprocessing
from bmfa.models.measures import disagreement, kl_divergence, logits
from bmfa.models.patching import unpatch
from bmfa.models.plan import ModelFingerprint, ReductionPlan
from bmfa.models.preprocessing import Preprocessing
from bmfa.models.reducing import reduce
from bmfa.models.search import Check, Combination, Search
from bmfa.models.tuning import Progress, Steps, check_tunable, unchanged
from bmfa.records import round_digits

Schedule = tuple[int, ...]

# Images that are used, half of them for calibration. The classes of 64 images are known to 1.6 points.
IMAGES = {"cuda": 512, "cpu": 128}
# Calibration images that rank schedules; all of them decide.
SAMPLED = 32
# Shares of the tokens that a block removes alone; the change between them is interpolated by a power.
ALONE_SHARES = (1 / 12, 1 / 4)
# Tokens by which a block is changed around a schedule, as a share of the tokens: 8 of 196.
AROUND_SHARE = 1 / 24
# Limits of the factor between the measured and the predicted effect of a block around a schedule. A
# small one is noise: the effect of a few tokens may even be negative on some images.
FACTORS = 0.5, 16.0
# States of the dynamic programming: numbers of tokens that are left.
STATES = 256
# Exponents of 10 between which the weight of operations is bisected: change per share of the full model.
LEAST_WEIGHT, MOST_WEIGHT, BISECTIONS = -8.0, 8.0, 30
# Schedules whose operations are counted to fit `ScheduleModel`, twice its coefficients.
COUNTED_SCHEDULES = 14


def tune_reduction(
    model: nn.Module | LoadedModel,
    images: Any,
    policy: str = "free-energy",
    *,
    gflops: float | None = None,
    agreement: float | None = None,
    img_size: int | tuple[int, int] | None = None,
    preprocess: Preprocessing | None = None,
    options: Mapping[str, Any] | None = None,
    batch_size: int = 25,
    limit: int | None = None,
    seed: int = 0,
    rounds: int = 1,
    progress: Progress | bool = True,
) -> ReductionPlan:
    """Choose how many tokens each block of a classifier removes, for a target of GFLOPs or of agreement.

    Half of the images calibrate: they measure the change of the class probabilities for each block
    alone. The schedule within a number of operations whose predicted change is the least follows by
    dynamic programming; then the blocks are measured again around this schedule, and a better one
    replaces it. The schedule is tested on the other half. For a target of agreement, a quarter of the
    images validates schedules of more and of fewer operations, and the last quarter, which took no part
    in the choice, tests the plan; with fewer than six images there is no such quarter.

    The model is the same afterwards, also if an error or Ctrl-C ends the call. Apply the plan with
    `bmfa.reduce(model, plan=plan)`.

    Args:
        model: A classifier that `reduce` supports, or what `load_model` returns.
        images: A (N, 3, height, width) tensor or a list of (3, height, width) tensors, preprocessed;
            a DataLoader of such tensors or of tuples that begin with one; or the path of a folder or
            zip of images. At least two images, all of one size; some hundred are better.
        policy: The name of a policy that takes a schedule, e.g. `"free-energy"` or `"tome"`.
        gflops: The GFLOPs of an image to stay within, two operations for a multiply-add. One of `gflops`
            and `agreement` is given.
        agreement: The share of the images whose class must be that of the full model, in (0, 1].
        img_size: The side, or (height, width), of images of a folder in pixels.
        preprocess: The preprocessing of images of a folder. None takes that of the model.
        options: Keyword arguments of every call of the model. None takes those of `load_model`.
        batch_size: The number of images in a call.
        limit: The number of images to use. None is 512 on CUDA and 128 elsewhere.
        seed: Seed of which images are used, and which of them calibrate, validate
            and test.
        rounds: How often the blocks are measured again around the schedule. A round measures two
            schedules for each block.
        progress: True shows a progress bar on a terminal. A function is called with the schedules that
            are measured and about how many there will be.

    Returns:
        The plan.

    Raises:
        TypeError: If the model cannot be reduced or does not classify, or an argument has a wrong type.
        ValueError: If an argument is out of range, the target cannot be reached, there are fewer than
            two images, they cannot be read or differ in size, or the model is patched. The model is
            unchanged.

    Example:
        >>> import bmfa, torch
        >>> loaded = bmfa.load_model("embedded")
        >>> images = torch.rand(4, 3, 112, 112, generator=torch.Generator().manual_seed(0))
        >>> plan = bmfa.tune_reduction(loaded, images, gflops=0.40)
        >>> plan.gflops <= 0.40 < plan.full_gflops
        True
        >>> model = bmfa.reduce(loaded.model, plan=plan)
    """
    check_target(gflops, agreement)
    check_policy(policy)
    module, host, options = check_tunable(model, options)
    batch_size = check_integer("batch_size", batch_size, low=1)
    seed = check_integer("seed", seed, low=0)
    rounds = check_integer("rounds", rounds, low=0)
    device = next((p.device.type for p in module.parameters()), "cpu")
    limit = IMAGES.get(device, IMAGES["cpu"]) if limit is None else limit
    generator = torch.Generator().manual_seed(seed)
    preprocess = find_preprocessing(model, preprocess, img_size)
    limit = check_integer("limit", limit, low=2)
    parts = split_images(sample_images(images, preprocess, limit, generator))
    # Two schedules of each block alone, and as many around each best one.
    steps = Steps(progress, 2 * len(host.blocks) * (1 + rounds) + 8, " schedules")
    with unchanged(module), steps:
        tuner = ReductionTuner(module, options, policy, parts[0], batch_size, rounds, steps)
        if gflops is not None:
            budget, test = gflops * 1e9, torch.cat(parts[1:])
            full = tuner.count(tuner.dense) <= budget
            schedule = tuner.dense if full else tuner.best_schedule(budget)
            return tuner.plan(("gflops", gflops), schedule, [parts[0], test[:0], test], seed)
        assert agreement is not None
        search = tuner.search_agreement(agreement, parts[1])
        schedule = tuple(int(count or 0) for count in search.run().settings)
        return tuner.plan(("agreement", agreement), schedule, parts, seed, search.checks)


class ReductionTuner:
    """Measures schedules of a model, as a problem of `Search`, inside of `unchanged(model)`.

    Args:
        model: The model.
        options: Keyword arguments of every call.
        policy: The name of the policy.
        calibration: (n, 3, height, width) images.
        batch_size: The number of images in a call.
        rounds: How often the blocks are measured again around a schedule.
        steps: Counts the schedules that are measured.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Mapping[str, Any],
        policy: str,
        calibration: Tensor,
        batch_size: int,
        rounds: int,
        steps: Steps,
    ) -> None:
        self.model, self.options, self.policy = model, options, policy
        self.calibration, self.batch_size = calibration, batch_size
        self.rounds, self.steps = rounds, steps
        vit = find_vision_transformer(model)
        self.depth = len(vit.blocks)
        self.dense: Schedule = (0,) * self.depth
        self.kls: dict[tuple[Schedule, int], float] = {}  # by schedule and number of images
        unchanged_policy = make_policy(policy, self.dense)
        assert isinstance(unchanged_policy, BudgetPolicy)
        reduce(model, unchanged_policy)  # raises if it cannot
        unpatch(model)
        grids: list[Grid] = []
        handle = vit.projection.register_forward_hook(
            lambda module, inputs, output: grids.append(Grid(*map(int, output.shape[-2:])))
        )
        try:
            self.reference = self.logits(calibration)
        finally:
            handle.remove()
        self.grid = grids[-1]
        # Operations are counted on a copy of the model in float32 on the CPU.
        self.counted = deepcopy(model).to("cpu", torch.float32)
        first = 1 if policy == "diffrate" else 0  # its first block never merges
        blocks, most = range(first, self.depth), unchanged_policy.max_removed
        self.search = ScheduleModel(self.grid.size, self.depth, blocks, most, self.count)

    def measure_alone(self) -> None:
        """Measure the change by every block alone, once."""
        for block, count in () if self.search.alone else self.search.singles():
            change = self.kl(with_count(self.dense, block, count), SAMPLED)
            self.search.alone[block, count] = change

    def measure_around(self, schedule: Schedule) -> None:
        """Measure the change by every block around a schedule, as a factor of what it changes alone."""
        search, step = self.search, max(1, round(AROUND_SHARE * self.grid.size))
        search.factors, factors = [1.0] * self.depth, [1.0] * self.depth
        for block in search.blocks:
            few = with_count(schedule, block, max(0, schedule[block] - step))
            many = with_count(schedule, block, schedule[block] + step)
            many = many if search.clipped(many) == many else schedule
            predicted = search.predicted(many) - search.predicted(few)
            if predicted > 0.0:
                factor = (self.kl(many, SAMPLED) - self.kl(few, SAMPLED)) / predicted
                factors[block] = min(max(factor, FACTORS[0]), FACTORS[1])
        search.factors = factors

    def logits(self, images: Tensor) -> Tensor:
        """Return the (n, classes) logits of the model as it is now, in float64 on the CPU."""
        parameter = next(self.model.parameters())
        parts = []
        for batch in torch.split(images, self.batch_size):
            scores = logits(self.model, batch.to(parameter.device, parameter.dtype), self.options)
            if scores.dim() != 2:
                name = type(self.model).__name__
                raise TypeError(f"{name} returns no (B, classes) logits; pass a classifier")
            parts.append(scores.double().cpu())
        if not all(bool(torch.isfinite(part).all()) for part in parts):
            raise ValueError("the logits of the model are not finite; pass other images")
        return torch.cat(parts)

    def reduced_logits(self, schedule: Schedule, images: Tensor) -> Tensor:
        """Return the logits with a schedule."""
        reduce(self.model, make_policy(self.policy, schedule))
        try:
            return self.logits(images)
        finally:
            unpatch(self.model)

    def kl(self, schedule: Schedule, images: int | None = None) -> float:
        """Return the output KL on the first calibration images, measured once."""
        key = schedule, len(self.calibration[:images])
        if any(schedule) and key not in self.kls:
            self.steps.advance()
            changed = self.reduced_logits(schedule, self.calibration[:images])
            self.kls[key] = kl_divergence(self.reference[:images], changed)
        return self.kls.get(key, 0.0)

    def count(self, schedule: Schedule) -> int:
        """Count the operations of an image with a schedule."""
        reduce(self.counted, make_policy(self.policy, schedule))
        pixels = self.calibration[:1].to("cpu", torch.float32)
        return count_flops(self.counted, pixels, self.options)

    def best_schedule(self, budget: float) -> Schedule:
        """Return the schedule of at most `budget` operations with the least output KL that is found."""
        self.measure_alone()
        search = self.search
        search.factors = [1.0] * self.depth
        best = self.start(budget)
        for _ in range(self.rounds):
            self.measure_around(best)
            best = min((best, self.start(budget)), key=self.kl)
        for _ in range(self.grid.size):  # the fit of the operations may be off by a few
            if not any(best) or self.count(best) <= budget:
                break
            last = max(block for block, removed in enumerate(best) if removed)
            best = with_count(best, last, best[last] + 1)
        return best

    def start(self, budget: float, images: int | None = None) -> Schedule:
        """Return the optimal schedule by the changes alone or an even one, whichever changes less."""
        search = self.search
        found = {search.optimal(budget), fixed_schedule(search, budget)}
        found.add(search.even(range(max(1, self.depth // 4), self.depth - 1), budget))
        fitting = [s for s in found if s is not None and search.flops(s) <= budget]
        if not fitting:
            least = search.flops(search.optimal(0.0)) / 1e9
            raise ValueError(
                f"gflops is {budget / 1e9:g}, and {self.policy} needs at least about {least:.3g} at "
                "this size; pass more"
            )
        return min(fitting, key=lambda schedule: (self.kl(schedule, images), schedule))

    # The problem of `Search` for a target of agreement; its budgets are operations that are saved.

    def price(self, chosen: Combination) -> float:
        """Return the GFLOPs of an image."""
        return round_digits(self.search.flops(chosen) / 1e9, 6)

    def cost(self, chosen: Combination) -> float:
        """Return the operations that a schedule saves."""
        return self.search.flops(self.dense) - self.search.flops(chosen)

    predicted_cost = cost

    def choose(self, budget: float) -> Combination:
        """Return the schedule that saves so many operations with the least change."""
        least, full = self.search.flops(self.search.optimal(0.0)), self.search.flops(self.dense)
        return self.start(max(least, full - budget), SAMPLED)

    def measure(self, images: str, chosen: Combination) -> float:
        """Return the share of images whose class changes."""
        self.steps.advance()
        pixels, reference = self.parts[images]
        return disagreement(reference, self.reduced_logits(chosen, pixels))

    def refine(self, chosen: Combination) -> None:
        """Measure the blocks around a schedule that failed."""
        if self.rounds:
            self.measure_around(chosen)

    def uniform(self) -> list[tuple[str, Combination]]:
        """Return nothing: `start` compares with even schedules."""
        return []

    def search_agreement(self, agreement: float, validation: Tensor) -> Search:
        """Return the search of the schedule of least operations that keeps an agreement."""
        self.measure_alone()
        self.parts = {
            "calibration": (self.calibration, self.reference),
            "validation": (validation, self.logits(validation)),
        }
        most = self.cost(self.search.optimal(0.0))
        # The tolerance is a share of images, so rounding must not exclude one.
        return Search(self, 1.0 - agreement + 1e-9, None, most)

    def plan(
        self,
        target: tuple[str, float],
        schedule: Schedule,
        parts: Sequence[Tensor],
        seed: int,
        checks: Sequence[Check] = (),
    ) -> ReductionPlan:
        """Test a schedule, and make its plan; `parts` are calibration, validation and test images."""
        calibration, validation, test = parts
        tested = test if len(test) else validation
        outputs = [
            (self.logits(images), self.reduced_logits(schedule, images))
            for images in (calibration, tested)
        ]
        (kl, agreement), (test_kl, test_agreement) = (
            (kl_divergence(*pair), 1.0 - disagreement(*pair)) for pair in outputs
        )
        alone = self.search.alone.items()
        return ReductionPlan(
            model=ModelFingerprint.from_model(self.model),
            img_size=(int(calibration.shape[-2]), int(calibration.shape[-1])),
            grid=(self.grid.height, self.grid.width),
            policy=self.policy,
            schedule=schedule,
            target=target[0],
            target_value=target[1],
            full_gflops=self.count(self.dense) / 1e9,
            gflops=self.count(schedule) / 1e9,
            predicted_kl=self.search.predicted(schedule),
            calibration_kl=kl,
            calibration_agreement=agreement,
            output_kl=test_kl,
            agreement=test_agreement,
            alone=tuple({"block": b, "removed": n, "output_kl": kl} for (b, n), kl in alone),
            checks=tuple(checks),
            calibration_images=len(calibration),
            validation_images=len(validation),
            test_images=len(test),
            seed=seed,
        )


class ScheduleModel:
    """Predicts the operations and the change of schedules, and finds the best ones.

    A block costs a T + b T^2 for its attention, c (T - r) for its MLP, and, if it merges, d + e T +
    f T^2 for the matching, where r of T tokens are removed; the rest of the model is a constant. The
    coefficients are fitted to counts, so the formula holds for any policy whose matching is at most
    quadratic.

    The change of a schedule is the sum of the changes by its blocks alone, each for the share that it
    removes of the tokens that are left.

    Args:
        tokens: Spatial tokens before the first block.
        depth: Number of blocks.
        blocks: The blocks that may remove tokens.
        most: Returns how many of some tokens one block can remove.
        count: Counts the operations of a schedule.
    """

    def __init__(
        self,
        tokens: int,
        depth: int,
        blocks: Sequence[int],
        most: Callable[[int], int],
        count: Callable[[Schedule], float],
    ) -> None:
        self.tokens, self.depth, self.blocks, self.most = tokens, depth, blocks, most
        self.alone: dict[tuple[int, int], float] = {}  # changes by block and count
        self.factors = [1.0] * depth  # of the changes of blocks around a schedule
        self.coefficients = self._fit(count)
        # For the dynamic programming: a row for each number of tokens left, a column for each removed.
        self.step = -(-tokens // STATES)
        left = np.arange(tokens, 0, -self.step)
        removed = self.step * np.arange(len(left))
        self.before, self.removed = np.broadcast_arrays(left[:, None], removed)
        self.allowed = removed <= np.array([most(int(n)) for n in left])[:, None]
        self.operations = _cost_terms(self.before, self.removed) @ self.coefficients[1:]
        rows = np.arange(len(left))
        self.after = np.minimum(rows[:, None] + rows, len(left) - 1)

    def _fit(self, count: Callable[[Schedule], float]) -> NDArray[np.float64]:
        random = np.random.default_rng(0)
        schedules: list[Schedule] = [(0,) * self.depth]
        while len(schedules) < COUNTED_SCHEDULES:
            high = max(2, self.tokens // self.depth)
            drawn = random.integers(1, high, self.depth) * (random.random(self.depth) < 0.5)
            drawn[[block not in self.blocks for block in range(self.depth)]] = 0
            schedules.append(self.clipped(tuple(map(int, drawn))))
        rows = np.array([self._terms(schedule) for schedule in schedules])
        counts = np.array([count(schedule) for schedule in schedules], dtype=np.float64)
        scale = np.abs(rows).max(0).clip(min=1.0)
        solution = np.linalg.lstsq(rows / scale, counts, rcond=None)[0] / scale
        return np.asarray(solution, np.float64)

    def _terms(self, schedule: Schedule) -> NDArray[np.float64]:
        before = self.tokens - np.cumsum((0, *schedule[:-1]))
        return np.append(1.0, _cost_terms(before, np.array(schedule)).sum(0))

    def flops(self, schedule: Schedule) -> float:
        """Return the operations of a schedule."""
        return float(self._terms(schedule) @ self.coefficients)

    def clipped(self, schedule: Schedule) -> Schedule:
        """Let blocks remove no more tokens than they can."""
        left, clipped = self.tokens, []
        for removed in schedule:
            clipped.append(min(removed, self.most(left)))
            left -= clipped[-1]
        return tuple(clipped)

    def singles(self) -> list[tuple[int, int]]:
        """Return the blocks and counts that are measured alone."""
        counts = {max(1, round(share * self.tokens)) for share in ALONE_SHARES}
        return [
            (b, n)
            for b in self.blocks
            for n in sorted({min(n, self.most(self.tokens)) for n in counts})
        ]

    def change(self, block: int, share: Any) -> Any:
        """Return the change by a block that removes a share of the tokens, by the power measured."""
        points = sorted(
            (count, max(change, 1e-12)) for (b, count), change in self.alone.items() if b == block
        )
        (low, first), (high, last) = points[0], points[-1]
        power = 2.0 if low == high else max(math.log(last / first) / math.log(high / low), 1.0)
        return self.factors[block] * first * (share * self.tokens / low) ** power

    def predicted(self, schedule: Schedule) -> float:
        """Return the change of a schedule."""
        before = self.tokens - np.cumsum((0, *schedule[:-1]))
        blocks = (block for block, removed in enumerate(schedule) if removed)
        return float(sum(self.change(b, schedule[b] / before[b]) for b in blocks))

    def optimal(self, budget: float) -> Schedule:
        """Return the schedule of at most `budget` operations with the least predicted change.

        It minimises change + weight * operations by dynamic programming over the blocks and the tokens
        left; the weight is the least that keeps the budget. The schedule of the largest weight is
        returned if none does.
        """
        changes = []
        for block in range(self.depth):
            allowed = self.allowed & ((self.removed == 0) | (block in self.blocks))
            share = self.removed / self.before
            changes.append(
                np.where(
                    allowed, self.change(block, share) if block in self.blocks else 0.0, np.inf
                )
            )
        low, high = LEAST_WEIGHT, MOST_WEIGHT
        full = self.flops((0,) * self.depth)
        best = self._minimum(changes, 10.0**high / full)
        for _ in range(BISECTIONS if self.flops(best) <= budget else 0):
            middle = (low + high) / 2
            schedule = self._minimum(changes, 10.0**middle / full)
            if self.flops(schedule) <= budget:
                best, high = schedule, middle
            else:
                low = middle
        return best

    def _minimum(self, changes: Sequence[NDArray[np.float64]], weight: float) -> Schedule:
        rest, choices = np.zeros(len(self.before)), []
        for change in reversed(changes):
            total = change + weight * self.operations + rest[self.after]
            choices.append(total.argmin(1))
            rest = total.min(1)
        row, schedule = 0, []
        for choice in reversed(choices):
            schedule.append(int(self.step * choice[row]))
            row += choice[row]
        return tuple(schedule)

    def even(self, blocks: Sequence[int], budget: float) -> Schedule | None:
        """Return the schedule in which some blocks remove equal parts of what a budget needs."""
        for total in range(self.tokens if len(blocks) else 0):
            schedule = [0] * self.depth
            for index, block in enumerate(blocks):
                schedule[block] = total // len(blocks) + (index < total % len(blocks))
            if self.flops(clipped := self.clipped(tuple(schedule))) <= budget:
                return clipped
        return None


def fixed_schedule(search: ScheduleModel, budget: float) -> Schedule | None:
    """Return the schedule of `FreeEnergy` with a count, with as many tokens removed as a budget needs.

    Every second block merges, from a quarter of the depth on, except the last.
    """
    return search.even(range(max(1, search.depth // 4), search.depth - 1, 2), budget)


def with_count(schedule: Schedule, block: int, count: int) -> Schedule:
    """Let a block remove another number of tokens."""
    return (*schedule[:block], count, *schedule[block + 1 :])


def make_policy(name: str, schedule: Schedule) -> Policy:
    """Make a policy with a schedule."""
    return parse(f"{name}:{','.join(map(str, schedule))}")


def _cost_terms(before: Any, removed: Any) -> NDArray[np.float64]:
    """Return (..., 6) terms of the operations of blocks with tokens before and removed."""
    before, merging = np.asarray(before, np.float64), removed > 0
    terms = (before, before**2, before - removed, merging, merging * before, merging * before**2)
    return np.stack(terms, -1)


def check_target(gflops: object, agreement: object) -> None:
    """Raise unless one of a number of GFLOPs and an agreement is given, and in range."""
    if (gflops is None) == (agreement is None):
        given = "neither gflops nor agreement is" if gflops is None else "gflops and agreement are"
        raise ValueError(f"{given} given; pass one of them, e.g. gflops=1.5 or agreement=0.95")
    if gflops is not None:
        check_number("gflops", gflops, low=0.0, open_low=True)
    if agreement is not None:
        check_number("agreement", agreement, low=0.0, high=1.0, open_low=True)


def check_policy(policy: object) -> None:
    """Raise unless a name is that of a policy that takes a schedule."""
    accepted = [name for name in POLICY_NAMES if _takes_schedule(name)]
    if policy not in accepted:
        raise ValueError(
            f"policy is {policy!r}; pass the name of a policy that takes a schedule: "
            f"{', '.join(accepted)}"
        )


def _takes_schedule(name: str) -> bool:
    try:
        return isinstance(make_policy(name, (0, 0)), BudgetPolicy)
    except ValueError:
        return False
