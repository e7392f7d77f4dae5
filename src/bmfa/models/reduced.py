"""The parts of a reduced model: its blocks and attention layers, and the pass they share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bmfa.grid import Grid
from bmfa.merging import LayerState, Policy
from bmfa.merging.dispatch import Backend, proportional_attention
from bmfa.models.forwards import has_own_forward, override_of
from bmfa.models.passes import PassState, recomputing
from bmfa.models.screens import Replacement, TokenGrid, valid_keys


@dataclass(frozen=True)
class Branches:
    """The two residual branches of a block: the names of their modules, one after the other."""

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    # Classes, by module and name, whose children run one after the other.
    sequences: frozenset[tuple[str, str]] = frozenset()


@dataclass(eq=False)
class Progress:
    """How far one forward pass has come: what was merged so far, and what stands for what.

    A block works on a copy, so that gradient checkpointing may run it again from the state in which it
    began.
    """

    grid: Grid
    tokens: int  # with the prefix
    exposed: bool  # whether every block returns the whole grid: something reads between the blocks
    layer: int = 0  # the block that runs, or is next
    size: Tensor | None = None  # (B, T) float32; None while every token stands for itself
    targets: tuple[Tensor, ...] = ()
    spreads: tuple[Tensor, ...] = ()
    # Where the whole grid was returned: that tensor, and the tokens that it was made from.
    returned: Tensor | None = None
    merged: Tensor | None = None
    # What the attention of the block that runs leaves for its policy.
    keys: Tensor | None = None
    mass: Tensor | None = None

    def copy(self) -> "Progress":
        """The same state for a block to work on."""
        return Progress(
            self.grid,
            self.tokens,
            self.exposed,
            self.layer,
            self.size,
            self.targets,
            self.spreads,
        )


@dataclass(eq=False)
class Reduction:
    """Token reduction in one model: the policy, and the passes it is at work in.

    Copies and pickles of a model take the policy along, not the pictures.
    """

    grid: TokenGrid
    policy: Policy
    blocks: tuple[nn.Module, ...]
    backend: Backend
    dense: bool  # whether the last block returns the whole grid
    expose: bool  # whether every block does, where something reads what lies between them
    passes: PassState[Progress] = field(default_factory=PassState)
    finished: PassState[Progress] = field(default_factory=PassState)
    # Whether the pass that runs in this thread is to return what lies between the blocks.
    exposing: PassState[bool] = field(default_factory=PassState)

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    def enter(self, layer: int, x: Tensor) -> tuple[Progress, Tensor]:
        """Begin a block; returns the state of the pass, and the tokens (B, T, C) that are left."""
        if torch._C._get_tracing_state() is not None:
            raise RuntimeError(
                "a reduced model is not traced by torch.jit.trace: a trace would keep the merges of the "
                "example for all inputs; use torch.compile or torch.export.export"
            )
        start = self._progress(layer, x)
        if start.layer != layer or x.shape[1] != self._received(start):
            raise RuntimeError(
                f"block {layer} runs on {x.shape[1]} tokens where block {start.layer} on "
                f"{self._received(start)} was next; call the whole model, or apply gradient "
                "checkpointing to whole blocks"
            )
        self.passes.save(x, start)
        progress = start.copy()
        if start.returned is None or start.merged is None:
            return progress, x
        return progress, self._merged(start, start.returned, start.merged, x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the block that runs."""
        progress = self.passes.current
        if progress is None or k.shape[2] != progress.tokens:
            raise RuntimeError(
                f"attention over {k.shape[2]} tokens runs outside of its block; call the whole model, "
                "or apply gradient checkpointing to whole blocks"
            )
        reads_mass = self.policy.reads_mass(progress.layer, self.depth)
        progress.keys, progress.mass = k, None
        size = progress.size if self.policy.proportional else None
        if size is None and not reads_mass:
            return scaled_dot_product_attention(q, k, v, scale=scale)
        output, progress.mass = proportional_attention(
            q,
            k,
            v,
            _ones(k) if size is None else size,
            scale=scale,
            prefix=self.grid.prefix,
            mass=reads_mass,
            backend=self.backend,
        )
        return output

    def reduce(self, progress: Progress, x: Tensor, stage: Literal["attention", "mlp"]) -> Tensor:
        """The tokens that the policy leaves at this stage of the block."""
        if stage != self.policy.stage or progress.keys is None:
            return x
        state = LayerState(
            progress.layer,
            self.depth,
            progress.grid,
            self.grid.prefix,
            x,
            _ones(progress.keys) if progress.size is None else progress.size,
            progress.keys,
            progress.mass,
            self.backend,
        )
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            # Costs differ by less than half types resolve, so autocast ends here.
            with torch.autocast(x.device.type, enabled=False):
                reduced = self.policy.reduce(state)
        else:
            reduced = self.policy.reduce(state)
        if reduced is None:
            return x
        progress.size, progress.tokens = reduced.size, reduced.x.shape[1]
        progress.targets += () if reduced.assignment is None else (reduced.assignment,)
        progress.spreads += () if reduced.unmerge_matrix is None else (reduced.unmerge_matrix,)
        return reduced.x

    def leave(self, progress: Progress, x: Tensor) -> Tensor:
        """End a block; returns the tokens that it hands on, on the whole grid where that is read."""
        progress.layer += 1
        progress.keys = progress.mass = None
        last = progress.layer == self.depth
        output = x
        if (progress.exposed or (last and self.dense)) and progress.tokens < self._whole(progress):
            output = self.restore(progress, x)
            if not last:
                progress.returned, progress.merged = output, x
        if last:
            progress.size = None if progress.size is None else progress.size.detach()
            self.finished.begin(progress)
        self.passes.save(output, progress)
        self.passes.begin(progress)
        return output

    def restore(self, progress: Progress, tokens: Tensor) -> Tensor:
        """(B, prefix + N, C) of the tokens (B, T, C) that are left."""
        prefix = self.grid.prefix
        if progress.spreads:
            first, *others = progress.spreads
            matrix = torch.linalg.multi_dot(progress.spreads) if others else first
            spatial = matrix.to(tokens.dtype) @ tokens[:, prefix:]
            return torch.cat((tokens[:, :prefix], spatial), 1)
        if not progress.targets:
            return tokens
        source = self._source(progress)
        return tokens.gather(1, source.unsqueeze(-1).expand(-1, -1, tokens.shape[2]))

    def _progress(self, layer: int, x: Tensor) -> Progress:
        """The state of the pass in which a block begins."""
        saved = self.passes.recall(x)
        if layer == 0 and (saved is None or not recomputing()):
            grid = self.grid.of(x.shape[1], self.grid.enter(0, x))
            self.policy.check(grid, self.grid.prefix, self.depth)
            return Progress(grid, x.shape[1], self.expose and self._is_read_between_blocks())
        progress = self.passes.current if saved is None else saved
        if progress is None:
            raise RuntimeError(
                f"block {layer} runs where no pass is known; call the whole model, or apply gradient "
                "checkpointing to whole blocks"
            )
        return progress

    def _is_read_between_blocks(self) -> bool:
        hooks = (block._forward_hooks or block._forward_pre_hooks for block in self.blocks)
        return bool(self.exposing.current) or any(hooks)

    def _whole(self, progress: Progress) -> int:
        return self.grid.prefix + progress.grid.size

    def _received(self, progress: Progress) -> int:
        """How many tokens the next block is handed."""
        return progress.tokens if progress.returned is None else self._whole(progress)

    def _merged(self, start: Progress, returned: Tensor, merged: Tensor, x: Tensor) -> Tensor:
        """The tokens that a returned grid was made from, where the model hands on that grid."""
        if x is returned and (torch.is_grad_enabled() or not x.requires_grad):
            return merged
        if torch.compiler.is_compiling():
            return merged
        if x.untyped_storage()._cdata != returned.untyped_storage()._cdata:
            raise RuntimeError(
                f"the tokens that block {start.layer - 1} returned were replaced before block "
                f"{start.layer}, and those were merged; remove the hook that replaces them, or unpatch"
            )
        # Reentrant checkpointing detached the grid, and gradients must pass through it.
        if start.spreads:
            raise RuntimeError(
                "transformed tokens cannot be taken from the grid again; use gradient checkpointing "
                "with use_reentrant=False"
            )
        source = self._source(start)
        holder = torch.arange(source.shape[1], device=x.device).expand_as(source)
        index = source.new_empty(source.shape[0], start.tokens).scatter_(1, source, holder)
        return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))

    def _source(self, progress: Progress) -> Tensor:
        """(B, prefix + N) the token left that holds each token of the grid.

        A token that was pruned has that of the nearest one on the grid that was not, the first in
        raster order among equals.
        """
        first, *others = (target.long() for target in progress.targets)
        source = first
        for target in others:
            source = target.gather(1, source.clamp(min=0)).where(source >= 0, source)
        if self.policy.prunes:
            spatial = source[:, self.grid.prefix :]
            filled = torch.stack([_fill_pruned(row, progress.grid) for row in spatial])
            source = torch.cat((source[:, : self.grid.prefix], filled), 1)
        return source


