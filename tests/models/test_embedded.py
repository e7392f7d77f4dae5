"""The embedded model: its weights, what they are good for, and how they were made."""

import copy
import json
import math
import pickle
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from bmfa.data.drawn.glyphs import GLYPHS, draw_glyph_batch
from bmfa.models import patch
from bmfa.models.embedded import WEIGHTS, EmbeddedViT, load, preprocess, save, training
from bmfa.models.embedded.training import Recipe, augment, train
from bmfa.trees.rules import ExactGap, GlobalMean

COUNT, HELD_OUT = 200, 7
SMALL = Recipe(pictures=2, views=2, warmup=1, checkpoint_every=1, progress_every=1)


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def pictures():
    pixels, labels = draw_glyph_batch(HELD_OUT, range(COUNT))
    return preprocess(pixels), torch.from_numpy(labels)


def scores_of(model, pictures):
    with torch.inference_mode():
        return torch.cat([model(part) for part in pictures.split(50)])


def screened(model, rule, last):
    """A copy of the model whose last blocks attend by a rule."""
    return patch(copy.deepcopy(model), rule=rule, layers=f"last-{last}")


def same_state(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_a_small_plain_transformer_of_eight_blocks(model):
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
    assert len(model.blocks) >= 8
    assert model.num_prefix_tokens == 1
    assert model.patch_embed.grid_size == (14, 14)
    assert not model.training
    assert model(torch.zeros(3, 3, 112, 112)).shape == (3, 10)


def test_weights_are_small_and_in_half_precision():
    from safetensors import safe_open

    assert WEIGHTS.stat().st_size < 2_500_000
    with safe_open(WEIGHTS, framework="pt") as file:
        names, made_with = file.keys(), file.metadata()
        assert {file.get_tensor(name).dtype for name in names} == {torch.float16}
    made = {"seed": str(training.SEED), "steps": str(training.STEPS)}
    assert json.loads(made_with["recipe"]) == made


def test_copies_and_pickles_give_the_same_scores(model):
    picture = torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(0))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(picture), model(picture))


def test_accuracy_and_its_loss_with_global_means(model, pictures):
    inputs, labels = pictures
    full = scores_of(model, inputs).argmax(-1)
    coarse = scores_of(screened(model, GlobalMean(), 4), inputs).argmax(-1)
    top1, lost = [(chosen == labels).double().mean().item() for chosen in (full, coarse)]
    assert top1 > 0.93
    assert top1 - lost > 0.12


def test_exact_gap_zero_gives_the_scores_of_the_full_model(model, pictures):
    inputs = pictures[0][:10]
    exact = scores_of(screened(model, ExactGap(0.0), 8), inputs)
    torch.testing.assert_close(exact, scores_of(model, inputs), atol=1e-4, rtol=1e-4)


def test_preprocess_centres_and_orders_the_channels():
    pixels = np.zeros((1, 112, 112, 3), dtype=np.uint8)
    pixels[0, 3, 5] = (255, 0, 51)
    picture = preprocess(pixels)
    assert picture.shape == (1, 3, 112, 112)
    assert picture.dtype == torch.float32
    assert picture[0, :, 3, 5].tolist() == pytest.approx([2.0, -2.0, -1.2])
    assert torch.equal(picture, preprocess(torch.from_numpy(pixels)))


def test_views_are_the_symmetries_of_the_square_and_the_inverse():
    picture = torch.arange(9.0).view(1, 1, 3, 3) + 1
    coins = torch.cartesian_prod(*[torch.tensor([False, True])] * 4).T.reshape(4, 16, 1, 1, 1)
    views = augment(picture.expand(16, -1, -1, -1), coins)
    assert len({tuple(v.flatten().tolist()) for v in views}) == 16
    assert torch.equal(views[0], picture[0])
    assert all(v.abs().sum() == picture.sum() for v in views)


def test_a_mirrored_figure_is_still_nearest_to_its_own_class():
    points = {name: outline(segments) for name, segments in GLYPHS.items()}
    for name, figure in points.items():
        distances = {other: apart(figure * (1, -1), points[other]) for other in points}
        assert min(distances, key=distances.get) == name
        assert distances[name] < 0.02 or name == "spiral"


