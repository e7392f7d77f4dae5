"""The sdist and the wheel: complete, and usable outside the checkout."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import bmfa
from bmfa.attention.kernels.native import compile as native_build
from bmfa.evidence import recorded

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.install


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build("--outdir", str(folder), str(ROOT))
    return folder


def build(*options, **variables):
    command = [sys.executable, "-m", "build", *options]
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder in which the wheel is installed, without its dependencies."""
    folder = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--target", str(folder), str(wheel)], check=True)
    return folder


def run(site, cwd, *command):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_the_wheel_holds_every_file_of_the_package(wheel):
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "bmfa").rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not path.name.startswith(("tiles-", native_build.FAILURE_FILE))
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert expected <= names
    assert {"bmfa/py.typed", "bmfa/cli/app.py"} <= expected
    assert any(name.endswith(".safetensors") for name in expected)
    assert {name.partition("/")[0] for name in names} == {
        "bmfa",
        f"bmfa-{bmfa.__version__}.dist-info",
    }


def test_the_sdist_holds_the_tests_and_what_they_read(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = ("LICENSE", "Makefile", "README.md", "constraints.txt", "mkdocs.yml", "pyproject.toml")
    assert {*files, "docs/gallery.png", "records/synthetic.json", "tests/test_dist.py"} <= names
    assert {"tools/train_embedded.py", "tools/train-embedded-h200.json"} <= names
    native = {name.rpartition("/")[2] for name in names if "/kernels/native/" in name}
    assert "hatch_build.py" in names and sources(native) == sources()
    assert native == {name for name in native if name.endswith((".py", ".cpp", ".h"))}


def sources(names=None):
    """Files that the kernels are compiled from, of a list or of the checkout."""
    listed = os.listdir(native_build.FOLDER) if names is None else names
    return {name for name in listed if name.endswith(("compile.py", ".cpp", ".h"))}


def native_files(wheel):
    """What the wheel has of the kernels, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        native = {name.rpartition("/")[2] for name in archive.namelist() if "/native/" in name}
        return native, archive.read(f"bmfa-{bmfa.__version__}.dist-info/WHEEL").decode()


def test_the_wheel_has_the_kernels_of_its_platform(wheel):
    if not native_build._compiler() or native_build.architecture() is None:
        pytest.skip("needs a C++ compiler on Linux or macOS")
    sets = native_build.INSTRUCTION_SETS[native_build.architecture()]
    expected = {native_build.object_path(name).name for name in sets}
    names, metadata = native_files(wheel)
    assert {name for name in names if name.endswith((".so", ".txt"))} == expected
    assert sources(names) == sources()  # for people who install a compiler later
    assert re.search(r"-py3-none-(linux|macosx_\d+_\d+)_(x86_64|arm64|aarch64)\.whl$", wheel.name)
    assert "Root-Is-Purelib: false" in metadata


def test_the_wheel_is_pure_without_a_compiler(dist, tmp_path):
    """From the sdist, as `pip install` does; the reason is installed with it."""
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    build("--wheel", "--outdir", str(tmp_path), str(source), CXX="false")
    (pure,) = tmp_path.glob("*.whl")
    names, metadata = native_files(pure)
    assert pure.name.endswith("-py3-none-any.whl") and "Root-Is-Purelib: true" in metadata
    assert [name for name in names if name.endswith((".so", ".txt"))] == ["build-failure.txt"]
    assert sources(names) == sources()
    with zipfile.ZipFile(pure) as archive:
        archive.extractall(tmp_path / "site")
    text = run(tmp_path / "site", tmp_path, sys.executable, "-m", "bmfa", "info", "--json", "-")
    rows = json.loads(text)["rows"]
    (status,) = [row["status"] for row in rows if row["name"] == "native"]
    assert status.startswith("unavailable: ") and native_build.COMMAND in status


def test_the_package_description_has_no_relative_link(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"bmfa-{bmfa.__version__}.dist-info/METADATA"))
    assert metadata["Version"] == bmfa.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert "bmfa.load_model" in description
    targets = re.findall(r"\]\(([^)\s]+)|(?:src|href)=\"([^\"]+)", description)
    links = [link or attribute for link, attribute in targets]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_command_library_and_page_work_outside_the_checkout(site, tmp_path):
    words = ["synthetic", "--placement", "corner", "--method", "gamma:0.005", "--json", "-"]
    record = json.loads(run(site, tmp_path, str(site / "bin" / "bmfa"), *words))
    assert record["rows"][0]["count"] == 396
    assert record["environment"]["bmfa"] == bmfa.__version__
    assert list(tmp_path.iterdir()) == []
    code = (
        "import bmfa, json, torch; from bmfa.evidence import recorded\n"
        "loaded = bmfa.load_model('embedded')\n"
        "bmfa.patch(loaded.model, rule='optimal:0.002', layers='last-4')\n"
        "shape = tuple(loaded.logits(torch.zeros(1, 3, 128, 128)).shape)\n"
        "found, problems = recorded.load()\n"
        "print(json.dumps([bmfa.__file__, shape, str(recorded.folder()), [*found], problems]))"
    )
    path, shape, folder, *found = json.loads(run(site, tmp_path, sys.executable, "-c", code))
    assert Path(path).is_relative_to(site) and shape[0] == 1
    assert Path(folder) == site / "bmfa" / "evidence" / "recorded"
    assert found == [list(recorded.SHOWN), []]
    file = str(ROOT / "records" / "synthetic.json")
    run(site, tmp_path, sys.executable, "-m", "bmfa", "report", "--records", file, "--quiet")
    page = (tmp_path / "report" / "index.html").read_text("utf-8")
    assert "<style" in page and "</html>" in page


def test_the_first_hour_of_a_newcomer_has_no_dead_end(wheel, tmp_path):
    """examples/first_hour.sh with the wheel; figures of its commands agree with each other.

    Its environment is new, and reads torch and the other dependencies from the one of the tests.
    """
    venv.create(tmp_path / ".venv")
    (site,) = (tmp_path / ".venv").glob("lib/python*/site-packages")
    outer = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "outer.pth").write_text("\n".join(outer))
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = inherited | {"MINUTES": "0.5", "HF_HUB_OFFLINE": "1"}
    command = ["sh", str(ROOT / "examples" / "first_hour.sh"), str(wheel)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (site / "bmfa" / "__init__.py").is_file()
    titles = re.findall("^== (.*)$", done.stdout, re.M)
    assert [title.split()[0] for title in titles] == ["Install", "Weights", "Will", "A", "The"]
    *_, estimated, tuned, used = re.split("^== .*$", done.stdout, flags=re.M)

    estimate = json.loads((tmp_path / "estimate.json").read_text("utf-8"))
    plan = bmfa.Plan.load(tmp_path / "plan.json")
    assert "verdict: " in estimated and "tolerance 3.00 %" in tuned and "plan: plan.json" in tuned
    assert plan.holds and plan.img_size == (768, 768)
    # Speeds: the estimate of its middle error and the plan, both measured on a machine that may be busy.
    (row,) = [row for row in estimate["rows"] if row["error"] == 0.03]
    assert row["slowest"] / 2 <= plan.speedup <= 2 * row["fastest"]

    assert f"{len(plan.grids)} layers can be screened" in estimated
    forms = re.findall(r"^ +\d+ +(tiled|dense) +(?:native|eager|triton|dense|host) ", used, re.M)
    tiled = sum(one.error is not None for one in plan.layers)
    assert len(forms) == len(plan.grids) == 12 and forms.count("tiled") == tiled > 0
    assert f"{tiled} of 12 layers attend over tiles" in tuned
    assert float(re.search("class scores moved by (.*)", used)[1]) < 0.1
    assert "bit-identical after unpatch: True" in used
