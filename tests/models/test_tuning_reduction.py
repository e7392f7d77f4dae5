"""Schedules of merging: operations, the search, plans, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("timm")
pytest.importorskip("transformers")

import bmfa
from bmfa import merging
from bmfa.merging.policies.base import BudgetPolicy
from bmfa.models import ReductionPlan, patch, reduce, tune_reduction, unpatch
from bmfa.models.flops import count_flops
from bmfa.models.measures import disagreement, kl_divergence
from bmfa.models.plan import SCHEDULED
from bmfa.models.tuning_reduction import ScheduleModel, make_policy
from models.host_models import make_model, run


def images(count: int = 8, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(3))


def gflops(model: nn.Module, share: float = 1.0, side: int = 32) -> float:
    return share * count_flops(model, images(1, side)) / 1e9


def tuned(model: nn.Module, pixels: Tensor, *policy: str, **options: Any) -> ReductionPlan:
    return tune_reduction(model, pixels, *policy, progress=False, **options)


def parts_of(pixels: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """The images that calibrate, validate and test a plan with seed 0."""
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return torch.split(pixels[order], sizes)


# Schedules of policies


def test_a_schedule_removes_its_counts() -> None:
    assert "tome" in SCHEDULED
    for name in merging.POLICY_NAMES:
        try:
            policy = merging.parse(f"{name}:0,20,5")
        except ValueError:
            policy = None
        assert isinstance(policy, BudgetPolicy) == (name in SCHEDULED)
        if policy is not None:
            assert policy.budget == (0, 20, 5) and merging.parse(str(policy)) == policy
            model = reduce(make_model("vit"), policy)
            run(model, images(2))
            assert [row.tokens for row in bmfa.summary(model)] == [65, 45, 40]


def test_a_schedule_with_equal_counts_is_the_policy_with_a_count() -> None:
    for count, schedule in (
        ("tome:4", "tome:4,4,4"),
        ("tome:0", "tome:0,0,0"),
        ("free-energy:4", "free-energy:0,12,0"),
    ):
        first, second = (run(reduce(make_model("vit"), p), images(2)) for p in (count, schedule))
        assert torch.equal(first, second)


def test_schedules_that_do_not_fit_the_model_are_refused() -> None:
    for name, message in (
        ("free-energy:3,3", "has 2 counts, and the model has 3 blocks"),
        ("free-energy:0,33,0", r"removes 33 tokens in block 1, but of the 64 tokens .* at most 32"),
        ("free-energy:30,18,0", r"removes 18 tokens in block 1, but of the 34 .* at most 17"),
        ("diffrate:4,0,0", "first block never merges"),
    ):
        with pytest.raises(ValueError, match=message):
            run(reduce(make_model("vit"), name), images(1))
    for schedule in ([], [1, -1], [1, 2.5], ["1"]):
        with pytest.raises((ValueError, TypeError)):
            merging.FreeEnergy(schedule)


# Search


def test_the_cost_model_is_the_counter() -> None:
    for policy in ("free-energy", "tome", "pitome"):
        model = make_model("vit")

        def count(schedule: tuple[int, ...], model=model, policy=policy) -> int:
            return count_flops(reduce(model, make_policy(policy, schedule)), images(1))

        cost = ScheduleModel(64, 3, range(3), lambda tokens: tokens // 2, count)
        for schedule in ((0, 0, 0), (10, 0, 7), (0, 31, 1), (5, 5, 5)):
            # Matching rounds half of the tokens down, which the polynomial does not.
            assert cost.flops(schedule) == pytest.approx(count(schedule), rel=1e-3)


def left_before(schedule: tuple[int, ...], tokens: int) -> list[int]:
    return [tokens - sum(schedule[:block]) for block in range(len(schedule))]


def quadratic_model(weights: tuple[float, ...], tokens: int = 100) -> ScheduleModel:
    """Changes add and are quadratic in the share of the tokens left; operations are those entering."""
    blocks = range(len(weights))
    count = lambda schedule: float(sum(left_before(schedule, tokens)))  # noqa: E731
    model = ScheduleModel(tokens, len(weights), blocks, lambda left: left // 2, count)
    model.alone = {(block, n): weights[block] * n**2 for block, n in model.singles()}
    return model


def test_the_schedule_is_near_the_optimum_of_additive_changes() -> None:
    weights = (9.0, 3.0, 1.0, 2.0, 1.0)
    model = quadratic_model(weights)

    def change(schedule: tuple[int, ...]) -> float:
        parts = zip(weights, schedule, left_before(schedule, 100), strict=True)
        return sum(weight * (100 * removed / left) ** 2 for weight, removed, left in parts)

    random = np.random.default_rng(0)
    for budget in (450.0, 430.0, 380.0):
        found = model.optimal(budget)
        assert model.predicted(found) == pytest.approx(change(found), rel=1e-6)
        assert model.count(found) <= budget * (1 + 1e-9) and model.clipped(found) == found
        drawn = (tuple(map(int, random.integers(0, 30, 5))) for _ in range(4000))
        fitting = [s for s in drawn if model.clipped(s) == s and model.count(s) <= budget]
        assert fitting and change(found) <= 1.02 * min(map(change, fitting))
    assert model.flops(model.optimal(0.0)) > 0.0  # the least that is possible
    large = quadratic_model((1.0, 1.0, 1.0), 1000)  # in steps of several tokens
    assert large.step == 4 and all(n % 4 == 0 for n in large.optimal(2500.0))
    assert 2400.0 < large.count(large.optimal(2500.0)) <= 2500.0


def test_the_fixed_schedule_is_that_of_free_energy_with_a_count() -> None:
    model = quadratic_model((1.0,) * 12)
    schedule = (0, 0, 0, 10, 0, 10, 0, 10, 0, 10, 0, 0)
    assert model.even(2, model.flops(schedule)) == schedule
    uneven = (0, 0, 0, 3, 0, 3, 0, 2, 0, 2, 0, 0)
    assert model.even(2, model.flops(uneven)) == uneven
    every = (0, 0, 0, 3, 2, 2, 2, 2, 2, 2, 2, 0)
    assert model.even(1, model.flops(every)) == every


# Plans


def check_figures(
    plan: ReductionPlan, model: nn.Module, pixels: Tensor, *sizes: int
) -> list[float]:
    """The figures of a plan are those of the reduced model on the images that it names."""
    parts, changes = parts_of(pixels, *sizes), []
    kls = [plan.calibration_kl, *[None] * (len(parts) - 2), plan.output_kl]
    agreements = [plan.calibration_agreement, *[None] * (len(parts) - 2), plan.agreement]
    for part, kl, agreement in zip(parts, kls, agreements, strict=True):
        pair = run(unpatch(model), part), run(reduce(model, plan=plan), part)
        changes.append(disagreement(*pair))
        if kl is not None:
            assert kl == pytest.approx(kl_divergence(*pair), rel=1e-4)
            assert agreement == pytest.approx(1.0 - changes[-1])
    assert count_flops(model, pixels[:1]) / 1e9 == pytest.approx(plan.gflops)
    return changes


def test_a_plan_for_gflops(tmp_path: Path) -> None:
    model, pixels = make_model("vit"), images()
    before, state = run(model, pixels), copy.deepcopy(model.state_dict())
    target = gflops(model, 0.8)
    plan = tuned(model, pixels, gflops=target)
    assert torch.equal(run(model, pixels), before)
    pairs = zip(state.values(), model.state_dict().values(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert plan.gflops <= target < plan.full_gflops == pytest.approx(gflops(model))
    assert (plan.calibration_images, plan.validation_images, plan.test_images) == (4, 0, 4)
    assert (plan.grid, plan.img_size) == ((8, 8), (32, 32)) and plan.holds
    assert len(plan.schedule) == 3 and sum(plan.schedule) > 0
    check_figures(plan, model, pixels, 4, 4)
    left = [64 - sum(plan.schedule[: block + 1]) for block in range(3)]
    assert [row["tokens_left"] for row in plan.table()] == left

    # The same from a file, in another process as it were, and the same plan from the same seed.
    plan.save(tmp_path / "plan.json")
    assert ReductionPlan.load(tmp_path / "plan.json") == plan
    other = reduce(make_model("vit"), plan=tmp_path / "plan.json")
    assert torch.equal(run(other, pixels), run(model, pixels))
    assert str(plan.reduction) in repr(other)
    assert tuned(unpatch(model), pixels, gflops=target) == plan


def test_the_best_schedule_is_no_worse_than_the_fixed_one_on_the_calibration_images() -> None:
    model, pixels = make_model("vit"), images()
    target = gflops(model, 0.85)
    plan = tuned(model, pixels, gflops=target)
    (calibration, _), full = parts_of(pixels, 4, 4), make_model("vit")
    for total in range(33):
        reduce(model, merging.FreeEnergy([0, total, 0]))
        if gflops(model) <= target:
            break
    fixed = kl_divergence(run(full, calibration), run(model, calibration))
    assert 0 < total < 32 and plan.calibration_kl <= fixed * (1 + 1e-6)


def test_a_plan_for_agreement() -> None:
    model, pixels = make_model("vit"), images(32)
    model.head.bias.data.zero_()  # or one class wins for all images
    plan = tuned(model, pixels, agreement=1.0)
    (chosen,) = (check for check in plan.checks if check.chosen)
    assert chosen.validation_change == 0.0 and plan.target == "agreement"
    assert chosen.price == min(check.price for check in plan.checks if check.holds)
    assert (plan.calibration_images, plan.validation_images, plan.test_images) == (16, 8, 8)
    loose = tuned(model, pixels, agreement=0.3)
    assert loose.gflops < plan.gflops and loose.holds == (loose.agreement >= 0.3)
    assert max(check_figures(loose, model, pixels, 16, 8, 8)[:2]) <= 0.7 + 1e-6
    few = tuned(unpatch(model), pixels[:4], agreement=0.5)
    assert (few.calibration_images, few.validation_images, few.test_images) == (2, 2, 0)
    assert few.holds and "2 validation images" in str(few)
    full = tuned(model, images(4), gflops=10.0)
    assert (full.schedule, full.agreement, full.output_kl) == ((0, 0, 0), 1.0, 0.0)


def test_other_models_and_policies() -> None:
    for name, policy, side in (
        ("hf-dinov2", "tome", 32),
        ("no-class-token", "diffrate", 32),
        ("embedded", "tome", 112),
    ):
        model, target = make_model(name), gflops(make_model(name), 0.8, side)
        plan = tuned(model, images(4, side), policy, gflops=target)
        assert plan.gflops <= target and plan.policy == policy
        run(reduce(model, plan=plan), images(4, side))


def test_plans_are_refused_where_they_do_not_fit(tmp_path: Path) -> None:
    model, pixels, file = make_model("vit"), images(4), tmp_path / "plan.json"
    plan = tuned(model, pixels, gflops=gflops(model, 0.8))
    plan.save(file)
    reduce(model, plan=plan)
    with pytest.raises(ValueError, match=r"the plan is for a 8x8 grid of tokens, and .* 10x10"):
        run(model, images(1, 40))
    other = make_model("vit", seed=1)
    for change, message in (
        (lambda: reduce(other, plan=plan), "its model has weights"),
        (lambda: reduce(make_model("registers"), plan=plan), "plan does not fit"),
        (lambda: reduce(model, "tome:8", plan=plan), "a policy and a plan are given"),
        (lambda: reduce(model), "neither a policy nor a plan"),
        (lambda: reduce(model, plan=3), "plan is int"),
        (lambda: reduce(model, plan=tmp_path / "missing.json"), "cannot be read"),
        (lambda: patch(other, plan=file), "has plan 'reduction', and 'attention' is read"),
    ):
        with pytest.raises((ValueError, TypeError, OSError), match=message):
            change()


def test_bad_arguments_change_nothing() -> None:
    model = make_model("vit").train()
    for options, message in (
        ({}, "neither gflops nor agreement"),
        ({"gflops": 1.0, "agreement": 0.9}, "gflops and agreement are given"),
        ({"gflops": 0.0}, "gflops"),
        ({"agreement": 1.5}, "agreement"),
        ({"gflops": 1e-6}, "needs at least about"),
        ({"gflops": 1.0, "policy": "dct"}, "pass one of tome"),
        ({"gflops": 1.0, "images": images(1)}, "images has 1 images; pass at least two"),
        ({"gflops": 1.0, "images": images(4) * float("nan")}, "must be finite"),
    ):
        arguments: dict[str, Any] = {"images": images(4), "progress": False} | options
        with pytest.raises(ValueError, match=message):
            tune_reduction(model, **arguments)
        assert model.training and not any("bmfa" in key for m in model.modules() for key in vars(m))
        assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(TypeError, match="pass a classifier"):
        tuned(make_model("hf-registers"), images(4), gflops=0.001)
    with pytest.raises(ValueError, match="is patched or reduced"):
        tuned(reduce(make_model("vit"), "tome:4"), images(4), gflops=1.0)
