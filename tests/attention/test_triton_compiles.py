"""The kernels compile for a GPU: what the interpreter runs, a compiler may still refuse or mix up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent / "compile_kernels.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_kernels_compile_for_hopper_and_mix_up_no_queries(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    for name in ("pool", "score", "select", "residual", "attention", "certificate"):
        assert f"{name}_kernel 64" in lines and f"{name}_kernel 128" in lines
    assert [f"tree optimal {depth} 64 sound" in lines for depth in (2, 3, 4)] == [True] * 3
    # The configuration that is refused: where this one is sound, nothing need be refused any more.
    assert "tree optimal 3 32 [([0, 8, 0], [0, 8])" in done.stdout
