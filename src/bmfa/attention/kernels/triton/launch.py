"""Repeated launches of compiled kernels with little work on the host.

Triton looks a kernel up by all of its arguments on every launch. A `CachedLaunch` does that once for
tensors of the same dtypes, shapes and strides.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

# Starting a compiled kernel is not a public interface. Other versions launch through Triton.
_DIRECT_VERSIONS = ((3, 6),)
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) in _DIRECT_VERSIONS
_ALIGNMENT_MASK = 15  # Triton specialises kernels on pointers that are multiples of 16 bytes
_WORKSPACE_ALIGNMENT = 256  # bytes, as torch's CUDA allocator aligns tensors to 512
LaunchGrid = tuple[int, int, int]


class CachedLaunch:
    """One kernel on one device with all arguments fixed except for the tensors.

    All calls must pass tensors of the same dtypes, shapes and strides. The alignment of pointers, on
    which Triton specialises too, is checked on every call.

    Args:
        kernel: A `triton.jit` function whose first parameters are the tensors.
        grid: Number of programs, in one or three dimensions.
        rest: Arguments after the tensors in the kernel's order, constants included.
        options: Options of the compiler, such as num_warps.
    """

    def __init__(
        self, kernel: Any, grid: int | LaunchGrid, rest: tuple[Any, ...], **options: object
    ) -> None:
        self.kernel = kernel
        self.grid = (grid, 1, 1) if isinstance(grid, int) else grid
        self.rest = rest
        self.options = options
        self.device = -1
        self.compiled: Any = None
        self.start: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self.ready and _all_aligned(pointers):
            self.launch_directly(_current_stream(self.device), pointers)
        else:
            self.launch_through_triton(*tensors)

    @property
    def ready(self) -> bool:
        """True if the kernel can be started directly on the current device."""
        if self.start is None or torch.cuda.current_device() != self.device:
            return False
        runtime = triton.knobs.runtime  # a profiler's hooks are called by Triton's own launch
        return not (runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)

    def launch_directly(self, stream: int, pointers: Sequence[int]) -> None:
        """Start a `ready` kernel on tensors at these aligned addresses."""
        compiled = self.compiled
        assert self.start is not None
        self.start(
            *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *pointers, *self.rest,
        )  # fmt: skip

    def launch_through_triton(self, *tensors: Tensor) -> None:
        """Launch through Triton and keep the compiled kernel if the tensors are aligned."""
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
            compiled = self.kernel[self.grid](*tensors, *self.rest, **self.options)
        aligned = _all_aligned([tensor.data_ptr() for tensor in tensors])
        # The interpreter returns no compiled kernel.
        if _DIRECT and self.start is None and aligned and isinstance(compiled, CompiledKernel):
            self.device = tensors[0].get_device()
            self.compiled = compiled
            self.start = compiled.run


class Workspace:
    """Scratch tensors in one allocation, since every allocation costs half a launch on the host."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}  # offset in bytes
        self.bytes = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Reserve space for one more tensor."""
        self._place(self.bytes, {name: (shape, dtype)})

    def reuse(self, first: str, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Place tensors, by their shapes and dtypes, over those that were added from `first` on.

        The earlier tensors must not be needed any more when the new ones are written.
        """
        self._place(self.tensors[first][0], tensors)

    def _place(
        self, start: int, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        for name, (shape, dtype) in tensors.items():
            self.tensors[name] = (start, shape, dtype)
            size = math.prod(shape) * dtype.itemsize
            start += -(-size // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        self.bytes = max(self.bytes, start)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the tensors as views of an allocation of `bytes` bytes."""
        return [
            memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, shape, dtype in self.tensors.values()
        ]


class LaunchSequence:
    """Kernels launched one after the other, each on some of the same tensors.

    A kernel finds its tensors by the names of its parameters: those that every call passes, in the
    order of `inputs`, and those of the workspace.
    """

    def __init__(self, inputs: tuple[str, ...], workspace: Workspace) -> None:
        self.names = (*inputs, *workspace.tensors)
        self.workspace = workspace
        self.steps: list[tuple[CachedLaunch, tuple[int, ...]]] = []
        self._offsets = [start for start, _, _ in workspace.tensors.values()]
        self._ready = False

    def add(
        self, kernel: Any, grid: LaunchGrid, arguments: Mapping[str, Any], **options: object
    ) -> None:
        """Append a kernel; arguments other than tensors are looked up by name."""
        indices = tuple(self.names.index(name) for name in kernel.arg_names if name in self.names)
        rest = tuple(arguments[name] for name in kernel.arg_names if name not in self.names)
        self.steps.append((CachedLaunch(kernel, grid, rest, **options), indices))

    def __call__(self, *inputs: Tensor) -> None:
        """Launch all kernels on the current stream."""
        memory = inputs[0].new_empty((self.workspace.bytes,), dtype=torch.uint8)
        if self._ready and self.steps[0][0].ready:
            pointers = [tensor.data_ptr() for tensor in inputs]
            if _all_aligned(pointers):
                base = memory.data_ptr()
                pointers += [base + offset for offset in self._offsets]
                stream = _current_stream(self.steps[0][0].device)
                for launch, indices in self.steps:
                    launch.launch_directly(stream, [pointers[index] for index in indices])
                return
        tensors = [*inputs, *self.workspace.views(memory)]
        for launch, indices in self.steps:
            launch.launch_through_triton(*(tensors[index] for index in indices))
        self._ready = all(launch.start is not None for launch, _ in self.steps)


def _all_aligned(pointers: Sequence[int]) -> bool:
    return reduce(or_, pointers) & _ALIGNMENT_MASK == 0


def _current_stream(device: int) -> int:
    stream: int = driver.active.get_current_stream(device)
    return stream
