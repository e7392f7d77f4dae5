"""The search on synthetic models whose layers change other images more or less."""

import itertools
import math
import random

import pytest

from bmfa.models.search import BUDGET_STEPS, MOST_CHECKS, LayerSetting, Search, SettingProblem

ERRORS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
CASES = 12
IMAGES = ("calibration", "validation")


class Simulated(SettingProblem):
    """A model of which every layer changes the validation images by a factor of its own."""

    def __init__(self, seed, power=2, largest_factor=10.0, interaction=1.0, layers=12):
        chance = random.Random(seed)
        self.tolerance = 10 ** chance.uniform(-2.0, -0.8)
        self.factor = [largest_factor ** chance.uniform(-1, 1) for _ in range(layers)]
        # Of the change of several layers over the sum of their costs.
        self.interaction = interaction
        candidates: list[LayerSetting] = []
        for layer in range(layers):
            slope = 10 ** chance.uniform(-1.0, 0.3)
            gain = chance.uniform(0.05, 0.3)
            candidates.append(LayerSetting(layer, None, 1.0, 0.0))
            for error in ERRORS:
                time = 1.1 - gain * math.log(error / ERRORS[0]) * chance.uniform(0.9, 1.1)
                change = (slope * error * chance.uniform(0.8, 1.2)) ** (2 / power)
                alone = change if time < 0.98 else None
                candidates.append(LayerSetting(layer, error, time, alone))
        super().__init__(candidates, power, self.change)

    def change(self, images, chosen) -> float:
        tiled = [(layer, error) for layer, error in enumerate(chosen) if error is not None]
        factors = [f**self.power if images == "validation" else 1.0 for f in self.factor]
        total = sum(self.costs[key] * factors[key[0]] for key in tiled)
        return (total * (self.interaction if len(tiled) > 1 else 1.0)) ** (1 / self.power)

    def holds(self, chosen) -> bool:
        return all(self.change(images, chosen) <= self.tolerance for images in IMAGES)

    def search(self, *, predicts: bool = True) -> Search:
        budget = self.tolerance**self.power if predicts else sum(self.costs.values())
        return Search(self, self.tolerance, self.power if predicts else None, budget)


def check(model: Simulated, search: Search) -> None:
    """The result holds, no uniform setting that holds is faster, and the log is complete."""
    result = search.run()
    assert model.holds(result.settings)
    held = [chosen for chosen in model.uniform() if model.holds(chosen)]
    assert result.price <= min(map(model.price, (model.dense, *held))) + 1e-9
    assert result in search.checked.values() and result.holds
    assert len(search.checked) <= 2 * MOST_CHECKS + len(model.uniform()) + 1
    assert result.price == min(check.price for check in search.checked.values() if check.holds)
    assert result.price == pytest.approx(model.price(result.settings))
    for row in search.checked.values():
        changes = (row.calibration_change, row.validation_change)
        for images, change in zip(IMAGES, changes, strict=True):
            assert change == pytest.approx(model.change(images, row.settings))
        assert row.holds == model.holds(row.settings)


def test_the_plan_holds_and_no_uniform_setting_that_holds_is_faster():
    tightened = 0
    for power, interaction in itertools.product((1, 2), (0.5, 1.0, 4.0)):
        for seed in range(CASES):
            model = Simulated(seed, power, interaction=interaction)
            search = model.search()
            check(model, search)
            tightened += not next(iter(search.checked.values())).holds
    assert tightened > CASES, "nearly every first combination held, so little is tested"


def test_on_equal_images_the_first_combination_is_the_plan():
    for seed in range(CASES):
        model = Simulated(seed, largest_factor=1.0)
        search = model.search()
        check(model, search)
        assert search.best is next(iter(search.checked.values()))
        # The others are uniform settings that are faster, and do not hold.
        assert all(row.settings in model.uniform() for row in list(search.checked.values())[1:])


def test_what_the_checks_find_is_near_the_optimum_where_layers_change_other_images_alike():
    """All layers change the validation images more or less, so the optimum is that of one budget."""
    ratios = []
    for seed, factor in itertools.product(range(CASES), (0.3, 1.0, 3.0)):
        model = Simulated(seed)
        model.factor = [factor] * len(model.dense)
        optimum = model.price(model.choose((model.tolerance / max(1.0, factor)) ** 2))
        ratios.append(model.search().run().price / optimum)
    assert min(ratios) > 0.99
    assert sorted(ratios)[len(ratios) // 2] < 1.001 and max(ratios) < 1.02


def test_a_search_that_is_late_ends_with_the_first_combination_that_holds():
    saved = 0
    for seed in range(CASES):
        model = Simulated(seed)
        search, late = model.search(), model.search()
        late.is_late = lambda: True
        check(model, late)
        search.run()
        saved += len(search.checked) - len(late.checked)
    assert saved >= CASES


def test_a_measure_of_unknown_addition_is_only_checked():
    for seed in range(CASES):
        model = Simulated(seed)
        search = model.search(predicts=False)
        check(model, search)
        assert all(row.predicted_change is None for row in search.checked.values())


def test_a_measure_that_jumps_is_approached():
    """As the share of images whose class changes, it says nothing of how far the tolerance is."""
    ratios = []
    for seed in range(CASES):
        model = Simulated(seed, largest_factor=1.0)
        optimum = model.price(model.choose(model.tolerance**2))
        smooth = model.measure
        model.measure = lambda images, chosen, m=model, f=smooth: float(
            f(images, chosen) > m.tolerance
        )
        search = Search(model, 1e-9, None, sum(model.costs.values()))
        ratios.append(search.run().price / optimum)
    assert 0.99 < min(ratios) and max(ratios) < 1.03, ratios


def test_nothing_that_holds_leaves_all_layers_dense():
    """Nothing changes the calibration images, so nothing is known of how the measure grows."""
    candidates = [LayerSetting(0, None, 1.0, 0.0), LayerSetting(0, 0.1, 0.5, 0.0)]
    for power in (2, None):
        model = SettingProblem(candidates, 2, lambda images, chosen: 2.0 * (images == "validation"))
        result = Search(model, 1.0, power, 1.0).run()
        assert result.settings == (None,) and result.holds


def test_the_knapsack_is_optimal_up_to_the_rounding_of_the_budget():
    chance = random.Random(0)
    for power, _ in itertools.product((1, 2), range(8)):
        layers = [
            [LayerSetting(layer, None, 1.0, 0.0)]
            + [LayerSetting(layer, 0.1 * i, chance.random(), chance.random()) for i in (1, 2, 3)]
            for layer in range(5)
        ]
        problem = SettingProblem([s for settings in layers for s in settings], power)
        for budget in (0.0, 0.3, 1.0, 10.0):
            chosen = problem.choose(budget)
            assert problem.cost(chosen) <= budget
            time = sum(problem.milliseconds[key] for key in enumerate(chosen))
            # Rounding up costs each of the five layers less than one step of the budget.
            least = brute_force(layers, budget * (1 - len(layers) / BUDGET_STEPS), power)
            assert brute_force(layers, budget, power) <= time + 1e-12 <= least + 2e-12


def brute_force(layers: list[list[LayerSetting]], budget: float, power: int) -> float:
    """The least time of all combinations within the budget."""
    return min(
        sum(s.milliseconds for s in chosen)
        for chosen in itertools.product(*layers)
        if sum(s.change**power for s in chosen) <= budget
    )
