"""Launching kernels again and again: Triton looks each up by all arguments, a plan does not."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

# How a compiled kernel is started is no public interface: other versions go through Triton itself.
_KNOWN = ((3, 6),)
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) in _KNOWN
LaunchGrid = tuple[int, int, int]
_ALIGNMENT = 15  # Triton specialises kernels on pointers that 16 divides
_PIECE = 256  # bytes that divide the start of every scratch tensor


class CachedLaunch:
    """One kernel on one device with everything settled but the tensors.

    A plan is for tensors of equal dtypes, shapes and strides: then all that Triton specialises on is
    equal but the alignment of pointers, which is looked at. The rest are the arguments behind the
    tensors in the kernel's own order, constants included; options are those of the compiler.
    """

    def __init__(
        self, kernel: Any, programs: int | LaunchGrid, rest: tuple[Any, ...], **options: object
    ) -> None:
        self.kernel = kernel
        self.programs = (programs, 1, 1) if isinstance(programs, int) else programs
        self.rest = rest
        self.options = options
        self.device = -1
        self.compiled: Any = None
        self.start: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self.ready and not _any_unaligned(pointers):
            self.launch(_current_stream(self.device), pointers)
        else:
            self.through_triton(*tensors)

    @property
    def ready(self) -> bool:
        """Whether the kernel can be started without Triton looking it up."""
        return (
            self.start is not None and torch.cuda.current_device() == self.device and not _hooked()
        )

    def launch(self, stream: int, pointers: Sequence[int]) -> None:
        """Start a kernel that is `ready`, on tensors at these aligned addresses."""
        compiled = self.compiled
        assert self.start is not None
        self.start(
            *self.programs, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *pointers, *self.rest,
        )  # fmt: skip

    def through_triton(self, *tensors: Tensor) -> None:
        """Launch as Triton does; what it compiled is kept."""
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
            compiled = self.kernel[self.programs](*tensors, *self.rest, **self.options)
        aligned = not _any_unaligned([tensor.data_ptr() for tensor in tensors])
        # The interpreter compiles nothing.
        if _DIRECT and self.start is None and aligned and isinstance(compiled, CompiledKernel):
            self.device = tensors[0].get_device()
            self.compiled = compiled
            self.start = compiled.run


class Workspace:
    """Workspace tensors of one call in one allocation: each would cost the host half a launch."""

    def __init__(self) -> None:
        self.pieces: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self.bytes = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Room for one more."""
        self.pieces[name] = (self.bytes, shape, dtype)
        self.bytes += -(-math.prod(shape) * dtype.itemsize // _PIECE) * _PIECE

    def views(self, room: Tensor) -> list[Tensor]:
        """The tensors in an allocation of `bytes`."""
        return [
            room[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, shape, dtype in self.pieces.values()
        ]


class LaunchSequence:
    """Plans one after the other, each on some of the same tensors, found by their names.

    The tensors of a call are those `given` to it, in that order, and those in `scratch`.
    """

    def __init__(self, given: tuple[str, ...], scratch: Workspace) -> None:
        self.names = (*given, *scratch.pieces)
        self.scratch = scratch
        self.steps: list[tuple[CachedLaunch, tuple[int, ...]]] = []
        self._offsets = [start for start, _, _ in scratch.pieces.values()]
        self._ready = False

    def add(
        self, kernel: Any, programs: LaunchGrid, values: Mapping[str, Any], **options: object
    ) -> None:
        """A kernel; its tensors come first, its other arguments are looked up in `values`."""
        places = tuple(self.names.index(name) for name in kernel.arg_names if name in self.names)
        rest = tuple(values[name] for name in kernel.arg_names if name not in self.names)
        self.steps.append((CachedLaunch(kernel, programs, rest, **options), places))

    def __call__(self, *given: Tensor) -> None:
        """Launch all of them on the current stream."""
        room = given[0].new_empty((self.scratch.bytes,), dtype=torch.uint8)
        if self._ready and self.steps[0][0].ready:
            pointers = [tensor.data_ptr() for tensor in given]
            if not _any_unaligned(pointers):
                base = room.data_ptr()
                pointers += [base + offset for offset in self._offsets]
                stream = _current_stream(self.steps[0][0].device)
                for plan, places in self.steps:
                    plan.launch(stream, [pointers[place] for place in places])
                return
        tensors = [*given, *self.scratch.views(room)]
        for plan, places in self.steps:
            plan.through_triton(*(tensors[place] for place in places))
        self._ready = all(plan.start is not None for plan, _ in self.steps)


def _any_unaligned(pointers: Sequence[int]) -> bool:
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return bits & _ALIGNMENT != 0


def _current_stream(device: int) -> int:
    stream: int = driver.active.get_current_stream(device)
    return stream


def _hooked() -> bool:
    """Whether a profiler listens to launches: it is served by Triton itself."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
