"""Attention with a tree for each query on small grids, as an operator of torch."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from bmfa.attention.kernels.triton import unsupported_reason as unsupported_device_reason
from bmfa.attention.kernels.triton.per_query.tables import (
    FIRST_WORD_LEVELS,
    packed_coins,
    quadtree_tables,
)
from bmfa.grid import Grid
from bmfa.trees.pyramid import EXP_ROUNDINGS
from bmfa.trees.rules import (
    ExactGap,
    FixedDepth,
    Gamma,
    GlobalMean,
    Mass,
    Optimal,
    QuadrantGap,
    RandomQuadrants,
    Rule,
    Variance,
)

LOG2_E = math.log2(math.e)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Tokens of the longer side. Below 3 the quadtree has 4 slots, fewer than the 16 that tl.dot takes;
# above 16 it has 1024, and the scores of a block of queries leave the registers.
SMALLEST_SIDE, LARGEST_SIDE = 3, 16
LARGEST_HEAD = {2: 128, 4: 64}  # head dimension by bytes of a number; registers spill above
# At a threshold above this, differences of plain float32 exponentials are accurate enough.
FINE_THRESHOLD = EXP_ROUNDINGS * torch.finfo(torch.float32).eps
# Queries and warps of a program, pinned, by bytes of a number. `bmfa bench attention` measures them.
BLOCK_Q_AND_WARPS = {2: (64, 4), 4: (32, 4)}
# At this depth Triton 3.6 miscompiles blocks of 64 queries, and any block with heads up to 32 wide:
# numbers that a query has once, such as Z, reach the next level in the row of another query.
# tests/attention/test_triton_compiles.py finds the layouts concerned.
MISCOMPILED_DEPTH, MISCOMPILED_HEAD = 3, 32
SAFE_BLOCK_Q_AND_WARPS = (32, 4)


class KernelRule(NamedTuple):
    """A rule as the kernel takes it."""

    name: str
    threshold: float  # over tau, in units of log 2 where it is a score
    fine: bool = False  # True if differences of exponentials must be accurate near 0


def _gap_rule(name: str) -> Callable[..., KernelRule]:
    return lambda rule, tau: KernelRule(
        name, rule.epsilon / tau * LOG2_E, rule.epsilon / tau <= FINE_THRESHOLD
    )


KERNEL_RULES: dict[type[Rule], Callable[..., KernelRule]] = {
    Gamma: _gap_rule("gamma"),
    ExactGap: _gap_rule("exact-gap"),
    QuadrantGap: _gap_rule("quadrant-gap"),
    Variance: lambda rule, tau: KernelRule("variance", 2 * rule.epsilon / tau * LOG2_E**2),
    Mass: lambda rule, tau: KernelRule("mass", rule.epsilon, rule.epsilon <= FINE_THRESHOLD),
    Optimal: lambda rule, tau: KernelRule("optimal", rule.penalty, rule.penalty <= FINE_THRESHOLD),
    FixedDepth: lambda rule, tau: KernelRule("fixed-depth", rule.depth),
    GlobalMean: lambda rule, tau: KernelRule("fixed-depth", 0),
    RandomQuadrants: lambda rule, tau: KernelRule("random-quadrants", 0.0),
}


def unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, rule: Rule, valid: Tensor | None
) -> str | None:
    """Return why the kernel cannot run on the inputs, or None if it can."""
    if (reason := unsupported_device_reason(q.device)) is not None:
        return reason
    if q.dtype not in DTYPES:
        return f"the dtype is {q.dtype}; the kernel takes float16, bfloat16 and float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "gradients are required, and the kernel has no backward; use torch.no_grad()"
    if valid is not None:
        return "valid= is given, and the kernel takes no padding"
    longer = max(grid.height, grid.width)
    if not SMALLEST_SIDE <= longer <= LARGEST_SIDE:
        return (
            f"the grid is {grid.height}x{grid.width}; the kernel takes a longer side of "
            f"{SMALLEST_SIDE} to {LARGEST_SIDE} tokens"
        )
    dim, largest = max(q.shape[-1], v.shape[-1]), LARGEST_HEAD[q.element_size()]
    if dim > largest:
        return f"the head dimension is {dim}; the kernel takes up to {largest} in {q.dtype}"
    if q.is_cuda and grid.depth == MISCOMPILED_DEPTH and q.shape[-1] <= MISCOMPILED_HEAD:
        return (
            f"the head dimension is {q.shape[-1]}, and on grids of 5 to 8 tokens Triton 3.6 mixes up "
            f"the queries of heads up to {MISCOMPILED_HEAD}"
        )
    if q.numel() == 0 or v.numel() == 0:
        return "there are no queries"
    return _unsupported_rule_reason(rule)


def _unsupported_rule_reason(rule: Rule) -> str | None:
    if type(rule) not in KERNEL_RULES:
        names = ", ".join(sorted(kind.__name__ for kind in KERNEL_RULES))
        return f"the rule is {rule}; the kernel takes {names}"
    if isinstance(rule, Gamma) and rule.lookahead > 1:
        return f"the rule is {rule}; the kernel looks one level ahead"
    if isinstance(rule, Mass) and rule.coarse:
        return f"the rule is {rule}; the kernel takes the exact Z"
    if isinstance(rule, Optimal) and rule.penalty is None:
        return f"the rule is {rule}; the kernel takes a penalty, and searches none for a budget"
    return None


def per_query_attention(
    q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, prefix: int, rule: Rule, tau: float,
    scale: float, max_depth: int | None, order: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention over a tree for each query, without waiting for the device.

    Args:
        q: (B, H, Q, D).
        k: (B, H or a divisor of it, prefix + N, D).
        v: (B, as many, prefix + N, DV).
        grid: The grid of the N spatial tokens.
        prefix: The number of tokens before the grid.
        rule: One of `KERNEL_RULES`.
        tau: The temperature.
        scale: The factor of q . k.
        max_depth: The depth at which no block is split, or None.
        order: The order of the spatial tokens, "raster" or "z".

    Returns:
        Outputs (B, H, Q, DV), NaN for queries with a score that is NaN or +inf, and the int32 bits of
        the splits (B * H * Q, words), for `tables.decode_splits`.
    """
    slot_tokens, table = quadtree_tables(grid, prefix, order, q.device)
    kernel_rule = KERNEL_RULES[type(rule)](rule, tau)
    coins = None
    if isinstance(rule, RandomQuadrants):
        coins = packed_coins(rule, q.shape[:3].numel(), grid, q.device)
    limit = grid.depth if max_depth is None else min(max_depth, grid.depth)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    output, split_bits = operator(
        q, k, v, slot_tokens, table, coins, kernel_rule.name, float(kernel_rule.threshold),
        kernel_rule.fine, scale / tau * LOG2_E, prefix, grid.depth, limit,
    )  # fmt: skip
    return output, split_bits


