"""The repair of a torchvision that does not fit its torch."""

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


def run(code: str, *folders: Path) -> str:
    """Output of a fresh interpreter without the repair of this environment."""
    paths = os.pathsep.join(map(str, folders))
    hook = "type(f).__name__ == 'OperatorFinder'"
    code = (
        f"import sys; sys.meta_path[:] = [f for f in sys.meta_path if not {hook}]\n"
        f"sys.modules.pop('torchvision_operators', None)\n{code}"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout


def fake_torchvision(folder, library):
    """A package of that name; the code of its library may or may not declare the operators."""
    package = folder / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from torchvision import _meta_registrations\n")
    (package / "extension.py").write_text(library)
    (package / "_meta_registrations.py").write_text(
        "import torch, torchvision.extension\n"
        "try:\n    print(torch.ops.torchvision.nms.default._schema)\n"
        "except AttributeError:\n"
        "    raise RuntimeError('operator torchvision::nms does not exist') from None\n"
    )


DECLARES = (
    "import torch\n"
    "library = torch.library.Library('torchvision', 'DEF')\n"
    "library.define('nms(Tensor own) -> Tensor')\n"
)


def test_the_repair_is_for_a_cpu_build_that_lacks_the_operators_and_declares_them(tmp_path):
    code = (
        "import torch; torch.version.cuda = {cuda}\n"
        "import torchvision_operators; finder = sys.meta_path.pop(0)\n"
        "print(torchvision_operators.is_needed()); sys.meta_path.insert(0, finder)\n"
        "import torchvision"
    )
    for name, library in (("without", ""), ("with", DECLARES)):
        fake_torchvision(tmp_path / name, library)
    for name, cuda, needed, declared in (
        ("without", None, True, "nms(Tensor dets, "),
        ("without", "'13.0'", False, "nms(Tensor dets, "),
        ("with", None, False, "nms(Tensor own)"),
    ):
        printed = run(code.format(cuda=cuda), TOOLS, tmp_path / name)
        assert f"{needed}\n" in printed and declared in printed, (name, cuda)


def test_the_installed_repair_is_one_hook_that_works_without_the_checkout(tmp_path):
    code = (
        "before = len(sys.meta_path)\n"
        "import importlib, torchvision_operators; importlib.reload(torchvision_operators)\n"
        "print(len(sys.meta_path) - before, 'torch' in sys.modules)"
    )
    assert run(code, TOOLS) == "1 False\n"
    tool = runpy.run_path(str(TOOLS / "torchvision_operators.py"), run_name="tool")
    sys.meta_path[:] = [f for f in sys.meta_path if type(f) is not tool["OperatorFinder"]]
    site = tmp_path / "site"
    site.mkdir()
    tool["install"](site)
    fake_torchvision(tmp_path / "without", "")
    code = f"import site; site.addsitedir({str(site)!r}); import torchvision"
    assert "nms(Tensor dets, " in run(code, tmp_path / "without")


@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: pip install 'bmfa[models]'")
def test_timm_can_be_imported_in_this_environment():
    code = "import timm, torch, torchvision; print(timm.is_model('vit_tiny'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
