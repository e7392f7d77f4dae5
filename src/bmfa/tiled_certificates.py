"""A proven bound on the error E of tiled attention, from boxes of keys and one query for each group."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bmfa import bounds
from bmfa.pyramid import machine_epsilon
from bmfa.tiling import (
    Tiling,
    by_groups,
    by_raster,
    by_tiles,
    existing_slots,
    split_dimension,
)

# Numbers held at once.
CHUNK_ELEMENTS = 1 << 20


def tiled_certificate(
    q: Tensor,
    k: Tensor,
    tiling: Tiling,
    expanded: Tensor,
    *,
    prefix: int,
    scale: float,
    tau: float = 1.0,
    valid: Tensor | None = None,
) -> Tensor:
    """(B, heads, prefix + N) float64: a bound on E = F - F~ of every query over all keys.

    F~ is the free energy of the partition that `expanded` (B, heads, R, T) marks: tiles that stay are
    their mean score n times, without corrections; the others and the prefix are exact. Prefix queries
    and those that are not valid have E = 0. With c = scale / tau, delta_i = k_i - kbar_L, rho = max_i
    |delta_i|, the gap G / tau = log mean exp(c q.delta_i) of a tile is at most the least of

    - the extremes of c q.delta_i that the key box allows: the upper one, and range^2 / 8 (Hoeffding);
    - (c |q| rho)^2 / 2, as the range is at most 2 c |q| rho;
    - from the representative qbar of the group, whose gap is exact: with p_i proportional to
      exp(c qbar.delta_i) and e = q - qbar, G(q) = G(qbar) + log sum_i p_i exp(c e.delta_i), where
      the logarithm is at most c |e| rho (so G is Lipschitz: its gradient is a difference of two means
      of keys), and, by Hoeffding, at most c e.sum_i p_i delta_i + (c |e| rho)^2 / 2.

    Then E / tau <= log(1 + sum_L pi~_L (exp(U_L) - 1)) over the tiles that stay, pi~ their shares in
    the partition's own Z~. Every term is raised by what float64 may have rounded away.
    """
    tiles = _KeyTiles.of(q, k, tiling, prefix, scale / tau, valid)
    marks = expanded.flatten(0, 1)
    width = max(tiles.deviation.shape[1], tiles.queries.shape[2]) * tiling.side**2
    rows = max(1, CHUNK_ELEMENTS // width)
    certificates = torch.cat(
        [
            tiles.certificate(head, slice(start, start + rows), marks[head, start : start + rows])
            for head in range(len(marks))
            for start in range(0, tiling.groups, rows)
        ]
    )
    spatial = split_dimension(certificates, 0, (len(marks), tiling.groups)).unsqueeze(-1)
    spatial = split_dimension(by_raster(spatial, tiling).squeeze(-1), 0, q.shape[:2]) * tau
    if valid is not None:
        spatial = spatial.where(valid.unsqueeze(1), 0.0)
    return torch.cat((spatial.new_zeros(*q.shape[:2], prefix), spatial), -1)


@dataclass(frozen=True, eq=False)
class _KeyTiles:
    """Queries by groups, and for each tile its mean key, its keys less that, and how far they reach."""

    queries: Tensor  # (G, R, group S, d) times scale / tau
    representatives: Tensor  # (G, R, d) likewise
    before: Tensor  # (G, prefix, d)
    tokens: Tensor  # (G, T, S, d)
    mean: Tensor  # (G, T, d)
    deviation: Tensor  # (G, T, S, d)
    absent: Tensor  # (G, T, S) bool
    counts: Tensor  # (G, T)
    longest: Tensor  # (G,) the norm of the longest key

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, tiling: Tiling, prefix: int, factor: float, valid: Tensor | None
    ) -> "_KeyTiles":
        """From (B, heads, prefix + N, d) queries and keys."""
        q, k = q.detach().double(), k.detach().double()
        before = k[:, :, :prefix].flatten(0, 1)
        queries, tokens = (by_tiles(x[:, :, prefix:], tiling, x.dtype) for x in (q * factor, k))
        exists = existing_slots(tiling, valid, q)
        if exists is None:
            exists = torch.ones(tokens.shape[:3], dtype=torch.bool, device=q.device)
        queries, tokens = (x.masked_fill(~exists.unsqueeze(-1), 0.0) for x in (queries, tokens))
        counts = exists.sum(-1).double()
        mean = tokens.sum(2) / counts.clamp(min=1).unsqueeze(-1)
        deviation = (tokens - mean.unsqueeze(2)).masked_fill(~exists.unsqueeze(-1), 0.0)
        members = by_groups(counts.unsqueeze(-1), tiling).sum(2).clamp(min=1)
        longest = torch.cat((before, tokens.flatten(1, 2)), 1).norm(dim=-1).amax(-1)
        return cls(
            by_groups(queries, tiling).flatten(2, 3),
            by_groups(queries.sum(2), tiling).sum(2) / members,
            before,
            tokens,
            mean,
            deviation,
            ~exists,
            counts,
            longest,
        )

    def certificate(self, head: int, rows: slice, marks: Tensor) -> Tensor:
        """(r, group S) bounds on E / tau of some groups of a head; marks (r, T)."""
        queries = self.queries[head, rows]
        center = self.representatives[head, rows].unsqueeze(1)
        reach = queries.norm(dim=-1, keepdim=True) + center.norm(dim=-1, keepdim=True)
        # A product of d terms, a mean of S and a difference of two: no computed score, deviation or
        # distance is off by more than this share of the largest score that the norms allow.
        steps = 4 * (queries.shape[-1] + self.tokens.shape[2] + 16)
        rounding = steps * machine_epsilon(queries) * reach * self.longest[head]  # (r, m, 1)
        bound = torch.minimum(
            self._from_box(head, queries, rounding),
            self._from_representative(head, queries, center, rounding),
        )
        stays = (~marks & (self.counts[head] > 0)).unsqueeze(1)  # (r, 1, T)
        loses = stays & (self.counts[head] > 1)
        means = queries @ self.mean[head].T + self.counts[head].log()
        means = means.masked_fill(~stays, -torch.inf)
        logarithms = torch.cat(
            (means, queries @ self.before[head].T, self._expanded(head, queries, marks)), -1
        )
        whole = logarithms.logsumexp(-1, keepdim=True)
        slack = 2 * rounding + 64 * machine_epsilon(queries) * (1 + math.log(means[0].numel()))
        mass = torch.where(loses, (means - whole + slack).exp(), 0.0)
        return bounds.certificate(mass, torch.where(loses, bound.clamp(min=0), 0.0))

    def _from_box(self, head: int, queries: Tensor, rounding: Tensor) -> Tensor:
        """(r, m, T) bounds on gaps from the extremes and the lengths of key deviations."""
        low, high = self.deviation[head].amin(1), self.deviation[head].amax(1)  # (T, d)
        up, down = queries.clamp(min=0), queries.clamp(max=0)
        above = up @ high.T + down @ low.T + rounding
        below = up @ low.T + down @ high.T - rounding
        length = queries.norm(dim=-1, keepdim=True) * self._radius(head) + rounding
        spread = torch.minimum(above - below, 2 * length)
        return torch.minimum(torch.minimum(above, length), spread**2 / 8) + rounding

    def _from_representative(
        self, head: int, queries: Tensor, center: Tensor, rounding: Tensor
    ) -> Tensor:
        """(r, m, T) bounds on gaps from the exact gap at the group's representative."""
        scores = center.squeeze(1) @ self.deviation[head].flatten(0, 1).T
        scores = split_dimension(scores, 1, self.deviation.shape[1:3])  # (r, T, S)
        empty = (self.counts[head] == 0).unsqueeze(-1)
        scores = scores.masked_fill(self.absent[head] & ~empty, -torch.inf)
        gap = scores.logsumexp(-1) - self.counts[head].clamp(min=1).log()
        tilted = scores.softmax(-1).transpose(0, 1) @ self.deviation[head]  # (T, r, d)
        apart = queries - center
        length = apart.norm(dim=-1, keepdim=True) * self._radius(head) + rounding
        tilt = apart @ tilted.permute(1, 2, 0) + rounding  # (r, m, T)
        step = torch.minimum(length, tilt + length**2 / 2)
        constant = 64 * machine_epsilon(queries)  # of the logarithms
        return gap.unsqueeze(1) + step + 2 * rounding + constant

    def _expanded(self, head: int, queries: Tensor, marks: Tensor) -> Tensor:
        """(r, m, 0 or 1) the logarithm of the mass of the tokens of expanded tiles."""
        reach = int(marks.sum(-1).max())
        if reach == 0:
            return queries[..., :0]
        marked, places = marks.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
        marked, places = marked[:, :reach].bool(), places[:, :reach]
        absent = (self.absent[head][places] | ~marked.unsqueeze(-1)).flatten(1)  # (r, reach S)
        scores = queries @ self.tokens[head][places].flatten(1, 2).transpose(1, 2)
        return scores.masked_fill(absent.unsqueeze(1), -torch.inf).logsumexp(-1, keepdim=True)

    def _radius(self, head: int) -> Tensor:
        """(T,) the longest deviation of each tile."""
        radius: Tensor = self.deviation[head].norm(dim=-1).amax(-1)
        return radius
