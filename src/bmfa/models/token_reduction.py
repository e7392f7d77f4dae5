"""Token reduction inside a model: its blocks, its attention, and the state of a forward pass."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bmfa.checks import is_compiling
from bmfa.grid import Grid
from bmfa.merging import LayerState, Policy
from bmfa.merging.dispatch import Backend, proportional_attention
from bmfa.merging.operation import pool
from bmfa.models.families import BlockLayout
from bmfa.models.passes import Passes, is_recomputing
from bmfa.models.replacement import Replacement, replacement_of
from bmfa.models.screened_layer import AttentionFunction


@dataclass(eq=False)
class ReductionState:
    """What one forward pass has merged so far.

    A block works on a copy, so that gradient checkpointing can rerun it from the state it started in.
    """

    grid: Grid
    tokens: int  # with the prefix
    full_grid: bool  # True if every block returns the full grid, because something reads its output
    layer: int = 0  # the block that runs, or is next
    size: Tensor | None = None  # (B, T) float32 multiplicities; None while all are 1
    assignments: tuple[Tensor, ...] = ()  # of every block that merged tokens, see ReducedTokens
    unmerge_matrices: tuple[Tensor, ...] = ()  # of every block that transformed them
    kept: tuple[int, ...] = ()  # tokens that each block so far left, for `bmfa.summary`
    # Left by the attention of the running block for its policy.
    keys: Tensor | None = None  # (B, heads, T, d)
    mass: Tensor | None = None


@dataclass(eq=False)
class TokenReduction:
    """The reduction of one model: its policy, and the states of its forward passes.

    The passes hold the states: copies and pickles of a model include the policy, but no states.
    """

    passes: Passes
    policy: Policy
    blocks: tuple[nn.Module, ...]
    backend: Backend
    dense: bool  # True if the last block returns the full grid
    expose: bool  # True if every block does whose output something reads
    planned: Grid | None = None  # the grid that the policy was chosen for; None for any

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    def begin_block(self, layer: int, x: Tensor) -> tuple[ReductionState, Tensor]:
        """Return the state for a block to work on, and the tokens (B, T, C) that are left."""
        start = self._state_before(layer, x)
        grid_tokens = self.passes.prefix + start.grid.size
        merged = start.full_grid and start.tokens < grid_tokens
        expected = grid_tokens if merged else start.tokens
        if start.layer != layer or x.shape[1] != expected:
            raise RuntimeError(
                f"block {layer} runs on {x.shape[1]} tokens, but block {start.layer} on {expected} was "
                "next; call the whole model, or apply gradient checkpointing to whole blocks"
            )
        return replace(start), self._merged_tokens(start, x) if merged else x

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Compute the attention of the running block; its state keeps keys and mass."""
        state = self.passes.thread.running_state
        if state is None or k.shape[2] != state.tokens:
            raise RuntimeError(
                f"attention over {k.shape[2]} tokens runs outside of its block; call the whole model, "
                "or apply gradient checkpointing to whole blocks"
            )
        reads_mass = self.policy.reads_mass(state.layer, self.depth)
        state.keys, state.mass = k, None
        size = state.size if self.policy.proportional else None
        if size is None and not reads_mass:
            return scaled_dot_product_attention(q, k, v, scale=scale)
        size, prefix = _ones(k) if size is None else size, self.passes.prefix
        output, state.mass = proportional_attention(
            q, k, v, size, scale=scale, prefix=prefix, mass=reads_mass, backend=self.backend
        )
        return output

    def apply_policy(
        self, state: ReductionState, x: Tensor, stage: Literal["attention", "mlp"]
    ) -> Tensor:
        """Return the tokens (B, T', C) that the policy leaves after this stage of the block."""
        if stage != self.policy.stage or state.keys is None:
            return x
        size = _ones(state.keys) if state.size is None else state.size
        place = (state.layer, self.depth, state.grid, self.passes.prefix)
        layer_state = LayerState(*place, x, size, state.keys, state.mass, self.backend)
        # Half types do not resolve the differences between costs, so autocast is off here.
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=False) if autocast else nullcontext():
            reduced = self.policy.reduce(layer_state)
        if reduced is None:
            return x
        state.size, state.tokens = reduced.size, reduced.x.shape[1]
        if reduced.assignment is not None:
            state.assignments += (reduced.assignment,)
        if reduced.unmerge_matrix is not None:
            state.unmerge_matrices += (reduced.unmerge_matrix,)
        return reduced.x

    def end_block(self, state: ReductionState, x: Tensor) -> Tensor:
        """Return the output of the block: the tokens that are left, or the full grid."""
        thread = self.passes.thread
        state.layer += 1
        state.kept += (state.tokens,)
        state.keys = state.mass = None
        last = state.layer == self.depth
        if last:
            state.size = None if state.size is None else state.size.detach()
            thread.last_state = state
        if is_compiling():
            thread.traced_state = state
        elif thread.current is not None:
            thread.current.states[state.layer] = state
        return self.unmerge(state, x) if state.full_grid or (last and self.dense) else x

    def unmerge(self, state: ReductionState, tokens: Tensor) -> Tensor:
        """Return (B, prefix + N, C) from the tokens (B, T, C) that are left."""
        prefix = self.passes.prefix
        if state.unmerge_matrices:
            spatial = _product(state.unmerge_matrices).to(tokens.dtype) @ tokens[:, prefix:]
            return torch.cat((tokens[:, :prefix], spatial), 1)
        if not state.assignments:
            return tokens
        source = self._source(state)
        return tokens.gather(1, source.unsqueeze(-1).expand(-1, -1, tokens.shape[2]))

    def merged_rotations(self, state: ReductionState, tables: Any) -> Any:
        """Return the rotary tables of the tokens (B, T, C) that are left.

        The keys of tokens that were merged are merged after rotation: a token that stands for others has
        the mean of their rotations, so that its key is the mean of the rotated keys of tokens with the
        same content. The tables, cos and sin, are linear in the rotations.

        Args:
            state: Of the running block.
            tables: Tensors (..., N, D), one or a tuple; with the axes (B, heads) before N if there are
                four, (heads) if there are three.

        Returns:
            Tensors (B, heads or 1, T - prefix, D), or the same ones if no token was merged.
        """
        if isinstance(tables, tuple):
            return tuple(self.merged_rotations(state, table) for table in tables)
        if not state.assignments:
            return tables
        prefix = self.passes.prefix
        source = _compose(state.assignments)[:, prefix:]  # (B, N)
        table = tables[(None,) * (4 - tables.dim())]  # (B or 1, heads or 1, N, D)
        batch, heads = len(source), table.shape[1]
        rows = table.expand(batch, -1, -1, -1).transpose(1, 2).flatten(2)  # (B, N, heads * D)
        index = torch.where(source < 0, source, source - prefix)
        size = torch.ones(index.shape, device=rows.device)
        means, _ = pool(rows, size, index, state.tokens - prefix)
        return means.view(batch, -1, heads, table.shape[-1]).transpose(1, 2)

    def _state_before(self, layer: int, x: Tensor) -> ReductionState:
        """Return the state in which a block starts that receives x."""
        passes = self.passes
        current = None if is_compiling() else passes.thread.current
        state: ReductionState | None = None
        if is_compiling():
            state = passes.thread.traced_state
        elif current is not None:
            state = current.states.get(layer)
        if layer == 0 and (state is None or not is_recomputing()):
            grid = passes.grid_of(x.shape[1])
            if self.planned is not None and grid != self.planned:
                raise ValueError(
                    f"the plan is for a {self.planned.height}x{self.planned.width} grid of tokens, and "
                    f"the image has {grid.height}x{grid.width}; make a plan for this size with "
                    "bmfa.tune_reduction, or pass images of the size of the plan"
                )
            self.policy.check(grid, passes.prefix, self.depth)
            state = ReductionState(grid, x.shape[1], self.expose and self._reads_block_outputs())
            if current is not None:
                current.states[0] = state
        if state is None:
            raise RuntimeError(
                (current is not None and current.problem)
                or f"block {layer} runs without a forward pass of the model; call the whole model, or "
                "apply gradient checkpointing to whole blocks"
            )
        return state

    def _reads_block_outputs(self) -> bool:
        """True if there are hooks of blocks beside the two that follow the passes."""
        hooks = (len(b._forward_hooks) + len(b._forward_pre_hooks) for b in self.blocks)
        return self.passes.thread.exposing or max(hooks) > 2

    def _merged_tokens(self, state: ReductionState, x: Tensor) -> Tensor:
        """Undo `unmerge`: return the tokens from which the full grid x was made."""
        if state.unmerge_matrices:
            prefix = self.passes.prefix
            inverse = torch.linalg.pinv(_product(state.unmerge_matrices)).to(x.dtype)
            return torch.cat((x[:, :prefix], inverse @ x[:, prefix:]), 1)
        source = self._source(state)
        holder = torch.arange(source.shape[1], device=x.device).expand_as(source)
        index = source.new_empty(source.shape[0], state.tokens).scatter_(1, source, holder)
        return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))

    def _source(self, state: ReductionState) -> Tensor:
        """Return (B, prefix + N) indices of the remaining token that holds each original token.

        A pruned token has the index of the nearest token on the grid that was not pruned, of equally
        near ones the first in raster order.
        """
        source = _compose(state.assignments)
        if self.policy.prunes:
            prefix = self.passes.prefix
            filled = torch.stack([_fill_pruned(row, state.grid) for row in source[:, prefix:]])
            source = torch.cat((source[:, :prefix], filled), 1)
        return source


