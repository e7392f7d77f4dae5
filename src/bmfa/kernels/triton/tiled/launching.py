"""The kernels in order, over as many queries at once as the workspace allows."""

from functools import lru_cache
from math import expm1
from typing import Any

import torch
from torch import Tensor

from bmfa.kernels.triton.launcher import Chain, Programs, Scratch
from bmfa.kernels.triton.tiled.attending import attend
from bmfa.kernels.triton.tiled.certifying import certify
from bmfa.kernels.triton.tiled.pooling import pool
from bmfa.kernels.triton.tiled.residuals import residual
from bmfa.kernels.triton.tiled.scoring import score
from bmfa.kernels.triton.tiled.selecting import select
from bmfa.kernels.triton.tiled.sizes import (
    CAP,
    COARSE,
    CONFIGURATION,
    GROUP,
    PLAIN,
    SIDE,
    STRIP,
    TILES,
    Sizes,
)

Strides = tuple[int, ...]
# Tensors that a call brings; the kernels find them by these names.
GIVEN = ("q", "k", "v", "valid", "output", "amounts", "words")


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    height: int,
    width: int,
    prefix: int,
    factor: float,
    error: float | None,
    expand: int,
    aligned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, heads, prefix + N, d), expanded tiles (B heads, groups), words (B heads, groups, *).

    The bits of the words mark the tiles that stay unexpanded. `error` is a target for E / tau;
    without it the `expand` largest losses of every group are expanded.
    """
    batch, heads, tokens, dim = q.shape
    output = q.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
    strides = tuple(tensor.stride()[:3] for tensor in (q, k, v, output))
    call = _prepared(
        (batch, heads, dim), strides, q.dtype, q.get_device(), valid is not None,
        height, width, prefix, factor, error, expand, aligned,
    )  # fmt: skip
    mask = q if valid is None else valid.contiguous().view(torch.uint8)
    return output, *call.run(q, k, v, mask, output)


class _Pipeline:
    """All launches of a call with everything settled but the tensors."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        strides: tuple[Strides, ...],
        dtype: torch.dtype,
        device: int,
        masked: bool,
        height: int,
        width: int,
        prefix: int,
        factor: float,
        error: float | None,
        expand: int,
        aligned: bool,
    ) -> None:
        batch, heads, self.dim = shape
        self.device = device  # of the compiled kernels in its plans
        self.sizes = sizes = Sizes.of(batch * heads, height, width, self.dim, dtype.itemsize)
        self.words = (sizes.heads, sizes.groups, -(-sizes.tiles // 32))
        block_d = max(16, _power_of_2(self.dim))
        self.wide = 1 if block_d <= 64 else 2
        # Every argument of every kernel that is not a tensor, by its name.
        self.values: dict[str, Any] = {
            **_named_strides("qkvo", strides),
            "heads": heads,
            "prefix": prefix,
            "height": height,
            "width": width,
            "across": sizes.across,
            "tiles": sizes.tiles,
            "groups": sizes.groups,
            "factor": factor,
            "target": 0.0 if error is None else -expm1(-error),
            "budget": expand,
            "D": self.dim,
            "BLOCK_D": block_d,
            "SIDE": SIDE,
            "GROUP": GROUP,
            "COARSE": COARSE,
            "TILES": TILES,
            "STRIP": STRIP,
            "CAP": CAP,
            "ROWS": sizes.block,
            "ALIGNED": aligned,
            "MASKED": masked,
            "RAGGED": bool(height % SIDE or width % SIDE),
            "PREFIX": 0 if prefix == 0 else max(16, _power_of_2(prefix)),
            "BY_ERROR": error is not None,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        }
        self.pooled = -(-sizes.tiles // sizes.pooled)
        self.shares = -(-sizes.tiles // sizes.share)
        self.chain = Chain(GIVEN, self._scratch(dtype, prefix))
        self._add(pool, (self.pooled, sizes.heads, 1), TILES=sizes.pooled)
        for first in range(0, sizes.groups, sizes.rows):
            self._add_attention(first)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, output: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fill the output; expanded tiles of each group, and words that mark those that stay."""
        words = q.new_empty(self.words, dtype=torch.int32)
        amounts = q.new_empty(self.words[:2], dtype=torch.int32)
        self.chain(q, k, v, mask, output, amounts, words)
        return amounts, words

    def _scratch(self, dtype: torch.dtype, prefix: int) -> Scratch:
        """What the kernels leave for each other."""
        sizes, dim, full = self.sizes, self.dim, torch.float32
        rough = dtype if dtype == full else torch.bfloat16
        parts = (sizes.heads, self.pooled)
        lines = (sizes.heads, min(sizes.rows, sizes.groups))
        scratch = Scratch()
        scratch.add("kbar", (sizes.heads, sizes.tiles, dim), dtype)
        scratch.add("vbar", (sizes.heads, sizes.tiles, dim), dtype)
        scratch.add("qbar", (sizes.heads, sizes.groups, dim), dtype)
        scratch.add("counts", (sizes.heads, sizes.tiles), full)
        scratch.add("cross", (sizes.heads, dim, dim), dtype)
        scratch.add("cross_parts", (*parts, dim, dim), rough)
        scratch.add("prefix_tops", (*parts, prefix), full)
        scratch.add("prefix_masses", (*parts, prefix), full)
        scratch.add("prefix_outputs", (*parts, prefix, dim), full)
        scratch.add("energy", (*lines, sizes.tiles), full)
        scratch.add("gap", (*lines, sizes.tiles), torch.float16)
        scratch.add("tops", lines, full)
        scratch.add("masses", lines, full)
        scratch.add("lost", (*lines, self.shares, dim), rough)
        return scratch

    def _add_attention(self, first: int) -> None:
        """Score, select, sum residuals and attend for the query groups from `first` on."""
        sizes = self.sizes
        rows = min(sizes.rows, sizes.groups - first)
        blocks, chunks = -(-rows // sizes.block), -(-sizes.tiles // sizes.scored)
        strips = -(-self.dim // STRIP) if first == 0 else 0
        some = {"first": first, "rows": rows}
        self._add(
            score, (chunks + strips, blocks, sizes.heads), **some,
            LOOP=sizes.scored, chunks=chunks, parts=self.pooled, BLOCK_P=_power_of_2(self.pooled),
        )  # fmt: skip
        block = max(32, _power_of_2(sizes.tiles))
        self._add(select, (rows, sizes.heads, 1), **some, BLOCK_T=block)
        self._add(
            residual, (self.shares, blocks, sizes.heads), **some,
            share=sizes.share, LOOP=min(TILES, sizes.share),
        )  # fmt: skip
        self._add(
            attend, (min(rows * GROUP, sizes.tiles - first * GROUP), sizes.heads, 1), **some,
            shares=self.shares, SHARES=_power_of_2(self.shares),
        )  # fmt: skip

    def _add(self, kernel: Any, programs: Programs, **own: int) -> None:
        warps, stages = self._how(kernel)
        values = {**self.values, **own}
        self.chain.add(kernel, programs, values, num_warps=warps, num_stages=stages)

    def _how(self, kernel: Any) -> tuple[int, int]:
        """Warps and stages."""
        if kernel is select:
            return 1 if self.sizes.tiles <= 1024 else 4, 3
        warps, stages = CONFIGURATION[kernel.__name__]
        if kernel is attend and self.sizes.few:
            stages = 2
        return warps * self.wide if kernel is pool else warps, stages


def bounds(
    q: Tensor,
    k: Tensor,
    valid: Tensor | None,
    expanded: Tensor,
    longest: Tensor,
    height: int,
    width: int,
    prefix: int,
    factor: float,
    per_score: float,
    always: float,
    aligned: bool,
) -> Tensor:
    """(B, heads, prefix + N) bounds on E / tau where `expanded` (B, heads, R, T) marks tiles.

    `longest` (B, heads) is the norm of the longest key, in float32.
    """
    batch, heads, tokens, dim = q.shape
    bound = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    groups, tiles = expanded.shape[2:]
    block_d = max(16, _power_of_2(dim))
    values = {
        **_named_strides("qk", (q.stride()[:3], k.stride()[:3])),
        "heads": heads,
        "prefix": prefix,
        "height": height,
        "width": width,
        "across": -(-width // SIDE),
        "tiles": tiles,
        "groups": groups,
        "factor": factor,
        "per_score": per_score,
        "always": always,
        "D": dim,
        "BLOCK_D": block_d,
        "SIDE": SIDE,
        "GROUP": GROUP,
        "PREFIX": 0 if prefix == 0 else max(16, _power_of_2(prefix)),
        "ALIGNED": aligned,
        "MASKED": valid is not None,
        "RAGGED": bool(height % SIDE or width % SIDE),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "PLAIN": PLAIN,
    }
    warps, stages = CONFIGURATION["certify"]
    chain = Chain(("q", "k", "valid", "expanded", "longest", "bounds"), Scratch())
    programs = (groups, batch * heads, 1)
    chain.add(certify, programs, values, num_warps=warps, num_stages=stages)
    mask = q if valid is None else valid.contiguous().view(torch.uint8)
    marks = expanded.contiguous().view(torch.uint8)
    chain(q, k, mask, marks, longest.contiguous(), bound)
    return bound


def _named_strides(names: str, strides: tuple[Strides, ...]) -> dict[str, int]:
    """The strides of tensors as the kernels call them."""
    return {
        f"{name}_{what}": stride
        for name, own in zip(names, strides, strict=True)
        for what, stride in zip(("batch", "head", "row"), own, strict=True)
    }


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


# One for all calls that are alike in everything but the numbers in their tensors.
_prepared = lru_cache(maxsize=256)(_Pipeline)
