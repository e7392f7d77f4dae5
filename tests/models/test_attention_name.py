"""`attn_implementation="bmfa"` in transformers, without a call of `patch`."""

import sys
from importlib import import_module, reload
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install 'bmfa[models]'", allow_module_level=True)

import bmfa
from bmfa.models.hosts.transformers import register_with_transformers
from bmfa.packages import call_after_import, load_package
from models.host_models import HF

bmfa.register_attention()
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
    """The grid and prefix of every call of our attention function."""
    from bmfa.models.hosts import transformers

    calls: list[Any] = []
    original = transformers.screened_attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append((kwargs["grid"], kwargs["prefix"]))
        return original(*args, **kwargs)

    monkeypatch.setattr(transformers, "screened_attention", spy)
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


def test_text_towers_run_dense() -> None:
    transformers = load_package("transformers")
    text = {k: v for k, v in HF.items() if k not in ("image_size", "patch_size")}
    text |= {"vocab_size": 50, "max_position_embeddings": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=HF)
    outputs = []
    for name in ("bmfa", "sdpa"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=name).eval()
        pixels = torch.ones(2, 3, SMALL, SMALL)
        mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
        with torch.no_grad():
            outputs.append(model(torch.ones(2, 8, dtype=torch.long), pixels, attention_mask=mask))
    assert torch.equal(outputs[0].text_embeds, outputs[1].text_embeds)
    assert torch.equal(outputs[0].image_embeds, outputs[1].image_embeds)


def test_an_unknown_model_runs_dense() -> None:
    transformers = load_package("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = transformers.BertConfig(**sizes, intermediate_size=48, vocab_size=50)
    outputs = []
    for name in ("bmfa", "sdpa"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=name).eval()
        with torch.no_grad():
            outputs.append(model(torch.arange(12)[None]).last_hidden_state)
    assert torch.equal(*outputs)


def test_such_a_model_can_be_patched_and_restored() -> None:
    model = make(image_size=SMALL)
    full = run(model, SMALL, SMALL)
    bmfa.patch(model, layers="all")
    assert torch.equal(run(model, SMALL, SMALL), full)
    bmfa.patch(model, layers="all", leaves=2, form="tiled")
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


def test_the_name_is_registered_if_transformers_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = load_package("transformers.modeling_utils")
    names = modeling.ALL_ATTENTION_FUNCTIONS
    monkeypatch.delitem(modeling.AttentionInterface._global_mapping, "bmfa")
    assert "bmfa" not in names.valid_keys()
    register_with_transformers()  # as `import bmfa.models` does
    assert "bmfa" in names.valid_keys()


def test_a_function_is_called_after_the_first_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "laterpackage").mkdir()
    (tmp_path / "laterpackage" / "__init__.py").write_text("")
    (tmp_path / "laterpackage" / "part.py").write_text("value = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders, seen = list(sys.meta_path), []
    call_after_import(
        "laterpackage.part", lambda: seen.append(sys.modules["laterpackage.part"].value)
    )
    import_module("laterpackage")
    assert not seen
    part = import_module("laterpackage.part")
    assert seen == [3] and sys.meta_path == finders
    reload(part)
    assert seen == [3]
    call_after_import("laterpackage.part", lambda: seen.append(4))
    assert seen == [3, 4]
    for name in ("laterpackage", "laterpackage.part"):
        sys.modules.pop(name)
    call_after_import("laterpackage.missing", lambda: seen.append(5))
    with pytest.raises(ModuleNotFoundError, match=r"laterpackage\.missing"):
        import_module("laterpackage.missing")
    assert seen == [3, 4] and sys.meta_path == finders
    sys.modules.pop("laterpackage")
