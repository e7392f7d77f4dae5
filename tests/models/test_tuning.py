"""Tuning: the choice, its prediction, the check on other images, and inputs that are refused."""

import itertools
import math

import pytest
import torch
from tests.models.host_models import hf_model, timm_model
from torch import Tensor, nn

import bmfa
from bmfa.models import embedded
from bmfa.models.families import find_vision_transformer
from bmfa.models.image_sample import sample_images
from bmfa.models.measures import MEASURES
from bmfa.models.patching import install_layers, is_patched
from bmfa.models.plan import LayerSetting
from bmfa.models.setting_search import BUDGET_STEPS, SettingSearch
from bmfa.models.tuning import LEAST_GAIN

ERRORS = (0.05, 0.3)
DEPTH = 3
TIMES = {layer: {None: 1.0, 0.05: 0.8, 0.3: 0.5} for layer in range(DEPTH)}


def small_model() -> nn.Module:
    """Three layers over 14x14 tokens, so concentrated that tiles change the output."""
    torch.manual_seed(0)
    model = embedded.EmbeddedViT(dim=24, depth=DEPTH)
    for block in model.blocks:
        block.attn.qkv.weight.data *= 2.0
    return model.eval()


def random_images(count: int = 4, seed: int = 1) -> Tensor:
    """Smooth images: on noise, all tiles would be expanded and nothing would change."""
    noise = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(noise, size=112, mode="bicubic") if count else noise


def tuned(model: nn.Module, tolerance: float = 0.1, measure="features", **options) -> bmfa.Plan:
    options = {"errors": ERRORS, "times": TIMES, "repeats": 1, "progress": False} | options
    images = options.pop("images", None)
    return bmfa.tune(
        model, random_images() if images is None else images, tolerance, measure, **options
    )


def change_of(model: nn.Module, images: Tensor, errors: dict[int, float]) -> float:
    """The relative L2 change of the tokens after the last norm, computed without `tune`."""
    tokens: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda m, i, output: tokens.append(output))
    options = {layer: {"error": error, "allow_dense": False} for layer, error in errors.items()}
    squares = []
    with torch.no_grad():
        for image in images.split(1):
            model(image)
            install_layers(model, find_vision_transformer(model), options)
            model(image)
            bmfa.unpatch(model)
            reference, output = tokens[-2].double(), tokens[-1].double()
            squares.append(float((output - reference).square().sum() / reference.square().sum()))
    handle.remove()
    return math.sqrt(sum(squares) / len(squares))


def brute_force(settings: list[list[LayerSetting]], budget: float, power: int) -> float:
    """The least time of all combinations within the budget."""
    return min(
        sum(s.milliseconds for s in chosen)
        for chosen in itertools.product(*settings)
        if sum(s.change**power for s in chosen) <= budget
    )


@pytest.mark.parametrize("power", [1, 2])
def test_the_search_is_optimal_up_to_the_rounding_of_the_budget(power):
    generator = torch.Generator().manual_seed(power)
    for _ in range(10):
        layers = []
        for layer in range(5):
            change, time = torch.rand(2, 4, generator=generator).tolist()
            tiled = [
                LayerSetting(layer, 0.1 * i, t, c)
                for i, (c, t) in enumerate(zip(change, time, strict=True))
            ]
            layers.append([LayerSetting(layer, None, 1.0, 0.0), *tiled[1:]])
        search = SettingSearch([s for settings in layers for s in settings], power)
        for budget in (0.0, 0.3, 1.0, 10.0):
            chosen = search.fastest(budget)
            assert search.cost(chosen) <= budget
            time = sum(s.milliseconds for ss in layers for s in ss if chosen[s.layer] == s.error)
            # Rounding up costs each of the five layers less than one step of the budget.
            least = brute_force(layers, budget * (1 - len(layers) / BUDGET_STEPS), power)
            assert brute_force(layers, budget, power) <= time + 1e-12 <= least + 2e-12


