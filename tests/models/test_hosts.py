"""Models: hosts found, attention replaced and restored, layers recorded, weights loaded or refused."""

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

if find_spec("timm") is None or find_spec("transformers") is None:
    pytest.skip("needs timm and transformers: pip install 'bmfa[models]'", allow_module_level=True)

from bmfa import Grid, rules, screened_attention
from bmfa.evidence.bench.long_models import load_long
from bmfa.models import Preprocessing, embedded, hub, load_model, patch, record, unpatch
from bmfa.models.hosts import find_host
from bmfa.models.hosts.base import replacements_in
from bmfa.models.patching import layer_indices
from bmfa.models.screened_layer import screened_layers
from bmfa.packages import load_package

EXACT = rules.ExactGap(0.0)
COARSE = rules.GlobalMean()
VIT = {"img_size": 32, "patch_size": 4, "depth": 3, "embed_dim": 24, "num_heads": 3}
EVA = {"img_size": 32, "patch_size": 4, "depth": 3, "embed_dim": 48, "num_heads": 3}
HF = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 4,
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors: threads that wait for each other take longer than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def timm_model(name: str, **options: Any) -> nn.Module:
    """A small timm model with random weights."""
    model: nn.Module = load_package("timm").create_model(name, num_classes=5, **options)
    return model


