"""Run other code in place of a method of a module, mostly its forward, and undo it.

The class of the instance is replaced by a subclass with another method. The subclass finds its
weights through `self`, so copies, pickles and the replicas of `nn.DataParallel` compute with their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

from torch import nn

from bmfa.models.passes import PassState

_NAME = "bmfa_forward"


class Override(Protocol):
    """Code that runs in place of a method of a module."""

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute what the method returns; `forward` is what would have run."""
        ...


@dataclass(eq=False)
class _Installed:
    """An override, and the method of that name which a wrapper had set on the instance before."""

    override: Override
    method: str
    own: Callable[..., Any] | None
    running: PassState[bool] = field(default_factory=PassState)  # whether `own` runs


def override_method(module: nn.Module, override: Override, method: str = "forward") -> None:
    """Run `override` in place of a method of the module until `restore_method`."""
    kind: Any = type(module)
    module.__dict__[_NAME] = _Installed(override, method, module.__dict__.pop(method, None))
    module.__class__ = _subclass(kind, method)


def restore_method(module: nn.Module) -> None:
    """Undo `override_method`; a method that was set on the instance since then stays."""
    installed: _Installed = module.__dict__.pop(_NAME)
    module.__class__ = type(module).__mro__[1]
    if installed.own is not None:
        module.__dict__.setdefault(installed.method, installed.own)


def override_of(module: nn.Module) -> Override | None:
    """What runs in place of a method of the module, if anything does."""
    installed: _Installed | None = module.__dict__.get(_NAME)
    return None if installed is None else installed.override


def has_own_forward(module: nn.Module) -> bool:
    """Whether a wrapper has set `forward` on the instance."""
    installed: _Installed | None = module.__dict__.get(_NAME)
    return "forward" in module.__dict__ or (installed is not None and installed.own is not None)


@lru_cache(maxsize=256)
def _subclass(kind: Any, method: str) -> type[nn.Module]:
    """A subclass that looks like `kind` to everything that asks for its name."""
    original = getattr(kind, method)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        installed = self.__dict__.get(_NAME)
        if installed is None:  # a wrapper kept this method beyond `restore_method`
            return original(self, *args, **kwargs)
        if installed.own is None:
            return installed.override.run(self, partial(original, self), *args, **kwargs)
        if installed.running.current:  # the wrapper itself wraps an override
            return original(self, *args, **kwargs)
        run_own = partial(installed.override.run, self, installed.own, *args, **kwargs)
        return installed.running.within(True, run_own)

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
    """An instance of the subclass of `kind` without state, which unpickling adds."""
    subclass = _subclass(kind, method)
    return subclass.__new__(subclass)
