"""Screened attention on q, k, v: checks, chooses a backend, returns output, trees and statistics."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from bmfa import tiled
from bmfa.certificates import exact_error, key_certificate
from bmfa.checks import check_floating, check_integer, check_number, check_tau, check_valid
from bmfa.grid import Grid, check_grid, quadtree
from bmfa.rules import Optimal, RandomQuadrants, Rule
from bmfa.screened import Audit, Screened, Stats, Trees
from bmfa.screening import check_finite_products, check_queries, screen_keys
from bmfa.tiled_certificates import tiled_certificate
from bmfa.tiling import Tiled, Tiling
from bmfa.tree import Tree

__all__ = ["Audit", "Screened", "Stats", "screened_attention"]

BACKENDS = ("auto", "eager", "reference", "triton")
FORMS = ("representative", "repeated", "tiled")
DEFAULT_RULE = Optimal(error=0.05)


def screened_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grid: Grid,
    prefix: int = 0,
    rule: Rule | None = None,
    error: float | None = None,
    leaves: float | int | None = None,
    tau: float = 1.0,
    scale: float | None = None,
    max_depth: int | None = None,
    valid: Tensor | None = None,
    order: str = "raster",
    form: str | None = None,
    backend: str = "auto",
    audit: float = 0.0,
    certificate: bool = False,
    fallback: float | None = None,
) -> Screened:
    """Attention with the spatial keys of each query summarised by blocks, as exactly as is asked.

    q, k, v are (B, heads, prefix + N, d) as in scaled_dot_product_attention, prefix tokens first and
    always exact, spatial tokens in raster or, `order="z"`, in Z-order. At most one of `rule`, `error`
    and `leaves` is given.

    Without a rule the form is "tiled", the fast one for long sequences: 8x8 tiles of keys, queries in
    groups of two tiles, one representative query for each group that sees every token exactly. It
    chooses the tiles that are expanded, and corrects the mass and the values of the others. `error` is
    a target for E of the representative before these corrections (0.1 where nothing is given),
    `leaves` a budget: a float is a fraction of the tokens, an int a count. "auto" takes dense attention
    where that is faster.

    With a rule, or with `form` "representative" (one logit M + tau log n and one mean value for each
    leaf) or "repeated" (every score replaced by its leaf's mean: the same output), every query and
    head has a tree of its own and `error` and `leaves` hold for each of them; q may have any number
    of queries.

    `audit` recomputes that fraction of the queries exactly and reports their error; `certificate`
    bounds E of every query, and `fallback` recomputes exactly the queries whose certificate exceeds
    it. `stats` says what ran and why. The Triton kernels serve CUDA, without gradients; they wait for
    nothing, and so let a NaN in q or k through to the outputs that read it, where the others raise.
    """
    if form is not None and form not in FORMS:
        raise ValueError(f"form is {form!r}; pass one of {', '.join(FORMS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; pass one of {', '.join(BACKENDS)}")
    if max_depth is not None:
        check_integer("max_depth", max_depth, low=0)
    check_number("audit", audit, low=0.0, high=1.0)
    if fallback is not None:
        check_number("fallback", fallback, low=0.0)
    chosen = _choose_rule(rule, error, leaves)
    call = _Call(*_autocast(q, k, v), grid, prefix, tau, scale, valid, order)
    by_tiles = form == "tiled" or (form is None and rule is None and max_depth is None)
    if by_tiles and (form == "tiled" or call.self_attention):
        return _tiled_attention(
            call, rule, error, leaves, form, max_depth, backend, audit, certificate, fallback
        )
    form = form or "representative"
    ran, why = _choose_backend(backend, call, chosen)
    form = "repeated" if ran == "triton" else form
    output, trees = call.run(ran, chosen, max_depth, form)
    bound = None
    if certificate or fallback is not None:
        bound = call.certificate(chosen, trees.tree)
    replaced = 0
    if fallback is not None and bound is not None:
        output, replaced = call.fall_back(output, bound > fallback)
    stats = Stats(
        ran,
        form,
        str(chosen),
        why,
        trees,
        bound,
        None if bound is None else ("scores" if chosen.needs == "tokens" else "keys"),
        replaced,
        call.audit(output, audit) if audit > 0 else None,
    )
    return Screened(output.to(q.dtype), trees, stats)


def _tiled_attention(
    call: "_Call",
    rule: Rule | None,
    error: float | None,
    leaves: float | int | None,
    form: str | None,
    max_depth: int | None,
    backend: str,
    audit: float,
    certificate: bool,
    fallback: float | None,
) -> Screened:
    """The form "tiled", or dense attention where "auto" finds that faster."""
    if rule is not None or max_depth is not None:
        raise ValueError("form='tiled' takes no rule and no max_depth; pass error= or leaves=")
    call.check_self_attention()
    _choose_rule(rule, error, leaves).check(call.grid, call.grid.size)
    tiling = Tiling(call.grid)
    question = tiled.Question.of(tiling, error, leaves)
    ran, why = tiled.choose(
        backend,
        *call.inputs,
        tiling,
        prefix=call.prefix,
        order=call.order,
        forced=form == "tiled" or certificate or fallback is not None,
    )
    result = call.tiled(ran, tiling, question)
    make = partial(
        tiled.tree_of, result, tiling, call.prefix, call.tau, str(question), call.order_of(ran)
    )
    trees = Trees(partial(_in_order, make, call, ran))
    output, bound, replaced = result.output, None, 0
    if certificate or fallback is not None:
        bound = call.tiled_certificate(result, tiling, ran)
    if fallback is not None and bound is not None:
        output, replaced = call.fall_back(output, bound > fallback)
    stats = Stats(
        ran,
        "dense" if ran == "dense" else "tiled",
        str(question),
        why,
        trees,
        bound,
        None if bound is None else "keys",
        replaced,
        call.audit(output, audit) if audit > 0 else None,
        result.counts,
        tiling.tiles,
    )
    return Screened(output.to(call.inputs[0].dtype), trees, stats)


def _in_order(make: Callable[[], Tree], call: "_Call", ran: str) -> Tree:
    """Trees of queries in the caller's order."""
    tree = make()
    if call.order == "z" and call.order_of(ran) == "raster":
        order = call.grid.z_order.to(call.device) + call.prefix
        first = torch.arange(call.prefix, device=call.device)
        return tree[:, :, torch.cat((first, order))]
    return tree


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the dtype that autocast asks of attention."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _choose_rule(rule: Rule | None, error: float | None, leaves: float | int | None) -> Rule:
    given = [n for n, x in (("rule", rule), ("error", error), ("leaves", leaves)) if x is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} are given; pass at most one of rule, error, leaves"
        )
    if error is not None:
        return Optimal(error=error)
    if leaves is not None:
        return Optimal(leaves=leaves)
    if rule is not None and not isinstance(rule, Rule):
        raise TypeError(f"rule is {rule!r}; pass one of bmfa.rules, e.g. rules.Gamma(0.005)")
    return DEFAULT_RULE if rule is None else rule


