"""Models of unknown classes, whose attention modules, grid, prefix and suffix are described.

`patch(model, attention=...)` describes a model for one call, `register_model` a class of models.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from bmfa.checks import check_integer, is_compiling
from bmfa.grid import Grid, check_grid
from bmfa.models.families import VisionTransformer
from bmfa.models.passes import Images, Passes, first_tensor
from bmfa.models.replacement import InterceptedAttention

# A fixed grid, a function of the inputs of the model, or None for a square.
GridSource: TypeAlias = Grid | tuple[int, int] | Callable[..., Grid | tuple[int, int]] | None


@dataclass(frozen=True)
class Description:
    """Where the attention of a model is, and how its tokens are laid out."""

    attention: tuple[str, ...]  # patterns of module names
    grid: GridSource
    prefix: int | Callable[[Any], int]  # a number, or a function of the model
    suffix: int | Callable[[Any], int]


def describe(
    attention: str | Sequence[str],
    grid: GridSource = None,
    prefix: int | Callable[[Any], int] = 0,
    suffix: int | Callable[[Any], int] = 0,
) -> Description:
    """Check a description of a model."""
    patterns = (attention,) if isinstance(attention, str) else attention
    patterns = tuple(patterns) if isinstance(patterns, Sequence) else ()
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise TypeError(
            f"attention is {attention!r}; pass the name of the attention modules as "
            "model.named_modules() has it, with * for any characters but a dot, e.g. 'blocks.*.attn', "
            "or a list of such names"
        )
    if grid is not None and not callable(grid):
        grid = check_grid(grid)
    for name, count in (("prefix", prefix), ("suffix", suffix)):
        if not callable(count):
            check_integer(name, count, low=0)
    return Description(patterns, grid, prefix, suffix)


def described_model(tower: nn.Module, description: Description) -> VisionTransformer:
    """Return the parts of a model whose layout is described.

    Raises:
        ValueError: If no module has such a name, or one of them is inside another.
    """
    named = [
        (name, module)
        for name, module in tower.named_modules()
        if name and any(_matches(name, pattern) for pattern in description.attention)
    ]
    patterns = " or ".join(map(repr, description.attention))
    if not named:
        likely = [
            name
            for name, m in tower.named_modules()
            if "attn" in name.lower().split(".")[-1] or "attention" in type(m).__name__.lower()
        ]
        found = (
            f"names that may be meant are {', '.join(likely[:4])}"
            if likely
            else ("list them with [name for name, _ in model.named_modules()]")
        )
        raise ValueError(
            f"attention is {patterns}, and no module of {type(tower).__name__} has such a name; {found}"
        )
    names = [name for name, _ in named]
    for name in names:
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ValueError(
                f"attention is {patterns}, which names {outer!r} and {name!r} inside of it; name the "
                "modules that call scaled_dot_product_attention, each once"
            )
    prefix, suffix = (
        check_integer(label, count(tower) if callable(count) else count, low=0)
        for label, count in (("prefix", description.prefix), ("suffix", description.suffix))
    )
    modules = tuple(module for _, module in named)
    return VisionTransformer(
        replacement=InterceptedAttention,
        tower=tower,
        blocks=modules,
        attentions=modules,
        projection=tower,
        prefix=prefix,
        suffix=suffix,
        passes=partial(DescribedPasses, source=description.grid, names=tuple(names)),
    )


def _matches(name: str, pattern: str) -> bool:
    """True if every part of a module name, between dots, matches its part of the pattern."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


