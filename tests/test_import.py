"""What a fresh process pays for the import, and what it gets."""

import subprocess
import sys

import pytest

import bmfa

HEAVY = (
    "matplotlib",
    "PIL",
    "huggingface_hub",
    "pycocotools",
    "safetensors",
    "scipy",
    "timm",
    "torchvision",
    "transformers",
    "triton",
)
PUBLIC = {
    "Grid",
    "Screened",
    "Tree",
    "__version__",
    "free_energy",
    "gap",
    "load_model",
    "patch",
    "record",
    "reduce",
    "refinement_score",
    "rules",
    "screen",
    "screen_keys",
    "screened_attention",
    "unpatch",
}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_fresh_import_is_fast_and_loads_nothing():
    # The best of three: a loaded machine delays a process, it never hurries one.
    code = "import time; t = time.perf_counter(); import bmfa; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 3.0
    code = "import sys, bmfa; print([n for n in sys.modules if n.partition('.')[0] == 'bmfa'])"
    assert run(code) == "['bmfa']"
    assert run("import sys, bmfa, bmfa.cli; print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_the_core_loads_torch_and_numpy_alone():
    code = (
        "import sys, time; t = time.perf_counter(); import bmfa\n"
        "bmfa.screen, bmfa.screen_keys, bmfa.screened_attention, bmfa.rules, bmfa.Grid, bmfa.gap\n"
        "import bmfa.kernels.eager.tiled, bmfa.kernels.reference, bmfa.tiled\n"
        "print(time.perf_counter() - t)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    runs = [run(code).splitlines() for _ in range(3)]
    assert all(loaded == "[]" for _, loaded in runs)
    seconds = min(
        float(
            run(
                "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
            )
        )
        for _ in range(3)
    )
    assert min(float(spent) for spent, _ in runs) < seconds + 1.0


def test_no_public_name_and_no_attention_on_a_cpu_loads_more():
    code = (
        "import sys, bmfa, torch, bmfa.cli, bmfa.reduction\n"
        "[getattr(bmfa, name) for name in bmfa.__all__]\n"
        "q = torch.zeros(1, 1, 256, 4)\n"
        "for wanted in ({'leaves': 0.3}, {'error': 0.1}, {'rule': bmfa.rules.Gamma(0.05)}):\n"
        "    bmfa.screened_attention(q, q, q, grid=bmfa.Grid(16, 16), **wanted)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert run(code) == "[]"


def test_public_names_are_few_and_all_there():
    assert set(bmfa.__all__) == PUBLIC and len(bmfa.__all__) == len(PUBLIC) <= 16
    assert all(getattr(bmfa, name) is not None for name in bmfa.__all__)
    assert set(dir(bmfa)) == set(bmfa.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = bmfa.nonsense
