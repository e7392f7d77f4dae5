"""Screened attention on small grids in one Triton kernel: what it serves, its launch, its trees."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from bmfa.attention.kernels.triton import unsupported_reason as backend_unsupported_reason
from bmfa.attention.kernels.triton.per_query.tables import coins_of, tables
from bmfa.grid import Grid
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
SMALLEST_SIDE, LARGEST_SIDE = 3, 16
WIDEST = {2: 128, 4: 64}  # by bytes of a number: beyond, registers spill
# Above this, as in `trees.pyramid`, a threshold is told apart from 0 by plain exponentials of float32.
COARSE = 1000 * torch.finfo(torch.float32).eps
# Queries and warps of a program, pinned; by bytes of a number.
CONFIGURATION = {2: (64, 4), 4: (32, 4)}
# At this depth, in tiles of 64 queries and with heads up to 32 wide, Triton 3.6 hands what a query has
# once, as its Z, to the next level at the row of another query: neither is launched.
MIXED_DEPTH, UNMIXED, MIXED_WIDTH = 3, (32, 4), 32


class Question(NamedTuple):
    """A rule as the kernel takes it: its name, and a threshold in the kernel's units."""

    name: str
    threshold: float
    fine: bool = False  # whether differences of exponentials must hold near 0


def _gap_question(name: str) -> Callable[..., Question]:
    return lambda rule, tau: Question(
        name, rule.epsilon / tau * LOG2_E, rule.epsilon / tau <= COARSE
    )


QUESTIONS: dict[type[Rule], Callable[..., Question]] = {
    Gamma: _gap_question("gamma"),
    ExactGap: _gap_question("exact-gap"),
    QuadrantGap: _gap_question("quadrant-gap"),
    Variance: lambda rule, tau: Question("variance", 2 * rule.epsilon / tau * LOG2_E**2),
    Mass: lambda rule, tau: Question("mass", rule.epsilon, rule.epsilon <= COARSE),
    Optimal: lambda rule, tau: Question("optimal", rule.penalty, rule.penalty <= COARSE),
    FixedDepth: lambda rule, tau: Question("fixed-depth", rule.depth),
    GlobalMean: lambda rule, tau: Question("fixed-depth", 0),
    RandomQuadrants: lambda rule, tau: Question("random-quadrants", 0.0),
}


def unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, rule: Rule, valid: Tensor | None
) -> str | None:
    """Why this kernel does not serve a call; None where it does."""
    if (reason := backend_unsupported_reason(q.device)) is not None:
        return reason
    if q.dtype not in DTYPES:
        return f"the dtype is {q.dtype}; the kernel takes float16, bfloat16 and float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "gradients are asked for, and the kernel has no backward; use torch.no_grad()"
    if valid is not None:
        return "valid= is given, and the kernel takes no padding"
    sides = sorted((grid.height, grid.width))
    if not SMALLEST_SIDE <= sides[1] <= LARGEST_SIDE:
        return (
            f"the grid is {grid.height}x{grid.width}; the kernel takes a longer side of "
            f"{SMALLEST_SIDE} to {LARGEST_SIDE} tokens"
        )
    width, widest = max(q.shape[-1], v.shape[-1]), WIDEST[q.element_size()]
    if width > widest:
        return f"a head is {width} wide; the kernel takes up to {widest} in {q.dtype}"
    if q.is_cuda and grid.depth == MIXED_DEPTH and q.shape[-1] <= MIXED_WIDTH:
        return (
            f"heads are {q.shape[-1]} wide, and on grids of 5 to 8 tokens Triton 3.6 mixes up the "
            f"queries of heads up to {MIXED_WIDTH}"
        )
    if q.numel() == 0 or v.numel() == 0:
        return "there is no query"
    return _unsupported_rule(rule)


def _unsupported_rule(rule: Rule) -> str | None:
    served = ", ".join(sorted(kind.__name__ for kind in QUESTIONS))
    if type(rule) not in QUESTIONS:
        return f"the rule is {rule}; the kernel takes {served}"
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
    """(B, heads, Q, *) outputs and (B heads Q, words) marks of the splits, for `decided`.

    Nothing waits for the device. A score that is NaN or +inf makes the outputs of its query NaN.
    """
    slots, table = tables(grid, prefix, order, q.device)
    question = QUESTIONS[type(rule)](rule, tau)
    coins = None
    if isinstance(rule, RandomQuadrants):
        coins = coins_of(rule, q.shape[:3].numel(), grid, q.device)
    limit = grid.depth if max_depth is None else min(max_depth, grid.depth)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    output, marks = screen(
        q, k, v, slots, table, coins, question.name, float(question.threshold), question.fine,
        scale / tau * LOG2_E, prefix, grid.depth, limit,
    )  # fmt: skip
    return output, marks


# Defined without the wrappers of torch.library.custom_op, which cost 10 to 25 microseconds a call.
_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "screen(Tensor q, Tensor k, Tensor v, Tensor slots, Tensor table, Tensor? coins, str rule, "
    "float threshold, bool fine, float scale, int prefix, int depth, int limit) -> (Tensor, Tensor)"
)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, table: Tensor, coins: Tensor | None,
    rule: str, threshold: float, fine: bool, scale: float, prefix: int, depth: int, limit: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One program for each tile of queries of one head of one picture."""
    from bmfa.attention.kernels.triton.per_query.kernel import screened_attention_kernel

    output, marks = _outputs(q, v, depth, limit)
    (batch, heads, queries, width), value_width = q.shape, v.shape[-1]
    tile, warps = UNMIXED if depth == MIXED_DEPTH else CONFIGURATION[q.element_size()]
    screened_attention_kernel[(-(-queries // tile), batch * heads)](
        q, k, v, output, marks, slots, table, slots if coins is None else coins,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *output.stride()[:3],
        heads, queries, width, value_width, scale, threshold,
        RULE=rule, FINE=fine, DEPTH=depth, LIMIT=limit, PREFIX=prefix, PREFIX_TILE=_tile(prefix),
        WIDTH=_tile(width), VALUE_WIDTH=_tile(value_width), WORDS=marks.shape[1], QUERIES=tile,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return output, marks


for _device in ("CPU", "CUDA"):  # on a CPU in Triton's interpreter
    _library.impl("screen", _launch, _device)
screen: Any = torch.ops.bmfa.screen.default


@torch.library.register_fake("bmfa::screen", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, table: Tensor, coins: Tensor | None,
    rule: str, threshold: float, fine: bool, scale: float, prefix: int, depth: int, limit: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _outputs(q, v, depth, limit)


@register_flop_formula(torch.ops.bmfa.screen)
def _flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """The two products of dense attention: the kernel computes every score to decide on it."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (width + v[3])


def _outputs(q: Tensor, v: Tensor, depth: int, limit: int) -> tuple[Tensor, Tensor]:
    """Outputs laid out as hosts merge heads, (B, Q, heads, *), and marks, both unwritten."""
    batch, heads, queries, _ = q.shape
    output = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    deepest = min(limit, depth - 1)
    words = 1 if deepest < 3 else 3
    return output, q.new_empty(batch * heads * queries, words, dtype=torch.int32)


def _tile(size: int) -> int:
    """The tile of a dimension of a product: a power of 2, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
