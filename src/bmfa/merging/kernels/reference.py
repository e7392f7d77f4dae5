"""The specification of token reduction: one picture at a time, in float64 NumPy.

x is (T, C) with the prefix first, size (T,), keys (heads, T, d) or their unit mean (T, d).
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Pairs = list[tuple[int, int]]  # (source, destination)


def attend(
    q: Array, k: Array, v: Array, size: Array, scale: float, prefix: int
) -> tuple[Array, Array]:
    """softmax_j(q_i . k_j scale + log size_j) v_j for each head, and the mass (T, 2).

    mass[j, 0] = mean over heads and prefix queries i of the attention of i on j; mass[j, 1] the same
    over the other queries; without prefix both are the latter.
    """
    weights = np.zeros((len(q), q.shape[1], k.shape[1]))
    for head in range(len(q)):
        for i in range(q.shape[1]):
            mass = size * np.exp(scale * (k[head] @ q[head, i] - np.max(k[head] @ q[head, i])))
            weights[head, i] = mass / mass.sum()
    others = weights[:, prefix:].mean((0, 1))
    first = weights[:, :prefix].mean((0, 1)) if prefix else others
    return weights @ v, np.stack((first, others), -1)


def unit_keys(k: Array) -> Array:
    """(T, d) k_j = mean over heads of the keys, divided by its length."""
    mean = k.mean(0)
    return np.asarray(mean / np.linalg.norm(mean, axis=-1, keepdims=True))


def bipartite(
    features: Array, weight: Array | None, r: int, prefix: int, pair: str = "none"
) -> Pairs:
    """The r cheapest edges from even to odd positions, cheapest first.

    cost(a, b) = p |f_a - f_b|^2 with p = 1, w_a + w_b, or w_a w_b / (w_a + w_b) and 0 where both are
    0. Each even position a has one edge, to its cheapest b. Ties: the lowest b, then the lowest a.
    """
    tokens = len(features)
    edges = []
    for a in range(prefix, tokens):
        odd = [b for b in range(prefix, tokens) if b % 2 == 1]
        if a % 2 == 0 and odd:
            edges.append(min((_cost(features, weight, a, b, pair), b, a) for b in odd))
    edges.sort(key=lambda edge: (edge[0], edge[2]))
    return [(a, b) for _, b, a in edges[:r]]


def _cost(f: Array, weight: Array | None, a: int, b: int, pair: str) -> float:
    distance = float(((f[a] - f[b]) ** 2).sum())
    if pair == "none" or weight is None:
        return distance
    w_a, w_b = float(weight[a]), float(weight[b])
    if pair == "sum":
        return (w_a + w_b) * distance
    return w_a * w_b / (w_a + w_b) * distance if w_a + w_b > 0 else 0.0


def bipartite_order(pairs: Pairs, tokens: int, prefix: int) -> list[int]:
    """The old positions that stay, in their new order: prefix, even positions, odd positions."""
    left = set(range(tokens)) - {source for source, _ in pairs}
    spatial = sorted(left - set(range(prefix)), key=lambda position: (position % 2, position))
    return [*range(prefix), *spatial]


def kept_order(pairs: Pairs, tokens: int) -> list[int]:
    """The old positions that stay, in their own order."""
    return sorted(set(range(tokens)) - {source for source, _ in pairs})


def groups(pairs: Pairs, order: list[int]) -> list[list[int]]:
    """For each position that stays, it and its sources."""
    return [[stay, *(source for source, into in pairs if into == stay)] for stay in order]


def targets(pairs: Pairs, order: list[int], tokens: int) -> list[int]:
    """The new position of every old token, -1 where it belongs to no group."""
    place = dict.fromkeys(range(tokens), -1)
    for new, members in enumerate(groups(pairs, order)):
        place.update(dict.fromkeys(members, new))
    return [place[token] for token in range(tokens)]


def pool(x: Array, size: Array, members: list[list[int]]) -> tuple[Array, Array]:
    """x'_g = sum_g size_i x_i / sum_g size_i and size'_g = sum_g size_i for each group g."""
    means = [(size[g, None] * x[g]).sum(0) / size[g].sum() for g in members]
    return np.stack(means), np.array([size[g].sum() for g in members])


def mlerp(x: Array, size: Array, members: list[list[int]]) -> tuple[Array, Array]:
    """The direction of each group's mean with the largest norm in the group."""
    means, sizes = pool(x, size, members)
    norms = np.array([max(np.linalg.norm(x[i]) for i in g) for g in members])
    return means / np.linalg.norm(means, axis=1, keepdims=True) * norms[:, None], sizes


