"""The embedded model: its weights and what they are good for."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bmfa.data.drawn.badges import draw_badge_batch
from bmfa.evidence.metrics import mask_iou
from bmfa.models import patch, reduce
from bmfa.models.embedded import WEIGHTS, EmbeddedViT, load, preprocess
from bmfa.models.embedded.model import encode_positions
from bmfa.trees.rules import ExactGap

RECORD = Path(__file__).parents[3] / "tools" / "train-embedded-h200.json"
HELD_OUT_SEED = 7
COUNT = 120


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def images():
    pixels, labels, masks = draw_badge_batch(HELD_OUT_SEED, range(COUNT))
    return preprocess(pixels), torch.from_numpy(labels), torch.from_numpy(masks)


def scores_of(model, images):
    with torch.inference_mode():
        return torch.cat([model(part) for part in images.split(50)])


def screened(model, rule, last):
    """A copy of the model whose last blocks attend by a rule."""
    return patch(copy.deepcopy(model), rule=rule, layers=f"last-{last}")


def test_a_small_transformer_of_eight_blocks_with_two_heads(model):
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_250_000
    assert len(model.blocks) >= 8
    assert model.num_prefix_tokens == 1
    assert model.patch_embed.grid_size == (16, 16)
    assert not model.training
    logits, masks = model.forward_dense(torch.zeros(3, 3, 128, 128))
    assert logits.shape == (3, 24)
    assert masks.shape == (3, 128, 128)
    assert torch.equal(logits, model(torch.zeros(3, 3, 128, 128)))


def test_it_accepts_any_multiple_of_eight(model):
    for height, width in ((112, 112), (256, 256), (64, 192)):
        features = model.forward_features(torch.zeros(1, 3, height, width))
        assert features.shape == (1, 1 + height * width // 64, 96)
        assert model.forward_dense(torch.zeros(1, 3, height, width))[1].shape == (1, height, width)


def test_a_finer_grid_samples_the_same_positions():
    own, fine = encode_positions(16, 16, 96), encode_positions(48, 48, 96)
    centres = fine.view(48, 48, 96)[1::3, 1::3].reshape(256, 96)
    torch.testing.assert_close(centres, own, atol=1e-5, rtol=0)


def test_tokens_of_a_larger_image_see_the_same_context(model):
    """Each pixel four times as large: the four middle tokens of a patch surround its centre."""
    image = preprocess(draw_badge_batch(0, [0])[0])
    large = image.repeat_interleave(4, 2).repeat_interleave(4, 3)
    embed = copy.deepcopy(model.patch_embed)
    torch.nn.init.zeros_(embed.proj.weight)
    torch.nn.init.zeros_(embed.proj.bias)
    own = embed(image).view(16, 16, 96)
    fine = embed(large).view(64, 64, 96)
    assert fine.shape[:2] == (64, 64)
    near = torch.stack([fine[i::4, j::4] for i in (1, 2) for j in (1, 2)]).mean(0)
    distance = (near - own).norm() / own.norm()
    assert distance < 0.5 < (near.roll(1, 0) - own).norm() / own.norm()


def test_weights_are_small_and_in_half_precision():
    from safetensors import safe_open

    assert WEIGHTS.stat().st_size < 2_500_000
    with safe_open(WEIGHTS, framework="pt") as file:
        names, made_with = file.keys(), file.metadata()
        assert {file.get_tensor(name).dtype for name in names} == {torch.float16}
    record = json.loads(RECORD.read_text("utf-8"))
    made = {name: str(record["settings"][name]) for name in ("seed", "steps")}
    assert json.loads(made_with["recipe"]) == made
    assert WEIGHTS.stat().st_size == record["settings"]["weights_bytes"]


def test_the_task_is_hard_and_the_mask_is_found(model, images):
    inputs, labels, masks = images
    with torch.inference_mode():
        outputs = [model.forward_dense(part) for part in inputs.split(40)]
    logits, found = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    top1 = (logits.argmax(-1) == labels).double().mean().item()
    # Between 75 and 88 % on the images of the record; here within its 95 % interval.
    assert 0.75 - 0.08 < top1 < 0.88 + 0.06
    assert mask_iou(found > 0, masks).mean() > 0.7


def test_reduced_tokens_need_the_full_grid_for_a_mask(model):
    image = torch.zeros(1, 3, 128, 128)
    reduced = reduce(copy.deepcopy(model), "tome:8", dense=True)
    assert reduced.forward_dense(image)[1].shape == (1, 128, 128)
    reduced = reduce(copy.deepcopy(model), "tome:8", dense=False)
    with pytest.raises(
        ValueError, match=r"192 spatial tokens and the grid 256; reduce .* dense=True"
    ):
        reduced.forward_dense(image)


def test_exact_gap_zero_gives_the_scores_of_the_full_model(model, images):
    inputs = images[0][:10]
    exact = scores_of(screened(model, ExactGap(0.0), 8), inputs)
    torch.testing.assert_close(exact, scores_of(model, inputs), atol=1e-4, rtol=1e-4)


def test_preprocess_centres_and_orders_the_channels():
    pixels = np.zeros((1, 128, 128, 3), dtype=np.uint8)
    pixels[0, 3, 5] = (255, 0, 51)
    image = preprocess(pixels)
    assert image.shape == (1, 3, 128, 128)
    assert image.dtype == torch.float32
    assert image[0, :, 3, 5].tolist() == pytest.approx([2.0, -2.0, -1.2])
    assert torch.equal(image, preprocess(torch.from_numpy(pixels)))


def test_bad_images_are_refused(model):
    with pytest.raises(TypeError, match=r"pixels are torch.float32; pass 8-bit images"):
        preprocess(torch.zeros(1, 128, 128, 3))
    with pytest.raises(ValueError, match=r"shape \(128, 128, 3\); pass \(B, height, width, 3\)"):
        preprocess(np.zeros((128, 128, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"shape \(1, 3, 100, 128\); pass .* multiples of 8"):
        model(torch.zeros(1, 3, 100, 128))


def test_bad_weights_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        load(tmp_path / "nothing.safetensors")
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(WEIGHTS.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"torn\.safetensors is not a readable"):
        load(torn)
    save_file(EmbeddedViT(depth=9).state_dict(), tmp_path / "deeper.safetensors")
    with pytest.raises(ValueError, match=r'Unexpected.*: "blocks\.8\.'):
        load(tmp_path / "deeper.safetensors")


def test_the_model_and_its_images_need_no_extra():
    """A plain installation has what the embedded model imports, and no more is imported."""
    code = (
        "import sys\n"
        "for name in ('PIL', 'matplotlib', 'timm', 'torchvision', 'transformers', 'pycocotools'):\n"
        "    sys.modules[name] = None\n"
        "import bmfa\n"
        "from bmfa.data.classification import EmbeddedImages\n"
        "from bmfa.evidence.closed_loop.run import run\n"
        "model = bmfa.load_model('embedded')\n"
        "record = run(model, EmbeddedImages(2), ['gamma:0.05'], layers='last-1')\n"
        "print(record.rows[0]['images'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"
