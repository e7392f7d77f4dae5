"""Plans: their file, the model they fit, and the model they patch."""

import copy
import json
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from tests.models.host_models import hf_model, timm_model
from tests.models.tuned_models import DEPTH, plan_for, small_model, smooth_images
from torch import nn

import bmfa
from bmfa.models import ModelFingerprint, Plan, embedded
from bmfa.models.patching import is_patched
from bmfa.models.screened_layer import screened_layers


def timm_vit(img_size=64, **options) -> nn.Module:
    pytest.importorskip("timm")
    torch.manual_seed(0)
    size = {"img_size": img_size, "patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 3}
    return timm_model("vit_tiny_patch16_224", **size | options).eval()


def test_the_file_is_readable_and_loads_the_same_plan(tmp_path):
    plan, path = plan_for(small_model(), {0: 0.3, 2: 0.05}), tmp_path / "new" / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan and list(path.parent.iterdir()) == [path]
    text = path.read_text()
    data = json.loads(text)
    assert (data["plan"], data["version"], data["model"]["layers"]) == ("attention", 4, DEPTH)
    assert data["environment"]["torch"] and data["grids"] == [[14, 14]] * DEPTH
    assert '\n    {"layer": 0, "error": 0.3, "milliseconds": 0.5, "change": 0.01}' in text
    older = {name: x for name, x in data.items() if name not in ("exact_milliseconds", "effort")}
    (path.parent / "older.json").write_text(json.dumps(older))
    assert Plan.load(path.parent / "older.json") == plan
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(plan, seed=float("nan")).save(path)
    assert path.read_text() == text


def test_totals_follow_from_the_settings():
    plan = plan_for(small_model(), {0: 0.3, 2: 0.05})
    assert plan.errors == {0: 0.3, 2: 0.05}
    assert plan.speedup == pytest.approx(4 / 3)
    assert [setting.error for setting in plan.layers] == [0.3, None, 0.05]
    assert (plan.predicted_change, plan.validation_change) == (0.017, 0.016)
    assert plan.holds and not replace(plan, measured_change=0.031).holds
    record = plan.to_record()
    assert [row["setting"] for row in record.rows if row["chosen"]] == [
        *("error=0.3", "dense", "error=0.05")
    ]
    assert json.loads(record.to_json())["settings"]["tolerance"] == 0.03


def test_a_plan_prints_its_table():
    plan = plan_for(small_model(), {0: 0.3})
    lines = str(plan).splitlines()
    assert repr(plan) == str(plan) and lines[0].split()[:2] == ["layer", "setting"]
    assert lines[1].split() == ["0", "error=0.3", "1.00", "%", "0.5", "1.0", "2.00x"]
    for changes, parts in (
        ({}, ["1 of 3 layers", "1.70 % predicted", "1.60 % measured", "(1.60x)", "(1.33x)"]),
        ({}, ["test images: 1.80 % measured on 1"]),
        ({"measured_change": 0.031}, ["exceeds the tolerance"]),
        (
            {"exact_milliseconds": 3.9},
            ["takes 3.9 ms", "save 1.4 ms timed alone", "and 0.9 ms in the model"],
        ),
        ({"effort": "5 minutes: all"}, ["5 minutes: all"]),
        ({"test_images": 0}, ["test images: none, because fewer than six"]),
        ({"measure": "logits"}, ["0.016 nats measured"]),
    ):
        assert all(part in " ".join(replace(plan, **changes).notes()) for part in parts)
    near = replace(plan, exact_milliseconds=3.9, predicted_milliseconds=3.05)
    assert "timed alone" not in str(near)
    html = replace(plan, measure="<lambda>")._repr_html_()
    assert "<td>error=0.3</td>" in html and "&lt;lambda&gt; at 112x112 px" in html


@pytest.mark.filterwarnings("ignore:screened_attention measured")  # a target may be missed
def test_a_plan_gives_every_layer_its_own_setting(tmp_path):
    model, image = small_model(), smooth_images(1)
    full = model(image)
    plan = plan_for(model, {0: 0.3, 2: 0.05})
    plan.save(tmp_path / "plan.json")
    forms = (plan, tmp_path / "plan.json", str(tmp_path / "plan.json"))
    outputs = [bmfa.patch(model, plan=form)(image) for form in forms]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], full)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(image), outputs[0])
    settings = {layer.layer: layer.options["error"] for layer in screened_layers(model)}
    assert settings.get(0) == 0.3 and settings.get(2) == 0.05 and not settings.get(1)
    assert torch.equal(bmfa.unpatch(model)(image), full)
    expected = bmfa.patch(model, error=0.3, allow_dense=False, layers=[1, 2])(image)
    planned = bmfa.patch(model, plan=plan_for(model, {1: 0.3, 2: 0.3}))(image)
    torch.testing.assert_close(planned, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="plan is dict"):
        bmfa.patch(model, plan={})
    options = ({"error": 0.1}, {"rule": "gamma:0.1"}, {"layers": "all"}, {"backend": "eager"})
    for option in options:
        with pytest.raises(ValueError, match=f"{next(iter(option))} is .* and a plan is given"):
            bmfa.patch(model, plan=plan, **option)


