"""The README: its code runs, and its numbers are those of the records beside it."""

import json
import re
import socket
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
GPU = "<!-- needs a GPU and a download -->"
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+")

Row = dict[str, Any]


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "records" / f"{name}.json").read_text("utf-8"))
    return found


def row(name: str, **keys: Any) -> Row:
    """The one row of a record with these values."""
    rows = [one for one in record(name)["rows"] if all(one.get(k) == v for k, v in keys.items())]
    assert len(rows) == 1, f"{name} has {len(rows)} rows with {keys}"
    return rows[0]


# Code


def blocks() -> list[tuple[bool, str]]:
    found = re.findall(rf"({re.escape(GPU)}\n)?```python\n(.*?)```", README, re.S)
    return [(not marked, code) for marked, code in found]


def test_there_is_code_and_the_first_block_runs_anywhere():
    assert len(blocks()) >= 4 and blocks()[0][0]


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


def at_precision_of(shown: str, value: float) -> str:
    """A value as `shown` is written: so many decimals, halves up, commas, no zero before a dot."""
    places = len(shown.partition(".")[2])
    number = Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
    text = f"{number:,f}" if "," in shown else f"{number:f}"
    return text.removeprefix("0") if shown.startswith(".") else text


def expected_cell(cell: str, template: str, *values: float | None) -> str:
    """What a cell should hold: nothing without values, else the values at the precision printed."""
    if None in values:
        return ""
    shown = NUMBER.findall(re.sub(r"`[^`]*`", "", cell))
    if len(shown) != len(values):
        return template.format(*values)
    return template.format(*map(at_precision_of, shown, values))  # type: ignore[arg-type]


def tables() -> list[tuple[list[str], list[list[str]]]]:
    """Heads and rows of every table; a cell left empty in the first columns repeats the one above."""
    found = []
    for lines in re.findall(r"(?:^\|.*\|\n)+", README, re.M):
        head, _, *body = (
            [cell.strip() for cell in line.strip("|\n").split("|")] for line in lines.splitlines()
        )
        found.append((head, body))
    return found


PLACEMENTS = {"corner": "corner", "centred": "centred", "scattered": "scattered"}
METHODS = {
    "block mean": "sparge-mean",
    "mean + variance / 2": "mean-variance",
    "fixed quadtree, depth 2": "fixed-depth:2",
    "Algorithm 1, `gamma:0.005`": "gamma:0.005",
    "look-ahead 2, `gamma-h2:0.005`": "gamma-h2:0.005",
}


def honest_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """Underestimates and leaves of a method, by placement and on instances."""
    method = METHODS.get(cells[0]) or cells[0].strip("`")
    probed = row("probe-embedded", method=method, group="all")
    expected = [cells[0]]
    for name, cell in zip(head[1:], cells[1:], strict=True):
        if name == "their P95":
            expected.append(expected_cell(cell, "{}", probed["p95_gap"]))
            continue
        some = [
            one
            for one in record("synthetic")["rows"]
            if one["method"] == method and one["placement"] == PLACEMENTS.get(name)
        ]
        found = probed if name == "instances" else some[0] if some else None
        values = [None] if found is None else [found["mean_gap"], found["leaf_percent"]]
        expected.append(expected_cell(cell, "{} ({})", *values))
    return expected


def speed_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """One setting of attention at one number of tokens."""
    n, method = int(cells[0].replace(",", "")), cells[1].strip("`")
    name = method if method == "auto" else f"tiled-{method}"
    ours, dense = (
        row("attention-h200", n=n, method=name),
        row("attention-h200", n=n, method="dense"),
    )
    tiled = ours["ran"] == "tiled"
    templates = {
        "tokens": ("{}", n),
        "setting": ("`" + method + "`",),
        "tiles expanded": ("{} %", ours["density_percent"]) if tiled else ("dense",),
        "error": ("{} %", ours["error_l2_percent"] if tiled else None),
        "P95 of queries": ("{} %", ours["error_p95_query_percent"] if tiled else None),
        "ms": ("{}", ours["milliseconds"]),
        "dense ms": ("{}", dense["milliseconds"]),
        "speed": ("{}x", ours["speedup"]),
        "without graphs": ("{}x", ours["speedup_eager"]),
    }
    return [expected_cell(cell, *templates[name]) for name, cell in zip(head, cells, strict=True)]


def target_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """E that a target gives, the tiles expanded for it and the speed, by number of tokens."""
    expected = [cells[0]]
    for name, cell in zip(head[1:], cells[1:], strict=True):
        source = "attention-h200-random" if name.startswith("random") else "attention-h200"
        (count,) = NUMBER.findall(name)
        n = int(count.replace(",", ""))
        ours = row(source, n=n, method=f"tiled-error:{float(cells[0]):g}")
        values = ours["e_mean"], ours["density_percent"], ours["speedup"]
        expected.append(expected_cell(cell, "{} ({} %, {}x)", *values))
    return expected


