"""Launching one kernel again and again: Triton looks a kernel up by all arguments, a plan does not."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

# How a compiled kernel is started is no public interface: other versions go through Triton itself.
_KNOWN = ((3, 6),)
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) in _KNOWN
Programs = tuple[int, int, int]
_ALIGNMENT = 15  # Triton specialises kernels on pointers that 16 divides


class Plan:
    """One kernel on one device with everything settled but the tensors.

    A plan is for tensors of equal dtypes, shapes and strides: then all that Triton specialises on is
    equal but the alignment of pointers, which is looked at. The rest are the arguments behind the
    tensors in the kernel's own order, constants included; options are those of the compiler.
    """

    def __init__(
        self, kernel: Any, programs: int | Programs, rest: tuple[Any, ...], **options: object
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
        if self.start is None or torch.cuda.current_device() != self.device or _hooked():
            self._through_triton(tensors)
            return
        pointers = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        if bits & _ALIGNMENT:
            self._through_triton(tensors)
            return
        compiled = self.compiled
        self.start(
            *self.programs, driver.active.get_current_stream(self.device),
            compiled.function, compiled.packed_metadata, None, None, None, *pointers, *self.rest,
        )  # fmt: skip

    def _through_triton(self, tensors: tuple[Tensor, ...]) -> None:
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
            compiled = self.kernel[self.programs](*tensors, *self.rest, **self.options)
        aligned = all(tensor.data_ptr() & _ALIGNMENT == 0 for tensor in tensors)
        # The interpreter compiles nothing.
        if _DIRECT and self.start is None and aligned and isinstance(compiled, CompiledKernel):
            self.device = tensors[0].get_device()
            self.compiled = compiled
            self.start = compiled.run


def _hooked() -> bool:
    """Whether a profiler listens to launches: it is served by Triton itself."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
