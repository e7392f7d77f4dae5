"""The table of supported versions agrees with pyproject.toml and constraints.txt."""

import re
import tomllib
from pathlib import Path

from markdown_records import tables

ROOT = Path(__file__).parents[1]


def test_the_table_agrees_with_the_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = project["dependencies"] + sum(project["optional-dependencies"].values(), [])
    least = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(requirements), re.M))
    least["Python"] = project["requires-python"].removeprefix(">=")
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)$", pins, re.M))
    (rows,) = [
        rows
        for head, rows in tables((ROOT / "docs" / "start.md").read_text("utf-8"))
        if head == ["package", "supported", "tested"]
    ]
    assert [name for name, _, _ in rows] == [
        "Python",
        "torch",
        "numpy",
        "timm",
        "transformers",
        "triton",
    ]
    for name, supported, version in rows:
        assert supported.partition(" ")[0] == least[name]
        assert "or newer" in supported
        if name != "Python":
            assert version == tested[name]