MODELS = {
    "ViT-L/16, random weights": "model-vitl-h200",
    "DeiT-Tiny": "model-deit-h200",
    "ViT-S/14, saliency": "model-saliency-h200",
}


def model_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """A whole model at one size and one target."""
    model = above["model"] = cells[0] or above["model"]
    size = above["size"] = cells[1] or above["size"]
    (pixels,) = NUMBER.findall(size)
    keys = {"img_size": int(pixels.replace(",", ""))}
    full = row(MODELS[model], method="full", **keys)
    ours = row(MODELS[model], method=f"error:{float(cells[3]):g}", **keys)
    tiled = ours["tiled_layers"] > 0
    if tiled:
        assert ours["tiled_layers"] == ours["layers"]
    templates = {
        "model": (cells[0],),
        "picture": (cells[1] and "{} px", keys["img_size"]),
        "full": (cells[1] and "{} ms", full["milliseconds"]),
        "`error`": (cells[3],),
        "tiles expanded": ("{} %", ours["density_percent"]) if tiled else ("dense",),
        "patched": ("{} ms", ours["milliseconds"]),
        "speed": ("{}x", ours["speedup"]),
        "error of the last features": ("{} %", ours["error_l2_percent"]),
    }
    return [expected_cell(cell, *templates[name]) for name, cell in zip(head, cells, strict=True)]


def reduction_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """A reduction in DeiT-Tiny."""
    ours = row("evaluate-deit-h200", method=cells[0].strip("`"))
    templates = {
        "method": (cells[0],),
        "agreement": ("{} %", ours["agreement_percent"]),
        "output KL": ("{}", ours["output_kl"]),
        "speed": ("{}x", ours["speedup"]),
    }
    assert ours["timed"] == "graph"
    return [expected_cell(cell, *templates[name]) for name, cell in zip(head, cells, strict=True)]


# By the heads of the first two columns; a table of words has no record.
TABLES = {
    ("method", "corner"): honest_row,
    ("tokens", "setting"): speed_row,
    ("`error=`", "4,096"): target_row,
    ("model", "picture"): model_row,
    ("method", "agreement"): reduction_row,
}
OF_WORDS = {("command", "what it does")}


WITH_NUMBERS = [(head, rows) for head, rows in tables() if tuple(head[:2]) not in OF_WORDS]


@pytest.mark.parametrize(("head", "rows"), WITH_NUMBERS, ids=[h[1] for h, _ in WITH_NUMBERS])
def test_every_cell_of_a_table_is_in_a_record(head, rows):
    above: Row = {}
    assert rows == [TABLES[tuple(head[:2])](head, cells, above) for cells in rows]


def test_every_table_has_its_records():
    assert {tuple(head[:2]) for head, _ in tables()} == {*TABLES, *OF_WORDS}


# Prose


def prose() -> str:
    """The README without code, tables, links and headings, one space between words."""
    text = re.sub(r"```[^`]*```|^\|.*$|^#.*$|<!--.*?-->", "", README, flags=re.M)
    text = re.sub(r"`[^`]*`", "``", re.sub(r"\]\([^)]*\)", "]", text))
    return " ".join(text.split())


def h200(n: int, method: str, column: str) -> float:
    return float(row("attention-h200", n=n, method=method)[column])


def processor(n: int, method: str, column: str) -> float:
    return float(row("attention-cpu", n=n, method=method)[column])


def deit(size: int, method: str, column: str = "milliseconds_eager") -> float:
    return float(row("model-deit-h200", img_size=size, method=method)[column])


def long_tiles(value: Callable[[Row], float]) -> list[float]:
    """The least and the largest value of tiled attention from 4,096 tokens on, at all settings."""
    found = [
        value(one)
        for one in record("attention-h200")["rows"]
        if one["n"] >= 4096 and one["method"].startswith("tiled-") and "+" not in one["method"]
    ]
    return [min(found), max(found)]


def fastest_dense_call(n: int) -> float:
    rows = [r for r in record("attention-h200")["rows"] if r["n"] == n]
    return float(min(r["milliseconds_eager"] for r in rows if r["method"].startswith("dense-")))


def wide(method: str, column: str) -> float:
    return float(row("attention-h200-d128", dim=128, method=method)[column])


def beside_pisa(n: int, method: str, column: str) -> float:
    return float(row("attention-h200-pisa", n=n, method=method)[column])


def against_pisa(n: int, ours: str) -> float:
    return beside_pisa(n, ours, SPEED) / beside_pisa(n, "pisa:0.2", SPEED)


