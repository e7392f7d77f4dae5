"""docs/benchmarks.md: every number in its tables and its text is that of a record in records/."""

import json
import re
from collections.abc import Callable

import pytest

from markdown_records import (
    ATTENTION,
    RECORDS,
    ROOT,
    TABLES,
    Fact,
    Row,
    attention_row,
    check_fact,
    expected_rows,
    prose,
    record,
    row,
    tables,
    unchecked_numbers,
)

PAGE = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
ALL_TABLES = tables(PAGE)


@pytest.mark.parametrize(("head", "rows"), ALL_TABLES, ids=[h[1] for h, _ in ALL_TABLES])
def test_every_cell_of_a_table_is_in_a_record(head, rows):
    assert rows == expected_rows(head, rows)


def test_every_kind_of_table_is_there():
    assert {tuple(head[:2]) for head, _ in ALL_TABLES} == set(TABLES)


# Values that the text quotes

ERROR, SPEED = "error_l2_percent", "speedup"


def h200(n: int, method: str, column: str) -> float:
    return float(attention_row("attention-h200", n, method)[column])


def range_of_tiles(value: Callable[[Row], float]) -> list[float]:
    """Minimum and maximum of tiled attention on both models, over all sizes and settings."""
    found = [value(one) for one in tiled_rows()]
    return [min(found), max(found)]


def tiled_rows() -> list[Row]:
    return [
        one
        for name in ATTENTION.values()
        for one in record(name)["rows"]
        if one["what"] == "attention" and one["method"].startswith("tiled-")
    ]


def worst_call() -> float:
    """Largest error of a call on either model, relative to its target."""
    return max(
        one["largest_call_error_percent"] / (100 * float(one["method"].rpartition(":")[2]))
        for one in tiled_rows()
        if one["method"].startswith("tiled-error:")
    )


def limits() -> list[float]:
    """Bandwidth in GB/s and speed in TFLOPS, as measured in the run."""
    found = record("attention-h200")["settings"]["limits"]
    return [found["gigabytes_per_second"], found["teraflops"]]


def range_of_softmaxes() -> list[float]:
    """Minimum and maximum cost of screening in softmaxes, in float32."""
    rows = [one for one in record("trees-cpu")["rows"] if one["dtype"] == "float32"]
    found = [one["multiple_of_softmax"] for one in rows if "multiple_of_softmax" in one]
    return [min(found), max(found)]


def range_of_tree_speeds() -> list[float]:
    """Minimum and maximum speed of DeiT-Tiny with trees in the last four blocks."""
    methods = ("gamma:0.05", "quadrant-gap:0.8", "optimal:0.002")
    found = [row("evaluate-deit-h200", method=method)["speedup"] for method in methods]
    return [min(found), max(found)]


def interval() -> list[float]:
    """The level of the intervals of `bmfa bench reduction`."""
    return [float(record("reduction-deit-cpu")["settings"]["interval"].split()[0])]


# Sentences of the page, and the values of the records in their order.
FACTS: list[Fact] = [
    ("the paper: {} bright minorities", lambda: [record("synthetic")["settings"]["settings"]]),
    (
        "The last two columns are {} instances",
        lambda: [row("probe-embedded", method="block-mean", group="all")["instances"]],
    ),
    (
        "With no tile expanded at all, the error at 16,384 tokens is {} %",
        lambda: [h200(16384, "tiled-tiles:0", ERROR)],
    ),
    (
        "grows with the number of tokens to the power {}, that of tiles at {} % error to the power {}",
        lambda: [
            record("attention-h200")["settings"][name]
            for name in ("exponent_dense", "exponent_error_percent", "exponent_tiled")
        ],
    ),
    (
        "Scratch memory is {} to {} % of K and V",
        lambda: range_of_tiles(lambda one: one["extra_memory_percent"]),
    ),
    (
        "With a CUDA graph, the break-even point is {} tokens",
        lambda: [record("attention-h200")["settings"]["break_even_tokens"]],
    ),
    (
        "Without a graph, a call with tiles takes {} to {} ms longer",
        lambda: range_of_tiles(lambda one: one["milliseconds_eager"] - one["milliseconds"]),
    ),
    (
        "the error is {} times its target. With no tile expanded at 16,384 tokens, the worst block of "
        "DeiT-Tiny has an error of {} %, and the mean of the four is {} %",
        lambda: [
            worst_call(),
            h200(16384, "tiled-tiles:0", "worst_block_error_percent"),
            h200(16384, "tiled-tiles:0", ERROR),
        ],
    ),
    (
        "the bandwidth of a large copy, {} GB/s, and of its flops over the speed of a large product, {} "
        "TFLOPS",
        limits,
    ),
    (
        "it has an error of {} % at {}x and {} % at {}x. Its other rows",
        lambda: [
            h200(4096, method, column)
            for method in ("pisa:0.05", "pisa:0.2")
            for column in (ERROR, SPEED)
        ],
    ),
    (
        "moves the features by {} % at 1,792 px. Replacing cuDNN by flash attention alone moves them by "
        "{} %",
        lambda: [
            row("model-saliency-h200", img_size=1792, method=method)[ERROR]
            for method in ("error:0.03", "full-flash")
        ],
    ),
    (
        "DeiT-Tiny, {} ImageNet images, float16, one H200, batch {}, 224 px",
        lambda: [
            row("evaluate-deit-h200", method="full")["images"],
            record("evaluate-deit-h200")["settings"]["batch_size"],
        ],
    ),
    (
        "relative to {} of the full model",
        lambda: [round(row("evaluate-deit-h200", method="full")["images_per_second"], -2)],
    ),
    ("in the last four blocks runs at {}x to {}x of the full model", range_of_tree_speeds),
    (
        "A 16x16 tree takes {} µs on one core, {} times less than the grid-by-grid reference",
        lambda: [
            row("trees-cpu", what="trees", method="gamma:0.005", threads=1)[name]
            for name in ("microseconds_per_grid", SPEED)
        ],
    ),
    ("costs as much as {} to {} softmaxes", range_of_softmaxes),
    ("with its {} % interval by the bootstrap", interval),
    (
        "chosen on {} images of even index",
        lambda: [record("reduction-deit-cpu")["settings"]["choosing"]],
    ),
    (
        "in CUDA graphs, which leave the host out, `` runs at {}x at 1,792 px and at {}x at 3,584 px",
        lambda: [
            row("model-saliency-h200", img_size=size, method="error:0.05")[SPEED]
            for size in (1792, 3584)
        ],
    ),
    (
        "(one image, {} heads; ``) run at {}x: all heads",
        lambda: [
            attention_row("attention-random-h200", 16384, "auto")[name] for name in ("heads", SPEED)
        ],
    ),
    (
        "reduce its speed to {}x with 4,096 tokens",
        lambda: [h200(4096, "auto", "speedup_eager")],
    ),
    (
        "tangent tiles run at {}x and mean tiles at {}x",
        lambda: [h200(65536, method, SPEED) for method in ("tiled-tiles:0.2", "mean-tiles:0.2")],
    ),
]