# Defined without torch.library.custom_op, whose wrappers take 10 to 25 microseconds for each call.
_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "screen(Tensor q, Tensor k, Tensor v, Tensor slots, Tensor table, Tensor? coins, str rule, "
    "float threshold, bool fine, float scale, int prefix, int depth, int limit) -> (Tensor, Tensor)"
)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, slot_tokens: Tensor, table: Tensor, coins: Tensor | None,
    rule: str, threshold: float, fine: bool, qk_scale_log2: float, prefix: int, depth: int,
    max_depth: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from bmfa.attention.kernels.triton.per_query.kernel import per_query_attention_kernel

    o, split_bits = _empty_outputs(q, v, depth, max_depth)
    (batch, heads, queries, dim), value_dim = q.shape, v.shape[-1]
    block_q, num_warps = BLOCK_Q_AND_WARPS[q.element_size()]
    if depth == MISCOMPILED_DEPTH:
        block_q, num_warps = SAFE_BLOCK_Q_AND_WARPS
    per_query_attention_kernel[(-(-queries // block_q), batch * heads)](
        q, k, v, o, split_bits, slot_tokens, table, slot_tokens if coins is None else coins,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
        heads, queries, dim, value_dim, qk_scale_log2, threshold,
        RULE=rule, FINE=fine, DEPTH=depth, MAX_DEPTH=max_depth, PREFIX=prefix,
        BLOCK_PREFIX=_dot_block(prefix), BLOCK_D=_dot_block(dim), BLOCK_DV=_dot_block(value_dim),
        WORDS=split_bits.shape[1], BLOCK_Q=block_q, HEADS_PER_KEY=heads // k.shape[1],
        num_warps=num_warps, num_stages=1,
    )  # fmt: skip
    return o, split_bits


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q, v, *rest[-2:])


for _device in ("CPU", "CUDA"):  # on a CPU in Triton's interpreter
    _library.impl("screen", _launch, _device)
torch.library.register_fake("bmfa::screen", _fake, lib=_library)
operator: Any = torch.ops.bmfa.screen.default


@register_flop_formula(torch.ops.bmfa.screen)
def _flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """Count the two products of dense attention: the kernel computes every score."""
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[2] * (dim + v[3])


def _empty_outputs(q: Tensor, v: Tensor, depth: int, max_depth: int) -> tuple[Tensor, Tensor]:
    """Allocate outputs in the layout (B, Q, H, DV) that models reshape, and the words of splits."""
    batch, heads, queries, _ = q.shape
    output = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    # The 64 blocks of the fourth level, the deepest that splits, take two more words.
    words = 1 if min(max_depth, depth - 1) < FIRST_WORD_LEVELS else 3
    return output, q.new_empty(batch * heads * queries, words, dtype=torch.int32)


def _dot_block(size: int) -> int:
    """Return the block of a dimension of `tl.dot`: a power of 2, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
