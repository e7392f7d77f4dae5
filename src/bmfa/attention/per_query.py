"""Screened attention with a tree for every query: the backends, and what they return."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.inputs import Call
from bmfa.attention.result import Trees
from bmfa.attention.tiling import unflatten
from bmfa.grid import Grid
from bmfa.trees.build import screen_keys
from bmfa.trees.certificates import exact_error, key_certificate
from bmfa.trees.layout import quadtree_layout
from bmfa.trees.rules import RandomQuadrants, Rule
from bmfa.trees.tree import Tree


class TreeCall(Call):
    """A call whose rule builds trees."""

    def choose(self, backend: str, rule: Rule) -> tuple[str, str]:
        """The backend that runs, and why."""
        if backend in ("eager", "reference"):
            return backend, "requested"
        if backend == "auto" and self.device.type != "cuda":
            return "eager", "auto: eager serves every rule, dtype and device"
        reason = self.unsupported_by_triton(rule)
        if backend == "auto":
            if reason is not None:
                return "eager", f"auto: eager, because for triton {reason}"
            return "triton", "auto: triton serves the grid, the rule, the dtype and the device"
        if reason is not None:
            raise ValueError(
                f"backend='triton' does not serve this call: {reason}; pass backend='auto' or 'eager'"
            )
        return backend, "requested"

    def compute(
        self,
        backend: str,
        rule: Rule,
        max_depth: int | None,
        form: str,
        certified: bool,
        fallback: float | None,
    ) -> tuple[Tensor, Trees, Tensor | None, int | Tensor]:
        """Outputs, trees, the certificate, and how many queries were recomputed exactly."""
        output, trees = self.run(backend, rule, max_depth, form)
        bound = None
        if certified or fallback is not None:
            bound = self.certificate(rule, trees.tree)
        output, replaced = self.bounded(output, bound, fallback)
        return output, trees, bound, replaced

    def run(self, backend: str, rule: Rule, depth: int | None, form: str) -> tuple[Tensor, Trees]:
        """Outputs and trees of a backend."""
        if backend == "triton":
            return self.triton(rule, depth)
        output, tree = (self.reference if backend == "reference" else self.eager)(rule, depth, form)
        return output, Trees(partial(_same, tree))

    def unsupported_by_triton(self, rule: Rule) -> str | None:
        """Why the Triton kernel does not serve this call; None where it does."""
        from bmfa.attention.kernels.triton.per_query import operators

        return operators.unsupported_reason(*self.inputs, self.grid, rule, self.mask)

    def triton(self, rule: Rule, max_depth: int | None) -> tuple[Tensor, Trees]:
        """One kernel from q, k, v to outputs and marks; trees are made from these on demand."""
        from bmfa.attention.kernels.triton.per_query import operators

        output, marks = operators.per_query_attention(
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
        from bmfa.attention.kernels import eager

        tree = screen_keys(
            unflatten(self.q.detach(), 0, self.shape[:2]),
            unflatten(self.k[:, self.prefix :].detach(), 0, self.shape[:2]),
            self.grid,
            rule,
            scale=self.scale,
            tau=self.tau,
            max_depth=max_depth,
            valid=None if self.valid is None else self.valid.unsqueeze(-2),
        )
        attend = (
            eager.representative_attention if form == "representative" else eager.repeated_attention
        )
        flat = tree.flat()
        output = attend(self.q, self.k, self.v, flat, prefix=self.prefix, scale=self.scale)
        return unflatten(output, 0, self.shape[:2]), tree

    def reference(self, rule: Rule, max_depth: int | None, form: str) -> tuple[Tensor, Tree]:
        """The float64 specification, query by query, with the trees it built itself."""
        from bmfa.attention.kernels import reference

        lead = self.shape[:2]
        q, k, v = (
            x.detach().double().cpu().view(*lead, *x.shape[1:]) for x in (self.q, self.k, self.v)
        )
        masks = None if self.valid is None else self.valid.expand(lead[0], -1, -1)[:, 0].cpu()
        output, trees = reference.per_query_attention(
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
            coins=_coins(rule, self.shape, self.grid),
            form=form,
        )
        boxes = [tree.leaves for heads in trees for queries in heads for tree in queries]
        columns = None if masks is None else masks.T
        layout = rule.layout(self.grid)
        tree = Tree.from_boxes(layout, boxes, self.shape, self.tau, str(rule), columns)
        return torch.from_numpy(output).to(self.q), tree.to(self.q.device)

    def certificate(self, rule: Rule, tree: Tree) -> Tensor:
        """(B, heads, Q) a bound on E, in float64."""
        if self.q.numel() == 0:
            return self.q.new_zeros(self.shape, dtype=torch.float64)
        q, k = self.q.detach().double() * self.scale, self.k.detach().double()
        keys, before = k[:, self.prefix :], k[:, : self.prefix]
        bound = exact_error if rule.needs == "tokens" else key_certificate
        return bound(q, keys, tree.flat(), before).view(self.shape)


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
    from bmfa.attention.kernels.triton.per_query.tables import decode_splits

    decision = decode_splits(marks, grid, max_depth)
    return Tree(
        quadtree_layout(grid).to(marks.device),
        decision.split,
        shape,
        tau,
        str(rule),
        limited=decision.limited,
        max_depth=max_depth,
    )


def _coins(rule: Rule, shape: torch.Size, grid: Grid) -> Any:
    """The coins of RandomQuadrants for every query, as the oracle takes them."""
    if not isinstance(rule, RandomQuadrants):
        return None
    quadrants = (1 + (grid.height > 1)) * (1 + (grid.width > 1))
    return rule.draw(shape.numel(), quadrants).view(*shape, quadrants).numpy()