def test_a_plan_holds_on_images_that_did_not_choose_it():
    model, images = small_model(), random_images()
    plan = tuned(model, 0.05, images=images, seed=3)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(3))
    assert (plan.choosing, plan.checking) == (2, 2)
    assert plan.errors, "nothing was chosen, so nothing is tested"
    measured = change_of(model, images[order[2:]], plan.errors)
    assert plan.measured_change == pytest.approx(measured, rel=1e-4)
    assert plan.measured_change <= 0.05


def test_the_change_of_a_layer_alone_is_that_of_a_patched_layer():
    model, images = small_model(), random_images()
    plan = tuned(model, images=images, seed=3)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(3))
    for setting in plan.candidates:
        if setting.error is not None and not setting.interpolated:
            alone = change_of(model, images[order[:2]], {setting.layer: setting.error})
            assert setting.change == pytest.approx(alone, rel=1e-4)


def test_squares_of_changes_add_and_kl_itself():
    for measure, power in (("features", 2), ("logits", 1)):
        plan = tuned(small_model(), 10.0, measure)
        chosen = [setting.change for setting in plan.layers]
        assert len(plan.errors) == DEPTH
        expected = sum(change**power for change in chosen) ** (1 / power)
        assert plan.predicted_change == pytest.approx(expected, rel=1e-5)


def test_the_tolerance_decides_between_fast_and_dense():
    model = small_model()
    assert tuned(model, 10.0).errors == dict.fromkeys(range(DEPTH), 0.3)
    exact = tuned(model, 1e-9)
    assert 0.3 not in exact.errors.values() and exact.measured_change <= 1e-9


def test_settings_that_gain_nothing_stay_dense():
    times = {layer: {None: 1.0, 0.05: 1.0 - LEAST_GAIN / 2, 0.3: 2.0} for layer in range(DEPTH)}
    plan = tuned(small_model(), 10.0, times=times)
    assert plan.errors == {}
    assert {setting.change for setting in plan.candidates} == {0.0, None}


def test_only_the_named_layers_change():
    assert set(tuned(small_model(), 10.0, layers=[-1]).errors) == {DEPTH - 1}


def test_a_combination_that_fails_is_replaced_by_one_that_holds():
    """The tolerance is between what all coarse settings predict and what they do to other images."""
    model, replaced = small_model(), 0
    for seed in range(4):
        loose = tuned(model, 10.0, seed=seed)
        if loose.measured_change <= loose.predicted_change:
            continue
        tolerance = (loose.measured_change + loose.predicted_change) / 2
        plan = tuned(model, tolerance, seed=seed)
        assert plan.checks[0]["errors"] == loose.checks[0]["errors"]
        assert not plan.checks[0]["holds"] and len(plan.checks) > 1
        (chosen,) = [row for row in plan.checks if row["chosen"]]
        assert plan.measured_change == chosen["measured_change"] <= tolerance
        assert chosen["errors"] == [setting.error for setting in plan.layers]
        times = [row["attention_milliseconds"] for row in plan.checks if row["holds"]]
        assert chosen["attention_milliseconds"] == min(times)
        again = [s for s in plan.candidates if s.checking_change is not None]
        assert [s.error for s in again] == [e for e in plan.checks[0]["errors"] if e is not None]
        replaced += 1
    assert replaced, "every first choice held, so nothing is tested"


def test_a_layer_alone_is_measured_on_the_checking_images():
    model, images = small_model(), random_images()
    plans = (tuned(model, 0.02, seed=seed) for seed in range(20))
    found = ((p, [s for s in p.candidates if s.checking_change is not None]) for p in plans)
    plan, again = next((plan, again) for plan, again in found if again)
    assert len(plan.checks) > 1
    order = torch.randperm(4, generator=torch.Generator().manual_seed(plan.seed))
    for setting in again:
        alone = change_of(model, images[order[2:]], {setting.layer: setting.error})
        assert setting.checking_change == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("count", "parts"),
    [(2, (1, 1, 0)), (5, (3, 2, 0)), (6, (3, 2, 1)), (8, (4, 2, 2)), (9, (5, 2, 2))],
)
def test_images_choose_check_and_confirm(count, parts):
    plan = tuned(small_model(), 10.0, images=random_images(count), limit=count)
    assert (plan.choosing, plan.checking, plan.confirming) == parts