def hf_model(config: str, model: str, **options: Any) -> nn.Module:
    """A small transformers model with random weights."""
    transformers = load_package("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**HF | options))
    return made


class Dinov2Attention(nn.Module):
    """Attention as transformers nests it up to 5.17: a part of it owns the configuration."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.attention = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attention(*args, **kwargs)


def nested_model() -> nn.Module:
    """DINOv2 in the nested layout, whatever the version; the part needs another class name."""
    model = hf_model("Dinov2Config", "Dinov2Model")
    family = "dinov2_with_registers"
    module = load_package(f"transformers.models.{family}.modeling_{family}")
    for layer in list(model.modules()):
        if type(layer).__name__ == "Dinov2Layer":
            part = module.Dinov2WithRegistersAttention(model.config)
            layer.attention = Dinov2Attention(part)
    return model


def hf_swin() -> nn.Module:
    """A model with windows."""
    transformers = load_package("transformers")
    config = transformers.SwinConfig(image_size=32, embed_dim=8, depths=[1], num_heads=[2])
    model: nn.Module = transformers.SwinModel(config)
    return model


def clip_model(kind: str) -> nn.Module:
    """Both towers of CLIP or SigLIP, small."""
    transformers = load_package("transformers")
    text = {k: v for k, v in HF.items() if k not in ("image_size", "patch_size")}
    text |= {"vocab_size": 50, "max_position_embeddings": 8}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=HF)
    model: nn.Module = getattr(transformers, f"{kind}Model")(config)
    return model


TIMM: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "vit": (1, lambda: timm_model("vit_tiny_patch16_224", **VIT, dynamic_img_size=True)),
    "deit-distilled": (
        2,
        lambda: timm_model("deit_tiny_distilled_patch16_224", **VIT, dynamic_img_size=True),
    ),
    "registers": (
        5,
        lambda: timm_model(
            "vit_tiny_patch16_224",
            **VIT,
            dynamic_img_size=True,
            reg_tokens=4,
            qk_norm=True,
            init_values=0.5,
        ),
    ),
    "no-class-token": (
        0,
        lambda: timm_model(
            "vit_tiny_patch16_224",
            **VIT,
            dynamic_img_size=True,
            class_token=False,
            global_pool="avg",
        ),
    ),
    "eva": (1, lambda: timm_model("eva02_tiny_patch14_224", **EVA, dynamic_img_size=True)),
    "dinov3": (5, lambda: timm_model("vit_small_patch16_dinov3", **EVA, dynamic_img_size=True)),
}
TRANSFORMERS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "hf-vit": (1, lambda: hf_model("ViTConfig", "ViTForImageClassification")),
    "hf-deit": (2, lambda: hf_model("DeiTConfig", "DeiTForImageClassification")),
    "hf-dinov2": (1, lambda: hf_model("Dinov2Config", "Dinov2ForImageClassification")),
    "hf-nested": (1, nested_model),
    "hf-registers": (
        4,
        lambda: hf_model(
            "Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", num_register_tokens=3
        ),
    ),
    "hf-dinov3": (
        3,
        lambda: hf_model(
            "DINOv3ViTConfig",
            "DINOv3ViTModel",
            num_register_tokens=2,
            num_attention_heads=2,
        ),
    ),
    "hf-clip": (1, lambda: hf_model("CLIPVisionConfig", "CLIPVisionModel")),
    "hf-siglip": (0, lambda: hf_model("SiglipVisionConfig", "SiglipVisionModel")),
}
MODELS = TIMM | TRANSFORMERS | {"embedded": (1, embedded.EmbeddedViT)}
# How each host is asked to take pictures of another size than it was built for.
SIZED = {name: {} for name in TIMM} | {
    "hf-vit": {"interpolate_pos_encoding": True},
    "hf-deit": {"interpolate_pos_encoding": True},
    "hf-dinov2": {},
    "hf-nested": {},
    "hf-registers": {},
    "hf-dinov3": {},
    "hf-clip": {"interpolate_pos_encoding": True},
    "hf-siglip": {"interpolate_pos_encoding": True},
}


def made(name: str, seed: int = 0) -> nn.Module:
    """The model in evaluation mode, its weights large enough for attention to differ from a mean."""
    torch.manual_seed(seed)
    model = MODELS[name][1]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def pictures(height: int = 32, width: int = 32, seed: int = 1) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, pixels: Tensor, **options: Any) -> Tensor:
    """The main output of whatever host."""
    with torch.no_grad():
        output = model(pixels, **options)
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            return getattr(output, name)
    return output


def size_of(name: str) -> int:
    return 112 if name == "embedded" else 32


@pytest.fixture(params=sorted(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_exact_gap_zero_gives_the_hosts_output_and_unpatch_its_bits(name: str) -> None:
    model, pixels = made(name), pictures(size_of(name), size_of(name))
    full = run(model, pixels)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert patch(model, rule=EXACT, layers="all") is model
    exact = run(model, pixels)
    torch.testing.assert_close(exact, full, rtol=1e-4, atol=1e-4 * float(full.abs().max()))
    patch(model, rule=COARSE, layers="all")
    assert (run(model, pixels) - full).abs().max() > 1e-3 * full.abs().max()
    assert list(model.state_dict()) == list(before)
    unpatch(model)
    assert torch.equal(run(model, pixels), full)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not screened_layers(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_the_prefix_is_found(name: str) -> None:
    model = made(name)
    host = find_host(model)
    assert host.prefix == MODELS[name][0]
    patch(model, rule=COARSE, layers=[0, 2])
    side = size_of(name)
    with record(model) as recording:
        run(model, pictures(side, side))
    assert sorted(recording.layers) == [0, 2]
    tree = recording[2].trees[0]
    grid = Grid(14, 14) if name == "embedded" else Grid(8, 8)
    assert tree.grid == grid and tree.shape[2] == grid.size + host.prefix


@pytest.mark.parametrize("name", sorted(SIZED))
@pytest.mark.parametrize("size", [(40, 40), (24, 48), (36, 16)])
def test_other_sizes_and_aspect_ratios(name: str, size: tuple[int, int]) -> None:
    model, pixels = made(name), pictures(*size)
    full = run(model, pixels, **SIZED[name])
    patch(model, rule=EXACT, layers="all")
    with record(model) as recording:
        exact = run(model, pixels, **SIZED[name])
    torch.testing.assert_close(exact, full, rtol=1e-4, atol=1e-4 * float(full.abs().max()))
    assert recording[1].trees[0].grid == Grid(size[0] // 4, size[1] // 4)
    run(model, pictures(), **SIZED[name])  # and back again


def test_patching_twice_equals_once(name: str) -> None:
    model, pixels = made(name), pictures(size_of(name), size_of(name))
    full = run(model, pixels)
    once = run(patch(model, rule=COARSE, layers="last-2"), pixels)
    patch(model, rule=EXACT, layers="all")
    twice = run(patch(model, rule=COARSE, layers="last-2"), pixels)
    assert torch.equal(once, twice)
    assert len(screened_layers(model)) == 2
    assert torch.equal(run(unpatch(unpatch(model)), pixels), full)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_are_patched_on_their_own(
    name: str, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    model, pixels = made(name), pictures(size_of(name), size_of(name))
    full = run(model, pixels)
    patch(model, rule=COARSE, layers="last-2")
    screened = run(model, pixels)
    other = duplicate(model)
    assert torch.equal(run(other, pixels), screened)
    assert torch.equal(run(unpatch(other), pixels), full)
    assert torch.equal(run(model, pixels), screened)
    assert torch.equal(run(unpatch(model), pixels), full)


def test_a_pickle_runs_in_another_process(tmp_path: Path) -> None:
    cases = []
    for name in ("vit", "hf-vit"):
        model = patch(made(name), rule=COARSE, layers="last-2")
        cases.append((model, pictures(), run(model, pictures())))
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
    model, pixels = made("vit"), pictures()
    seen: list[Tensor] = []
    model.blocks[2].attn.proj.register_forward_hook(lambda m, x, y: seen.append(x[0]))
    inputs: list[Tensor] = []
    model.blocks[2].attn.qkv.register_forward_hook(lambda m, x, y: inputs.append(y))
    rule = rules.Optimal(0.01)
    run(patch(model, rule=rule, layers=[2]), pixels)
    q, k, v = inputs[0].view(2, 65, 3, 3, 8).permute(2, 0, 3, 1, 4)
    expected = screened_attention(q, k, v, grid=Grid(8, 8), prefix=1, rule=rule).output
    torch.testing.assert_close(seen[0], expected.transpose(1, 2).reshape(2, 65, 24))


def test_a_host_that_spells_its_softmax_out_is_served_too() -> None:
    model, pixels = made("vit"), pictures()
    for block in model.blocks:
        block.attn.fused_attn = False
    full = run(model, pixels)
    patch(model, rule=EXACT, layers="all")
    torch.testing.assert_close(run(model, pixels), full, rtol=1e-4, atol=1e-4)
    unpatch(model)
    assert not any(block.attn.fused_attn for block in model.blocks)
    assert torch.equal(run(model, pixels), full)


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_the_text_tower_is_left_alone(kind: str) -> None:
    model = clip_model(kind).eval()
    patch(model, rule=COARSE, layers="all")
    assert len(screened_layers(model)) == 3
    assert len(screened_layers(model.vision_model)) == 3
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "pixel_values": pictures()}
    coarse = model(**inputs)
    exact = unpatch(model)(**inputs)
    assert torch.equal(coarse.text_embeds, exact.text_embeds)
    assert not torch.equal(coarse.image_embeds, exact.image_embeds)


def own_configs(model: nn.Module) -> list[nn.Module]:
    """The modules whose configuration is not the model's."""
    return [m for m in model.modules() if getattr(m, "config", model.config) is not model.config]


def test_only_the_part_that_calls_attention_gets_a_configuration_of_its_own() -> None:
    model = made("hf-nested")
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
    model = made("hf-nested")
    attention = next(module for module in model.modules() if isinstance(module, Dinov2Attention))
    attention.attention = nn.Sequential(nn.Identity(), nn.Identity())
    for part in attention.attention[:owners]:
        part.config = model.config
    with pytest.raises(
        TypeError, match=rf"Dinov2Attention .* {owners} of its parts .* from 5\.9 on"
    ):
        patch(model, rule=COARSE, layers="all")
    assert not screened_layers(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_gradients_flow_through_the_trees() -> None:
    model = patch(made("vit"), rule=rules.Optimal(0.01), layers="all").train()
    model(pictures()).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_wrapped_model_is_found() -> None:
    wrapped = nn.Sequential(nn.Identity(), made("vit"))
    full = run(wrapped, pictures())
    assert not torch.equal(run(patch(wrapped, rule=COARSE, layers="all"), pictures()), full)
    assert torch.equal(run(unpatch(wrapped), pictures()), full)
    with pytest.raises(ValueError, match="2 vision towers"):
        patch(nn.ModuleList([made("vit"), made("hf-vit")]))


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
def test_what_cannot_be_served_is_refused(
    model: Callable[[], nn.Module], culprit: str, reason: str
) -> None:
    with pytest.raises(TypeError, match=reason) as caught:
        patch(model(), rule=COARSE)
    assert culprit in str(caught.value)
    assert "timm VisionTransformer" in str(caught.value)


def test_parallel_blocks_and_an_unknown_attention_are_refused() -> None:
    parallel = timm_model(
        "vit_tiny_patch16_224",
        **VIT,
        block_fn=load_package("timm.models.vision_transformer").ParallelScalingBlock,
    )
    with pytest.raises(TypeError, match=r"ParallelScalingBlock.*not a module of its own"):
        patch(parallel)
    model = made("vit")
    model.blocks[1].attn.__class__ = type("OwnAttention", (type(model.blocks[1].attn),), {})
    with pytest.raises(TypeError, match="OwnAttention"):
        patch(model)
    with pytest.raises(TypeError, match=r"pass the torch\.nn\.Module"):
        patch("vit")


def test_layers() -> None:
    assert layer_indices("all", 3) == (0, 1, 2)
    assert layer_indices("last-2", 12) == (10, 11)
    assert layer_indices([5, 1, 5], 12) == (1, 5)
    for bad in ("last-13", "last-0", "first-2", "", []):
        with pytest.raises(ValueError, match="layers is"):
            layer_indices(bad, 12)
    with pytest.raises(ValueError, match="from -12 to 11"):
        layer_indices([12], 12)


def test_options_are_checked_before_anything_is_changed() -> None:
    model = made("vit")
    for options, text in (
        ({"rule": "gamma:x"}, "gamma:x"),
        ({"rule": COARSE, "error": 0.1}, "rule and error"),
        ({"error": 0.1, "form": "repeated"}, r"rule=rules\.Optimal\(error=0\.1\)"),
        ({"leaves": 9, "max_depth": 2}, r"rule=rules\.Optimal\(leaves=9\)"),
        ({"backend": "magic"}, "magic"),
        ({"max_depth": -1}, "max_depth"),
        ({"fallback": -1.0}, "fallback"),
        ({"layers": "last-9"}, "last-9"),
    ):
        with pytest.raises(ValueError, match=text):
            patch(model, **options)
    with pytest.raises(TypeError, match=r"pass one of bmfa\.rules"):
        patch(model, rule=3)
    assert not screened_layers(model)
    patch(model, rule=rules.Optimal(leaves=0.25), layers="all", fallback=0.01)
    with record(model) as recording:
        run(model, pictures())
    assert recording.leaf_ratio <= 0.25
    assert any(stats.fallback for stats in recording[0].stats)


def test_what_a_screened_layer_cannot_do_it_says() -> None:
    model = patch(timm_model("vit_tiny_patch16_224", **VIT, attn_drop_rate=0.1), layers="all")
    with pytest.raises(ValueError, match=r"dropout of 0.1.*model.eval"):
        model.train()(pictures())
    run(model.eval(), pictures())
    with pytest.raises(ValueError, match="drops or merges tokens"):
        model.blocks(torch.randn(2, 30, 24))
    patch(model, layers="all")
    with pytest.raises(RuntimeError, match="call the model itself"):
        model.blocks(torch.randn(2, 65, 24))


def test_masks_of_padding_are_kept_and_others_refused() -> None:
    model = patch(made("vit"), rule=EXACT, layers=[0])
    run(model, pictures())
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


def test_records_hold_trees_errors_and_attention() -> None:
    model, pixels = made("registers"), pictures()
    with pytest.raises(ValueError, match="not patched"), record(model):
        pass
    patch(model, rule=rules.Optimal(0.005), layers="last-2")
    with record(model, attention=True) as recording:
        run(model, pixels)
        run(model, pixels)
    layer = recording[2]
    assert len(layer.trees) == len(layer.errors) == len(layer.attention) == 2
    assert layer.errors[0].shape == layer.leaf_ratios[0].shape == (2, 3, 69)
    for weights in (layer.attention[0], layer.full_attention[0]):
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 69))
    spatial, coarse = (w[..., 5:] for w in (layer.full_attention[0], layer.attention[0]))
    p, q = (w / w.sum(-1, keepdim=True) for w in (spatial, coarse))
    torch.testing.assert_close((q * (q / p).log()).sum(-1), layer.errors[0], rtol=1e-2, atol=1e-5)
    ratios = torch.cat([r for index in (1, 2) for r in recording[index].leaf_ratios])
    assert recording.leaf_ratio == pytest.approx(float(ratios.mean()))
    with pytest.raises(KeyError, match="recorded are 1, 2"):
        recording[0]
    run(model, pixels)
    assert len(layer.trees) == 2


