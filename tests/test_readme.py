"""The README: short, its code runs, its numbers are those of the records, its paths exist."""

import re
import socket

import pytest

from bmfa.attention.dispatch import LEAST_TOKENS
from markdown_records import (
    ROOT,
    Fact,
    check_fact,
    expected_rows,
    prose,
    record,
    tables,
    unchecked_numbers,
)

README = (ROOT / "README.md").read_text("utf-8")
GPU = "<!-- needs a GPU and a download -->"


def test_it_has_at_most_700_words():
    assert len(README.split()) <= 700


# Code


def blocks() -> list[tuple[bool, str]]:
    found = re.findall(rf"({re.escape(GPU)}\n)?```python\n(.*?)```", README, re.S)
    return [(not marked, code) for marked, code in found]


def test_the_first_block_runs_anywhere():
    assert len(blocks()) >= 3
    assert blocks()[0][0]


@pytest.mark.parametrize(("runs", "code"), blocks())
def test_code_runs_without_a_network(runs, code, monkeypatch, tmp_path):
    def refuse(*args: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    program = compile(code, "README.md", "exec")
    if not runs:
        pytest.skip("needs a GPU and a download; it compiles")
    exec(program, {})


# Numbers


def test_every_cell_of_the_tables_is_in_a_record():
    found = tables(README)
    assert [len(rows) for _, rows in found] == [2, 3]
    for head, rows in found:
        assert rows == expected_rows(head, rows)


FACTS: list[Fact] = [
    (
        "A bright minority of {} % of the tokens holds {} % of the softmax mass",
        lambda: [
            record("gallery")["rows"][0][name]
            for name in ("minority_area_percent", "gibbs_mass_percent")
        ],
    ),
    (
        "Tiles pay off from about {} tokens on, on a CPU from {}",
        lambda: [record("attention-h200")["settings"]["break_even_tokens"], LEAST_TOKENS["native"]],
    ),
    ("a GPU runs dense attention below {} tokens", lambda: [LEAST_TOKENS["cuda"]]),
]
# Numbers of other kinds: names and versions.
OTHERS = (
    r"Algorithm 1",
    r"Python 3\.11",
    r"Apache-2\.0",
    r"H200",
    r"torch 2\.11\.0",
    r"bfloat16",
    r"L2",
    r"float32",
)


@pytest.mark.parametrize("fact", FACTS, ids=[words[:40] for words, _ in FACTS])
def test_what_the_prose_says_is_in_a_record(fact):
    check_fact(prose(README), fact)


def test_no_number_of_the_prose_is_without_a_record():
    assert unchecked_numbers(prose(README), FACTS, OTHERS) == []


def test_the_frame_of_the_table_is_that_of_the_record():
    version = record("attention-h200")["environment"]["torch"].partition("+")[0]
    assert f"torch {version}, " in prose(README)


# Paths


def test_images_are_the_only_relative_links():
    links = re.findall(r"\]\(([^)]*)\)", README)
    assert links in (["docs/gallery.png"], ["docs/gallery.png", "docs/faster.png"])
    assert all((ROOT / link).is_file() for link in links)


def test_paths_in_the_text_exist():
    paths = re.findall(r"`((?:docs|examples)/[^`]*|[A-Z]+\.(?:md|cff))`", README)
    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
