"""The tiled form in torch operations: gathers and batched products, any device, autograd.

`bmfa.attention.kernels.reference.tiles` specifies what is computed. Shapes here: G = B * H heads,
K key heads, each of which G / K consecutive heads share,
T tiles of S = side * side slots, R groups of queries in the order of `Tiling.group_order`, P probes,
d and e channels of keys and values. A chunk has some groups of one head, or all groups of g heads.
"""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bmfa.attention.kernels.eager.tiles.heads import Heads, log_sum_exp
from bmfa.attention.kernels.eager.tiles.levels import (
    Choice,
    choose,
    clip,
    coarse_bias,
    measure_levels,
)
from bmfa.attention.kernels.eager.tiles.representatives import Representatives, Tangents
from bmfa.attention.tiling import TiledAttention, Tiling, tiles_to_tokens, unflatten
from bmfa.trees.keys import query_chunks


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, prefix: int, scale: float, tau: float = 1.0,
    error: float | None = None, expand: float | None = None, valid: Tensor | None = None,
    exact_above: float = 1.0, query_prefix: int | None = None,
) -> TiledAttention | None:  # fmt: skip
    """Compute tiled attention as specified by `bmfa.attention.kernels.reference.tiled_attention`.

    Half precision is computed in float32. Thresholds, shrinkage, the diameter of the values and the
    choice of the expanded tiles are constants of the gradient; everything else is differentiated.

    Args:
        q: (B, H, query_prefix + queries, d), in raster order.
        k: (B, H or a divisor of it, prefix + N, d), spatial tokens in raster order.
        v: (B, as many, prefix + N, e).
        tiling: The tiles of the grid of N spatial tokens, and the groups of the queries.
        prefix: The number of keys before the grid.
        scale: The factor of q . k.
        tau: The temperature.
        error: The target for the relative L2 error of the output; one of `error` and `expand` is given.
        expand: The mean number of tiles that a group expands.
        valid: bool (B or 1, N), the spatial tokens that exist.
        exact_above: The share of expanded tiles above which a head is computed exactly.
        query_prefix: The number of queries before the grid, if it is not that of the keys.

    Returns:
        Output, expanded tiles of each group and errors of the probes; None if every head would be
        computed exactly because it expands more than `exact_above` of the tiles.
    """
    if (error is None) == (expand is None):
        raise ValueError(f"error is {error!r} and expand is {expand!r}; pass exactly one of them")
    query_prefix = prefix if query_prefix is None else query_prefix
    if q.numel() == 0:  # an empty batch still has gradients
        expanded = q.new_zeros(*q.shape[:2], tiling.groups, tiling.tiles, dtype=torch.bool)
        probes = q.new_zeros(*q.shape[:2], tiling.probes(query_prefix), 3, dtype=torch.float32)
        counts = expanded.sum(-1, dtype=torch.int32)
        values = v[:, :, :1].repeat_interleave(q.shape[1] // max(1, v.shape[1]), 1)
        return TiledAttention(q[..., :1] * values, counts, probes, expanded)
    everything = error == 0.0 or (expand is not None and expand >= tiling.tiles)
    if everything and exact_above < 1.0:
        return None
    heads = Heads.of(q, k, v, tiling, prefix, query_prefix, scale / tau, valid)
    representatives = Representatives(heads)
    if everything:
        choice, exact_probes = Choice.everything(heads), None
    else:
        with torch.no_grad():
            levels = measure_levels(heads, representatives)
            share = None if expand is None else expand / tiling.tiles
            choice = choose(heads, levels, error, share, exact_above)
            exact_probes = levels.exact
    if exact_above < 1.0 and bool(choice.exact.all()):
        return None
    tiles, expanded = _attend(heads, representatives, choice)
    spatial = unflatten(tiles_to_tokens(tiles, tiling.queries), 0, q.shape[:2]).to(q.dtype)
    output = spatial
    if query_prefix:
        output = torch.cat((_prefix_outputs(q, heads, scale / tau).to(q.dtype), spatial), 2)
    with torch.no_grad():
        probes = _probe_errors(heads, tiles.to(q.dtype), exact_probes)
    return TiledAttention(
        output,
        unflatten(expanded.sum(-1, dtype=torch.int32), 0, q.shape[:2]),
        unflatten(probes, 0, q.shape[:2]),
        unflatten(expanded, 0, q.shape[:2]),
    )


def _attend(
    heads: Heads, representatives: Representatives, choice: Choice
) -> tuple[Tensor, Tensor]:
    """Return outputs (G, R, S, e) and expanded tiles (G, R, T), groups in raster order."""
    device = heads.order.device
    rows, outputs, expanded = [], [], []
    for part, positions, exact in _group_chunks(heads, choice):
        if exact:
            output = _exact_chunk(heads, part, positions)
            has_tokens = (heads.counts_of(part) > 0).unsqueeze(1)
            chosen = has_tokens.expand(*output.shape[:2], -1).flatten(0, 1)
            output = output.flatten(0, 1)
        else:
            tangents = representatives.tangents(part, positions)
            output, chosen = _attend_chunk(heads, part, positions, tangents, choice)
        outputs.append(output)
        expanded.append(chosen)
        head = torch.arange(part.start, part.stop, device=device).unsqueeze(1)
        rows.append((head * heads.tiling.groups + heads.order[positions]).flatten())
    inverse = torch.cat(rows).argsort()
    shape = (len(heads.q), heads.tiling.groups)
    output, chosen = (torch.cat(x).index_select(0, inverse) for x in (outputs, expanded))
    return unflatten(output, 0, shape), unflatten(chosen, 0, shape)


def _group_chunks(heads: Heads, choice: Choice) -> Iterator[tuple[slice, slice, bool]]:
    """Yield slices of heads, slices of positions, and whether all of their tiles are expanded."""
    groups = heads.tiling.groups
    full = ((choice.thresholds == 0) | choice.exact.unsqueeze(1)).tolist()
    for (even, odd), members in groupby(range(len(full)), key=full.__getitem__):
        run = list(members)
        if even == odd:
            halves = [(slice(0, groups, 1), even)]
        else:
            halves = [(slice(0, groups, 2), even), (slice(1, groups, 2), odd)]
        for half, exact in halves:
            count = len(range(groups)[half])
            if exact and count:
                step = 1 if heads.share > 1 else len(run)
                for first in range(run[0], run[-1] + 1, step):
                    yield slice(first, first + step), half, True
                continue
            # On a CPU one head at a time: batches of several heads would be copied. So would keys that
            # they share.
            step = 1 if heads.q.device.type == "cpu" or heads.share > 1 else len(run)
            tokens = heads.tiling.tiles * heads.tiling.slots
            for first in range(run[0], run[-1] + 1, step):
                for part, r in query_chunks(step, count, tokens, heads.chunk_elements):
                    start = half.start + half.step * r.start
                    stop = half.start + half.step * (r.stop - 1) + 1
                    part = slice(first + part.start, first + part.stop)
                    yield part, slice(start, stop, half.step), False


def _exact_chunk(heads: Heads, part: slice, positions: slice) -> Tensor:
    """Return exact outputs (g, r, S, e) of groups of heads."""
    q = heads.q[part, positions]
    mask = None
    if heads.exists is not None:
        exists = heads.of_keys(heads.exists, part)
        mask = pad(exists.flatten(1), (heads.prefix, 0), value=True)[:, None, None]
    output = scaled_dot_product_attention(
        q.flatten(1, 2).unsqueeze(1),
        heads.of_keys(heads.keys, part).unsqueeze(1),
        heads.of_keys(heads.values, part).unsqueeze(1),
        attn_mask=mask,
        scale=1.0,
    )
    return unflatten(output.squeeze(1), 1, q.shape[1:3])


def _attend_chunk(
    heads: Heads, part: slice, positions: slice, tangents: Tangents, choice: Choice
) -> tuple[Tensor, Tensor]:
    """Step 4 of the specification for n = g r groups: outputs (n, S, e), expanded tiles (n, T)."""
    q = heads.q[part, positions]
    deviation = (q - heads.q_mean[part, positions].unsqueeze(2)).flatten(0, 1)  # (n, S, d)
    parity = torch.arange(heads.tiling.groups, device=q.device)[positions] % 2
    threshold, shrinkage = (
        x[part].index_select(1, parity) for x in (choice.thresholds, choice.shrinkage)
    )  # (g, r)
    with torch.no_grad():
        loss = tangents.loss
        expanded = (loss >= threshold.unsqueeze(-1)) & (loss > 0)
        hidden = expanded | (heads.counts_of(part) == 0).unsqueeze(1)
    bias = coarse_bias(tangents.log_mass, hidden)  # (g, r, T)
    cross = bias.softmax(-1) @ heads.cross[part].flatten(2)
    cross = unflatten(cross, 2, heads.cross.shape[2:]).flatten(0, 1)  # (n, d, e)
    diameter = heads.diameter[part].unsqueeze(1).expand(q.shape[:2]).reshape(-1, 1, 1)
    correction = clip(deviation @ cross, diameter, shrinkage.reshape(-1, 1, 1))
    k, v = tangents.k.flatten(0, 1), tangents.v.flatten(0, 1)
    logits = torch.baddbmm(bias.flatten(0, 1).unsqueeze(1), deviation, k.transpose(1, 2))
    weights = logits.softmax(-1)  # (n, S, T)
    output = torch.baddbmm(correction, weights, v)
    log_coarse = log_sum_exp(logits, weights)
    log_coarse = log_coarse.masked_fill(hidden.all(-1).view(-1, 1), -torch.inf)
    expanded = expanded.flatten(0, 1)
    exact = _ExpandedTiles(heads, part, q.flatten(0, 1), expanded).attend()
    if exact is not None:
        exact_output, log_exact = exact
        coarse_share = (log_coarse - log_exact).sigmoid().unsqueeze(-1)  # u
        output = torch.lerp(exact_output, output, coarse_share)
    return output, expanded


class _ExpandedTiles:
    """Attention of n groups over the tokens of the tiles that they expand, and the prefix."""

    def __init__(self, heads: Heads, part: slice, q: Tensor, expanded: Tensor) -> None:
        self.heads, self.q = heads, q  # (n, S, d)
        head = torch.arange(part.start, part.stop, device=q.device) // heads.share
        self.head = head.repeat_interleave(len(q) // len(head))  # (n,) key head
        row, tile = expanded.nonzero(as_tuple=True)
        counts = expanded.sum(-1)
        self.order = counts.argsort(stable=True)
        self.counts = counts[self.order].tolist()
        rank = torch.arange(len(row), device=q.device) - (counts.cumsum(0) - counts)[row]
        self.tiles = tile.new_full((len(q), self.counts[-1]), -1)  # the expanded ones, then -1
        self.tiles[row, rank] = tile
        self.slots = torch.arange(heads.tiling.slots, device=q.device)
        self.prefix = torch.arange(heads.prefix, device=q.device)

    def attend(self) -> tuple[Tensor, Tensor] | None:
        """Return outputs (n, S, e), and the logarithm (n, S) of their sums of exponentials.

        None if there is nothing to attend to in any group. Groups with as many tiles are computed
        together.
        """
        heads, counts = self.heads, self.counts
        slots, queries, elements = len(self.slots), self.q.shape[1], heads.chunk_elements
        all_equal = counts[0] == counts[-1]
        outputs, logs, start = [], [], 0
        if not heads.prefix:
            start = counts.count(0)
            if start == len(counts):
                return None
            if start:
                outputs.append(heads.v.new_zeros(start, queries, heads.v.shape[-1]))
                logs.append(heads.v.new_full((start, queries), -torch.inf))
        while start < len(counts):
            stop = start + 1
            while stop < len(counts):
                keys = heads.prefix + counts[stop] * slots
                if (stop + 1 - start) * queries * keys > elements:
                    break
                stop += 1
            rows = slice(start, stop) if all_equal else self.order[start:stop]
            output, log = self._attend_rows(rows, counts[stop - 1])
            outputs.append(output)
            logs.append(log)
            start = stop
        output, log = (x[0] if len(x) == 1 else torch.cat(x) for x in (outputs, logs))
        if all_equal:  # the order is that of the groups
            return output, log
        inverse = self.order.argsort()
        return output.index_select(0, inverse), log.index_select(0, inverse)

    def _attend_rows(self, groups: Tensor | slice, max_count: int) -> tuple[Tensor, Tensor]:
        heads, head = self.heads, self.head[groups]
        tiles = self.tiles[groups, :max_count]  # (n, max_count)
        if max_count == 0:
            logits = self.q[groups] @ heads.prefix_k[head].transpose(1, 2)
            weights = logits.softmax(-1)
            return weights @ heads.prefix_v[head], log_sum_exp(logits, weights)
        rows = heads.prefix + tiles.clamp(min=0).unsqueeze(-1) * len(self.slots) + self.slots
        rows = torch.cat((self.prefix.expand(len(tiles), -1), rows.flatten(1)), 1)
        rows = (rows + head.unsqueeze(1) * heads.keys.shape[1]).flatten()
        keys, values = (
            unflatten(x.flatten(0, 1).index_select(0, rows), 0, (len(tiles), -1))
            for x in (heads.keys, heads.values)
        )
        logits = self.q[groups] @ keys.transpose(1, 2)  # (n, S, prefix + tokens)
        padding = tiles < 0
        if heads.exists is not None:
            exists = heads.exists[head.unsqueeze(1), tiles.clamp(min=0)]  # (n, max_count, S)
            missing = (padding.unsqueeze(-1) | ~exists).flatten(1)
        elif bool(padding.any()):
            missing = padding.repeat_interleave(len(self.slots), 1)
        else:
            missing = None
        if missing is not None:
            missing = pad(missing, (heads.prefix, 0), value=False).unsqueeze(1)
            logits = logits.masked_fill(missing, -torch.inf)
        weights = logits.softmax(-1)
        return weights @ values, log_sum_exp(logits, weights)


def _prefix_outputs(q: Tensor, heads: Heads, factor: float) -> Tensor:
    """Return exact outputs (B, H, prefix, e) of the prefix queries."""
    queries = q[:, :, : heads.query_prefix].to(heads.q.dtype).flatten(0, 1) * factor
    # The queries of all heads that share keys: (K, share n, d)
    queries = unflatten(queries, 0, (-1, heads.share)).flatten(1, 2)
    scores = queries @ heads.k.flatten(1, 2).transpose(1, 2)  # (K, share n, T S)
    if heads.exists is not None:
        scores = scores.masked_fill(~heads.exists.flatten(1).unsqueeze(1), -torch.inf)
    prefix_scores = queries @ heads.prefix_k.transpose(1, 2)
    weights = torch.cat((prefix_scores, scores), -1).softmax(-1)
    output = weights[..., : heads.prefix] @ heads.prefix_v
    output = output + weights[..., heads.prefix :] @ heads.v.flatten(1, 2)
    return output.reshape(*heads.shape, heads.query_prefix, -1)


def _probe_errors(heads: Heads, output: Tensor, exact: Tensor | None) -> Tensor:
    """Return (G, P, 3) float32: |output - exact|^2, |exact|^2, weight of the probe.

    Args:
        output: (G, R, S, e).
        exact: (G, P, e); None if the output is exact.
    """
    index = heads.probe_slot[..., None, None].expand(-1, -1, 1, output.shape[-1])
    got = output.index_select(1, heads.order[: heads.probes]).gather(2, index).squeeze(2)
    got = got.to(heads.q.dtype)
    exact = got if exact is None else exact
    weight = heads.probe_weight
    fields = ((got - exact).square().sum(-1), exact.square().sum(-1), weight)
    found = torch.stack([x.to(torch.float32) for x in fields], -1)
    return found.where(weight.unsqueeze(-1) > 0, 0.0)
