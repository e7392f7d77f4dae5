"""Schedules of merging: operations, search, plans, and what is refused."""

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

if find_spec("timm") is None or find_spec("transformers") is None:
    pytest.skip("needs timm and transformers: pip install 'bmfa[models]'", allow_module_level=True)

import bmfa
from bmfa import merging
from bmfa.merging.policies.base import BudgetPolicy
from bmfa.models import ReductionPlan, patch, reduce, tune_reduction, unpatch
from bmfa.models.flops import count_flops
from bmfa.models.schedule_search import CostModel, ScheduleSearch, spread_schedule
from bmfa.models.tuning_reduction import fixed_schedule, mean_kl
from models.host_models import make_model, run

SCHEDULED = ("tome", "pitome", "tofu", "diffrate", "crossget", "free-energy", "random-pool")


def images(count: int = 8, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(3))


def full_gflops(model: nn.Module) -> float:
    return count_flops(model, images(1)) / 1e9


# Schedules of policies


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_schedule_removes_its_counts(name: str) -> None:
    policy = merging.parse(f"{name}:0,20,5")
    assert isinstance(policy, BudgetPolicy) and policy.budget == (0, 20, 5)
    assert merging.parse(str(policy)) == policy
    model = reduce(make_model("vit"), policy)
    run(model, images(2))
    assert [row.tokens for row in bmfa.summary(model)] == [65, 45, 40]


def test_a_schedule_with_equal_counts_is_the_policy_with_a_count() -> None:
    pixels = images(2)
    for count, schedule in ((4, [4, 4, 4]), (0, [0, 0, 0])):
        expected = run(reduce(make_model("vit"), merging.ToMe(count)), pixels)
        assert torch.equal(run(reduce(make_model("vit"), merging.ToMe(schedule)), pixels), expected)
    fixed = run(reduce(make_model("vit"), "free-energy:4"), pixels)
    assert torch.equal(run(reduce(make_model("vit"), "free-energy:0,12,0"), pixels), fixed)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([3, 3], "has 2 counts, and the model has 3 blocks"),
        ([0, 33, 0], r"removes 33 tokens in block 1, but of the 64 tokens .* at most 32"),
        ([30, 18, 0], r"removes 18 tokens in block 1, but of the 34 tokens .* at most 17"),
    ],
)
def test_schedules_that_do_not_fit_the_model(schedule: list[int], message: str) -> None:
    model = reduce(make_model("vit"), merging.FreeEnergy(schedule))
    with pytest.raises(ValueError, match=message):
        run(model, images(1))


