"""The description of a call of `screened_attention`, checked once, and what it says of tensors."""

import ast
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from bmfa.attention.tiling import DEFAULT_ERROR, FEW_GROUPS, Tiling
from bmfa.checks import (
    check_error,
    check_finite_products,
    check_floating,
    check_integer,
    check_number,
    check_tau,
    check_valid,
)
from bmfa.grid import Grid, check_grid, check_one_frame, grid_from_list, grid_to_list
from bmfa.trees.rules import Rule, as_rule, parse

Backend = Literal["auto", "native", "eager", "triton"]
Form = Literal["tiled", "tree", "dense"]


@dataclass(frozen=True)
class Call:
    """Everything about a call but its tensors. Make it with `Call.from_arguments`.

    Tensors are passed beside it: q (B, H, Q, d), k (B, H or a divisor of it, prefix + N, d), v (B, as
    many, prefix + N, e) and valid, bool (B or 1, N), the spatial tokens that exist, the same for all
    heads, or None.
    """

    grid: Grid  # of the N spatial keys
    queries: int  # Q
    prefix: int = 0  # keys before the grid
    scale: float = 1.0
    tau: float = 1.0
    query_grid: Grid | None = None  # of the queries, if it is not that of the keys
    error: float | None = None  # of tiles: the target for the error; else `expand` is given
    expand: int | None = None  # of tiles: the mean number of tiles that a group of queries expands
    rule: Rule | None = None  # of trees, as is max_depth
    max_depth: int | None = None
    backend: str = "auto"  # that runs it
    dense_threshold: float = 1.0  # share of expanded tiles above which a head is computed exactly
    caller: tuple[str, ...] = ()  # the layer and the patched model, for warnings

    @classmethod
    def from_arguments(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        grid: Grid | tuple[int, int],
        prefix: int,
        rule: Rule | str | None,
        error: float | None,
        leaves: float | int | None,
        tau: float,
        scale: float | None,
        max_depth: int | None,
        query_grid: Grid | tuple[int, int] | None,
        caller: tuple[str, ...],
    ) -> "Call":
        """Check arguments of `screened_attention`.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If shapes or settings do not fit.
        """
        grid = check_grid(grid)
        query_grid = None if query_grid is None else check_grid(query_grid)
        prefix = check_integer("prefix", prefix, low=0)
        check_tensors(q, k, v)
        _check_token_count(k, grid, prefix)
        scale = check_number("scale", q.shape[-1] ** -0.5 if scale is None else scale)
        if max_depth is not None:
            max_depth = check_integer("max_depth", max_depth, low=0)
        queries = check_integer("queries", q.shape[2], low=0)
        if query_grid is not None and queries < query_grid.size:
            raise ValueError(
                f"q has {queries} queries and the {query_grid} query_grid {query_grid.size}; pass a "
                "query for each of its tokens, after those of a prefix"
            )
        if query_grid == grid and queries == prefix + grid.size:
            query_grid = None  # self-attention
        common = (grid, queries, prefix, scale, check_tau(tau), query_grid)
        if rule is not None:
            check_one_frame(grid, "a rule")
            return cls(*common, rule=as_rule(rule), max_depth=max_depth)
        if max_depth is not None:
            raise ValueError(
                f"max_depth is {max_depth}, which limits trees, and no rule is given; pass rule=, "
                "e.g. bmfa.rules.Optimal(error=0.05), or leave max_depth out"
            )
        if query_grid is None and queries != prefix + grid.size:
            raise ValueError(
                f"a call without a rule takes a query for each of {prefix + grid.size} tokens, and q "
                f"has {queries}; pass query_grid=, the grid of the queries, or rule=, e.g. "
                "bmfa.rules.Optimal(error=0.05), for a tree for each query"
            )
        return cls(*common, *budget(grid, error, leaves), caller=caller)

    @property
    def form(self) -> Form:
        """`"tree"` with a rule, and otherwise `"tiled"`."""
        return "tiled" if self.rule is None else "tree"

    @property
    def setting(self) -> str:
        """The rule, the target for the error, or the number of expanded tiles, as text."""
        if self.rule is not None:
            return str(self.rule)
        return f"error {self.error:g}" if self.expand is None else f"{self.expand} tiles expanded"

    @property
    def factor(self) -> float:
        """Factor of q . k with the temperature."""
        return self.scale / self.tau

    @property
    def tiling(self) -> Tiling:
        """Tiles of the keys and groups of the queries, with the probes of the backend.

        A target rests on the probes, which are more than one in a group. With a budget they measure the
        error, for which one is enough if there are many groups.
        """
        tiling = Tiling(self.grid, query_grid=self.query_grid)
        budget = self.error is None and tiling.groups >= FEW_GROUPS
        return replace(tiling, probes_per_group=1) if budget or self.backend == "triton" else tiling

    @property
    def expands_all(self) -> bool:
        """True if every tile is expanded, whatever the tensors hold."""
        return self.error == 0.0 if self.expand is None else self.expand >= self.tiling.tiles

    @property
    def query_prefix(self) -> int:
        """Number of queries before those of the grid, for tiles."""
        return self.prefix if self.query_grid is None else self.queries - self.query_grid.size

    @property
    def self_attention(self) -> bool:
        """True if there is a query for every token."""
        return self.query_grid is None and self.queries == self.prefix + self.grid.size

    def key_mask(self, valid: Tensor | None) -> Tensor | None:
        """(B or 1, prefix + N) bool, the keys that exist; prefix tokens always do."""
        if valid is None:
            return None
        return torch.cat((valid.new_ones(len(valid), self.prefix), valid), 1)

    def query_mask(self, valid: Tensor | None) -> Tensor | None:
        """(B or 1, Q) bool, the queries that exist, or None if all do.

        The mask is one of tokens, so it applies to the queries only if there is one for every token.
        """
        return self.key_mask(valid) if self.self_attention else None

    def to_text(self) -> str:
        """Return the call as text, which an operator of a graph takes."""
        plain: dict[str, Any] = {n: grid_to_list(getattr(self, n)) for n in ("grid", "query_grid")}
        if self.rule is not None:
            plain["rule"] = (str(self.rule), getattr(self.rule, "seed", 0))
        fields = [plain.get(name, getattr(self, name)) for name in _FIELDS]
        return f"[{', '.join([f'{field!r}' for field in fields])}]"

    @staticmethod
    @lru_cache(maxsize=256)
    def from_text(text: str) -> "Call":
        """Read `to_text`."""
        fields = dict(zip(_FIELDS, ast.literal_eval(text), strict=True))
        for name in ("grid", "query_grid"):
            fields[name] = grid_from_list(fields[name])
        if fields["rule"] is not None:
            fields["rule"] = parse(*fields["rule"])
        return Call(**fields)