@dataclass(eq=False)
class ReducedBlock:
    """Runs one block with the policy at work; copies and pickles with the block."""

    layer: int
    branches: Branches
    reduction: Reduction

    def run(self, module: nn.Module, forward: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output of the block."""
        progress, x = self.reduction.enter(self.layer, x)
        branches = partial(self._branches, module, progress, x, *args, **kwargs)
        return self.reduction.leave(progress, self.reduction.passes.within(progress, branches))

    def _branches(
        self, module: nn.Module, progress: Progress, x: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        norm, attention, *rest = self.branches.attention
        attended = getattr(module, attention)(getattr(module, norm)(x), *args, **kwargs)
        attended = attended[0] if isinstance(attended, tuple) else attended
        x = x + self._chain(module, attended, rest)
        x = self.reduction.reduce(progress, x, "attention")
        x = x + self._chain(module, x, self.branches.mlp)
        return self.reduction.reduce(progress, x, "mlp")

    def _chain(self, block: nn.Module, x: Tensor, names: tuple[str, ...] | list[str]) -> Tensor:
        for name in names:
            module = getattr(block, name)
            kind = type(module)
            if (kind.__module__, kind.__name__) in self.branches.sequences and not hooked(module):
                x = in_order(module, x)
            elif not idle(module):
                x = module(x)
        return x


@dataclass(eq=False)
class ExposedPass:
    """Runs the method of a model that returns what lies between its blocks, on the whole grid."""

    reduction: Reduction

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute what the method returns."""
        self.reduction.exposing.begin(True)
        try:
            return forward(*args, **kwargs)
        finally:
            self.reduction.exposing.begin(False)


@dataclass(eq=False)
class SizedAttention(Replacement):
    """Attention among tokens that stand for several."""

    reduction: Reduction

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        if is_causal:
            raise ValueError("causal attention is not reduced; unpatch the model")
        if dropout_p > 0.0:
            raise ValueError(
                f"attention dropout of {dropout_p:g} is not served; "
                "call model.eval(), or build the model with attention dropout 0"
            )
        if attn_mask is not None and valid_keys(attn_mask, self.grid.prefix) is not None:
            raise ValueError(
                "attention masks are not served on merged tokens; pass pictures without padding"
            )
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        return self.reduction.attend(query, key, value, scale)


def idle(module: nn.Module) -> bool:
    """Whether a module does nothing now; small models spend more time calling than computing."""
    kind = type(module)
    nothing = kind is nn.Identity or (kind is nn.Dropout and not module.training)
    return nothing and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether calling the module runs more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_own_forward(module)
    )


def in_order(module: nn.Module, x: Tensor) -> Tensor:
    """The children of a module, one after the other."""
    for child in module._modules.values():
        if child is not None and not idle(child):
            x = child(x)
    return x


def reductions_in(model: nn.Module) -> list[Reduction]:
    """The reductions at work in a model: one, or none."""
    overrides = (override_of(module) for module in model.modules())
    blocks = [override for override in overrides if isinstance(override, ReducedBlock)]
    return [block.reduction for block in blocks[:1]]


def _ones(k: Tensor) -> Tensor:
    """(B, T) sizes of tokens that all stand for themselves."""
    return torch.ones(k.shape[0], k.shape[2], device=k.device)


def _fill_pruned(source: Tensor, grid: Grid) -> Tensor:
    """(N,) with the source of the nearest present token where a token was pruned, that is, has -1."""
    index = torch.arange(grid.size, device=source.device)
    row, column = index // grid.width, index % grid.width
    distance = (row.unsqueeze(1) - row).square() + (column.unsqueeze(1) - column).square()
    ranked = distance * grid.size + index  # the first in raster order among equals
    ranked = ranked.masked_fill(source < 0, torch.iinfo(ranked.dtype).max)
    return source[ranked.argmin(1)]
