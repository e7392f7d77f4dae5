"""What replaces q, k, v -> output in one attention layer of a patched model."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bmfa.attention import Screened, screened_attention
from bmfa.grid import Grid
from bmfa.rules import Rule
from bmfa.tiling import Tiling

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
class Place:
    """The token grid of the picture now in the model: a forward hook of the patch projection."""

    prefix: int
    wanted: str = "raster"  # the order in which tokens are to travel
    grid: Grid | None = None
    order: str = "raster"  # in which they travel: Z-order is for grids that have whole tiles in it
    handle: Any = None
    others: list[Any] = field(default_factory=list)  # further hooks, each with its handle

    def watch(self, projection: nn.Module) -> None:
        """Note the grid whenever the projection runs."""
        self.handle = projection.register_forward_hook(self)

    def forget(self) -> None:
        """Stop noting."""
        for hook in (self, *self.others):
            if hook.handle is not None:
                hook.handle.remove()
                hook.handle = None

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        height, width = output.shape[-2:]
        self.grid = Grid(
            int(height), int(width)
        )  # no symbols: what depends on a grid is a constant
        turned = self.wanted == "z" and Tiling(self.grid).z_aligned
        self.order = "z" if turned else "raster"

    def of(self, tokens: int) -> Grid:
        """The grid, if it and the prefix make up the tokens."""
        if self.grid is None:
            raise RuntimeError(
                "no picture went through the patch embedding; call the model itself, "
                "not one of its blocks"
            )
        if self.prefix + self.grid.size != tokens:
            raise ValueError(
                f"attention over {tokens} tokens, but {self.prefix} prefix tokens and a "
                f"{self.grid.height}x{self.grid.width} grid make {self.prefix + self.grid.size}; "
                "screening needs all of them: switch off what drops or merges tokens"
            )
        return self.grid


@dataclass(eq=False)
class Replacement:
    """What one layer has instead of scaled_dot_product_attention, with the same signature.

    It is kept with the attention module: it travels with copies and pickles, not in the state dict.
    """

    layer: int
    place: Place
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
        grid, prefix = self.place.of(key.shape[2]), self.place.prefix
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
            order=self.place.order,
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
