"""Hosts: encoders found, their parts, classes that are refused."""

import pytest
import torch
from torch import nn

from bmfa import rules
from bmfa.models import patch, reduce, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.screened_layer import screened_layers
from bmfa.packages import load_package
from models.host_models import (
    MODELS,
    VIT,
    Dinov2Attention,
    clip_model,
    hf_model,
    images,
    make_model,
    replacements_in,
    run,
    timm_model,
)

EXACT = rules.ExactGap(0.0)
COARSE = rules.GlobalMean()


def hf_swin() -> nn.Module:
    """A model with windows."""
    transformers = load_package("transformers")
    config = transformers.SwinConfig(image_size=32, embed_dim=8, depths=[1], num_heads=[2])
    model: nn.Module = transformers.SwinModel(config)
    return model


def test_the_prefix_is_found() -> None:
    for name, (prefix, _) in MODELS.items():
        assert find_vision_transformer(make_model(name)).prefix == prefix, name


def test_the_text_tower_is_left_alone() -> None:
    for kind in ("CLIP", "Siglip"):
        model = clip_model(kind).eval()
        inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "pixel_values": images()}
        exact = model(**inputs)
        for change in (
            lambda m: patch(m, rule=COARSE, layers="all"),
            lambda m: reduce(m, "tome:12"),
        ):
            coarse = change(model)(**inputs)
            assert len(replacements_in(model)) == len(replacements_in(model.vision_model)) == 3
            assert torch.equal(coarse.text_embeds, exact.text_embeds)
            assert not torch.equal(coarse.image_embeds, exact.image_embeds)


def own_configs(model: nn.Module) -> list[nn.Module]:
    """The modules whose configuration is not the model's."""
    return [m for m in model.modules() if getattr(m, "config", model.config) is not model.config]


def test_only_the_part_that_calls_attention_gets_a_configuration_of_its_own() -> None:
    model = make_model("hf-nested")
    named = model.config._attn_implementation
    assert not own_configs(model)
    patch(model, rule=COARSE, layers="all")
    replaced = own_configs(model)
    assert len(replaced) == 3 and replaced == [module for module, _ in replacements_in(model)]
    assert not any(isinstance(module, Dinov2Attention) for module in replaced)
    assert model.config._attn_implementation == named
    assert not own_configs(unpatch(model))


def test_nested_attention_without_a_caller_is_refused() -> None:
    model = make_model("hf-nested")
    attention = next(module for module in model.modules() if isinstance(module, Dinov2Attention))
    attention.attention = nn.Identity()
    with pytest.raises(TypeError, match=r"Dinov2Attention .* none of its parts .* 5\.9 or newer"):
        patch(model, rule=COARSE, layers="all")
    assert not screened_layers(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_wrapped_model_is_found() -> None:
    wrapped = nn.Sequential(nn.Identity(), make_model("vit"))
    full = run(wrapped, images())
    assert not torch.equal(run(patch(wrapped, rule=COARSE, layers="all"), images()), full)
    assert torch.equal(run(unpatch(wrapped), images()), full)
    with pytest.raises(ValueError, match="2 vision encoders"):
        patch(nn.ModuleList([make_model("vit"), make_model("hf-vit")]))


def test_unsupported_models_are_refused() -> None:
    bias, small = "relative position bias", {"depth": 1}
    for make, culprit, reason in (
        (lambda: timm_model("swin_tiny_patch4_window7_224"), "WindowAttention", "windows"),
        (lambda: timm_model("beit_base_patch16_224", **small), "timm.models.beit.Attention", bias),
        (lambda: timm_model("vit_relpos_small_patch16_224", **small), "RelPosAttention", bias),
        (lambda: timm_model("samvit_base_patch16", **small), "sam.Attention", bias),
        (lambda: timm_model("hiera_tiny_224"), "MaskUnitAttention", "an order of its own"),
        (lambda: hf_model("BeitConfig", "BeitModel"), "Beit", bias),
        (lambda: hf_model("SamVisionConfig", "SamVisionModel"), "SamVision", bias),
        (lambda: hf_model("VitDetConfig", "VitDetModel"), "VitDet", bias),
        (lambda: hf_model("ViTMAEConfig", "ViTMAEModel"), "ViTMAE", r"transformers\.ViTModel"),
        (hf_swin, "Swin", "windows"),
        (lambda: nn.TransformerEncoderLayer(8, 2), "activation.MultiheadAttention", "not known"),
        (lambda: nn.Linear(2, 2), "torch.nn.modules.linear.Linear", "not known"),
    ):
        with pytest.raises(TypeError, match=reason) as caught:
            patch(make(), rule=COARSE)
        assert culprit in str(caught.value)
        assert "docs/models.md lists" in str(caught.value) and str(caught.value).count("\n") == 1


def test_parallel_blocks_and_an_unknown_attention_are_refused() -> None:
    parallel = timm_model(
        "vit_tiny_patch16_224",
        **VIT,
        block_fn=load_package("timm.models.vision_transformer").ParallelScalingBlock,
    )
    with pytest.raises(TypeError, match=r"ParallelScalingBlock.*not a module of its own"):
        patch(parallel)
    model = make_model("vit")
    model.blocks[1].attn.__class__ = type("OwnAttention", (type(model.blocks[1].attn),), {})
    with pytest.raises(TypeError, match="OwnAttention"):
        patch(model)
    with pytest.raises(TypeError, match=r"pass the torch\.nn\.Module"):
        patch("vit")


def test_unfused_attention_is_replaced_too() -> None:
    model, pixels = make_model("vit"), images()
    for block in model.blocks:
        block.attn.fused_attn = False
    full = run(model, pixels)
    patch(model, rule=EXACT, layers="all")
    torch.testing.assert_close(run(model, pixels), full, rtol=1e-4, atol=1e-4)
    fused = run(reduce(make_model("vit"), "free-energy:4"), pixels)
    assert torch.equal(run(reduce(model, "free-energy:4"), pixels), fused)
    unpatch(model)
    assert not any(block.attn.fused_attn for block in model.blocks)
    assert torch.equal(run(model, pixels), full)
