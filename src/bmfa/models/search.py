"""The search that `tune` and `tune_reduction` share: choose, validate, tighten until it holds.

What each layer changes alone is calibrated before, on calibration images. From this a problem chooses
the cheapest combination of settings within a budget, and the whole model is validated with it on images
that took no part in that choice. A combination that fails tightens the budget by what it exceeds; one
that holds widens it by what is left of the tolerance.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bmfa.records import round_digits

# The setting of every layer: an error target or None for dense attention, or a number of tokens removed.
Combination = tuple[Any, ...]
Positive = Annotated[float, "above 0"]  # in the file of a plan

# Combinations that are checked in one approach to the tolerance. The first few come within some percent.
MOST_CHECKS = 12
# After a check that failed, the budget shrinks by the ratio of tolerance and change, and by this factor
# to the power of the number of checks that failed.
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

    Example:
        >>> LayerSetting(3, 0.05, milliseconds=1.2, change=0.011).name
        'error=0.05'
    """

    layer: int
    error: float | None
    milliseconds: Positive
    change: float | None = None

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
        calibration_change: The change on the calibration images.
        validation_change: The change on the validation images.
        holds: True if both are within the tolerance.
        chosen: True for the combination of the plan.
    """

    settings: tuple[float | None, ...]
    price: float
    predicted_change: float | None
    calibration_change: float
    validation_change: float
    holds: bool
    chosen: bool = False


class Problem(Protocol):
    """What is chosen: settings of attention, or schedules of merging."""

    dense: Combination  # nothing is changed

    def choose(self, budget: float) -> Combination:
        """Return the cheapest combination whose cost is within the budget."""

    def price(self, chosen: Combination) -> float:
        """Return what is minimised: milliseconds, or GFLOPs."""

    def cost(self, chosen: Combination) -> float:
        """Return what a combination uses of the budget."""

    def measure(self, images: str, chosen: Combination) -> float:
        """Return the change of the whole model on the "calibration" or the "validation" images."""

    def uniform(self) -> list[Combination]:
        """Return combinations with one setting for all layers, if there are such."""
        return []


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
        is_late: Returns True when step 1 is to end as soon as a combination holds.
    """

    problem: Problem
    tolerance: float
    power: int | None
    budget: float
    is_late: Callable[[], bool] = lambda: False
    checked: dict[Combination, Check] = field(default_factory=dict)  # in order
    held: float = 0.0  # the largest cost that held
    failed: float = math.inf  # the least cost that failed

    @property
    def best(self) -> Check | None:
        """The cheapest combination that holds."""
        held = (check for check in self.checked.values() if check.holds)
        return min(held, key=lambda check: check.price, default=None)

    def run(self) -> Check:
        """Return the check of the result; all checks are in `checked`."""
        self._approach()
        price = self.problem.price
        for chosen in sorted(self.problem.uniform(), key=price):
            if self.best is not None and price(chosen) >= self.best.price:
                break
            predicted = self._predict(chosen) or 0.0
            if chosen in self.checked or predicted > MAX_PREDICTED_EXCESS * self.tolerance:
                continue
            if self.check(chosen).holds:
                self._approach()
                break
        return self.best or self.check(self.problem.dense)

    def check(self, chosen: Combination) -> Check:
        """Measure a combination on both kinds of images, and set the next budget."""
        calibrated, validated = (
            self.problem.measure(images, chosen) if any(chosen) else 0.0
            for images in ("calibration", "validation")
        )
        largest, price = max(calibrated, validated), self.problem.price(chosen)
        predicted, holds = self._predict(chosen), largest <= self.tolerance
        self.checked[chosen] = Check(chosen, price, predicted, calibrated, validated, holds)
        self._adjust_budget(self.problem.cost(chosen), largest)
        return self.checked[chosen]

    def checks(self, chosen: Check) -> tuple[Check, ...]:
        """Return all checks for a plan, in order, with a mark at the one that is the plan."""
        return tuple(replace(check, chosen=check is chosen) for check in self.checked.values())

    def _approach(self) -> None:
        """Check combinations with budgets that follow from the checks before."""
        for _ in range(MOST_CHECKS):
            chosen, best = self.problem.choose(self.budget), self.best
            least = math.inf if best is None else (1 - LEAST_SAVING) * best.price
            if self.problem.price(chosen) > least or (best is not None and self.is_late()):
                return
            if chosen in self.checked:
                self.budget *= SHRINK
            else:
                self.check(chosen)

    def _predict(self, chosen: Combination) -> float | None:
        """Return the change on the calibration images, None if it is not known how changes add."""
        if self.power is None:
            return None
        return round_digits(self.problem.cost(chosen) ** (1.0 / self.power), 6)

    def _adjust_budget(self, cost: float, change: float) -> None:
        """Set the budget to where the change is expected to be the tolerance."""
        ratio = self.tolerance / change if change > 0.0 else LARGEST_STEP
        self.budget = min(max(ratio, 1 / LARGEST_STEP), LARGEST_STEP) ** (self.power or 1) * cost
        if ratio >= 1.0:
            self.held = max(self.held, cost)
        else:
            self.budget *= SHRINK ** sum(not check.holds for check in self.checked.values())
            self.failed = min(self.failed, cost)
        if not self.held < self.budget < self.failed:
            self.budget = math.sqrt((self.held or self.failed / LARGEST_STEP) * self.failed)