def test_recorded_attention_is_what_the_layer_used() -> None:
    model, used = made("vit"), []
    patch(model, rule=rules.Optimal(leaves=0.3), layers=[1])
    with record(model) as recording:
        run(model, pictures())
    middle = float(recording[1].errors[0].median())
    patch(model, rule=rules.Optimal(leaves=0.3), layers=[1], fallback=middle)
    screen = screened_layers(model)[0]
    attend = type(screen).__call__

    def watched(self: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output = attend(self, query, key, value, **options)
        used.append((value, output))
        return output

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(screen), "__call__", watched)
        with record(model, attention=True) as recording:
            run(model, pictures())
    (value, output), layer = used[0], recording[1]
    recomputed = layer.stats[0].fallback
    assert 0 < recomputed < output.shape[:3].numel()
    torch.testing.assert_close(layer.attention[0] @ value, output, rtol=1e-4, atol=1e-5)
    same = (layer.attention[0] == layer.full_attention[0]).all(-1)
    assert int(same.sum()) == recomputed


def test_attention_over_tiles_has_no_weights_to_record() -> None:
    model = patch(made("vit"), error=0.5, form="tiled", layers=[1])
    with record(model) as recording:
        run(model, pictures())
    assert recording[1].stats[0].form == "tiled"
    with (
        record(model, attention=True) as recording,
        pytest.raises(ValueError, match=r"layer 1 attends over tiles.*record\(model\) without"),
    ):
        run(model, pictures())
    patch(model, error=0.5, layers=[1])  # "auto" is dense on a grid this small
    with record(model, attention=True) as recording:
        run(model, pictures())
    assert recording[1].stats[0].form == "dense"
    assert torch.equal(recording[1].attention[0], recording[1].full_attention[0])


