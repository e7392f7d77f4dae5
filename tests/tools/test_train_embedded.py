"""The script that trains the embedded model: its steps, checkpoints, settings and command line."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

import train_embedded as script
from bmfa.data.drawn.badges import draw_badge_batch, grain_weights
from bmfa.models.embedded import EmbeddedViT, load
from train_embedded import Recipe, augment, evaluate, held_out_row, main, mask_loss, train

OFTEN = {"checkpoint_every": 1, "log_every": 1}
SMALL = Recipe(
    batch=2, drawn=4, reuse=1, small_part=0.5, held_out=(2, 1), held_out_grains=(8.0,), **OFTEN
)


def test_the_loss_of_masks():
    masks = torch.zeros(3, 4, 4)
    masks[:2, :2] = 1.0
    assert mask_loss(20.0 * (2.0 * masks - 1.0), masks) < 1e-6
    assert mask_loss(-20.0 * (2.0 * masks - 1.0), masks) > 10


def without_times(record):
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in record.rows]
    return rows, {k: v for k, v in record.settings.items() if k != "seconds"}


def test_training_resumes_to_the_identical_state(tmp_path):
    whole = train(tmp_path / "whole", seed=3, steps=3, recipe=SMALL)
    seen = []

    def stop(row):
        seen.append(row.get("step"))
        if seen == [1, 2]:
            raise KeyboardInterrupt

    common = {"seed": 3, "steps": 3, "recipe": SMALL, "log": stop}
    common["resume"] = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "resumed", **common)
    assert not (tmp_path / "resumed").exists()
    resumed = train(tmp_path / "resumed", **common)
    assert seen == [1, 2, 2, 3, None, None]
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "resumed").read_bytes()
    assert without_times(whole) == without_times(resumed)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint", "resumed", "whole"]
    with pytest.raises(ValueError, match=r"has seed 3 and this run 4; pass the settings"):
        train(tmp_path / "resumed", **common | {"seed": 4})
    train(tmp_path / "other", seed=4, steps=3, recipe=SMALL)
    assert (tmp_path / "whole").read_bytes() != (tmp_path / "other").read_bytes()


def test_training_stops_when_its_time_is_over_and_goes_on_later(tmp_path):
    common = {"steps": 2, "recipe": SMALL, "stop_after": 1e-9, "resume": tmp_path / "checkpoint"}
    assert train(tmp_path / "weights", **common) is None
    assert not (tmp_path / "weights").exists()
    record = train(tmp_path / "weights", **common)
    assert [row["step"] for row in record.rows if row["what"] == "training"] == [1, 2]
    held_out = [row for row in record.rows if row["what"] == "held-out"]
    assert [(row["img_size"], row["images"]) for row in held_out] == [(128, 2), (512, 1)]
    assert record.settings["weights_bytes"] == (tmp_path / "weights").stat().st_size < 2_500_000
    # A training by time takes images as they are drawn.
    common = {"seconds": 2.0, "recipe": SMALL, "resume": tmp_path / "by-time"}
    assert train(tmp_path / "weights", stop_after=0.5, **common) is None
    record = train(tmp_path / "weights", **common)
    assert record.settings["seconds"] >= 2.0
    assert record.settings["images_drawn"] >= 8
    assert record.rows[-1]["tokens"] == 4096


def test_the_script_writes_weights_and_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "Recipe", lambda: SMALL)
    weights, record = tmp_path / "made.safetensors", tmp_path / "made.json"
    words = ["--device", "cpu", "--steps", "1", "--output", str(weights), "--json", str(record)]
    main([*words, "--stop-after", "60", "--resume", str(tmp_path / "c")])
    assert "top1_percent" in capsys.readouterr().out
    assert json.loads(record.read_text("utf-8"))["experiment"] == "train-embedded"
    assert load(weights).forward_dense(torch.zeros(1, 3, 128, 128))[1].shape == (1, 128, 128)
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "steps is 0" in capsys.readouterr().err


def test_steps_have_images_of_several_sizes():
    recipe = Recipe()
    assert {recipe.ratio(0, step, 0.2) for step in range(200)} == {1, 2}
    assert {recipe.ratio(0, step, 0.9) for step in range(200)} == {1, 2, 4}
    run = script._TrainingRun(0, 4, None, torch.device("cpu"), SMALL)
    for number in range(3):
        run._add(script.NewImages(0, 0, 16)[number])
    for ratio in (1, 2, 4):
        images, labels, cells = run._sample(ratio, 8.0)
        side, count = 128 * ratio, max(1, 2 // ratio**2)
        assert images.shape == (count, 3, side, side) and labels.shape == (count,)
        assert cells.shape == (count, 2, side // 2, side // 2)
        mask, ticks = cells.unbind(1)
        assert bool((ticks <= mask).all()) and 0 < ticks.mean() < mask.mean() < 0.1


def test_a_failed_write_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_bytes(b"before")

    def torn(state, file):
        file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", torn)
    run = script._TrainingRun(0, 2, None, torch.device("cpu"), SMALL)
    with pytest.raises(OSError, match="no space"):
        run.store(checkpoint)
    assert checkpoint.read_bytes() == b"before"


def test_the_learning_rate_rises_and_falls_and_the_grain_rises():
    recipe = Recipe(warmup=0.1)
    rates = [recipe.learning_rate_factor(step / 100) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(10)])
    assert all(one > other for one, other in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.0)
    assert recipe.grain_limit(0.0) == pytest.approx(0.15 * recipe.grain)
    assert recipe.grain_limit(0.5) == recipe.grain_limit(1.0) == recipe.grain


def test_training_refuses_bad_settings_and_files(tmp_path):
    torn, other = tmp_path / "torn", tmp_path / "other"
    torn.write_bytes(b"half of it")
    torch.save([1, 2], other)
    for arguments, line in (
        ({"seed": -1}, "seed is -1; pass an integer from 0"),
        ({"steps": 0}, "steps is 0; pass an integer at least 1"),
        ({"device": "gpu"}, "device 'gpu' cannot be used"),
        ({"resume": "."}, "cannot be written; pass a file in an existing folder"),
        ({"stop_after": 60.0}, "stop_after is 60 without a checkpoint; pass resume=FILE"),
        ({"seconds": 0.0}, "seconds is 0"),
        ({"seconds": 5.0, "steps": 3}, "steps is 3 and seconds is 5; pass one of them"),
        ({"steps": 1, "resume": torn}, r"is not a complete checkpoint \(\w+\); delete it"),
        ({"steps": 1, "resume": other}, "is not a checkpoint of this training"),
    ):
        with pytest.raises(ValueError, match=line):
            train(tmp_path / "weights", **arguments)
    with pytest.raises(ValueError, match="cannot be written"):
        train(tmp_path / "nowhere" / "weights", steps=1)
    with pytest.raises(ValueError, match="drawn is 0; pass an integer at least 1"):
        Recipe(drawn=0)


def test_a_row_has_the_measures_and_what_was_measured():
    model = EmbeddedViT().eval()
    frame = {"what": "held-out", "img_size": 256, "tokens": 1024, "grain": 8.0, "images": 2}
    measured = evaluate(model, images=2, size=256, grain=8.0, batch_size=1)
    assert set(measured) == {"top1_percent", "mask_iou"}
    assert held_out_row(model, 2, 2, 8.0, 0) == frame | dict(measured)


def test_views_are_the_symmetries_of_the_square_and_the_inverse():
    image = torch.arange(9.0).view(1, 1, 3, 3) + 1
    coins = torch.cartesian_prod(*[torch.tensor([False, True])] * 4).T.reshape(4, 16, 1, 1, 1)
    views = augment(image.expand(16, -1, -1, -1), coins)
    assert len({tuple(v.flatten().tolist()) for v in views}) == 16
    assert torch.equal(views[0], image[0])
    assert all(v.abs().sum() == image.sum() for v in views)


def test_the_grain_of_the_device_is_that_of_the_images():
    weights = torch.from_numpy(grain_weights(128)).double()
    assert weights.sum(1).numpy() == pytest.approx(np.ones(128), abs=1e-6)
    plain = draw_badge_batch(0, [5], grain=0.0)[0].astype(float)
    grained = draw_badge_batch(0, [5], grain=20.0)[0].astype(float)
    noise = (grained - plain)[0]
    inside = (grained[0] > 0).all(-1) & (grained[0] < 255).all(-1)
    assert np.abs(noise[inside] - noise[inside][:, :1]).max() <= 1  # grey, up to the rounding
    # The noise of a row lies in the span of the weights, that of the knots times the other axis.
    values, basis = noise[..., 0], weights.numpy()
    fitted = basis @ np.linalg.lstsq(basis, values, rcond=None)[0]
    columns = inside.all(0)  # clipped pixels elsewhere are not in the span
    assert columns.any() and np.abs(fitted - values)[:, columns].max() < 3
    assert 8 < noise[inside].std() < 12  # of a product of two bilinear waves with amplitude 20