def test_other_images_run_dense_and_warn_once():
    """Images of another size, and of another shape with as many tokens."""
    for size, found in ((96, "there are 576 tokens"), ((32, 128), "the image has a 8x32 grid")):
        model = timm_vit(dynamic_img_size=True)
        planned, other = smooth_images(1, 64), smooth_images(1, size)
        full, both = model(other), model(other.repeat(2, 1, 1, 1))
        bmfa.patch(model, plan=plan_for(model, {0: 0.3}, (16, 16)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(planned)
        reason = f"the plan is for a 16x16 grid of tokens, and {found}: this size runs dense"
        with pytest.warns(UserWarning, match=reason) as warned:
            torch.testing.assert_close(model(other), full)
        assert len(warned) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # also for another number of images
            torch.testing.assert_close(model(other.repeat(2, 1, 1, 1)), both)
            assert not torch.equal(model(planned), bmfa.unpatch(copy.deepcopy(model))(planned))


def paths(data, path=()):
    """The path to every value of JSON data, in lists to the first one."""
    items = data.items() if isinstance(data, dict) else enumerate(data[:1])
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key)) if isinstance(value, dict | list) else ()


def refusal(kind: type, path) -> str:
    """Why a file is refused; empty if it is not, and its plan does all that a plan does."""
    try:
        plan = kind.load(path)
    except ValueError as error:
        return str(error)
    assert str(plan) and plan.to_record() and plan == kind.load(path)
    return ""


def test_a_damaged_file_is_refused_with_the_name_of_the_field_or_does_all_a_plan_does(tmp_path):
    path, model = tmp_path / "plan.json", small_model()
    reduction = bmfa.tune_reduction(model, smooth_images(4), agreement=0.5)
    refused = 0
    for plan in (plan_for(model, {0: 0.3, 2: 0.05}), reduction):
        for *place, key in paths(json.loads(plan.to_json())):
            for bad in (None, -1, 0, 0.5, 7, 10**400, True, "x", [], {}, "removed"):
                data = found = json.loads(plan.to_json())
                for name in place:
                    found = found[name]
                found[key] = bad
                if bad == "removed":
                    del found[key]
                path.write_text(json.dumps(data))
                if message := refusal(type(plan), path):
                    assert str((*place, key)[0]).removesuffix("s") in message
                    assert "\n" not in message
                    refused += 1
    assert refused > 500