def test_coins_differ_between_layers() -> None:
    model = patch(made("vit"), rule="random-quadrants:0.5", layers="all")
    with record(model) as recording:
        run(model, pictures())
    first, second = (recording[index].trees[0].split for index in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("package", ["timm", "torchvision", "transformers", "huggingface_hub"])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    words = rf"{package} is not installed; run: pip install 'bmfa\[models\]'"
    with pytest.raises(ModuleNotFoundError, match=words):
        load_package(package)


def save_safetensors(model: nn.Module, path: Path) -> Path:
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    load_package("safetensors.torch").save_file(state, path)
    return path


def test_timm_weights_from_files(tmp_path: Path) -> None:
    source = load_package("timm").create_model("deit_tiny_patch16_224")
    file = save_safetensors(source.half(), tmp_path / "half.safetensors")
    loaded = load_model("timm:deit_tiny_patch16_224", file)
    assert loaded.preprocess == Preprocessing((224, 224), 0.9)
    assert loaded.classes is not None and loaded.classes[1].startswith("goldfish")
    assert not loaded.model.training
    assert torch.equal(loaded.model.pos_embed, source.pos_embed.float())
    torch.save({"model": source.state_dict()}, tmp_path / "checkpoint.pth")
    again = load_model(
        "timm:deit_tiny_patch16_224", tmp_path / "checkpoint.pth", crop_pct=0.875, img_size=64
    )
    assert again.preprocess.crop_pct == 0.875
    assert again.logits(pictures(64, 64)).shape == (2, 1000)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    source = load_package("timm").create_model("deit_tiny_patch16_224", depth=1)
    name = "timm:deit_tiny_patch16_224"
    short = save_safetensors(source, tmp_path / "short.safetensors")
    with pytest.raises(ValueError, match=r"missing, first blocks\.1\.norm1\.weight; none unexp"):
        load_model(name, short)
    torch.save({"head.weight": torch.ones(2)}, tmp_path / "head.pt")
    with pytest.raises(ValueError, match="missing, first cls_token"):
        load_model(name, tmp_path / "head.pt")
    torch.save(source, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="refused"):
        load_model(name, tmp_path / "model.pt")
    (tmp_path / "torn.safetensors").write_bytes(short.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a readable safetensors"):
        load_model(name, tmp_path / "torn.safetensors")
    (tmp_path / "text.pth").write_text("weights")
    with pytest.raises(ValueError, match=r"text\.pth"):
        load_model(name, tmp_path / "text.pth")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth"):
        load_model(name, tmp_path / "nowhere.pth")


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth", "weights.bin"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"version https://lfs.example/spec/v1\noid sha256:0",
            "text file that begins with 'version",
        ),
        (
            "<!doctype html>\n<p>Gr\u00fc\u00dfe</p>".encode(),
            "text file that begins with '<!doctype",
        ),
        (b"", "is empty"),
    ],
)
def test_weights_that_are_text_are_refused_with_a_way_out(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ValueError, match=f"{name} is.*{words.removeprefix('is ')}.*pass a safetensors"
    ):
        load_model("embedded", tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"is a folder; pass a safetensors file"):
        load_model("embedded", tmp_path)


