"""The fastest combination of settings of layers within a budget."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bmfa.models.plan import LayerSetting

# Steps into which the budget is divided. Costs are rounded up, so a model of 48 layers loses at most
# 48 / 10,000 of the budget.
BUDGET_STEPS = 10_000


class SettingSearch:
    """The fastest combination of settings within a budget of cost = change^power, which adds."""

    def __init__(self, candidates: Sequence[LayerSetting], power: int) -> None:
        self.power = power
        self.layers: dict[int, list[LayerSetting]] = {}
        for setting in candidates:
            if setting.change is not None:
                self.layers.setdefault(setting.layer, []).append(setting)
        self.costs = {
            (s.layer, s.error): (s.change or 0.0) ** power
            for settings in self.layers.values()
            for s in settings
        }
        self.largest = sum(
            max(self.costs[s.layer, s.error] for s in settings) for settings in self.layers.values()
        )
        positive = [cost for cost in self.costs.values() if cost > 0]
        self.smallest = min(positive, default=math.inf)

    def cost(self, chosen: Mapping[int, float | None]) -> float:
        """Return the sum of the costs of a combination."""
        return sum(self.costs[layer, error] for layer, error in chosen.items())

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
