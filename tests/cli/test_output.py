"""Tables, progress bars and the terminal."""

import io
import os
import sys

import pytest

from bmfa.cli.output import Output, progress_bar, show, table_of

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
    show(table_of([{"name": "x" * 200, "status": "y" * 200}], "name status"))
    assert "x" * 200 + "  " + "y" * 200 in capsys.readouterr().out.splitlines()


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


def test_progress_is_drawn_on_a_terminal_only(monkeypatch):
    monkeypatch.delitem(os.environ, "WORLD_SIZE", raising=False)
    assert Output(None, quiet=False).progress("pictures") is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert Output(None, quiet=False).progress("pictures") is not None
    assert Output(None, quiet=True).progress("pictures") is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert Output(None, quiet=False).progress("pictures") is None


def test_progress_counts_the_steps_of_this_run_for_its_rate(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    update = progress_bar("pictures")
    for done, seconds in ((200, 0.0), (250, 10.0), (400, 30.0)):
        now[0] += seconds
        update(done, 1000)
    text = sys.stderr.getvalue()
    # The 200 pictures of an earlier run, which this one resumes, do not count.
    assert "400/1000" in text and "5.00 pictures/s" in text
    update(1000, 1000)
    assert sys.stderr.getvalue().endswith("\r")


@pytest.mark.parametrize("words", [["--quiet"], []])
def test_quiet_output_prints_nothing(capsys, words):
    from bmfa.cli import main

    main(["synthetic", "--placement", "corner", "--method", "global-mean", *words])
    assert bool(capsys.readouterr().out) == (not words)
