"""Every token scored by the representatives: the free energy and the gap of each tile."""

import triton
import triton.language as tl

from bmfa.attention.kernels.triton.tiles.tokens import existing, load_rows, tokens_of


@triton.jit
def gather_parts(
    cross_parts, cross, counts, prefix_tops, prefix_masses, prefix_outputs, output,
    o_batch, o_head, o_row, heads, prefix, tiles, head, strip, parts, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STRIP: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Add up what the pooling programs left: rows of the first-order matrix, prefix outputs."""
    wide = head.to(tl.int64)
    columns, lines = tl.arange(0, BLOCK_D), strip * STRIP + tl.arange(0, STRIP)
    square = lines[:, None] * D + columns[None, :]
    within = (lines < D)[:, None] & (columns < D)[None, :]
    moment = tl.zeros((STRIP, BLOCK_D), tl.float32)
    for part in range(parts):
        place = cross_parts + (wide * parts + part) * (D * D)
        moment += tl.load(place + square, mask=within, other=0.0).to(tl.float32)
    total = 0.0
    for start in range(0, tiles, 1024):
        places = start + tl.arange(0, 1024)
        total += tl.sum(tl.load(counts + wide * tiles + places, mask=places < tiles, other=0.0), 0)
    moment *= factor / tl.maximum(total, 1.0)
    target = cross + wide * (D * D) + square
    tl.store(target, moment.to(cross.dtype.element_ty), mask=within)
    for own in range(strip, prefix, tl.cdiv(D, STRIP)):
        shares = tl.arange(0, BLOCK_P)
        place = (wide * parts + shares) * prefix + own
        known = shares < parts
        tops = tl.load(prefix_tops + place, mask=known, other=float("-inf"))
        weights = tl.exp2(tops - tl.max(tops, 0))
        mass = tl.sum(weights * tl.load(prefix_masses + place, mask=known, other=0.0), 0)
        pointers = prefix_outputs + place[:, None] * D + columns[None, :]
        outputs = tl.load(pointers, mask=known[:, None] & (columns < D)[None, :], other=0.0)
        result = tl.sum(weights[:, None] * outputs, 0) / mass
        row = output + (wide // heads) * o_batch + (wide % heads) * o_head + own * o_row
        tl.store(row + columns, result.to(output.dtype.element_ty), mask=columns < D)


@triton.jit
def score(
    k, valid, kbar, qbar, counts, energy, gap,
    cross_parts, cross, prefix_tops, prefix_masses, prefix_outputs, output,
    k_batch, k_head, k_row, o_batch, o_head, o_row,
    heads, prefix, height, width, across, tiles, first, rows, groups, chunks, parts, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, LOOP: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_P: tl.constexpr, SIDE: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (LOOP tiles, representatives, head): energy = log sum exp, gap = energy - log n - mean.

    Representatives are `first` to `first + rows`; the mean is the product with the stored mean key, so
    that the gap also makes up for that key's rounding. Programs past the tiles gather the pool.
    """
    chunk, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, place, wide = (
        (head // heads).to(tl.int64),
        (head % heads).to(tl.int64),
        head.to(tl.int64),
    )
    if chunk >= chunks:
        if block == 0 and first == 0:
            gather_parts(
                cross_parts, cross, counts, prefix_tops, prefix_masses, prefix_outputs, output,
                o_batch, o_head, o_row, heads, prefix, tiles, head, chunk - chunks, parts, factor,
                D, BLOCK_D, STRIP, BLOCK_P,
            )  # fmt: skip
    else:
        k += batch * k_batch + place * k_head + prefix * k_row
        valid += batch * height * width
        local = block * ROWS + tl.arange(0, ROWS)
        asked = load_rows(qbar + wide * groups * D, first + local, D, local < rows, D, BLOCK_D)
        slots, members = tl.arange(0, SIDE * SIDE), tl.arange(0, TILES)
        tops = tl.full((ROWS, TILES), float("-inf"), tl.float32)
        sums = tl.zeros((ROWS, TILES), tl.float32)
        for member in range(LOOP):
            tile = chunk * LOOP + member
            tokens, on_grid = tokens_of(tile, slots, height, width, across, ALIGNED, SIDE)
            exists = existing(valid, tokens, on_grid & (tile < tiles), MASKED)
            keys = load_rows(k, tokens, k_row, exists, D, BLOCK_D)
            scores = tl.dot(asked, tl.trans(keys), input_precision=PRECISION) * factor
            scores = tl.where(exists[None, :], scores, float("-inf"))
            top = tl.max(scores, 1)
            level = tl.where(top == float("-inf"), 0.0, top)
            mass = tl.sum(tl.exp(scores - level[:, None]), 1)
            here = (members == member)[None, :]
            tops = tl.where(here, level[:, None], tops)
            sums = tl.where(here, mass[:, None], sums)
        energies = tops + tl.log(tl.where(sums > 0.0, sums, 1.0))
        energies = tl.where(sums > 0.0, energies, float("-inf"))
        places = chunk * LOOP + members
        known = (members < LOOP) & (places < tiles)
        means = load_rows(kbar + wide * tiles * D, places, D, known, D, BLOCK_D)
        mean = tl.dot(asked, tl.trans(means), input_precision=PRECISION) * factor
        count = tl.load(counts + wide * tiles + places, mask=known, other=0.0)
        # A tile of one token has no gap, whatever the rounding of its stored mean key.
        free = energies - tl.log(tl.maximum(count, 1.0))[None, :] - mean
        # What rounding alone may leave counts as none.
        real = (count > 1.0)[None, :] & (free > 1e-6 * (4.0 + tl.abs(mean)))
        free = tl.where(real, tl.minimum(free, 6e4), 0.0)
        offsets = (wide * rows + local.to(tl.int64))[:, None] * tiles + places[None, :]
        stored = (local < rows)[:, None] & known[None, :]
        tl.store(energy + offsets, energies, mask=stored)
        tl.store(gap + offsets, free.to(gap.dtype.element_ty), mask=stored)