def softmaxes() -> list[float]:
    """The least and the largest cost of screening in softmaxes, in float32."""
    rows = [one for one in record("trees-cpu")["rows"] if one["dtype"] == "float32"]
    found = [one["multiple_of_softmax"] for one in rows if "multiple_of_softmax" in one]
    return [min(found), max(found)]


def screened_speeds() -> list[float]:
    """The least and the largest speed of trees in the last four blocks."""
    methods = ("gamma:0.05", "quadrant-gap:0.8", "optimal:0.002")
    found = [row("evaluate-deit-h200", method=method)["speedup"] for method in methods]
    return [min(found), max(found)]


ERROR, SPEED, CERTIFIED = "error_l2_percent", "speedup", "tiled-tiles:0.03+certificate"

# What the prose says, and the values of the records in its order.
FACTS: list[tuple[str, Callable[[], list[float]]]] = [
    (
        "A bright minority of {} % of the tokens holds {} % of the softmax mass",
        lambda: [
            record("gallery")["rows"][0][name]
            for name in ("minority_area_percent", "gibbs_mass_percent")
        ],
    ),
    (
        "synthetic sweep of {} bright minorities",
        lambda: [record("synthetic")["settings"]["settings"]],
    ),
    (
        "{} instances of the pictures",
        lambda: [row("probe-embedded", method="sparge-mean", group="all")["instances"]],
    ),
    (
        "no tile expanded at all the error at 16,384 tokens is {} %",
        lambda: [h200(16384, "tiled-tiles:0", ERROR)],
    ),
    (
        "faster than PISA at like errors, {} times with 4,096 tokens and about {} %, {} times with "
        "16,384 and about {} %",
        lambda: [
            against_pisa(4096, "tiled-tiles:0.06"),
            beside_pisa(4096, "tiled-tiles:0.06", ERROR),
            against_pisa(16384, "tiled-tiles:0.01"),
            beside_pisa(16384, "tiled-tiles:0.01", ERROR),
        ],
    ),
    (
        "{} % at {}x and {} % at {}x with 16,384 tokens, where tiles have {} % at {}x; {} % at {}x "
        "with 65,536, where tiles have {} % at {}x",
        lambda: [
            beside_pisa(n, method, column)
            for n, method in (
                (16384, "pisa:0.2"),
                (16384, "pisa:0.05"),
                (16384, "tiled-tiles:0.01"),
                (65536, "pisa:0.3"),
                (65536, "tiled-tiles:0"),
            )
            for column in (ERROR, SPEED)
        ],
    ),
    (
        "dense attention to the power {}, tiles at {} % error to the power {}",
        lambda: [
            record("attention-h200")["settings"][name]
            for name in ("exponent_dense", "exponent_error_percent", "exponent_tiled")
        ],
    ),
    (
        "Scratch memory is {} to {} % of K and V",
        lambda: long_tiles(lambda one: one["extra_memory_percent"]),
    ),
    (
        "Break-even with a graph is {} tokens",
        lambda: [record("attention-h200")["settings"]["break_even_tokens"]],
    ),
    (
        "Without one a call of tiles takes {} to {} ms longer",
        lambda: long_tiles(lambda one: one["milliseconds_eager"] - one["milliseconds"]),
    ),
    (
        "`` expands {} % of the tiles ({}x with 16,384 tokens). Made to expand {} % they run at {}x",
        lambda: [
            wide(method, column)
            for method in ("auto", "tiled-tiles:0.03")
            for column in ("density_percent", SPEED)
        ],
    ),
    (
        "{} ms with 16,384 tokens where dense attention takes {}; with it the whole call runs at {}x of "
        "dense attention with 4,096 tokens, {}x with 16,384 and {}x with 65,536",
        lambda: [
            h200(16384, CERTIFIED, "added_milliseconds"),
            fastest_dense_call(16384),
            *(h200(n, CERTIFIED, SPEED) for n in (4096, 16384, 65536)),
        ],
    ),
    (
        "with no tile expanded at 16,384 tokens the worst of the four has {} %, their mean {} %; at a "
        "target of 0.1 with 4,096 tokens the worst has E {}",
        lambda: [
            h200(16384, "tiled-tiles:0", "worst_block_error_percent"),
            h200(16384, "tiled-tiles:0", ERROR),
            h200(4096, "tiled-error:0.1", "worst_block_e_mean"),
        ],
    ),
    ("moves its features by {} %", lambda: [deit(2048, "full-flash", ERROR)]),
    (
        "DeiT-Tiny takes {} ms at 2,048 px, {} with the patch (``), {} and {} ms at 224 px, {} and {} "
        "ms at 1,024 px",
        lambda: [deit(s, method) for s in (2048, 224, 1024) for method in ("full", "error:0.1")],
    ),
    (
        "; {} ImageNet pictures, float16",
        lambda: [row("evaluate-deit-h200", method="full")["images"]],
    ),
    (
        "batch {}, 224 px, images per second against the full model's {} in CUDA graphs",
        lambda: [
            record("evaluate-deit-h200")["settings"]["batch_size"],
            round(row("evaluate-deit-h200", method="full")["images_per_second"], -2),
        ],
    ),
    ("in the last four blocks, runs at {}x to {}x of the full model", screened_speeds),
    (
        "tiles are {} times as fast as `` at 4,096 tokens with an error of {} % and {} times with {} %, "
        "{} times at 16,384 with {} % and {} times with {} %",
        lambda: [
            processor(n, method, column)
            for n, method in (
                (4096, "tiled-tiles:0.03"),
                (4096, "tiled-tiles:0.1"),
                (16384, "tiled-tiles:0"),
                (16384, "tiled-tiles:0.1"),
            )
            for column in (SPEED, ERROR)
        ],
    ),
    (
        "dense calls through `` run at {}x with 196 tokens and {}x with 1,024; with the certificate a "
        "call runs at {}x with 4,096",
        lambda: [
            processor(196, "auto", SPEED),
            processor(1024, "auto", SPEED),
            processor(4096, CERTIFIED, SPEED),
        ],
    ),
    (
        "A 16x16 tree takes {} µs on one core, {} times less than the grid-by-grid oracle",
        lambda: [
            row("trees-cpu", what="trees", method="gamma:0.005", threads=1)[name]
            for name in ("microseconds_per_grid", SPEED)
        ],
    ),
    ("costs {} to {} softmaxes", softmaxes),
]


