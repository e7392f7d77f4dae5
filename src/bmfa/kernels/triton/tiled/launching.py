"""The kernels in order, over as many queries at once as the workspace allows."""

from dataclasses import dataclass
from math import expm1
from typing import Any

import torch
import triton
from torch import Tensor

from bmfa.kernels.triton.tiled.attending import attend
from bmfa.kernels.triton.tiled.pooling import pool
from bmfa.kernels.triton.tiled.residuals import residual
from bmfa.kernels.triton.tiled.scoring import score
from bmfa.kernels.triton.tiled.selecting import select

SIDE, GROUP = 8, 2
CAP = 4.0
# Pinned, not tuned at run time: columns of a scoring program, mean tiles in one step of attention,
# rows of the first-order matrix that one program adds up.
TILES, COARSE, STRIP = 16, 64, 16
# Warps (for head dims up to 64; twice as many above) and pipeline stages of each kernel.
CONFIGURATION = {"pool": (4, 3), "score": (4, 3), "residual": (4, 3), "attend": (4, 2)}
# Programs that keep a large card busy, and the shares of k and v that scratch memory may take.
BUSY = 512
ROWS_SHARE, PARTS_SHARE = 0.10, 0.065


@dataclass(frozen=True)
class Plan:
    """Sizes of one call: how tiles and representatives are spread over programs."""

    heads: int  # of all pictures
    tiles: int
    across: int
    groups: int
    pooled: int  # tiles of one pooling program
    scored: int  # tiles of one scoring program
    rows: int  # representatives at once
    block: int  # representatives of one program
    share: int  # tiles of one residual program

    @classmethod
    def of(cls, heads: int, height: int, width: int, dim: int, size: int) -> "Plan":
        """A plan for (heads, height width, dim) keys and values of `size` bytes a number."""
        down, across = -(-height // SIDE), -(-width // SIDE)
        tiles = down * across
        groups = -(-tiles // GROUP)
        room = 2 * height * width * dim * size  # bytes of k and v of one head
        few = tiles * heads < 2 * BUSY  # too few for long loops to fill the card
        pooled, scored = (4, 4) if few else (8, TILES)
        # energy (4 bytes) and gap (2 bytes) of every representative and tile
        chunks = -(-6 * groups * tiles // max(1, int(ROWS_SHARE * room)))
        chunks = max(1, min(chunks, groups // 64))
        rows = -(-groups // chunks)
        block = 64 if rows > 32 else 32 if rows > 16 else 16
        programs = heads * -(-rows // block)
        parts = min(BUSY // programs, int(PARTS_SHARE * room) // (4 * rows * dim))
        step = TILES // 2 if few else TILES
        share = step * -(-tiles // (step * max(1, parts)))
        return cls(heads, tiles, across, groups, pooled, scored, rows, block, share)


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
    plan = Plan.of(batch * heads, height, width, dim, q.element_size())
    output = q.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
    call = _Launch(q, k, v, output, valid, height, width, prefix, factor, aligned, plan)
    return output, *call.run(error, expand)


class _Launch:
    """One call: its arguments as the kernels take them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        valid: Tensor | None,
        height: int,
        width: int,
        prefix: int,
        factor: float,
        aligned: bool,
        plan: Plan,
    ) -> None:
        self.q, self.k, self.v, self.output, self.plan = q, k, v, output, plan
        tensors = zip("qkvo", (q, k, v, output), strict=True)
        self.strides = {name: tensor.stride()[:3] for name, tensor in tensors}
        self.mask = q if valid is None else valid.contiguous().view(torch.uint8)
        self.heads, self.prefix, self.factor, self.dim = q.shape[1], prefix, factor, q.shape[3]
        self.span = (q.shape[1], prefix, height, width, plan.across, plan.tiles)
        block_d = max(16, triton.next_power_of_2(self.dim))
        self.shape: dict[str, Any] = {"D": self.dim, "BLOCK_D": block_d}
        self.places: dict[str, Any] = {
            "SIDE": SIDE,
            "ALIGNED": aligned,
            "MASKED": valid is not None,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }
        self.ragged = bool(height % SIDE or width % SIDE)
        self.padded = 0 if prefix == 0 else max(16, triton.next_power_of_2(prefix))
        self.wide = 1 if block_d <= 64 else 2

    def _how(self, kernel: str) -> dict[str, int]:
        warps, stages = CONFIGURATION[kernel]
        return {"num_warps": warps * self.wide, "num_stages": stages}

    def run(self, error: float | None, expand: int) -> tuple[Tensor, Tensor]:
        """Pool once, then score, select, sum residuals and attend for some groups at a time."""
        plan, new = self.plan, self.q.new_empty
        self.kbar = new((plan.heads, plan.tiles, self.dim))
        self.vbar = new((plan.heads, plan.tiles, self.dim))
        self.qbar = new((plan.heads, plan.groups, self.dim))
        self.counts = new((plan.heads, plan.tiles), dtype=torch.float32)
        self.cross_sums = new((plan.heads, self.dim, self.dim))
        words = new((plan.heads, plan.groups, -(-plan.tiles // 32)), dtype=torch.int32)
        amounts = new((plan.heads, plan.groups), dtype=torch.int32)
        pooled = self._pool()
        for first in range(0, plan.groups, plan.rows):
            rows = min(plan.rows, plan.groups - first)
            self._chunk(first, rows, pooled, words, amounts, error, expand)
        return amounts, words

    def _pool(self) -> tuple[Tensor, ...]:
        plan, new = self.plan, self.q.new_empty
        parts = -(-plan.tiles // plan.pooled)
        cross = new((plan.heads, parts, self.dim, self.dim), dtype=_rough(self.q.dtype))
        tops = new((plan.heads, parts, self.prefix), dtype=torch.float32)
        masses = new((plan.heads, parts, self.prefix), dtype=torch.float32)
        outputs = new((plan.heads, parts, self.prefix, self.dim), dtype=torch.float32)
        pool[(parts, plan.heads)](
            self.q, self.k, self.v, self.mask, self.kbar, self.vbar, self.qbar, self.counts,
            cross, tops, masses, outputs,
            *self.strides["q"], *self.strides["k"], *self.strides["v"],
            *self.span, plan.groups, self.factor,
            GROUP=GROUP, TILES=plan.pooled, PREFIX=self.padded, RAGGED=self.ragged,
            **self.shape, **self.places, **self._how("pool"),
        )  # fmt: skip
        return cross, tops, masses, outputs

    def _chunk(
        self,
        first: int,
        rows: int,
        pooled: tuple[Tensor, ...],
        words: Tensor,
        amounts: Tensor,
        error: float | None,
        expand: int,
    ) -> None:
        """The query groups `first` to `first + rows`."""
        plan, new = self.plan, self.q.new_empty
        lines, tiles = (plan.heads, rows), plan.tiles
        energy = new((*lines, tiles), dtype=torch.float32)
        gap = new((*lines, tiles), dtype=torch.float16)
        some = amounts if rows == plan.groups else new(lines, dtype=torch.int32)
        tops, masses = new(lines, dtype=torch.float32), new(lines, dtype=torch.float32)
        blocks, chunks = -(-rows // plan.block), -(-tiles // plan.scored)
        ends = (first, rows, plan.groups)
        strips = -(-self.dim // STRIP) if first == 0 else 0
        parts = pooled[0].shape[1]
        score[(chunks + strips, blocks, plan.heads)](
            self.k, self.mask, self.kbar, self.qbar, self.counts, energy, gap,
            pooled[0], self.cross_sums, *pooled[1:], self.output,
            *self.strides["k"], *self.strides["o"], *self.span, *ends, chunks, parts, self.factor,
            ROWS=plan.block, TILES=TILES, LOOP=plan.scored, STRIP=STRIP,
            BLOCK_P=triton.next_power_of_2(parts),
            **self.shape, **self.places, **self._how("score"),
        )  # fmt: skip
        block_t = max(32, triton.next_power_of_2(tiles))
        select[(rows, plan.heads)](
            self.k, self.qbar, self.counts, energy, gap, some, tops, masses, words,
            *self.strides["k"], self.heads, self.prefix, tiles, *ends, self.factor,
            0.0 if error is None else -expm1(-error), expand,
            BLOCK_T=block_t, BY_ERROR=error is not None, CAP=CAP,
            **self.shape, num_warps=1 if block_t <= 1024 else 4,
        )  # fmt: skip
        shares = -(-tiles // plan.share)
        lost = new((*lines, shares, self.dim), dtype=torch.float32)
        residual[(shares, blocks, plan.heads)](
            self.k, self.v, self.mask, self.vbar, self.qbar, words, tops, lost,
            *self.strides["k"], *self.strides["v"], *self.span, *ends, plan.share, self.factor,
            ROWS=plan.block, TILES=TILES, LOOP=min(TILES, plan.share), RAGGED=self.ragged,
            **self.shape, **self.places, **self._how("residual"),
        )  # fmt: skip
        attend[(rows, plan.heads)](
            self.q, self.k, self.v, self.mask, self.kbar, self.vbar, self.qbar, self.counts,
            energy, gap, some, masses, self.cross_sums, lost, self.output,
            *self.strides["q"], *self.strides["k"], *self.strides["v"], *self.strides["o"],
            *self.span, *ends, shares, self.factor,
            GROUP=GROUP, COARSE=COARSE, PREFIX=self.padded, RAGGED=self.ragged,
            SHARES=triton.next_power_of_2(shares),
            **self.shape, **self.places, **self._how("attend"),
        )  # fmt: skip
        if some is not amounts:
            amounts[:, first : first + rows] = some


def _rough(dtype: torch.dtype) -> torch.dtype:
    """Parts of the first-order matrix: small, and with the range of float32."""
    return dtype if dtype == torch.float32 else torch.bfloat16