def test_a_folder_whose_weights_are_text_is_refused(tmp_path: Path) -> None:
    made("hf-vit").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://lfs.example/spec/v1\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is a text file that begins with"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("deit_tny_patch16_224", "deit_tiny_patch16_224"),
        ("vit-base-patch16-224", "vit_base_patch16_224"),
        ("vit_base_patch16_224.nope", "vit_base_patch16_224.augreg"),
        ("nope", "deit_tiny_patch16_224"),
    ],
)
def test_names_that_timm_does_not_have_meet_close_ones(name: str, offered: str) -> None:
    with pytest.raises(ValueError, match=f"timm has no model '{name}'.*such as .*{offered}"):
        load_model(f"timm:{name}")
    with pytest.raises(ValueError, match=f"timm has no model '{name}'.*such as .*{offered}"):
        load_long(f"timm:{name}", size=224)


def test_sizes_that_patches_do_not_fill_are_refused_with_those_that_fit(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(load_package("timm").create_model("vit_tiny_patch16_224").state_dict(), weights)
    fitting = r"multiple of 16, such as 96 or 112"
    for size in (100, (96, 100)):
        with pytest.raises(ValueError, match=fitting):
            load_model("timm:vit_tiny_patch16_224", weights, img_size=size)
    with pytest.raises(ValueError, match=r"such as 16$"):
        load_model("timm:vit_tiny_patch16_224", weights, img_size=9)
    loaded = load_model("timm:vit_tiny_patch16_224", weights, img_size=(96, 112))
    assert loaded.logits(pictures(96, 112)).shape == (2, 1000)
    made("hf-vit").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="multiple of 4, such as 24 or 28"):
        load_model(str(tmp_path), img_size=25)
    with pytest.raises(ValueError, match="img_size is 100; embedded accepts only 112"):
        load_model("embedded", img_size=100)
    assert load_model("embedded", img_size=112).preprocess.size == (112, 112)
    with pytest.raises(ValueError, match=fitting):
        load_long("timm:vit_tiny_patch16_224", size=100)
    for head_dim in (None, 16):
        with pytest.raises(ValueError, match="multiple of 8, such as 96 or 104"):
            load_long("embedded", size=100, head_dim=head_dim)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_bars_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: bool
) -> None:
    made("hf-deit").save_pretrained(tmp_path)
    logging = load_package("transformers.utils.logging")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    logging.enable_progress_bar()
    load_model(f"hf:{tmp_path}")
    assert ("%|" in stderr.getvalue()) == terminal
    assert logging.is_progress_bar_enabled()  # the process's own choice is left as it was


