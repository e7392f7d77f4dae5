"""The search with checks, on synthetic models whose layers change other images more or less."""

import math
import random
from dataclasses import dataclass, field

import pytest

from bmfa.models.checked_search import CheckedSearch
from bmfa.models.setting_search import LayerSetting, SettingSearch, add_between

ERRORS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
CASES = 60


@dataclass
class Simulated:
    """A model of which every layer changes the checking images by a factor of its own."""

    seed: int
    power: int = 2
    largest_factor: float = 10.0
    interaction: float = 1.0  # of the change of several layers over the sum of their costs
    layers: int = 12
    calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.tolerance = 10 ** chance.uniform(-2.0, -0.8)
        self.factor = {
            layer: self.largest_factor ** chance.uniform(-1, 1) for layer in range(self.layers)
        }
        self.candidates: list[LayerSetting] = []
        for layer in range(self.layers):
            slope = 10 ** chance.uniform(-1.0, 0.3)
            gain = chance.uniform(0.05, 0.3)
            settings = [LayerSetting(layer, None, 1.0, 0.0)]
            for error in ERRORS:
                time = 1.1 - gain * math.log(error / ERRORS[0]) * chance.uniform(0.9, 1.1)
                change = (slope * error * chance.uniform(0.8, 1.2)) ** (2 / self.power)
                fast = time < 0.98
                settings.append(LayerSetting(layer, error, time, change if fast else None))
            self.candidates += add_between(settings)
        self.search = SettingSearch(self.candidates, self.power)

    def cost(self, chosen, *, checking: bool) -> float:
        tiled = {layer: error for layer, error in chosen.items() if error is not None}
        total = sum(
            self.search.costs[key] * (self.factor[key[0]] ** self.power if checking else 1.0)
            for key in tiled.items()
        )
        return total * (self.interaction if len(tiled) > 1 else 1.0)

    def change(self, chosen, *, checking: bool = True) -> float:
        self.calls += 1
        return self.cost(chosen, checking=checking) ** (1 / self.power)

    def holds(self, chosen) -> bool:
        return all(
            self.cost(chosen, checking=checking) <= self.tolerance**self.power
            for checking in (False, True)
        )

    def run(self, *, predicts: bool = True, budget: float | None = None) -> CheckedSearch:
        made = CheckedSearch(
            self.search,
            self.tolerance,
            self.tolerance**self.power if budget is None else budget,
            check=self.change,
            check_choosing=lambda chosen: self.change(chosen, checking=False),
            check_alone=lambda layer, error: self.change({layer: error}),
            predicts=predicts,
        )
        made.result = made.run()
        return made


def best_single(model: Simulated) -> float:
    """The least time of a single target that holds, or of dense attention."""
    dense = dict.fromkeys(model.search.layers)
    held = [c for c in model.search.single_targets().values() if model.holds(c)]
    return min(model.search.milliseconds(chosen) for chosen in (dense, *held))


def check(model: Simulated, made: CheckedSearch) -> None:
    """The result holds, is not slower than a single target, and its log is complete."""
    time = model.search.milliseconds(made.result)
    assert model.cost(made.result, checking=True) <= model.tolerance**model.power * (1 + 1e-9)
    assert time <= best_single(model) + 1e-9
    assert len(made.rows) <= made.most_checks and len(made.alone) <= model.layers
    chosen = [row for row in made.rows if row["chosen"]]
    assert len(chosen) == 1 and chosen[0]["holds"]
    assert chosen[0]["errors"] == [made.result[layer] for layer in range(model.layers)]
    assert chosen[0]["attention_milliseconds"] == pytest.approx(time, rel=1e-5)
    held = [row["attention_milliseconds"] for row in made.rows if row["holds"]]
    assert chosen[0]["attention_milliseconds"] == min(held)
    for row in made.rows:
        errors = dict(enumerate(row["errors"]))
        assert row["measured_change"] == pytest.approx(
            model.cost(errors, checking=True) ** (1 / model.power)
        )


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("interaction", [0.5, 1.0, 4.0])
def test_the_plan_holds_and_no_single_target_that_holds_is_faster(power, interaction):
    tightened = 0
    for seed in range(CASES):
        model = Simulated(seed, power, interaction=interaction)
        made = model.run()
        check(model, made)
        tightened += not made.rows[0]["holds"]
    assert tightened > CASES / 4, "nearly every first combination held, so little is tested"


def test_on_equal_images_the_first_combination_is_the_plan():
    for seed in range(CASES):
        model = Simulated(seed, largest_factor=1.0)
        made = model.run()
        check(model, made)
        assert made.rows[0]["chosen"] and not made.alone
        # The others are single targets that are faster, and do not hold.
        assert all("for all layers" in row["why"] for row in made.rows[1:])


def test_the_search_is_deterministic():
    for seed in range(10):
        first, second = Simulated(seed).run(), Simulated(seed).run()
        assert (first.result, first.rows, first.alone) == (
            second.result,
            second.rows,
            second.alone,
        )


