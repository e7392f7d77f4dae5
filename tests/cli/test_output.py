"""Tables, CSV and progress."""

import csv
import io
import os
import sys

import pytest

from bmfa.cli import main
from bmfa.cli.output import MAX_WIDTH, Output, check_file, csv_of, table_of

ROWS = [{"m": "a", "x": 1.0}, {"m": "[bold]b", "x": 10.25}]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_tables_align_numbers_and_leave_out_missing_columns():
    assert table_of(ROWS, "m x y").splitlines() == [
        "m             x",
        "---------------",
        "a         1.000",
        "[bold]b  10.250",
    ]
    wide = table_of([{"name": "x" * 200, "status": "y" * 200}], "name status", wide=True)
    assert "x" * 200 + "  " + "y" * 200 in wide.splitlines()


def test_a_table_has_at_most_120_characters_and_names_the_other_columns():
    keys = [f"column_{number:02}" for number in range(20)]  # 9 characters and 2 between
    row = dict.fromkeys(keys, 1.0)
    lines = table_of([row], " ".join(keys)).splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    assert lines[0].split() == keys[:11] and len(lines[0]) == 11 * 11 - 2
    assert " ".join(lines[3:]) == f"more with --wide: {', '.join(keys[11:])}"
    assert table_of([row], " ".join(keys), wide=True).splitlines()[0].split() == keys


def test_rows_as_csv_are_read_back():
    rows = [{"method": "a,b", "x": 0.1 + 0.2, "y": None}, {"method": 'say "c"', "z": [1, 2]}]
    read = list(csv.DictReader(io.StringIO(csv_of(rows))))
    assert list(read[0]) == ["method", "x", "y"]  # a list fits into no cell
    assert read[0]["method"] == "a,b" and float(read[0]["x"]) == 0.1 + 0.2 and read[0]["y"] == ""
    assert read[1]["method"] == 'say "c"'


def test_progress_is_a_bar_on_a_terminal_alone_and_counts_the_steps_of_this_run(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        update = Output().progress("images")
        for done, seconds in ((200, 0.0), (250, 10.0), (400, 30.0)):
            now[0] += seconds
            update(done, 1000)
        # The 200 images of an earlier run, which this one resumes, do not count.
        text = stream.getvalue()
        assert ("400/1000" in text and "5.00 images/s" in text) == stream.isatty()
        update(1000, 1000)
        assert stream.getvalue().endswith("\r") == stream.isatty()
        update(1, 2)  # a second loop has a bar of its own
        assert ("1/2" in stream.getvalue()) == stream.isatty()


def test_quiet_output_and_other_processes_show_nothing(capsys, monkeypatch):
    monkeypatch.delitem(os.environ, "WORLD_SIZE", raising=False)
    assert Output(quiet=True).progress("images") is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert Output().progress("images") is None
    monkeypatch.delenv("WORLD_SIZE")
    for words in ([], ["--quiet"]):
        main(["synthetic", "--placement", "corner", "--method", "global-mean", *words])
        assert bool(capsys.readouterr().out) == (not words)


def test_files_are_checked_before_the_work(tmp_path):
    check_file("--output", str(tmp_path / "new" / "a.PNG"), ".png")
    assert (tmp_path / "new").is_dir()
    with pytest.raises(ValueError, match=r"--output .* is a folder"):
        check_file("--output", str(tmp_path), ".png")
    with pytest.raises(ValueError, match=r"--output a.jpg is not the name of a .png file"):
        check_file("--output", "a.jpg", ".png")
