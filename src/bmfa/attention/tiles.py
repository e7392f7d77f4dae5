"""Screened attention over tiles, or dense attention where "auto" finds that faster."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bmfa.attention import dispatch as tiled
from bmfa.attention.inputs import Call, check_finite_scores, in_raster
from bmfa.attention.result import Trees
from bmfa.attention.tile_certificates import tiled_certificate
from bmfa.attention.tiling import Budget, TiledAttention, Tiling, ValidTiles
from bmfa.trees.tree import Tree


class TileCall(Call):
    """A call whose queries share the tiles of their group."""

    def check_self_attention(self) -> None:
        """Tiles of queries are those of the keys."""
        if not self.self_attention:
            raise ValueError(
                f"form='tiled' takes a query for each of {self.prefix + self.grid.size} tokens; q has "
                f"{self.shape[2]}; pass form='representative'"
            )

    def order_of(self, backend: str) -> str:
        """The order in which a backend takes the tokens: all but Triton's tiles take raster order."""
        return self.order if backend == "triton" else "raster"

    def attend(
        self, backend: str, tiling: Tiling, question: Budget, most: float = 1.0
    ) -> TiledAttention | None:
        """Attention over tiles; None where more than a share `most` of them would be expanded."""
        q, k, v = self.inputs
        if not q.is_cuda and backend != "triton":
            check_finite_scores(*self.without_absent[:2], self.scale)
        mask, turned = self.mask, self.order != self.order_of(backend)
        if turned:
            q, k, v = (in_raster(tokens, self.prefix, self.place, None) for tokens in (q, k, v))
            mask = None if mask is None else mask[:, self.place]
        result = tiled.attend(
            backend,
            q,
            k,
            v,
            tiling,
            question,
            prefix=self.prefix,
            scale=self.scale,
            tau=self.tau,
            valid=mask,
            order=self.order_of(backend),
            most=most,
        )
        if result is None or not turned:
            return result
        order = self.grid.z_order.to(self.device)
        return replace(result, output=in_raster(result.output, self.prefix, order, None))

    @property
    def without_absent(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with 0 for tokens that do not exist and may hold anything."""
        if (present := self.present) is None:
            return self.inputs
        q, k, v = (tokens.where(present.unsqueeze(-1), 0.0) for tokens in self.inputs)
        return q, k, v

    @property
    def dense_mask(self) -> Tensor | None:
        """(B or 1, 1, 1, prefix + N) which keys exist, for dense attention."""
        return None if (present := self.present) is None else present.unsqueeze(1)

    def compute(
        self,
        backend: str,
        tiling: Tiling,
        question: Budget,
        most: float,
        certified: bool,
        fallback: float | None,
    ) -> tuple[TiledAttention, Tensor | None, int | Tensor] | None:
        """Attention over tiles, the certificate, and how many queries were recomputed exactly.

        None where more than a share `most` of the tiles would be expanded.
        """
        result = self.attend(backend, tiling, question, most)
        if result is None:
            return None
        bound = None
        if certified or fallback is not None:
            bound = self.certificate(result, tiling, backend)
        output, replaced = self.bounded(result.output, bound, fallback)
        return replace(result, output=output), bound, replaced

    def certificate(self, result: TiledAttention, tiling: Tiling, backend: str) -> Tensor:
        """(B, heads, prefix + N) a bound on E, in float64 and the caller's order."""
        q, k = self.inputs[:2]
        valid, order = self.mask, self.order_of(backend)
        turned = self.order != order
        if turned:
            q, k = (in_raster(tokens, self.prefix, self.place, None) for tokens in (q, k))
            valid = None if valid is None else valid[:, self.place]
        bound = tiled_certificate(
            backend,
            q,
            k,
            tiling,
            result.expanded,
            prefix=self.prefix,
            scale=self.scale,
            tau=self.tau,
            valid=valid,
            order=order,
        )
        if not turned:
            return bound
        places = self.grid.z_order.to(self.device)
        return in_raster(bound.unsqueeze(-1), self.prefix, places, None).squeeze(-1)

    def existing(self, tiling: Tiling, backend: str) -> Callable[[], ValidTiles] | None:
        """Which queries, groups and tiles exist, computed on demand; None where all do."""
        return None if self.mask is None else partial(self._existing, tiling, backend)

    def _existing(self, tiling: Tiling, backend: str) -> ValidTiles:
        assert self.valid is not None
        return ValidTiles.of(self.valid[:, 0], tiling, self.order, self.order_of(backend))

    def trees(
        self, result: TiledAttention, tiling: Tiling, question: Budget, backend: str
    ) -> Trees:
        """The partition of every query, made on demand."""
        return Trees(partial(self._tree, result, tiling, str(question), backend))

    def _tree(self, result: TiledAttention, tiling: Tiling, rule: str, backend: str) -> Tree:
        order = self.order_of(backend)
        tree = tiled.tree_of(result, tiling, self.prefix, self.tau, rule, order, self.valid)
        if self.order == order:
            return tree
        places = self.grid.z_order.to(self.device) + self.prefix
        first = torch.arange(self.prefix, device=self.device)
        # Queries of a picture share its mask, which stays as it is: a column for each picture.
        unmasked = replace(tree, valid=None)
        return replace(unmasked[:, :, torch.cat((first, places))], valid=tree.valid)
