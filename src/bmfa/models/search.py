"""The search that `tune` and `tune_reduction` share: choose, validate, tighten until it holds.

What each layer changes alone is calibrated before, on calibration images. From this a problem chooses
the cheapest combination of settings within a budget, and the whole model is validated with it on images
that took no part in that choice. A combination that fails tightens the budget by what it exceeds; one
that holds widens it by what is left of the tolerance.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bmfa.records import round_digits

# The setting of every layer: an error target or None for dense attention, or a number of tokens removed.
Combination = tuple[Any, ...]
Costs = dict[tuple[int, float | None], float]  # by layer and error target

# Combinations that are checked in one approach to the tolerance. The first few come within some percent.
MOST_CHECKS = 12
# A budget that failed shrinks by the ratio of tolerance and change, and by this factor to the power of
# the number of checks that failed.
SHRINK = 0.95
# Largest factor between the tolerance and a change by which a budget follows it.
LARGEST_STEP = 4.0
# Share of the price that another combination must save to be checked; medians of five times repeat to
# about 1 %.
LEAST_SAVING = 0.005
# Uniform settings that are predicted to exceed the tolerance by this factor are not checked. They must
# hold on the calibration images, too, and with a plan of DeiT-Tiny at 768 px, prediction and measurement
# on one image differ by at most 4 % (docs/tuning.md).
MAX_PREDICTED_EXCESS = 2.0
# Steps into which the budget is divided. Costs are rounded up, so a model of 48 layers loses at most
# 48 / 10,000 of the budget.
BUDGET_STEPS = 10_000
# Factor between two targets from which on a target between them is interpolated.
LEAST_STEP = 1.25
# The change of a layer is about proportional to its error target, so its square to the target's.
TARGET_POWER = 2


@dataclass(frozen=True)
class LayerSetting:
    """One setting of one layer, with what it does alone.

    Args:
        layer: The index of the layer.
        error: The error target of its attention over tiles; None is dense attention.
        milliseconds: The time of its attention for a batch.
        change: The change of the output of the model on the calibration images if no other layer is
            changed: 0 for dense attention, None if it was not measured because dense attention is as
            fast.
        validation_change: The same on the validation images, None if it was not measured. It is measured
            if the first combination of settings does not hold on these images.
        interpolated: True if time and change follow from the two neighbouring targets.

    Example:
        >>> LayerSetting(3, 0.05, milliseconds=1.2, change=0.011).name
        'error=0.05'
    """

    layer: int
    error: float | None
    milliseconds: float
    change: float | None = None
    validation_change: float | None = None
    interpolated: bool = False

    @property
    def name(self) -> str:
        """`"dense"`, or the error target.

        Example:
            >>> LayerSetting(0, None, 2.5, 0.0).name
            'dense'
        """
        return "dense" if self.error is None else f"error={self.error:g}"


@dataclass(frozen=True)
class Check:
    """One combination that was checked end to end.

    Args:
        settings: The setting of each layer: an error target or None for dense attention; for merging,
            the number of tokens that each block removes.
        price: The milliseconds of the attention of all layers; for merging, the GFLOPs of an image.
        predicted_change: The change that follows from the layers alone, None if it is not known how
            changes add.
        calibration_change: The change on the calibration images, None if it was not measured because the
            prediction is within the tolerance.
        validation_change: The change on the validation images, None if it was not measured because the
            one on the calibration images exceeds the tolerance.
        holds: True if both are within the tolerance.
        chosen: True for the combination of the plan.
        reason: Why it was checked.
    """

    settings: tuple[float | None, ...]
    price: float
    predicted_change: float | None
    calibration_change: float | None
    validation_change: float | None
    holds: bool
    chosen: bool
    reason: str


class Problem(Protocol):
    """What is chosen: settings of attention, or schedules of merging."""

    dense: Combination  # nothing is changed

    def choose(self, budget: float) -> Combination:
        """Return the cheapest combination whose cost is within the budget."""

    def price(self, chosen: Combination) -> float:
        """Return what is minimised: milliseconds, or GFLOPs."""

    def cost(self, chosen: Combination) -> float:
        """Return what a combination uses of the budget."""

    def predicted_cost(self, chosen: Combination) -> float:
        """Return the same on the calibration images alone."""

    def measure(self, images: str, chosen: Combination) -> float:
        """Return the change of the whole model on the "calibration" or the "validation" images."""

    def refine(self, chosen: Combination) -> None:
        """Improve the costs after the first combination that failed on the validation images."""

    def uniform(self) -> list[tuple[str, Combination]]:
        """Return combinations with one setting for all layers, each with its name."""


@dataclass(eq=False)
class Search:
    """Searches the cheapest combination that keeps the tolerance on both kinds of images.

    1. The cheapest combination within the budget is checked. The budget then becomes the cost of this
       combination, times the power of the ratio of the tolerance to its change. This repeats until no
       other combination is cheaper than the best one that holds.
    2. Uniform combinations that are cheaper are checked, the cheapest first, and the first one that
       holds is the next start of step 1. So no uniform one that holds is cheaper than the result.

    Args:
        problem: What is chosen.
        tolerance: The largest change.
        power: The power of the change that adds over layers, None if it is not known how changes add.
        budget: The first budget.
    """

    problem: Problem
    tolerance: float
    power: int | None
    budget: float
    checks: list[Check] = field(default_factory=list)
    held: float = 0.0  # the largest cost that held
    failed: float = math.inf  # the least cost that failed
    refined: bool = False

    @property
    def best(self) -> Check | None:
        """The cheapest combination that holds."""
        return min((c for c in self.checks if c.holds), key=lambda c: c.price, default=None)

    def run(self) -> Check:
        """Return the check of the result; all checks are in `checks`, in order."""
        self._approach()
        price = self.problem.price
        for name, chosen in sorted(self.problem.uniform(), key=lambda one: price(one[1])):
            if self.best is not None and price(chosen) >= self.best.price:
                break
            predicted = self._predict(chosen) or 0.0
            if self._is_checked(chosen) or predicted > MAX_PREDICTED_EXCESS * self.tolerance:
                continue
            if self._check(chosen, name):
                self._approach()
                break
        if self.best is None:
            self._check(self.problem.dense, "dense")
        assert self.best is not None
        return self._choose(self.best)

    def stay_dense(self, reason: str) -> Check:
        """Choose dense attention in all layers after all."""
        self._check(self.problem.dense, reason)
        return self._choose(self.checks[-1])

    def _choose(self, chosen: Check) -> Check:
        self.checks = [replace(check, chosen=check is chosen) for check in self.checks]
        return next(check for check in self.checks if check.chosen)

    def _approach(self) -> None:
        """Check combinations with budgets that follow from the checks before."""
        for _ in range(MOST_CHECKS):
            chosen, best = self.problem.choose(self.budget), self.best
            if best is not None and self.problem.price(chosen) > (1 - LEAST_SAVING) * best.price:
                return
            if self._is_checked(chosen):
                self.budget *= SHRINK
                continue
            if not any(chosen):
                reason = "dense"
            elif not self.checks:
                reason = "the fastest that is predicted to hold"
            elif best is None:
                reason = "the fastest within a smaller budget, after a check that failed"
            else:
                reason = "faster settings with what was left of the tolerance"
            self._check(chosen, reason)

    def _is_checked(self, chosen: Combination) -> bool:
        return any(check.settings == chosen for check in self.checks)

    def _predict(self, chosen: Combination) -> float | None:
        """Return the change on the calibration images, None if it is not known how changes add."""
        if self.power is None:
            return None
        return round_digits(self.problem.predicted_cost(chosen) ** (1.0 / self.power), 6)

    def _check(self, chosen: Combination, reason: str) -> bool:
        """Measure a combination on both kinds of images, and return True if it holds."""
        predicted, changes = self._predict(chosen), dict[str, float]()
        # Without a prediction, most combinations that fail do so on the calibration images.
        for images in ("calibration", "validation")[:: -1 if self.power else 1]:
            if images == "validation" or predicted is None or predicted > self.tolerance:
                changes[images] = self.problem.measure(images, chosen) if any(chosen) else 0.0
                if changes[images] > self.tolerance:
                    break
        holds = max(changes.values()) <= self.tolerance
        if changes.get("validation", 0.0) > self.tolerance and not (self.best or self.refined):
            self.refined, self.held, self.failed = True, 0.0, math.inf
            self.problem.refine(chosen)
        largest = max({"calibration": predicted or 0.0, **changes}.values())
        self._adjust_budget(self.problem.cost(chosen), largest)
        price = self.problem.price(chosen)
        measured = changes.get("calibration"), changes.get("validation")
        self.checks.append(Check(chosen, price, predicted, *measured, holds, False, reason))
        return holds

    def _adjust_budget(self, cost: float, change: float) -> None:
        """Set the budget to where the change is expected to be the tolerance."""
        ratio = self.tolerance / change if change > 0.0 else LARGEST_STEP
        self.budget = min(max(ratio, 1 / LARGEST_STEP), LARGEST_STEP) ** (self.power or 1) * cost
        if ratio >= 1.0:
            self.held = max(self.held, cost)
        else:
            self.budget *= SHRINK ** (1 + sum(not check.holds for check in self.checks))
            self.failed = min(self.failed, cost)
        if not self.held < self.budget < self.failed:
            self.budget = math.sqrt((self.held or self.failed / LARGEST_STEP) * self.failed)


@dataclass(eq=False)
class SettingProblem:
    """The settings of attention as a problem of `Search`, with costs = change^power, which add.

    Args:
        candidates: Settings of all layers, dense attention among them; those without a change are left
            out.
        power: The power of the change that adds over layers.
        measure: Measures the change of a combination on calibration or validation images.
        measure_alone: Measures the change by one layer on the validation images, in units of
            `candidates`.
    """

    candidates: Sequence[LayerSetting]
    power: int
    measure: Callable[[str, Combination], float] = lambda images, chosen: math.nan
    measure_alone: Callable[[int, float], float] = lambda layer, error: math.nan

    def __post_init__(self) -> None:
        self.layers: dict[int, list[LayerSetting]] = {}
        self.milliseconds: Costs = {}
        self.calibrated: Costs = {}
        for setting in self.candidates:
            if setting.change is not None:
                self.layers.setdefault(setting.layer, []).append(setting)
                self.milliseconds[setting.layer, setting.error] = setting.milliseconds
                self.calibrated[setting.layer, setting.error] = setting.change**self.power
        self.dense: Combination = (None,) * len(self.layers)
        self.costs = self.calibrated
        self.alone: Costs = {}  # changes on the validation images

    def price(self, chosen: Combination) -> float:
        """Return the milliseconds of the attention of all layers."""
        return round_digits(sum(self.milliseconds[key] for key in enumerate(chosen)), 6)

    def cost(self, chosen: Combination) -> float:
        """Return the sum of the costs of a combination."""
        return sum(self.costs[key] for key in enumerate(chosen))

    def predicted_cost(self, chosen: Combination) -> float:
        """Return the sum of the costs on the calibration images."""
        return sum(self.calibrated[key] for key in enumerate(chosen))

    def uniform(self) -> list[tuple[str, Combination]]:
        """Return for each error target the combination that has it where it saves time."""
        found = []
        for target in sorted({error for _, error in self.calibrated if error is not None}):
            keys = ((layer, target) for layer in self.layers)
            chosen = (target if key in self.calibrated else None for key in keys)
            found.append((f"error={target:g} for all layers", tuple(chosen)))
        return found

    def refine(self, chosen: Combination) -> None:
        """Measure the layers of a combination alone on the validation images.

        The costs of a layer on these images are those on the calibration images, scaled by the factor of
        the setting that was measured on both; that of all these layers together serves the others. A
        setting then costs the larger one of both.
        """
        tiled = [key for key in enumerate(chosen) if key[1] is not None]
        self.alone = {key: self.measure_alone(*key) for key in tiled}
        validated = {key: change**self.power for key, change in self.alone.items()}
        total = sum(self.calibrated[key] for key in tiled)
        overall = sum(validated.values()) / total if total > 0.0 else 1.0
        self.costs = dict(self.calibrated)
        for (layer, error), cost in self.calibrated.items():
            measured, scaled = (layer, chosen[layer]), cost * overall
            if error is not None and measured in validated:
                scaled = validated[measured] * (error / chosen[layer]) ** TARGET_POWER
                if self.calibrated[measured] > 0.0:
                    scaled = cost * validated[measured] / self.calibrated[measured]
            self.costs[layer, error] = max(cost, scaled)

    def choose(self, budget: float) -> Combination:
        """Return the fastest combination whose costs are within a budget.

        Dynamic programming over layers and steps of the budget; costs are rounded up, so the budget
        always holds.
        """

        def steps(setting: LayerSetting) -> int:
            cost = self.costs[setting.layer, setting.error]
            if cost == 0.0:
                return 0
            return BUDGET_STEPS + 1 if cost > budget else math.ceil(BUDGET_STEPS * cost / budget)

        def tables() -> Iterator[tuple[NDArray[np.float64], NDArray[np.intp]]]:
            for settings in self.layers.values():
                left = np.arange(BUDGET_STEPS + 1)[:, None] - [steps(s) for s in settings]
                milliseconds = [s.milliseconds for s in settings]
                yield np.where(left < 0, np.inf, milliseconds), left.clip(0)

        # Of equal times the first setting is taken, dense before any target.
        path = cheapest_path(tables(), BUDGET_STEPS + 1, BUDGET_STEPS)[::-1]
        return tuple(s[i].error for s, i in zip(self.layers.values(), path, strict=True))


def cheapest_path(
    tables: Iterable[tuple[NDArray[np.float64], NDArray[np.intp]]], states: int, start: int
) -> list[int]:
    """Return the choices of the cheapest path through layers of states, by dynamic programming.

    Args:
        tables: For each layer, the last one of the path first, (states, choices) costs and the state
            that each choice leads to.
        states: The number of states.
        start: The state before the first layer.

    Returns:
        A choice for each layer, the first one of the path first.

    Example:
        >>> costs, after = np.array([[1.0, np.inf], [3.0, 0.0]]), np.array([[0, 0], [1, 0]])
        >>> cheapest_path([(costs, after)] * 2, states=2, start=1)  # the second choice is made once
        [1, 0]
    """
    rest, layers = np.zeros(states), []
    for costs, after in tables:
        total = costs + rest[after]
        choice = total.argmin(1)
        layers.append((choice, after[np.arange(states), choice]))
        rest = total.min(1)
    path, state = [], start
    for choice, following in reversed(layers):
        path.append(int(choice[state]))
        state = following[state]
    return path


def add_between(settings: Sequence[LayerSetting]) -> list[LayerSetting]:
    """Add a setting between every two neighbouring ones of a layer that were measured.

    Its error target is the geometric mean of theirs. The change of a model is about proportional to a
    power of the target, and the time of attention about linear in its logarithm; the check of the whole
    model decides.

    Args:
        settings: Settings of one layer, the targets in ascending order.

    Returns:
        The settings and the added ones, in ascending order of the targets.

    Example:
        >>> between = add_between([LayerSetting(0, 0.01, 1.0, 0.02), LayerSetting(0, 0.04, 0.5, 0.08)])
        >>> [(s.error, s.milliseconds, s.change) for s in between]
        [(0.01, 1.0, 0.02), (0.02, 0.75, 0.04), (0.04, 0.5, 0.08)]
    """
    found = list(settings[:1])
    for low, high in pairwise(settings):
        if low.error and high.error and low.change is not None and high.change is not None:
            middle = round_digits(math.sqrt(low.error * high.error), 2)
            if high.error >= LEAST_STEP * low.error and low.error < middle < high.error:
                share = math.log(middle / low.error) / math.log(high.error / low.error)
                time = (1 - share) * low.milliseconds + share * high.milliseconds
                change = (1 - share) * low.change + share * high.change
                if min(low.change, high.change) > 0.0:
                    change = low.change ** (1 - share) * high.change**share
                time, change = round_digits(time, 5), round_digits(change, 6)
                found.append(LayerSetting(low.layer, middle, time, change, interpolated=True))
        found.append(high)
    return found
