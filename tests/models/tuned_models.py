"""A small model, images and plans, shared by the tests of tuning, of plans and of their figure."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import bmfa
from bmfa.models import LayerSetting, ModelFingerprint, Plan, embedded
from bmfa.models.search import Check

DEPTH = 3
ERRORS = (0.05, 0.3)
TIMES = {layer: {None: 1.0, 0.05: 0.8, 0.3: 0.5} for layer in range(DEPTH)}


def small_model(seed: int = 0) -> nn.Module:
    """Three layers over 14x14 tokens, so concentrated that tiles change the output."""
    torch.manual_seed(seed)
    model = embedded.EmbeddedViT(dim=24, depth=DEPTH)
    for block in model.blocks:
        block.attn.qkv.weight.data *= 2.0
    return model.eval()


def smooth_images(count: int = 4, side: int = 112, seed: int = 1) -> Tensor:
    """Smooth images: on noise, all tiles would be expanded and nothing would change."""
    noise = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(noise, size=side, mode="bicubic") if count else noise


def given_times(times: dict[int, dict[float | None, float]]) -> Any:
    """Replace measured times of layers, in milliseconds; the model gains a quarter."""
    return mock.patch.multiple(
        "bmfa.models.tuning",
        time_attention=lambda inputs, errors, repeats: times[inputs.layer],
        time_model=lambda tuner, batch, chosen, repeats: (4.0, 4.0, 3.0 if any(chosen) else 4.0),
    )


def tuned(model: nn.Module, tolerance: float = 0.1, measure="features", **options) -> Plan:
    """A plan from given times."""
    options = {"errors": ERRORS, "progress": False} | options
    images = options.pop("images", None)
    images = smooth_images() if images is None else images
    with given_times(options.pop("times", TIMES)):
        return bmfa.tune(model, images, tolerance, measure, **options)


def plan_for(model: nn.Module, errors: dict[int, float], grid=(14, 14)) -> Plan:
    """A plan with these error targets by layer, and invented measurements."""
    fingerprint = ModelFingerprint.from_model(model)
    targets = tuple(errors.get(layer) for layer in range(fingerprint.layers))
    candidates = []
    for layer, error in enumerate(targets):
        candidates.append(LayerSetting(layer, None, 1.0, 0.0))
        if error is not None:
            candidates.append(LayerSetting(layer, error, 0.5, 0.01))
    return Plan(
        model=fingerprint,
        img_size=(8 * grid[0], 8 * grid[1]),
        grids=(grid,) * fingerprint.layers,
        batch_size=1,
        dtype="float32",
        device="cpu",
        measure="features",
        tolerance=0.03,
        candidates=tuple(candidates),
        measured_change=0.018,
        checks=(Check(targets, 1.5, 0.017, 0.015, 0.016, True, True),),
        dense_milliseconds=4.0,
        predicted_milliseconds=2.5,
        milliseconds=3.0,
        calibration_images=2,
        validation_images=1,
        test_images=1,
        seed=0,
    )
