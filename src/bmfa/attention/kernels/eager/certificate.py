"""A proven bound on |output - exact| of tiled attention, for the output that was returned.

Let c = scale / tau, and let a be step 4 of `bmfa.attention.kernels.reference.tiles` without its
correction, for any representative qbar of the group and the tiles that a backend has expanded:

    an unexpanded tile L has the logit T_L(q) = A_L(qbar) + c (q - qbar) . k_L and the value v_L,
    A_L(q) = log sum_{i in L} exp(c q . k_i), with k_L and v_L the means under p = softmax over L of
    c qbar . k_i; expanded tiles and the prefix are exact.

a is an attention: token i of L has the weight w_L p_i. Its divergence from exact attention is known:

1. With d_L = A_L(q) - T_L(q) >= 0 (the tangent of a convex function), the divergence of p from softmax
   over L of c q . k_i is d_L: the logarithm of their ratio is d_L - c (q - qbar) . (k_i - k_L), whose
   last term has the mean 0 under p. In the same way
   KL(a || exact) = log Z - log Z~ = log sum_j w_j exp(d_j), with d_j = 0 for exact tokens.

`kind` "scores" computes all scores, and with them the exact output and A_L(q). The distance of the
output from the exact one is measured, and the bound is above it by rounding alone.

`kind` "boxes" reads no key for a query but those that were expanded for it. By the triangle inequality

    |output - exact| <= |output - a| + |a - exact|,

whose first part is measured on the returned output, so that the correction and every rounding of the
kernel are in it. The second part is bounded as follows.

2. Let x_L be an upper bound on the range of c (q - qbar) . k_i over L, from the smallest and largest key
   in each dimension (a box), or from the distances of the keys from their mean (a ball), whichever is
   smaller. Then d_L <= x_L^2 / 8 by Hoeffding's lemma, because d_L is the logarithm of the mean under p
   of exp(y) for y = c (q - qbar) . (k_i - k_L), which has the mean 0 and the range x_L; and
   d_L <= max y <= x_L.
3. Whole distribution. Let D be the diameter of the values. As a and exact are means of the values under
   two distributions with a total variation distance of TV, |a - exact| <= D TV, and TV is at most
   s(KL) = min(sqrt(KL / 2), sqrt(1 - exp(-KL))), by Pinsker and by Bretagnolle and Huber.
4. Tile by tile. Exact tokens have the same ratio of weights, so that with the exact share
   m_L = exp(A_L(q)) / Z of a tile and the exact mean v_L(q) of its values
       exact - a = sum_L m_L ((1 - exp(-d_L)) (v_L - a) + v_L(q) - v_L)       (unexpanded tiles only)
   because sum_i w_i (v_i - a) = 0. With D_L the diameter of the values of L,
   |v_L(q) - v_L| <= D_L tanh(x_L / 4): the logarithm of the ratio of two distributions has a range of at
   most x_L, and then their total variation is largest for two points with the ratios exp(+-x_L / 2).
   Tiles have smaller diameters than the whole; the smaller of 3 and 4 is taken.
5. m_L <= w_L exp(d) / (1 + w_L (exp(d) - 1)) for any d >= d_L: Z is at least the sum of exp(A_L(q)) and
   of what Z~ has outside L. This and all of the above grow with d_L, so that a bound on it may be used.

Rounding. "boxes" and everything about representatives is computed in float64, whatever the inputs are,
because s has a square root. "scores" computes scores in `working_precision`; keys are taken relative to
their mean there, which changes no attention. `_Rounding` bounds the errors.

Shapes: G = B * H heads, T tiles of S slots, R groups of Q slots, P prefix tokens, C groups of a chunk.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bmfa.attention.tiling import Tiling, tiles_to_tokens, tokens_to_tiles, unflatten, valid_slots

# Values in memory at once for each of a few temporaries: 4 or 8 MB, in the cache of a CPU; an
# accelerator needs larger ones to be busy.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
# Products of weights and values that are added in float32 before float64 takes over: a sum of n terms
# may be off by n roundings, and 512 of them are as much as the rounding of a score.
SUM_TERMS = 512


def rounding_unit(dtype: torch.dtype) -> float:
    """Two roundings: matrix units may truncate, and exponentials are accurate to two roundings."""
    return 2 * torch.finfo(dtype).eps


UNIT = rounding_unit(torch.float64)


def working_precision(q: Tensor) -> torch.dtype:
    """Return float32, or float64 if q is float64 or torch may round float32 products to less."""
    single = q.dtype != torch.float64 and torch.get_float32_matmul_precision() == "highest"
    return torch.float32 if single else torch.float64


class OutputBound(NamedTuple):
    """Bounds for every query; both are 0 for invalid queries."""

    distance: Tensor  # (B, H, Q) float64, at least |output - exact|
    divergence: Tensor  # (B, H, Q) float64, at least KL(a || exact)


@torch.no_grad()
def bound_output(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, tiling: Tiling, expanded: Tensor, *,
    prefix: int, factor: float, valid: Tensor | None = None, kind: str = "scores",
    query_prefix: int | None = None,
) -> OutputBound:  # fmt: skip
    """Bound |output - exact| of every query of tiled attention.

    Args:
        q: (B, H, Q, d), those before the grid first, then the others in raster order. Invalid tokens of
            q, k and v may hold any value.
        k: (B, H or a divisor of it, prefix + N, d), spatial tokens in raster order.
        v: (B, as many, prefix + N, e).
        output: (B, H, Q, e), the output to bound, of any dtype.
        tiling: Tiles of the grid of N spatial tokens, and groups of the queries.
        expanded: (B, H, R, T) bool, the tiles that each group reads token by token.
        prefix: Number of keys before the grid.
        factor: scale / tau.
        valid: bool (B or 1, N), the spatial tokens that exist. It is a mask of the queries, too, unless
            they have a grid of their own.
        kind: `"scores"` or `"boxes"`.
        query_prefix: Number of queries before the grid, if it is not that of the keys.

    Returns:
        The bounds. They are infinite where nothing is known, e.g. for NaN.
    """
    if q.numel() == 0:
        return OutputBound(*(q.new_zeros(q.shape[:3], dtype=torch.float64) for _ in range(2)))
    working = working_precision(q)
    query_prefix = prefix if query_prefix is None else query_prefix
    q_valid = valid if tiling.query_grid is None else None
    share = q.shape[1] // k.shape[1]  # query heads of a key head
    exists, q_exists = valid_slots(tiling, valid, k), valid_slots(tiling.queries, q_valid, q)
    layouts = (
        (q, query_prefix, tiling.queries, q_exists),
        (k, prefix, tiling, exists),
        (v, prefix, tiling, exists),
        (output, query_prefix, tiling.queries, q_exists),
    )
    tokens = [_arrange(x[:, :, start:], tiles, slots) for x, start, tiles, slots in layouts]
    before = [x[:, :, :start].double().flatten(0, 1) for x, start, _, _ in layouts]
    marks = expanded.flatten(0, 1)
    heads = len(marks)
    distances = tokens[0].new_zeros(heads, q.shape[2])
    divergences = torch.zeros_like(distances)
    for index in range(heads):
        key_index = index // share
        of_tensors = (index, key_index, key_index, index)  # of q, k, v and output
        head = _Head(
            _Tokens(*(x[i] for x, i in zip(tokens, of_tensors, strict=True))),
            _Tokens(*(x[i] for x, i in zip(before, of_tensors, strict=True))),
            None if exists is None else exists[key_index],
            None if q_exists is None else q_exists[index],
            factor,
        )
        distances[index, :query_prefix] = head.bound_prefix()
        marked = marks[index] & head.occupied
        made = (
            _ByScores(head, marked, working).bounds()
            if kind == "scores"
            else _bound_by_boxes(head, marked)
        )
        spatial = torch.stack(made, -1)  # (R, Q, 2)
        spatial = tiles_to_tokens(spatial.unsqueeze(0), tiling.queries).squeeze(0)
        distances[index, query_prefix:], divergences[index, query_prefix:] = spatial.unbind(-1)
    bounds = [x.where(x == x, torch.inf) for x in (distances, divergences)]  # NaN: nothing is known
    if q_valid is not None:
        mask = torch.cat((q_valid.new_ones(len(q_valid), query_prefix), q_valid), 1)
        mask = mask.expand(q.shape[0], -1).repeat_interleave(q.shape[1], 0)
        bounds = [x.where(mask, 0.0) for x in bounds]
    return OutputBound(*(unflatten(x, 0, q.shape[:2]) for x in bounds))


def _arrange(tokens: Tensor, tiling: Tiling, exists: Tensor | None) -> Tensor:
    """(B H, T, S, *) float64 tokens in tiles, 0 in empty slots."""
    tiles = tokens_to_tiles(tokens, tiling, torch.float64)
    return tiles if exists is None else tiles.masked_fill(~exists.unsqueeze(-1), 0.0)


def total_variation(divergence: Tensor) -> Tensor:
    """Upper bound on the total variation of distributions with a Kullback-Leibler divergence."""
    return torch.minimum((divergence / 2).sqrt(), (-torch.expm1(-divergence)).sqrt())


def score_rounding(dim: int, largest_score: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Bound the rounding error of c q . k, from c |q| max |k|.

    A sum of d products in any order is off by less than d + 2 roundings of sum |q_i k_i| <= |q| |k|; c,
    the rounding of q and k, and the differences and logarithms that follow add less than 14 more.
    """
    return torch.finfo(dtype).eps * (dim + 16) * largest_score