def test_the_measured_change_is_of_images_that_chose_nothing():
    model, images = small_model(), random_images(8)
    plan = tuned(model, 10.0, images=images, seed=3)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    assert plan.checked_change == pytest.approx(
        change_of(model, images[order[4:6]], plan.errors), rel=1e-4
    )
    assert plan.measured_change == pytest.approx(
        change_of(model, images[order[6:]], plan.errors), rel=1e-4
    )


def test_a_plan_that_does_not_hold_on_the_last_images_warns():
    model, warned = small_model(), 0
    for seed in range(4):
        loose = tuned(model, 10.0, images=random_images(8), seed=seed)
        seen = max(loose.predicted_change, loose.checked_change)
        if loose.measured_change <= seen:
            continue
        with pytest.warns(UserWarning, match="on 2 images that took no part in the choice"):
            plan = tuned(model, 1.001 * seen, images=random_images(8), seed=seed)
        assert plan.layers == loose.layers and not plan.holds
        warned += 1
    assert warned, "every plan held, so nothing is tested"


def test_the_plan_is_not_slower_than_single_targets_that_hold():
    """Layer 1 is far worse on the checking images, and the times of targets differ by layer."""
    model = small_model()
    times = {layer: {None: 1.0, 0.05: 0.9 - 0.1 * layer, 0.3: 0.6} for layer in range(DEPTH)}
    for seed in range(4):
        for tolerance in (0.01, 0.03, 0.1):
            plan = tuned(model, tolerance, seed=seed, times=times)
            order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
            search = SettingSearch(plan.candidates, 2)
            chosen = {s.layer: s.error for s in plan.layers}
            for single in search.single_targets().values():
                errors = {layer: e for layer, e in single.items() if e is not None}
                halves = (order[:2], order[2:])
                if all(
                    change_of(model, random_images()[half], errors) <= tolerance for half in halves
                ):
                    assert search.milliseconds(chosen) <= search.milliseconds(single) + 1e-9


def test_equal_seed_and_times_give_an_equal_plan():
    model = small_model()
    first, second = tuned(model), tuned(model)
    for name in ("layers", "candidates", "checks", "predicted_change", "measured_change", "model"):
        assert getattr(first, name) == getattr(second, name)
    assert tuned(model, times=first.times).layers == first.layers


def test_measured_times_are_stored_and_repeat_the_plan():
    model = small_model()
    plan = tuned(model, 0.1, times=None, errors=[0.3])
    assert all(set(plan.times[layer]) == {None, 0.3} for layer in range(DEPTH))
    assert all(s.milliseconds > 0 for s in plan.candidates)
    assert plan.dense_milliseconds > 0 and plan.milliseconds > 0


@pytest.mark.parametrize("measure", ["features", "logits"])
def test_the_measure_of_equal_outputs_is_zero_and_grows(measure):
    model, image = small_model(), random_images(1)
    found = MEASURES[measure]
    with torch.no_grad():
        reference = found.outputs(model, image, {})
        assert found.compare(reference, reference) == 0.0
        noisy = found.outputs(model, image + 0.01 * random_images(1, seed=2), {})
        noisier = found.outputs(model, image + 0.1 * random_images(1, seed=2), {})
    assert 0 < found.compare(reference, noisy) < found.compare(reference, noisier)


def test_kl_of_dense_predictions_is_over_classes():
    reference, output = torch.randn(2, 2, 5, 4, 4, generator=torch.Generator().manual_seed(0))
    log_p, log_q = reference.log_softmax(1), output.log_softmax(1)
    expected = nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1).mean()
    assert MEASURES["logits"].compare(reference, output) == pytest.approx(float(expected), rel=1e-5)


