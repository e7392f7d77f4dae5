"""The tensors and settings of one call of `screened_attention`: checked once, laid out on demand."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from bmfa.attention.tiling import Budget, Tiling
from bmfa.checks import (
    check_finite_products,
    check_floating,
    check_integer,
    check_number,
    check_tau,
    check_valid,
    has_values,
)
from bmfa.grid import Grid, check_grid
from bmfa.trees.rules import Rule

Form = Literal["tiled", "tree"]
Backend = Literal["auto", "native", "eager", "triton"]


@dataclass(frozen=True)
class AttentionOptions:
    """How a call is computed: the form, its parameters and the backend that runs it."""

    form: Form
    backend: str  # "native", "eager" or "triton"
    budget: Budget | None = None  # of the form "tiled"
    dense_threshold: float = 1.0  # share of expanded tiles above which a head is computed exactly
    rule: Rule | None = None  # of the other forms, as is max_depth
    max_depth: int | None = None


@dataclass(eq=False)
class AttentionInputs:
    """Checked inputs of a call. Make them with `check_inputs`."""

    q: Tensor  # (B, H, Q, d)
    k: Tensor  # (B, H or a divisor of it, prefix + N, d)
    v: Tensor  # (B, H, prefix + N, e), likewise
    grid: Grid
    prefix: int
    tau: float
    scale: float
    valid: Tensor | None  # (B or 1, N) bool, the same for all heads
    query_grid: Grid | None = None  # of the queries, if it is not that of the keys

    @property
    def tokens(self) -> int:
        """Number of keys, prefix + N."""
        return self.prefix + self.grid.size

    @property
    def self_attention(self) -> bool:
        """True if there is a query for every token."""
        return self.query_grid is None and self.q.shape[2] == self.tokens

    @property
    def tiling(self) -> Tiling:
        """Tiles of the keys, and groups of the queries."""
        return Tiling(self.grid, query_grid=self.query_grid)

    @property
    def query_prefix(self) -> int:
        """Number of queries before those of the grid, for calls over tiles."""
        return self.prefix if self.query_grid is None else self.q.shape[2] - self.query_grid.size

    @property
    def valid_keys(self) -> Tensor | None:
        """(B or 1, prefix + N) bool; prefix tokens are always valid."""
        return None if self.valid is None else self.add_prefix(self.valid)

    @property
    def valid_queries(self) -> Tensor | None:
        """(B or 1, prefix + N) bool, or None if all queries are valid.

        The mask is one of tokens, so it applies to the queries only if there is one for every token.
        """
        return self.valid_keys if self.self_attention else None

    def add_prefix(self, valid: Tensor) -> Tensor:
        """(B or 1, prefix + N) mask of all tokens from (B or 1, N); prefix tokens are always valid."""
        return torch.cat((valid.new_ones(len(valid), self.prefix), valid), 1)

    @property
    def shares_keys(self) -> bool:
        """True if several query heads share a key head."""
        return self.q.shape[1] != self.k.shape[1]

    @property
    def share(self) -> int:
        """Number of consecutive query heads that share a key head."""
        return self.q.shape[1] // max(1, self.k.shape[1])

    def zero_invalid(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v with zeros for invalid tokens, whatever they hold."""
        if (valid := self.valid_keys) is None:
            return self.q, self.k, self.v
        mask = valid[:, None, :, None]
        q = self.q.where(mask, 0.0) if self.self_attention else self.q
        return q, self.k.where(mask, 0.0), self.v.where(mask, 0.0)

    @cached_property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with batch and heads in one dimension, in float32 or float64.

        Invalid tokens are 0. k and v have B times the number of key heads.

        Raises:
            ValueError: If q or k hold NaN or infinity, or if scores overflow.
        """
        if has_values(self.q):
            check_finite_scores(*self.zero_invalid()[:2], self.scale)
        return self.flatten(torch.promote_types(self.q.dtype, torch.float32))

    def with_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> "AttentionInputs":
        """Return the same call for tensors of the same shapes.

        Raises:
            ValueError: If the shapes are not those of the call.
        """
        for name, given, own in (("q", q, self.q), ("k", k, self.k), ("v", v, self.v)):
            if given.shape != own.shape:
                raise ValueError(
                    f"{name} has shape {tuple(given.shape)} and the call had {tuple(own.shape)}; pass "
                    "the tensors of the call"
                )
        return replace(self, q=q, k=k, v=v)

    def copy_shared(self, flat: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return `flat` with a copy of its key head for every query head."""
        q, k, v = flat
        if not self.shares_keys:
            return q, k, v
        return q, k.repeat_interleave(self.share, 0), v.repeat_interleave(self.share, 0)

    def flatten(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """`flat` in a dtype, whatever q and k hold."""
        q, k, v = self.q, self.k, self.v
        if (keys := self.valid_keys) is not None:
            mask = keys[:, None, :, None]
            k, v = k.where(mask, 0.0), v.where(mask, 0.0)
        if (valid := self.valid_queries) is not None:  # keep finite queries: their output is exact
            finite = q.detach().isfinite().all(-1)
            q = q.where((valid.unsqueeze(1) | finite).unsqueeze(-1), 0.0)
        q, k, v = (x.to(dtype).flatten(0, 1).contiguous() for x in (q, k, v))
        return q, k, v


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grid: Grid | tuple[int, int],
    prefix: int,
    tau: float,
    scale: float | None,
    valid: Tensor | None,
    query_grid: Grid | tuple[int, int] | None = None,
) -> AttentionInputs:
    """Check the arguments of `screened_attention` that describe its tensors."""
    grid = check_grid(grid)
    query_grid = None if query_grid is None else check_grid(query_grid)
    prefix = check_integer("prefix", prefix, low=0)
    check_tensors(q, k, v)
    _check_token_count(k, grid, prefix)
    scale = float(q.shape[-1] ** -0.5) if scale is None else check_number("scale", scale)
    valid = None if valid is None else _check_mask(valid, q, grid.size, prefix)
    if query_grid is not None and q.shape[2] < query_grid.size:
        raise ValueError(
            f"q has {q.shape[2]} queries and the {query_grid} query_grid {query_grid.size}; pass a "
            "query for each of its tokens, after those of a prefix"
        )
    if query_grid == grid and q.shape[2] == prefix + grid.size:
        query_grid = None  # self-attention
    return AttentionInputs(q, k, v, grid, prefix, check_tau(tau), scale, valid, query_grid)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are floating-point tensors of shapes, dtypes and devices that fit."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_floating(name, tensor)
        if tensor.dim() != 4:
            hint = f"; for one head, {name}.unsqueeze(1)" if tensor.dim() == 3 else ""
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; pass (B, heads, tokens, d) as for "
                f"torch.nn.functional.scaled_dot_product_attention{hint}"
            )
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"k is {tuple(k.shape)} {k.dtype} on {k.device} and v {tuple(v.shape)} {v.dtype} on "
            f"{v.device}; pass the same batch, heads, tokens, dtype and device"
        )
    if q.dtype != k.dtype or q.device != k.device:
        raise TypeError(
            f"q is {q.dtype} on {q.device} and k {k.dtype} on {k.device}; pass one dtype and device"
        )
    same = q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1] and q.shape[-1] > 0
    heads, key_heads = q.shape[1], k.shape[1]
    if not same or (heads != key_heads and (key_heads == 0 or heads % key_heads != 0)):
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; pass (B, heads, queries, d) and "
            "(B, heads, tokens, d), with as many key heads or a divisor of that number"
        )


