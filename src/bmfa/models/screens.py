"""What replaces q, k, v -> output in one attention layer of a patched model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bmfa.attention.api import Screened, screened_attention
from bmfa.grid import Grid
from bmfa.models.passes import PassState, recomputing
from bmfa.trees.rules import Rule

_NAME = "bmfa_screen"
# Added to a score, this hides a token: hosts use -inf or the least number of their dtype.
_HIDDEN = -1e4


class Listener(Protocol):
    """Told of every call of a screened layer."""

    def heard(self, call: "Call", screened: Screened) -> None:
        """One call and what it gave."""
        ...


@dataclass(frozen=True, eq=False)
class Call:
    """The inputs of one screened layer: q and k (B, heads, prefix + N, d)."""

    layer: int
    q: Tensor
    k: Tensor
    scale: float
    grid: Grid
    prefix: int
    valid: Tensor | None  # (B or 1, N) spatial keys that exist


@dataclass(eq=False)
class TokenGrid:
    """The token grid of the pictures in a model, for each forward pass its own.

    It is a forward hook of the patch projection, which is where the grid of a pass becomes known.
    """

    prefix: int
    passes: PassState[Grid] = field(default_factory=PassState)
    # Grids of pictures that went through the projection and have not come to a block.
    waiting: PassState[tuple[Grid, ...]] = field(default_factory=PassState)
    handle: Any = None
    # The grid of every pass so far with that many tokens; None where there were several.
    only: dict[int, Grid | None] = field(default_factory=dict)

    def watch(self, projection: nn.Module) -> None:
        """Note the grid whenever the projection runs."""
        self.handle = projection.register_forward_hook(self)

    def forget(self) -> None:
        """Stop noting."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        height, width = output.shape[-2:]
        # Integers, no symbols: what depends on a grid is a constant of a compiled graph.
        grid = Grid(int(height), int(width))
        self.passes.begin(grid)
        if torch.compiler.is_compiling():
            return
        self.waiting.begin((*(w for w in self.waiting.current or () if w != grid), grid))
        if self.only.setdefault(grid.size, grid) != grid:
            self.only[grid.size] = None

    def enter(self, layer: int, tokens: Tensor) -> Grid | None:
        """The grid of the tokens that a block is handed, and None where it is unknown."""
        if layer == 0 and not torch.compiler.is_compiling():
            waiting = self.waiting.current or ()
            size = tokens.shape[1] - self.prefix
            fitting = [grid for grid in waiting if grid.size == size]
            if fitting:
                self.waiting.begin(tuple(grid for grid in waiting if grid.size != size))
            if len(fitting) > 1:
                raise RuntimeError(
                    f"pictures with grids of {' and '.join(map(_sides, fitting))} went through the "
                    "patch embedding before one of them came to a block, and nothing tells which this "
                    "is; run one after the other"
                )
            if fitting:
                return fitting[0]
        grid = self.passes.recall(tokens)
        return self.passes.current if grid is None else grid

    def of(self, tokens: int, grid: Grid | None = None) -> Grid:
        """The given grid, or that of the block that runs, if it and the prefix make up the tokens."""
        grid = self.passes.current if grid is None else grid
        if grid is None and recomputing():
            grid = self.only.get(tokens - self.prefix)
            if grid is None:
                raise RuntimeError(
                    f"attention over {tokens} tokens runs again in a backward pass, and the grid of "
                    "its picture is unknown; apply gradient checkpointing to whole blocks or to the "
                    "model"
                )
        if grid is None:
            raise RuntimeError(
                "no picture went through the patch embedding in this thread; call the model itself, "
                "not one of its blocks"
            )
        if self.prefix + grid.size != tokens:
            raise ValueError(
                f"attention over {tokens} tokens, but {self.prefix} prefix tokens and a "
                f"{grid.height}x{grid.width} grid make {self.prefix + grid.size}; "
                "screening needs all of them: switch off what drops or merges tokens"
            )
        return grid


def _sides(grid: Grid) -> str:
    return f"{grid.height}x{grid.width}"


@dataclass(eq=False)
class GridOfBlock:
    """Runs a block as it is, with the grid of the tokens that it is handed."""

    layer: int
    grid: TokenGrid

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the block."""
        grid = self.grid.enter(self.layer, args[0]) if args else None
        if grid is None:
            return forward(*args, **kwargs)
        passes = self.grid.passes
        passes.save(args[0], grid)
        output = passes.within(grid, partial(forward, *args, **kwargs))
        passes.save(output[0] if isinstance(output, tuple) else output, grid)
        return output


@dataclass(eq=False)
class Replacement:
    """What one layer has instead of scaled_dot_product_attention, with the same signature.

    It is kept with the attention module: it travels with copies and pickles, not in the state dict.
    """

    layer: int
    grid: TokenGrid
    kept: dict[str, Any] = field(init=False, default_factory=dict)  # what the host puts back

    def install(self, module: nn.Module) -> None:
        """Take over the attention of a module; a host adds how."""
        module.__dict__[_NAME] = self

    def restore(self, module: nn.Module) -> None:
        """Undo `install`."""
        del module.__dict__[_NAME]

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
        """The output of attention."""
        raise NotImplementedError


@dataclass(eq=False)
class Screen(Replacement):
    """Screened attention for one layer."""

    rule: Rule | None
    options: dict[str, Any]
    listener: Listener | None = None

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
            raise ValueError("causal attention is not screened; unpatch the model")
        if dropout_p > 0.0:
            raise ValueError(
                f"attention dropout of {dropout_p:g} is not served on trees; "
                "call model.eval(), or build the model with attention dropout 0"
            )
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        grid, prefix = self.grid.of(key.shape[2]), self.grid.prefix
        valid = valid_keys(attn_mask, prefix)
        screened = screened_attention(
            query,
            key,
            value,
            grid=grid,
            prefix=prefix,
            rule=self.rule,
            scale=scale,
            valid=valid,
            **self.options,
        )
        if self.listener is not None:
            call = Call(self.layer, query, key, scale, grid, prefix, valid)
            self.listener.heard(call, screened)
        return screened.output


def replacement_of(module: nn.Module) -> Replacement | None:
    """What the module has instead of its attention."""
    return module.__dict__.get(_NAME)


def replacements_in(model: nn.Module) -> list[tuple[nn.Module, Replacement]]:
    """All modules of a model whose attention is replaced, and by what."""
    pairs = ((module, replacement_of(module)) for module in model.modules())
    return [(module, replacement) for module, replacement in pairs if replacement is not None]


def screens_in(model: nn.Module) -> list[tuple[nn.Module, Screen]]:
    """All screened modules of a model with their screens."""
    return [(m, screen) for m, screen in replacements_in(model) if isinstance(screen, Screen)]


def valid_keys(mask: Tensor | None, prefix: int) -> Tensor | None:
    """(B or 1, N) the spatial keys that a padding mask leaves; any other mask is refused."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]  # (B, heads, Q, prefix + N) or ones for some of them
    shown = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~shown if mask.dtype == torch.bool else mask < _HIDDEN
    alike = (shown == shown[:, :1, :1]).all()
    if not (alike and (shown | hidden).all() and shown[..., :prefix].all()):
        raise ValueError(
            f"an attention mask of shape {tuple(mask.shape)} that adds a bias, differs between "
            "queries or heads, or hides prefix tokens is not served; pass a padding mask, or unpatch"
        )
    return None if bool(shown.all()) else shown[:, 0, 0, prefix:]
