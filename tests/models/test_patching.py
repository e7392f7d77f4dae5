"""Patched models: exact and restored outputs, copies, options, masks, gradients, compilation."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bmfa import Grid, rules, screened_attention
from bmfa.models import layer_indices, patch, record, unpatch
from bmfa.models.screened_layer import screened_layers
from models.host_models import (
    SIZED,
    VIT,
    image_size,
    images,
    make_model,
    run,
    timm_model,
)

EXACT = rules.ExactGap(0.0)
COARSE = rules.GlobalMean()


def test_other_sizes_and_aspect_ratios() -> None:
    for name, options in SIZED.items():
        model = make_model(name)
        for size in ((40, 40), (24, 48), (36, 16), (32, 32)):
            pixels = images(*size)
            full = run(unpatch(model), pixels, **options)
            patch(model, rule=EXACT, layers="all")
            with record(model) as recording:
                exact = run(model, pixels, **options)
            scale = 1e-4 * float(full.abs().max())
            torch.testing.assert_close(exact, full, rtol=1e-4, atol=scale, msg=name)
            assert recording[1].trees[0].grid == Grid(size[0] // 4, size[1] // 4)


def test_patching_twice_equals_once() -> None:
    for name in ("vit", "hf-vit", "embedded"):
        model, pixels = make_model(name), images(image_size(name), image_size(name))
        full = run(model, pixels)
        once = run(patch(model, rule=COARSE, layers="last-2"), pixels)
        assert (once - full).abs().max() > 1e-3 * full.abs().max(), name
        patch(model, rule=EXACT, layers="all")
        assert torch.equal(run(patch(model, rule=COARSE, layers="last-2"), pixels), once), name
        assert len(screened_layers(model)) == 2
        assert torch.equal(run(unpatch(unpatch(model)), pixels), full), name
        assert not screened_layers(model)


@pytest.mark.slow
def test_a_pickle_runs_in_another_process(tmp_path: Path) -> None:
    cases = []
    for name in ("vit", "hf-vit"):
        model = patch(make_model(name), rule=COARSE, layers="last-2")
        cases.append((model, images(), run(model, images())))
    file = tmp_path / "models.pickle"
    file.write_bytes(pickle.dumps(cases))
    code = (
        "import pickle, sys, torch, bmfa\n"
        "for model, pixels, screened in pickle.load(open(sys.argv[1], 'rb')):\n"
        "    output = model(pixels)\n"
        "    torch.testing.assert_close(getattr(output, 'logits', output), screened)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=120)


def test_only_queries_keys_and_values_are_replaced() -> None:
    model, pixels = make_model("vit"), images()
    seen: list[Tensor] = []
    model.blocks[2].attn.proj.register_forward_hook(lambda m, x, y: seen.append(x[0]))
    inputs: list[Tensor] = []
    model.blocks[2].attn.qkv.register_forward_hook(lambda m, x, y: inputs.append(y))
    rule = rules.Optimal(0.01)
    run(patch(model, rule=rule, layers=[2]), pixels)
    q, k, v = inputs[0].view(2, 65, 3, 3, 8).permute(2, 0, 3, 1, 4)
    expected = screened_attention(q, k, v, grid=Grid(8, 8), prefix=1, rule=rule).output
    torch.testing.assert_close(seen[0], expected.transpose(1, 2).reshape(2, 65, 24))


def test_a_call_names_its_layer_and_model_for_warnings() -> None:
    calls = []
    for _ in range(2):
        model = patch(make_model("vit"), error=0.1, allow_dense=False)
        with record(model, trees=False) as recording:
            run(model, images())
        calls.append(recording[1].stats[0].call)
    (layer, model), (other_layer, other_model) = (call.caller for call in calls)
    assert layer == other_layer == "layer 1" and model != other_model
    assert all(x.startswith("VisionTransformer, patched model ") for x in (model, other_model))


def test_gradients_flow_through_the_trees() -> None:
    model = patch(make_model("vit"), rule=rules.Optimal(0.01), layers="all").train()
    model(images()).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_layer_indices() -> None:
    assert layer_indices("all", 3) == (0, 1, 2)
    for layers, meant in (
        ("last-2", (10, 11)),
        ([5, 1, 5], (1, 5)),
        (np.array([5, 1]), (1, 5)),
        (torch.tensor([4]), (4,)),
        ([0, -12, np.int64(-2)], (0, 10)),
        (range(2), (0, 1)),
    ):
        assert layer_indices(layers, 12) == meant
        assert all(type(index) is int for index in layer_indices(layers, 12))
    for bad in ("last-13", "last-0", "first-2", "", [], np.array([])):
        with pytest.raises(ValueError, match="layers is"):
            layer_indices(bad, 12)
    for index in (12, -13):
        with pytest.raises(ValueError, match=f"layers is {index}; pass an integer from -12 to 11"):
            layer_indices([index], 12)
    for bad, message in (
        (np.int64(3), r"layers is 3; pass \[3\] for that layer alone, 'last-3' for the last 3"),
        (None, "layers is None; pass 'all', 'last-K' or a list"),
        (np.array([True, False]), "layers is True"),
        ([1.0], "layers is 1.0"),
    ):
        with pytest.raises(TypeError, match=message):
            layer_indices(bad, 12)


def test_options_are_checked_before_anything_is_changed() -> None:
    model = make_model("vit")
    for options, text in (
        ({"rule": "gamma:x"}, "gamma:x"),
        ({"rule": COARSE, "error": 0.1}, "rule and error"),
        ({"leaves": 9, "max_depth": 2}, "max_depth is 2, which limits trees"),
        ({"leaves": 1}, r"pass leaves=1\.0 for all tokens"),
        ({"backend": "magic"}, "magic"),
        ({"max_depth": -1}, "max_depth"),
        ({"layers": "last-9"}, "last-9"),
    ):
        with pytest.raises(ValueError, match=text):
            patch(model, **options)
    with pytest.raises(TypeError, match=r"pass one of bmfa\.rules"):
        patch(model, rule=3)
    assert not screened_layers(model)
    patch(model, rule=rules.Optimal(leaves=0.25), layers="all")
    with record(model) as recording:
        run(model, images())
    assert recording.leaf_ratio <= 0.25


def test_unsupported_calls_of_a_screened_layer_are_refused() -> None:
    model = timm_model("vit_tiny_patch16_224", **VIT, attn_drop_rate=0.1)
    patch(model, allow_dense=False, layers="all")
    with pytest.raises(ValueError, match=r"dropout of 0.1.*model.eval"):
        model.train()(images())
    run(model.eval(), images())
    with pytest.raises(ValueError, match="drops or merges tokens"):
        model.blocks(torch.randn(2, 30, 24))
    patch(model, allow_dense=False, layers="all")
    with pytest.raises(RuntimeError, match="call the model itself"):
        model.blocks(torch.randn(2, 65, 24))


def test_masks_of_padding_are_kept_and_others_refused() -> None:
    model = patch(make_model("vit"), rule=EXACT, layers=[0])
    run(model, images())
    attention, tokens = model.blocks[0].attn, torch.randn(2, 65, 24)
    mask = torch.ones(2, 1, 1, 65, dtype=torch.bool)
    mask[1, ..., 40:] = False
    additive = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    with torch.no_grad():
        screened = attention(tokens, attn_mask=mask)
        added = attention(tokens, attn_mask=additive)
        with pytest.raises(ValueError, match="padding mask"):
            attention(tokens, attn_mask=torch.ones(65, 65, dtype=torch.bool).tril()[None, None])
        with pytest.raises(ValueError, match="padding mask"):
            attention(tokens, attn_mask=torch.randn(2, 1, 1, 65))
        with pytest.raises(ValueError, match="causal"):
            attention(tokens, is_causal=True)
        unpatch(model)
        expected = attention(tokens, attn_mask=mask)
    torch.testing.assert_close(screened, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-4)