def _check_token_count(k: Tensor, grid: Grid, prefix: int) -> None:
    if k.shape[2] == prefix + grid.size:
        return
    before = k.shape[2] - grid.size
    hint = (
        f"pass prefix={before} if the first {before} are class or register tokens"
        if before >= 0
        else "pass the grid of the tokens, and k and v with all of them"
    )
    raise ValueError(
        f"k has {k.shape[2]} tokens; a prefix of {prefix} and a {grid} grid "
        f"make {prefix + grid.size}; {hint}"
    )


def _check_mask(valid: Tensor, q: Tensor, size: int, prefix: int) -> Tensor:
    """(B or 1, N) from (N,), (B or 1, N) or, as for SDPA, (B or 1, 1, 1, N)."""
    if isinstance(valid, Tensor):
        if valid.dim() == 4 and valid.shape[1:3] == (1, 1):
            valid = valid[:, 0, 0]
        if prefix and valid.dim() and valid.shape[-1] == prefix + size:
            raise ValueError(
                f"valid has {prefix + size} tokens and the grid {size}; prefix tokens are always "
                f"valid: pass valid[..., {prefix}:]"
            )
    valid = check_valid(valid, (q.shape[0], size))
    if valid.device != q.device:
        raise ValueError(f"valid is on {valid.device} and q on {q.device}; pass one device")
    return valid if valid.dim() == 2 else valid.unsqueeze(0)


def check_finite_scores(q: Tensor, k: Tensor, scale: float) -> None:
    """Raise if q or k hold NaN or infinity, or if scores overflow; half types compute in float32."""
    check_finite_products(q, k, scale, torch.promote_types(q.dtype, torch.float32))