def _choose_backend(backend: str, call: "_Call", rule: Rule) -> tuple[str, str]:
    """The backend that runs, and why."""
    if backend in ("eager", "reference"):
        return backend, "requested"
    if backend == "auto" and call.device.type != "cuda":
        return "eager", "auto: eager serves every rule, dtype and device"
    reason = call.unsupported_by_triton(rule)
    if backend == "auto":
        if reason is not None:
            return "eager", f"auto: eager, because for triton {reason}"
        return "triton", "auto: triton serves the grid, the rule, the dtype and the device"
    if reason is not None:
        raise ValueError(
            f"backend='triton' does not serve this call: {reason}; pass backend='auto' or 'eager'"
        )
    return backend, "requested"


class _Call:
    """One call with its inputs checked, and laid out where a backend asks for that."""

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
        check_floating("v", v)
        _check_tokens(q, k, v, grid, prefix)
        self.scale = check_queries(q, k[:, :, prefix:], grid, scale)
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

    def tiled(self, backend: str, tiling: Tiling, question: tiled.Question) -> Tiled:
        """Attention over tiles; "dense" expands them all."""
        q, k, v = self.inputs
        batch, heads = self.shape[:2]
        if not q.is_cuda and self.mask is None and backend != "triton":
            check_finite_products(q, q * self.scale, k)
        if backend == "dense":
            output = tiled.dense(q, k, v, self.scale / self.tau, self._dense_mask())
            # Nothing else is launched on the device: how many tiles that is, the host knows.
            lines = (batch, heads, tiling.groups)
            counts = torch.full(lines, tiling.tiles, dtype=torch.int32, device="cpu")
            return Tiled(output, counts, partial(_all_marked, (*lines, tiling.tiles), self.device))
        mask, turned = self.mask, self.order != self.order_of(backend)
        if mask is not None:
            mask = mask.view(-1, self.grid.size)
        if turned:
            q, k, v = (_raster(tokens, self.prefix, self.place, None) for tokens in (q, k, v))
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
        )
        if not turned:
            return result
        order = self.grid.z_order.to(self.device)
        return replace(result, output=_raster(result.output, self.prefix, order, None))

    def _dense_mask(self) -> Tensor | None:
        """(B, 1, 1, prefix + N) which keys exist."""
        if self.mask is None:
            return None
        spatial = self.mask.view(-1, self.grid.size)
        before = spatial.new_ones(len(spatial), self.prefix)
        return torch.cat((before, spatial), 1)[:, None, None]

    def tiled_certificate(self, result: Tiled, tiling: Tiling, backend: str) -> Tensor:
        """(B, heads, prefix + N) a bound on E, in float64 and the caller's order."""
        lead = self.shape[:2]
        q, k = (x.detach().double() for x in self.inputs[:2])
        k = self.k.detach().double().view(*lead, *self.k.shape[1:])
        marks = result.marks
        if self.place is not None:
            q = _raster(q, self.prefix, self.place, None)
            if self.order_of(backend) == "z":
                marks = _raster_marks(marks, tiling)
        valid = None if self.valid is None else self.valid[:, 0].expand(lead[0], -1)
        if valid is not None:
            before = valid.new_ones(lead[0], self.prefix)
            exists = torch.cat((before, valid), 1)[:, None, :, None]
            q = q.where(exists, 0.0)
        bound = tiled_certificate(
            q, k, tiling, marks, prefix=self.prefix, scale=self.scale, tau=self.tau, valid=valid
        )
        if self.place is None:
            return bound
        order = self.grid.z_order.to(self.device)
        return _raster(bound.unsqueeze(-1), self.prefix, order, None).squeeze(-1)

    @cached_property
    def laid_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v in the working precision: heads in one dimension, raster order, finite products."""
        q, k, v = self.inputs
        working = torch.float64 if q.dtype == torch.float64 else torch.float32
        exists = None
        if self.valid is not None:
            before = self.valid.new_ones(*self.valid.shape[:2], self.prefix)
            exists = torch.cat((before, self.valid), -1).unsqueeze(-1)
        k, v = (_raster(tokens, self.prefix, self.place, exists) for tokens in (k, v))
        check_finite_products(q, (q * self.scale).to(working), k.to(working))
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

    def run(self, backend: str, rule: Rule, depth: int | None, form: str) -> tuple[Tensor, Trees]:
        """Outputs and trees of a backend."""
        if backend == "triton":
            return self.triton(rule, depth)
        output, tree = (self.reference if backend == "reference" else self.eager)(rule, depth, form)
        return output, Trees(partial(_same, tree))

    def unsupported_by_triton(self, rule: Rule) -> str | None:
        """Why the Triton kernel does not serve this call; None where it does."""
        from bmfa.kernels.triton import trees

        return trees.unsupported(*self.inputs, self.grid, rule, self.mask)

    def triton(self, rule: Rule, max_depth: int | None) -> tuple[Tensor, Trees]:
        """One kernel from q, k, v to outputs and marks; trees are made from these on demand."""
        from bmfa.kernels.triton import trees

        output, marks = trees.attend(
            *self.inputs,
            grid=self.grid,
            prefix=self.prefix,
            rule=rule,
            tau=self.tau,
            scale=self.scale,
            max_depth=max_depth,
            order=self.order,
        )
        shape = tuple(self.shape)
        return output, Trees(partial(_marked, marks, self.grid, shape, self.tau, rule, max_depth))

    def eager(self, rule: Rule, max_depth: int | None, form: str) -> tuple[Tensor, Tree]:
        """Trees from mean keys or streamed scores, then attention over their leaves."""
        from bmfa.kernels import eager

        tree = screen_keys(
            self.q.detach().view(*self.shape, -1),
            self.k[:, self.prefix :].detach().reshape(*self.shape[:2], self.grid.size, -1),
            self.grid,
            rule,
            scale=self.scale,
            tau=self.tau,
            max_depth=max_depth,
            valid=None if self.valid is None else self.valid.unsqueeze(-2),
        )
        attend = eager.representative if form == "representative" else eager.repeated
        flat = tree.flat()
        output = attend(self.q, self.k, self.v, flat, prefix=self.prefix, scale=self.scale)
        return output.view(*self.shape, -1), tree

    def reference(self, rule: Rule, max_depth: int | None, form: str) -> tuple[Tensor, Tree]:
        """The float64 specification, query by query, with the trees it built itself."""
        from bmfa.kernels import reference

        lead = self.shape[:2]
        q, k, v = (
            x.detach().double().cpu().view(*lead, *x.shape[1:]) for x in (self.q, self.k, self.v)
        )
        masks = None if self.valid is None else self.valid.expand(lead[0], -1, -1)[:, 0].cpu()
        output, trees = reference.attention(
            q.numpy(),
            k.numpy(),
            v.numpy(),
            self.grid.height,
            self.grid.width,
            rule,
            prefix=self.prefix,
            tau=self.tau,
            scale=self.scale,
            max_depth=max_depth,
            valid=None if masks is None else masks.numpy(),
            keep=_coins(rule, self.shape, self.grid),
            form=form,
        )
        boxes = [tree.leaves for heads in trees for queries in heads for tree in queries]
        columns = None if masks is None else masks.T
        layout = rule.layout(self.grid)
        tree = Tree.from_boxes(layout, boxes, self.shape, self.tau, str(rule), columns)
        return torch.from_numpy(output).to(self.q), tree.to(self.q.device)

    def certificate(self, rule: Rule, tree: Tree) -> Tensor:
        """(B, heads, Q) a bound on E, in float64."""
        q, k = self.q.detach().double() * self.scale, self.k.detach().double()
        keys, before = k[:, self.prefix :], k[:, : self.prefix]
        bound = exact_error if rule.needs == "tokens" else key_certificate
        return bound(q, keys, tree.flat(), before).view(self.shape)

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


def _raster_marks(marks: Tensor, tiling: Tiling) -> Tensor:
    """(B, heads, R, T) marks of groups and tiles in Z-order, for groups and tiles in raster order.

    A raster group may hold tiles of two groups in Z-order: it expands what both of them do.
    """
    size, ends = tiling.side**2, tiling.slots[:, 0].to(marks.device)
    number = tiling.grid.z_rank.to(marks.device)[ends] // size  # of each raster tile in Z-order
    by_tile = marks[:, :, number // tiling.group][..., number]  # (B, heads, T, T)
    pairs = by_tile.unflatten(2, (tiling.groups, tiling.group))  # type: ignore[no-untyped-call]
    every: Tensor = pairs.all(3)
    return every


def _all_marked(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.ones(shape, dtype=torch.bool, device=device)


def _same(tree: Tree) -> Tree:
    return tree


def _marked(
    marks: Tensor,
    grid: Grid,
    shape: tuple[int, ...],
    tau: float,
    rule: Rule,
    max_depth: int | None,
) -> Tree:
    """The trees whose splits a kernel marked."""
    from bmfa.kernels.triton.tree_tables import decided

    decision = decided(marks, grid, max_depth)
    return Tree(
        quadtree(grid).to(marks.device),
        decision.split,
        shape,
        tau,
        str(rule),
        limited=decision.limited,
        max_depth=max_depth,
    )


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


def _coins(rule: Rule, shape: torch.Size, grid: Grid) -> Any:
    """The coins of RandomQuadrants for every query, as the oracle takes them."""
    if not isinstance(rule, RandomQuadrants):
        return None
    quadrants = (1 + (grid.height > 1)) * (1 + (grid.width > 1))
    return rule.coins(shape.numel(), quadrants).view(*shape, quadrants).numpy()


def _raster(tokens: Tensor, prefix: int, place: Tensor | None, exists: Tensor | None) -> Tensor:
    """Tokens in raster order, 0 where they do not exist and may hold anything."""
    if place is not None:
        tokens = torch.cat((tokens[:, :, :prefix], tokens[:, :, prefix:][:, :, place]), 2)
    return tokens if exists is None else tokens.where(exists, 0.0)
