"""Schedules of merging: operations, the search, plans, and what is refused."""

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
from bmfa.models.measures import disagreement, kl_divergence
from bmfa.models.tuning_reduction import ScheduleModel, fixed_schedule, make_policy
from models.host_models import make_model, run

SCHEDULED = ("tome", "pitome", "tofu", "diffrate", "crossget", "free-energy", "random-pool")


def images(count: int = 8, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(3))


def full_gflops(model: nn.Module) -> float:
    return count_flops(model, images(1)) / 1e9


def parts_of(pixels: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """The images that calibrate, validate and test a plan with seed 0."""
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return torch.split(pixels[order], sizes)


# Schedules of policies


def test_a_schedule_removes_its_counts() -> None:
    for name in SCHEDULED:
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


def test_schedules_that_do_not_fit_the_model_are_refused() -> None:
    for name, message in (
        ("free-energy:3,3", "has 2 counts, and the model has 3 blocks"),
        ("free-energy:0,33,0", r"removes 33 tokens in block 1, but of the 64 tokens .* at most 32"),
        (
            "free-energy:30,18,0",
            r"removes 18 tokens in block 1, but of the 34 tokens .* at most 17",
        ),
        ("diffrate:4,0,0", "first block never merges"),
    ):
        model = reduce(make_model("vit"), name)
        with pytest.raises(ValueError, match=message):
            run(model, images(1))
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


def entering_tokens(schedule: tuple[int, ...], tokens: int = 100) -> float:
    return float(sum(tokens - sum(schedule[:block]) for block in range(len(schedule))))


def quadratic_model(weights: tuple[float, ...], tokens: int = 100) -> ScheduleModel:
    """Changes add and are quadratic in the share of the tokens left; operations are those entering."""
    model = ScheduleModel(
        tokens,
        len(weights),
        range(len(weights)),
        lambda left: left // 2,
        lambda schedule: entering_tokens(schedule, tokens),
    )
    model.alone = {(block, n): weights[block] * n**2 for block, n in model.singles()}
    return model


def test_the_schedule_is_near_the_optimum_of_additive_changes() -> None:
    weights = (9.0, 3.0, 1.0, 2.0, 1.0)
    model = quadratic_model(weights)

    def change(schedule: tuple[int, ...]) -> float:
        left = [100 - sum(schedule[:block]) for block in range(5)]
        parts = zip(weights, schedule, left, strict=True)
        return sum(weight * (100 * removed / t) ** 2 for weight, removed, t in parts)

    random = np.random.default_rng(0)
    for budget in (450.0, 430.0, 380.0):
        found = model.optimal(budget)
        assert model.predicted(found) == pytest.approx(change(found), rel=1e-6)
        assert entering_tokens(found) <= budget * (1 + 1e-9) and model.clipped(found) == found
        drawn = (tuple(map(int, random.integers(0, 30, 5))) for _ in range(4000))
        fitting = [s for s in drawn if model.clipped(s) == s and entering_tokens(s) <= budget]
        assert fitting and change(found) <= 1.02 * min(map(change, fitting))
        assert fixed_schedule(model, budget) == model.even(range(1, 4, 2), budget)
    assert model.flops(model.optimal(0.0)) > 0.0  # the least that is possible
    large = quadratic_model((1.0, 1.0, 1.0), 1000)  # in steps of several tokens
    assert large.step == 4 and all(n % 4 == 0 for n in large.optimal(2500.0))
    assert 2400.0 < entering_tokens(large.optimal(2500.0), 1000) <= 2500.0


def test_the_fixed_schedule_is_that_of_free_energy_with_a_count() -> None:
    model = quadratic_model((1.0,) * 12)
    schedule = (0, 0, 0, 10, 0, 10, 0, 10, 0, 10, 0, 0)
    assert fixed_schedule(model, model.flops(schedule)) == schedule
    assert model.even(range(3, 11, 2), model.flops((0, 0, 0, 3, 0, 3, 0, 2, 0, 2, 0, 0)))[3:6] == (
        3,
        0,
        3,
    )


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
    assert (plan.calibration_images, plan.validation_images, plan.test_images) == (4, 0, 4)
    assert (plan.grid, plan.img_size) == ((8, 8), (32, 32)) and plan.holds
    assert len(plan.schedule) == 3 and sum(plan.schedule) > 0 and len(steps) > 3
    assert steps[-1][0] <= steps[-1][1]

    # The figures of the plan are those of the reduced model on the images that it names.
    for part, kl, agreement in (
        (parts_of(pixels, 4, 4)[0], plan.calibration_kl, plan.calibration_agreement),
        (parts_of(pixels, 4, 4)[1], plan.output_kl, plan.agreement),
    ):
        pair = run(unpatch(model), part), run(reduce(model, plan=plan), part)
        assert kl == pytest.approx(kl_divergence(*pair), rel=1e-4)
        assert agreement == pytest.approx(1.0 - disagreement(*pair))
    assert count_flops(model, pixels[:1]) / 1e9 == pytest.approx(plan.gflops)
    left = [64 - sum(plan.schedule[: block + 1]) for block in range(3)]
    assert [row["tokens_left"] for row in plan.table()] == left

    # The same from a file, in another process as it were, and the same plan from the same seed.
    plan.save(tmp_path / "plan.json")
    assert ReductionPlan.load(tmp_path / "plan.json") == plan
    other = reduce(make_model("vit"), plan=tmp_path / "plan.json")
    assert torch.equal(run(other, pixels), run(model, pixels))
    assert str(plan.reduction) in repr(other)
    unpatch(model)
    assert tune_reduction(model, pixels, gflops=target, progress=False) == plan


def test_the_best_schedule_is_no_worse_than_the_fixed_one_on_the_calibration_images() -> None:
    model, pixels = make_model("vit"), images()
    target = 0.85 * full_gflops(model)
    plan = tune_reduction(model, pixels, gflops=target, progress=False)
    (calibration, _), full = parts_of(pixels, 4, 4), make_model("vit")
    for total in range(33):
        reduce(model, merging.FreeEnergy([0, total, 0]))
        if count_flops(model, pixels[:1]) / 1e9 <= target:
            break
    fixed = kl_divergence(run(full, calibration), run(model, calibration))
    assert 0 < total < 32 and plan.calibration_kl <= fixed * (1 + 1e-6)


def test_a_plan_for_agreement() -> None:
    model, pixels = make_model("vit"), images(32)
    model.head.bias.data.zero_()  # or one class wins for all images
    plan = tune_reduction(model, pixels, agreement=1.0, progress=False)
    (chosen,) = (check for check in plan.checks if check.chosen)
    assert chosen.validation_change == 0.0 and plan.target == "agreement"
    assert chosen.price == min(check.price for check in plan.checks if check.holds)
    assert (plan.calibration_images, plan.validation_images, plan.test_images) == (16, 8, 8)
    loose = tune_reduction(model, pixels, agreement=0.3, progress=False)
    assert loose.gflops < plan.gflops

    # The agreement of the plan is that of the images that took no part in the choice.
    calibration, validation, test = parts_of(pixels, 16, 8, 8)
    changes = [
        disagreement(run(unpatch(model), part), run(reduce(model, plan=loose), part))
        for part in (calibration, validation, test)
    ]
    assert max(changes[:2]) <= 0.7 + 1e-6 and loose.agreement == pytest.approx(1.0 - changes[2])
    assert loose.holds == (loose.agreement >= 0.3)
    few = tune_reduction(unpatch(model), pixels[:4], agreement=0.5, progress=False)
    assert (few.calibration_images, few.validation_images, few.test_images) == (2, 2, 0)
    assert few.holds and "2 validation images" in str(few)
    all_tokens = tune_reduction(model, images(4), gflops=10.0, progress=False)
    assert all_tokens.schedule == (0, 0, 0)
    assert all_tokens.agreement == 1.0 and all_tokens.output_kl == 0.0


def test_other_models_and_policies() -> None:
    for name, policy in (
        ("hf-dinov2", "tome"),
        ("no-class-token", "diffrate"),
        ("embedded", "tome"),
    ):
        model = make_model(name)
        pixels = images(4, 112 if name == "embedded" else 32)
        full = count_flops(model, pixels[:1]) / 1e9
        plan = tune_reduction(model, pixels, policy, gflops=0.8 * full, progress=False)
        assert plan.gflops <= 0.8 * full and plan.policy == policy
        run(reduce(model, plan=plan), pixels)


def test_plans_are_refused_where_they_do_not_fit(tmp_path: Path) -> None:
    model, pixels = make_model("vit"), images(4)
    plan = tune_reduction(model, pixels, gflops=0.8 * full_gflops(model), progress=False)
    reduce(model, plan=plan)
    with pytest.raises(ValueError, match=r"the plan is for a 8x8 grid of tokens, and .* 10x10"):
        run(model, images(1, 40))
    with pytest.raises(ValueError, match="it is for weights"):
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
        with pytest.raises(ValueError, match="a damaged plan"):
            reduce(model, plan=file)


def test_bad_arguments_change_nothing() -> None:
    model = make_model("vit").train()
    for options, message in (
        ({}, "neither gflops nor agreement"),
        ({"gflops": 1.0, "agreement": 0.9}, "gflops and agreement are given"),
        ({"gflops": 0.0}, "gflops"),
        ({"agreement": 1.5}, "agreement"),
        ({"gflops": 1e-6}, "needs at least about"),
        ({"gflops": 1.0, "policy": "dct"}, "takes a schedule: tome"),
        ({"gflops": 1.0, "images": images(1)}, "only 1 image"),
        ({"gflops": 1.0, "images": images(4) * float("nan")}, "not finite"),
    ):
        arguments: dict[str, Any] = {"images": images(4), "progress": False} | options
        with pytest.raises(ValueError, match=message):
            tune_reduction(model, **arguments)
        assert model.training and not any("bmfa" in key for m in model.modules() for key in vars(m))
        assert not any(module._forward_hooks for module in model.modules())


def test_models_that_are_no_classifiers_or_are_patched_are_refused() -> None:
    with pytest.raises(TypeError, match="pass a classifier"):
        tune_reduction(make_model("hf-registers"), images(4), gflops=0.001, progress=False)
    with pytest.raises(ValueError, match="is patched or reduced"):
        tune_reduction(reduce(make_model("vit"), "tome:4"), images(4), gflops=1.0)