@dataclass(eq=False)
class SettingProblem:
    """The settings of attention as a problem of `Search`, with costs = change^power, which add.

    Args:
        candidates: The settings of every layer, dense attention among them. One without a change is left
            out.
        power: The power of the change that adds over layers.
        measure: Measures the change of a combination on calibration or validation images.
    """

    candidates: Sequence[LayerSetting]
    power: int
    measure: Callable[[str, Combination], float] = lambda images, chosen: math.nan

    def __post_init__(self) -> None:
        known = [s for s in self.candidates if s.change is not None]
        self.milliseconds = {(s.layer, s.error): s.milliseconds for s in known}
        self.costs = {(s.layer, s.error): (s.change or 0.0) ** self.power for s in known}
        self.dense: Combination = tuple(None for _, error in self.costs if error is None)

    def price(self, chosen: Combination) -> float:
        """Return the milliseconds of the attention of all layers."""
        return round_digits(sum(self.milliseconds[key] for key in enumerate(chosen)), 6)

    def cost(self, chosen: Combination) -> float:
        """Return the sum of the costs of a combination."""
        return sum(self.costs[key] for key in enumerate(chosen))

    def uniform(self) -> list[Combination]:
        """Return for each error target the combination that has it where it saves time."""
        targets = sorted({error for _, error in self.costs if error is not None})
        layers = range(len(self.dense))
        return [tuple(x if (i, x) in self.costs else None for i in layers) for x in targets]

    def choose(self, budget: float) -> Combination:
        """Return the fastest combination whose costs are within a budget.

        Dynamic programming over layers and steps of the budget; costs are rounded up, so the budget
        always holds.
        """
        layers = [[key for key in self.costs if key[0] == i] for i in range(len(self.dense))]

        def steps(cost: float) -> int:
            return BUDGET_STEPS + 1 if cost > budget else math.ceil(BUDGET_STEPS * cost / budget)

        def tables() -> Iterator[tuple[NDArray[np.float64], NDArray[np.intp]]]:
            for keys in layers:
                used = [steps(self.costs[key]) if self.costs[key] else 0 for key in keys]
                left = np.arange(BUDGET_STEPS + 1)[:, None] - used
                yield np.where(left < 0, np.inf, [self.milliseconds[k] for k in keys]), left.clip(0)

        # Of equal times the first setting is taken, dense before any target.
        path = cheapest_path(tables(), BUDGET_STEPS + 1, BUDGET_STEPS)[::-1]
        return tuple(keys[i][1] for keys, i in zip(layers, path, strict=True))


def with_setting(chosen: Combination, index: int, setting: Any) -> Combination:
    """Give another setting to one layer."""
    return (*chosen[:index], setting, *chosen[index + 1 :])


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
