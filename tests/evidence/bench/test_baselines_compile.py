"""The kernels of the baselines compile for a GPU: a compiler may refuse what the interpreter runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent / "compile_baselines.py"
KERNELS = [f"mean_{name}_kernel" for name in ("pool", "score", "select", "residual", "attention")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_kernels_compile_for_hopper(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [*KERNELS, "mass_kernel", "listed_tiles_kernel"]