def test_another_measure_is_checked_end_to_end():
    def largest_change(reference: Tensor, output: Tensor) -> float:
        return float((output - reference).abs().max())

    model = small_model()
    for tolerance in (1e-9, 0.02, 10.0):
        plan = tuned(model, tolerance, largest_change)
        assert plan.measure == "largest_change" and plan.predicted_change is None
        assert plan.measured_change <= tolerance
        coarse = sum(error == 0.3 for error in plan.errors.values())
        assert coarse == {1e-9: 0, 10.0: DEPTH}.get(tolerance, coarse)


def test_images_come_from_tensors_lists_loaders_and_folders(tmp_path):
    model, images = small_model(), random_images(4)
    dataset = torch.utils.data.TensorDataset(images, torch.zeros(4))
    forms = [
        list(images),
        [images[:2], images[2:]],
        torch.utils.data.DataLoader(dataset, batch_size=3),
        torch.utils.data.DataLoader(list(images), batch_size=2),
        torch.utils.data.DataLoader([{"pixel_values": p} for p in images], batch_size=2),
    ]
    expected = tuned(model, images=images)
    for form in forms:
        assert tuned(model, images=form).candidates == expected.candidates
    write_images(tmp_path, 3)
    plan = tuned(model, images=tmp_path)
    assert (plan.choosing, plan.checking, plan.img_size, plan.grid) == (2, 1, (128, 128), (16, 16))


def write_images(folder, count: int) -> None:
    image = pytest.importorskip("PIL.Image")
    for index in range(count):
        image.effect_noise((130, 120), 20 + 20 * index).save(folder / f"{index}.png")


