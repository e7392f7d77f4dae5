"""The forward passes of a patched or reduced model: their images, and what their layers did.

A hook of the patch projection begins a pass, and hooks of the blocks say which pass their tokens belong
to. Every thread has a current pass. The tokens between blocks carry their pass as an attribute of their
storage, which gradient checkpointing shares when it detaches a tensor, so a block that is recomputed in
a backward pass, or that runs in turn with the blocks of another pass, finds its own.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from bmfa.attention.result import ErrorEstimate, Stats
from bmfa.checks import is_compiling
from bmfa.grid import Grid
from bmfa.models.packing import Packing, outside_graphs, prepare_compiling

# The id of the backward pass that this thread runs, -1 outside of backward passes.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id

# The grid of all images of a pass, or where the tokens of each image are.
Images: TypeAlias = Grid | Packing
numbers = count(1)  # of patched models


def is_recomputing() -> bool:
    """True in a backward pass, where gradient checkpointing reruns modules."""
    return not is_compiling() and current_graph_task() >= 0


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a patched layer, for `bmfa.summary`."""

    form: str
    backend: str
    reason: str
    stats: Stats | None = None  # without q, k, v, outputs and trees; None if they are not known

    @classmethod
    def from_stats(cls, stats: Stats) -> "LayerCall":
        """Keep the small tensors of a call of `screened_attention`."""
        kept: Stats | None = replace(stats, make_tree=None)
        if tiles := stats.tiles:
            none = cast(Any, None)
            tiles = replace(tiles, output=none, expanded_or_make=none)
            kept = replace(stats, make_tree=None, tiles=tiles)
            if tiles.probes.is_cuda and torch.cuda.is_current_stream_capturing():
                kept = None  # a replay of the graph may change the tensors
        return cls(stats.form, stats.backend, stats.reason, kept)

    def explain(self) -> str:
        """Return the reason, for tiles what the setting came to. Waits for the device."""
        why_exact = self.reason.partition("; ")[2]
        if self.form != "tiled" or self.stats is None or why_exact:
            return why_exact or self.reason
        call, density = self.stats.call, self.density or 0.0
        if call.expand is not None:
            return f"{call.expand} of {call.tiling.tiles} tiles are expanded"
        return f"{call.setting} expands {100 * density:.0f} %"

    @property
    def density(self) -> float | None:
        """Mean share of the tiles that a group of queries expands, as in `Stats.density`."""
        known = None if self.stats is None else self.stats.density
        return 1.0 if self.form == "dense" else known

    @property
    def error(self) -> ErrorEstimate | None:
        """The measured error, as in `Stats.error`, without its warning."""
        measure = None if self.stats is None else self.stats.measure_error
        return None if measure is None else measure()


@dataclass(eq=False)
class ForwardPass:
    """One forward pass of a model."""

    images: Images | None
    calls: dict[int, list[LayerCall]] = field(default_factory=dict)  # by layer
    # Of a reduction, by the block they precede.
    states: dict[int, Any] = field(default_factory=dict)
    block: int = -1  # the last block that began
    inside: bool = False  # True while that block runs
    outer: "ForwardPass | None" = None  # the pass whose block runs this one, by a hook
    ambiguous: bool = False  # True if its images may be those of an abandoned pass
    problem: str = ""  # why the images are None
    compiled: bool = False  # True if the pass ran in a compiled graph; nothing is known of it then
    output: tuple[Any, ...] = ()  # shape, dtype and device of the tokens behind the last block


@dataclass(eq=False)
class Thread:
    """The passes of a thread."""

    current: ForwardPass | None = None
    graph_task: int = -1  # the backward pass in which `current` was set
    begun: tuple[ForwardPass, ...] = ()  # passes that have not reached the first block
    # Passes that have, while their tokens live.
    entered: "weakref.WeakSet[ForwardPass]" = field(default_factory=weakref.WeakSet)
    finished: ForwardPass | None = None  # the last one that left the last block
    traced: Images | None = None  # of the pass that torch.compile traces
    # Of a token reduction: before the next block of a traced pass, of the block that runs, at the end.
    traced_state: Any = None
    running_state: Any = None
    last_state: Any = None
    exposing: bool = False  # True while a method runs that returns the outputs of blocks


