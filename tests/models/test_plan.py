"""Plans: their file, the model they fit, and the model they patch."""

import copy
import json
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from tests.models.host_models import timm_model
from torch import Tensor, nn

import bmfa
from bmfa.models import LayerSetting, ModelFingerprint, Plan, embedded
from bmfa.models.patching import is_patched
from bmfa.models.plan import read_plan, write_plan
from bmfa.models.screened_layer import screened_layers

DEPTH = 3


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = embedded.EmbeddedViT(dim=24, depth=DEPTH)
    for block in model.blocks:
        block.attn.qkv.weight.data *= 2.0
    return model.eval()


def smooth(count: int, side: int) -> Tensor:
    noise = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return nn.functional.interpolate(noise, size=side, mode="bicubic")


def plan_for(model: nn.Module, errors: dict[int, float], grid=(14, 14)) -> Plan:
    fingerprint = ModelFingerprint.of(model)
    layers = tuple(LayerSetting(i, errors.get(i), 0.5, 0.01) for i in range(fingerprint.layers))
    check = {
        "errors": [setting.error for setting in layers],
        "tiled_layers": len(errors),
        "attention_milliseconds": 1.5,
        "predicted_change": 0.017,
        "choosing_change": None,
        "measured_change": 0.016,
        "holds": True,
        "chosen": True,
        "why": "the fastest that is predicted to hold",
    }
    return Plan(
        model=fingerprint,
        img_size=(8 * grid[0], 8 * grid[1]),
        grids=(grid,) * fingerprint.layers,
        batch_size=1,
        dtype="float32",
        device="cpu",
        measure="features",
        tolerance=0.03,
        layers=layers,
        candidates=(*layers, *(LayerSetting(i, None, 1.0, 0.0) for i in range(len(layers)))),
        predicted_change=0.017,
        checked_change=0.016,
        measured_change=0.018,
        checks=(check,),
        dense_milliseconds=4.0,
        predicted_milliseconds=2.5,
        milliseconds=3.0,
        choosing=2,
        checking=1,
        confirming=1,
        seed=0,
    )


def test_a_plan_is_the_same_after_saving_and_loading(tmp_path):
    plan = plan_for(small_model(), {0: 0.3, 2: 0.05})
    plan.save(tmp_path / "new" / "plan.json")
    assert Plan.load(tmp_path / "new" / "plan.json") == plan
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plan.json"]


def test_the_file_is_readable_and_says_what_it_is_for(tmp_path):
    plan_for(small_model(), {0: 0.3}).save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    data = json.loads(text)
    assert (data["plan"], data["version"], data["model"]["layers"]) == ("attention", 2, DEPTH)
    assert data["environment"]["torch"] and data["grids"] == [[14, 14]] * DEPTH
    assert '\n    {"layer": 0, "error": 0.3, "milliseconds": 0.5, "change": 0.01, ' in text


def test_totals_and_times_follow_from_the_settings():
    plan = plan_for(small_model(), {0: 0.3, 2: 0.05})
    assert plan.errors == {0: 0.3, 2: 0.05}
    assert plan.speedup == pytest.approx(4 / 3) and plan.predicted_speedup == pytest.approx(1.6)
    assert plan.times == {0: {0.3: 0.5, None: 1.0}, 1: {None: 1.0}, 2: {0.05: 0.5, None: 1.0}}
    assert plan.holds and not replace(plan, measured_change=0.031).holds
    assert plan.expected_change == pytest.approx(((2 * 0.017**2 + 0.016**2) / 3) ** 0.5)
    record = plan.to_record()
    assert [row["setting"] for row in record.rows if row["chosen"]][:1] == ["error=0.3"]
    assert json.loads(record.to_json())["settings"]["tolerance"] == 0.03


