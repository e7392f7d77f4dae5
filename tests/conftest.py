"""Set-up of the test run: environment variables that torch and Triton read when they load."""

import os
from importlib.util import find_spec

# One thread for each process: pytest-xdist runs a process per core. Started processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# The value that the command sets, so that sums in the processes that tests start are equal.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import pytest
import torch


def _interpret_kernels() -> None:
    """Run Triton kernels in its interpreter on the CPU."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        # Triton's own __index__ converts an array of one element, which NumPy 2.4 refuses.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


if find_spec("triton") is not None and not torch.cuda.is_available():
    _interpret_kernels()


def pytest_collection_modifyitems(items):
    """Skip the tests marked `gpu` if there is no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _no_own_rules(monkeypatch):
    """Rules that a test registers are known in this test alone."""
    monkeypatch.setattr("bmfa.trees.rules.names.OWN_RULES", {})