def attention_rounding(
    score: Tensor,
    terms: int,
    diameter: Tensor,
    largest_value: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Bound the rounding error of an attention over `terms` tokens whose scores are off by `score`.

    Logits that are off by r change the output by at most D tanh(r / 2), see 4 of the module.
    Exponentials, sums of weights and weighted sums of values are off by at most terms + 64 units of the
    largest value.
    """
    return diameter * score / 2 + rounding_unit(dtype) * (terms + 64) * largest_value


class _Tokens(NamedTuple):
    q: Tensor  # (..., d)
    k: Tensor
    v: Tensor  # (..., e)
    output: Tensor


class _Head:
    """One head of one image in float64; invalid tokens and empty slots are 0.

    Args:
        spatial: q and output in groups, (R, Q, *), k and v in tiles, (T, S, *).
        prefix: Tokens before the grid, (P, *) keys and values, and any number of queries.
        exists: (T, S) bool, None if every slot of a tile holds a token.
        q_exists: (R, Q) bool, None if every slot of a group holds a query.
        factor: scale / tau.
    """

    def __init__(
        self,
        spatial: _Tokens,
        prefix: _Tokens,
        exists: Tensor | None,
        q_exists: Tensor | None,
        factor: float,
    ) -> None:
        self.q, self.k, self.v, self.output = spatial
        self.prefix_q, self.prefix_k, self.prefix_v, self.prefix_output = prefix
        self.exists, self.factor = exists, factor
        tiles, slots, _ = self.k.shape
        counts = _slot_counts(self.k, exists)
        self.occupied = counts.squeeze(1) > 0  # (T,)
        at_least_one = counts.clamp(min=1)
        # (R, d), the representatives
        self.q_mean = self.q.sum(1) / _slot_counts(self.q, q_exists).clamp(min=1)
        k_mean, v_mean = (x.sum(1) / at_least_one for x in (self.k, self.v))
        self.center = center = self.center_of(self.v, self.prefix_v)  # (e,)
        largest_value = self._norms(self.v).amax()
        self.largest_key = self._norms(self.k).amax()
        radius = self._norms(self.v - center).amax()
        if len(self.prefix_k):
            self.largest_key = torch.maximum(self.largest_key, _norm(self.prefix_k).amax())
            largest_value = torch.maximum(largest_value, _norm(self.prefix_v).amax())
            radius = torch.maximum(radius, _norm(self.prefix_v - center).amax())
        self.largest_value = largest_value
        # A difference and a norm are off by less than e + 8 units of the largest value.
        value_rounding = 4 * UNIT * (self.v.shape[-1] + 8) * largest_value
        self.diameter = 2 * radius + value_rounding
        self.tile_diameter = 2 * self._norms(self.v - v_mean.unsqueeze(1)).amax(1) + value_rounding
        self.k_radius = self._norms(self.k - k_mean.unsqueeze(1)).amax(1)  # (T,)
        low, high = self.k, self.k
        if self.exists is not None:
            low = self.k.masked_fill(~self.exists.unsqueeze(-1), torch.inf)
            high = self.k.masked_fill(~self.exists.unsqueeze(-1), -torch.inf)
        self.k_extent = (high.amax(1) - low.amin(1)).clamp(min=0)  # (T, d)
        self.terms = tiles * slots + len(self.prefix_k)

    def _norms(self, x: Tensor) -> Tensor:
        """(T, S) norms, 0 in empty slots."""
        norms = _norm(x)
        return norms if self.exists is None else norms.where(self.exists, 0.0)

    def center_of(self, tokens: Tensor, prefix: Tensor) -> Tensor:
        """(d,) a point near the valid tokens and the prefix."""
        count = tokens.shape[0] * tokens.shape[1] if self.exists is None else self.exists.sum()
        return (tokens.sum((0, 1)) + prefix.sum(0)) / (count + len(prefix))

    def mask_slots(self, scores: Tensor) -> Tensor:
        """Fill empty slots of (..., T, S) scores with -inf."""
        return scores if self.exists is None else scores.masked_fill(~self.exists, -torch.inf)

    def bound_prefix(self) -> Tensor:
        """Bounds of the queries before the grid, which are exact up to the rounding of the kernel."""
        keys = torch.cat((self.prefix_k, self.k.flatten(0, 1)))
        scores = self.factor * (self.prefix_q @ keys.T)
        if self.exists is not None:
            present = torch.cat((self.exists.new_ones(len(self.prefix_k)), self.exists.flatten()))
            scores = scores.masked_fill(~present, -torch.inf)
        exact = scores.softmax(-1) @ torch.cat((self.prefix_v, self.v.flatten(0, 1)))
        own = score_rounding(self.k.shape[-1], self.largest_score(self.prefix_q))
        rounding = attention_rounding(own, self.terms, self.diameter, self.largest_value)
        return _round_up(_norm(self.prefix_output - exact) + rounding)

    def largest_score(self, q: Tensor) -> Tensor:
        """(...) upper bound on |c q . k| over all keys, within rounding."""
        return abs(self.factor) * _norm(q) * self.largest_key


def _slot_counts(tokens: Tensor, exists: Tensor | None) -> Tensor:
    """(n, 1) tokens of each tile or group (n, slots, *)."""
    if exists is None:
        return tokens.new_full((len(tokens), 1), tokens.shape[1])
    return exists.sum(-1, keepdim=True).double()


class _ByScores:
    """`kind` "scores": one pass over all scores of a head.

    Keys and values are taken relative to their means, in `working` precision: rounding errors are
    relative to what is left.
    """

    def __init__(self, head: _Head, expanded: Tensor, working: torch.dtype) -> None:
        self.head, self.expanded, self.working = head, expanded, working
        self.k_mean = head.center_of(head.k, head.prefix_k)
        keys = torch.cat((head.k.flatten(0, 1), head.prefix_k)) - self.k_mean  # (T S + P, d)
        values = torch.cat((head.v.flatten(0, 1), head.prefix_v)) - head.center
        self.hidden = None
        if head.exists is not None:
            prefix = head.exists.new_ones(len(head.prefix_k))
            self.hidden = ~torch.cat((head.exists.flatten(), prefix))
            keys, values = (x.masked_fill(self.hidden.unsqueeze(1), 0.0) for x in (keys, values))
        self.largest_key = _norm(keys).amax()
        self.keys, self.values = keys.to(working), values.to(working)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """(R, Q) distance from the exact output, and divergence of a, rounded up."""
        groups, queries, _ = self.head.q.shape
        limit = CHUNK_ELEMENTS.get(self.keys.device.type, CHUNK_ELEMENTS["cpu"])
        step = max(1, limit // (queries * len(self.keys)))
        parts = [self._bound(slice(start, start + step)) for start in range(0, groups, step)]
        distance, divergence = (torch.cat(part) for part in zip(*parts, strict=True))
        return distance, divergence

    def _bound(self, groups: slice) -> tuple[Tensor, Tensor]:
        """(C, Q) bounds of some groups."""
        head, working = self.head, self.working
        tiles, slots, dim = head.k.shape
        q = head.q[groups]  # (C, Q, d)
        scores = (head.factor * q).to(working).flatten(0, 1) @ self.keys.T  # (C Q, T S + P)
        if self.hidden is not None:
            scores.masked_fill_(self.hidden, -torch.inf)
        largest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(largest).exp_()
        tile_mass = unflatten(weights[:, : tiles * slots], 1, (tiles, slots)).sum(-1).double()
        prefix_mass = weights[:, tiles * slots :].sum(-1, dtype=torch.float64)
        mass = tile_mass.sum(-1) + prefix_mass
        output = head.center + _blocked_product(weights, self.values) / mass.unsqueeze(-1)
        own = score_rounding(dim, abs(head.factor) * _norm(q) * self.largest_key, working)
        rounding = attention_rounding(own, SUM_TERMS, head.diameter, head.diameter / 2, working)
        rounding = rounding + UNIT * (head.terms + 64) * head.largest_value
        measured = _norm(head.output[groups] - output.view(*q.shape[:2], -1))
        # Masses are relative to exp(shift).
        shift = head.factor * (q @ self.k_mean) + largest.double().view(q.shape[:2])
        masses = (x.view(*q.shape[:2], -1) for x in (tile_mass, prefix_mass))
        divergence = self._divergence(groups, own, shift, *masses)
        return _round_up(measured + rounding), divergence

    def _divergence(
        self, groups: slice, own: Tensor, shift: Tensor, tile_mass: Tensor, prefix_mass: Tensor
    ) -> Tensor:
        """(C, Q) log Z - log Z~, from the exact masses of tiles (C, Q, T) and prefix (C, Q, 1)."""
        head = self.head
        q, q_mean = head.q[groups], head.q_mean[groups]
        difference = q - q_mean.unsqueeze(1)
        merged = (~self.expanded[groups] & head.occupied).unsqueeze(1)  # (C, 1, T)
        tangent = _tangents(head, *_representative_softmax(head, q_mean), difference)
        tangent = (tangent - shift.unsqueeze(-1)).masked_fill(~merged, -torch.inf)
        kept = tile_mass.masked_fill(merged, 0.0).sum(-1) + prefix_mass.squeeze(-1)
        # Weights below the smallest normal number may be rounded up to it, or to 0.
        tiny = torch.finfo(self.working).tiny
        kept = (kept - head.terms * tiny).clamp(min=0)
        log_z = torch.logaddexp(tangent.logsumexp(-1), kept.log())
        mass = tile_mass + head.k.shape[1] * tiny
        excess = (mass.log() - tangent).clamp(min=0).where(merged, 0.0)
        divergence = _divergence(tangent - log_z.unsqueeze(-1), excess)
        rounding = _Rounding.from_queries(head, q, q_mean, _norm(difference)).logits + own
        rounding = rounding + rounding_unit(self.working) * (head.k.shape[1] + 64)
        return _round_up(divergence + 6 * rounding).where(merged.any(-1), 0.0)


def _bound_by_boxes(head: _Head, expanded: Tensor) -> tuple[Tensor, Tensor]:
    """(R, Q) bounds on the distance and the divergence of all queries in groups."""
    distance = head.q.new_zeros(head.q.shape[:2])
    divergence = torch.zeros_like(distance)
    for groups in _chunks_of_groups(head, expanded):
        distance[groups], divergence[groups] = _bound_chunk(head, groups, expanded[groups])
    return distance, divergence


def _chunks_of_groups(head: _Head, expanded: Tensor) -> Iterator[Tensor]:
    """Groups with similar numbers of expanded tiles, so many that the temporaries stay small."""
    tiles, slots, dim = head.k.shape
    queries = head.q.shape[1]
    counts, order = expanded.sum(-1).sort()
    counts_list, start = counts.tolist(), 0
    limit = CHUNK_ELEMENTS.get(expanded.device.type, CHUNK_ELEMENTS["cpu"])
    channels = max(dim, head.v.shape[-1], slots)
    for stop in range(1, len(order) + 1):
        width = max(counts_list[min(stop, len(order) - 1)], 1) * max(slots, channels)
        width = max(width, tiles, tiles * channels // slots)
        if stop == len(order) or (stop + 1 - start) * queries * width > limit:
            yield order[start:stop]
            start = stop


class _Rounding(NamedTuple):
    """Bounds on rounding errors of a chunk, (C, Q) each.

    With r the error of a score of the representative (`score_rounding`), A_L(qbar) is off by r and
    S + 16 units. p is off by a factor of exp(+-2 r), which moves k_L by at most 2 r times the diameter
    of the keys of L, and k_L has S + d + 24 further units of the largest key; both are multiplied by
    c |q - qbar|. A score of the query has an error of its own, and a log-sum-exp over all tokens adds
    terms + 64 units. So logits, log Z and log Z~ are each off by at most `logits`, d_L and the
    logarithms of weights by twice that, and KL and the logarithms of shares by 6 times that.
    """

    logits: Tensor
    attention: Tensor  # of the output of a

    @classmethod
    def from_queries(cls, head: _Head, q: Tensor, q_mean: Tensor, length: Tensor) -> "_Rounding":
        slots, dim = head.k.shape[1:]
        own = score_rounding(dim, head.largest_score(q))
        representative = score_rounding(dim, head.largest_score(q_mean)).unsqueeze(-1)
        moved_key = (
            8 * representative * head.k_radius.amax() + UNIT * (slots + dim + 24) * head.largest_key
        )
        tangent = representative + abs(head.factor) * length * moved_key
        logits = own + tangent + UNIT * (head.terms + slots + 80)
        # The means v_L are off by the representative's errors, in addition to the weights.
        attention = attention_rounding(4 * logits, head.terms, head.diameter, head.largest_value)
        return cls(logits, attention)


def _bound_chunk(head: _Head, groups: Tensor, expanded: Tensor) -> tuple[Tensor, Tensor]:
    """(C, Q) bounds on the distance and the divergence of the queries of some groups."""
    q, q_mean = head.q[groups], head.q_mean[groups]
    difference = q - q_mean.unsqueeze(1)  # (C, Q, d)
    rounding = _Rounding.from_queries(head, q, q_mean, _norm(difference))
    merged = ~expanded & head.occupied  # (C, T)
    log_mass, p = _representative_softmax(head, q_mean)
    v_tangent = (p @ head.v).transpose(0, 1)  # (C, T, e)
    tangent = _tangents(head, log_mass, p, difference)  # (C, Q, T)
    tangent = tangent.masked_fill(~merged.unsqueeze(1), -torch.inf)
    attention, log_z = _attention(head, q, tangent, v_tangent, expanded)
    log_weight = tangent - log_z.unsqueeze(-1)  # (C, Q, T), -inf for exact tiles
    span = _range(head, q, q_mean)  # (C, Q, T)
    excess = torch.minimum(span.square() / 8, span)
    divergence = _divergence(log_weight, excess) + 6 * rounding.logits  # (C, Q)
    # The logit of the share m is log w + d - log(1 - w).
    log_others = torch.log1p(-log_weight.exp().clamp(max=1.0))
    log_share = torch.nn.functional.logsigmoid(log_weight + excess - log_others)
    share = (log_share + 6 * rounding.logits.unsqueeze(-1)).exp()
    away = _norm(v_tangent - head.center).unsqueeze(1) + _norm(attention - head.center).unsqueeze(
        -1
    )
    moved = -torch.expm1(-excess) * away + head.tile_diameter * torch.tanh(span / 4)
    by_tile = (share * moved).where(merged.unsqueeze(1), 0.0).sum(-1) + rounding.attention
    whole = head.diameter * total_variation(divergence)
    bound = torch.where(by_tile < whole, by_tile, whole)
    some = merged.any(-1, keepdim=True)  # otherwise a is exact
    measured = _norm(head.output[groups] - attention)
    distance = _round_up(measured + bound.where(some, 0.0) + rounding.attention)
    return distance, _round_up(divergence.where(some, 0.0))


def _representative_softmax(head: _Head, q_mean: Tensor) -> tuple[Tensor, Tensor]:
    """(C, T) A_L(qbar), -inf for tiles without a token, and (T, C, S) weights p."""
    scores = head.factor * (q_mean @ head.k.flatten(0, 1).T)
    scores = head.mask_slots(unflatten(scores, 1, head.k.shape[:2]))  # (C, T, S)
    log_mass = scores.logsumexp(-1)
    weights = (scores - log_mass.unsqueeze(-1)).exp().transpose(0, 1)
    return log_mass, weights.where(head.occupied[:, None, None], 0.0)


def _tangents(head: _Head, log_mass: Tensor, p: Tensor, difference: Tensor) -> Tensor:
    """(C, Q, T) logits of all tiles."""
    k_tangent = (p @ head.k).transpose(0, 1)  # (C, T, d)
    return head.factor * (difference @ k_tangent.transpose(1, 2)) + log_mass.unsqueeze(1)


def _blocked_product(weights: Tensor, values: Tensor) -> Tensor:
    """Product in float64 of sums of SUM_TERMS terms each."""
    total = weights.new_zeros(len(weights), values.shape[1], dtype=torch.float64)
    for start in range(0, len(values), SUM_TERMS):
        terms = slice(start, start + SUM_TERMS)
        total += weights[:, terms] @ values[terms]
    return total


def _attention(
    head: _Head, q: Tensor, tangent: Tensor, v_tangent: Tensor, expanded: Tensor
) -> tuple[Tensor, Tensor]:
    """(C, Q, e) the attention a, and (C, Q) log Z~."""
    slots = head.k.shape[1]
    most = int(expanded.sum(-1).max())
    tiles = expanded.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[
        :, :most
    ]  # (C, most)
    real = expanded.gather(1, tiles)
    keys, values = head.k[tiles].flatten(1, 2), head.v[tiles].flatten(1, 2)  # (C, most S, *)
    present = real.unsqueeze(-1).expand(-1, -1, slots)
    if head.exists is not None:
        present = present & head.exists[tiles]
    tokens = head.factor * (q @ keys.transpose(1, 2))
    tokens = tokens.masked_fill(~present.flatten(1).unsqueeze(1), -torch.inf)
    prefix = head.factor * (q @ head.prefix_k.T)
    log_z = torch.cat((tangent, tokens, prefix), -1).logsumexp(-1)
    shift = log_z.unsqueeze(-1)
    attention = (tangent - shift).exp() @ v_tangent + (tokens - shift).exp() @ values
    return attention + (prefix - shift).exp() @ head.prefix_v, log_z


def _range(head: _Head, q: Tensor, q_mean: Tensor) -> Tensor:
    """(C, Q, T) upper bound on the range of c (q - qbar) . k over the keys of each tile.

    The difference of queries is off by a unit of the longer one, the mean that is subtracted from keys
    by S units of the longest one, and products of d terms by d + 8 units of the norms.
    """
    difference = q - q_mean.unsqueeze(1)
    length = _norm(difference)
    slots, dim = head.k.shape[1:]
    box = difference.abs() @ head.k_extent.T
    ball = 2 * length.unsqueeze(-1) * head.k_radius
    key_size = head.k_radius.amax() + head.k_extent.amax() * math.sqrt(dim)
    rounding = (_norm(q) + _norm(q_mean).unsqueeze(1)) * key_size
    rounding = rounding + (dim + slots) * length * head.largest_key
    span = torch.minimum(box, ball) * (1 + 8 * UNIT * (dim + 8))
    return abs(head.factor) * (span + 8 * UNIT * rounding.unsqueeze(-1))


def _divergence(log_weight: Tensor, excess: Tensor) -> Tensor:
    """(C, Q) log sum_j w_j exp(d_j) over tiles and exact tokens, without loss of digits near 0."""
    weight, grown = log_weight.exp(), log_weight + excess
    gained = torch.where(excess < 1.0, weight * torch.expm1(excess), grown.exp() - weight)
    total = gained.where(log_weight > -torch.inf, 0.0).sum(-1)
    return torch.where(total.isinf(), grown.logsumexp(-1), torch.log1p(total))


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm


def _round_up(bound: Tensor) -> Tensor:
    """Cover the roundings of the formulas themselves: fewer than 1000, each relative to a summand."""
    return bound * (1 + 1000 * UNIT)
