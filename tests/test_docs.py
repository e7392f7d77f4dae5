"""The manual: it builds strictly and offline, its code runs, and its names and commands exist."""

import inspect
import os
import re
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.nn.functional import interpolate, scaled_dot_product_attention

import bmfa
from bmfa.cli.app import app, main
from bmfa.evidence.methods import METHODS
from chromium import OPTIONS, find_chromium

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = {
    path: path.read_text("utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
}
CONSOLE = (DOCS / "command-line.md").read_text("utf-8").replace(" \\\n", " ")


FORMULAS = {"index": 4, "settings": 5, "tangent-tiles": 40}  # formulas of a page, at least


class Resources(HTMLParser):
    """Collects what a browser loads for a page, and the anchors of the page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors.add(values.get("id", ""))
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(values.get("href", ""))
        elif tag in ("script", "img", "iframe", "source"):
            self.loaded.append(values.get("src", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the manual, which was built without a warning."""
    for package in ("material", "mkdocs", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_the_search_works_from_disk(site, tmp_path):
    if (chromium := find_chromium()) is None:
        pytest.skip("needs Chromium")
    options = [f"--user-data-dir={tmp_path}", "--virtual-time-budget=10000"]
    address = f"{(site / 'index.html').as_uri()}?q=tangent"
    done = subprocess.run(
        [chromium, *OPTIONS, *options, address], capture_output=True, text=True, timeout=120
    )
    assert re.search(r"\d+ matching documents", done.stdout), done.stderr
    assert re.search(r"search-result__article.*?<mark>Tangent</mark> tiles", done.stdout)


def test_the_manual_has_every_public_name_and_loads_nothing_from_a_host(site):
    pages = {path: Resources(path) for path in site.rglob("*.html")}
    assert len(pages) >= 14
    assert (site / "search" / "search_index.js").exists(), "search from disk"
    assert any(url.endswith("iframe-worker.js") for url in pages[site / "start.html"].loaded)
    formulas = {name: (site / f"{name}.html").read_text("utf-8") for name in FORMULAS}
    for name, count in FORMULAS.items():
        assert formulas[name].count("<math ") >= count, name
        assert not re.search(r"\$<code>|\\(frac|tilde|sum)\b", formulas[name]), "a formula is text"
    for path, page in pages.items():
        assert not [url for url in page.loaded if url.startswith(("http:", "https:", "//"))], path
    anchors = {
        name: pages[site / "api" / f"{name}.html"].anchors
        for name in ("bmfa", "energy", "bounds", "rules", "merging", "models")
    }
    anchors["bmfa"] = anchors["bmfa"] | anchors["energy"] | anchors["models"]  # of their modules
    for name, found in anchors.items():
        module = bmfa if name == "bmfa" else import_module(f"bmfa.{name}")
        values = {one: getattr(module, one) for one in getattr(module, "__all__", vars(module))}
        documented = {
            one
            for one, value in values.items()
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__doc__
            if hasattr(module, "__all__") or (value.__module__ == module.__name__ and one[0] != "_")
        }
        assert documented
        assert documented - {a.rpartition(".")[2] for a in found if a.startswith("bmfa.")} == set()


def test_code_runs_without_a_network(monkeypatch, tmp_path):
    def refuse(*args: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    block = re.compile(r"(<!-- needs a GPU and a download -->\n)?```python\n(.*?)```", re.S)
    blocks = {path: block.findall(text) for path, text in TEXTS.items()}
    readme = blocks[ROOT / "README.md"]
    assert len(readme) >= 3 and not readme[0][0], "README.md begins with code that runs anywhere"
    for path, found in blocks.items():
        for needs_gpu, code in found:
            program = compile(code, str(path), "exec")
            if not needs_gpu:
                exec(program, {})


@pytest.mark.slow
def test_the_table_of_measured_errors_is_that_of_a_run():
    """The numbers of docs/tangent-tiles.md, to one unit of the last digit shown."""
    text = TEXTS[DOCS / "tangent-tiles.md"]
    rows = text.partition("\n| factor ")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) >= 3
    torch.manual_seed(0)
    smooth = interpolate(torch.randn(9, 64, 8, 8), size=64, mode="bicubic")
    for line in rows:
        cells = [cell.strip(" %") for cell in line.strip(" |").split("|")]
        factor, target = float(cells[0]), float(cells[1])
        q, k, v = factor * smooth.flatten(2).mT.reshape(3, 1, 3, 64 * 64, 64)
        exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
        with warnings.catch_warnings():  # a target may be missed
            warnings.simplefilter("ignore", UserWarning)
            options = {"grid": (64, 64), "error": target, "allow_dense": False}
            output, stats = bmfa.screened_attention(q, k, v, **options)
        error = (output - exact).norm() / exact.norm()
        measured = (stats.density, error, stats.error.estimate, stats.error.upper)
        for shown, value in zip(cells[2:], measured, strict=True):
            unit = 10.0 ** -len(shown.partition(".")[2])
            assert abs(100 * float(value) - float(shown)) <= unit, line


def resolve(dotted: str) -> Any:
    """The object of a dotted name: a module, or attributes of one."""
    value, path = bmfa, "bmfa"
    for part in dotted.split(".")[1:]:
        path += f".{part}"
        value = getattr(value, part) if hasattr(value, part) else import_module(path)
    return value


def spans() -> list[str]:
    """All code between single backquotes in the texts."""
    return [span for text in TEXTS.values() for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)]


def test_names_and_paths_in_code_exist():
    for span in spans():
        name = re.fullmatch(r"(bmfa(?:\.\w+)+)(\(.*\))?", span)
        if name and not span.endswith((".md", ".html")):
            resolve(name[1])
    package = ROOT / "src" / "bmfa"
    bases = (ROOT, package, ROOT / "src", ROOT / "records", *(package / "evidence").glob("*/"))
    files = [
        span
        for span in spans()
        if re.fullmatch(r"[\w./-]+(/|\.py|\.md|\.cff|\.cpp|\.h|\.js)", span)
    ]
    assert len(files) > 50
    missing = {file for file in files if not any((base / file).exists() for base in bases)}
    missing = {file for file in missing if not list(package.rglob(file))}
    assert missing - {"report/records/"} == set()  # made by `make report`


def commands() -> dict[str, set[str]]:
    """The options of every command; `bench trees` is a command."""
    found = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for inner, one in getattr(command, "commands", {"": command}).items():
            options = {option for param in one.params for option in param.opts}
            found[f"{name} {inner}".strip()] = {"--help"} | options
    return found


def test_commands_and_their_options_exist_and_have_sections():
    known = commands()
    lines = [line for text in TEXTS.values() for line in text.replace(" \\\n", " ").splitlines()]
    typed = [re.sub(r"^(\$ |torchrun .*-m )|  #.*", "", line) for line in lines]
    for line in [line for line in (*typed, *spans()) if re.match(r"bmfa [a-z][a-z-]*( |$)", line)]:
        words = line.split()[1:]
        name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert name in (*known, "bench") and options <= known.get(name, set()), line
    headings = [line for line in lines if line.startswith(("## bmfa ", "### bmfa "))]
    sections = {heading.partition("bmfa ")[2].partition(" {")[0] for heading in headings}
    assert sections == {*known, "bench"}
    methods = CONSOLE.partition("$ bmfa methods\n")[2].partition("```")[0].splitlines()
    listed = {line.partition("  ")[0].partition(":")[0] for line in methods if "  " in line}
    assert listed - {""} == set(METHODS)


# Commands whose output depends on nothing but the library.
DETERMINISTIC = ("bmfa synthetic", "bmfa methods", "bmfa bench model --records")


def test_the_output_shown_is_that_of_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    blocks = [block.partition("```")[0] for block in CONSOLE.split("```console\n$ ")[1:]]
    shown = [block.partition("\n") for block in blocks if block.startswith(DETERMINISTIC)]
    assert len(shown) >= len(DETERMINISTIC)
    for line, _, output in shown:
        with suppress(SystemExit):
            main(line.split()[1:])
        printed = capsys.readouterr()
        rows = [row.rstrip() for row in output.splitlines()]
        assert [row.rstrip() for row in (printed.err + printed.out).splitlines()] == rows, line