# Numbers of other kinds: sizes, versions and settings.
OTHERS = (
    r"below 1x|relative L2 error|H200|8x8 tiles|16x16 grid|expands about 6 % of the tiles",
    r"\(blocks 2, 5, 8, 11; 3 heads of 64\)|6 heads of 64|groups of 128 queries",
    r"ViT-S/14|up to 65,536 tokens in all|about 0\.5 ms|a target of 0\.03",
    r"(?:at|[Bb]elow|from|[Ww]ith) (?:1,024|4,096|16,384|65,536)(?: tokens)?",
    r"torch \d+\.\d+\.\d+|Triton \d+\.\d+\.\d+|float(?:16|32|64)",
    r"batch 1,|2 cores of an|trained at 224 px|AVX-512",
)


@pytest.mark.parametrize("fact", FACTS, ids=[words[:40] for words, _ in FACTS])
def test_what_the_text_says_is_in_a_record(fact):
    check_fact(prose(PAGE), fact)


def test_no_number_of_the_text_is_without_a_record():
    assert unchecked_numbers(prose(PAGE), FACTS, OTHERS) == []


def test_the_versions_are_those_of_the_records():
    environments = [record(path.stem)["environment"] for path in RECORDS.glob("*-h200*.json")]
    assert {one["torch"].partition("+")[0] for one in environments} == {"2.11.0"}
    assert {one["triton"] for one in environments} == {"3.6.0"}
    assert record("attention-cpu")["environment"]["torch"].startswith("2.13.0")
    found = re.findall(r"(torch|Triton) (\d+\.\d+\.\d+)", prose(PAGE))
    assert found == [
        ("torch", "2.11.0"),
        ("Triton", "3.6.0"),
        ("torch", "2.11.0"),
        ("torch", "2.13.0"),
    ]


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("attention-h200", 3),
        ("attention-saliency-h200", 6),
        ("attention-cpu", 3),
    ],
)
def test_the_frame_of_the_speeds_is_that_of_the_record(name, heads):
    made = record(name)
    assert made["settings"]["blocks"] == [2, 5, 8, 11]
    dense = [one for one in made["rows"] if one["method"] == "dense"]
    assert all(one["batch"] == 1 for one in dense if one["n"] == 65536)
    if name != "attention-cpu":
        assert {one["path"] for one in dense} <= {"cudnn", "default"}
    assert {(one["heads"], one["dim"]) for one in made["rows"]} == {(heads, 64)}


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda p: p.stem)
def test_records_keep_their_command_and_no_folder(path):
    text = path.read_text("utf-8")
    made = json.loads(text)
    assert made["environment"]["command"].startswith("bmfa ")
    assert not re.search(r"[\s\"=](?:/|~/|[A-Z]:\\)\w", text)  # no path from a root


def test_the_page_names_every_record():
    named = set(re.findall(r"`([\w-]+)\.json`", PAGE))
    assert named == {path.stem for path in RECORDS.glob("*.json")} - {"gallery"}
