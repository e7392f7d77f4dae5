"""`attn_implementation="bmfa"` in transformers, without a call of `patch`."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bmfa
from bmfa.packages import load_package
from models.host_models import HF

bmfa.models.register_attention()
# Random weights miss the target of some layers, which warns once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:screened_attention measured:UserWarning")
# 2,304 tokens use tiles, 64 run dense.
LARGE, SMALL = 192, 32


def make(config: str = "ViTConfig", name: str = "bmfa", **options: Any) -> nn.Module:
    transformers = load_package("transformers")
    torch.manual_seed(0)
    built = getattr(transformers, config)(**HF | {"image_size": LARGE} | options)
    model: nn.Module = transformers.AutoModel.from_config(built, attn_implementation=name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def run(model: nn.Module, height: int = LARGE, width: int = LARGE, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(1, 3, height, width, generator=generator)
    with torch.no_grad():
        output: Tensor = model(pixel_values=pixels, **options).last_hidden_state
    return output


def tiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grid and prefix of every call in which tiles are expected to be faster."""
    from bmfa.models import screened_layer

    calls: list[Any] = []
    original = screened_layer.screened_attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not result.stats.reason.startswith("auto: dense attention"):  # by the shapes
            calls.append((kwargs["grid"], kwargs["prefix"]))
        return result

    monkeypatch.setattr(screened_layer, "screened_attention", spy)
    return calls


@pytest.mark.parametrize(
    ("config", "options", "special"),
    [
        ("ViTConfig", {}, 1),
        ("Dinov2WithRegistersConfig", {"num_register_tokens": 3}, 4),
        ("SiglipVisionConfig", {}, 0),
        ("YolosConfig", {"image_size": [LARGE, LARGE], "num_detection_tokens": 5}, 6),
    ],
)
def test_tiles_run_by_default(
    config: str, options: dict[str, Any], special: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tiled_calls(monkeypatch)
    model, dense = make(config, **options), make(config, "sdpa", **options)
    mine, full = run(model), run(dense)
    assert calls == [(bmfa.Grid(48, 48), special)] * 3
    # The default target is an error of 0.03 in every layer; three layers may add up, norms amplify.
    change = float((mine - full).norm() / full.norm())
    assert change < 0.3
    assert change > 0.0 or config != "ViTConfig"  # attention may need all tiles, and is exact then


def test_dense_sizes_have_the_bits_of_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tiled_calls(monkeypatch)
    model, dense = make(image_size=SMALL), make(name="sdpa", image_size=SMALL)
    assert torch.equal(run(model, SMALL, SMALL), run(dense, SMALL, SMALL))
    # The grid of an image that is neither square nor of the size of the configuration is unknown.
    options = {"interpolate_pos_encoding": True}
    assert torch.equal(run(model, 160, 256, **options), run(dense, 160, 256, **options))
    assert not calls
    run(model, LARGE, LARGE, **options)
    assert {grid for grid, _ in calls} == {bmfa.Grid(48, 48)}


def test_the_grid_of_the_configuration_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tiled_calls(monkeypatch)
    run(make(image_size=(192, 256)), 192, 256)
    assert calls == [(bmfa.Grid(48, 64), 1)] * 3


def test_text_towers_and_unknown_models_run_dense() -> None:
    transformers = load_package("transformers")
    text = {k: v for k, v in HF.items() if k not in ("image_size", "patch_size")}
    text |= {"vocab_size": 50}
    small = text | {"max_position_embeddings": 8}
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": mask}
    pixels = {"pixel_values": torch.ones(2, 3, SMALL, SMALL)}
    for config, shown, names in (
        (
            transformers.CLIPConfig(text_config=small, vision_config=HF),
            inputs | pixels,
            ("text_embeds", "image_embeds"),
        ),
        (transformers.BertConfig(**text), inputs, ("last_hidden_state",)),
        (
            transformers.BertConfig(**text),
            {"input_ids": torch.arange(12)[None]},
            ("last_hidden_state",),
        ),
    ):
        outputs = []
        for name in ("bmfa", "sdpa"):
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(config, attn_implementation=name).eval()
            with torch.no_grad():
                outputs.append(model(**shown))
        for name in names:
            assert torch.equal(*(getattr(output, name) for output in outputs))


def test_such_a_model_can_be_patched_and_restored() -> None:
    model = make(image_size=SMALL)
    full = run(model, SMALL, SMALL)
    bmfa.patch(model, layers="all")
    assert torch.equal(run(model, SMALL, SMALL), full)
    bmfa.patch(model, layers="all", leaves=2, allow_dense=False)
    assert not torch.equal(run(model, SMALL, SMALL), full)
    assert torch.equal(run(bmfa.unpatch(model), SMALL, SMALL), full)


def test_gradients_flow() -> None:
    model = make()
    model(torch.randn(1, 3, LARGE, LARGE)).last_hidden_state.square().mean().backward()
    used = [p.grad for name, p in model.named_parameters() if "pooler" not in name]
    assert all(grad is not None and grad.isfinite().all() for grad in used)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled() -> None:
    model = make()
    expected = run(model)
    torch.compiler.reset()
    torch.testing.assert_close(
        run(torch.compile(model, fullgraph=True, backend="eager")), expected, rtol=1e-4, atol=1e-4
    )
    torch.compiler.reset()


def test_importing_registers_nothing() -> None:
    code = (
        "import sys, bmfa.models, transformers\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as names\n"
        "print('bmfa' in names.valid_keys(), [type(f).__name__ for f in sys.meta_path])\n"
        "bmfa.models.register_attention()\n"
        "print('bmfa' in names.valid_keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("False") and "AfterImport" not in first and second == "True"
