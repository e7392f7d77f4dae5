"""Run other code in place of a method of one module, usually its forward, and undo it.

The class of the instance is replaced by a subclass with another method. The subclass reads its weights
through `self`, so copies, pickles and the replicas of `nn.DataParallel` compute with their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

from torch import nn

from bmfa.models.forward_state import ForwardState

_ATTRIBUTE = "bmfa_override"


class Override(Protocol):
    """Code that runs in place of a method of a module."""

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute what the method returns; `forward` is the method that was replaced."""
        ...


@dataclass(eq=False)
class _Installed:
    override: Override
    method: str
    instance_method: Callable[..., Any] | None  # set on the instance by a wrapper, before
    running: ForwardState[bool] = field(default_factory=ForwardState)  # True in instance_method


def override_method(module: nn.Module, override: Override, method: str = "forward") -> None:
    """Run `override` in place of a method of the module until `restore_method`."""
    kind: Any = type(module)
    instance_method = module.__dict__.pop(method, None)
    module.__dict__[_ATTRIBUTE] = _Installed(override, method, instance_method)
    module.__class__ = _subclass(kind, method)


def restore_method(module: nn.Module) -> None:
    """Undo `override_method`; a method that was set on the instance since then stays."""
    installed: _Installed = module.__dict__.pop(_ATTRIBUTE)
    module.__class__ = type(module).__mro__[1]
    if installed.instance_method is not None:
        module.__dict__.setdefault(installed.method, installed.instance_method)


def override_of(module: nn.Module) -> Override | None:
    """Return the override of a module, or None."""
    installed: _Installed | None = module.__dict__.get(_ATTRIBUTE)
    return None if installed is None else installed.override


def has_instance_forward(module: nn.Module) -> bool:
    """Return True if a wrapper has set `forward` on the instance."""
    installed: _Installed | None = module.__dict__.get(_ATTRIBUTE)
    return "forward" in module.__dict__ or (
        installed is not None and installed.instance_method is not None
    )


@lru_cache(maxsize=256)
def _subclass(kind: Any, method: str) -> type[nn.Module]:
    """Make a subclass that has the name of `kind` and runs the override of the instance."""
    original = getattr(kind, method)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        installed = self.__dict__.get(_ATTRIBUTE)
        if installed is None:  # a wrapper kept this method beyond `restore_method`
            return original(self, *args, **kwargs)
        if installed.instance_method is None:
            return installed.override.run(self, partial(original, self), *args, **kwargs)
        if installed.running.current:  # the wrapper itself calls an overridden method
            return original(self, *args, **kwargs)
        wrapped = partial(installed.override.run, self, installed.instance_method, *args, **kwargs)
        return installed.running.run_with(True, wrapped)

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
