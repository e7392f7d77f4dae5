"""Activate the screened layers of a model when an input needs them, and not before."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.dense_decision import DenseDecision, is_capturing
from bmfa.models.hosts.base import replacement_of
from bmfa.models.override import activate_override, deactivate_override, override_of
from bmfa.models.token_grid import TokenGrid

# Input shapes that are known to run the attention of the host; later ones are decided in every pass.
_MAX_INPUTS = 1024
_HOST: set[str | None] = {"dense"}  # the backends if every layer runs the attention of the host
_LOCK = RLock()  # one for all models: copies and pickles of a model cannot include a lock


@dataclass(eq=False)
class TileSwitch:
    """Forward hook of the patch projection of a model whose layers may all run dense.

    The modules of the model run their own forward, without overrides, until an image arrives for which a
    layer runs tiles or the native kernel. Then the overrides become active, until an image for which all
    layers run the attention of the host arrives while no other one is in the model. They stay active
    after a pass with gradients, because gradient checkpointing may recompute its blocks, after a pass of
    exact attention by the native kernel, and after torch.compile has read them. While they are active,
    every block looks up the decision for its tokens.

    The replicas of nn.DataParallel share this hook. They are copies of the modules as they were before
    the forward pass, so the pass that activates the overrides still runs dense in them.
    """

    token_grid: TokenGrid
    decisions: tuple[DenseDecision, ...]  # one for each set of options
    modules: tuple[nn.Module, ...]  # with overrides or replacements
    # Outputs of the projection for which every layer runs the attention of the host: shape, dtype,
    # device, whether gradients are required, and whether a CUDA graph is captured.
    host_inputs: set[tuple[Any, ...]] = field(default_factory=set)

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if torch.compiler.is_compiling():
            if not self._is_dense_in_graph(output) or self.token_grid.uses_tiles:
                self.keep_active()
            elif not self.token_grid.observers:
                return
        else:
            key = (*output.shape, output.dtype, output.device, output.requires_grad)
            key = (*key, is_capturing(output))
            backends = _HOST if key in self.host_inputs else self._decide(key, output)
            if None in backends:
                self._activate_for_pass()
            else:
                if "native" in backends and not self.token_grid.keeps_tiles:
                    self.keep_active()
                elif self.token_grid.uses_tiles:
                    self._deactivate_if_unused()
                if not self.token_grid.observers:
                    self.token_grid.passes.forget()
                    return
        self.token_grid(module, inputs, output)

    def keep_active(self) -> None:
        """Make the overrides active for good."""
        with _LOCK:
            _activate(self.modules)
            self.token_grid.uses_tiles = self.token_grid.keeps_tiles = True

    # torch.compile calls this function while it traces, before it reads the modules that change. The
    # mark is that of torch.compiler.assume_constant_result, which would load the compiler on import.
    keep_active._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _activate_for_pass(self) -> None:
        with _LOCK:
            self.token_grid.starting.add(get_ident())
            if not self.token_grid.uses_tiles:
                _activate(self.modules)
                self.token_grid.uses_tiles = True

    def _deactivate_if_unused(self) -> None:
        token_grid = self.token_grid
        with _LOCK:
            if token_grid.keeps_tiles or token_grid.starting or token_grid.passes.in_use:
                return
            token_grid.uses_tiles = False
            if not token_grid.observers:
                _deactivate(self.modules)

    def _decide(self, key: tuple[Any, ...], output: Tensor) -> set[str | None]:
        """Return the backends of exact attention in the layers, None for tiles."""
        if torch._C._get_tracing_state() is not None:
            raise RuntimeError(
                "a patched model cannot be traced by torch.jit.trace: a trace would keep the choice "
                "between dense attention and tiles for inputs of all sizes; use torch.compile or "
                "torch.export.export"
            )
        batch, _, height, width = output.shape
        grid = Grid(height, width)
        tokens = self.token_grid.special + grid.size
        backends: set[str | None] = set()
        for decision in self.decisions:
            decision.grids.setdefault(tokens, grid)
            choice = decision.decide((batch, tokens, *key[4:]))
            backends.add(None if choice is None else choice.backend)
        if backends == _HOST and len(self.host_inputs) < _MAX_INPUTS:
            self.host_inputs.add(key)
        return backends

    def _is_dense_in_graph(self, output: Tensor) -> bool:
        """Return the decision while torch.compile traces, where caches would be guards of the graph."""
        batch, _, height, width = output.shape
        # Integers, not symbols: the choice is a constant of the graph. The batch may stay a symbol.
        grid = Grid(int(height), int(width))
        kind = (output.dtype, output.device, output.requires_grad, output.is_cuda)
        return all(decision.make(batch, grid, *kind) is not None for decision in self.decisions)


def begin_observing(model: nn.Module, token_grids: Iterable[TokenGrid]) -> None:
    """Make the overrides of a model active until `end_observing`."""
    with _LOCK:
        for token_grid in token_grids:
            token_grid.observers += 1
        _activate(model.modules())


def end_observing(model: nn.Module, token_grids: Iterable[TokenGrid]) -> None:
    """Undo `begin_observing`, unless the model uses tiles or something else observes it."""
    with _LOCK:
        in_use = False
        for token_grid in token_grids:
            token_grid.observers -= 1
            in_use = in_use or token_grid.uses_tiles or token_grid.observers > 0
        if not in_use:
            _deactivate(model.modules())


def _activate(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if (replacement := replacement_of(module)) is not None:
            replacement.activate(module)
        if override_of(module) is not None:
            activate_override(module)


def _deactivate(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if (replacement := replacement_of(module)) is not None:
            replacement.deactivate(module)
        if override_of(module) is not None:
            deactivate_override(module)