def test_the_best_single_target_is_within_the_tolerance():
    settings = [
        *(LayerSetting(i, None, 1.0, 0.0) for i in range(DEPTH)),
        *(LayerSetting(i, 0.1, 0.5, 0.01) for i in range(DEPTH)),
        *(LayerSetting(i, 0.2, 0.2, 0.03) for i in range(DEPTH)),
        *(LayerSetting(i, 0.05, 0.8, 0.001) for i in range(DEPTH - 1)),
        LayerSetting(DEPTH - 1, 0.05, 1.2, None),
    ]
    plan = replace(plan_for(small_model(), {}), candidates=tuple(settings))
    single = plan.single_target()
    assert (single["error"], single["predicted_milliseconds"]) == (0.1, 4.0 - 3 * 0.5)
    assert single["predicted_change"] == pytest.approx(0.01 * 3**0.5)
    assert replace(plan, tolerance=0.1).single_target()["error"] == 0.2
    assert (
        replace(plan, tolerance=0.0015).single_target()["predicted_milliseconds"] == 4.0 - 2 * 0.2
    )
    assert replace(plan, tolerance=1e-4).single_target() is None
    assert replace(plan, measure="logits", tolerance=0.03).single_target()["error"] == 0.1
    assert replace(plan, measure="lost_overlap").single_target() is None
    assert single["measured_change"] is None
    row = plan.checks[0] | {"errors": [0.1] * DEPTH, "measured_change": 0.04, "chosen": False}
    checked = replace(plan, checks=(row, *plan.checks))
    assert checked.single_target()["measured_change"] == 0.04


def test_the_optimum_is_the_fastest_predicted_combination():
    settings = [
        LayerSetting(i, error, time, change * (i + 1))
        for i in range(DEPTH)
        for error, time, change in ((None, 1.0, 0.0), (0.1, 0.5, 0.01), (0.2, 0.2, 0.02))
    ]
    plan = replace(plan_for(small_model(), {}), candidates=tuple(settings), tolerance=0.042)
    found = plan.optimum()
    assert found["errors"] == [0.2, 0.1, 0.1] and found["measured_change"] is None
    assert found["predicted_change"] == pytest.approx((0.02**2 + 0.02**2 + 0.03**2) ** 0.5)
    assert found["predicted_milliseconds"] == pytest.approx(4.0 - 0.8 - 0.5 - 0.5)
    assert replace(plan, measure="lost_overlap").optimum() is None


@pytest.mark.filterwarnings("ignore:screened_attention measured")  # a target may be missed
def test_a_plan_gives_every_layer_its_own_setting(tmp_path):
    model, image = small_model(), smooth(1, 112)
    full = model(image)
    plan = plan_for(model, {0: 0.3, 2: 0.05})
    plan.save(tmp_path / "plan.json")
    forms = (plan, tmp_path / "plan.json", str(tmp_path / "plan.json"))
    outputs = [bmfa.patch(model, plan=form)(image) for form in forms]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], full)
    settings = [(layer.layer, layer.options["error"]) for layer in screened_layers(model)]
    assert settings == [(0, 0.3), (2, 0.05)]
    assert torch.equal(bmfa.unpatch(model)(image), full)


def test_a_plan_with_one_target_is_the_same_as_patch():
    model, image = small_model(), smooth(2, 112)
    expected = bmfa.patch(model, error=0.3, allow_dense=False, layers=[1, 2])(image)
    planned = bmfa.patch(model, plan=plan_for(model, {1: 0.3, 2: 0.3}))(image)
    assert torch.equal(planned, expected)


def test_a_plan_of_dense_layers_leaves_the_model_as_it_is():
    model = bmfa.patch(small_model(), plan=plan_for(small_model(), {}))
    assert not is_patched(model)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_planned_model_compute_the_same(make_copy):
    image, model = smooth(1, 112), small_model()
    bmfa.patch(model, plan=plan_for(model, {0: 0.3}))
    assert torch.equal(make_copy(model)(image), model(image))


def timm_vit() -> nn.Module:
    pytest.importorskip("timm")
    torch.manual_seed(0)
    size = {"img_size": 64, "patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 3}
    return timm_model("vit_tiny_patch16_224", **size, dynamic_img_size=True).eval()


def test_images_of_another_size_run_dense_and_warn_once():
    model = timm_vit()
    planned, other = smooth(1, 64), smooth(1, 96)
    full = model(other)
    bmfa.patch(model, plan=plan_for(model, {0: 0.3}, (16, 16)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(planned)
    with pytest.warns(UserWarning, match="the plan is for a 16x16 grid of tokens") as found:
        assert torch.equal(model(other), full)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(other), full)
        assert not torch.equal(model(planned), bmfa.unpatch(copy.deepcopy(model))(planned))


def change_file(path, **changes) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (data | changes).items() if v != "removed"}))


