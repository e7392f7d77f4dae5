"""What the layers of a patched model did in the last forward pass of a thread, for `bmfa.summary`.

The log is written for people to look at; no computation reads it. It keeps small tensors of a call
(counts of expanded tiles, errors of probes), whose values are read when somebody asks, so that nothing
waits for a device. It keeps neither q, k, v nor trees.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bmfa.attention.result import ErrorEstimate, Stats
from bmfa.attention.tiling import Tiling, tokens_to_tiles
from bmfa.grid import Grid
from bmfa.models.dense_decision import Key, decision_key
from bmfa.models.forward_state import ForwardState, current_graph_task, is_recomputing

Output = TypeVar("Output")


@dataclass(frozen=True, eq=False)
class LayerEntry:
    """One call of a screened layer."""

    form: str
    backend: str
    reason: str
    grid: Grid
    expanded_count: Tensor | None  # (B, heads, groups)
    valid: Tensor | None  # (B or 1, N)
    measure_error: Callable[[], ErrorEstimate] | None
    in_cuda_graph: bool  # True if a replay of the graph may change the tensors

    @classmethod
    def from_stats(cls, stats: Stats, grid: Grid, valid: Tensor | None) -> "LayerEntry":
        """Keep what is shown of a call."""
        count = stats.expanded_count
        captured = count is not None and count.is_cuda
        return cls(
            stats.form,
            stats.backend,
            stats.reason,
            grid,
            count,
            valid,
            stats.measure_error,
            captured and torch.cuda.is_current_stream_capturing(),
        )

    @property
    def density(self) -> float | None:
        """Mean share of the tiles that a group of queries expands, as in `Stats.density`."""
        if self.form == "dense":
            return 1.0
        if self.expanded_count is None or self.in_cuda_graph:
            return None
        tiling, counts = Tiling(self.grid), self.expanded_count.double()
        if self.valid is None:
            return float(counts.mean()) / tiling.tiles
        valid = self.valid[:, None, :, None]
        tiles, groups = (
            tokens_to_tiles(valid, x, torch.bool).squeeze(-1).any(-1)
            for x in (tiling, tiling.queries)
        )  # (B or 1, T) and (B or 1, R)
        shares = counts / tiles.sum(-1).view(-1, 1, 1)
        return float(shares[groups.unsqueeze(1).expand_as(shares)].mean())

    @property
    def error(self) -> ErrorEstimate | None:
        """The measured error, as in `Stats.error`, without its warning."""
        return None if self.measure_error is None or self.in_cuda_graph else self.measure_error()


# The calls of each layer: one, or one for each grid of packed images.
Entries = dict[int, list[LayerEntry]]


@dataclass(frozen=True, eq=False)
class FinishedPass:
    """A forward pass that went through the last block."""

    shape: tuple[int, ...]  # of the tokens, (B, tokens, C)
    dtype: torch.dtype
    device: torch.device
    key: Key | None  # of the decisions about exact attention
    entries: Entries  # a layer without one ran the attention of its host
    compiled: bool = False  # True if the pass ran in a compiled graph; nothing else is known then


class _LastPass(threading.local):
    """The last finished pass of each thread."""

    finished: FinishedPass | None = None

    def __reduce__(self) -> Any:
        return _LastPass, ()


@dataclass(eq=False)
class LayerLog:
    """The entries of the pass that runs, and the last finished pass, separately for each thread.

    Copies and pickles of a model carry neither.
    """

    depth: int = 0
    running: ForwardState[Entries] = field(default_factory=ForwardState)
    last: _LastPass = field(default_factory=_LastPass)
    compiled: bool = False  # True if torch.compile has traced the model
    handle: Any = None
    # True if `begin` is called in every pass, so that the entries of the thread are those of the pass.
    by_thread: bool = False
    # Blocks of the model whose attention is not a patched layer, and what it is instead.
    other_blocks: dict[int, str] = field(default_factory=dict)

    @property
    def finished(self) -> FinishedPass | None:
        """The last finished pass of this thread."""
        return self.last.finished

    def watch(self, last_block: nn.Module, depth: int) -> None:
        """Note every pass that leaves the last of `depth` blocks."""
        self.depth = depth
        self.handle = last_block.register_forward_hook(self)

    def remove(self) -> None:
        """Undo `watch`."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def begin(self) -> None:
        """Start the entries of a pass whose first block is not known by its index."""
        self.running.set({})

    def run_block(self, layer: int, tokens: Tensor, function: Callable[[], Output]) -> Output:
        """Run a block; its screened layer finds the entries of the pass of these tokens.

        Args:
            layer: Index of the block; 0 starts a pass.
            tokens: The tokens that the block receives.
            function: Runs the block.
        """
        if torch.compiler.is_compiling() or is_recomputing():
            return function()
        entries = None if layer == 0 else self.running.find(tokens)
        if entries is None and layer > 0:
            entries = self.running.current
        if entries is None:
            entries = {}
            self.running.set(entries)
        output = self.running.run_with(entries, function)
        if isinstance(left := first_tensor(output), Tensor):
            self.running.attach(left, entries)
        return output

    def add(self, layer: int, stats: Stats, grid: Grid, valid: Tensor | None) -> None:
        """Note a call of a screened layer."""
        if not torch.compiler.is_compiling() and (entries := self.running.current) is not None:
            entries.setdefault(layer, []).append(LayerEntry.from_stats(stats, grid, valid))

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook of the last block: the pass of these tokens is finished."""
        if torch.compiler.is_compiling():
            self.mark_compiled()
            return
        x = output[0] if isinstance(output, tuple) else output
        if not isinstance(x, Tensor) or current_graph_task() >= 0:  # a backward pass recomputes it
            return
        # Where the model runs its own forward, no tokens have entries.
        found = self.running.find(x) if self.running.in_use else None
        found = self.running.current if self.by_thread else found
        key = decision_key(x) if x.dim() > 1 else None
        self.last.finished = FinishedPass(tuple(x.shape), x.dtype, x.device, key, found or {})

    def mark_compiled(self) -> None:
        """Note that the pass of this thread is traced: a compiled graph does not write this log."""
        self.compiled = True
        unknown = FinishedPass((), torch.float32, torch.device("cpu"), None, {}, compiled=True)
        self.last.finished = unknown

    # torch.compile calls this function while it traces; see TileSwitch.keep_active.
    mark_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def first_tensor(output: Any) -> Any:
    """Return the tokens that a block returns, alone or first in a tuple."""
    return output[0] if isinstance(output, tuple) and output else output
