"""The search that `tune` and `tune_reduction` share: choose, validate, tighten until it holds.

What each layer changes alone is calibrated before, on calibration images. From this a problem chooses
the cheapest combination of settings within a budget, and the whole model is validated with it on images
that took no part in that choice. A combination that fails tightens the budget by what it exceeds; one
that holds widens it by what is left of the tolerance.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bmfa.records import round_digits

# The setting of every layer: an error target or None for dense attention, or a number of tokens removed.
Combination = tuple[Any, ...]

# Combinations that are checked in one approach to the tolerance. The first few come within some percent.
MOST_CHECKS = 12
# A budget that failed shrinks by the ratio of tolerance and change, and by this factor to the power of
# the number of checks that failed.
SHRINK = 0.95
# Largest factor between two budgets for a measure of which it is not known how it grows.
LARGEST_STEP = 4.0
# Share of the price that another combination must save to be checked; medians of five times repeat to
# about 1 %.
LEAST_SAVING = 0.005
# Uniform settings that are predicted to exceed the tolerance by this factor are not checked. They must
# hold on the calibration images, too, and with a plan of DeiT-Tiny at 768 px, prediction and measurement
# on one image differ by at most 4 % (docs/tuning.md).
MAX_PREDICTED_EXCESS = 2.0


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
            if self._may_hold(chosen) and self._check(chosen, name):
                self._approach()
                break
        if self.best is None:
            self._check(self.problem.dense, "dense")
        assert self.best is not None
        return self._choose(self.checks.index(self.best))

    def stay_dense(self, reason: str) -> Check:
        """Choose dense attention in all layers after all."""
        self._check(self.problem.dense, reason)
        return self._choose(len(self.checks) - 1)

    def _choose(self, index: int) -> Check:
        self.checks = [replace(c, chosen=i == index) for i, c in enumerate(self.checks)]
        return self.checks[index]

    def _approach(self) -> None:
        """Check combinations with budgets that follow from the checks before."""
        for _ in range(MOST_CHECKS):
            chosen, best = self.problem.choose(self.budget), self.best
            if best is not None and self.problem.price(chosen) > (1 - LEAST_SAVING) * best.price:
                return
            if any(check.settings == chosen for check in self.checks):
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

    def _may_hold(self, chosen: Combination) -> bool:
        if any(check.settings == chosen for check in self.checks):
            return False
        predicted = self._predict(chosen)
        return predicted is None or predicted <= MAX_PREDICTED_EXCESS * self.tolerance

    def _predict(self, chosen: Combination) -> float | None:
        """Return the change on the calibration images, None if it is not known how changes add."""
        if self.power is None:
            return None
        return round_digits(self.problem.predicted_cost(chosen) ** (1.0 / self.power), 6)

    def _check(self, chosen: Combination, reason: str) -> bool:
        """Measure a combination on both kinds of images, and return True if it holds."""
        predicted = self._predict(chosen)
        changes: dict[str, float] = {} if any(chosen) else {"validation": 0.0}
        # Without a prediction, most combinations that fail do so on the calibration images.
        order = ("validation", "calibration") if self.power else ("calibration", "validation")
        for images in order if any(chosen) else ():
            if images == "validation" or predicted is None or predicted > self.tolerance:
                changes[images] = self.problem.measure(images, chosen)
                if changes[images] > self.tolerance:
                    break
        largest = max(changes.values())
        holds = largest <= self.tolerance
        if changes.get("validation", 0.0) > self.tolerance and not (self.best or self.refined):
            self.refined, self.held, self.failed = True, 0.0, math.inf
            self.problem.refine(chosen)
        if "calibration" not in changes:
            largest = max(largest, predicted or 0.0)
        self._adjust_budget(self.problem.cost(chosen), largest)
        self.checks.append(
            Check(
                chosen,
                self.problem.price(chosen),
                predicted,
                changes.get("calibration"),
                changes.get("validation"),
                holds,
                False,
                reason,
            )
        )
        return holds

    def _adjust_budget(self, cost: float, change: float) -> None:
        """Set the budget to where the change is expected to be the tolerance."""
        ratio = self.tolerance / change if change > 0.0 else LARGEST_STEP
        if self.power is not None:
            failures = sum(not check.holds for check in self.checks)
            shrink = SHRINK ** (1 + failures) if ratio < 1.0 else 1.0
            self.budget = shrink * ratio**self.power * cost
            return
        self.budget = min(max(ratio, 1.0 / LARGEST_STEP), LARGEST_STEP) * cost
        if ratio >= 1.0:
            self.held = max(self.held, cost)
        else:
            self.failed = min(self.failed, cost)
        if self.held == 0.0:
            self.budget = min(self.budget, self.failed / LARGEST_STEP)
        elif not self.held < self.budget < self.failed:
            self.budget = math.sqrt(self.held * self.failed)
