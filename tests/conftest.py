"""Set up before torch and Triton load, and shared by all tests."""

import os
from importlib.util import find_spec

import pytest

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# As the command sets it: processes started by a test then add up as this one does.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def _interpret_kernels() -> None:
    """Kernels run in Triton's interpreter, on the CPU."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        # Its own __index__ converts an array of one element, which NumPy 2.4 refuses.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


if find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        _interpret_kernels()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tensors are small, so that one thread is faster than several, and tests run in parallel."""
    import torch

    torch.set_num_threads(1)
