"""Which tiles a query group expands: compact lists by an error target or a budget."""

import triton
import triton.language as tl


@triton.jit
def least_threshold(bits, loss, target, budget, BY_ERROR: tl.constexpr):
    """By error, the largest t with the losses below t within the target; else the least t that no
    more than `budget` losses reach. Losses are compared by their bits: not negative, so in order."""
    low, high = 0, 0x3F800002  # above the bits of 1
    for _ in range(31):
        middle = (low + high) // 2
        if BY_ERROR:
            up = tl.sum(tl.where(bits < middle, loss, 0.0), 0) <= target
        else:
            up = tl.sum((bits >= middle).to(tl.int32), 0) > budget
        low = tl.where(up, middle, low)
        high = tl.where(up, high, middle)
    return low if BY_ERROR else high


@triton.jit
def select(
    k, qbar, key_spread, query_spread, counts, energy, gap, amounts, tops, masses, words,
    k_batch, k_head, k_row, heads, prefix, tiles, first, rows, groups, factor, target, budget,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BY_ERROR: tl.constexpr,
    GAP_CAP: tl.constexpr,
):  # fmt: skip
    """Program (representative, head). The row of `energy` becomes the list of expanded tiles, their
    gaps become -inf; bits of `words` mark the tiles that stay, `tops` and `masses` scale their sums."""
    row, head = tl.program_id(0), tl.program_id(1)
    batch, place, wide = (
        (head // heads).to(tl.int64),
        (head % heads).to(tl.int64),
        head.to(tl.int64),
    )
    line = wide * rows + row
    offset = line * tiles
    places, columns = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    known = places < tiles
    energies = tl.load(energy + offset + places, mask=known, other=float("-inf"))
    free = tl.load(gap + offset + places, mask=known, other=0.0).to(tl.float32)
    count = tl.load(counts + wide * tiles + places, mask=known, other=0.0)
    apart = tl.load(key_spread + wide * tiles + places, mask=known, other=0.0)
    apart *= tl.load(query_spread + wide * groups + first + row)
    capped = tl.minimum(free + apart, GAP_CAP)
    asked = tl.load(qbar + (wide * groups + first + row) * D + columns, mask=columns < D, other=0.0)
    k += batch * k_batch + place * k_head
    top = tl.max(energies, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.exp(energies - top)
    partition = tl.sum(mass, 0)
    for token in range(prefix):
        own = tl.load(k + token * k_row + columns, mask=columns < D, other=0.0)
        score = tl.sum(asked.to(tl.float32) * own.to(tl.float32), 0) * factor
        partition += tl.exp(tl.minimum(score - top, 80.0))
    loss = mass * (1.0 - tl.exp(-capped)) / tl.maximum(partition, 1e-30)
    bits = loss.to(tl.int32, bitcast=True)
    threshold = least_threshold(bits, loss, target, budget, BY_ERROR)
    chosen = (bits >= threshold) & (bits > 0)
    if not BY_ERROR:
        tied = (bits == threshold - 1) & (bits > 0)
        left = budget - tl.sum(chosen.to(tl.int32), 0)
        chosen = chosen | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= left))
        chosen = chosen | (known & (budget >= tiles))
    chosen = chosen & (count > 0.0)
    stays = (count > 0.0) & (chosen == 0)
    tl.store(amounts + wide * groups + first + row, tl.sum(chosen.to(tl.int32), 0))
    tl.store(tops + line, top)
    tl.store(masses + line, tl.sum(tl.where(stays, mass, 0.0), 0))
    listed = (energy + offset).to(tl.pointer_type(tl.int32))
    tl.store(listed + tl.cumsum(chosen.to(tl.int32), 0) - 1, places, mask=chosen)
    after = tl.where(stays, capped, float("-inf"))
    tl.store(gap + offset + places, after.to(gap.dtype.element_ty), mask=known)
    lanes = tl.reshape(stays.to(tl.int32), (BLOCK_T // 32, 32)) << tl.arange(0, 32)[None, :]
    each = tl.arange(0, BLOCK_T // 32)
    length = tl.cdiv(tiles, 32)
    target_words = words + (wide * groups + first + row) * length + each
    tl.store(target_words, tl.sum(lanes, 1), mask=each < length)
