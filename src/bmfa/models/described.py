"""Models of unknown classes, whose attention modules, grid, prefix and suffix are described.

`patch(model, attention=...)` describes a model for one call, `register_model` a class of models.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import permutations
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

    attention: str | Sequence[str]  # patterns of module names
    grid: GridSource = None
    prefix: int | Callable[[Any], int] = 0  # a number, or a function of the model
    suffix: int | Callable[[Any], int] = 0

    def __post_init__(self) -> None:
        if not self.patterns or not all(isinstance(one, str) and one for one in self.patterns):
            raise TypeError(
                f"attention is {self.attention!r}; pass the name of the attention modules as "
                "model.named_modules() has it, with * for any characters but a dot, e.g. "
                "'blocks.*.attn', or a list of such names"
            )
        if self.grid is not None and not callable(self.grid):
            object.__setattr__(self, "grid", check_grid(self.grid))
        for name in ("prefix", "suffix"):
            if not callable(count := getattr(self, name)):
                check_integer(name, count, low=0)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of module names."""
        given = (self.attention,) if isinstance(self.attention, str) else self.attention
        return tuple(given) if isinstance(given, Sequence) else ()

    def count(self, name: str, model: nn.Module) -> int:
        """Return the prefix or the suffix of a model."""
        count = getattr(self, name)
        return check_integer(name, count(model) if callable(count) else count, low=0)


def described_model(encoder: nn.Module, description: Description) -> VisionTransformer:
    """Return the parts of a model whose layout is described.

    Raises:
        ValueError: If no module has such a name, or one of them is inside another.
    """
    named = {
        name: module
        for name, module in encoder.named_modules()
        if name and any(_matches(name, pattern) for pattern in description.patterns)
    }
    patterns = " or ".join(map(repr, description.patterns))
    if not named:
        modules = ((name, type(m).__name__.lower()) for name, m in encoder.named_modules())
        likely = [name for name, kind in modules if "attention" in kind]
        raise ValueError(
            f"attention is {patterns}, and no module of {type(encoder).__name__} has such a name; names "
            f"that may be meant are {', '.join(likely[:4]) or 'in model.named_modules()'}"
        )
    for outer, name in permutations(named, 2):
        if name.startswith(f"{outer}."):
            raise ValueError(
                f"attention is {patterns}, which names {outer!r} and {name!r} inside of it; name the "
                "modules that call scaled_dot_product_attention, each once"
            )
    attentions = tuple(named.values())
    return VisionTransformer(
        replacement=InterceptedAttention,
        encoder=encoder,
        blocks=attentions,
        attentions=attentions,
        projection=encoder,
        prefix=description.count("prefix", encoder),
        suffix=description.count("suffix", encoder),
        passes=partial(DescribedPasses, source=description.grid, names=tuple(named)),
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
    idle: set[int] = field(default_factory=set)  # layers that must run in the first pass

    def watch(self, vit: VisionTransformer) -> None:
        """Follow the calls of the model."""
        encoder = vit.encoder
        self.handles.append(encoder.register_forward_pre_hook(self.enter, with_kwargs=True))
        self.handles.append(encoder.register_forward_hook(self.leave))

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook of the model: read the grid from the inputs if a function does that."""
        grid: Any = self.source
        if callable(grid):
            found = grid(*args, **kwargs)
            try:
                grid = found if isinstance(found, Grid) else Grid(*map(int, found))
            except (TypeError, ValueError):
                raise TypeError(
                    f"the function that was passed as grid= returned {found!r}; it must return "
                    "(height, width) in tokens, from the arguments of the model"
                ) from None
        self.begin(grid)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model: refuse layers that did not run in the first pass."""
        running = self.thread.current
        if self.idle and running is not None and not is_compiling():
            if idle := self.idle - running.calls.keys():
                names = ", ".join(self.names[layer] for layer in sorted(idle))
                raise RuntimeError(
                    f"{names} did not run when the model was called, so the attention there cannot be "
                    "replaced; leave these modules out of attention=, or out of layers="
                )
            self.idle = set()
        self.finish(running, first_tensor(output))

    def layout(self, tokens: int) -> Images | None:
        """Return the grid of attention over a number of tokens."""
        return self.grid_of(tokens)  # refused even where dense attention would run

    def grid_of(self, tokens: int, grid: Grid | None = None) -> Grid:
        """Return the grid of attention over a number of tokens."""
        tokens = int(tokens)
        if self.source is None:
            spatial = tokens - self.special
            side = math.isqrt(max(spatial, 0))
            if side == 0 or side * side != spatial:
                raise ValueError(
                    f"attention over {tokens} tokens, of which {spatial} are left without {self.prefix} "
                    f"prefix tokens and {self.suffix} behind the grid, and this is not a square; pass "
                    "grid=(height, width) or a function of the inputs of the model, and the right "
                    "prefix="
                )
            grid = Grid(side, side)
        else:
            known = self.source if isinstance(self.source, Grid) else self.images
            grid = known if isinstance(known, Grid) else None
        if grid is not None and tokens == self.special + grid.height * grid.width:
            grid = Grid(grid.height, grid.width)  # attention inside of a frame
        return super().grid_of(tokens, grid)


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
    _registered[model_class] = Description(attention, grid, prefix, suffix)


def find_registered(model: nn.Module) -> list[VisionTransformer]:
    """List the models of registered classes in a model."""
    found = []
    for module in model.modules() if _registered else ():
        names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
        known = next((_registered[name] for name in names if name in _registered), None)
        if known is not None:
            found.append(described_model(module, known))
    return found