# Numbers of other kinds: sizes, versions and settings.
OTHERS = (
    r"Algorithm 1|relative L2 error|Python 3\.11|Apache-2\.0|H200|8x8 tiles|16x16|at 7\.5 % error",
    r"\(blocks 2, 5, 8, 11; 3 heads of 64\)|timed one by one at 65,536",
    r"(?:at|below|from|with) (?:1,024|4,096|16,384|65,536)(?:, 4,096, 16,384 and 65,536)?(?: tokens)?",
    r"torch \d+\.\d+\.\d+|Triton \d+\.\d+\.\d+|float(?:16|32|64)|Heads of 128|made for 224 px",
    r"batch 1,|2 cores of an|queries above 0\.3",
)


def found_in(text: str, template: str) -> re.Match[str] | None:
    number = rf"({NUMBER.pattern})"
    return re.search(re.escape(template).replace(r"\{\}", number), text)


@pytest.mark.parametrize(("template", "values"), FACTS, ids=[words[:40] for words, _ in FACTS])
def test_what_the_prose_says_is_in_a_record(template, values):
    found = found_in(prose(), template)
    assert found is not None
    assert found[0] == template.format(*map(at_precision_of, found.groups(), values()))


def test_no_number_of_the_prose_is_without_a_record():
    text = prose()
    spans = [found.span() for template, _ in FACTS if (found := found_in(text, template))]
    spans += [found.span() for words in OTHERS for found in re.finditer(words, text)]
    loose = [
        text[max(0, number.start() - 40) : number.end() + 20]
        for number in NUMBER.finditer(text)
        if not any(start <= number.start() and number.end() <= end for start, end in spans)
    ]
    assert loose == []


@pytest.mark.parametrize("name", ["attention-h200", "attention-cpu"])
def test_the_frame_of_the_speeds_is_that_of_the_record(name):
    made = record(name)
    version = made["environment"]["torch"].partition("+")[0]
    assert f"torch {version}, " in prose()
    assert made["settings"]["blocks"] == [2, 5, 8, 11]
    dense = [one for one in made["rows"] if one["method"] == "dense"]
    assert all(one["batch"] == 1 for one in dense if one["n"] == 65536)
    if name == "attention-h200":
        assert {one["path"] for one in dense} == {"cudnn", "default"}
    assert {(one["heads"], one["dim"]) for one in made["rows"]} == {(3, 64)}


WITHOUT_COMMAND = {"attention-h200-pisa"}  # made before records kept their command


@pytest.mark.parametrize("path", sorted((ROOT / "records").glob("*.json")), ids=lambda p: p.stem)
def test_records_keep_their_command_and_no_folder(path):
    text = path.read_text("utf-8")
    made = json.loads(text)
    if path.stem not in WITHOUT_COMMAND:
        assert made["environment"]["command"].startswith("bmfa ")
    assert not re.search(r"[\s\"=](?:/|~/|[A-Z]:\\)\w", text)  # no path from a root


def test_links_to_records_lead_somewhere():
    links = re.findall(r"\((records/[^)]*|docs/[^)]*)\)", README)
    assert links and all((ROOT / link).is_file() for link in links)
    named = {Path(link).stem for link in links if link.startswith("records")}
    assert named == {path.stem for path in (ROOT / "records").glob("*.json")} - {"gallery"}
