"""The kernels in order, over as many queries at once as the workspace allows."""

from functools import lru_cache
from math import expm1
from typing import Any

import torch
import triton
from torch import Tensor

from bmfa.kernels.triton.launcher import Plan, Programs
from bmfa.kernels.triton.tiled.attending import attend
from bmfa.kernels.triton.tiled.pooling import pool
from bmfa.kernels.triton.tiled.residuals import residual
from bmfa.kernels.triton.tiled.scoring import score
from bmfa.kernels.triton.tiled.selecting import select
from bmfa.kernels.triton.tiled.sizes import (
    CAP,
    COARSE,
    CONFIGURATION,
    GROUP,
    SIDE,
    STRIP,
    TILES,
    Sizes,
)

Strides = tuple[int, ...]


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
        batch, self.heads, self.dim = shape
        self.device = device  # of the compiled kernels in its plans
        self.q_strides, self.k_strides, self.v_strides, self.o_strides = strides
        self.prefix, self.factor = prefix, factor
        self.sizes = Sizes.of(batch * self.heads, height, width, self.dim, dtype.itemsize)
        self.span = (self.heads, prefix, height, width, self.sizes.across, self.sizes.tiles)
        self.question = (0.0 if error is None else -expm1(-error), expand)
        self.rough = dtype if dtype == torch.float32 else torch.bfloat16
        block_d = max(16, triton.next_power_of_2(self.dim))
        self.wide = 1 if block_d <= 64 else 2
        self.constants: dict[str, Any] = {
            "D": self.dim,
            "BLOCK_D": block_d,
            "SIDE": SIDE,
            "GROUP": GROUP,
            "COARSE": COARSE,
            "TILES": TILES,
            "STRIP": STRIP,
            "CAP": CAP,
            "ROWS": self.sizes.block,
            "ALIGNED": aligned,
            "MASKED": masked,
            "RAGGED": bool(height % SIDE or width % SIDE),
            "PREFIX": 0 if prefix == 0 else max(16, triton.next_power_of_2(prefix)),
            "BY_ERROR": error is not None,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        }
        self.plans: dict[tuple[str, int], Plan] = {}

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, output: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pool once, then score, select, sum residuals and attend for some groups at a time."""
        sizes, new = self.sizes, q.new_empty
        words = new((sizes.heads, sizes.groups, -(-sizes.tiles // 32)), dtype=torch.int32)
        amounts = new((sizes.heads, sizes.groups), dtype=torch.int32)
        means, parts = self._pool(q, k, v, mask)
        for first in range(0, sizes.groups, sizes.rows):
            self._attend(first, q, k, v, mask, output, means, parts, words, amounts)
        return amounts, words

    def _pool(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Means of tiles and groups, counts, room for the first-order matrix; its parts, the prefix."""
        sizes, new, full = self.sizes, q.new_empty, torch.float32
        programs = -(-sizes.tiles // sizes.pooled)
        means = (
            new((sizes.heads, sizes.tiles, self.dim)),
            new((sizes.heads, sizes.tiles, self.dim)),
            new((sizes.heads, sizes.groups, self.dim)),
            new((sizes.heads, sizes.tiles), dtype=full),
            new((sizes.heads, self.dim, self.dim)),
        )
        lines = (sizes.heads, programs)
        parts = (
            new((*lines, self.dim, self.dim), dtype=self.rough),
            new((*lines, self.prefix), dtype=full),
            new((*lines, self.prefix), dtype=full),
            new((*lines, self.prefix, self.dim), dtype=full),
        )
        numbers = (
            *self.q_strides, *self.k_strides, *self.v_strides, *self.span, sizes.groups, self.factor,
        )  # fmt: skip
        self._start(
            "pool", 0, pool, (programs, sizes.heads, 1), (q, k, v, mask, *means[:4], *parts), numbers,
            TILES=sizes.pooled,
        )  # fmt: skip
        return means, parts

    def _attend(
        self,
        first: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        output: Tensor,
        means: tuple[Tensor, ...],
        parts: tuple[Tensor, ...],
        words: Tensor,
        amounts: Tensor,
    ) -> None:
        """The query groups from `first` on."""
        sizes, new, full = self.sizes, q.new_empty, torch.float32
        kbar, vbar, qbar, counts, cross = means
        rows = min(sizes.rows, sizes.groups - first)
        lines, tiles = (sizes.heads, rows), sizes.tiles
        ends = (first, rows, sizes.groups)
        energy, gap = new((*lines, tiles), dtype=full), new((*lines, tiles), dtype=torch.float16)
        tops, masses = new(lines, dtype=full), new(lines, dtype=full)
        some = amounts if rows == sizes.groups else new(lines, dtype=torch.int32)
        blocks, chunks = -(-rows // sizes.block), -(-tiles // sizes.scored)
        strips = -(-self.dim // STRIP) if first == 0 else 0
        pooled = parts[0].shape[1]
        self._start(
            "score", first, score, (chunks + strips, blocks, sizes.heads),
            (k, mask, kbar, qbar, counts, energy, gap, parts[0], cross, *parts[1:], output),
            (*self.k_strides, *self.o_strides, *self.span, *ends, chunks, pooled, self.factor),
            LOOP=sizes.scored, BLOCK_P=triton.next_power_of_2(pooled),
        )  # fmt: skip
        self._start(
            "select", first, select, (rows, sizes.heads, 1),
            (k, qbar, counts, energy, gap, some, tops, masses, words),
            (*self.k_strides, *self.span[:2], tiles, *ends, self.factor, *self.question),
            BLOCK_T=max(32, triton.next_power_of_2(tiles)),
        )  # fmt: skip
        shares = -(-tiles // sizes.share)
        lost = new((*lines, shares, self.dim), dtype=self.rough)
        self._start(
            "residual", first, residual, (shares, blocks, sizes.heads),
            (k, v, mask, vbar, qbar, words, tops, lost),
            (*self.k_strides, *self.v_strides, *self.span, *ends, sizes.share, self.factor),
            LOOP=min(TILES, sizes.share),
        )  # fmt: skip
        self._start(
            "attend", first, attend, (rows, sizes.heads, 1),
            (q, k, v, mask, *means[:4], energy, gap, some, masses, cross, lost, output),
            (*self.q_strides, *self.k_strides, *self.v_strides, *self.o_strides,
             *self.span, *ends, shares, self.factor),
            SHARES=triton.next_power_of_2(shares),
        )  # fmt: skip
        if some is not amounts:
            amounts[:, first : first + rows] = some

    def _start(
        self,
        name: str,
        first: int,
        kernel: Any,
        programs: Programs,
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        **own: int,
    ) -> None:
        """Launch a kernel; its plan is made the first time."""
        plan = self.plans.get((name, first))
        if plan is None:
            constants = {**self.constants, **own}
            named = kernel.arg_names[len(tensors) + len(numbers) :]
            rest = (*numbers, *(constants[each] for each in named))
            plan = self.plans[name, first] = Plan(kernel, programs, rest, **self._how(name))
        plan(*tensors)

    def _how(self, name: str) -> dict[str, int]:
        """Warps and stages."""
        if name == "select":
            return {"num_warps": 1 if self.sizes.tiles <= 1024 else 4}
        warps, stages = CONFIGURATION[name]
        return {"num_warps": warps * self.wide if name in ("pool", "attend") else warps,
                "num_stages": stages}  # fmt: skip


# One for all calls that are alike in everything but the numbers in their tensors.
_prepared = lru_cache(maxsize=256)(_Pipeline)