def test_one_layer_that_is_far_worse_does_not_slow_down_the_others():
    """Shrinking the whole budget would take a factor of 100 from all layers."""
    for seed in range(20):
        model = Simulated(seed, largest_factor=1.0)
        first = model.search.fastest(model.tolerance**2)
        layer = max(first, key=lambda i: model.search.costs[i, first[i]])
        if first[layer] is None:
            continue
        model.factor[layer] = 10.0
        made = model.run()
        check(model, made)
        without = [s for s in model.candidates if s.layer != layer or s.error is None]
        least = SettingSearch(without, 2).milliseconds(
            SettingSearch(without, 2).fastest(0.9 * model.tolerance**2)
        )
        assert model.search.milliseconds(made.result) <= 1.01 * least


def optimum(model: Simulated) -> float:
    """The least time within both budgets, by Lagrange multipliers between them; a lower bound or so."""
    budget, search = model.tolerance**2, model.search
    times = []
    for step in range(21):
        weight = step / 20
        costs = {
            key: cost * (weight + (1 - weight) * model.factor[key[0]] ** 2)
            for key, cost in search.costs.items()
        }
        mixed = search.with_costs(costs)
        times.append(search.milliseconds(mixed.fastest(budget)))
    return max(times)  # each is a relaxation, so at most the optimum up to rounding


def test_what_the_checks_find_is_near_the_optimum_of_both_halves():
    ratios = []
    for seed in range(CASES):
        model = Simulated(seed, largest_factor=3.0)
        ratios.append(model.search.milliseconds(model.run().result) / optimum(model))
    assert min(ratios) > 0.99
    assert sorted(ratios)[CASES // 2] < 1.01 and max(ratios) < 1.05


def test_a_measure_of_unknown_addition_is_only_checked():
    for seed in range(CASES):
        model = Simulated(seed)
        made = model.run(predicts=False, budget=0.1 * model.search.largest)
        check(model, made)
        assert model.holds(made.result)
        assert all(row["predicted_change"] is None for row in made.rows)
        assert all(
            row["choosing_change"] is not None
            for row in made.rows
            if row["holds"] and row["tiled_layers"]
        )


def test_layers_that_change_only_the_checking_images_are_found():
    model = Simulated(1)
    model.candidates = [
        LayerSetting(layer, error, 1.0 - 10 * (error or 0.0), 0.0)
        for layer in range(model.layers)
        for error in (None, 0.01, 0.05)
    ]
    model.search = SettingSearch(model.candidates, 2)
    model.cost = lambda chosen, checking: (
        checking * sum((error or 0.0) ** 2 * (layer == 3) for layer, error in chosen.items())
    )
    model.tolerance = 0.02
    made = model.run()
    assert made.result == dict.fromkeys(range(model.layers), 0.05) | {3: 0.01}


def test_targets_between_two_are_interpolated():
    settings = [
        LayerSetting(2, None, 1.0, 0.0),
        LayerSetting(2, 0.01, 1.2, None),
        LayerSetting(2, 0.03, 0.9, 0.002),
        LayerSetting(2, 0.05, 0.8, 0.004),
        LayerSetting(2, 0.06, 0.7, 0.005),
        LayerSetting(2, 0.24, 0.5, 0.0),
    ]
    added = [s for s in add_between(settings) if s.interpolated]
    assert [s.error for s in added] == [0.039, 0.12]
    assert 0.8 < added[0].milliseconds < 0.9 and 0.002 < added[0].change < 0.004
    assert added[1] == LayerSetting(2, 0.12, 0.6, 0.0025, interpolated=True)
    assert [s for s in add_between(settings) if not s.interpolated] == settings


def test_a_single_target_that_uses_the_whole_tolerance_is_improved_without_an_error():
    """A faster setting that costs less leaves something of a tolerance of which nothing was left."""
    candidates = [
        LayerSetting(0, None, 1.0, 0.0),
        LayerSetting(0, 0.1, 0.8, 1.0),
        LayerSetting(0, 0.2, 0.6, 0.5),  # faster, and a smaller change
        LayerSetting(1, None, 1.0, 0.0),
        LayerSetting(1, 0.1, 0.8, 0.5),
        LayerSetting(1, 0.2, 0.6, 0.75),
    ]
    single = {0: 0.1, 1: 0.1}
    made = CheckedSearch(
        SettingSearch(candidates, 1),
        3.0,
        3.0,
        check=lambda chosen: 3.0 if chosen == single else 30.0,
        check_choosing=lambda chosen: 3.0,
        check_alone=lambda layer, error: 1.0,
    )
    assert made.run() == single


def test_a_setting_that_changes_only_the_checking_images_is_no_error():
    """Nothing changes the choosing images, so nothing is known of how the measure grows."""
    candidates = [LayerSetting(0, None, 1.0, 0.0), LayerSetting(0, 0.1, 0.5, 0.0)]
    changes = iter([2.0, 0.5])
    made = CheckedSearch(
        SettingSearch(candidates, 2),
        1.0,
        1.0,
        check=lambda chosen: next(changes),
        check_choosing=lambda chosen: 0.0,
        check_alone=lambda layer, error: 2.0,
        predicts=False,
    )
    assert made.run() == {0: None}