def pitome(keys: Array, r: int, prefix: int, layer: int, depth: int) -> Pairs:
    """Energy_i = mean_j ELU(cos_ij - 0.75 (1 - l/L)); ranks by energy, descending.

    l < L/2: even ranks to their best odd rank, the r best edges. Later: the same among the first 2 r
    ranks, where every even rank has its edge.
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
    edges = []
    for rank, a in enumerate(ranked[::2]):
        best = max(ranked[1::2], key=lambda b: cosines[a, b])
        edges.append((-cosines[a, best], rank, a, best))
    return [(a, b) for *_, a, b in sorted(edges)[:r]]


def crossget(keys: Array, r: int, prefix: int) -> Pairs:
    """Rank by the largest cosine; sources: the r largest cosines to later ranks; see `CrossGET`."""
    spatial = list(range(prefix, len(keys)))
    cosine = {(i, j): float(keys[i] @ keys[j]) for i in spatial for j in spatial if i != j}
    best = {i: max(cosine[i, j] for j in spatial if j != i) for i in spatial}
    ranked = sorted(spatial, key=lambda i: (-best[i], i))
    later = {i: ranked[place + 1 :] for place, i in enumerate(ranked)}
    left = {i: max((cosine[i, j] for j in later[i]), default=-math.inf) for i in spatial}
    sources = sorted(spatial, key=lambda i: (-left[i], i))[:r]
    stay = [i for i in spatial if i not in sources]
    return [(i, max(stay, key=lambda j: cosine[i, j])) for i in sources]


def diffrate(
    x: Array, size: Array, attention: Array, keep: int, final: int, prefix: int
) -> tuple[Array, Array, list[int]]:
    """Sort by attention, prefix first; keep P; each of M..P-1 joins the most similar of prefix..M-1.

    x' is the unweighted mean of a group; size'_dst = size_dst + sum size_src max(cosine, 0). Returns
    the tokens, their sizes and the new position of every old token, -1 where it was pruned.
    """
    spatial = sorted(range(prefix, len(x)), key=lambda i: (-attention[i], i))
    order = [*range(prefix), *spatial][:keep]
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    place = dict.fromkeys(range(len(x)), -1) | {old: new for new, old in enumerate(order[:final])}
    sizes = size[order[:final]].copy()
    for old in order[final:]:
        cosines = unit[order[prefix:final]] @ unit[old]
        place[old] = prefix + int(cosines.argmax())
        sizes[place[old]] += size[old] * max(float(cosines.max()), 0.0)
    members = [[i for i in range(len(x)) if place[i] == new] for new in range(final)]
    return np.stack([x[g].mean(0) for g in members]), sizes, [place[i] for i in range(len(x))]


def evit(x: Array, attention: Array, share: float, prefix: int) -> tuple[Array, list[int]]:
    """Keep ceil(share T) tokens with the most attention; the rest is sum a_i x_i / sum a_i."""
    spatial = sorted(range(prefix, len(x)), key=lambda i: (-attention[i], i))
    stay = math.ceil(round(share * len(spatial), 9))
    kept, rest = sorted(spatial[:stay]), spatial[stay:]
    fused = (attention[rest, None] * x[rest]).sum(0) / attention[rest].sum()
    order = [*range(prefix), *kept]
    place = {old: new for new, old in enumerate(order)} | dict.fromkeys(rest, len(order))
    return np.vstack((x[order], fused)), [place[i] for i in range(len(x))]


def dct(x: Array, left: int) -> Array:
    """The first M coefficients of an orthonormal DCT-II, its inverse of length M, sqrt(M / T).

    X_m = c_m sum_t x_t cos(pi m (2 t + 1) / (2 T)), c_0 = sqrt(1 / T), c_m = sqrt(2 / T).
    """
    tokens = len(x)

    def wave(m: int, t: int, length: int) -> float:
        norm = math.sqrt((1 if m == 0 else 2) / length)
        return norm * math.cos(math.pi * m * (2 * t + 1) / (2 * length))

    shared = range(min(left, tokens))
    spectrum = [sum(wave(m, t, tokens) * x[t] for t in range(tokens)) for m in shared]
    signal = [sum(wave(m, t, left) * spectrum[m] for m in shared) for t in range(left)]
    return np.asarray(signal) * math.sqrt(left / tokens)
