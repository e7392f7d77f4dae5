"""One call of screened attention: its inputs checked, and laid out where a backend asks for that."""

from functools import cached_property

import torch
from torch import Tensor

from bmfa.checks import check_floating, check_integer, check_tau, check_valid
from bmfa.grid import Grid, check_grid
from bmfa.screened import Audit
from bmfa.screening import check_finite_products, check_products


class Call:
    """The inputs of a call, and exact attention on them, for what is asked about its error."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        prefix: int,
        tau: float,
        scale: float | None,
        valid: Tensor | None,
        order: str,
    ) -> None:
        self.grid = check_grid(grid)
        self.prefix = check_integer("prefix", prefix, low=0)
        self.tau = check_tau(tau)
        _check_tokens(q, k, v, grid, prefix)
        self.scale = check_products(q, k, scale)
        if order not in ("raster", "z"):
            raise ValueError(f"order is {order!r}; pass 'raster' or 'z'")
        self.shape = q.shape[:3]
        self.device = q.device
        self.order = order
        self.inputs = q, k, v
        self.mask = valid
        self.valid = _spatial_mask(valid, q.shape[0], grid.size)  # (B or 1, 1, N)
        if self.valid is not None and self.place is not None:
            self.valid = self.valid[..., self.place]

    @cached_property
    def place(self) -> Tensor | None:
        """(N,) place in Z-order of every raster token, where that is the order; a copy to the device."""
        return self.grid.z_rank.to(self.device) if self.order == "z" else None

    @property
    def self_attention(self) -> bool:
        """Whether the queries are the tokens themselves."""
        return self.shape[2] == self.prefix + self.grid.size

    @cached_property
    def laid_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v in the working precision: heads in one dimension, raster order, finite products."""
        q, k, v = self.inputs
        working = torch.float64 if q.dtype == torch.float64 else torch.float32
        exists = None
        if self.valid is not None:
            before = self.valid.new_ones(*self.valid.shape[:2], self.prefix)
            exists = torch.cat((before, self.valid), -1).unsqueeze(-1)
        k, v = (in_raster(tokens, self.prefix, self.place, exists) for tokens in (k, v))
        check_finite_products(q, k, self.scale, working)
        q, k, v = (x.to(working).flatten(0, 1).contiguous() for x in (q, k, v))
        return q, k, v

    @property
    def q(self) -> Tensor:
        """(B heads, Q, d)."""
        return self.laid_out[0]

    @property
    def k(self) -> Tensor:
        """(B heads, prefix + N, d)."""
        return self.laid_out[1]

    @property
    def v(self) -> Tensor:
        """(B heads, prefix + N, *)."""
        return self.laid_out[2]

    def fall_back(self, output: Tensor, above: Tensor) -> tuple[Tensor, int]:
        """Exact outputs where `above`, and how many there were."""
        count = int(above.sum())
        if count == 0:
            return output, 0
        places = above.flatten(0, 1).any(0).nonzero().squeeze(1)
        exact = self.dense(places).to(output.dtype)
        merged = torch.where(above[:, :, places].unsqueeze(-1), exact, output[:, :, places])
        return output.index_copy(2, places, merged), count

    def dense(self, queries: Tensor | slice) -> Tensor:
        """(B, heads, *, d) exact attention of some queries."""
        from bmfa.kernels import eager

        mask = None
        if self.valid is not None:
            spatial = self.valid.expand(*self.shape[:2], -1).flatten(0, 1)
            mask = torch.cat((spatial.new_ones(len(spatial), self.prefix), spatial), -1)
        q = self.q[:, queries]
        output = eager.dense(q, self.k, self.v, scale=self.scale, tau=self.tau, valid=mask)
        return output.view(*self.shape[:2], *output.shape[1:])

    def audit(self, output: Tensor, fraction: float) -> Audit:
        """Relative errors at a random fraction of the query positions, at least one."""
        total = self.shape[2]
        count = max(1, round(fraction * total))
        with torch.no_grad():
            places = torch.randperm(total, device=self.q.device)[:count]
            exact = self.dense(places).double()
            errors = (output[:, :, places].double() - exact).norm(dim=-1) / exact.norm(dim=-1)
        errors = errors.nan_to_num(0.0).flatten()  # an exact output of 0 that was met
        ordered = errors.sort().values  # torch.quantile stops at 16 million numbers
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return Audit(len(errors), float(errors.mean()), float(p95), float(ordered[-1]))


def _check_tokens(q: Tensor, k: Tensor, v: Tensor, grid: Grid, prefix: int) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_floating(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; pass (B, heads, tokens, d) as for "
                "torch.nn.functional.scaled_dot_product_attention"
            )
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"k is {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype}; "
            "pass the same batch, heads, tokens, dtype and device"
        )
    if k.shape[2] != prefix + grid.size:
        raise ValueError(
            f"k has {k.shape[2]} tokens; a prefix of {prefix} and a {grid.height}x{grid.width} grid "
            f"make {prefix + grid.size}; set prefix= to the number of class and register tokens"
        )


def _spatial_mask(valid: Tensor | None, batch: int, size: int) -> Tensor | None:
    """(B or 1, 1, N) from (N,) or (B, N): which spatial keys exist, the same for all heads."""
    if valid is None:
        return None
    check_valid(valid, (batch, size))
    return valid.view(-1, 1, size)


def in_raster(tokens: Tensor, prefix: int, place: Tensor | None, exists: Tensor | None) -> Tensor:
    """Tokens in raster order, 0 where they do not exist and may hold anything."""
    if place is not None:
        tokens = torch.cat((tokens[:, :, :prefix], tokens[:, :, prefix:][:, :, place]), 2)
    return tokens if exists is None else tokens.where(exists, 0.0)
