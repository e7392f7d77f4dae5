"""Versions are stated once: the table of supported versions agrees with what is installed from."""

import tomllib
from pathlib import Path

import pytest
import yaml

import bmfa

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"
RUNTIME_EXTRAS = ("images", "report", "data", "models", "triton")


def requirements(lines):
    """Map the package name to its range, without markers and without extras of bmfa itself."""
    parts = [line.partition(";")[0].partition(">=") for line in lines if line[:5] != "bmfa["]
    return {name.partition("[")[0]: f">={version.strip()}" for name, _, version in parts}


def table():
    """Rows of docs/versions.md by package: the accepted range and the tested versions."""
    lines = (ROOT / "docs" / "versions.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:2] == "| "]
    return {row[0]: (row[1], row[2]) for row in rows if row[1].startswith(">=")}


def pins():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_table_of_supported_versions_agrees_with_the_package_and_its_pins():
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for name in RUNTIME_EXTRAS for line in extras[name])]
    expected = {name: (accepted, pins()[name]) for name, accepted in requirements(lines).items()}
    rows = table()
    assert rows.pop("Python")[0] == PROJECT["requires-python"]
    assert rows == expected


def test_every_direct_dependency_is_pinned_within_its_range():
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]

    def number(text):
        return tuple(int(part) for part in text.split("."))

    for name, accepted in requirements(lines).items():
        assert number(pins()[name]) >= number(accepted.removeprefix(">=")), name


def test_python_versions_agree_in_table_classifiers_and_workflow():
    tested = table()["Python"][1].split(", ")
    prefix = "Programming Language :: Python :: "
    assert [f"{prefix}{version}" for version in tested] == [
        line for line in PROJECT["classifiers"] if line.startswith(prefix)
    ]
    if not WORKFLOW.exists():
        pytest.skip("the workflow is not part of an sdist")
    workflow = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == tested


def test_the_version_is_stated_once():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {bmfa.__version__}\n" in citation
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("\n## ")[2]
    assert changes.split()[0] == bmfa.__version__
