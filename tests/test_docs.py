"""The manual: it builds strictly and offline, its code runs, and all names, commands and paths exist."""

import inspect
import os
import re
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import fields
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.nn.functional import interpolate, scaled_dot_product_attention

import bmfa
from bmfa.attention.result import ErrorEstimate, Stats
from bmfa.cli.app import app, main
from bmfa.evidence.methods import METHODS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PUBLIC_MODULES = ("energy", "bounds", "rules", "merging", "models")


# The built site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manual, built strictly."""
    if any(find_spec(package) is None for package in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("needs mkdocs-material and mkdocstrings: pip install 'bmfa[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Resources(HTMLParser):
    """Collects what a browser loads for a page, and the anchors of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if identifier := values.get("id"):
            self.anchors.add(identifier)
        relation = values.get("rel") or ""
        if tag == "link" and relation not in ("canonical", "next", "prev"):
            self.loaded.append(values.get("href") or "")
        elif tag in ("script", "img", "iframe", "source"):
            self.loaded.append(values.get("src") or "")


def parse(path: Path) -> Resources:
    page = Resources()
    page.feed(path.read_text("utf-8"))
    return page


def test_no_page_loads_anything_from_a_host(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 14
    foreign = {
        f"{page.name}: {url}"
        for page in pages
        for url in parse(page).loaded
        if re.match(r"(?:https?:)?//", url)
    }
    assert foreign == set()


def test_the_reference_has_every_public_name(site):
    anchors = {
        name: {a for a in parse(site / "api" / f"{name}.html").anchors if a.startswith("bmfa.")}
        for name in ("bmfa", *PUBLIC_MODULES)
    }
    anchors["bmfa"] |= anchors["energy"] | anchors["models"]  # the pages of their modules
    for name, found in anchors.items():
        module = bmfa if name == "bmfa" else import_module(f"bmfa.{name}")
        public = getattr(module, "__all__", None) or [
            one
            for one, value in vars(module).items()
            if one[0] != "_" and getattr(value, "__module__", None) == module.__name__
        ]
        objects = {one: getattr(module, one) for one in public}
        documented = {
            one
            for one, value in objects.items()
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__doc__
        }
        assert documented
        assert documented - {anchor.rpartition(".")[2] for anchor in found} == set(), name


# Code

GPU = "<!-- needs a GPU and a download -->"
BLOCKS = {
    path.relative_to(ROOT): blocks
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
    if (blocks := re.findall(rf"({GPU}\n)?```python\n(.*?)```", path.read_text("utf-8"), re.S))
}


@pytest.mark.parametrize("path", BLOCKS, ids=str)
def test_code_runs_without_a_network(path, monkeypatch, tmp_path):
    def refuse(*args: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    for needs_gpu, code in BLOCKS[path]:
        program = compile(code, str(path), "exec")
        if not needs_gpu:
            exec(program, {})


def test_the_readme_begins_with_code_that_runs_anywhere():
    assert len(BLOCKS[Path("README.md")]) >= 3 and not BLOCKS[Path("README.md")][0][0]


def test_the_table_of_measured_errors_is_that_of_a_run():
    """The numbers of docs/tangent-tiles.md, to one unit of the last digit shown."""
    text = (DOCS / "tangent-tiles.md").read_text("utf-8")
    (rows,) = re.findall(r"^\| factor .*\n.*\n((?:\|.*\n)+)", text, re.M)
    torch.manual_seed(0)
    smooth = interpolate(torch.randn(9, 64, 8, 8), size=64, mode="bicubic")
    for line in rows.splitlines():
        cells = [cell.strip(" %") for cell in line.strip(" |").split("|")]
        factor, target = float(cells[0]), float(cells[1])
        q, k, v = factor * smooth.flatten(2).mT.reshape(3, 1, 3, 64 * 64, 64)
        exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
        with warnings.catch_warnings():  # a target may be missed
            warnings.simplefilter("ignore", UserWarning)
            output, stats = bmfa.screened_attention(
                q, k, v, grid=(64, 64), error=target, allow_dense=False
            )
        error = (output - exact).norm() / exact.norm()
        measured = (stats.density, error, stats.error.estimate, stats.error.upper)
        for shown, value in zip(cells[2:], measured, strict=True):
            unit = 10.0 ** -len(shown.partition(".")[2])
            assert abs(100 * float(value) - float(shown)) <= unit, line


# Names


def resolve(dotted: str) -> Any:
    """The object of a dotted name: a module, or attributes of one."""
    value: Any = import_module("bmfa")
    path = "bmfa"
    for part in dotted.split(".")[1:]:
        path += f".{part}"
        try:
            value = getattr(value, part)
        except AttributeError:
            value = import_module(path)
    return value


def test_every_name_of_the_library_exists():
    missing = []
    for path in TEXTS:
        text = re.sub(r"\]\([^)]*\)", "]", path.read_text("utf-8"))  # without link targets
        text = re.sub(r"\bbmfa\.(?:md|html)\b", "", text)
        for name in sorted(set(re.findall(r"(?<![\w/.-])bmfa(?:\.\w+)+", text))):
            try:
                resolve(name)
            except (AttributeError, ImportError):
                missing.append((path.name, name))
        for module, name in set(re.findall(r"(?<![\w./])(rules|bounds|merging)\.(\w+)", text)):
            if name != "py" and not hasattr(getattr(bmfa, module), name):
                missing.append((path.name, f"{module}.{name}"))
    assert missing == []


def test_attributes_of_stats_exist():
    text = "".join(path.read_text("utf-8") for path in TEXTS)
    patterns = (
        (Stats, r"\bstats\.(\w+)"),
        (ErrorEstimate, r"\bstats\.error\.(\w+)"),
    )
    for kind, pattern in patterns:
        names = set(re.findall(pattern, text))
        known = {field.name for field in fields(kind)} | set(dir(kind))
        assert len(names) >= 2
        assert names - known == set()


# Commands


def commands() -> dict[str, set[str]]:
    """The options of every command; `bench trees` is a command."""
    found = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for inner, one in getattr(command, "commands", {"": command}).items():
            options = {option for param in one.params for option in param.opts}
            found[f"{name} {inner}".strip()] = {"--help"} | options
    return found


COMMANDS = commands()


def command_lines(text: str) -> list[str]:
    """Every `bmfa ...` in code: in spans, and at the start of a line of a block."""
    spans = re.findall(r"(?<!`)`((?:python -m )?bmfa [^`\n]+)`(?!`)", text)
    blocks = "\n".join(re.findall(r"```(?:console)?\n(.*?)```", text, re.S))
    blocks = blocks.replace(" \\\n", " ")  # continued lines
    lines = re.findall(r"^(?:\$ |torchrun .*-m )?(bmfa .+)$", blocks, re.M)
    return [line.removeprefix("python -m ").partition("  #")[0] for line in (*spans, *lines)]


def test_every_command_and_its_options_exist():
    wrong = []
    for line in (line for path in TEXTS for line in command_lines(path.read_text("utf-8"))):
        words = line.split()[1:]
        if words[0] in ("COMMAND", "--help", "--version", "gama:0.005"):
            continue
        pair, options = " ".join(words[:2]), {w.partition("=")[0] for w in words if w[:2] == "--"}
        name = pair if pair in COMMANDS else words[0]
        if words != ["bench"] and (name not in COMMANDS or options - COMMANDS[name]):
            wrong.append(line)
    assert wrong == []


def test_every_command_has_a_section():
    text = (DOCS / "command-line.md").read_text("utf-8")
    headings = set(re.findall(r"^##+ bmfa ([a-z -]+?)(?: \{.*\})?$", text, re.M))
    assert headings == {*COMMANDS, "bench"}


def test_every_method_is_listed():
    text = (DOCS / "command-line.md").read_text("utf-8")
    shown = text.partition("$ bmfa methods\n")[2].partition("```")[0].splitlines()
    # A line that starts a method has two spaces after its name, the heading of a kind has none.
    found = (re.match(r"([a-z0-9-]+)(?::VALUE)?  ", line) for line in shown)
    assert {match[1] for match in found if match} == set(METHODS)


# Commands whose output depends on nothing but the library.
DETERMINISTIC = ("bmfa synthetic", "bmfa methods", "bmfa bench model --records")


def test_the_output_shown_is_that_of_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    text = (DOCS / "command-line.md").read_text("utf-8").replace(" \\\n", " ")
    blocks = re.findall(r"```console\n\$ (.*?)\n(.*?)\n?```", text, re.S)
    shown = {line: output for line, output in blocks if line.startswith(DETERMINISTIC)}
    assert len(shown) >= len(DETERMINISTIC)
    for line, output in shown.items():
        with suppress(SystemExit):
            main(line.split()[1:])
        printed = capsys.readouterr()
        rows = [row.rstrip() for row in output.splitlines()]
        assert [row.rstrip() for row in (printed.err + printed.out).splitlines()] == rows, line


# Paths


def test_every_path_exists():
    """Paths in code spans, from the root of the repository or of the package; images of the README."""
    made = {"report/index.html", "report/records/"}  # written by make report
    bases = (
        ROOT,
        ROOT / "src" / "bmfa",
        ROOT / "src",
        ROOT / "records",
        EVIDENCE,
        *EVIDENCE.glob("*/"),
    )
    for path in TEXTS:
        spans = re.findall(r"(?<!`)`([\w./-]+)`(?!`)", path.read_text("utf-8"))
        paths = {x for x in spans if "/" in x or x.endswith((".py", ".md", ".cff", ".json"))}
        missing = {one for one in paths - made if not any((base / one).exists() for base in bases)}
        assert missing == set(), path
    links = re.findall(r"\]\(([^)]*)\)", (ROOT / "README.md").read_text("utf-8"))
    assert links and all(link.startswith("docs/") and (ROOT / link).is_file() for link in links)


EVIDENCE = ROOT / "src" / "bmfa" / "evidence"


def test_the_layout_shown_is_that_of_the_package():
    text = (DOCS / "architecture.md").read_text("utf-8")
    (tree,) = re.findall(r"```\n(src/bmfa/\n.*?)```", text, re.S)
    package = ROOT / "src" / "bmfa"
    shown = set(re.findall(r"\b(\w+(?:\.py|/))", tree.replace("src/bmfa/", "")))
    present = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (*ROOT.iterdir(), *package.rglob("*"))
        if "__pycache__" not in path.parts
    }
    assert shown - present == set()
    top = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in package.iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    }
    assert top - shown - {"__main__.py", "rules.py"} == set()
