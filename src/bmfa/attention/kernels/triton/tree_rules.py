"""What each rule asks of the blocks of one level, for a tile of queries.

Blocks are (Q, n), their children (Q, 4, n); weights are the shares of the children in their block. What
a rule carries upwards, it finds at the children in `below`; tokens carry nothing. Scores are over tau
and in units of log 2, so that exponentials are powers of 2.
"""

import triton
import triton.language as tl

# What counts as 0: so many roundings of float32, as in `bmfa.trees.pyramid`.
ROUNDING = tl.constexpr(8 * 2.0**-23)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def power(x, FINE: tl.constexpr):
    """2^x, or where FINE 2^x - 1 to within rounding of itself; x <= 0, or barely above."""
    result = tl.exp2(x)
    if FINE:
        near = x * LOG_2
        series = 1 / 5040 + near * (1 / 40320)
        series = 1 / 720 + near * series
        series = 1 / 120 + near * series
        series = 1 / 24 + near * series
        series = 1 / 6 + near * series
        series = 1 / 2 + near * series
        result = tl.where(x > -0.7, near + near * near * series, result - 1.0)
    return result


@triton.jit
def logarithm(x, FINE: tl.constexpr):
    """log2 of x, or where FINE of 1 + x: the inverse of `power`."""
    if FINE:
        whole = 1.0 + x
        flat = whole == 1.0
        slope = x / tl.where(flat, 1.0, whole - 1.0)  # undoes the rounding of the sum
        result = tl.where(flat, x / LOG_2, tl.log2(whole) * slope)
    else:
        result = tl.log2(x)
    return result


@triton.jit
def settle(value, terms):
    """The value, or 0 where it is no larger than the rounding of what it was computed from."""
    return tl.where(value > terms * ROUNDING, value, 0.0)


@triton.jit
def block_step(children, weights, magnitude, DEEPEST: tl.constexpr):
    """The largest child mean, offsets from it, their mean and the mean of each block.

    A spread within the rounding of scores of that magnitude is none; tokens are exact.
    """
    largest = tl.max(children, 1)
    offsets = children - largest[:, None, :]
    shift = tl.sum(weights * offsets, 1)
    mean = largest + shift
    if not DEEPEST:
        flat = tl.abs(shift) <= magnitude[:, None] * ROUNDING
        offsets = tl.where(flat[:, None, :], 0.0, offsets)
        shift = tl.where(flat, 0.0, shift)
    return largest, offsets, shift, mean


@triton.jit
def gamma_exceeds(offsets, weights, shift, threshold, FINE: tl.constexpr):
    """Gamma > threshold, without its logarithm: sum_C w_C 2^offset > 2^(shift + threshold)."""
    lift = tl.sum(weights * power(offsets, FINE), 1)
    bar = tl.maximum(tl.abs(shift) * ROUNDING, threshold)
    return lift > power(shift + bar, FINE)


@triton.jit
def exact_gaps(offsets, weights, shift, below, FINE: tl.constexpr, DEEPEST: tl.constexpr):
    """The exact gap from those of the children: log sum_C w_C 2^(offset + gap) - shift."""
    top = tl.zeros_like(shift)
    if not DEEPEST:
        offsets += below
        top = tl.max(offsets, 1)
        offsets -= top[:, None, :]
    lift = tl.sum(weights * power(offsets, FINE), 1)
    return settle(top + logarithm(lift, FINE) - shift, tl.abs(top) + tl.abs(shift))


@triton.jit
def variances(offsets, weights, shift, below, DEEPEST: tl.constexpr):
    """The population variance from those of the children."""
    apart = offsets - shift[:, None, :]
    spread = apart * apart
    if not DEEPEST:
        spread += below
    return tl.sum(weights * spread, 1)


@triton.jit
def recovered(offsets, weights, shift, mass, scale, FINE: tl.constexpr, DEEPEST: tl.constexpr):
    """The share of Z that each split recovers, and 1 / Z; `mass` is n 2^largest of each block."""
    lift = tl.sum(weights * power(offsets, FINE), 1)
    if DEEPEST:
        held = 1.0 + lift if FINE else lift
        scale = 1.0 / tl.sum(mass * held, 1)
    flat = power(shift, FINE)
    excess = lift - flat
    if FINE:
        excess = settle(excess, tl.abs(flat))
    return excess * mass * scale[:, None], scale