@pytest.mark.parametrize("schedule", [[], [1, -1], [1, 2.5], ["1"]])
def test_schedules_that_are_none(schedule: list[Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        merging.FreeEnergy(schedule)
    with pytest.raises(ValueError, match="first block never merges"):
        run(reduce(make_model("vit"), "diffrate:4,0,0"), images(1))


# Search


@pytest.mark.parametrize("policy", ["free-energy", "tome", "pitome"])
def test_the_cost_model_is_the_counter(policy: str) -> None:
    model = make_model("vit")

    def count(schedule: tuple[int, ...]) -> int:
        return count_flops(
            reduce(model, merging.parse(f"{policy}:{','.join(map(str, schedule))}")), images(1)
        )

    cost = CostModel.fit(64, 3, lambda tokens: tokens // 2, count)
    for schedule in ((0, 0, 0), (10, 0, 7), (0, 31, 1), (5, 5, 5)):
        # Matching rounds half of the tokens down, which the polynomial does not.
        assert cost.flops(schedule) == pytest.approx(count(schedule), rel=1e-3)


def quadratic_search(weights: tuple[float, ...]) -> ScheduleSearch:
    """Blocks whose changes add and are quadratic in the share that they remove of the tokens left.

    Operations are the tokens that enter the blocks.
    """
    cost = CostModel(100, np.array([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))

    def change(schedule: tuple[int, ...]) -> float:
        left, total = 100, 0.0
        for weight, removed in zip(weights, schedule, strict=True):
            total += weight * (100 * removed / left) ** 2
            left -= removed
        return total

    return ScheduleSearch(
        100, range(len(weights)), len(weights), lambda t: t // 2, cost, change, change
    )


def test_the_search_is_near_the_optimum_of_additive_changes() -> None:
    search, budget = quadratic_search((9.0, 3.0, 1.0, 2.0, 1.0)), 430.0
    search.measure_alone()
    for schedule in ((4, 4, 0, 10, 0), (0, 20, 5, 0, 30)):
        assert search.predicted(schedule) == pytest.approx(search.change(schedule), rel=1e-6)
    greedy = search.greedy(budget)
    assert greedy is not None and search.fits(greedy)
    improved = search.improve(greedy, budget, rounds=3)
    assert search.fits(improved) and search.cost.flops(improved) <= budget
    assert search.measure(improved) <= search.measure(greedy)
    random = np.random.default_rng(0)
    drawn = (tuple(map(int, random.integers(0, 25, 5))) for _ in range(4000))
    fitting = (s for s in drawn if search.fits(s) and search.cost.flops(s) <= budget)
    assert search.measure(improved) <= 1.05 * min(map(search.change, fitting))
    assert search.greedy(0.0) is None


def test_the_fixed_schedule_is_that_of_free_energy_with_a_count() -> None:
    search = quadratic_search((1.0,) * 12)
    assert spread_schedule(12, range(3, 11, 2), 10) == (0, 0, 0, 3, 0, 3, 0, 2, 0, 2, 0, 0)
    schedule = fixed_schedule(search, search.cost.flops(spread_schedule(12, range(3, 11, 2), 40)))
    assert schedule == (0, 0, 0, 10, 0, 10, 0, 10, 0, 10, 0, 0)


# Plans


def test_a_plan_for_gflops(tmp_path: Path) -> None:
    model, pixels = make_model("vit"), images()
    before, state = run(model, pixels), copy.deepcopy(model.state_dict())
    target, steps = 0.8 * full_gflops(model), []
    plan = tune_reduction(
        model, pixels, gflops=target, progress=lambda done, total: steps.append((done, total))
    )
    assert torch.equal(run(model, pixels), before)
    assert all(
        torch.equal(x, y) for x, y in zip(state.values(), model.state_dict().values(), strict=True)
    )
    assert plan.gflops <= target < plan.full_gflops == pytest.approx(full_gflops(model))
    assert (plan.choosing, plan.checking, plan.confirming) == (4, 0, 4)
    assert (plan.grid, plan.img_size) == ((8, 8), (32, 32)) and plan.holds
    assert len(plan.schedule) == 3 and sum(plan.schedule) > 0 and len(steps) > 3
    assert steps[-1][0] <= steps[-1][1]

    # The figures of the plan are those of the reduced model on the images that did not choose.
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    choosing, checking = pixels[order[:4]], pixels[order[4:]]
    expected = {part: run(model, x).double() for part, x in enumerate((choosing, checking))}
    reduce(model, plan=plan)
    assert count_flops(model, pixels[:1]) / 1e9 == pytest.approx(plan.gflops)
    logits = run(model, checking).double()
    assert plan.output_kl == pytest.approx(mean_kl(expected[1], logits), rel=1e-4)
    agreement = (logits.argmax(-1) == expected[1].argmax(-1)).double().mean()
    assert plan.agreement == pytest.approx(float(agreement))
    chosen = run(model, choosing).double()
    assert plan.choosing_kl == pytest.approx(mean_kl(expected[0], chosen), rel=1e-4)
    agreeing = (chosen.argmax(-1) == expected[0].argmax(-1)).double().mean()
    assert plan.choosing_agreement == pytest.approx(float(agreeing))
    left = [64 - sum(plan.schedule[: block + 1]) for block in range(3)]
    assert [row["tokens_left"] for row in plan.to_record().rows] == left

    # The same from a file, in another process as it were, and the same plan from the same seed.
    plan.save(tmp_path / "plan.json")
    assert ReductionPlan.load(tmp_path / "plan.json") == plan
    other = reduce(make_model("vit"), plan=tmp_path / "plan.json")
    assert torch.equal(run(other, pixels), run(model, pixels))
    assert str(plan.reduction) in repr(other)
    unpatch(model)
    assert tune_reduction(model, pixels, gflops=target, progress=False) == plan


def test_the_best_schedule_is_no_worse_than_the_fixed_one_on_the_choosing_images() -> None:
    model, pixels = make_model("vit"), images()
    plan = tune_reduction(model, pixels, gflops=0.75 * full_gflops(model), progress=False)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    choosing = pixels[order[:4]]
    full = run(model, choosing).double()
    candidates = []
    for total in range(65):
        if total > 32:
            break
        reduce(model, merging.FreeEnergy([0, total, 0]))
        if count_flops(model, pixels[:1]) / 1e9 <= 0.75 * plan.full_gflops:
            candidates.append(mean_kl(full, run(model, choosing).double()))
            break
    assert plan.choosing_kl <= (candidates[0] if candidates else float("inf")) * (1 + 1e-6)


def test_a_plan_for_agreement() -> None:
    model, pixels = make_model("vit"), images(32)
    model.head.bias.data.zero_()  # or one class wins for all images
    plan = tune_reduction(model, pixels, agreement=1.0, progress=False)
    assert plan.checks[-1]["agreement"] == 1.0 and plan.target == "agreement"
    assert (plan.choosing, plan.checking, plan.confirming) == (16, 8, 8)
    assert [row["gflops"] for row in plan.checks] == sorted(row["gflops"] for row in plan.checks)
    assert all(row["agreement"] < 1.0 for row in plan.checks[:-1])
    loose = tune_reduction(model, pixels, agreement=0.3, progress=False)
    assert loose.checks[-1]["agreement"] >= 0.3 and loose.gflops < plan.gflops

    # The agreement of the plan is that of the images that took no part in the choice.
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    unseen = pixels[order[24:]]
    expected = run(model, unseen).argmax(-1)
    agreeing = (run(reduce(model, plan=loose), unseen).argmax(-1) == expected).double().mean()
    assert loose.agreement == pytest.approx(float(agreeing))
    assert loose.holds == (loose.agreement >= 0.3)
    few = tune_reduction(unpatch(model), pixels[:4], agreement=0.5, progress=False)
    assert (few.choosing, few.checking, few.confirming) == (2, 2, 0) and few.holds
    assert few.agreement == few.checks[-1]["agreement"] and "on 2 checking images" in str(few)


def test_a_budget_of_the_full_model_removes_nothing() -> None:
    model = make_model("vit")
    plan = tune_reduction(model, images(4), gflops=10.0, progress=False)
    assert plan.schedule == (0, 0, 0) and plan.agreement == 1.0 and plan.output_kl == 0.0


@pytest.mark.parametrize("name", ["hf-dinov2", "no-class-token", "embedded"])
def test_other_hosts(name: str) -> None:
    model = make_model(name)
    pixels = images(4, 112 if name == "embedded" else 32)
    full = count_flops(model, pixels[:1]) / 1e9
    plan = tune_reduction(model, pixels, "tome", gflops=0.8 * full, progress=False)
    assert plan.gflops <= 0.8 * full and plan.policy == "tome"
    run(reduce(model, plan=plan), pixels)


def test_plans_are_refused_where_they_do_not_fit(tmp_path: Path) -> None:
    model, pixels = make_model("vit"), images(4)
    plan = tune_reduction(model, pixels, gflops=0.8 * full_gflops(model), progress=False)
    reduce(model, plan=plan)
    with pytest.raises(ValueError, match=r"the plan is for a 8x8 grid of tokens, and .* 10x10"):
        run(model, images(1, 40))
    with pytest.raises(ValueError, match="other weights of the same architecture"):
        reduce(make_model("vit", seed=1), plan=plan)
    with pytest.raises(ValueError, match="plan does not fit"):
        reduce(make_model("registers"), plan=plan)
    with pytest.raises(ValueError, match="a policy and a plan are given"):
        reduce(model, "tome:8", plan=plan)
    with pytest.raises(ValueError, match="neither a policy nor a plan"):
        reduce(model)
    with pytest.raises(TypeError, match="plan is int"):
        reduce(model, plan=3)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="cannot be read"):
        reduce(model, plan=tmp_path / "missing.json")
    file = tmp_path / "plan.json"
    plan.save(file)
    with pytest.raises(ValueError, match="kind 'reduction'; pass one of the kind 'attention'"):
        patch(make_model("vit"), plan=file)
    data = json.loads(file.read_text("utf-8"))
    for change in (
        {"schedule": [1, -2, 0]},
        {"policy": "nonsense"},
        {"schedule": []},
        {"schedule": [2]},  # as a name, "free-energy:2" removes 2 tokens in every block
        {"schedule": [*data["schedule"], 0]},
    ):
        file.write_text(json.dumps(data | change), "utf-8")
        with pytest.raises(ValueError, match="not a complete plan"):
            reduce(model, plan=file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither gflops nor agreement"),
        ({"gflops": 1.0, "agreement": 0.9}, "gflops and agreement are given"),
        ({"gflops": 0.0}, "gflops"),
        ({"agreement": 1.5}, "agreement"),
        ({"gflops": 1e-6}, "needs at least about"),
        ({"gflops": 1.0, "policy": "dct"}, "takes a schedule: tome"),
        ({"gflops": 1.0, "images": images(1)}, "only 1 image"),
        ({"gflops": 1.0, "images": images(4) * float("nan")}, "not finite"),
    ],
)
def test_bad_arguments_change_nothing(options: dict[str, Any], message: str) -> None:
    model = make_model("vit").train()
    arguments = {"images": images(4), "progress": False} | options
    with pytest.raises(ValueError, match=message):
        tune_reduction(model, **arguments)
    assert model.training and not any("bmfa" in key for m in model.modules() for key in vars(m))
    assert not any(module._forward_hooks for module in model.modules())


def test_models_that_are_no_classifiers_or_are_patched_are_refused() -> None:
    with pytest.raises(TypeError, match=r"no \(B, classes\) logits"):
        tune_reduction(make_model("hf-registers"), images(4), gflops=0.001, progress=False)
    with pytest.raises(ValueError, match="is patched or reduced"):
        tune_reduction(reduce(make_model("vit"), "tome:4"), images(4), gflops=1.0)
