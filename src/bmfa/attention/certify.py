"""A proven bound on |output - exact| of every query, from all scores, for an output that was returned.

The exact output is computed in float64 and its distance is measured, so that corrections and every
rounding of a kernel are in it; the bound is above the distance by rounding alone. E is known for each
form: 0 for dense attention, `bmfa.trees.certificates.exact_error` for trees, and for tiles as follows.

Let c = scale / tau, and let a be step 4 of `bmfa.attention.kernels.reference.tiles` without its
correction, for any representative qbar of the group and the tiles that a backend has expanded:

    an unexpanded tile L has the logit T_L(q) = A_L(qbar) + c (q - qbar) . k_L and the value v_L,
    A_L(q) = log sum_{i in L} exp(c q . k_i), with k_L and v_L the means under p = softmax over L of
    c qbar . k_i; expanded tiles and the prefix are exact.

a is an attention: token i of L has the weight w_L p_i. Its divergence from exact attention is

    KL(a || exact) = log Z - log Z~ = log sum_j w_j exp(d_j),

where d_L = A_L(q) - T_L(q) >= 0 (the tangent of a convex function) is the divergence of p from softmax
over L of c q . k_i, and d_j = 0 for exact tokens: the logarithm of the ratio of the two distributions is
d_L - c (q - qbar) . (k_i - k_L), whose last term has the mean 0 under p. E = tau KL.

Rounding errors are bounded by `score_rounding`, `attention_rounding` and `_divergence`, and results
are rounded up.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bmfa.attention.call import Call, check_tensors, flatten_heads
from bmfa.attention.kernels import eager
from bmfa.attention.kernels.eager.tiles.heads import chunks, to_tiles
from bmfa.attention.result import Screened
from bmfa.attention.tiling import slots_with_tokens, tiles_to_tokens, unflatten
from bmfa.checks import has_values
from bmfa.trees.certificates import exact_error

# Two roundings: matrix units may truncate, and exponentials are accurate to two roundings.
UNIT = 2 * torch.finfo(torch.float64).eps


class Certificate(NamedTuple):
    """Proven bounds for every query; 0 for invalid queries, infinity where nothing is known (NaN).

    Attributes:
        distance: (B, H, Q) float64, at least |output - exact|, in units of the values.
        energy: (B, H, Q) float64, at least E = tau KL(attention || exact attention) over all keys. For
            tiles, the attention before the first-order correction, which is not a distribution.
    """

    distance: Tensor
    energy: Tensor


@torch.no_grad()
def certify(q: Tensor, k: Tensor, v: Tensor, screened: Screened) -> Certificate:
    """Bound the distance of an output of `screened_attention` from exact attention, for every query.

    All scores are computed in float64, which takes several times as long as dense attention: this checks
    a setting. `stats.error` measures the error of every call at little cost.

    Args:
        q: (B, H, Q, d), k: (B, H or a divisor of it, prefix + N, d) and v: (B, as many, prefix + N, e)
            as they were passed to `screened_attention`. Exact attention is that of these tensors:
            under autocast, what is lost by casting them counts.
        k: Keys.
        v: Values.
        screened: Result of the call.

    Returns:
        A `Certificate`, which unpacks as `distance, energy`: (B, H, Q) float64 each.

    Raises:
        ValueError: If the tensors are not those of the call, or their values cannot be read.

    Example:
        >>> import torch, bmfa
        >>> q, k, v = torch.randn(3, 1, 2, 196, 16, generator=torch.Generator().manual_seed(0))
        >>> screened = bmfa.screened_attention(q, k, v, grid=(14, 14), leaves=0.2, allow_dense=False)
        >>> distance, energy = bmfa.certify(q, k, v, screened)
        >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> bool(((screened.output - exact).norm(dim=-1) <= distance + 1e-5).all())
        True
    """
    output, stats = screened
    call, valid = stats.call, stats.valid
    check_tensors(q, k, v)
    keys = call.prefix + call.grid.size
    if (*q.shape[:3], v.shape[-1]) != output.shape or k.shape[2] != keys:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}, and the call "
            f"had {keys} keys and an output of shape {tuple(output.shape)}; pass the tensors of the "
            "call"
        )
    if not (has_values(q) and has_values(output)):
        raise ValueError("values cannot be read in a graph or on the meta device; certify outside")
    if q.numel() == 0:
        return Certificate(*(q.new_zeros(q.shape[:3], dtype=torch.float64) for _ in range(2)))
    flat = flatten_heads(q, k, v, valid, call, torch.float64)
    distance = _bound_distance(flat, output, valid, call)
    if stats.form == "dense":
        energy = torch.zeros_like(distance)
    elif stats.tiles is None:
        queries, spatial, before = flat[0] * call.scale, flat[1][:, call.prefix :], flat[1]
        tree = screened.tree.flat()
        energy = exact_error(queries, spatial, tree, before[:, : call.prefix]).view(q.shape[:3])
    else:
        energy = _tile_energy(flat, stats.tiles.expanded, valid, call)
    bounds = [x.where(x == x, torch.inf) for x in (distance, energy)]  # NaN: nothing is known
    if (mask := call.query_mask(valid)) is not None:
        bounds = [x.where(mask.unsqueeze(1), 0.0) for x in bounds]
    return Certificate(*bounds)


def score_rounding(dim: int, largest_score: Tensor) -> Tensor:
    """Bound the rounding error of c q . k, from c |q| max |k|.

    A sum of d products in any order is off by less than d + 2 roundings of sum |q_i k_i| <= |q| |k|; c,
    the rounding of q and k, and the differences and logarithms that follow add less than 14 more.
    """
    return torch.finfo(torch.float64).eps * (dim + 16) * largest_score


def attention_rounding(
    score: Tensor, terms: int, diameter: Tensor, largest_value: Tensor
) -> Tensor:
    """Bound the rounding error of an attention over `terms` tokens whose scores are off by `score`.

    Logits that are off by r change the output by at most D tanh(r / 2), where D is the diameter of the
    values: the logarithm of the ratio of the two distributions has a range of at most 2 r, and then
    their total variation is largest for two points with the ratios exp(+-r). Exponentials, sums of
    weights and weighted sums of values are off by at most terms + 64 units of the largest value.
    """
    return diameter * score / 2 + UNIT * (terms + 64) * largest_value


def _bound_distance(
    flat: tuple[Tensor, Tensor, Tensor], output: Tensor, valid: Tensor | None, call: Call
) -> Tensor:
    """(B, H, Q) upper bound on |output - exact|, from q, k, v (G, *, *) in float64."""
    q, k, v = flat
    mask = call.key_mask(valid)
    if mask is not None:
        mask = mask.expand(len(output), -1).repeat_interleave(output.shape[1], 0)
    exact = eager.dense_attention(q, k, v, scale=call.scale, tau=call.tau, valid=mask)
    largest_key, largest_value = (_norm(x).amax(1, keepdim=True) for x in (k, v))  # (G, 1)
    largest_score = abs(call.factor) * _norm(q) * largest_key
    # A difference and a norm are off by less than e + 8 units of the largest value.
    radius = _norm(v - v.mean(1, keepdim=True))
    if mask is not None:
        radius = radius.where(mask, 0.0)
    diameter = 2 * radius.amax(1, keepdim=True) + 4 * UNIT * (v.shape[-1] + 8) * largest_value
    own = score_rounding(q.shape[-1], largest_score)
    rounding = attention_rounding(own, k.shape[1], diameter, largest_value)
    distance = _norm(output.double().flatten(0, 1) - exact)
    return _round_up(distance + rounding).view(output.shape[:3])


def _tile_energy(
    flat: tuple[Tensor, Tensor, Tensor], expanded: Tensor, valid: Tensor | None, call: Call
) -> Tensor:
    """(B, H, Q) upper bound on E of tiles before the correction.

    Args:
        flat: q and k (G, tokens, d) in float64, one head of keys for each head of queries.
        expanded: (B, H, R, T) bool, the tiles that each group reads token by token.
        valid: Spatial tokens that exist.
        call: Description of the call.
    """
    q, k, _ = flat
    tiling, prefix, first = call.tiling, call.prefix, call.query_prefix
    batch, heads = expanded.shape[:2]
    query_valid = valid if tiling.query_grid is None else None
    key_slots = slots_with_tokens(tiling, valid, q.device).expand(batch, -1, -1)
    query_slots = slots_with_tokens(tiling.queries, query_valid, q.device).expand(batch, -1, -1)
    divergence = q.new_zeros(q.shape[:2])
    for head, marks in enumerate(expanded.flatten(0, 1)):
        exist, query_exist = key_slots[head // heads], query_slots[head // heads]
        before, keys = k[head, :prefix], to_tiles(k[head, prefix:], tiling, exist, q.dtype)
        queries = to_tiles(q[head, first:], tiling.queries, query_exist, q.dtype)
        q_mean = queries.sum(1) / query_exist.sum(1, keepdim=True).clamp(min=1)
        parts = [
            _divergence(queries[at], q_mean[at], keys, before, exist, marks[at], call.factor)
            for at in chunks(len(queries), queries.shape[1] * exist.numel(), q.device)
        ]
        spatial = torch.cat(parts).unsqueeze(0).unsqueeze(-1)  # (1, R, S, 1)
        divergence[head, first:] = tiles_to_tokens(spatial, tiling.queries)[0, :, 0]
    # Two further roundings: of the product and of tau itself, which is given in decimals.
    return unflatten(divergence, 0, (batch, heads)) * call.tau * (1 + 1e-15)


def _divergence(
    q: Tensor,
    q_mean: Tensor,
    k: Tensor,
    prefix_k: Tensor,
    exist: Tensor,
    expanded: Tensor,
    factor: float,
) -> Tensor:
    """(C, Q) log Z - log Z~ of C groups of Q queries, rounded up.

    With r the error of a score of the representative (`score_rounding`), A_L(qbar) is off by r and
    S + 16 units. p is off by a factor of exp(+-2 r), which moves k_L by at most 2 r times the diameter
    of the keys of L, and k_L has S + d + 24 further units of the largest key; both are multiplied by
    c |q - qbar|. A score of the query has an error of its own, and a log-sum-exp over all tokens adds
    terms + 64 units.

    Args:
        q: (C, Q, d) queries, 0 in empty slots.
        q_mean: (C, d) representatives.
        k: (T, S, d) keys, 0 in empty slots.
        prefix_k: (P, d) keys before the grid.
        exist: (T, S) bool, slots with a token.
        expanded: (C, T) bool.
        factor: scale / tau.
    """
    difference = q - q_mean.unsqueeze(1)

    def tile_scores(queries: Tensor) -> Tensor:  # (..., T, S), -inf in empty slots
        scores = factor * torch.einsum("...d,tsd->...ts", queries, k)
        return scores.masked_fill(~exist, -torch.inf)

    exact = tile_scores(q).logsumexp(-1)  # (C, Q, T) A_L(q)
    representative = tile_scores(q_mean)  # (C, T, S)
    log_mass = representative.logsumexp(-1, keepdim=True)
    p = (representative - log_mass).exp().nan_to_num(0.0)  # 0 in tiles without a token
    k_mean = torch.einsum("cts,tsd->ctd", p, k)
    tangent = log_mass.transpose(1, 2) + factor * difference @ k_mean.transpose(1, 2)
    merged = ~expanded & (log_mass.squeeze(-1) > -torch.inf)  # (C, T)
    coarse = torch.where(merged.unsqueeze(1), tangent, exact)
    prefix = factor * q @ prefix_k.T  # (C, Q, P)
    log_z, coarse_log_z = (torch.cat((x, prefix), -1).logsumexp(-1) for x in (exact, coarse))
    (tiles, slots, dim), before = k.shape, len(prefix_k)
    largest_key = torch.cat((_norm(k).flatten(), _norm(prefix_k))).amax()
    size = abs(factor) * largest_key
    own, of_mean = (score_rounding(dim, size * _norm(x)) for x in (q, q_mean.unsqueeze(1)))
    moved_key = (8 * of_mean + UNIT * (slots + dim + 24)) * largest_key
    rounding = own + of_mean + abs(factor) * _norm(difference) * moved_key
    rounding = rounding + UNIT * (tiles * slots + before + slots + 80)
    divergence = (log_z - coarse_log_z).clamp(min=0) + 6 * rounding
    return _round_up(divergence).where(merged.any(-1, keepdim=True), 0.0)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm


def _round_up(x: Tensor) -> Tensor:
    """Make up for the last operations of a bound."""
    return x * (1 + 1000 * UNIT)