FILES = [
    (lambda p: p.write_text(p.read_text().replace('"version": 4', '"version": 1')), "version 1"),
    (lambda p: p.write_text(p.read_text().replace('"attention"', '"x"')), "plan 'x'"),
    (lambda p: p.write_text(p.read_text().replace("tolerance", "x")), "field 'tolerance'"),
    (lambda p: p.write_text(p.read_text()[:-20]), "is not a plan, or damaged"),
    (lambda p: p.write_text("[" * 100_000), "is not a plan, or damaged"),
    (lambda p: p.write_bytes(b"\xff\xfe\x00"), "is not a plan, or damaged"),
    (lambda p: p.write_text("[1]"), "is not of the type dict"),
    (lambda p: p.unlink(), "cannot be read"),
    (lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
]


def test_other_files_are_refused_in_one_sentence(tmp_path):
    model, path = small_model(), tmp_path / "plan.json"
    for change, message in FILES:
        plan_for(model, {0: 0.3}).save(path)
        change(path)
        with pytest.raises((ValueError, OSError)) as raised:
            bmfa.patch(model, plan=path)
        assert message in str(raised.value) and "\n" not in str(raised.value)
        assert not is_patched(model)


def test_a_plan_fits_the_same_weights_however_the_model_was_built():
    """Position embeddings are resampled to the size of the images; the plan is for the other weights."""
    made, larger, image = timm_vit(), timm_vit(96), smooth_images(1, 96)
    plan = plan_for(made, {0: 0.3}, (24, 24))
    assert larger.pos_embed.shape != made.pos_embed.shape
    state = {k: v for k, v in made.state_dict().items() if k != "pos_embed"}
    larger.load_state_dict(state, strict=False)
    full = larger(image)
    for wrapper in (nn.Sequential(larger, nn.Linear(5, 2)), nn.DataParallel(larger), larger):
        bmfa.patch(wrapper, plan=plan)
        assert not torch.equal(larger(image), full)
        bmfa.unpatch(wrapper)
    larger.__class__ = type("VisionTransformer", (type(made),), {"__module__": "elsewhere"})
    plan.check_model(larger)
    hf = hf_model("ViTConfig", "ViTForImageClassification").eval()
    assert ModelFingerprint.from_model(hf.vit) == ModelFingerprint.from_model(hf)


def test_a_plan_for_another_model_is_refused_with_the_cure():
    plan = plan_for(small_model(), {0: 0.3})
    for make, difference, cure in (
        (timm_vit, "this one has VisionTransformer", "pass that model"),
        (lambda: embedded.EmbeddedViT(dim=24, depth=2), "layers 3", "the same arguments"),
        (lambda: embedded.EmbeddedViT(dim=48, depth=3), "architecture", "the same arguments"),
        (lambda: small_model().double(), "float64", "model.to(torch.float32)"),
        (lambda: small_model(seed=1), "has weights", "load the weights"),
    ):
        model = make()
        with pytest.raises(ValueError, match="the plan does not fit") as raised:
            bmfa.patch(model, plan=plan)
        for part in (difference, cure, "with bmfa.tune"):
            assert part in str(raised.value)
        assert "\n" not in str(raised.value) and not is_patched(model)


def test_every_trained_parameter_changes_the_fingerprint_and_patches_do_not():
    model = small_model()
    before = ModelFingerprint.from_model(model)
    for name, parameter in model.named_parameters():
        original = parameter.detach().clone()
        for change in (1e-4 * torch.randn(parameter.shape), torch.zeros(parameter.shape)):
            if not bool(change.any()):
                change.view(-1)[-1] = 1e-3  # the last element alone
            parameter.data += change
            found = ModelFingerprint.from_model(model)
            positions = "pos_" in name
            assert (found.weights == before.weights) == positions
            assert replace(found, weights=before.weights) == before
            parameter.data.copy_(original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler itself uses what torch has deprecated
        assert ModelFingerprint.from_model(torch.compile(model)) == before
    assert ModelFingerprint.from_model(bmfa.patch(model, error=0.1)) == before
    dense = bmfa.patch(bmfa.unpatch(model), plan=plan_for(model, {}))
    torch.testing.assert_close(dense(smooth_images(1)), bmfa.unpatch(model)(smooth_images(1)))