_FIELDS = tuple(Call.__dataclass_fields__)


def budget(
    grid: Grid, error: float | None, leaves: float | int | None
) -> tuple[float | None, int | None]:
    """Return `Call.error` and `Call.expand` from the arguments of `screened_attention`."""
    if leaves is not None:
        return None, Tiling(grid).tiles_within(leaves)
    return DEFAULT_ERROR if error is None else check_error(error), None


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


def check_mask(valid: Tensor, q: Tensor, call: Call) -> Tensor:
    """(B or 1, N) from (N,), (B or 1, N) or, as for SDPA, (B or 1, 1, 1, N)."""
    size, prefix = call.grid.size, call.prefix
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


def cast_for_autocast(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, AbstractContextManager[Any]]:
    """Cast to the dtype of autocast, as SDPA does; the context disables autocast inside the call."""
    kind = q.device.type if isinstance(q, Tensor) else "meta"
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return q, k, v, nullcontext()
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_floating(name, tensor)
    if q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v, torch.autocast(kind, enabled=False)


def zero_invalid(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v with zeros for invalid tokens, whatever they hold."""
    keys, queries = call.key_mask(valid), call.query_mask(valid)
    if keys is not None:
        k, v = (x.where(keys[:, None, :, None], 0.0) for x in (k, v))
    if queries is not None:
        q = q.where(queries[:, None, :, None], 0.0)
    return q, k, v


def flatten_heads(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B H, tokens, *) q, k, v in a dtype, with a key head for every query head.

    Invalid tokens are 0, but finite invalid queries stay, because their outputs are exact.
    """
    heads_per_key = q.shape[1] // max(1, k.shape[1])
    _, k, v = zero_invalid(q, k, v, valid, call)
    if (mask := call.query_mask(valid)) is not None:
        finite = q.detach().isfinite().all(-1)
        q = q.where((mask.unsqueeze(1) | finite).unsqueeze(-1), 0.0)
    if heads_per_key > 1:
        k, v = (x.repeat_interleave(heads_per_key, 1) for x in (k, v))
    q, k, v = (x.to(dtype).flatten(0, 1).contiguous() for x in (q, k, v))
    return q, k, v


def check_finite_scores(q: Tensor, k: Tensor, scale: float) -> None:
    """Raise if q or k hold NaN or infinity, or if scores overflow; half types compute in float32."""
    check_finite_products(q, k, scale, torch.promote_types(q.dtype, torch.float32))
