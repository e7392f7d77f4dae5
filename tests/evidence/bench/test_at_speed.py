"""The error at a speed, interpolated between the settings of one run."""

import pytest

from bmfa.cli import main
from bmfa.evidence.bench.summary import error_at_speed, errors_at_speeds
from bmfa.records import Record, environment


def row(method, n, speedup, error, **more):
    return {"what": "attention", "method": method, "n": n, "speedup": speedup,
            "error_l2_percent": error, **more}  # fmt: skip


# Errors that are a power of the speed are interpolated exactly.
ROWS = [row(f"tiled-tiles:{i}", 4096, s, 2.0 * s**1.5) for i, s in enumerate((1.1, 2.3, 4.9))]
MEAN = [row(f"mean-tiles:{i}", 4096, s, 5.0 * s**0.5) for i, s in enumerate((1.2, 3.1))]


@pytest.mark.parametrize("speed", [1.1, 1.4, 2.3, 3.0, 4.9])
def test_a_power_law_is_interpolated_exactly(speed):
    assert error_at_speed(ROWS, speed) == pytest.approx(2.0 * speed**1.5)


def test_settings_off_the_frontier_do_not_count():
    worse = row("tiled-error:1", 4096, 2.0, 99.0)
    assert error_at_speed([worse, *ROWS], 1.5) == error_at_speed(ROWS, 1.5)


def test_a_speed_that_is_never_reached_has_no_error():
    assert error_at_speed(ROWS, 5.0) is None and error_at_speed([], 1.0) is None
    # The slowest setting is faster than this.
    assert error_at_speed(ROWS, 1.0) == pytest.approx(2.0 * 1.1**1.5)


def test_both_schemes_are_read_from_one_run():
    other = [row("tiled-tiles:0", 1024, 1.0, 50.0), row("tiled-tiles:0", 4096, 2.0, 0.1, keys="x")]
    first, second = errors_at_speeds([*ROWS, *MEAN, *other], [(4096, 2.0), (4096, 4.0)])
    assert first["n"] == 4096 and first["speedup"] == 2.0
    assert first["tiles_error_percent"] == pytest.approx(2.0 * 2**1.5)
    assert first["mean_tiles_error_percent"] == pytest.approx(5.0 * 2**0.5)
    assert second["mean_tiles_error_percent"] is None


@pytest.mark.parametrize("markdown", [[], ["--markdown"]])
def test_the_table_is_made_from_a_record(tmp_path, capsys, markdown):
    frame = {"dim": 64, "dtype": "float32", "milliseconds": 1.0}
    record = Record("bench", {}, [{**r, **frame} for r in ROWS + MEAN], environment("cpu"))
    path = tmp_path / "record.json"
    path.write_text(record.to_json())
    main(
        ["bench", "attention", "--records", str(path), "--at-speed", "4096:2", "4096:4", *markdown]
    )
    lines = capsys.readouterr().out.splitlines()
    shown = [line.replace("|", " ").split() for line in lines]
    if markdown:
        assert ["4,096", "2.0", "5.66", "7.07"] in shown
    else:
        assert ["4096", "2.000", "5.657", "7.071"] in shown


def test_a_bad_target_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "attention", "--at-speed", "4096"])
    assert stop.value.code == 2 and "such as 4096:2.0" in capsys.readouterr().err