FILES = {
    "version": (lambda p: change_file(p, version=1), "plan version 1"),
    "kind": (lambda p: change_file(p, plan="merging"), "of the kind 'merging'"),
    "json": (lambda p: p.write_text(p.read_text()[:-20]), "is not JSON"),
    "binary": (lambda p: p.write_bytes(b"\xff\xfe\x00"), "is not text"),
    "other": (lambda p: p.write_text("[1]"), "is not a plan"),
    "incomplete": (lambda p: change_file(p, tolerance="removed"), "not a complete plan"),
    "unknown": (lambda p: change_file(p, colour="red"), "not a complete plan"),
    "layers": (lambda p: change_file(p, layers=[]), "0 settings and 3 grids for 3 layers"),
    "grids": (lambda p: change_file(p, grids=[[14, 14]]), "3 settings and 1 grids for 3 layers"),
    "negative": (
        lambda p: change_file(p, candidates=[{"layer": 0, "error": -1.0, "milliseconds": 1.0}]),
        "error is -1.0",
    ),
    "gone": (lambda p: p.unlink(), "cannot be read"),
    "folder": (lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused_in_one_sentence(name, tmp_path):
    change, message = FILES[name]
    model, path = small_model(), tmp_path / "plan.json"
    plan_for(model, {0: 0.3}).save(path)
    change(path)
    with pytest.raises((ValueError, OSError)) as raised:
        bmfa.patch(model, plan=path)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not is_patched(model)


MODELS = {
    "class": (timm_vit, "timm.models.vision_transformer.VisionTransformer"),
    "depth": (lambda: embedded.EmbeddedViT(dim=24, depth=2), "3 layers"),
    "width": (lambda: embedded.EmbeddedViT(dim=48, depth=3), "parameters"),
    "dtype": (lambda: small_model().double(), "float64"),
    "weights": (lambda: small_model(seed=1), "other weights"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_for_another_model_is_refused_and_changes_nothing(name):
    make, message = MODELS[name]
    plan, model = plan_for(small_model(), {0: 0.3}), make()
    with pytest.raises(ValueError, match="the plan does not fit") as raised:
        bmfa.patch(model, plan=plan)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not is_patched(model)


def test_one_changed_weight_in_the_sample_changes_the_fingerprint():
    model = small_model()
    before = ModelFingerprint.of(model)
    model.head.bias.data[-1] += 1e-3
    assert ModelFingerprint.of(model) == replace(before, weights=ModelFingerprint.of(model).weights)
    assert before.mismatch(model) == "it is for other weights of the same architecture"


def test_every_trained_parameter_changes_the_fingerprint():
    model = small_model()
    before = ModelFingerprint.of(model).weights
    for parameter in model.parameters():
        original = parameter.detach().clone()
        parameter.data += 1e-4 * torch.randn(parameter.shape)
        assert ModelFingerprint.of(model).weights != before
        parameter.data.copy_(original)
    assert ModelFingerprint.of(model).weights == before


def test_wrappers_and_patches_do_not_change_the_fingerprint():
    model = small_model()
    before = ModelFingerprint.of(model)
    assert ModelFingerprint.of(nn.DataParallel(model)) == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler itself uses what torch has deprecated
        assert ModelFingerprint.of(torch.compile(model)) == before
    assert ModelFingerprint.of(bmfa.patch(model, rule="fixed-depth:1", layers="all")) == before


@pytest.mark.parametrize(
    "options",
    [
        {"error": 0.1},
        {"rule": "gamma:0.1"},
        {"layers": "all"},
        {"backend": "eager"},
    ],
)
def test_options_beside_a_plan_are_refused(options):
    model = small_model()
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .* and a plan is given"):
        bmfa.patch(model, plan=plan_for(model, {0: 0.3}), **options)
    assert not is_patched(model)


def test_another_type_is_refused():
    with pytest.raises(TypeError, match="plan is dict"):
        bmfa.patch(small_model(), plan={})


def test_numbers_that_json_lacks_are_refused_and_leave_the_old_file(tmp_path):
    write_plan(tmp_path / "plan.json", "test", {"value": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_plan(tmp_path / "plan.json", "test", {"value": float("nan")})
    assert read_plan(tmp_path / "plan.json", "test") == {"value": 1}
