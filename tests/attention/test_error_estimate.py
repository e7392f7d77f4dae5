"""Error targets of tiled attention: met where inputs are ordinary, and not missed in silence elsewhere.

"Missed in silence" is a true error above 1.3 times the target of a call whose estimate meets it.
"""

import math
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from bmfa import screened_attention
from bmfa.attention.kernels.native import library

BACKEND = "eager" if library.unavailable_reason() else "native"
SLOW = pytest.mark.slow
TARGETS = (0.03, 0.03, 0.02, 0.05, 0.1)
Fields = tuple[Tensor, Tensor, Tensor, int]  # q, k, v and the number of tokens before the grid


class Draw:
    """Numbers from a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def below(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self.generator))

    def between(self, low: float, high: float) -> float:
        """Uniform in the logarithm."""
        return low * (high / low) ** float(torch.rand(1, generator=self.generator))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


class Outcome(NamedTuple):
    """Errors over the target, and whether the call warned."""

    true: float
    estimate: float
    upper: float
    warned: bool
    dense: bool

    @property
    def silent(self) -> bool:
        return self.true > 1.3 and not self.warned


def smooth(draw: Draw, side: int) -> Fields:
    """The fields of README.md, as smooth with fewer tokens, and queries times 1 to 3."""
    coarse = draw.normal(9, 64, side // 8, side // 8)
    grown = interpolate(coarse, size=side, mode="bicubic")
    q, k, v = grown.flatten(2).mT.reshape(3, 1, 3, side * side, 64)
    return q * (1.0, 1.0, 2.0, 3.0)[draw.below(4)], k, v, 0


def noise(draw: Draw, side: int) -> Fields:
    """Independent tokens, with values that have a mean."""
    q, k, v = draw.normal(3, 1, 1 + draw.below(3), 1 + side * side, 64)
    return q * draw.between(0.2, 1.0), k, v + draw.normal(1, v.shape[1], 1, 64), 1


def bright_key(draw: Draw, fields: Fields) -> Fields:
    _, k, _, prefix = fields
    k[:, :, prefix + draw.below(k.shape[2] - prefix)] *= draw.between(3.0, 30.0)
    return fields


def bright_token(draw: Draw, fields: Fields) -> Fields:
    *qkv, prefix = fields
    token, factor = prefix + draw.below(qkv[0].shape[2] - prefix), draw.between(3.0, 30.0)
    for x in qkv:
        x[:, :, token] *= factor
    return fields


def bright_value(draw: Draw, fields: Fields) -> Fields:
    _, _, v, prefix = fields
    v[:, :, prefix + draw.below(v.shape[2] - prefix)] *= draw.between(9.0, 90.0)
    return fields


def few_queries(draw: Draw, fields: Fields) -> Tensor:
    """0.2 % of the queries."""
    q, _, _, prefix = fields
    count = q.shape[2] - prefix
    return prefix + torch.randperm(count, generator=draw.generator)[: max(1, round(0.002 * count))]


def outlying_queries(draw: Draw, fields: Fields) -> Fields:
    fields[0][:, :, few_queries(draw, fields)] *= draw.between(3.0, 30.0)
    return fields


def shifted_queries(draw: Draw, fields: Fields) -> Fields:
    q = fields[0]
    direction = draw.normal(1, q.shape[1], 1, q.shape[3])
    shift = direction / direction.norm(dim=-1, keepdim=True) * q.norm(dim=-1).mean()
    q[:, :, few_queries(draw, fields)] += shift * draw.between(3.0, 30.0)
    return fields


def aligned_queries(draw: Draw, fields: Fields) -> Fields:
    """Few queries that see one bright key, and little else."""
    q, k, _, prefix = fields
    token = prefix + draw.below(k.shape[2] - prefix)
    k[:, :, token] *= 3.0
    bright = k[:, :, token : token + 1]
    shift = bright / bright.norm(dim=-1, keepdim=True) * q.norm(dim=-1).mean()
    q[:, :, few_queries(draw, fields)] += shift * draw.between(3.0, 30.0)
    return fields


def hot_tile(draw: Draw, fields: Fields) -> Fields:
    _, k, _, prefix = fields
    side = math.isqrt(k.shape[2] - prefix)
    rows, columns = (8 * draw.below(side // 8) + torch.arange(8) for _ in range(2))
    k[:, :, (prefix + side * rows[:, None] + columns).flatten()] *= draw.between(3.0, 30.0)
    return fields


def outlying_and_bright(draw: Draw, fields: Fields) -> Fields:
    return outlying_queries(draw, bright_key(draw, fields))


SPOILS: tuple[Callable[[Draw, Fields], Fields], ...] = (
    bright_key,
    bright_token,
    bright_value,
    outlying_queries,
    shifted_queries,
    aligned_queries,
    hot_tile,
    outlying_and_bright,
)


@lru_cache(maxsize=2)
def recorded_blocks(model: str, tokens_across: int) -> dict[int, list[Tensor]]:
    """q, k, v (photographs, H, 1 + N, d) of all blocks of a model on the photographs of BMFA_ASSETS."""
    from bmfa.evidence.bench.inputs import InputSource

    assets = Path(os.environ["BMFA_ASSETS"])
    name, weights, patch = MODELS[model]
    folder = str(assets / "photos")
    source = InputSource(name, str(assets / "weights" / weights), folder, images=4)
    recorded = source.record(patch * tokens_across, list(range(12)))
    return {block: [x.float() for x in qkv] for block, qkv in recorded.blocks.items()}


MODELS = {
    "deit": ("timm:deit_tiny_patch16_224", "deit_tiny_patch16_224.fp16.safetensors", 16),
    "saliency": (
        "timm:vit_small_patch14_dinov2",
        "vit_small_patch14_saliency.fp16.safetensors",
        14,
    ),
}


def crop(draw: Draw, model: str, side: int) -> Fields:
    """A window of a grid of 64x64 tokens of a block."""
    image, block = draw.below(4), draw.below(12)
    top, left = draw.below(65 - side), draw.below(65 - side)
    cut = []
    for x in (x[image : image + 1] for x in recorded_blocks(model, 64)[block]):
        grid = x[:, :, 1:].unflatten(2, (64, 64))[:, :, top : top + side, left : left + side]
        cut.append(torch.cat((x[:, :, :1], grid.flatten(2, 3)), 2))
    return *cut, 1


def outcome(fields: Fields, target: float) -> Outcome:
    *qkv, prefix = fields
    q, k, v = (x.contiguous() for x in qkv)
    side = math.isqrt(q.shape[2] - prefix)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = screened_attention(
            q, k, v, grid=(side, side), prefix=prefix, error=target, backend=BACKEND
        )
        measured = got.stats.error
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).double()
    true = float((got.output - exact).norm() / exact.norm())
    assert measured.met or caught  # a miss warns, at the first call at least
    return Outcome(
        true / target,
        measured.estimate / target,
        measured.upper / target,
        not measured.met,
        got.stats.density == 1.0,
    )


def spoiled(seed: int, side: int) -> Outcome:
    draw = Draw(seed)
    fields = (smooth, noise)[draw.below(2)](draw, side)
    q, k, v = (x.clone() for x in fields[:3])
    fields = SPOILS[draw.below(len(SPOILS))](draw, (q, k, v, fields[3]))
    return outcome(fields, TARGETS[draw.below(5)])


def report(outcomes: list[Outcome]) -> str:
    tiled = [x for x in outcomes if not x.dense]
    held = sum(x.true <= x.upper for x in tiled)
    return (
        f"{len(outcomes)} calls, {len(tiled)} by tiles: {sum(x.silent for x in outcomes)} above 1.3 "
        f"targets in silence, {sum(x.warned for x in outcomes)} warned, upper held in {held}"
    )


@pytest.mark.parametrize(
    ("side", "count"),
    [(32, 60), *(pytest.param(side, 500, marks=SLOW) for side in (32, 64))],
)
def test_inputs_that_defeat_probes_are_seldom_missed_in_silence(side: int, count: int) -> None:
    outcomes = [spoiled(seed, side) for seed in range(count)]
    print(report(outcomes))
    assert sum(x.silent for x in outcomes) <= 0.01 * count, report(outcomes)
    assert sum(not x.dense for x in outcomes) > 0.2 * count


@pytest.mark.parametrize(
    ("side", "count"),
    [(32, 40), (64, 10), *(pytest.param(side, 300, marks=SLOW) for side in (32, 64))],
)
def test_smooth_fields_seldom_warn(side: int, count: int) -> None:
    outcomes = []
    for seed in range(count):
        draw = Draw(10_000 + seed)
        outcomes.append(outcome(smooth(draw, side), TARGETS[draw.below(5)]))
    print(report(outcomes))
    assert sum(x.warned for x in outcomes) <= 0.01 * count, report(outcomes)
    assert not any(x.silent for x in outcomes), report(outcomes)
    tiled = [x for x in outcomes if not x.dense]
    assert sum(x.true <= x.upper for x in tiled) >= 0.95 * len(tiled)


@pytest.mark.slow
@pytest.mark.skipif("BMFA_ASSETS" not in os.environ, reason="BMFA_ASSETS names no folder")
@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("model", MODELS)
def test_real_models_seldom_warn(model: str, side: int) -> None:
    """Windows of all blocks and photographs; of 64x64 tokens there is one a block and photograph."""
    outcomes = []
    for seed in range(250):
        draw = Draw(20_000 + seed)
        outcomes.append(outcome(crop(draw, model, side), TARGETS[draw.below(5)]))
    print(report(outcomes))
    assert sum(x.warned for x in outcomes) <= 0.01 * len(outcomes), report(outcomes)
    assert sum(x.silent for x in outcomes) <= 0.01 * len(outcomes), report(outcomes)
    tiled = [x for x in outcomes if not x.dense]
    assert sum(x.true <= x.upper for x in tiled) >= 0.95 * len(tiled)


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("size", [1e-30, 1e-24, 1e20, 1e30])
def test_the_estimate_does_not_depend_on_the_size_of_values(backend: str, size: float) -> None:
    if backend == "native" and (reason := library.unavailable_reason()):
        pytest.skip(reason)
    draw = Draw(3)
    q, k, v, _ = smooth(draw, 32)
    options = {"grid": (32, 32), "backend": backend}
    want, got = (
        screened_attention(q, k, x, leaves=0.2, **options).stats.error for x in (v, v * size)
    )
    assert want.estimate > 1e-3
    for name in ("estimate", "uncertainty", "upper", "p95"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-2)
