"""What a fresh process pays for the import, and what it gets."""

import subprocess
import sys
from importlib.util import find_spec

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
    "bounds",
    "energy",
    "merging",
    "models",
    "Grid",
    "Plan",
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
    "register_attention",
    "register_host",
    "rules",
    "screen",
    "screen_keys",
    "screened_attention",
    "summary",
    "tune",
    "tune_reduction",
    "unpatch",
}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_fresh_import_loads_neither_torch_nor_a_submodule():
    code = "import sys, bmfa; print([n for n in sys.modules if n.partition('.')[0] == 'bmfa'])"
    assert sorted(eval(run(code))) == ["bmfa", "bmfa.packages"]
    assert run("import sys, bmfa, bmfa.cli; print('torch' in sys.modules)") == "False"


FINDER = "[f for f in sys.meta_path if type(f).__name__ == 'TorchvisionFinder']"


@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: pip install 'bmfa[models]'")
def test_timm_can_be_imported_after_bmfa():
    assert run("import bmfa, timm, torchvision; print(timm.is_model('vit_tiny'))") == "False"


@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
def test_torchvision_says_itself_that_its_operators_are_missing():
    code = (
        "import bmfa, torch, torchvision\n"
        "try:\n"
        "    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)\n"
        "except RuntimeError as error:\n"
        "    print(str(error)[:24])\n"
        "else:\n"
        "    print('works')"
    )
    assert run(code) in ("Couldn't load custom C++", "works")


def fake_torchvision(folder, registers):
    """A package of that name whose library may or may not have declared the operators."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from torchvision import _meta_registrations\n")
    (package / "extension.py").write_text(registers)
    (package / "_meta_registrations.py").write_text(
        "import torch\nprint(sorted(str(torch.ops.torchvision.nms.default._schema).split()))\n"
    )


DECLARES = (
    "import torch\n"
    "library = torch.library.Library('torchvision', 'DEF')\n"
    "library.define('nms(Tensor own) -> Tensor')\n"
)


@pytest.mark.parametrize(
    ("registers", "cuda", "expected"),
    [
        ("", None, "dets"),  # the library failed to load: the operators are declared
        (DECLARES, None, "own"),  # it loaded: nothing is declared twice
        (DECLARES, "13.0", "own"),
        ("", "13.0", "no attribute 'nms'"),  # the cause is another one, and is not hidden
    ],
)
def test_the_operators_are_declared_only_where_torchvision_lacks_them(
    tmp_path, registers, cuda, expected
):
    fake_torchvision(tmp_path, registers)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import bmfa, torch; torch.version.cuda = {cuda!r}\n"
        "try:\n    import torchvision\nexcept AttributeError as error:\n    print(error)"
    )
    assert expected in run(code)


def test_the_finder_is_installed_once_and_finds_nothing():
    code = f"import sys, importlib, bmfa; importlib.reload(bmfa); print(len({FINDER}))"
    assert run(code) == "1"
    # Without torchvision, nothing but the usual error.
    code = (
        "import sys, bmfa\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "try:\n    import torchvision\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    assert run(code) == "No module named 'torchvision'"


def test_the_core_loads_torch_and_numpy_alone():
    code = (
        "import sys, bmfa\n"
        "bmfa.screen, bmfa.screen_keys, bmfa.screened_attention, bmfa.rules, bmfa.Grid, bmfa.gap\n"
        "import bmfa.attention.kernels.eager.tiles, bmfa.attention.kernels.reference\n"
        "import bmfa.attention.dispatch\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert run(code) == "[]"


def test_no_public_name_and_no_attention_on_a_cpu_loads_more():
    code = (
        "import sys, bmfa, torch, bmfa.cli, bmfa.merging\n"
        "[getattr(bmfa, name) for name in bmfa.__all__]\n"
        "q = torch.zeros(1, 1, 256, 4)\n"
        "for wanted in ({'leaves': 0.3}, {'error': 0.1}, {'rule': bmfa.rules.Gamma(0.05)}):\n"
        "    bmfa.screened_attention(q, q, q, grid=bmfa.Grid(16, 16), **wanted)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert run(code) == "[]"


def test_public_names_are_few_and_all_there():
    assert set(bmfa.__all__) == PUBLIC and len(bmfa.__all__) == len(PUBLIC) <= 26
    assert all(getattr(bmfa, name) is not None for name in bmfa.__all__)
    assert set(dir(bmfa)) == set(bmfa.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = bmfa.nonsense