@dataclass(eq=False)
class ReducedBlock(Replacement):
    """Forward of a block that applies the policy after its attention or its MLP."""

    layer: int
    layout: BlockLayout
    reduction: TokenReduction

    def run(self, module: nn.Module, method: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output of the block."""
        state, x = self.reduction.begin_block(self.layer, args[0])
        thread = self.reduction.passes.thread
        before, thread.running_state = thread.running_state, state
        try:
            x = self._run_branches(module, state, x, *args[1:], **kwargs)
        finally:
            thread.running_state = before
        return self.reduction.end_block(state, x)

    def _run_branches(
        self, module: nn.Module, state: ReductionState, x: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        norm, attention, *rest = self.layout.attention
        rotary = self.layout.rotary
        if kwargs.get(rotary) is not None:
            kwargs[rotary] = self.reduction.merged_rotations(state, kwargs[rotary])
        attended = getattr(module, attention)(getattr(module, norm)(x), *args, **kwargs)
        attended = attended[0] if isinstance(attended, tuple) else attended
        x = x + _run_parts(module, rest, attended)
        x = self.reduction.apply_policy(state, x, "attention")
        x = x + _run_parts(module, self.layout.mlp, x)
        return self.reduction.apply_policy(state, x, "mlp")


@dataclass(eq=False)
class ExposedBlocks(Replacement):
    """A method that returns the outputs of blocks, which then are on the full grid."""

    method: ClassVar[str] = "forward_intermediates"
    reduction: TokenReduction

    def run(self, module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute what the method returns."""
        thread = self.reduction.passes.thread
        thread.exposing = True
        try:
            return method(*args, **kwargs)
        finally:
            thread.exposing = False


@dataclass(eq=False)
class ReducedAttention(AttentionFunction):
    """Attention among tokens of which each may stand for several."""

    reduction: TokenReduction

    def describe(self) -> str:
        """Return the policy."""
        return str(self.reduction.policy)

    def compute(self, scale: float, q: Tensor, k: Tensor, v: Tensor, valid: Any = None) -> Tensor:
        """Run the attention of the block that is being reduced."""
        if valid is not None:
            raise ValueError(
                "attention masks are not supported among merged tokens; pass images without padding"
            )
        return self.reduction.attention(q, k, v, scale)


def find_reduction(model: nn.Module) -> TokenReduction | None:
    """Return the token reduction of a model, or None."""
    replaced = (replacement_of(module) for module in model.modules())
    return next((one.reduction for one in replaced if isinstance(one, ReducedBlock)), None)


def _run_parts(block: nn.Module, names: tuple[str, ...] | list[str], x: Tensor) -> Tensor:
    for name in names:
        part = getattr(block, name)
        if isinstance(part, Tensor):
            x = part * x
        elif part is not None:
            x = part(x)
    return x


def _product(matrices: tuple[Tensor, ...]) -> Tensor:
    return torch.linalg.multi_dot(matrices) if len(matrices) > 1 else matrices[0]


def _compose(assignments: tuple[Tensor, ...]) -> Tensor:
    """Return (B, prefix + N) indices of the token that holds each original one, -1 if it was pruned."""
    source, *others = (assignment.long() for assignment in assignments)
    for assignment in others:
        source = assignment.gather(1, source.clamp(min=0)).where(source >= 0, source)
    return source


def _ones(k: Tensor) -> Tensor:
    """Return the sizes (B, T) of tokens that were not merged."""
    return torch.ones(k.shape[0], k.shape[2], device=k.device)


def _fill_pruned(source: Tensor, grid: Grid) -> Tensor:
    """Replace -1 in (N,) by the source of the nearest token on the grid that was not pruned."""
    index = torch.arange(grid.size, device=source.device)
    row, column = index // grid.width, index % grid.width
    distance = (row.unsqueeze(1) - row).square() + (column.unsqueeze(1) - column).square()
    ranked = distance * grid.size + index  # ties go to the first in raster order
    ranked = ranked.masked_fill(source < 0, torch.iinfo(ranked.dtype).max)
    return source[ranked.argmin(1)]
