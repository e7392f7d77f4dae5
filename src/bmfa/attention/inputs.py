"""One call of screened attention: its inputs checked, and laid out where a backend asks for that."""

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from bmfa.attention.result import Audit
from bmfa.checks import check_floating, check_integer, check_tau, check_valid, has_values
from bmfa.grid import Grid, check_grid
from bmfa.quantiles import quantile
from bmfa.trees.build import check_finite_products, check_products


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
        _check_tokens(q, k, v, self.grid, self.prefix)
        self.scale = check_products(q, k, scale)
        if order not in ("raster", "z"):
            raise ValueError(f"order is {order!r}; pass 'raster' or 'z'")
        self.shape = q.shape[:3]
        self.device = q.device
        self.order = order
        self.inputs = q, k, v
        self.mask = _check_mask(valid, q, self.grid.size, self.prefix)

    @cached_property
    def valid(self) -> Tensor | None:
        """(B or 1, 1, N) which spatial keys exist, in raster order, the same for all heads."""
        if self.mask is None:
            return None
        mask = self.mask if self.place is None else self.mask[:, self.place]
        return mask.unsqueeze(1)

    @property
    def on_demand(self) -> Callable[[], Tensor] | None:
        """`valid`, computed when it is called: no graph can hold what the order of a grid takes."""
        return None if self.mask is None else partial(_valid, self)

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
        working = torch.promote_types(q.dtype, torch.float32)
        exists = None
        if self.valid is not None:
            before = self.valid.new_ones(*self.valid.shape[:2], self.prefix)
            exists = torch.cat((before, self.valid), -1).unsqueeze(-1)
        k, v = (in_raster(tokens, self.prefix, self.place, exists) for tokens in (k, v))
        q = self._without_absent_nan(q)
        if has_values(q):
            check_finite_scores(q, k, self.scale)
        q, k, v = (x.to(working).flatten(0, 1).contiguous() for x in (q, k, v))
        return q, k, v

    @property
    def present(self) -> Tensor | None:
        """(B or 1, 1, prefix + N) which queries exist, in the caller's order; None where all do."""
        if self.mask is None or not self.self_attention:
            return None
        before = self.mask.new_ones(len(self.mask), self.prefix)
        return torch.cat((before, self.mask), 1).unsqueeze(1)

    def _without_absent_nan(self, q: Tensor) -> Tensor:
        """q with 0 for queries that do not exist and hold NaN or infinity."""
        present = self.present
        if present is None:
            return q
        finite = q.detach().isfinite().all(-1)
        return q.where((present | finite).unsqueeze(-1), 0.0)

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

    def bounded(
        self, output: Tensor, bound: Tensor | None, fallback: float | None
    ) -> tuple[Tensor, int | Tensor]:
        """Outputs, exact where the bound exceeds `fallback`, and how many of them that is."""
        if bound is None or fallback is None:
            return output, 0
        return self.fall_back(output, ~(bound <= fallback))

    def fall_back(self, output: Tensor, above: Tensor) -> tuple[Tensor, int | Tensor]:
        """Exact outputs where `above`, and how many there were: a tensor where none can be read."""
        if not has_values(output):
            exact = self.dense(slice(None)).to(output.dtype)
            return exact.where(above.unsqueeze(-1), output), above.sum()
        count = int(above.sum())
        if count == 0:
            return output, 0
        places = above.flatten(0, 1).any(0).nonzero().squeeze(1)
        exact = self.dense(places).to(output.dtype)
        merged = torch.where(above[:, :, places].unsqueeze(-1), exact, output[:, :, places])
        return output.index_copy(2, places, merged), count

    def dense(self, queries: Tensor | slice) -> Tensor:
        """(B, heads, *, d) exact attention of some queries."""
        from bmfa.attention.kernels import eager

        mask = None
        if self.valid is not None:
            spatial = self.valid.expand(*self.shape[:2], -1).flatten(0, 1)
            mask = torch.cat((spatial.new_ones(len(spatial), self.prefix), spatial), -1)
        q = self.q[:, queries]
        output = eager.dense_attention(
            q, self.k, self.v, scale=self.scale, tau=self.tau, valid=mask
        )
        return output.view(*self.shape[:2], *output.shape[1:])

    def audit(self, output: Tensor, fraction: float) -> Audit | None:
        """Relative errors at a random fraction of the query positions, at least one.

        Queries that do not exist are left out; None where no query is left.
        """
        total = self.shape[2]
        count = max(1, round(fraction * total))
        with torch.no_grad():
            places = torch.randperm(total, device=self.q.device)[:count]
            exact = self.dense(places).double()
            errors = (output[:, :, places].double() - exact).norm(dim=-1) / exact.norm(dim=-1)
            if (present := self.present) is not None:
                errors = errors[present[..., places].expand_as(errors)]
        if errors.numel() == 0:
            return None
        errors = errors.nan_to_num(0.0).flatten()  # an exact output of 0 that was met
        p95 = float(quantile(errors, 0.95))
        return Audit(len(errors), float(errors.mean()), p95, float(errors.max()))


