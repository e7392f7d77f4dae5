"""Tables, CSV, progress and the terminal."""

import csv
import io
import os
import sys

import pytest

from bmfa.cli.output import (
    MAX_WIDTH,
    Output,
    csv_of,
    progress_bar,
    progress_lines,
    show,
    table_of,
)

ROWS = [{"m": "a", "x": 1.0}, {"m": "[bold]b", "x": 10.25}]
PLAIN = "m             x\n---------------\na         1.000\n[bold]b  10.250\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_tables_align_numbers_and_leave_out_missing_columns(capsys):
    show(table_of(ROWS, "m x y"))
    assert capsys.readouterr().out == PLAIN


def test_a_wide_table_is_neither_wrapped_nor_cut_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    show(table_of([{"name": "x" * 200, "status": "y" * 200}], "name status", wide=True))
    assert "x" * 200 + "  " + "y" * 200 in capsys.readouterr().out.splitlines()


def test_a_table_has_at_most_120_characters_and_names_the_other_columns(capsys):
    keys = [f"column_{number:02}" for number in range(20)]  # 9 characters and 2 between
    row = dict.fromkeys(keys, 1.0)
    show(table_of([row], " ".join(keys)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    assert lines[0].split() == keys[:11] and len(lines[0]) == 11 * 11 - 2
    assert " ".join(lines[3:]) == f"more with --wide: {', '.join(keys[11:])}"
    show(table_of([row], " ".join(keys), wide=True))
    assert capsys.readouterr().out.splitlines()[0].split() == keys


def test_rows_as_csv_are_read_back(capsys):
    rows = [{"method": "a,b", "x": 0.1 + 0.2, "y": None}, {"method": 'say "c"', "z": [1, 2]}]
    read = list(csv.DictReader(io.StringIO(csv_of(rows))))
    assert list(read[0]) == ["method", "x", "y"]  # a list fits into no cell
    assert read[0]["method"] == "a,b" and float(read[0]["x"]) == 0.1 + 0.2 and read[0]["y"] == ""
    assert read[1]["method"] == 'say "c"'


def test_a_terminal_gets_a_bold_header_unless_colour_is_refused(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    show(table_of(ROWS, "m x"))
    assert "\x1b[1m" in sys.stdout.getvalue() and "[bold]b" in sys.stdout.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    show(table_of(ROWS, "m x"))
    assert sys.stdout.getvalue() == PLAIN


def test_forced_colour_does_not_reach_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    show(table_of(ROWS, "m x"))
    assert capsys.readouterr().out == PLAIN


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    monkeypatch.delitem(os.environ, "WORLD_SIZE", raising=False)
    for stream, name in ((io.StringIO(), "progress_lines"), (Terminal(), "progress_bar")):
        monkeypatch.setattr(sys, "stderr", stream)
        update = Output(None, quiet=False).progress("images")
        assert update is not None and update.__qualname__.startswith(name)
    assert Output(None, quiet=True).progress("images") is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert Output(None, quiet=False).progress("images") is None


def test_progress_counts_the_steps_of_this_run_for_its_rate(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    update = progress_bar("images")
    for done, seconds in ((200, 0.0), (250, 10.0), (400, 30.0)):
        now[0] += seconds
        update(done, 1000)
    text = sys.stderr.getvalue()
    # The 200 images of an earlier run, which this one resumes, do not count.
    assert "400/1000" in text and "5.00 images/s" in text
    update(1000, 1000)
    assert sys.stderr.getvalue().endswith("\r")


def test_progress_without_a_terminal_is_a_line_every_30_seconds(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("bmfa.cli.output.time.monotonic", lambda: now[0])
    update = progress_lines("images")
    # 200 images are of an earlier run, which this one resumes, and do not count towards the rate.
    for seconds, done in ((10, 200), (10, 250), (10, 300), (10, 350), (10, 400), (10, 450)):
        now[0] += seconds
        update(done, 1000)
    assert capsys.readouterr().err.splitlines() == [
        "bmfa: 300 of 1,000 images, 5 images/s, 0:02:20 left",
        "bmfa: 450 of 1,000 images, 5 images/s, 0:01:50 left",
    ]
    now[0] += 100
    update(1000, 1000)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", [["--quiet"], []])
def test_quiet_output_prints_nothing(capsys, words):
    from bmfa.cli import main

    main(["synthetic", "--placement", "corner", "--method", "global-mean", *words])
    assert bool(capsys.readouterr().out) == (not words)
