"""Settings of the attention of layers, and the fastest combination of them within a budget."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bmfa.models.search import Combination
from bmfa.records import round_digits

Costs = Mapping[tuple[int, float | None], float]  # by layer and error target

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

    def __init__(
        self,
        candidates: Iterable[LayerSetting],
        power: int,
        measure: Callable[[str, Combination], float] = lambda images, chosen: math.nan,
        measure_alone: Callable[[int, float], float] = lambda layer, error: math.nan,
    ) -> None:
        self.power, self.measure, self.measure_alone = power, measure, measure_alone
        measured = [setting for setting in candidates if setting.change is not None]
        self.settings = {(setting.layer, setting.error): setting for setting in measured}
        self.layers: dict[int, list[LayerSetting]] = {}
        for setting in measured:
            self.layers.setdefault(setting.layer, []).append(setting)
        self.dense: Combination = tuple(None for _ in self.layers)
        self.calibrated = {key: (s.change or 0.0) ** power for key, s in self.settings.items()}
        self.costs: Costs = self.calibrated
        self.alone: dict[tuple[int, float | None], float] = {}  # changes on validation images

    @property
    def largest(self) -> float:
        """The largest cost of a combination."""
        return sum(max(self.costs[s.layer, s.error] for s in ss) for ss in self.layers.values())

    def price(self, chosen: Combination) -> float:
        """Return the milliseconds of the attention of all layers."""
        milliseconds = sum(self.settings[key].milliseconds for key in enumerate(chosen))
        return round_digits(milliseconds, 6)

    def cost(self, chosen: Combination) -> float:
        """Return the sum of the costs of a combination."""
        return sum(self.costs[key] for key in enumerate(chosen))

    def predicted_cost(self, chosen: Combination) -> float:
        """Return the sum of the costs on the calibration images."""
        return sum(self.calibrated[key] for key in enumerate(chosen))

    def uniform(self) -> list[tuple[str, Combination]]:
        """Return for each error target the combination that has it where it saves time."""
        found = []
        for target in sorted({error for _, error in self.settings if error is not None}):
            chosen = (target if (layer, target) in self.settings else None for layer in self.layers)
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
            target = chosen[layer]
            scaled = cost * overall
            if target is not None and error is not None:
                scaled = cost * validated[layer, target] / (self.calibrated[layer, target] or 1.0)
                if self.calibrated[layer, target] == 0.0:  # only the validation images are changed
                    scaled = validated[layer, target] * (error / target) ** TARGET_POWER
            self.costs[layer, error] = max(cost, scaled)

    def choose(self, budget: float) -> Combination:
        """Return the fastest combination whose costs are within a budget.

        Dynamic programming over layers and steps of the budget. `best[b]` is the least time of the
        layers so far with at most b steps of cost; costs are rounded up, so the budget always holds.
        """

        def steps(setting: LayerSetting) -> int:
            cost = self.costs[setting.layer, setting.error]
            if cost == 0.0:
                return 0
            return BUDGET_STEPS + 1 if cost > budget else math.ceil(BUDGET_STEPS * cost / budget)

        best = np.zeros(BUDGET_STEPS + 1)
        choices: list[NDArray[np.intp]] = []
        for settings in self.layers.values():
            table = np.full((len(settings), BUDGET_STEPS + 1), np.inf)
            for row, setting in enumerate(settings):
                if (used := steps(setting)) <= BUDGET_STEPS:
                    table[row, used:] = best[: BUDGET_STEPS + 1 - used] + setting.milliseconds
            choices.append(table.argmin(0))  # of equal times the first, dense before any target
            best = table.min(0)
        chosen: list[float | None] = []
        left = BUDGET_STEPS
        for settings, choice in zip(reversed(self.layers.values()), reversed(choices), strict=True):
            setting = settings[choice[left]]
            chosen.append(setting.error)
            left -= steps(setting)
        return tuple(reversed(chosen))
