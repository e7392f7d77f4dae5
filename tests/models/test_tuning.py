"""Tuning: the choice, its prediction, the checks on other images, and inputs that are refused."""

import itertools
import json
import math
from unittest import mock

import pytest
import torch
from tests.models.host_models import hf_model, timm_model
from tests.models.tuned_models import DEPTH, small_model, smooth_images, tuned
from torch import Tensor, nn

import bmfa
from bmfa.models import embedded
from bmfa.models.families import find_vision_transformer
from bmfa.models.image_sample import divide, sample_images
from bmfa.models.measures import MEASURES
from bmfa.models.patching import install_layers, is_patched
from bmfa.models.tuning import LEAST_GAIN, AttentionTuner
from bmfa.models.tuning_run import Run


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


def parts_of(count: int, seed: int, **options) -> list[Tensor]:
    """The images that calibrate, validate and test a plan with this seed."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    images = smooth_images(count, **options)[order]
    test = count // 4 if count >= 6 else 0
    return list(torch.split(images, [count // 2, count - count // 2 - test, test]))


def test_every_change_of_a_plan_is_that_of_the_images_it_names():
    model, images = small_model(), smooth_images(8)
    plan = tuned(model, 1.0, images=images, seed=3)
    calibration, validation, test = parts_of(8, 3)
    assert (plan.calibration_images, plan.validation_images, plan.test_images) == (4, 2, 2)
    assert len(plan.errors) == DEPTH, "nothing was chosen, so nothing is tested"
    for change, part in ((plan.validation_change, validation), (plan.measured_change, test)):
        assert change == pytest.approx(change_of(model, part, plan.errors), rel=1e-4)
    for setting in plan.candidates:
        if setting.error is not None:
            alone = change_of(model, calibration, {setting.layer: setting.error})
            # Rounding of float32 is in `alone`; `tune` compares with the same exact attention.
            assert setting.change == pytest.approx(alone, rel=1e-4, abs=1e-6)
    squares = sum(setting.change**2 for setting in plan.layers)
    assert plan.predicted_change == pytest.approx(math.sqrt(squares), rel=1e-5)
    logits = tuned(model, 1.0, "logits")  # their KL adds itself
    assert logits.predicted_change == pytest.approx(sum(s.change for s in logits.layers), rel=1e-5)


def test_the_tolerance_decides_between_fast_and_dense():
    model = small_model()
    assert tuned(model, 1.0).errors == dict.fromkeys(range(DEPTH), 0.3)
    exact = tuned(model, 1e-9)
    assert 0.3 not in exact.errors.values() and exact.measured_change <= 1e-9
    assert set(tuned(model, 1.0, layers=[-1]).errors) == {DEPTH - 1}
    times = {layer: {None: 1.0, 0.05: 1.0 - LEAST_GAIN / 2, 0.3: 2.0} for layer in range(DEPTH)}
    slow = tuned(model, 1.0, times=times)
    assert slow.errors == {} and {setting.change for setting in slow.candidates} == {0.0, None}


def test_a_combination_that_fails_is_replaced_by_one_that_holds():
    """The tolerance is between what all coarse settings predict and what they do to other images."""
    model, replaced = small_model(), 0
    for seed in range(4):
        loose = tuned(model, 1.0, seed=seed)
        if loose.measured_change <= loose.predicted_change:
            continue
        tolerance = (loose.measured_change + loose.predicted_change) / 2
        plan = tuned(model, tolerance, seed=seed)
        assert plan.checks[0].settings == loose.checks[0].settings
        assert not plan.checks[0].holds and len(plan.checks) > 1
        (chosen,) = [check for check in plan.checks if check.chosen]
        assert plan.measured_change == chosen.validation_change <= tolerance
        assert chosen.calibration_change <= tolerance
        assert chosen.price == min(check.price for check in plan.checks if check.holds)
        replaced += 1
    assert replaced, "every first choice held, so nothing is tested"


def test_a_plan_that_does_not_hold_on_the_test_images_warns():
    model, warned = small_model(), 0
    for seed in range(4):
        loose = tuned(model, 1.0, images=smooth_images(8), seed=seed)
        seen = max(loose.predicted_change, loose.validation_change)
        if loose.measured_change <= seen:
            continue
        with pytest.warns(UserWarning, match="on 2 images that took no part in the choice"):
            plan = tuned(model, 1.001 * seen, images=smooth_images(8), seed=seed)
        assert plan.layers == loose.layers and not plan.holds
        warned += 1
    assert warned, "every plan held, so nothing is tested"


def test_equal_seed_and_times_give_an_equal_plan_and_read_no_random_state():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with torch.random.fork_rng():
        model = small_model()
    first = tuned(model)
    assert torch.equal(torch.rand(1), expected)
    for name in ("candidates", "checks", "measured_change", "model"):
        assert getattr(first, name) == getattr(tuned(model), name)
    timed = bmfa.tune(model, smooth_images(), 0.1, errors=[0.3], repeats=1, progress=False)
    assert len(timed.candidates) == 2 * DEPTH
    assert all(setting.milliseconds > 0 for setting in timed.candidates)
    assert timed.dense_milliseconds > 0 and timed.milliseconds > 0


def test_measures_of_equal_outputs_are_zero_and_grow():
    model, image, noise = small_model(), smooth_images(1), smooth_images(1, seed=2)
    for measure in MEASURES.values():
        with torch.no_grad():
            outputs = [measure.outputs(model, image + x * noise, {}) for x in (0.0, 0.01, 0.1)]
        changes = [measure.compare(outputs[0], output) for output in outputs]
        assert 0.0 == changes[0] < changes[1] < changes[2]
    reference, output = torch.randn(2, 2, 5, 4, 4, generator=torch.Generator().manual_seed(0))
    log_p, log_q = reference.log_softmax(1), output.log_softmax(1)
    expected = nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1).mean()
    assert MEASURES["logits"].compare(reference, output) == pytest.approx(float(expected), rel=1e-5)


def test_another_measure_is_checked_end_to_end():
    def largest_change(reference: Tensor, output: Tensor) -> float:
        return float((output - reference).abs().max())

    for tolerance in (1e-9, 0.02, 10.0):
        plan = tuned(small_model(), tolerance, largest_change)
        assert plan.measure == "largest_change" and plan.predicted_change is None
        assert plan.measured_change <= tolerance
        coarse = sum(error == 0.3 for error in plan.errors.values())
        assert coarse == {1e-9: 0, 10.0: DEPTH}.get(tolerance, coarse)


def test_images_come_from_tensors_lists_loaders_and_folders(tmp_path):
    model, images = small_model(), smooth_images(4)
    loader = torch.utils.data.DataLoader
    dataset = torch.utils.data.TensorDataset(images, torch.zeros(4))
    found = [
        divide(sample_images(form, model, 4))
        for form in (
            images,
            list(images),
            [images[:2], images[2:]],
            loader(dataset, batch_size=3),
            loader([{"pixel_values": p} for p in images], batch_size=2),
        )
    ]
    for parts, name in itertools.product(found, found[0]):
        assert torch.equal(parts[name], found[0][name])
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(ValueError, match=f"{tmp_path} has 0 images; pass at least two"):
        tuned(model, images=tmp_path)
    for index in range(3):
        image.effect_noise((130, 120), 20 + 20 * index).save(tmp_path / f"{index}.png")
    plan = tuned(model, images=tmp_path)
    assert (plan.calibration_images, plan.validation_images) == (2, 1)
    assert (plan.img_size, plan.grids) == ((128, 128), ((16, 16),) * DEPTH)
    (tmp_path / "1.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"1\.png"):
        tuned(model, images=tmp_path)
    assert not is_patched(model)


def test_a_limit_draws_images_and_parts_have_half_a_quarter_and_a_quarter():
    images = torch.arange(9.0).view(9, 1, 1, 1).expand(9, 3, 2, 2)
    drawn = [
        sample_images(images, nn.Identity(), 3, seed)[:, 0, 0, 0].tolist() for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 3
    for count, sizes in ((2, [1, 1, 0]), (5, [3, 2, 0]), (6, [3, 2, 1]), (9, [5, 2, 2])):
        assert [len(part) for part in divide(images[:count]).values()] == sizes


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


def test_other_models_are_tuned_by_their_tokens():
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    bmfa.models.register_model(Unknown, attention="blocks.*", grid=(14, 14))
    size = {"img_size": 64, "patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 3}
    options = {"image_size": 64, "num_hidden_layers": 2}
    times = {layer: {None: 1.0, 0.3: 0.5} for layer in range(2)}
    for model, side, grid in (
        (timm_model("vit_tiny_patch16_224", **size), 64, 16),
        (hf_model("ViTConfig", "ViTModel", **options), 64, 16),
        (hf_model("ViTConfig", "ViTForImageClassification", **options), 64, 16),
        (Unknown(), 112, 14),
    ):
        images = smooth_images(2, side)
        with torch.no_grad():
            (features,) = MEASURES["features"].outputs(model.eval(), images, {})
            full = model(images)
        assert features.shape == (2, grid**2 + (side == 64), 24)
        plan = tuned(model, 1.0, images=images, errors=[0.3], times=times)
        assert plan.grids == ((grid, grid),) * 2 and plan.errors == {0: 0.3, 1: 0.3}
    with torch.no_grad():
        assert not torch.equal(bmfa.patch(model, plan=plan)(images), full)
        assert torch.equal(bmfa.unpatch(model)(images), full)


def nan_after(calls: int):
    values = iter([0.0] * calls)
    return lambda reference, output: next(values, math.nan)


REFUSED = [
    ({"tolerance": 0}, "tolerance is 0"),
    ({"tolerance": math.nan}, "tolerance is nan"),
    ({"tolerance": 5}, "tolerance is 5; pass a fraction: 0.03 is 3 %"),
    ({"tolerance": torch.tensor([0.1, 0.2])}, "tolerance is tensor"),
    ({"images": smooth_images(0)}, "images has 0 images; pass at least two"),
    ({"images": smooth_images(1)}, "at least two"),
    ({"images": 3}, "images is int"),
    ({"images": [smooth_images(1), smooth_images(1)[..., :56]]}, "112x56 and 112x112"),
    ({"images": smooth_images(2).long()}, "torch.int64"),
    ({"images": "no-such-folder"}, "no folder or zip"),
    ({"measure": "psnr"}, "'psnr'"),
    ({"measure": nan_after(2)}, "returned nan"),
    ({"measure": lambda reference, output: 1.0}, "must be 0 for equal outputs"),
    ({"measure": lambda reference, output: -float((output - reference).abs().sum())}, "from 0"),
    ({"measure": lambda reference, output: None}, "returned NoneType"),
    ({"batch_size": 4}, "batch_size is 4"),
    ({"batch_size": 0, "limit": 4}, "batch_size is 0"),
    ({"errors": []}, "errors is []; pass a list"),
    ({"errors": [0.0]}, "errors is 0.0"),
    ({"errors": [0.03, 3]}, "errors is 3; pass a fraction: 0.03 is 3 %"),
    ({"minutes": 0}, "minutes is 0"),
    ({"layers": [3]}, "layers is 3"),
    ({"limit": 1}, "limit is 1"),
]


def test_bad_input_is_refused_in_one_sentence_and_changes_nothing():
    model = small_model()
    full = model(smooth_images(1))
    for options, message in REFUSED:
        with pytest.raises((ValueError, TypeError)) as raised:
            tuned(model, **options)
        assert message in str(raised.value) and "\n" not in str(raised.value)
        assert not is_patched(model) and torch.equal(model(smooth_images(1)), full)
    with pytest.raises(ValueError, match=r"error is 3; pass a fraction: 0\.03 is 3 %"):
        bmfa.patch(model, error=3)
    bmfa.patch(model, error=0.1)
    with pytest.raises(ValueError, match="unpatch"):
        tuned(model)
    assert is_patched(model)


def stopped_after(passes: int):
    """Ctrl-C after some forward passes."""
    left, advance = iter(range(passes)), Run.advance

    def stop(run: Run, *args, **options) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        advance(run, *args, **options)

    return mock.patch.object(Run, "advance", stop)


def counted_passes():
    return mock.patch.object(Run, "advance", autospec=True, side_effect=Run.advance)


def test_an_interrupted_run_goes_on_and_gives_the_plan_of_one_that_was_not(tmp_path):
    model, file = small_model().train(), tmp_path / "new" / "plan.part"
    model.blocks[1].eval()
    modules = [(module.training, module._forward_hooks.copy()) for module in model.modules()]
    weights = [parameter.clone() for parameter in model.parameters()]
    for options in ({"images": smooth_images(8)}, {"measure": "logits", "batch_size": 2}):
        with counted_passes() as counted:
            expected = tuned(model, 0.05, **options)
        found, stops = None, 0
        while found is None:
            try:
                with stopped_after(10 // options.get("batch_size", 1)):
                    found = tuned(model, 0.05, resume=file, **options)
            except KeyboardInterrupt:
                stops += 1
            assert json.loads(file.read_text())["measured"] and list(file.parent.iterdir()) == [
                file
            ]
            assert modules == [(m.training, m._forward_hooks) for m in model.modules()]
            assert all(map(torch.equal, weights, model.parameters())) and not is_patched(model)
        assert found == expected and stops > 1
        with counted_passes() as again:  # another tolerance
            loose = tuned(model, 0.06, resume=file, **options)
        assert again.call_count < counted.call_count and loose == tuned(model, 0.06, **options)
        for change, message in (
            ({"seed": 1}, "belongs to another run: images was"),
            ({"model": small_model(1)}, "belongs to another run: model was"),
        ):
            with pytest.raises(ValueError, match=message):
                tuned(**{"model": model, "resume": file} | options | change)
        file.write_text(file.read_text()[:-20])
        with pytest.raises(ValueError, match="holds no usable measurements"):
            tuned(model, resume=file, **options)
        file.unlink()
    reduction = {"agreement": 0.5, "progress": False}
    expected = bmfa.tune_reduction(model, smooth_images(8), **reduction)
    with stopped_after(9), pytest.raises(KeyboardInterrupt):
        bmfa.tune_reduction(model, smooth_images(8), resume=file, **reduction)
    assert bmfa.tune_reduction(model, smooth_images(8), resume=file, **reduction) == expected


def test_minutes_buy_targets_then_images_and_the_plan_says_what_more_would_bring():
    """A forward pass takes a second, and the clock stands still."""
    model, errors, found = small_model(), (0.02, 0.03, 0.05, 0.1, 0.3), []
    times = {layer: {None: 1.0} | dict.fromkeys(errors, 0.5) for layer in range(DEPTH)}
    given = {
        "errors": errors,
        "images": smooth_images(12),
        "times": times,
        "repeats": 1,
        "limit": 9,
    }
    for minutes, effort in (
        (0.1, ", the least, which takes longer; all targets, and a plan that may be faster, take"),
        (1.2, "; all targets, and a plan that may be faster, take about 1.6 minutes"),
        (2.0, "; all 9 images, which predict others better, take about 2.4 minutes"),
        (60.0, ", which is all there is"),
    ):
        with (
            mock.patch.object(AttentionTuner, "time_pass", return_value=1.0),
            mock.patch("bmfa.models.tuning_run.time.monotonic", return_value=0.0),
            counted_passes() as counted,
        ):
            plan = tuned(model, 0.05, minutes=minutes, **given)
        targets = len({setting.error for setting in plan.candidates} - {None})
        images = plan.calibration_images + plan.validation_images + plan.test_images
        found.append((targets, images))
        start = f"{minutes:g} minutes: {targets} of 5 error targets on {images} images"
        assert start + effort in plan.effort and plan.effort in str(plan)
        assert counted.call_count <= 60 * max(minutes, 1.0) and plan.validation_change <= 0.05
    assert found[0] == (1, 6) and 1 < found[1][0] < 5 and found[2][0] == 5 and found[3] == (5, 9)


class Bar:
    """A bar of tqdm that remembers its phases, and how many passes were left at every step."""

    def __init__(self, **options) -> None:
        self.options, self.n, self.total = options, 0, 0
        self.left: list[int] = []
        self.phases: list[str] = []

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None: ...

    def set_description(self, phase: str) -> None:
        self.phases.append(phase)
        self.left.append(self.total - self.n)

    def update(self, passes: int) -> None:
        self.n += passes
        self.left.append(self.total - self.n)


def test_phases_are_named_and_the_time_left_does_not_grow_threefold(monkeypatch):
    bars: list[Bar] = []
    monkeypatch.setattr("tqdm.auto.tqdm", lambda **options: bars.append(Bar(**options)) or bars[-1])
    for tolerance, measure in (
        (0.02, "features"),
        (1.0, "features"),
        (1e-9, "features"),
        (0.1, "logits"),
    ):
        tuned(small_model(), tolerance, measure, images=smooth_images(8))
        assert bars[-1].phases == [
            *("check of the measure", "times of layers", "calibration"),
            *("validation", "times of the model", "test"),
        ]
    for agreement in (0.5, 1.0):
        bmfa.tune_reduction(small_model(), smooth_images(8), agreement=agreement)
        assert bars[-1].phases == ["calibration", "choice", "test"]
    for bar in bars:
        assert all(later <= 3 * earlier for earlier, later in itertools.pairwise(bar.left))
        lowest = itertools.accumulate(bar.left, min)
        assert all(now <= 3 * least for now, least in zip(bar.left, lowest, strict=True))
        assert bar.n >= 18 and bar.left[-1] >= 0
