"""The fastest combination of settings that holds end to end, with a bounded number of checks."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from bmfa.models.setting_search import Combination, SettingSearch
from bmfa.records import Row, round_digits

# A budget that failed shrinks by the ratio of tolerance and change, and by this factor to the power of
# the number of checks that failed.
SHRINK = 0.95
# Factor between two budgets for measures of which it is not known how they add: half of a change.
COARSE_STEP = 0.25
# Combinations that are checked with smaller budgets before all layers stay dense.
TIGHTENING_CHECKS = 12
# Combinations that are checked in order to use what is left of the tolerance.
RELAXING_CHECKS = 4
# Share of the time of attention that faster settings must save to be checked; medians of five repeat
# to about 1 %.
LEAST_SAVING = 0.005
# Single targets that are predicted to exceed the tolerance by this factor are not checked. They must
# hold on the choosing images, too, and with a plan of DeiT-Tiny at 768 px, prediction and measurement on
# one image differ by at most 4 % (docs/tuning.md).
MAX_PREDICTED_EXCESS = 2.0
# The change of a layer is about proportional to its error target, so its square to the target's.
TARGET_POWER = 2


@dataclass(eq=False)
class CheckedSearch:
    """Searches the fastest combination that keeps the tolerance on choosing and on checking images.

    A combination holds if the change that is measured on the checking images is within the tolerance,
    and so is the one on the choosing images: that which is predicted, or, if it is not known or exceeds
    the tolerance, that which is measured.

    1. The fastest combination within the budget is checked.
    2. If it fails, the change by each of its layers alone is measured on the checking images. A layer
       then costs the larger one of its two changes, and the budget shrinks until a combination holds.
    3. What is left of the tolerance is used: layers get faster settings in the order of milliseconds
       saved per share of what is left, and the longest part of this sequence that holds is kept.
    4. Single targets for all layers that are faster than this are checked, the fastest first, unless
       twice the tolerance is predicted. The first one that holds is taken, and step 3 follows again. So
       no single target that holds is faster than the result.

    The number of checks is at most `most_checks`, and `len(layers)` layers are measured alone.

    Args:
        search: Times, and changes by layers alone on the choosing images.
        tolerance: The largest change.
        budget: The cost of the first combination.
        check: Measures the change of a combination on the checking images.
        check_choosing: The same on the choosing images.
        check_alone: Measures the change by one layer on the checking images, in units of `search`.
        predicts: True if the changes of `search` are in units of the tolerance.
    """

    search: SettingSearch
    tolerance: float
    budget: float
    check: Callable[[Combination], float]
    check_choosing: Callable[[Combination], float]
    check_alone: Callable[[int, float], float]
    predicts: bool = True
    rows: list[Row] = field(default_factory=list)
    combinations: list[dict[int, float | None]] = field(default_factory=list)  # one for each row
    # Changes by layers alone on the checking images, by layer and target.
    alone: dict[tuple[int, float | None], float] = field(default_factory=dict)
    best: int = -1  # the row of the fastest combination that holds

    @property
    def most_checks(self) -> int:
        """The largest number of rows."""
        # The first, tightening with dense attention at its end, relaxing twice, single targets.
        return 2 + TIGHTENING_CHECKS + 2 * RELAXING_CHECKS + len(self.search.single_targets())

    def run(self) -> dict[int, float | None]:
        """Return the combination; `rows` has every one that was checked, in order."""
        first = self.search.fastest(self.budget)
        if not self._try(first, "the fastest that is predicted to hold"):
            self._measure_alone(first)
            self._tighten()
        self._relax()
        if self._try_single_targets():
            self._relax()
        self.rows[self.best]["chosen"] = True
        return self.combinations[self.best]

    def stay_dense(self, why: str) -> dict[int, float | None]:
        """Choose dense attention in all layers after all."""
        self.rows[self.best]["chosen"] = False
        dense = dict.fromkeys(self.combinations[self.best])
        self._try(dense, "dense")
        self.best = len(self.rows) - 1
        self.rows[self.best] |= {"chosen": True, "why": why}
        return dense

    def _try(self, chosen: dict[int, float | None], why: str) -> bool:
        """Check a combination, and return True if it holds."""
        tiled = sum(error is not None for error in chosen.values())
        predicted = round_digits(self.search.change(chosen), 6) if self.predicts else None
        measured, choosing = (self.check(chosen) if tiled else 0.0), None
        holds = measured <= self.tolerance
        if holds and tiled and (predicted is None or predicted > self.tolerance):
            choosing = self.check_choosing(chosen)
            holds = choosing <= self.tolerance
        milliseconds = self.search.milliseconds(chosen)
        row: Row = {
            "errors": [chosen[layer] for layer in sorted(chosen)],
            "tiled_layers": tiled,
            "attention_milliseconds": round_digits(milliseconds, 6),
            "predicted_change": predicted,
            "choosing_change": choosing,
            "measured_change": measured,
            "holds": holds,
            "chosen": False,
            "why": why if tiled else "dense",
        }
        self.rows.append(row)
        self.combinations.append(chosen)
        if holds and (self.best < 0 or milliseconds < self._best_milliseconds):
            self.best = len(self.rows) - 1
        return holds

    @property
    def _best_milliseconds(self) -> float:
        return self.search.milliseconds(self.combinations[self.best])

    def _measure_alone(self, chosen: Combination) -> None:
        """Measure the change by each layer of a combination alone on the checking images."""
        for layer, error in chosen.items():
            if error is not None:
                self.alone[layer, error] = self.check_alone(layer, error)

    def _checking_costs(self) -> dict[tuple[int, float | None], float]:
        """Return costs on the checking images: those on the choosing ones, scaled layer by layer.

        The factor of a layer is that of the setting that was measured on both; that of all these layers
        together serves the others.
        """
        costs, power = self.search.costs, self.search.power
        both = {
            layer: (error or 1.0, costs[layer, error], change**power)
            for (layer, error), change in self.alone.items()
        }
        chosen_cost = sum(choosing for _, choosing, _ in both.values())
        checked_cost = sum(checking for _, _, checking in both.values())
        overall = checked_cost / chosen_cost if chosen_cost > 0.0 else 1.0
        scaled: dict[tuple[int, float | None], float] = {}
        for (layer, error), cost in costs.items():
            measured_error, choosing, checking = both.get(layer, (1.0, 1.0, overall))
            if error is None:
                scaled[layer, error] = 0.0
            elif choosing > 0.0:
                scaled[layer, error] = cost * checking / choosing
            else:  # no change on the choosing images
                scaled[layer, error] = checking * (error / measured_error) ** TARGET_POWER
        return scaled

    def _tighten(self) -> None:
        """Check combinations with smaller budgets until one holds, in the end with all layers dense."""
        scaled, choosing = self._checking_costs(), self.search.costs
        conservative = self.search.with_costs(
            {key: max(choosing[key], scaled[key]) for key in choosing}
        )
        for failed in range(1, TIGHTENING_CHECKS + 1):
            shrink = COARSE_STEP**0.5
            if self.predicts:
                shrink = (self.tolerance / self._largest_change(-1)) ** self.search.power
            budget = SHRINK**failed * shrink * conservative.cost(self.combinations[-1])
            chosen = conservative.fastest(budget) if budget > 0.0 else {}
            if not any(chosen.values()):
                break
            if self._try(chosen, "the fastest within a smaller budget, after a check that failed"):
                return
        self._try(dict.fromkeys(self.combinations[-1]), "dense")

    def _largest_change(self, row: int) -> float:
        """Return the larger one of the changes that were measured for a combination."""
        found = self.rows[row]
        return float(max(found["measured_change"], found["choosing_change"] or 0.0))

    def _relax(self) -> None:
        """Give layers faster settings as long as the combination holds."""
        checks = 0
        while checks < RELAXING_CHECKS:
            path = self._faster_combinations()
            before = self._best_milliseconds
            while path and self.search.milliseconds(path[-1]) <= (1.0 - LEAST_SAVING) * before:
                if path[-1] not in self.combinations:
                    checks += 1
                    why = "faster settings with what was left of the tolerance"
                    if self._try(path[-1], why):
                        break
                    if checks == RELAXING_CHECKS:
                        return
                path = path[: len(path) // 2]
            else:
                return

    def _faster_combinations(self) -> list[dict[int, float | None]]:
        """Return combinations, each faster than the one before, that are expected to hold.

        The first differs from the best one so far in one layer, each further one in one layer more or
        in its setting. The layer is that which saves the most time per share of the tolerance that was
        left.
        """
        chosen, row = dict(self.combinations[self.best]), self.rows[self.best]
        search, power = self.search, self.search.power
        choosing, checking = search.costs, self._checking_costs()
        if self.predicts:
            budget = self.tolerance**power
            used = row["choosing_change"] or row["predicted_change"]
            remaining = [budget - used**power, budget - row["measured_change"] ** power]
            # The layers alone and the whole model differ on the checking images, too.
            predicted = sum(checking[key] for key in chosen.items())
            if predicted > 0.0 and row["measured_change"] > 0.0:
                factor = row["measured_change"] ** power / predicted
                checking = {key: factor * cost for key, cost in checking.items()}
        else:
            larger = {key: max(choosing[key], checking[key]) for key in choosing}
            choosing = checking = larger
            remaining = [sum(larger[key] for key in chosen.items()) or search.smallest] * 2
        start = list(remaining)
        path: list[dict[int, float | None]] = []
        while True:
            moves = []
            for layer, settings in search.layers.items():
                now = (layer, chosen[layer])
                for setting in settings:
                    key = (layer, setting.error)
                    saved = search.settings[now].milliseconds - setting.milliseconds
                    added = (choosing[key] - choosing[now], checking[key] - checking[now])
                    if saved <= 0.0 or any(a > r for a, r in zip(added, remaining, strict=True)):
                        continue
                    # Nothing may be left at first, and something after a move that costs less.
                    shares = [
                        a / r if r > 0.0 else math.inf
                        for a, r in zip(added, start, strict=True)
                        if a > 0.0
                    ]
                    largest = max(shares, default=0.0)
                    rank = saved / largest if largest > 0.0 else math.inf
                    moves.append((rank, saved, -layer, key, added))
            if not moves:
                return path
            *_, (layer, error), added = max(moves, key=lambda move: move[:3])
            chosen = chosen | {layer: error}
            remaining = [left - a for left, a in zip(remaining, added, strict=True)]
            path.append(chosen)

    def _try_single_targets(self) -> bool:
        """Check single targets that are faster than the best combination; True if one of them holds."""
        milliseconds = self.search.milliseconds
        singles = [(milliseconds(c), error, c) for error, c in self.search.single_targets().items()]
        for time, error, chosen in sorted(singles, key=lambda single: single[:2]):
            if time >= self._best_milliseconds:
                return False
            if self.predicts and self.search.change(chosen) > MAX_PREDICTED_EXCESS * self.tolerance:
                continue
            why = f"error={error:g} for all layers"
            if chosen not in self.combinations and self._try(chosen, why):
                return True
        return False
