"""Seeded random screening problems, what the trees say of them, and q, k, v of real models."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings, strategies
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bmfa import rules
from bmfa.grid import Grid
from bmfa.trees.build import screen
from bmfa.trees.tree import Tree

# Heights and widths of grids and of their layouts.
SIZES = [
    (1, 1),
    (1, 2),
    (2, 1),
    (1, 7),
    (2, 2),
    (3, 2),
    (5, 3),
    (4, 4),
    (14, 14),
    (16, 25),
    (33, 64),
]
LARGE = [(37, 37), (256, 256)]
GRIDS = [
    (1, 1),
    (1, 7),
    (2, 2),
    (3, 5),
    (4, 4),
    (7, 3),
    (8, 8),
    (14, 14),
    (5, 13),
    (16, 16),
    (12, 9),
]
NAMES = (  # of rules of each kind
    "gamma:0.05 gamma-h2:0.02 exact-gap:0.1 certified:0.2 mass:0.005 mass-coarse:0.005 optimal:0.003 "
    "optimal-leaves:0.3 optimal-error:0.02 fixed-depth:1 fixed-blocks:2 quadrant-gap:0.3 variance:0.3 "
    "random-quadrants:0.5 global-mean"
)
RULES = tuple(NAMES.split())


EPS = torch.finfo(torch.float64).eps
taus = strategies.sampled_from([1e-3, 0.1, 0.5, 1.0, 2.0, 30.0, 1e3])


def property_test(*arguments: Any, examples: int = 50, **named: Any) -> Callable[..., Any]:
    """A test by Hypothesis with these strategies, whose examples are the same in every run."""
    repeat = settings(deadline=None, derandomize=True, max_examples=examples)
    return lambda test: repeat(given(*arguments, **named)(test))


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """One grid of scores, a rule and its settings."""

    grid: Grid
    scores: Tensor  # (N,) float64
    rule: rules.Rule
    tau: float
    max_depth: int | None
    valid: Tensor | None  # (N,)

    def tree(self) -> Tree:
        options = {"tau": self.tau, "max_depth": self.max_depth, "valid": self.valid}
        return screen(self.scores, self.grid, self.rule, **options)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_mask(*shape: int, seed: int = 0) -> Tensor:
    """A mask of 70 % of the tokens with at least one in each row."""
    valid = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    valid[..., seed % shape[-1]] = True
    return valid


def random_scores(
    generator: np.random.Generator, height: int, width: int, offset: float = 1e4
) -> np.ndarray:
    """A grid of one of the kinds that matter: noise, a bright minority, ties, +-a, an offset."""
    kind = generator.integers(6)
    noise = generator.normal(size=(height, width)) * generator.choice([0.1, 1.0, 4.0])
    if kind == 0:
        return noise
    if kind == 1:  # a small bright part
        noise[generator.integers(height), generator.integers(width)] += generator.uniform(3, 12)
        return noise
    if kind == 2:  # few distinct values: constant blocks and exact ties
        return generator.integers(0, 3, size=(height, width)).astype(float)
    if kind == 3:  # the +-a counterexample
        signs = (-1.0) ** np.add.outer(np.arange(height), np.arange(width))
        return signs * generator.uniform(0.5, 3)
    if kind == 4:  # a rectangle over a flat ground
        field = np.zeros((height, width))
        top, left = generator.integers(height), generator.integers(width)
        field[top : top + height // 2 + 1, left : left + width // 2 + 1] = generator.uniform(1, 9)
        return field
    return noise + generator.choice([-offset, offset])


def every_rule(generator: np.random.Generator) -> list[rules.Rule]:
    """One of each kind, by random thresholds; `leaves` fits every mask of at least one token."""
    epsilons = generator.choice([0.0, 1e-3, 0.02, 0.3, 1.0, 10.0], size=7).tolist()
    shares = generator.choice([1e-6, 1e-4, 1e-3, 1e-2, 0.1], size=3).tolist()
    return [
        rules.Gamma(epsilons[0]),
        rules.Gamma(epsilons[1], lookahead=2),
        rules.Gamma(epsilons[2], lookahead=3),
        rules.ExactGap(epsilons[3]),
        rules.Certified(epsilons[4]),
        rules.Mass(shares[0]),
        rules.Mass(shares[1], coarse=True),
        rules.Optimal(shares[2]),
        rules.Optimal(leaves=float(generator.choice([1e-9, 0.2, 0.5]))),
        rules.Optimal(error=float(generator.choice([1e-3, 0.05, 0.5]))),
        rules.FixedDepth(int(generator.integers(0, 4))),
        rules.FixedBlocks(int(generator.integers(1, 5))),
        rules.QuadrantGap(epsilons[5]),
        rules.Variance(epsilons[6]),
        rules.RandomQuadrants(0.5, int(generator.integers(100))),
        rules.GlobalMean(),
    ]


def random_case(seed: int) -> Case:
    """The case of a seed."""
    generator = np.random.default_rng(seed)
    grid = Grid(*generator.choice(GRIDS).tolist())
    scores = torch.from_numpy(random_scores(generator, grid.height, grid.width).ravel())
    if generator.random() < 0.3:
        scores[generator.integers(grid.size)] += 40.0
    return Case(
        grid,
        scores,
        every_rule(generator)[generator.integers(16)],
        float(generator.choice([1e-3, 0.3, 1.0, 2.5, 30.0])),
        None if generator.random() < 0.6 else int(generator.integers(0, 4)),
        None if generator.random() < 0.6 else random_mask(grid.size, seed=seed),
    )


class Largest(TorchDispatchMode):
    """The most bytes that any tensor made meanwhile has memory for: of all kinds, and of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.floating = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                held = tensor.untyped_storage().nbytes()
                self.bytes = max(self.bytes, held)
                self.floating = max(self.floating, held * tensor.is_floating_point())
        return result


def nudged(rule: rules.Rule, factor: float) -> rules.Rule:
    """The rule with its threshold moved by a factor: trees that differ show a tie within rounding."""
    values = {name: getattr(rule, name, None) for name in ("epsilon", "penalty", "error")}
    return replace(rule, **{n: x * factor for n, x in values.items() if isinstance(x, float)})


MODELS = {  # name, weights in BMFA_ASSETS, and side of a patch
    "deit": ("timm:deit_tiny_patch16_224", "deit_tiny_patch16_224.fp16.safetensors", 16),
    "saliency": (
        "timm:vit_small_patch14_dinov2",
        "vit_small_patch14_saliency.fp16.safetensors",
        14,
    ),
}


@lru_cache(maxsize=2)
def recorded_blocks(model: str, tokens_across: int, images: int = 1) -> Any:
    """q, k, v of all 12 blocks of a model on photographs of BMFA_ASSETS."""
    from bmfa.evidence.bench.inputs import InputSource

    assets = Path(os.environ["BMFA_ASSETS"])
    name, weights, patch = MODELS[model]
    files = str(assets / "weights" / weights), str(assets / "photos")
    return InputSource(name, *files, images=images).record(patch * tokens_across, list(range(12)))
