"""Tiles as the representatives of groups see them: step 3 of the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bmfa.attention.kernels.eager.tiles.heads import Heads, matmul

# Tangents of all groups are kept from the probes' pass to the groups' if they have at most so many
# elements (16 MiB in float32) and the probes use at least half of them; otherwise they are made twice.
KEPT_ELEMENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class Tangents:
    """Step 3 of the specification: tiles as the representatives of a chunk see them."""

    log_mass: Tensor  # (g, r, T), -inf without tokens
    k: Tensor  # (g, r, T, d)
    v: Tensor  # (g, r, T, e)
    loss: Tensor  # (g, r, T)

    def __getitem__(self, index: tuple[slice, slice]) -> "Tangents":
        return Tangents(self.log_mass[index], self.k[index], self.v[index], self.loss[index])


class Representatives:
    """Makes the tangents of chunks."""

    def __init__(self, heads: Heads) -> None:
        self.heads, self.with_grad = heads, torch.is_grad_enabled()
        groups, tiles = heads.tiling.groups, heads.tiling.tiles
        elements = len(heads.q) * groups * tiles * (heads.k.shape[-1] + heads.v.shape[-1])
        self.keep = groups <= 2 * heads.probes and elements <= KEPT_ELEMENTS
        self.kept: dict[int, tuple[slice, Tangents]] = {}  # of all groups of some heads, by head

    def tangents(self, heads: slice, groups: slice) -> Tangents:
        """Return the tangents of groups of heads."""
        kept, found = self.kept.get(heads.start, (heads, None))
        if not self.keep or heads.stop > kept.stop:
            return self._compute(heads, groups)
        if found is None:
            with torch.set_grad_enabled(self.with_grad):
                found = self._compute(heads, slice(0, self.heads.tiling.groups))
            self.kept.update((head, (heads, found)) for head in range(heads.start, heads.stop))
        return found[heads.start - kept.start : heads.stop - kept.start, groups]

    def _compute(self, heads: slice, groups: slice) -> Tangents:
        all_heads = self.heads
        q_mean = all_heads.q_mean[heads, groups]  # (g, r, d)
        log_mass, weights = all_heads.see_tiles(q_mean, heads)
        keys, values = (all_heads.of_keys(x, heads) for x in (all_heads.k, all_heads.v))
        k, v = (matmul(weights, x) for x in (keys, values))  # (g, T, r, *)
        with torch.no_grad():
            prefix_scores = all_heads.prefix_scores(q_mean, heads)
            log_z = torch.cat((log_mass, prefix_scores), -1).logsumexp(-1, keepdim=True)
            spread = all_heads.q_spread[heads, groups].unsqueeze(-1)
            spread = spread * all_heads.k_spread[heads].unsqueeze(1)
            loss = _loss((log_mass - log_z).exp(), spread)
        return Tangents(log_mass, k.transpose(1, 2), v.transpose(1, 2), loss)


def _loss(mass: Tensor, spread: Tensor) -> Tensor:
    """Loss of tiles from their mass and c^2 rho kappa / 2d."""
    return (mass * spread).nan_to_num(0.0).clamp(max=1.0)  # 0 * inf where squares overflow
