"""Preprocessing: as timm does it, odd margins, other shapes."""

import itertools
from importlib.util import find_spec

import numpy as np
import pytest
import torch

if find_spec("timm") is None or find_spec("transformers") is None:
    pytest.skip("needs timm and transformers: pip install 'bmfa[models]'", allow_module_level=True)

from bmfa.models import Preprocessing
from bmfa.packages import load_package

SIZES = [(300, 200), (200, 300), (256, 256), (57, 91)]


def test_preprocessing_matches_timm_up_to_the_rounding_of_the_crop() -> None:
    for size, crop_pct in itertools.product(SIZES, (0.875, 0.9, 1.0)):
        check_against_timm(size, crop_pct)


def check_against_timm(size: tuple[int, int], crop_pct: float) -> None:
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


def test_an_odd_margin_leaves_its_last_pixel_below_and_to_the_right() -> None:
    for margin in range(5):
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
    assert Preprocessing.from_transformers(settings).squash
    with pytest.raises(ValueError, match="crop_pct"):
        Preprocessing(crop_pct=1.5)
    with pytest.raises(ValueError, match="bicubic"):
        Preprocessing(interpolation="cubic")
