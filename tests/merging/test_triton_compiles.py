"""The merging kernels compile for a GPU."""

from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from compile_kernels import SHARED_MEMORY, compile_kernels  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    built = compile_kernels("merging", tmp_path)
    names = {"proportional_attention_kernel": 2, "merge_kernel": 2, "unit_mean_keys_kernel": 1}
    assert Counter(x.kernel for x in built) == names
    assert max(x.shared for x in built) <= SHARED_MEMORY
