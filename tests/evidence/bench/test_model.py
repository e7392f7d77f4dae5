"""`bmfa bench model`: averages over images, masks of a decoder, and interrupted benchmarks."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from bmfa.cli import main
from bmfa.evidence.bench import attention as attention_bench
from bmfa.evidence.bench import model as model_bench
from bmfa.evidence.bench.inputs import InputSource
from bmfa.evidence.bench.saliency import load_decoder, masks, saliency_decoder
from bmfa.grid import Grid
from bmfa.packages import is_installed

TIMM = pytest.mark.skipif(not is_installed("timm"), reason="needs timm")


def saved_decoder(tmp_path, channels=(192, 8, 4, 4), **changes):
    generator = torch.Generator().manual_seed(0)
    decoder = saliency_decoder(channels)
    state = {
        f"decoder.{name}": torch.rand(x.shape, generator=generator) - 0.5 + name.endswith("var")
        for name, x in decoder.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    path = tmp_path / "decoder.pt"
    torch.save({**state, **changes}, path)
    return path


def test_a_decoder_is_three_stages_of_its_weights(tmp_path):
    decoder = load_decoder(saved_decoder(tmp_path))
    x = features = torch.randn(2, 192, 3, 5, generator=torch.Generator().manual_seed(1))
    for stage in "123":
        conv, norm = getattr(decoder, f"upconv{stage}"), getattr(decoder, f"bn{stage}")
        x = nn.functional.conv_transpose2d(x, conv.weight, conv.bias, stride=2, padding=1)
        x = (x - norm.running_mean.view(-1, 1, 1)) / (norm.running_var.view(-1, 1, 1) + 1e-5).sqrt()
        x = (x * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)).clamp(min=0)
    last = decoder.final_conv
    expected = torch.einsum("bchw,c->bhw", x, last.weight.flatten()) + last.bias
    with torch.no_grad():
        torch.testing.assert_close(
            decoder(features)[:, 0], expected.sigmoid(), atol=1e-5, rtol=1e-5
        )
        tokens = torch.cat((torch.zeros(2, 1, 192), features.flatten(2).transpose(1, 2)), 1)
        found = masks(decoder, tokens, Grid(3, 5), prefix=1)
    assert found.shape == (2, 1, 24, 40)
    assert float((found[:, 0] == (expected > 0)).double().mean()) > 0.99


def test_refusals(tmp_path):
    for changes, message in (
        ({"decoder.upconv2.weight": torch.zeros(3)}, "upconv1 to upconv3"),
        ({"decoder.bn2.bias": torch.zeros(3)}, "not a saliency decoder"),
        ({"decoder.extra": torch.zeros(3)}, "Unexpected"),
    ):
        with pytest.raises(ValueError, match=message):
            load_decoder(saved_decoder(tmp_path, **changes))
    for message, settings in (
        ("multiple", {"batch_size": 2, "images": 3}),
        ("unknown", {"methods": ("sparse:1",)}),
        (r"'int8'.*bfloat16", {"dtype": "int8"}),
    ):
        with pytest.raises(ValueError, match=message):
            model_bench.Settings(**settings)


@TIMM
def test_a_model_with_a_decoder(tmp_path, capsys):
    decoder = saved_decoder(tmp_path)
    model = ["--model", "timm:deit_tiny_patch16_224", "--img-size", "128", "--repeats", "1"]
    options = ["--method", "tiles:0", "--method", "tiles:1", "--tiled", "--images", "2"]
    options += ["--decoder", str(decoder)]
    main(["bench", "model", *model, *options, "--json", "-"])
    made = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in made["rows"]}
    assert made["settings"]["decoder"] == "decoder.pt" and len(made["settings"]["images"]) == 2
    assert rows["full"]["mask_iou"] == 1.0 and rows["full"]["error_l2_percent"] == 0.0
    # Every tile is read: dense attention but for rounding.
    assert rows["tiles:1"]["error_l2_percent"] < 1e-2 and rows["tiles:1"]["mask_iou"] > 0.99
    assert rows["tiles:1"]["density_percent"] == 100.0
    assert rows["tiles:0"]["error_l2_percent"] > 1e-2 and 0.0 <= rows["tiles:0"]["mask_iou"] <= 1.0
    assert rows["tiles:0"]["density_percent"] == 0.0 and rows["tiles:0"]["tiled_layers"] == 12


@TIMM
def test_errors_are_means_over_images():
    settings = {"model": "timm:deit_tiny_patch16_224", "methods": ("tiles:0",), "repeats": 1}
    settings["allow_dense"] = False
    both = model_bench.run(model_bench.Settings(images=2, **settings), [64])
    batch = model_bench.run(model_bench.Settings(batch_size=2, **settings), [64])
    errors = [
        row["error_l2_percent"]
        for made in (both, batch)
        for row in made.rows
        if row["method"] == "tiles:0"
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_a_screened_model_is_compared_with_the_dense_one():
    for allow_dense in (True, False):
        settings = model_bench.Settings(
            methods=("error:0.05", "tiles:1"), repeats=1, allow_dense=allow_dense
        )
        rows = {row["method"]: row for row in model_bench.run(settings, [128]).rows}
        assert rows["full"]["speedup"] == 1.0 and rows["full"]["error_l2_percent"] == 0.0
        assert rows["full"]["path"] == "default" and rows["full"]["n"] == 256
        layers = 0 if allow_dense else 8
        assert rows["error:0.05"]["tiled_layers"] == layers and rows["error:0.05"]["layers"] == 8
        # All tiles expanded, or dense where that is faster: the dense model but for rounding.
        assert rows["tiles:1"]["error_l2_percent"] < 1e-2
        assert (rows["error:0.05"]["error_l2_percent"] > 1e-2) != allow_dense


def test_an_interrupted_benchmark_keeps_the_sizes_that_are_complete(monkeypatch):
    settings = model_bench.Settings(methods=("tiles:1",), repeats=1)
    options = {"tokens": [16, 64], "methods": ["tiles:1"], "repeats": 1}
    for owner, second, run in (
        (model_bench, "64 pixels", partial(model_bench.run, settings, [32, 64])),
        (
            attention_bench,
            "128 pixels",
            lambda: attention_bench.run(InputSource("random"), **options),
        ),
    ):
        original, calls, last = owner.SizeBenchmark.rows, [], 2

        def rows(self, original=original, calls=calls):
            calls.append(self)
            if len(calls) == last:
                raise KeyboardInterrupt
            return original(self)

        monkeypatch.setattr(owner.SizeBenchmark, "rows", rows)
        record = run()
        assert {row["n"] for row in record.rows} == {16}
        assert "interrupted" in record.settings["absent"][second]
        last = len(calls) + 1
        with pytest.raises(KeyboardInterrupt):
            run()