def outline(segments):
    """About 90 points along the segments."""
    steps = np.linspace(0, 1, 2 + 90 // len(segments))[:, None, None]
    return (segments[:, 0] * (1 - steps) + segments[:, 1] * steps).reshape(-1, 2)


def apart(one, other):
    """The mean distance to the nearest point of the other figure, both ways, at the best of 30 turns."""
    best = math.inf
    for angle in np.linspace(0, 2 * math.pi, 30, endpoint=False):
        turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        distance = np.hypot(*((one @ turn)[:, None] - other).transpose(2, 0, 1))
        best = min(best, distance.min(0).mean() + distance.min(1).mean())
    return best


def test_training_resumes_to_the_identical_state(tmp_path):
    whole = train(tmp_path / "whole", seed=3, steps=3, recipe=SMALL)
    checkpoint = tmp_path / "checkpoint"
    seen = []

    def stop(step, steps, loss):
        seen.append((step, steps))
        if step == 2:
            raise KeyboardInterrupt

    common = {"seed": 3, "steps": 3, "resume": checkpoint, "recipe": SMALL}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "resumed", progress=stop, **common)
    assert not (tmp_path / "resumed").exists()
    resumed = train(tmp_path / "resumed", progress=stop, **common)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert same_state(whole, resumed)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "resumed").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint", "resumed", "whole"]
    with pytest.raises(ValueError, match=r"has seed 3 and this run 4; pass the settings"):
        train(tmp_path / "resumed", **common | {"seed": 4})
    assert not same_state(whole, train(tmp_path / "other", seed=4, steps=3, recipe=SMALL))


def test_a_failed_write_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint"
    train(tmp_path / "weights", seed=0, steps=1, resume=checkpoint, recipe=SMALL)
    before = checkpoint.read_bytes()
    assert torch.load(checkpoint, weights_only=True)["step"] == 1

    def torn(state, file):
        file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", torn)
    run = training._TrainingRun(0, 2, torch.device("cpu"), SMALL)
    with pytest.raises(OSError, match="no space"):
        run.store(checkpoint)
    assert checkpoint.read_bytes() == before


def test_the_learning_rate_rises_and_falls():
    run = training._TrainingRun(0, 100, torch.device("cpu"), Recipe(warmup=10))
    rates = []
    for step in range(100):
        run.step = step
        rates.append(run._learning_rate_factor())
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert all(one > other for one, other in pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"seed": -1}, "seed is -1; pass an integer from 0"),
        ({"steps": 0}, "steps is 0; pass an integer at least 1"),
        ({"device": "gpu"}, "device 'gpu' cannot be used"),
        ({"resume": "."}, "cannot be written; pass a file in an existing folder"),
    ],
)
def test_training_refuses_bad_settings(tmp_path, arguments, line):
    with pytest.raises(ValueError, match=line):
        train(tmp_path / "weights", **arguments)


def test_training_refuses_files_that_are_no_checkpoint(tmp_path):
    torn, other = tmp_path / "torn", tmp_path / "other"
    torn.write_bytes(b"half of it")
    torch.save([1, 2], other)
    with pytest.raises(ValueError, match=r"is not a complete checkpoint \(\w+\); delete it"):
        train(tmp_path / "weights", steps=1, resume=torn, recipe=SMALL)
    with pytest.raises(ValueError, match="is not a checkpoint of this training"):
        train(tmp_path / "weights", steps=1, resume=other, recipe=SMALL)
    with pytest.raises(ValueError, match="cannot be written"):
        train(tmp_path / "nowhere" / "weights", steps=1)
    with pytest.raises(ValueError, match="views is 0; pass an integer at least 1"):
        Recipe(views=0)


def test_bad_pictures_are_refused(model):
    with pytest.raises(TypeError, match=r"pixels are torch.float32; pass 8-bit images"):
        preprocess(torch.zeros(1, 112, 112, 3))
    with pytest.raises(TypeError, match="pixels are list"):
        preprocess([1])
    with pytest.raises(ValueError, match=r"shape \(112, 112, 3\); pass \(B, 112, 112, 3\)"):
        preprocess(np.zeros((112, 112, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"shape \(1, 3, 224, 224\); pass \(B, 3, 112, 112\)"):
        model(torch.zeros(1, 3, 224, 224))


def test_bad_weights_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        load(tmp_path / "nothing.safetensors")
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(WEIGHTS.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"torn\.safetensors is not a readable"):
        load(torn)
    save(EmbeddedViT(depth=9), tmp_path / "deeper.safetensors", {})
    with pytest.raises(ValueError, match=r"12 unexpected, first blocks\.8"):
        load(tmp_path / "deeper.safetensors")


def test_the_model_and_its_pictures_need_no_extra():
    """A plain installation has what the embedded model imports, and no more is imported."""
    code = (
        "import sys\n"
        "for name in ('PIL', 'matplotlib', 'timm', 'torchvision', 'transformers', 'pycocotools'):\n"
        "    sys.modules[name] = None\n"
        "import bmfa\n"
        "from bmfa.data.classification import EmbeddedPictures\n"
        "from bmfa.evidence.closed_loop.run import run\n"
        "model = bmfa.load_model('embedded')\n"
        "record = run(model, EmbeddedPictures(2), ['gamma:0.05'], layers='last-1')\n"
        "print(record.rows[0]['images'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"
