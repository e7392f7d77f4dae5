"""Settings of layers, and the fastest combination of them within a budget."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bmfa.records import round_digits

# The error target of every layer, None for dense attention.
Combination = Mapping[int, float | None]

# Steps into which the budget is divided. Costs are rounded up, so a model of 48 layers loses at most
# 48 / 10,000 of the budget.
BUDGET_STEPS = 10_000
# Factor between two targets from which on a target between them is interpolated.
LEAST_STEP = 1.25


@dataclass(frozen=True)
class LayerSetting:
    """One setting of one layer, with what it does alone.

    Args:
        layer: The index of the layer.
        error: The error target of its attention over tiles; None is dense attention.
        milliseconds: The time of its attention for a batch.
        change: The change of the output of the model on the choosing images if no other layer is
            changed: 0 for dense attention, None if it was not measured because dense attention is as
            fast.
        checking_change: The same on the checking images, None if it was not measured. It is measured
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
    checking_change: float | None = None
    interpolated: bool = False

    @property
    def name(self) -> str:
        """`"dense"`, or the error target.

        Example:
            >>> LayerSetting(0, None, 2.5, 0.0).name
            'dense'
        """
        return "dense" if self.error is None else f"error={self.error:g}"


def add_between(settings: Iterable[LayerSetting]) -> list[LayerSetting]:
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
    settings = list(settings)
    added: list[LayerSetting] = []
    for low, high in pairwise(settings):
        if low.error is None or high.error is None or low.change is None or high.change is None:
            continue
        middle = round_digits(math.sqrt(low.error * high.error), 2)
        if high.error < LEAST_STEP * low.error or not low.error < middle < high.error:
            continue
        share = math.log(middle / low.error) / math.log(high.error / low.error)
        milliseconds = (1 - share) * low.milliseconds + share * high.milliseconds
        if min(low.change, high.change) > 0.0:
            change = low.change ** (1 - share) * high.change**share
        else:
            change = (1 - share) * low.change + share * high.change
        milliseconds, change = round_digits(milliseconds, 5), round_digits(change, 6)
        added.append(LayerSetting(low.layer, middle, milliseconds, change, interpolated=True))
    return sorted([*settings, *added], key=lambda s: -1.0 if s.error is None else s.error)


class SettingSearch:
    """The fastest combination of settings within a budget of cost = change^power, which adds.

    Args:
        candidates: Settings of all layers, dense attention among them; those without a change are left
            out.
        power: The power of the change that adds over layers.
        costs: Costs by layer and target in place of change^power.
    """

    def __init__(
        self,
        candidates: Sequence[LayerSetting],
        power: int,
        costs: Mapping[tuple[int, float | None], float] | None = None,
    ) -> None:
        self.power = power
        self.settings = {
            (setting.layer, setting.error): setting
            for setting in candidates
            if setting.change is not None
        }
        self.layers: dict[int, list[LayerSetting]] = {}
        for setting in self.settings.values():
            self.layers.setdefault(setting.layer, []).append(setting)
        self.costs = dict(costs) if costs is not None else {}
        for key, setting in self.settings.items():
            self.costs.setdefault(key, (setting.change or 0.0) ** power)
        self.largest = sum(
            max(self.costs[s.layer, s.error] for s in settings) for settings in self.layers.values()
        )
        positive = [cost for cost in self.costs.values() if cost > 0]
        self.smallest = min(positive, default=math.inf)

    def with_costs(self, costs: Mapping[tuple[int, float | None], float]) -> "SettingSearch":
        """Return a search of the same settings with other costs."""
        return SettingSearch(list(self.settings.values()), self.power, costs)

    def cost(self, chosen: Combination) -> float:
        """Return the sum of the costs of a combination."""
        return sum(self.costs[layer, error] for layer, error in chosen.items())

    def change(self, chosen: Combination) -> float:
        """Return the change that follows from the cost of a combination."""
        return float(self.cost(chosen) ** (1.0 / self.power))

    def milliseconds(self, chosen: Combination) -> float:
        """Return the time of the attention of all layers."""
        return sum(self.settings[layer, error].milliseconds for layer, error in chosen.items())

    def single_targets(self) -> dict[float, dict[int, float | None]]:
        """Return by error target the combination in which every layer has it where it saves time."""
        errors = sorted({error for _, error in self.settings if error is not None})
        return {
            target: {
                layer: target if (layer, target) in self.settings else None
                for layer in sorted(self.layers)
            }
            for target in errors
        }

    def fastest(self, budget: float) -> dict[int, float | None]:
        """Return the error target of each layer, None for dense.

        Dynamic programming over layers and steps of the budget. `best[b]` is the least time of the
        layers so far with at most b steps of cost; costs are rounded up, so the budget always holds.
        """
        best = np.zeros(BUDGET_STEPS + 1)
        choices: list[np.ndarray[Any, np.dtype[np.intp]]] = []
        for settings in self.layers.values():
            table = np.full((len(settings), BUDGET_STEPS + 1), np.inf)
            for row, setting in enumerate(settings):
                steps = self._steps(self.costs[setting.layer, setting.error], budget)
                if steps <= BUDGET_STEPS:
                    table[row, steps:] = best[: BUDGET_STEPS + 1 - steps] + setting.milliseconds
            choices.append(table.argmin(0))  # of equal times the first, dense before any target
            best = table.min(0)
        chosen: dict[int, float | None] = {}
        left = BUDGET_STEPS
        for settings, choice in zip(reversed(self.layers.values()), reversed(choices), strict=True):
            setting = settings[choice[left]]
            chosen[setting.layer] = setting.error
            left -= self._steps(self.costs[setting.layer, setting.error], budget)
        return dict(sorted(chosen.items()))

    @staticmethod
    def _steps(cost: float, budget: float) -> int:
        if cost == 0.0:
            return 0
        if cost > budget:
            return BUDGET_STEPS + 1
        return math.ceil(BUDGET_STEPS * cost / budget)