def test_a_limit_draws_images_with_the_seed():
    images = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 2, 2)
    drawn = [
        sample_images(images, None, 3, torch.Generator().manual_seed(seed))[:, 0, 0, 0].tolist()
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 3


def hosts():
    size = {"img_size": 64, "patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 3}
    yield "timm", lambda: timm_model("vit_tiny_patch16_224", **size)
    options = {"image_size": 64, "num_hidden_layers": 2}
    yield "transformers", lambda: hf_model("ViTConfig", "ViTModel", **options)
    yield "classifier", lambda: hf_model("ViTConfig", "ViTForImageClassification", **options)


@pytest.mark.parametrize(("name", "make"), list(hosts()), ids=[name for name, _ in hosts()])
def test_models_of_hosts_are_tuned_by_their_tokens(name, make):
    pytest.importorskip("timm" if name == "timm" else "transformers")
    torch.manual_seed(0)
    model = make().eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        (features,) = MEASURES["features"].outputs(model, images, {})
    assert features.shape == (2, 1 + 256, 24)
    times = {layer: {None: 1.0, 0.3: 0.5} for layer in range(2)}
    plan = tuned(model, 10.0, images=images, errors=[0.3], times=times)
    assert plan.grid == (16, 16) and plan.errors == {0: 0.3, 1: 0.3}


class Interrupted:
    """A measure that raises in its n-th call."""

    def __init__(self, error: BaseException, call: int) -> None:
        self.error, self.calls = error, call

    def __call__(self, reference: Tensor, output: Tensor) -> float:
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return 0.0


def nan_after(calls: int):
    values = iter([0.0] * calls)
    return lambda reference, output: next(values, math.nan)


REFUSED = {
    "tolerance": ({"tolerance": 0}, "tolerance is 0"),
    "negative": ({"tolerance": -0.1}, "tolerance is -0.1"),
    "nan": ({"tolerance": math.nan}, "tolerance is nan"),
    "no images": ({"images": random_images(0)}, "images is empty"),
    "no list": ({"images": []}, "images is empty"),
    "one image": ({"images": random_images(1)}, "at least two"),
    "number": ({"images": 3}, "images is int"),
    "sizes": ({"images": [random_images(1), random_images(1)[..., :56]]}, "112x56 and 112x112"),
    "integers": ({"images": random_images(2).long()}, "torch.int64"),
    "no folder": ({"images": "no-such-folder"}, "no folder or zip"),
    "measure": ({"measure": "psnr"}, "'psnr'"),
    "nan measure": ({"measure": nan_after(2)}, "returned nan"),
    "first nan": ({"measure": lambda reference, output: math.nan}, "returned nan"),
    "similarity": ({"measure": lambda reference, output: 1.0}, "must be 0 for equal outputs"),
    "negative measure": (
        {"measure": lambda reference, output: -float((output - reference).abs().sum())},
        "must grow with the change from 0",
    ),
    "no number": ({"measure": lambda reference, output: None}, "returned NoneType"),
    "many numbers": ({"measure": lambda reference, output: output}, "returned Tensor"),
    "tolerances": ({"tolerance": torch.tensor([0.1, 0.2])}, "tolerance is tensor"),
    "list of times": ({"times": [1.0, 0.5]}, "times is [1.0, 0.5]"),
    "batch": ({"batch_size": 4}, "batch_size is 4"),
    "errors": ({"errors": []}, "errors is empty"),
    "zero error": ({"errors": [0.0]}, "errors is 0.0"),
    "times": ({"times": {0: {None: 1.0}}}, "times lacks error=0.05 of layer 0"),
    "img_size": ({"img_size": 224}, "img_size and preprocess are for images of a folder"),
    "layers": ({"layers": [3]}, "layers is 3"),
    "limit": ({"limit": 1}, "limit is 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_sentence_and_changes_nothing(name):
    options, message = REFUSED[name]
    model = small_model()
    full = model(random_images(1))
    with pytest.raises((ValueError, TypeError)) as raised:
        tuned(model, **options)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not is_patched(model)
    assert torch.equal(model(random_images(1)), full)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
@pytest.mark.parametrize("call", [1, 3, 5])
def test_an_interrupted_run_leaves_the_model_as_it_was(error, call):
    model = small_model().train()
    model.blocks[1].eval()
    training = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(type(error)):
        tuned(model, 10.0, Interrupted(error, call))
    assert not is_patched(model)
    assert [module.training for module in model.modules()] == training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_folders_without_readable_images_are_refused(tmp_path):
    model = small_model()
    with pytest.raises(ValueError, match="has no images"):
        tuned(model, images=tmp_path)
    write_images(tmp_path, 2)
    (tmp_path / "1.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"1\.png is no image"):
        tuned(model, images=tmp_path)
    assert not is_patched(model)


def test_a_patched_model_is_refused_and_stays_patched():
    model = bmfa.patch(small_model(), error=0.1, layers="all")
    with pytest.raises(ValueError, match="unpatch"):
        tuned(model)
    assert is_patched(model)


def test_the_global_random_state_is_not_read():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with torch.random.fork_rng():
        model = small_model()
    tuned(model)
    assert torch.equal(torch.rand(1), expected)


def test_progress_counts_every_step():
    steps: list[tuple[int, int]] = []
    tuned(small_model(), progress=lambda done, total: steps.append((done, total)))
    total = 3 + DEPTH + DEPTH * len(ERRORS)  # references, check, model; layers timed; settings
    assert steps == [(step, total) for step in range(1, total + 1)]


class Unknown(nn.Module):
    """A model of a class that bmfa does not know; its attention calls SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 8, 8)
        self.blocks = nn.ModuleList(embedded.model.Attention(24, 3) for _ in range(2))
        for block in self.blocks:
            block.qkv.weight.data *= 4.0

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_registered_model_of_an_unknown_class_is_tuned():
    torch.manual_seed(0)
    model = Unknown().eval()
    bmfa.models.register_model(Unknown, attention="blocks.*", grid=(14, 14))
    times = {layer: {None: 1.0, 0.3: 0.5} for layer in range(2)}
    plan = tuned(model, 10.0, errors=[0.3], times=times)
    assert plan.errors == {0: 0.3, 1: 0.3} and plan.grid == (14, 14)
    with torch.no_grad():
        full = model(random_images(1))
        assert not torch.equal(bmfa.patch(model, plan=plan)(random_images(1)), full)
        assert torch.equal(bmfa.unpatch(model)(random_images(1)), full)