def _valid(call: Call) -> Tensor:
    assert call.valid is not None
    return call.valid


def _check_tokens(q: Tensor, k: Tensor, v: Tensor, grid: Grid, prefix: int) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_floating(name, tensor)
        if tensor.dim() != 4:
            way_out = f"; for one head, {name}.unsqueeze(1)" if tensor.dim() == 3 else ""
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; pass (B, heads, tokens, d) as for "
                f"torch.nn.functional.scaled_dot_product_attention{way_out}"
            )
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"k is {tuple(k.shape)} {k.dtype} on {k.device} and v {tuple(v.shape)} {v.dtype} on "
            f"{v.device}; pass the same batch, heads, tokens, dtype and device"
        )
    heads, key_heads = q.shape[1], k.shape[1]
    if heads != key_heads and key_heads and heads % key_heads == 0:
        raise ValueError(
            f"q has {heads} heads and k and v have {key_heads}; pass one key head for each query "
            f"head: k.repeat_interleave({heads // key_heads}, 1), and v likewise"
        )
    if k.shape[2] != prefix + grid.size:
        before = k.shape[2] - grid.size
        way_out = (
            f"pass prefix={before} if the first {before} are class or register tokens"
            if before >= 0
            else "pass the grid of the tokens, and k and v with all of them"
        )
        raise ValueError(
            f"k has {k.shape[2]} tokens; a prefix of {prefix} and a {grid.height}x{grid.width} grid "
            f"make {prefix + grid.size}; {way_out}"
        )


def _check_mask(valid: Tensor | None, q: Tensor, size: int, prefix: int) -> Tensor | None:
    """(B or 1, N) from (N,), (B or 1, N) or, as for SDPA, (B or 1, 1, 1, N)."""
    if valid is None:
        return None
    if isinstance(valid, Tensor):
        if valid.dim() == 4 and valid.shape[1:3] == (1, 1):
            valid = valid[:, 0, 0]
        if prefix and valid.dim() and valid.shape[-1] == prefix + size:
            raise ValueError(
                f"valid has {prefix + size} tokens and the grid {size}; prefix tokens always exist: "
                f"pass valid[..., {prefix}:]"
            )
    valid = check_valid(valid, (q.shape[0], size))
    if valid.device != q.device:
        raise ValueError(f"valid is on {valid.device} and q on {q.device}; pass one device")
    return valid if valid.dim() == 2 else valid.unsqueeze(0)


def check_finite_scores(q: Tensor, k: Tensor, scale: float) -> None:
    """Raise where a query or a key is not finite, or scores overflow; half types work in float32."""
    check_finite_products(q, k, scale, torch.promote_types(q.dtype, torch.float32))


def in_raster(tokens: Tensor, prefix: int, place: Tensor | None, exists: Tensor | None) -> Tensor:
    """Tokens in raster order, 0 where they do not exist and may hold anything."""
    if place is not None:
        tokens = torch.cat((tokens[:, :, :prefix], tokens[:, :, prefix:][:, :, place]), 2)
    return tokens if exists is None else tokens.where(exists, 0.0)
