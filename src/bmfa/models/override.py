"""Run other code in place of a method of one module, and undo it.

The class of the instance is replaced by a subclass with another method. The subclass reads its weights
through `self`, so copies, pickles and the replicas of `nn.DataParallel` compute with their own.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Protocol

from torch import nn

_ATTRIBUTE = "bmfa_override"


class Override(Protocol):
    """Code that runs in place of a method of a module."""

    def run(self, module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute what the method returns; `method` is the one that was replaced."""
        ...


def override_method(module: nn.Module, override: Override, method: str = "forward") -> None:
    """Run `override` in place of a method of the module until `restore_method`.

    Args:
        module: The module.
        override: What runs in place of the method.
        method: Name of the method. `"__call__"` runs around hooks and a `forward` that a wrapper has set
            on the instance; in place of `"forward"`, the latter would never run, so it is refused.

    Raises:
        TypeError: If the module has a forward of its own that would hide the override.
    """
    if method in module.__dict__:
        raise TypeError(
            f"{type(module).__name__} has a {method} of its own, set on the instance by a wrapper, "
            "which bmfa would have to replace; remove the wrapper, or apply it after bmfa"
        )
    module.__dict__[_ATTRIBUTE] = override
    kind: Any = type(module)
    module.__class__ = _subclass(kind, method)


def restore_method(module: nn.Module) -> None:
    """Undo `override_method`."""
    del module.__dict__[_ATTRIBUTE]
    module.__class__ = type(module).__mro__[1]


def override_of(module: nn.Module) -> Override | None:
    """Return the override of a module, or None."""
    return module.__dict__.get(_ATTRIBUTE)


@lru_cache(maxsize=256)
def _subclass(kind: Any, method: str) -> type[nn.Module]:
    """Make a subclass that has the name of `kind` and runs the override of the instance."""
    original = getattr(kind, method)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        override = self.__dict__.get(_ATTRIBUTE)
        if override is None:  # a wrapper has kept the method of a module that is restored
            return original(self, *args, **kwargs)
        return override.run(self, partial(original, self), *args, **kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        state: Any = super(subclass, self).__reduce_ex__(protocol)
        return _make, (kind, method), *state[2:]

    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": reduce_ex,
        method: run,
    }
    subclass: type[nn.Module] = type(kind.__name__, (kind,), body)
    return subclass


def _make(kind: Any, method: str) -> nn.Module:
    """Make an instance without state for unpickling, which adds the state."""
    subclass = _subclass(kind, method)
    return subclass.__new__(subclass)