def test_transformers_folders(tmp_path: Path) -> None:
    model = made("hf-deit")
    model.save_pretrained(tmp_path)
    settings = {
        "size": {"shortest_edge": 40},
        "do_center_crop": True,
        "crop_size": {"height": 32, "width": 32},
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    for name in (f"hf:{tmp_path}", str(tmp_path)):
        loaded = load_model(name)
        assert torch.equal(loaded.logits(pictures()), run(model, pictures()))
    half = (0.5, 0.5, 0.5)
    assert loaded.preprocess == Preprocessing((32, 32), 0.8, "bilinear", half, half)
    assert loaded.classes == ("LABEL_0", "LABEL_1")
    weights = save_safetensors(made("hf-deit", seed=3), tmp_path / "other.safetensors")
    assert not torch.equal(load_model(name, weights).logits(pictures()), run(model, pictures()))
    larger = load_model(name, img_size=(40, 24))
    assert larger.preprocess.size == (40, 24)
    assert larger.logits(pictures(40, 24)).shape == (2, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(f"hf:{tmp_path / 'empty'}")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(f"hf:{tmp_path / 'nowhere'}")


@pytest.mark.skipif(not embedded.WEIGHTS.is_file(), reason="the embedded weights are not built")
def test_the_embedded_model_is_loaded_by_name() -> None:
    loaded = load_model("embedded")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 112, 112, 3), dtype=np.uint8)
    expected = embedded.preprocess(pixels)
    torch.testing.assert_close(loaded.preprocess(pixels[0])[None], expected)
    assert loaded.logits(expected).shape == (1, 10)


