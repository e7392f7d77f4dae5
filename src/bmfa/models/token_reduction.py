"""Token reduction inside a model: its blocks, its attention, and the state of a forward pass."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bmfa.checks import is_compiling
from bmfa.grid import Grid
from bmfa.merging import LayerState, Policy
from bmfa.merging.dispatch import Backend, proportional_attention
from bmfa.merging.operation import pool
from bmfa.models.families import BlockLayout
from bmfa.models.override import override_of
from bmfa.models.passes import Passes, PerThread, current_graph_task, is_recomputing, mark, marked
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
    # If the last block returned the full grid: its output, and the tokens it was made from.
    returned: weakref.ref[Tensor] | None = None
    merged: Tensor | None = None
    # Left by the attention of the running block for its policy.
    keys: Tensor | None = None  # (B, heads, T, d)
    mass: Tensor | None = None

    def copy(self) -> "ReductionState":
        """Return a state for the next block to work on."""
        return ReductionState(
            self.grid,
            self.tokens,
            self.full_grid,
            self.layer,
            self.size,
            self.assignments,
            self.unmerge_matrices,
            self.kept,
        )


@dataclass(eq=False)
class _Thread:
    """The states of the passes in a thread."""

    state: ReductionState | None = None
    graph_task: int = -1  # the backward pass in which the state was set
    running: ReductionState | None = None  # of the block that runs
    finished: ReductionState | None = None
    exposing: bool = False  # True while a method runs that returns the outputs of blocks


@dataclass(eq=False)
class TokenReduction:
    """The reduction of one model: its policy, and the states of its forward passes.

    Copies and pickles of a model include the policy, but no states.
    """

    passes: Passes
    policy: Policy
    blocks: tuple[nn.Module, ...]
    backend: Backend
    dense: bool  # True if the last block returns the full grid
    expose: bool  # True if every block does whose output something reads
    planned: Grid | None = None  # the grid that the policy was chosen for; None for any
    threads: PerThread[_Thread] = field(default_factory=partial(PerThread, _Thread))

    @property
    def thread(self) -> _Thread:
        """The states of this thread."""
        return self.threads.get()

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    def begin_block(self, layer: int, x: Tensor) -> tuple[ReductionState, Tensor]:
        """Return the state for a block to work on, and the tokens (B, T, C) that are left."""
        if torch._C._get_tracing_state() is not None:
            raise RuntimeError(
                "torch.jit.trace does not support reduced models: a trace would apply the merges of the "
                "example to all inputs; use torch.compile or torch.export.export"
            )
        start = self._state_before(layer, x)
        expected = start.tokens if start.merged is None else self._all_tokens(start)
        if start.layer != layer or x.shape[1] != expected:
            raise RuntimeError(
                f"block {layer} runs on {x.shape[1]} tokens, but block {start.layer} on {expected} was "
                "next; call the whole model, or apply gradient checkpointing to whole blocks"
            )
        if start.merged is not None and not is_compiling() and marked(x, self) is None:
            raise RuntimeError(
                f"the tokens that block {layer - 1} returned were replaced before block {layer}, which "
                "works on merged ones; remove the hook that replaces them, or call bmfa.unpatch(model)"
            )
        mark(x, self, start)
        state = start.copy()
        self._set(state)
        return state, x if start.merged is None else self._merged_tokens(start, start.merged, x)

    def _set(self, state: ReductionState) -> None:
        self.thread.state = state
        if not is_compiling():
            self.thread.graph_task = current_graph_task()

    @property
    def state(self) -> ReductionState | None:
        """The state of the running pass, in a backward pass only if it was set there."""
        thread = self.thread
        if is_recomputing() and thread.graph_task != current_graph_task():
            return None
        return thread.state

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Compute the attention of the running block; its state keeps keys and mass."""
        state = self.thread.running
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
        layer_state = LayerState(
            state.layer,
            self.depth,
            state.grid,
            self.passes.prefix,
            x,
            _ones(state.keys) if state.size is None else state.size,
            state.keys,
            state.mass,
            self.backend,
        )
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            # Half types do not resolve the differences between costs, so autocast is off here.
            with torch.autocast(x.device.type, enabled=False):
                reduced = self.policy.reduce(layer_state)
        else:
            reduced = self.policy.reduce(layer_state)
        if reduced is None:
            return x
        state.size, state.tokens = reduced.size, reduced.x.shape[1]
        state.assignments += () if reduced.assignment is None else (reduced.assignment,)
        state.unmerge_matrices += (
            () if reduced.unmerge_matrix is None else (reduced.unmerge_matrix,)
        )
        return reduced.x

    def end_block(self, state: ReductionState, x: Tensor) -> Tensor:
        """Return the output of the block: the tokens that are left, or the full grid."""
        state.layer += 1
        state.kept += (state.tokens,)
        state.keys = state.mass = None
        last = state.layer == self.depth
        output = x
        if (state.full_grid or (last and self.dense)) and state.tokens < self._all_tokens(state):
            output = self.unmerge(state, x)
            if not last:
                state.merged = x
                if not is_compiling():
                    state.returned = weakref.ref(output)
        if last:
            state.size = None if state.size is None else state.size.detach()
            self.thread.finished = state
        mark(output, self, state)
        self._set(state)
        return output

    def unmerge(self, state: ReductionState, tokens: Tensor) -> Tensor:
        """Return (B, prefix + N, C) from the tokens (B, T, C) that are left."""
        prefix = self.passes.prefix
        if state.unmerge_matrices:
            first, *others = state.unmerge_matrices
            matrix = torch.linalg.multi_dot(state.unmerge_matrices) if others else first
            spatial = matrix.to(tokens.dtype) @ tokens[:, prefix:]
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
        attached: ReductionState | None = marked(x, self)
        if layer == 0 and (attached is None or not is_recomputing()):
            begun = None if is_compiling() or is_recomputing() else self.passes.enter_first(x)
            images = self.passes.images if begun is None else begun.images
            grid = self.passes.grid_of(x.shape[1], images if isinstance(images, Grid) else None)
            if self.planned is not None and grid != self.planned:
                raise ValueError(
                    f"the plan is for a {self.planned.height}x{self.planned.width} grid of tokens, and "
                    f"the image has {grid.height}x{grid.width}; make a plan for this size with "
                    "bmfa.tune_reduction, or pass images of the size of the plan"
                )
            self.policy.check(grid, self.passes.prefix, self.depth)
            return ReductionState(grid, x.shape[1], self.expose and self._reads_block_outputs())
        state = self.state if attached is None else attached
        if state is None:
            raise RuntimeError(
                f"block {layer} runs without a forward pass of the model; call the whole model, or "
                "apply gradient checkpointing to whole blocks"
            )
        return state

    def _reads_block_outputs(self) -> bool:
        hooks = (block._forward_hooks or block._forward_pre_hooks for block in self.blocks)
        return self.thread.exposing or any(hooks)

    def _all_tokens(self, state: ReductionState) -> int:
        return self.passes.prefix + state.grid.size

    def _merged_tokens(self, start: ReductionState, merged: Tensor, x: Tensor) -> Tensor:
        """Return the tokens from which the full grid x was made."""
        if is_compiling():
            return merged
        returned = None if start.returned is None else start.returned()
        if x is returned and (torch.is_grad_enabled() or not x.requires_grad):
            return merged
        # Reentrant checkpointing detached the grid; gradients must flow through x.
        if start.unmerge_matrices:
            raise RuntimeError(
                "transformed tokens cannot be recovered from the grid; use gradient checkpointing with "
                "use_reentrant=False"
            )
        source = self._source(start)
        holder = torch.arange(source.shape[1], device=x.device).expand_as(source)
        index = source.new_empty(source.shape[0], start.tokens).scatter_(1, source, holder)
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
class ReducedBlock:
    """Override of a block that applies the policy after its attention or its MLP."""

    layer: int
    layout: BlockLayout
    reduction: TokenReduction

    def run(self, module: nn.Module, method: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output of the block."""
        state, x = self.reduction.begin_block(self.layer, args[0])
        thread = self.reduction.thread
        before, thread.running = thread.running, state
        try:
            x = self._run_branches(module, state, x, *args[1:], **kwargs)
        finally:
            thread.running = before
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
class ExposedBlocks:
    """Override of a method that returns the outputs of blocks, which then are on the full grid."""

    reduction: TokenReduction

    def run(self, module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute what the method returns."""
        self.reduction.thread.exposing = True
        try:
            return method(*args, **kwargs)
        finally:
            self.reduction.thread.exposing = False


@dataclass(eq=False)
class ReducedAttention(AttentionFunction):
    """Attention among tokens of which each may stand for several."""

    reduction: TokenReduction

    def describe(self) -> str:
        """Return the policy."""
        return str(self.reduction.policy)

    def compute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        valid: Tensor | None,
        grid: Grid | None,
        query_grid: Grid | None,
    ) -> Tensor:
        """Run the attention of the block that is being reduced."""
        if valid is not None:
            raise ValueError(
                "attention masks are not supported among merged tokens; pass images without padding"
            )
        return self.reduction.attention(q, k, v, scale)


def find_reduction(model: nn.Module) -> TokenReduction | None:
    """Return the token reduction of a model, or None."""
    overrides = (override_of(module) for module in model.modules())
    blocks = (override for override in overrides if isinstance(override, ReducedBlock))
    return next((block.reduction for block in blocks), None)


def _run_parts(block: nn.Module, names: tuple[str, ...] | list[str], x: Tensor) -> Tensor:
    for name in names:
        part = getattr(block, name)
        if isinstance(part, Tensor):
            x = part * x
        elif part is not None:
            x = part(x)
    return x


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
