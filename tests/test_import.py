"""What a fresh process pays for the import, and what it gets."""

import subprocess
import sys

import pytest

import bmfa

HEAVY = "matplotlib PIL huggingface_hub pycocotools safetensors scipy timm torchvision transformers"
PUBLIC = (
    "certify bounds energy estimate merging models monitor Grid Plan Screened Tree __version__ "
    "free_energy gap load_model patch record reduce refinement_score rules screen screen_keys "
    "screened_attention summary tune tune_reduction unpatch"
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_fresh_import_loads_neither_torch_nor_a_submodule_and_leaves_the_interpreter_alone():
    code = "import sys, bmfa; print([n for n in sys.modules if n.partition('.')[0] == 'bmfa'])"
    assert run(code) == "['bmfa']"
    assert run("import sys, bmfa, bmfa.cli; print('torch' in sys.modules)") == "False"
    code = (
        "import sys, torch; before = list(sys.meta_path), list(sys.path_hooks)\n"
        "import bmfa; [getattr(bmfa, name) for name in ('screen', 'screened_attention', 'rules')]\n"
        "print((sys.meta_path, sys.path_hooks) == before)"
    )
    assert run(code) == "True"


def test_no_public_name_and_no_attention_on_a_cpu_loads_more_than_torch_and_numpy():
    code = (
        "import sys, bmfa, torch, bmfa.cli, bmfa.merging\n"
        "import bmfa.attention.kernels.eager.tiles, bmfa.attention.kernels.reference\n"
        "[getattr(bmfa, name) for name in bmfa.__all__]\n"
        "q = torch.zeros(1, 1, 256, 4)\n"
        "for wanted in ({'leaves': 0.3}, {'error': 0.1}, {'rule': bmfa.rules.Gamma(0.05)}):\n"
        "    bmfa.screened_attention(q, q, q, grid=bmfa.Grid(16, 16), **wanted)\n"
        f"print([name for name in '{HEAVY} triton'.split() if name in sys.modules])\n"
        "import bmfa.evidence.page.build  # the page loads matplotlib when it draws\n"
        f"print([name for name in '{HEAVY}'.split() if name in sys.modules])"
    )
    assert run(code) == "[]\n[]"


def test_public_names_are_few_and_all_there():
    assert sorted(bmfa.__all__) == sorted(PUBLIC.split()) and len(bmfa.__all__) <= 27
    assert all(getattr(bmfa, name) is not None for name in bmfa.__all__)
    assert set(dir(bmfa)) == set(bmfa.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = bmfa.nonsense