def test_without_a_network_the_error_says_what_to_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    monkeypatch.setattr(load_package("huggingface_hub.constants"), "HF_HUB_CACHE", str(tmp_path))
    url = "https://huggingface.co/timm/deit_tiny_patch16_224.fb_in1k/resolve/main/model.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        load_model("timm:deit_tiny_patch16_224")
    assert url in str(caught.value) and "weights='PATH/model.safetensors'" in str(caught.value)
    with pytest.raises(FileNotFoundError, match="from https://huggingface"):
        load_model("hf:facebook/deit-tiny-patch16-224")
    with pytest.raises(ValueError, match="timm has no model 'nothing'"):
        load_model("timm:nothing")
    with pytest.raises(ValueError, match="pass embedded, timm:NAME"):
        load_model("resnet")


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (256, 256), (57, 91)])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0])
def test_preprocessing_is_timms_but_for_the_corner(size: tuple[int, int], crop_pct: float) -> None:
    timm_data = load_package("timm.data")
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = load_package("PIL.Image").fromarray(pixels)
    transform = timm_data.create_transform((3, 64, 64), interpolation="bicubic", crop_pct=crop_pct)
    resize, centre, *normalise = transform.transforms
    assert type(centre).__name__ == "CenterCrop"  # which rounds half a pixel to even
    expected = resize(image)
    left, top = (expected.width - 64) // 2, (expected.height - 64) // 2
    expected = expected.crop((left, top, left + 64, top + 64))
    for step in normalise:
        expected = step(expected)
    mine = Preprocessing((64, 64), crop_pct)(pixels)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("margin", range(5))
def test_an_odd_margin_leaves_its_last_pixel_below_and_to_the_right(margin: int) -> None:
    pixels = np.arange((8 + margin) * 8, dtype=np.uint8).reshape(8 + margin, 8, 1).repeat(3, 2)
    for turned in (pixels, pixels.transpose(1, 0, 2)):
        shown = Preprocessing((8, 8), 1.0, mean=(0.0,) * 3, std=(1 / 255,) * 3)(turned)
        kept = pixels[margin // 2 : margin // 2 + 8, :, 0]
        expected = kept if turned is pixels else kept.T
        np.testing.assert_allclose(shown[0].numpy(), expected, rtol=1e-6)


def test_preprocessing_of_other_shapes() -> None:
    pixels = np.zeros((50, 200, 3), np.uint8)
    assert Preprocessing((32, 48), 0.9)(pixels).shape == (3, 32, 48)
    assert Preprocessing((32, 48), squash=True)(pixels).shape == (3, 32, 48)
    settings = {"size": {"height": 24, "width": 24}, "do_resize": True}
    assert Preprocessing.of_transformers(settings).squash
    with pytest.raises(ValueError, match="crop_pct"):
        Preprocessing(crop_pct=1.5)
    with pytest.raises(ValueError, match="bicubic"):
        Preprocessing(interpolation="cubic")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_patched_model_compiles_for_one_size_after_another() -> None:
    model = timm_model("vit_tiny_patch16_224", **VIT, dynamic_img_size=True).eval()
    full = copy.deepcopy(model)
    patch(model, error=0.1, layers="all")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for size in (32, 64, 48):
            pixels = pictures(size, size)
            torch.testing.assert_close(compiled(pixels), full(pixels))
    torch.compiler.reset()
