"""Hosts: towers found, their parts, classes that are refused."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import nn

if find_spec("timm") is None or find_spec("transformers") is None:
    pytest.skip("needs timm and transformers: pip install 'bmfa[models]'", allow_module_level=True)

from bmfa import Grid, rules
from bmfa.models import patch, record, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.replacement import replacements_in
from bmfa.models.screened_layer import screened_layers
from bmfa.packages import load_package
from models.host_models import (
    MODELS,
    VIT,
    Dinov2Attention,
    clip_model,
    hf_model,
    image_size,
    images,
    make_model,
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


@pytest.fixture(params=sorted(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_prefix_is_found(name: str) -> None:
    model = make_model(name)
    host = find_vision_transformer(model)
    assert host.prefix == MODELS[name][0]
    patch(model, rule=COARSE, layers=[0, 2])
    side = image_size(name)
    with record(model) as recording:
        run(model, images(side, side))
    assert sorted(recording.layers) == [0, 2]
    tree = recording[2].trees[0]
    grid = Grid(14, 14) if name == "embedded" else Grid(8, 8)
    assert tree.grid == grid and tree.shape[2] == grid.size + host.prefix


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_the_text_tower_is_left_alone(kind: str) -> None:
    model = clip_model(kind).eval()
    patch(model, rule=COARSE, layers="all")
    assert len(screened_layers(model)) == 3
    assert len(screened_layers(model.vision_model)) == 3
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "pixel_values": images()}
    coarse = model(**inputs)
    exact = unpatch(model)(**inputs)
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


@pytest.mark.parametrize("owners", [0, 2])
def test_nested_attention_without_one_caller_is_refused(owners: int) -> None:
    model = make_model("hf-nested")
    attention = next(module for module in model.modules() if isinstance(module, Dinov2Attention))
    attention.attention = nn.Sequential(nn.Identity(), nn.Identity())
    for part in attention.attention[:owners]:
        part.config = model.config
    with pytest.raises(
        TypeError, match=rf"Dinov2Attention .* {owners} of its parts .* 5\.9 or newer"
    ):
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


@pytest.mark.parametrize(
    ("model", "culprit", "reason"),
    [
        (
            lambda: timm_model("swin_tiny_patch4_window7_224"),
            "timm.models.swin_transformer.WindowAttention",
            "windows",
        ),
        (
            lambda: timm_model("beit_base_patch16_224", depth=1),
            "timm.models.beit.Attention",
            "relative position bias",
        ),
        (
            lambda: timm_model("vit_relpos_small_patch16_224", depth=1),
            "timm.models.vision_transformer_relpos.RelPosAttention",
            "relative position bias",
        ),
        (
            lambda: hf_model("BeitConfig", "BeitModel"),
            "Beit",
            "relative position bias",
        ),
        (
            hf_swin,
            "Swin",
            "windows",
        ),
        (
            lambda: nn.TransformerEncoderLayer(8, 2),
            "torch.nn.modules.activation.MultiheadAttention",
            "not known",
        ),
        (lambda: nn.Linear(2, 2), "torch.nn.modules.linear.Linear", "not known"),
    ],
)
def test_unsupported_models_are_refused(
    model: Callable[[], nn.Module], culprit: str, reason: str
) -> None:
    with pytest.raises(TypeError, match=reason) as caught:
        patch(model(), rule=COARSE)
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
    unpatch(model)
    assert not any(block.attn.fused_attn for block in model.blocks)
    assert torch.equal(run(model, pixels), full)