@dataclass(eq=False)
class DescribedPasses(Passes):
    """The passes of a model that is described: a pass is a call of the model."""

    source: GridSource = field(default=None, kw_only=True)
    names: tuple[str, ...] = field(default=(), kw_only=True)  # of the attention modules

    def watch(self, vit: VisionTransformer) -> None:
        """Follow the calls of the model."""
        tower = vit.tower
        self.handles.append(tower.register_forward_pre_hook(self.enter, with_kwargs=True))
        self.handles.append(tower.register_forward_hook(self.leave))

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook of the model: read the grid from the inputs if a function does that."""
        grid: Any = self.source
        if callable(grid):
            grid = grid(*args, **kwargs)
            try:
                height, width = (grid.height, grid.width) if isinstance(grid, Grid) else grid
                grid = Grid(int(height), int(width))
            except (TypeError, ValueError):
                raise TypeError(
                    f"the function that was passed as grid= returned {grid!r}; it must return "
                    "(height, width) in tokens, from the arguments of the model"
                ) from None
        self.begin(grid)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model: refuse layers that did not run in the first pass."""
        running = self.thread.current
        if self.idle and not is_compiling():
            idle = ", ".join(self.names[layer] for layer in sorted(self.idle))
            raise RuntimeError(
                f"{idle} did not run when the model was called, so the attention there cannot be "
                "replaced; leave these modules out of attention=, or out of layers="
            )
        self.finish(running, first_tensor(output))

    def layout(self, tokens: int) -> Images | None:
        """Return the grid of attention over a number of tokens."""
        return self.grid_of(tokens)  # refused even where dense attention would run

    def grid_of(self, tokens: int, grid: Grid | None = None) -> Grid:
        """Return the grid of attention over a number of tokens."""
        tokens = int(tokens)
        if isinstance(self.source, Grid):
            return super().grid_of(tokens, self.source)
        if callable(self.source):
            return super().grid_of(tokens, grid)
        spatial = tokens - self.special
        side = math.isqrt(max(spatial, 0))
        if side == 0 or side * side != spatial:
            raise ValueError(
                f"attention over {tokens} tokens, of which {spatial} are left without {self.prefix} "
                f"prefix tokens and {self.suffix} behind the grid, and this is not a square; pass "
                "grid=(height, width) or a function of the inputs of the model, and the right prefix="
            )
        return Grid(side, side)


_registered: dict[str, Description] = {}  # by the full name of the class


def register_model(
    model_class: type[nn.Module] | str,
    *,
    attention: str | Sequence[str],
    grid: GridSource = None,
    prefix: int | Callable[[Any], int] = 0,
    suffix: int | Callable[[Any], int] = 0,
) -> None:
    """Make `patch` know a class of models of another package.

    From then on `bmfa.patch(model)` accepts models of this class and of its subclasses, and models that
    contain one of them, as it does for timm and transformers. Registering a class again replaces
    what was registered. Pickles of patched models include the function `grid`, so pass one that can be
    pickled if you need them.

    Args:
        model_class: The class, or its full name, e.g. `"package.module.MyViT"`, which imports nothing.
        attention: The names of the modules that call `scaled_dot_product_attention`, as
            `model.named_modules()` has them; `*` is any characters but a dot. They are numbered in
            this order.
        grid: (height, width) of the grid in tokens, a function that returns it from the arguments of
            the model, or None if the spatial tokens are a square.
        prefix: The number of tokens before the grid, or a function of the model that returns it.
        suffix: The number of tokens behind the grid, or a function of the model that returns it.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a number is out of range.

    Example:
        >>> import bmfa, torch
        >>> from torch import nn
        >>> class Tiny(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        ...     def forward(self, x):
        ...         return self.attn(x, x, x, need_weights=False)[0]
        >>> bmfa.models.register_model(Tiny, attention="attn")
        >>> model, x = Tiny().eval(), torch.randn(1, 256, 8)
        >>> full = model(x)
        >>> coarse = bmfa.patch(model, leaves=2, allow_dense=False, layers="all")(x)
        >>> torch.equal(coarse, full), torch.equal(bmfa.unpatch(model)(x), full)
        (False, True)
    """
    if isinstance(model_class, type) and issubclass(model_class, nn.Module):
        model_class = f"{model_class.__module__}.{model_class.__qualname__}"
    if not isinstance(model_class, str) or "." not in model_class:
        raise TypeError(
            f"model_class is {model_class!r}; pass a subclass of torch.nn.Module, or its full name, "
            "e.g. 'package.module.MyViT'"
        )
    _registered[model_class] = describe(attention, grid, prefix, suffix)


def find_registered(model: nn.Module) -> list[VisionTransformer]:
    """List the models of registered classes in a model."""
    found = []
    for module in model.modules() if _registered else ():
        names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
        known = next((_registered[name] for name in names if name in _registered), None)
        if known is not None:
            found.append(described_model(module, known))
    return found
