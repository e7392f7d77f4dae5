"""The merging kernels compile for a GPU: a compiler may refuse what the interpreter runs."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent / "compile_kernels.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert Counter(done.stdout.split()) == {
        "proportional_attention_kernel": 2,
        "merge_kernel": 2,
        "unit_mean_keys_kernel": 1,
    }
