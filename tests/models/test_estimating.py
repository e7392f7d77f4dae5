"""`bmfa.estimate`: how times become speeds, and what it says about a model."""

import copy
import json
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.models.tuned_models import small_model, smooth_images
from torch import nn

import bmfa
from bmfa.attention.dispatch import LEAST_TOKENS, NATIVE
from bmfa.attention.kernels import native
from bmfa.attention.kernels.native import library
from bmfa.models import estimating
from bmfa.models.estimating import LEAST_SPEED, Estimate, SettingEstimate, peak_bytes
from bmfa.models.tables import by_reason
from bmfa.timing import time_alternating

CPU = torch.device("cpu")


def given_times(dense: float, screened: float, calls: dict[float | None, float]):
    """Replace measured times, in milliseconds: of passes, and of a call of attention by its setting."""

    def time_calls(work, device, seconds=0.0):
        return calls[work.keywords.get("error")], work()

    passes = iter([(dense, 2**20), *[(screened, 2**21)] * 9])

    def time_pass(run, device):
        run()
        return next(passes)

    return mock.patch.multiple(estimating, _time_calls=time_calls, _time_pass=time_pass)


def estimated(**options) -> Estimate:
    """An estimate for three layers from given times: dense attention takes 60 of 100 ms."""
    calls = {None: 20.0, 0.0: 10.0, 0.01: 9.0, 0.03: 5.0, 0.1: 2.0} | options.pop("calls", {})
    with given_times(100.0, options.pop("screened", 55.0), calls):
        return bmfa.estimate(small_model(), smooth_images(2), **options)


@pytest.fixture
def tiles_everywhere():
    """Tiles run from 64 tokens on."""
    with mock.patch.dict(LEAST_TOKENS, {NATIVE: 64, "eager": 64}):
        yield


@pytest.mark.usefixtures("tiles_everywhere")
def test_a_pass_with_another_setting_is_the_measured_one_with_its_attention_replaced():
    found = estimated()
    assert found.dense_milliseconds == 100.0 and found.attention_share == 0.6
    by_error = {one.error: one for one in found.settings}
    # 55 ms with error=0.03, of which 15 are attention: 40 remain.
    times = {error: one.milliseconds for error, one in by_error.items()}
    assert times == {0.0: 70.0, 0.01: 67.0, 0.03: 55.0, 0.1: 46.0}
    for error, one in by_error.items():
        assert one.speedup == one.slowest == one.fastest == 100.0 / times[error]
    assert found.settings[0].tiled_layers == 0 and found.settings[0].density == 1.0
    assert by_error[0.01].density >= by_error[0.03].density >= by_error[0.1].density > 0.0
    assert (found.dense_mebibytes, found.screened_mebibytes, found.images) == (1.0, 2.0, 2)
    assert found.verdict == "1.8x at `error=0.03`" and not found.synthetic


def test_where_tiles_do_not_run_the_times_are_those_of_exact_attention():
    found = estimated()
    assert {one.milliseconds for one in found.settings} == {55.0}
    least = LEAST_TOKENS[NATIVE if library.instruction_set() else "eager"]
    assert found.dense_below == 8 * math.ceil(math.sqrt(least))
    (reason,) = found.reasons
    assert reason.startswith("exact at error=0.03: layers 0, 1, 2, dense attention is as fast")
    lines = by_reason("blocks", {0: "windows", 2: "pooled", 3: "windows"})
    assert lines == ["blocks 0, 3, windows", "blocks 2, pooled"]


@pytest.mark.usefixtures("tiles_everywhere")
def test_the_size_below_which_dense_attention_stays_is_where_the_model_reaches_the_least_speed():
    calls = {None: 2.0, 0.0: 2.0, 0.03: 1.0}
    found = estimated(screened=98.0, calls=calls, errors=[0.03])
    assert found.verdict == f"stay dense below {found.dense_below} px"
    for less, reached in ((0, True), (8, False)):  # one row of patches less
        times = ((found.dense_below - less) / 112) ** 2  # as many tokens
        rest, dense, tiles = 94.0 * times, 6.0 * times**2, 3.0 * times**2
        assert ((rest + dense) / (rest + tiles) >= LEAST_SPEED) == reached
    never = estimated(screened=102.0, calls={None: 2.0, 0.0: 2.0, 0.03: 3.0}, errors=[0.03])
    assert never.dense_below is None and never.verdict == "stay dense"


def test_the_verdict_prefers_what_is_fastest_and_exact_attention_where_tiles_gain_nothing():
    found = estimated()

    def verdict(tiles: tuple[float, float], exact: float, below: int | None = 768) -> str:
        settings = (
            SettingEstimate(0.0, 1.0, exact, exact, exact, 1.0, 0),
            SettingEstimate(0.03, 1.0, sum(tiles) / 2, *tiles, 0.2, 3),
        )
        return replace(found, settings=settings, dense_below=below).verdict

    assert verdict((2.0, 2.6), 1.4) == "2.0x to 2.6x at `error=0.03`"
    exact = "1.4x at `error=0`, which is exact; tiles gain nothing"
    assert (
        verdict((1.2, 1.3), 1.4) == f"{exact} below 768 px"
        and verdict((1.2, 1.3), 1.4, 112) == exact
    )
    assert verdict((1.0, 1.05), 1.0) == "stay dense below 768 px"
    assert verdict((1.0, 1.05), 1.0, None) == "stay dense"


