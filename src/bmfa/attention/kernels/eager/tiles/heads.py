"""Tokens of one head in tiles, and tiles as queries see them: steps 1 to 3 of the specification."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.tiling import FARTHEST, PROBE_SLOTS, UNIFORM_SHARE, Tiling, tokens_to_tiles

# Scores in memory at once, for a CPU and for an accelerator, whose launches cost more.
CHUNK_ELEMENTS = 1 << 20
DEVICE_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys and values that one or several heads of queries share.

    Values are divided by a power of two near the largest, so that they can be squared in float32.
    """

    tiling: Tiling
    k: Tensor  # (T, S, d), 0 in empty slots
    v: Tensor  # (T, S, e) over `unit`
    exists: Tensor  # (T, S) bool
    prefix_k: Tensor  # (prefix, d)
    prefix_v: Tensor  # (prefix, e) over `unit`
    unit: Tensor  # ()

    @classmethod
    def from_tokens(
        cls, k: Tensor, v: Tensor, tiling: Tiling, prefix: int, exists: Tensor
    ) -> "Keys":
        """Arrange keys (prefix + N, d) and values (prefix + N, e) in tiles, in at least float32."""
        dtype = torch.promote_types(k.dtype, torch.float32)
        tiles, tile_values = (to_tiles(x[prefix:], tiling, exists, dtype) for x in (k, v))
        prefix_v = v[:prefix].to(dtype)
        with torch.no_grad():
            unit = power_of_two(torch.cat((prefix_v, tile_values.flatten(0, 1))).abs().amax())
        return cls(
            tiling, tiles, tile_values / unit, exists, k[:prefix].to(dtype), prefix_v / unit, unit
        )

    @property
    def empty(self) -> Tensor:
        """(T,) bool, tiles without a token."""
        return ~self.exists.any(1)

    @property
    def counts(self) -> Tensor:
        """(T,) tokens of each tile, at least 1."""
        return self.exists.sum(1).clamp(min=1)

    def attend(self, queries: Tensor) -> Tensor:
        """Return the exact outputs (n, e) of queries (n, d), over `unit`."""
        before = self.exists.new_ones(len(self.prefix_k))
        exists = torch.cat((before, self.exists.flatten())).view(1, 1, -1)
        k, v = (
            torch.cat((prefix, x.flatten(0, 1))).unsqueeze(0)
            for prefix, x in ((self.prefix_k, self.k), (self.prefix_v, self.v))
        )
        return scaled_dot_product_attention(queries.unsqueeze(0), k, v, exists, scale=1.0)[0]

    def softmax(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return what queries (n, d) see in every tile.

        Returns:
            log_mass (n, T), -inf for a tile without a token, and the softmax (T, n, S) within each tile.
        """
        scores = (self.k.flatten(0, 1) @ queries.T).view(*self.k.shape[:2], -1)  # (T, S, n)
        missing = ~self.exists & ~self.empty.unsqueeze(1)
        scores = scores.masked_fill(missing.unsqueeze(-1), -torch.inf)
        log_mass = scores.logsumexp(1).masked_fill(self.empty.unsqueeze(1), -torch.inf)
        return log_mass.T, scores.softmax(1).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Tangents:
    """Step 3 of the specification: tiles as the representatives of r groups see them."""

    log_mass: Tensor  # (r, T), -inf without a token
    k: Tensor  # (r, T, d)
    v: Tensor  # (r, T, e)
    loss: Tensor  # (r, T) float64

    def __getitem__(self, rows: Tensor) -> "Tangents":
        return Tangents(self.log_mass[rows], self.k[rows], self.v[rows], self.loss[rows])

    def expanded(self, thresholds: Tensor) -> Tensor:
        """True for the tiles that thresholds (..., 1) expand, of those with a token."""
        chosen = ((self.loss >= thresholds) & (self.loss > 0)) | (thresholds == 0)
        return chosen & (self.log_mass > -torch.inf)


@dataclass(frozen=True, eq=False)
class Head:
    """Queries of a head in groups, in `Tiling.group_order`, and the tiles under their mean."""

    keys: Keys
    q: Tensor  # (R, S, d) times scale / tau, 0 in empty slots
    q_mean: Tensor  # (R, d) representatives
    q_spread: Tensor  # (R,) float64 rho (scale / tau)^2 / 2d
    k_spread: Tensor  # (T,) float64 kappa
    k_farthest: Tensor  # (T,) float64 lambda
    farthest: float  # standard deviations by which its mass may grow
    cross: Tensor  # (T, d, e) covariance of keys and values
    diameter: Tensor  # () at least the largest distance of two values of a tile
    probe_slot: Tensor  # (probe groups, n) slots of the probes
    probe_weight: Tensor  # (probe groups, n) float64, 0 in a group without a query

    @classmethod
    def from_queries(
        cls, q: Tensor, keys: Keys, exists: Tensor, quantiles: Tensor, farthest: float = FARTHEST
    ) -> "Head":
        """Compute steps 1 and 2.

        Args:
            q: (R, S, d) queries times scale / tau in groups, 0 in empty slots.
            keys: The keys.
            exists: (R, S) bool.
            quantiles: (probe groups, n) numbers in (0, 1) that draw the probes.
            farthest: Standard deviations by which the mass of a key far from its tile may grow; 0 for a
                budget.
        """
        counts = exists.sum(1)
        q_mean = q.sum(1) / counts.clamp(min=1).unsqueeze(1)
        sample = counts[:PROBE_SLOTS, None]
        q_head = (q_mean[:PROBE_SLOTS] * sample).sum(0, keepdim=True) / sample.sum().clamp(min=1)
        p = keys.softmax(q_head)[1]  # (T, 1, S)
        k_deviation, v_deviation = (
            (x - p @ x) * keys.exists.unsqueeze(-1) for x in (keys.k, keys.v)
        )
        with torch.no_grad():
            lengths = length((q - q_mean.unsqueeze(1)) * exists.unsqueeze(-1))
            mean_square = lengths.square().sum(1) / counts.clamp(min=1)
            k_squares = length(k_deviation).square()  # (T, S)
            slot, weight = draw_probes(
                lengths[: len(quantiles)], exists[: len(quantiles)], quantiles
            )
        return cls(
            keys=keys,
            q=q,
            q_mean=q_mean,
            q_spread=mean_square.sqrt() * lengths.amax(1) / (2 * q.shape[-1]),
            k_spread=k_squares.sum(1) / keys.counts,
            k_farthest=k_squares.amax(1),
            farthest=farthest,
            cross=(p.transpose(1, 2) * k_deviation).transpose(1, 2) @ v_deviation,
            diameter=2 * length(v_deviation.detach()).amax().to(q.dtype),
            probe_slot=slot,
            probe_weight=weight,
        )

    def chunks(self, groups: int, queries: int = 1) -> Iterator[slice]:
        """Positions of the first groups, of so many queries each, a chunk at a time."""
        return chunks(groups, self.keys.exists.numel() * queries, self.q.device)

    def tangents(self, positions: slice) -> Tangents:
        """Step 3 for some groups."""
        keys, q_mean = self.keys, self.q_mean[positions]
        log_mass, p = keys.softmax(q_mean)
        k, v = ((p @ x).transpose(0, 1) for x in (keys.k, keys.v))
        with torch.no_grad():
            prefix = q_mean @ keys.prefix_k.T
            log_z = torch.cat((log_mass, prefix), 1).logsumexp(1, keepdim=True)
            loss = self._losses((log_mass - log_z).double(), self.q_spread[positions].unsqueeze(1))
        return Tangents(log_mass, k, v, loss)

    def _losses(self, log_share: Tensor, spread: Tensor) -> Tensor:
        """Losses (r, T) of tiles with log_share (r, T), log m, for groups with a spread (r, 1)."""
        far = spread * self.k_farthest
        far = torch.minimum(far, self.farthest * (2 * far).sqrt())
        # m expm1(far) / n, limited to 1 before it overflows
        grown = (log_share + far - self.keys.counts.double().log()).clamp(max=0.0).exp()
        loss = log_share.exp() * spread * self.k_spread - grown * (-far).expm1()
        return loss.nan_to_num(0.0).clamp(max=1.0)


def draw_probes(lengths: Tensor, exists: Tensor, quantiles: Tensor) -> tuple[Tensor, Tensor]:
    """Draw n queries of each group; return their slots and weights (groups, n).

    Args:
        lengths: (groups, S) float64 distances from the mean query.
        exists: (groups, S) bool.
        quantiles: (groups, n) numbers in (0, 1).
    """
    largest = lengths.amax(1, keepdim=True)
    fourth = (lengths / largest.where(largest > 0, 1.0)) ** 4
    uniform = exists.double() / exists.sum(1, keepdim=True).clamp(min=1)
    p = UNIFORM_SHARE * uniform + (1 - UNIFORM_SHARE) * fourth / fourth.sum(1, keepdim=True)
    p = torch.where(largest > 0, p, uniform)
    slot = (p.cumsum(1).unsqueeze(1) <= quantiles.unsqueeze(2)).sum(2).clamp(max=p.shape[1] - 1)
    slot = torch.minimum(slot, (p > 0).long().cumsum(1).argmax(1, keepdim=True))  # the last query
    drawn = p.gather(1, slot) * quantiles.shape[1]
    return slot, torch.where(drawn > 0, 1 / drawn, 0.0)


def chunk_elements(device: torch.device) -> int:
    """Number of scores that are in memory at once."""
    return CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS


def chunks(groups: int, scores: int, device: torch.device) -> Iterator[slice]:
    """Divide groups with so many scores each, so that the scores of a chunk fit in memory."""
    step = max(1, chunk_elements(device) // scores)
    for start in range(0, groups, step):
        yield slice(start, min(start + step, groups))


def to_tiles(x: Tensor, tiling: Tiling, exists: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, S, *) from (N, *) tokens in raster order, 0 in slots without a token."""
    tiles = tokens_to_tiles(x[None, None], tiling, dtype)[0]
    return tiles.masked_fill(~exists.unsqueeze(-1), 0.0)


def power_of_two(largest: Tensor) -> Tensor:
    """Power of two from half of a number to the number, 1 if that is 0 or not finite."""
    unit = largest / (2 * torch.frexp(largest).mantissa)
    return torch.where((largest > 0) & largest.isfinite(), unit, 1.0)


def length(x: Tensor) -> Tensor:
    """(...) float64 lengths of vectors (..., n), whose squares need not be numbers of their dtype."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return norm