class PerThread(threading.local):
    """A `Thread` for each thread. Copies and pickles start without any."""

    def __init__(self) -> None:
        self.thread = Thread()

    def __reduce__(self) -> Any:
        return PerThread, ()


@dataclass(eq=False)
class Passes:
    """The forward passes of one model, and the layout of its tokens."""

    prefix: int = 0  # tokens before the grid
    suffix: int = 0  # tokens behind the grid, such as detection tokens
    model: str = ""  # its name in warnings
    local: PerThread = field(default_factory=PerThread)
    handles: list[Any] = field(default_factory=list)  # of hooks
    warned: set[Grid] = field(default_factory=set)  # grids that a plan is not for
    compiled: bool = False  # True if torch.compile has traced the model
    depth: int = 0  # number of layers
    # Blocks of the model whose attention is not a layer, and what it is instead.
    other_blocks: dict[int, str] = field(default_factory=dict)

    @property
    def thread(self) -> Thread:
        """The passes of this thread."""
        return self.local.thread

    @property
    def special(self) -> int:
        """The number of tokens that are not on the grid; their keys stay exact."""
        return self.prefix + self.suffix

    def watch(self, vit: Any) -> None:
        """Begin a pass at the patch projection, or by a reader, and follow the blocks."""
        for layer, block in enumerate(vit.blocks):
            hooks = BlockHooks(self, layer, last=layer == len(vit.blocks) - 1)
            self.handles.append(block.register_forward_pre_hook(hooks.enter))
            self.handles.append(block.register_forward_hook(hooks.leave))
        if vit.reader is None:
            self.handles.append(vit.projection.register_forward_hook(self.read_grid))
        else:
            prepare_compiling()
            hook = partial(self.read_images, vit.reader)
            self.handles.append(vit.encoder.register_forward_pre_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def read_grid(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook of the projection.

        It returns a map (B, C, height, width) or (B, C, frames, height, width), tokens with the shape of
        the grid (NaFlexViT), or tokens with their positions (Gemma 4).
        """
        sides = output.shape[2:] if isinstance(output, Tensor) else output[1]
        if isinstance(sides, Tensor):
            image, *positions = (x for x in inputs if x is not None)
            whole = isinstance(image, Tensor) and image.dim() == 4 and not positions
            size: Any = module.patch_size
            sides = [n // p for n, p in zip(image.shape[2:], size, strict=True)] if whole else None
        if sides is None:
            raise ValueError(
                "images with patch_coord= are not supported in patched models, because each may have "
                "another grid; pass images of one size, (N, 3, height, width)"
            )
        # Integers, not symbols: whatever depends on a grid is a constant of a compiled graph.
        *frames, height, width = map(int, sides)
        self.begin(Grid(height, width, frames=frames[0] if frames else 1))

    def read_images(
        self, reader: Callable[..., Packing], module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Forward pre-hook of a model whose reader finds the images in the arguments."""
        outside_graphs(lambda: self.begin(reader(module, *args, **kwargs)))

    def begin(self, images: Images | None) -> None:
        """Begin a forward pass in this thread."""
        if torch._C._get_tracing_state() is not None:
            raise RuntimeError(
                "patched and reduced models cannot be traced by torch.jit.trace: a trace would keep for "
                "all inputs what was chosen for the example; use torch.compile or torch.export.export"
            )
        thread = self.thread
        if is_compiling():
            thread.traced, thread.current = images, None
            return
        begun, before = ForwardPass(images), thread.current
        begun.outer = before if before is not None and before.inside else None
        thread.traced, thread.current = None, begun
        thread.graph_task = current_graph_task()
        thread.begun = (*(p for p in thread.begun if p.images != images), begun)

    def enter_first(self, tokens: Tensor, found: ForwardPass | None) -> ForwardPass | None:
        """Return the pass whose tokens the first block receives, None if there is none.

        Args:
            tokens: (B, tokens, C).
            found: The pass that these tokens have been through, if they run a second time.
        """
        thread = self.thread
        fitting = [begun for begun in thread.begun if self._fits(begun, tokens)]
        found = thread.current if found is None else found
        if fitting:
            # The latest: an exception, or a call of the projection alone, has left the others.
            entered = fitting[-1]
            entered.ambiguous = any(begun.images != entered.images for begun in fitting)
            thread.begun = tuple(begun for begun in thread.begun if begun not in fitting)
        elif found is None:
            return None
        elif found.ambiguous:
            return ForwardPass(
                None,
                problem="images with different grids and the same number of tokens went through the "
                "patch embedding before any of them reached the first block, so the grid of these "
                "tokens is ambiguous; run one image through the model after the other",
            )
        else:
            entered = ForwardPass(found.images)
        thread.entered.add(entered)
        return entered

    def _fits(self, begun: ForwardPass, tokens: Tensor) -> bool:
        """True if the tokens may be those of the images of a pass."""
        if not isinstance(begun.images, Grid) or tokens.dim() != 3:
            return True
        return tokens.shape[1] == self.special + begun.images.size

    @property
    def images(self) -> Images | None:
        """The images of the running pass, None if they are not known.

        In a backward pass they are not, unless they were set in this backward pass: those of a
        forward pass may belong to another input than the block that is recomputed.
        """
        thread = self.thread
        if thread.traced is not None or thread.current is None:
            return thread.traced
        if is_recomputing() and thread.graph_task != current_graph_task():
            return None
        return thread.current.images

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the running pass, in models whose layers have several."""
        if is_compiling() or self.thread.current is None:
            self.thread.traced = grid
        else:
            self.thread.current.images = grid

    def layout(self, tokens: int) -> Images | None:
        """Return the images of attention over a number of tokens, None if they are not known."""
        images = self.images
        other = isinstance(images, Grid) and images.size != tokens - self.special
        return None if other else images

    def grid_of(self, tokens: int, grid: Grid | None = None) -> Grid:
        """Return the grid of the running pass, or the given one, if it fits the number of tokens.

        Raises:
            RuntimeError: If no grid is known.
            ValueError: If the prefix and the grid do not make up the tokens.
        """
        if grid is None and isinstance(images := self.images, Grid):
            grid = images
        if grid is None and is_recomputing():
            raise RuntimeError(
                f"attention over {tokens} tokens is recomputed in a backward pass and its grid is "
                "unknown; apply gradient checkpointing to whole blocks or to the model, and to a model "
                "whose attention is named only with grid=(height, width)"
            )
        if grid is None:
            current = self.thread.current
            raise RuntimeError(
                (current is not None and current.problem)
                or "no image went through the patch embedding in this thread; call the model itself, "
                "not one of its blocks"
            )
        if tokens not in (self.special + grid.size, grid.frames * self.special + grid.size):
            suffix = f" and {self.suffix} tokens behind it" if self.suffix else ""
            raise ValueError(
                f"attention over {tokens} tokens, but {self.prefix} prefix tokens and a {grid} "
                f"grid{suffix} make {self.special + grid.size}; screening needs all of them: switch off "
                "whatever drops or merges tokens"
            )
        return grid

    def special_first(self, grid: Grid, q: Tensor) -> Tensor | None:
        """Return the order of the tokens (B, heads, tokens, d) that puts those beside the grid first.

        These are before and behind all tokens of the grid, or before and behind those of each frame.
        None if the order is that already.
        """
        tokens = q.shape[2]
        frames = 1 if tokens == self.special + grid.size else grid.frames
        if frames == 1 and not self.suffix:
            return None
        index = torch.arange(tokens, device=q.device).view(frames, -1)
        end = index.shape[1] - self.suffix
        special = torch.cat((index[:, : self.prefix], index[:, end:]), 1)
        return torch.cat((special.flatten(), index[:, self.prefix : end].flatten()))

    def log(self, layer: int, call: LayerCall) -> None:
        """Note a call of a layer in the running pass; a compiled graph notes nothing."""
        if is_compiling():
            return
        current = self.thread.current
        if current is not None and not is_recomputing():
            current.calls.setdefault(layer, []).append(call)

    def finish(self, running: ForwardPass | None, tokens: Any) -> None:
        """Note that the running pass has left the last block."""
        if is_compiling():
            self.mark_compiled()
            self.thread.traced = None  # what is left at the end of a graph would be an output of it
        elif running is not None and isinstance(tokens, Tensor) and not is_recomputing():
            running.output = (tuple(tokens.shape), tokens.dtype, tokens.device)
            self.thread.finished = running
            self.thread.current, running.outer = running.outer or running, None

    def mark_compiled(self) -> None:
        """Note that the pass of this thread is traced: a compiled graph does not write this log."""
        self.compiled = True
        self.thread.finished = ForwardPass(None, compiled=True)

    # torch.compile calls this function while it traces. The mark is that of
    # torch.compiler.assume_constant_result, which would load the compiler on import.
    mark_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(eq=False)
class BlockHooks:
    """Hooks of one block that set the current pass to that of the tokens."""

    passes: Passes
    layer: int
    last: bool

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        if is_compiling():
            return
        tokens, thread = args[0] if args else None, self.passes.thread
        running = self._find(tokens) or thread.current
        if running is not None:
            thread.current, thread.graph_task = running, current_graph_task()
            running.block, running.inside = self.layer, True
            self._mark(tokens, running)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook."""
        tokens, thread = first_tensor(output), self.passes.thread
        if not is_compiling():
            # A pass inside of the block has set another one.
            thread.current = running = self._marked(args[0] if args else None) or thread.current
            if running is not None:
                running.inside = False
                self._mark(tokens, running)
        if self.last:
            self.passes.finish(thread.current, tokens)

    def _find(self, tokens: Any) -> ForwardPass | None:
        """Return the pass of the tokens that the block receives, None if they do not say."""
        found = self._marked(tokens)
        if is_recomputing() or not isinstance(tokens, Tensor):
            return found
        if self.layer == 0:
            return self.passes.enter_first(tokens, found)
        return found or self._find_unmarked()

    def _find_unmarked(self) -> ForwardPass | None:
        """Return the pass of tokens that no block has returned, such as a copy."""
        before, current = self.layer - 1, self.passes.thread.current
        if current is None:
            return None
        others = (one.images for one in self.passes.thread.entered if one.block == before)
        if current.block == before and all(images == current.images for images in others):
            return current
        return ForwardPass(
            None,
            problem=f"block {self.layer} receives tokens that block {before} did not return, so their "
            "grid is unknown; run one image through the model after the other, and all blocks in turn",
        )

    def _mark(self, tokens: Any, running: ForwardPass) -> None:
        """Associate a pass with the storage of the tokens for as long as that lives."""
        if (storage := _storage(tokens)) is not None:
            storage.bmfa_pass = (self.passes, running)

    def _marked(self, tokens: Any) -> ForwardPass | None:
        """Return the pass of the storage of the tokens, None if there is none."""
        owner, running = getattr(_storage(tokens), "bmfa_pass", (None, None))
        return running if owner is self.passes else None


def _storage(tokens: Any) -> Any:
    try:
        return tokens.untyped_storage() if isinstance(tokens, Tensor) else None
    except (NotImplementedError, RuntimeError):
        return None  # tensors inside torch.func transforms


def first_tensor(output: Any) -> Any:
    """Return the tokens that a block returns, alone or first in a tuple."""
    return output[0] if isinstance(output, tuple) and output else output