def test_memory_is_the_largest_sum_of_what_is_held_at_one_time():
    def allocate():
        first = torch.empty(2**20, dtype=torch.uint8)
        second = torch.empty(2**22, dtype=torch.uint8)
        del first, second
        third = torch.empty(2**21, dtype=torch.uint8)
        del third

    assert 5 * 2**20 <= peak_bytes(allocate, CPU) < 5 * 2**20 + 4096
    q = torch.randn(1, 2, 4096, 32)
    attend = lambda: bmfa.screened_attention(q, q, q, grid=(64, 64), error=0.1)  # noqa: E731
    if library.instruction_set():
        attend()
        assert native.last_call.scratch is not None
        assert peak_bytes(attend, CPU) == peak_bytes(attend, CPU) > q.nbytes, "scratch counts again"


def test_synthetic_images_are_normalised_and_their_estimate_is_a_range():
    images = estimating.synthetic_images((96, 128), seed=3)
    assert images.shape == (3, 3, 96, 128)
    assert torch.allclose(images.mean((1, 2, 3)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(images.std((1, 2, 3)), torch.ones(3), atol=1e-4)
    # The noise falls as 1 / f^0.75: eight times the frequency, less than a fifth of the amplitude.
    spectrum = torch.fft.rfft2(images[0, 0]).abs()
    assert 3.0 < float(spectrum[0, 2:6].mean() / spectrum[0, 16:48].mean()) < 8.0
    found = bmfa.estimate(bmfa.load_model("embedded"), errors=[0.03])
    assert found.synthetic and found.images == 3 and "3 synthetic images" in str(found)


def test_the_result_shows_itself_and_is_json():
    found = estimated()
    data = json.loads(found.to_json())
    assert data == json.loads(json.dumps(found.to_dict()))
    assert data["settings"][2]["error"] == 0.03 and data["verdict"] == found.verdict
    assert repr(found) == f"Estimate(EmbeddedViT, 112x112 px: {found.verdict})"
    lines = str(found).splitlines()
    assert lines[0] == "EmbeddedViT at 112x112 px, 196 tokens: 3 layers can be screened"
    assert lines[1].split() == ["setting", "speed", "ms", "tiles", "expanded", "tiled", "layers"]
    assert lines[-1] == f"verdict: {found.verdict}"
    assert "attention: 60 % of a dense pass of 100 ms, on 2 given images" in lines
    assert found._repr_html_().startswith("<table><caption>EmbeddedViT at")


def test_the_model_is_unchanged_and_input_is_checked():
    model = small_model().train()
    bmfa.estimate(model, smooth_images(1), errors=[0.1])
    assert all(module.training for module in model.modules())
    assert not bmfa.models.patching.is_patched(model)
    refusing = mock.Mock(
        side_effect=AssertionError("Input height (112) doesn't match model (224).")
    )
    with (
        mock.patch.object(type(model), "forward", refusing),
        pytest.raises(ValueError, match=r"doesn't match model.*img_size="),
    ):
        bmfa.estimate(model, smooth_images(1))
    assert model.training
    loaded = bmfa.load_model("embedded")
    for options, words in (
        ({"errors": [0.0]}, "errors is 0"),
        ({"errors": [3]}, "errors is 3"),
        ({"limit": 0}, "limit is 0"),
        ({"img_size": 100}, "img_size is 100"),
        ({"images": torch.zeros(1, 1, 64, 64)}, "3, height, width"),
        ({"images": []}, "3, height, width"),
        ({"images": smooth_images(1), "img_size": 64}, "without img_size"),
    ):
        with pytest.raises(ValueError, match=words):
            bmfa.estimate(loaded, **options)
    with pytest.raises(TypeError, match=r"errors is \[\]"):
        bmfa.estimate(loaded, errors=[])
    with pytest.raises(ValueError, match="not known"):
        bmfa.estimate(nn.Sequential(small_model()))
    with pytest.raises(ValueError, match="is patched"):
        bmfa.estimate(bmfa.patch(small_model()), smooth_images(1))


@pytest.mark.slow
@pytest.mark.skipif("BMFA_ASSETS" not in os.environ, reason="BMFA_ASSETS has real weights, photos")
def test_an_estimate_is_within_a_quarter_of_the_speed_of_a_whole_model():
    """DeiT-Tiny at 1,024 px on a photograph, against whole passes timed in turns."""
    assets = Path(os.environ["BMFA_ASSETS"])
    weights = assets / "weights" / "deit_tiny_patch16_224.fp16.safetensors"
    loaded = bmfa.load_model("timm:deit_tiny_patch16_224", weights, img_size=1024)
    found = bmfa.estimate(loaded, assets / "photos", limit=1)
    image = estimating._read(loaded, assets / "photos", None, 1, 0)
    patched = bmfa.patch(copy.deepcopy(loaded.model), error=0.03)
    works = {"dense": partial(loaded.model, image), "tiles": partial(patched, image)}
    with torch.inference_mode():
        times = time_alternating(works, 3, CPU)
    speed = next(one.speedup for one in found.settings if one.error == 0.03)
    assert abs(speed * times["tiles"] / times["dense"] - 1.0) <= 0.25
