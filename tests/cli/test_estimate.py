"""bmfa estimate: its table, its record, and input that is refused."""

import json

import pytest

from bmfa.cli import main
from bmfa.data.drawn.scenes import draw_scene


def test_the_table_and_the_record_say_the_same(capsys, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    pillow.fromarray(draw_scene(0, 0)[0].image.pixels).save(tmp_path / "scene.png")
    words = f"--data-dir {tmp_path} --img-size 256 --error 0.1 --dtype float32 --device cpu"
    main(["estimate", *words.split(), "--json", str(tmp_path / "record.json")])
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "record.json").read_text())
    settings, rows = record["settings"], record["rows"]
    assert record["experiment"] == "estimate" and record["environment"]["device"] == "cpu"
    assert [row["error"] for row in rows] == [0.0, 0.1] and settings["headline"] == 0.1
    assert (settings["img_size"], settings["tokens"], settings["images"]) == ([256, 256], 1024, 1)
    lines = printed.splitlines()
    assert lines[0].startswith("EmbeddedViT at 256x256 px, 1024 tokens: 8 layers")
    assert f"verdict: {settings['verdict']}" in lines
    speed, milliseconds = rows[1]["speedup"], rows[1]["milliseconds"]
    assert lines[4].split()[:3] == ["error=0.1", f"{speed:.1f}x", f"{milliseconds:.4g}"]


def test_bad_input_ends_with_one_line(capsys):
    for words, part in (
        ("--error 3", "errors is 3; pass a fraction"),
        ("--limit 0", "limit is 0"),
        ("--dtype int8", "'int8'"),
        ("--img-size 100", "img_size is 100"),
        ("--data-dir no-such-folder", "no-such-folder"),
        ("--seed -1", "seed is -1"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["estimate", *words.split()])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1 and part in error, error
