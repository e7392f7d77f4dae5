"""Choose how many tokens each block of a model removes, on a person's images."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bmfa.checks import check_number
from bmfa.grid import Grid
from bmfa.merging import Policy, parse
from bmfa.merging.policies.base import BudgetPolicy
from bmfa.models.flops import count_flops
from bmfa.models.loading import LoadedModel
from bmfa.models.measures import DISAGREEMENT, MEASURES, logits
from bmfa.models.patching import copy_sharing_weights
from bmfa.models.plan import SCHEDULED, ReductionPlan, check_choice
from bmfa.models.reducing import last_pass, reduce
from bmfa.models.search import Check, Combination, Problem, Search, cheapest_path, with_setting
from bmfa.models.tuning import Tuner
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
    options: Mapping[str, Any] | None = None,
    batch_size: int = 25,
    limit: int | None = None,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
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
        options: Keyword arguments of every call of the model. None takes those of `load_model`.
        batch_size: The number of images in a call.
        limit: The number of images to use. None is 512 on CUDA and 128 elsewhere, or two batches
            if these are more.
        seed: Seed of which images are used, and which of them calibrate, validate
            and test.
        resume: A file of measurements to continue from, created if it does not exist; as in `tune`.
        progress: True shows a progress bar on a terminal or in a notebook.

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
    target, value = check_target(gflops, agreement)
    check_choice("policy", policy, SCHEDULED)
    tuner = ReductionTuner(model, images, options, batch_size, limit, seed, policy=policy)
    if target == "gflops":  # nothing is validated
        unseen = torch.cat([tuner.images["validation"], tuner.images["test"]])
        tuner.images |= {"validation": unseen[:0], "test": unseen}
    with tuner.running(progress, resume, policy):
        return tuner.make_plan(target, value)


class ReductionTuner(Tuner, Problem):
    """Measures schedules of a model, as a problem of `Search`; arguments are those of `Tuner`.

    Args:
        policy: The name of the policy.
        rounds: How often the blocks are measured again around a schedule.
    """

    usual = IMAGES

    def __init__(self, *args: Any, policy: str, rounds: int = 1, **options: Any) -> None:
        super().__init__(*args, **options)
        self.policy, self.rounds = policy, rounds
        self.dense: Schedule = (0,) * len(self.vit.blocks)

    @cached_property
    def batches(self) -> dict[str, Sequence[Tensor]]:
        """Batches of the images, and of the "sample" of them that ranks schedules."""
        sampled = self.images["calibration"][:SAMPLED]
        return super().batches | {"sample": torch.split(sampled, self.batch_size)}

    @cached_property
    def counted(self) -> nn.Module:
        """A copy of the model in float32 on the CPU, whose operations are counted."""
        return deepcopy(self.model).to("cpu", torch.float32)

    @cached_property
    def grid(self) -> Grid:
        """The grid of tokens; reading it raises if the model cannot be reduced or does not classify."""
        model = reduce(copy_sharing_weights(self.model), make_policy(self.policy, self.dense))
        scores, grid = logits(model, self.batch, self.options), last_pass(model)[1].grid
        if scores.dim() != 2:
            name = type(self.model).__name__
            raise TypeError(f"{name} returns no (B, classes) logits; pass a classifier")
        return grid

    @cached_property
    def schedules(self) -> "ScheduleModel":
        """Predictions for schedules."""
        depth = len(self.dense)
        blocks = range(1 if self.policy == "diffrate" else 0, depth)  # its first block never merges
        policy = make_policy(self.policy, self.dense)
        assert isinstance(policy, BudgetPolicy)
        return ScheduleModel(self.grid.size, depth, blocks, policy.max_removed, self.count)

    def install(self, chosen: Combination) -> None:
        if chosen:
            reduce(self.model, make_policy(self.policy, chosen))

    def count(self, schedule: Schedule) -> int:
        """Count the operations of an image with a schedule."""
        reduce(self.counted, make_policy(self.policy, schedule))
        pixels = self.images["calibration"][:1].to("cpu", torch.float32)
        return count_flops(self.counted, pixels, self.options)

    def kl(self, schedule: Schedule, images: str = "calibration") -> float:
        """Return the output KL on images."""
        return self.change(MEASURES["logits"], images, schedule) if any(schedule) else 0.0

    def measure_alone(self) -> None:
        """Measure the change by every block alone."""
        alone = ((b, n, with_setting(self.dense, b, n)) for b, n in self.schedules.singles())
        self.schedules.alone = {(b, n): self.kl(schedule, "sample") for b, n, schedule in alone}
        self.schedules.factors = [1.0] * len(self.dense)

    def measure_around(self, schedule: Schedule) -> None:
        """Measure the change by every block around a schedule, as a factor of what it changes alone."""
        schedules, step = self.schedules, max(1, round(AROUND_SHARE * self.grid.size))
        schedules.factors, factors = [1.0] * len(self.dense), [1.0] * len(self.dense)
        for block in schedules.blocks:
            few = with_setting(schedule, block, max(0, schedule[block] - step))
            many = with_setting(schedule, block, schedule[block] + step)
            many = many if schedules.clipped(many) == many else schedule
            predicted = schedules.predicted(many) - schedules.predicted(few)
            if predicted > 0.0:
                factor = (self.kl(many, "sample") - self.kl(few, "sample")) / predicted
                factors[block] = min(max(factor, FACTORS[0]), FACTORS[1])
        schedules.factors = factors

    def best_schedule(self, budget: float) -> Schedule:
        """Return the schedule of at most `budget` operations with the least output KL that is found."""
        best = self.start(budget)
        for _ in range(self.rounds):
            self.measure_around(best)
            best = min((best, self.start(budget)), key=self.kl)
        while any(best) and self.count(best) > budget:  # the fit may be off by a few operations
            last = max(block for block, removed in enumerate(best) if removed)
            best = with_setting(best, last, best[last] + 1)
        return best

    def start(self, budget: float, images: str = "calibration") -> Schedule:
        """Return the optimal schedule by the changes alone or an even one, whichever changes less."""
        schedules = self.schedules
        found = {schedules.optimal(budget), schedules.even(1, budget), schedules.even(2, budget)}
        fitting = [s for s in found if s is not None and schedules.flops(s) <= budget]
        if not fitting:
            least = schedules.flops(schedules.optimal(0.0)) / 1e9
            raise ValueError(
                f"gflops is {budget / 1e9:g}, and {self.policy} needs at least about {least:.3g} at "
                "this size; pass more"
            )
        return min(fitting, key=lambda schedule: (self.kl(schedule, images), schedule))

    # The problem of `Search` for a target of agreement; its budgets are operations that are saved.

    def price(self, chosen: Combination) -> float:
        """Return the GFLOPs of an image."""
        return round_digits(self.schedules.flops(chosen) / 1e9, 6)

    def cost(self, chosen: Combination) -> float:
        """Return the operations that a schedule saves."""
        return self.schedules.flops(self.dense) - self.schedules.flops(chosen)

    def choose(self, budget: float) -> Combination:
        """Return the schedule that saves so many operations with the least change."""
        least = self.schedules.flops(self.schedules.optimal(0.0))
        return self.start(max(least, self.schedules.flops(self.dense) - budget), "sample")

    def measure(self, images: str, chosen: Combination) -> float:
        """Return the share of images whose class changes."""
        return self.change(DISAGREEMENT, images, chosen)

    def make_plan(self, target: str, value: float) -> ReductionPlan:
        """Choose a schedule for a target, and test it."""
        schedule: Combination = self.dense
        checks: tuple[Check, ...] = ()
        full = self.count(self.dense) / 1e9
        # Two schedules of each block alone, then as many around the best one, or some checks.
        blocks = 2 * len(self.dense) * len(self.batches["sample"])
        calls = len(self.batches["calibration"]) + len(self.batches[self.tested])
        phases = {"calibration": blocks, "choice": max(blocks, 6 * calls), "test": 4 * calls}
        self.run.begin("calibration", phases)
        if target == "agreement" or full > value:
            self.measure_alone()
        self.run.begin("choice", phases)
        if target == "agreement":
            # The tolerance is a share of images, so rounding must not exclude one.
            most = self.cost(self.schedules.optimal(0.0))
            search = Search(self, 1.0 - value + 1e-9, None, most)
            chosen = search.run()
            schedule, checks = chosen.settings, search.checks(chosen)
        elif full > value:
            schedule = self.best_schedule(value * 1e9)
        self.run.begin("test", phases)
        kl, test_kl, change, test_change = (
            self.change(measure, images, schedule)
            for measure in (MEASURES["logits"], DISAGREEMENT)
            for images in ("calibration", self.tested)
        )
        return ReductionPlan(
            grid=(self.grid.height, self.grid.width),
            policy=self.policy,
            schedule=schedule,
            target=target,
            target_value=value,
            full_gflops=full,
            gflops=self.count(schedule) / 1e9,
            calibration_kl=kl,
            calibration_agreement=1.0 - change,
            output_kl=test_kl,
            agreement=1.0 - test_change,
            checks=checks,
            **self.common_fields(),
        )


@dataclass(eq=False)
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

    tokens: int
    depth: int
    blocks: Sequence[int]
    most: Callable[[int], int]
    count: Callable[[Schedule], float]
    alone: dict[tuple[int, int], float] = field(default_factory=dict)  # changes by block and count

    def __post_init__(self) -> None:
        self.factors = [1.0] * self.depth  # of the changes of blocks around a schedule
        random = np.random.default_rng(0)
        schedules: list[Schedule] = [(0,) * self.depth]
        while len(schedules) < COUNTED_SCHEDULES:
            high = max(2, self.tokens // self.depth)
            drawn = random.integers(1, high, self.depth) * (random.random(self.depth) < 0.5)
            drawn[[block not in self.blocks for block in range(self.depth)]] = 0
            schedules.append(self.clipped(tuple(map(int, drawn))))
        rows = np.array([self._terms(schedule) for schedule in schedules])
        counts = np.array([self.count(schedule) for schedule in schedules], dtype=np.float64)
        self.coefficients = np.linalg.lstsq(rows, counts, rcond=None)[0]
        # For the dynamic programming: a row for each number of tokens left, a column for each removed.
        self.step = -(-self.tokens // STATES)
        left = np.arange(self.tokens, 0, -self.step)
        removed = self.step * np.arange(len(left))
        self.before, self.removed = np.broadcast_arrays(left[:, None], removed)
        self.allowed = removed <= np.array([self.most(int(n)) for n in left])[:, None]
        self.operations = _cost_terms(self.before, self.removed) @ self.coefficients[1:]
        rows = np.arange(len(left))
        self.after = np.minimum(rows[:, None] + rows, len(left) - 1)

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
        shares = (max(1, round(share * self.tokens)) for share in ALONE_SHARES)
        counts = sorted({min(count, self.most(self.tokens)) for count in shares})
        return [(block, count) for block in self.blocks for count in counts]

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
            change = self.change(block, self.removed / self.before) if block in self.blocks else 0.0
            allowed = self.allowed & ((self.removed == 0) | (block in self.blocks))
            changes.append(np.where(allowed, change, np.inf))

        def lightest(exponent: float) -> Schedule:
            weight = 10.0**exponent / self.flops((0,) * self.depth)
            tables = ((change + weight * self.operations, self.after) for change in changes[::-1])
            path = cheapest_path(tables, len(self.after), 0)
            return tuple(self.step * choice for choice in path)

        low, high = LEAST_WEIGHT, MOST_WEIGHT
        best = lightest(high)
        for _ in range(BISECTIONS if self.flops(best) <= budget else 0):
            middle = (low + high) / 2
            schedule = lightest(middle)
            if self.flops(schedule) <= budget:
                best, high = schedule, middle
            else:
                low = middle
        return best

    def even(self, stride: int, budget: float) -> Schedule | None:
        """Return the schedule in which some blocks remove equal parts of what a budget needs.

        They are every block, or every second one, from a quarter of the depth on, except the last. With
        every second one it is the schedule of `FreeEnergy` with a count.
        """
        blocks = range(max(1, self.depth // 4), self.depth - 1, stride)
        for total in range(self.tokens if len(blocks) else 0):
            schedule = [0] * self.depth
            for index, block in enumerate(blocks):
                schedule[block] = total // len(blocks) + (index < total % len(blocks))
            if self.flops(clipped := self.clipped(tuple(schedule))) <= budget:
                return clipped
        return None


def make_policy(name: str, schedule: Schedule) -> Policy:
    """Make a policy with a schedule."""
    return parse(f"{name}:{','.join(map(str, schedule))}")


def _cost_terms(before: Any, removed: Any) -> NDArray[np.float64]:
    """Return (..., 6) terms of the operations of blocks with tokens before and removed."""
    before, merging = np.asarray(before, np.float64), removed > 0
    terms = (before, before**2, before - removed, merging, merging * before, merging * before**2)
    return np.stack(terms, -1)


def check_target(gflops: object, agreement: object) -> tuple[str, float]:
    """Return what is given, a number of GFLOPs or an agreement; raise unless it is one, in range."""
    if (gflops is None) == (agreement is None):
        given = "neither gflops nor agreement is" if gflops is None else "gflops and agreement are"
        raise ValueError(f"{given} given; pass one of them, e.g. gflops=1.5 or agreement=0.95")
    if gflops is not None:
        return "gflops", check_number("gflops", gflops, low=0.0, open_low=True)
    return "agreement", check_number("agreement", agreement, low=0.0, high=1.0, open_low=True)
