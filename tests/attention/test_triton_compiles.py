"""The kernels compile for a GPU: a compiler may refuse or miscompile what the interpreter runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent / "compile_kernels.py"


KERNELS = (
    "pool", "represent", "levels", "choose", "select", "cross", "expand", "attention", "exact",
)  # fmt: skip
SHARED_MEMORY = 227 * 1024  # bytes that a program may have on Hopper


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_compile_for_hopper(tmp_path, everything):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *(["--all"] if everything else [])],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    for name in KERNELS:
        for dim in (32, 64, 72, 80, 96, 128) if everything else (64, 80):
            assert any(line.startswith(f"{name}_kernel {dim} ") for line in lines)
    for name in ("pool", "represent", "expand", "attention", "exact"):
        for dim in (64, 80, 128) if everything else (64,):
            line = f"{name}_kernel {dim} "
            assert any(x.startswith(line) and " own grid " in x for x in lines), line
    shared = [int(line.split()[-1]) for line in lines if " shared " in line]
    assert len(shared) >= len(KERNELS) and max(shared) <= SHARED_MEMORY
