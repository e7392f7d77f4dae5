"""Models by name: weights loaded or refused, sizes, folders, downloads."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

if find_spec("timm") is None or find_spec("transformers") is None:
    pytest.skip("needs timm and transformers: pip install 'bmfa[models]'", allow_module_level=True)

from bmfa.evidence.bench.inputs import load_any_size
from bmfa.models import Preprocessing, embedded, load_model, loading
from bmfa.packages import load_package
from models.host_models import (
    images,
    make_model,
    run,
)


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
    assert again.logits(images(64, 64)).shape == (2, 1000)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    source = load_package("timm").create_model("deit_tiny_patch16_224", depth=1)
    name = "timm:deit_tiny_patch16_224"
    short = save_safetensors(source, tmp_path / "short.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(short.read_bytes()[:100])
    torch.save({"head.weight": torch.ones(2)}, tmp_path / "head.pt")
    torch.save(source, tmp_path / "model.pt")
    for file, message in (
        ("short.safetensors", r'Missing.*"blocks\.1\.norm1\.weight", .*\.\.\.; pass weights'),
        ("head.pt", r'Missing.*"cls_token", .*; size mismatch for head.weight'),
        ("model.pt", "refused"),
        ("torn.safetensors", "not a readable safetensors"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(name, tmp_path / file)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth"):
        load_model(name, tmp_path / "nowhere.pth")


def test_text_files_are_refused_as_weights(tmp_path: Path) -> None:
    for name in ("weights.safetensors", "weights.pth", "weights.bin"):
        for content, words in (
            (b"version https://lfs.example/spec/v1", "a text file that begins with 'version"),
            ("<!doctype html>\n<p>Gr\u00fc\u00dfe".encode(), "a text file that begins with '<!doc"),
            (b"", "empty"),
        ):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=f"{name} is {words}.*pass a safetensors"):
                load_model("embedded", tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"is a folder; pass a safetensors file"):
        load_model("embedded", tmp_path)


def test_a_folder_whose_weights_are_text_is_refused(tmp_path: Path) -> None:
    make_model("hf-vit").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://lfs.example/spec/v1\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is a text file that begins with"):
        load_model(str(tmp_path))
    save_safetensors(make_model("hf-vit"), tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:100])
    with pytest.raises(FileNotFoundError, match="does not contain a complete model"):
        load_model(str(tmp_path))


def test_unknown_timm_names_suggest_similar_ones() -> None:
    for name, offered in (
        ("deit_tny_patch16_224", "deit_tiny_patch16_224"),
        ("vit-base-patch16-224", "vit_base_patch16_224"),
        ("vit_base_patch16_224.nope", "vit_base_patch16_224.augreg"),
        ("nope", "deit_tiny_patch16_224"),
    ):
        for load in (load_model, lambda name: load_any_size(name, size=224)):
            with pytest.raises(ValueError, match=f"no model '{name}'.*such as .*{offered}"):
                load(f"timm:{name}")


def test_image_sizes_must_be_multiples_of_the_patch_size(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(load_package("timm").create_model("vit_tiny_patch16_224").state_dict(), weights)
    fitting = r"multiple of 16, such as 96 or 112"
    for size in (100, (96, 100)):
        with pytest.raises(ValueError, match=fitting):
            load_model("timm:vit_tiny_patch16_224", weights, img_size=size)
    with pytest.raises(ValueError, match=r"such as 16$"):
        load_model("timm:vit_tiny_patch16_224", weights, img_size=9)
    loaded = load_model("timm:vit_tiny_patch16_224", weights, img_size=(96, 112))
    assert loaded.logits(images(96, 112)).shape == (2, 1000)
    make_model("hf-vit").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="multiple of 4, such as 24 or 28"):
        load_model(str(tmp_path), img_size=25)
    with pytest.raises(
        ValueError, match="img_size is 100; embedded has patches of 8 pixels, so pass"
    ):
        load_model("embedded", img_size=100)
    assert load_model("embedded", img_size=112).preprocess.size == (112, 112)
    with pytest.raises(ValueError, match=fitting):
        load_any_size("timm:vit_tiny_patch16_224", size=100)
    with pytest.raises(ValueError, match="multiple of 8, such as 96 or 104"):
        load_any_size("embedded", size=100)


def test_transformers_folders(tmp_path: Path) -> None:
    model = make_model("hf-deit")
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
        assert torch.equal(loaded.logits(images()), run(model, images()))
    half = (0.5, 0.5, 0.5)
    assert loaded.preprocess == Preprocessing((32, 32), 0.8, "bilinear", half, half)
    assert loaded.classes == ("LABEL_0", "LABEL_1")
    weights = save_safetensors(make_model("hf-deit", seed=3), tmp_path / "other.safetensors")
    assert not torch.equal(load_model(name, weights).logits(images()), run(model, images()))
    larger = load_model(name, img_size=(40, 24))
    assert larger.preprocess.size == (40, 24)
    assert larger.logits(images(40, 24)).shape == (2, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(f"hf:{tmp_path / 'empty'}")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(f"hf:{tmp_path / 'nowhere'}")


@pytest.mark.skipif(not embedded.WEIGHTS.is_file(), reason="the embedded weights are not built")
def test_the_embedded_model_is_loaded_by_name() -> None:
    loaded = load_model("embedded")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 128, 128, 3), dtype=np.uint8)
    expected = embedded.preprocess(pixels)
    torch.testing.assert_close(loaded.preprocess(pixels[0])[None], expected)
    assert loaded.logits(expected).shape == (1, 24)


def test_without_a_network_the_error_says_what_to_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "is_reachable", lambda: False)
    monkeypatch.setattr(load_package("huggingface_hub.constants"), "HF_HUB_CACHE", str(tmp_path))
    url = "https://huggingface.co/timm/deit_tiny_patch16_224.fb_in1k/tree/main"
    with pytest.raises(FileNotFoundError) as caught:
        load_model("timm:deit_tiny_patch16_224")
    assert url in str(caught.value) and "weights='PATH/model.safetensors'" in str(caught.value)
    assert "download model.safetensors from" in str(caught.value)
    with pytest.raises(FileNotFoundError, match="from https://huggingface"):
        load_model("hf:facebook/deit-tiny-patch16-224")
    with pytest.raises(ValueError, match="timm has no model 'nothing'"):
        load_model("timm:nothing")
    with pytest.raises(ValueError, match="pass embedded, timm:NAME"):
        load_model("resnet")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("timm", "torchvision", "transformers", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)
        words = (
            rf"{package} is not installed; run: pip install {package}, .*pip install '\.\[models\]'"
        )
        with pytest.raises(ModuleNotFoundError, match=words):
            load_package(package)
