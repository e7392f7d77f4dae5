"""The specification of token reduction in float64 NumPy, one image at a time.

Shapes: x (T, C) holds the tokens, prefix tokens first; size (T,); keys (H, T, d), or their
    normalised means over heads (T, d).
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Pairs = list[tuple[int, int]]  # (source, destination)


def proportional_attention(
    q: Array, k: Array, v: Array, size: Array, scale: float, prefix: int
) -> tuple[Array, Array]:
    """Compute o_i = sum_j p_ij v_j with p_ij = size_j exp(scale q_i k_j) / sum_j, and the mass.

    mass_j is the mean of p_ij over heads and over the prefix queries i, over all queries if prefix
    is 0.

    Args:
        q: (H, T, d), as k and v.
        k: (H, T, d).
        v: (H, T, d).
        size: (T,).
        scale: factor of the scores.
        prefix: number of leading tokens that are not spatial.

    Returns:
        The output (H, T, d) and the mass (T,).
    """
    scores = scale * (q @ k.swapaxes(-1, -2))  # (H, T, T)
    weights = size * np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return weights @ v, weights[:, : prefix or None].mean((0, 1))


def unit_mean_keys(k: Array) -> Array:
    """Return (T, d): the mean over heads of the keys (H, T, d), divided by its norm."""
    mean = k.mean(0)
    return np.asarray(mean / np.linalg.norm(mean, axis=-1, keepdims=True))


def layer_norm(x: Array) -> Array:
    """Return (T, C): x less its mean, divided by sqrt(variance + 1e-5)."""
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5))


def match_bipartite(features: Array, weight: Array | None, r: int, prefix: int) -> Pairs:
    """Return the r cheapest pairs of an even and an odd position, cheapest first.

    cost(a, b) = (w_a + w_b) |f_a - f_b|^2, without the factor if weight is None. Each even position
    a is in one pair, with its cheapest b. Ties go to the lowest b, then to the lowest a.
    """
    tokens = len(features)
    odd = [b for b in range(prefix, tokens) if b % 2 == 1]

    def cost(a: int, b: int) -> float:
        factor = 1.0 if weight is None else float(weight[a] + weight[b])
        return factor * float(((features[a] - features[b]) ** 2).sum())

    even = [a for a in range(prefix, tokens) if a % 2 == 0]
    pairs = [min((cost(a, b), b, a) for b in odd) for a in even if odd]
    pairs.sort(key=lambda pair: (pair[0], pair[2]))
    return [(a, b) for _, b, a in pairs[:r]]


def bipartite_order(pairs: Pairs, tokens: int, prefix: int) -> list[int]:
    """Return the positions that remain in their new order: prefix, even, then odd positions."""
    left = set(range(tokens)) - {source for source, _ in pairs}
    spatial = sorted(left - set(range(prefix)), key=lambda position: (position % 2, position))
    return [*range(prefix), *spatial]


def kept_order(pairs: Pairs, tokens: int) -> list[int]:
    """Return the positions that remain, in their own order."""
    return sorted(set(range(tokens)) - {source for source, _ in pairs})


def groups(pairs: Pairs, order: list[int]) -> list[list[int]]:
    """Return, for each position that remains, itself and the sources that merge into it."""
    return [[kept, *(source for source, into in pairs if into == kept)] for kept in order]


def assignment(pairs: Pairs, order: list[int], tokens: int) -> list[int]:
    """Return the new position of every old token, -1 if it is in no group."""
    position = dict.fromkeys(range(tokens), -1)
    for new, members in enumerate(groups(pairs, order)):
        position.update(dict.fromkeys(members, new))
    return [position[token] for token in range(tokens)]


def pool(x: Array, size: Array, members: list[list[int]]) -> tuple[Array, Array]:
    """x'_g = sum_g size_i x_i / sum_g size_i and size'_g = sum_g size_i for each group g."""
    means = [(size[g, None] * x[g]).sum(0) / size[g].sum() for g in members]
    return np.stack(means), np.array([size[g].sum() for g in members])


def mlerp(x: Array, size: Array, members: list[list[int]]) -> tuple[Array, Array]:
    """Return the mean of each group, scaled to the largest norm in the group."""
    means, sizes = pool(x, size, members)
    norms = np.array([max(np.linalg.norm(x[i]) for i in g) for g in members])
    return means / np.linalg.norm(means, axis=1, keepdims=True) * norms[:, None], sizes


def pitome(keys: Array, r: int, prefix: int, layer: int, depth: int) -> Pairs:
    """Rank tokens by energy_i = mean_j ELU(cos_ij - 0.75 (1 - layer / depth)), descending.

    Even ranks are matched with their best odd rank and the r best pairs merge. From half of the
    depth on only the first 2 r ranks are matched.
    """
    cosines = keys @ keys.T
    spatial = range(prefix, len(keys))
    margin = 0.75 * (1 - layer / depth)
    excess = cosines - margin
    elu = np.where(excess > 0, excess, np.expm1(np.minimum(excess, 0)))
    energy = {i: float(np.mean([elu[i, j] for j in spatial])) for i in spatial}
    ranked = sorted(spatial, key=lambda i: (-energy[i], i))
    if layer >= depth / 2:
        ranked = ranked[: 2 * r]
    pairs = []
    for rank, a in enumerate(ranked[::2]):
        best = max(ranked[1::2], key=lambda b: cosines[a, b])
        pairs.append((-cosines[a, best], rank, a, best))
    return [(a, b) for *_, a, b in sorted(pairs)[:r]]


def crossget(keys: Array, r: int, prefix: int) -> Pairs:
    """Rank by the largest cosine; the r tokens with the largest cosine to a later rank are sources."""
    spatial = list(range(prefix, len(keys)))
    cosine = {(i, j): float(keys[i] @ keys[j]) for i in spatial for j in spatial if i != j}
    best = {i: max(cosine[i, j] for j in spatial if j != i) for i in spatial}
    ranked = sorted(spatial, key=lambda i: (-best[i], i))
    later = {i: ranked[rank + 1 :] for rank, i in enumerate(ranked)}
    left = {i: max((cosine[i, j] for j in later[i]), default=-math.inf) for i in spatial}
    sources = sorted(spatial, key=lambda i: (-left[i], i))[:r]
    kept = [i for i in spatial if i not in sources]
    return [(i, max(kept, key=lambda j: cosine[i, j])) for i in sources]


def diffrate(
    x: Array, size: Array, attention: Array, keep: int, final: int, prefix: int
) -> tuple[Array, Array, list[int]]:
    """Sort by attention, prefix first; keep P; merge ranks M..P-1 into the most similar of prefix..M-1.

    x' is the unweighted mean of a group; size'_dst = size_dst + sum size_src max(cosine, 0).

    Returns:
        The tokens, their sizes, and the new position of every old token, -1 if it was pruned.
    """
    spatial = sorted(range(prefix, len(x)), key=lambda i: (-attention[i], i))
    order = [*range(prefix), *spatial][:keep]
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    position = dict.fromkeys(range(len(x)), -1) | {
        old: new for new, old in enumerate(order[:final])
    }
    sizes = size[order[:final]].copy()
    for old in order[final:]:
        cosines = unit[order[prefix:final]] @ unit[old]
        position[old] = prefix + int(cosines.argmax())
        sizes[position[old]] += size[old] * max(float(cosines.max()), 0.0)
    members = [[i for i in range(len(x)) if position[i] == new] for new in range(final)]
    return np.stack([x[g].mean(0) for g in members]), sizes, [position[i] for i in range(len(x))]


def evit(x: Array, attention: Array, fraction: float, prefix: int) -> tuple[Array, list[int]]:
    """Keep the ceil(fraction n) tokens with most attention; fuse the rest to sum a_i x_i / sum a_i."""
    spatial = sorted(range(prefix, len(x)), key=lambda i: (-attention[i], i))
    count = math.ceil(round(fraction * len(spatial), 9))
    kept, rest = sorted(spatial[:count]), spatial[count:]
    fused = (attention[rest, None] * x[rest]).sum(0) / attention[rest].sum()
    order = [*range(prefix), *kept]
    position = {old: new for new, old in enumerate(order)} | dict.fromkeys(rest, len(order))
    return np.vstack((x[order], fused)), [position[i] for i in range(len(x))]


def dct(x: Array, new_length: int) -> Array:
    """Truncate an orthonormal DCT-II to M coefficients, invert at length M, and scale by sqrt(M / T).

    X_m = c_m sum_t x_t cos(pi m (2 t + 1) / (2 T)), c_0 = sqrt(1 / T), c_m = sqrt(2 / T).
    """
    tokens = len(x)

    def wave(m: int, t: int, length: int) -> float:
        norm = math.sqrt((1 if m == 0 else 2) / length)
        return norm * math.cos(math.pi * m * (2 * t + 1) / (2 * length))

    shared = range(min(new_length, tokens))
    spectrum = [sum(wave(m, t, tokens) * x[t] for t in range(tokens)) for m in shared]
    signal = [sum(wave(m, t, new_length) * spectrum[m] for m in shared) for t in range(new_length)]
    return np.asarray(signal) * math.sqrt(new_length / tokens)
