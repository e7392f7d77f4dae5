"""Run other code in place of a method of one module, usually its forward, and undo it.

The class of the instance is replaced by a subclass with another method. The subclass reads its weights
through `self`, so copies, pickles and the replicas of `nn.DataParallel` compute with their own. An
override that is not active is stored in the module, which keeps its class: its calls cost nothing.
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

    def uses_host(self, x: Any) -> bool:
        """True if the module runs its own method for the first argument x."""
        ...


@dataclass(eq=False)
class _Installed:
    override: Override
    method: str
    active: bool = False
    instance_method: Callable[..., Any] | None = None  # set on the instance by a wrapper, before
    running: ForwardState[bool] = field(default_factory=ForwardState)  # True in instance_method


def override_method(
    module: nn.Module, override: Override, method: str = "forward", *, active: bool = True
) -> None:
    """Run `override` in place of a method of the module until `restore_method`.

    Args:
        module: The module.
        override: What runs in place of the method.
        method: Name of the method.
        active: If False, the module runs its own method until `activate_override`.
    """
    module.__dict__[_ATTRIBUTE] = _Installed(override, method)
    if active:
        activate_override(module)


def activate_override(module: nn.Module) -> None:
    """Run the override of a module from now on.

    Other threads may be calling the module: at every step it runs either the override or its own method.
    """
    installed: _Installed = module.__dict__[_ATTRIBUTE]
    if installed.active:
        return
    kind: Any = type(module)
    installed.active = True
    installed.instance_method = module.__dict__.get(installed.method)
    module.__class__ = _subclass(kind, installed.method)
    module.__dict__.pop(installed.method, None)


def deactivate_override(module: nn.Module) -> None:
    """Undo `activate_override`; a method that was set on the instance since then stays."""
    installed: _Installed = module.__dict__[_ATTRIBUTE]
    if not installed.active:
        return
    installed.active = False
    if installed.instance_method is not None:
        module.__dict__.setdefault(installed.method, installed.instance_method)
        installed.instance_method = None
    module.__class__ = type(module).__mro__[1]


def restore_method(module: nn.Module) -> None:
    """Undo `override_method`; a method that was set on the instance since then stays."""
    deactivate_override(module)
    del module.__dict__[_ATTRIBUTE]


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
        # Without an active override, a wrapper or a running call has kept this method.
        if installed is None or not installed.active:
            return original(self, *args, **kwargs)
        own = len(args) > 0 and installed.override.uses_host(args[0])
        if installed.instance_method is None:
            if own:
                return original(self, *args, **kwargs)
            return installed.override.run(self, partial(original, self), *args, **kwargs)
        if installed.running.current:  # the wrapper itself calls an overridden method
            return original(self, *args, **kwargs)
        wrapper = installed.instance_method
        function = wrapper if own else partial(installed.override.run, self, wrapper)
        return installed.running.run_with(True, partial(function, *args, **kwargs))

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
