"""README.md and docs/benchmarks.md: their tables and the numbers in their text are in the records."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

import tables
from bmfa.attention.dispatch import LEAST_TOKENS
from tables import record, row

ROOT = Path(__file__).parents[1]

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
Fact = tuple[str, Callable[[], Sequence[float]]]
README, PAGE = (path.read_text("utf-8") for path in tables.TEXTS)


# Tables


def test_tables_are_those_of_the_records():
    """After a change of a record, `make docs` writes them."""
    for text in (README, PAGE):
        assert tables.with_tables(text) == text
        assert len(re.findall(r"^\|---", text, re.M)) == len(tables.MARKED.findall(text))
    marked = [name for text in (README, PAGE) for _, name in tables.MARKED.findall(text)]
    assert sorted(marked) == sorted(tables.TABLES)


def test_a_table_that_is_not_of_the_records_is_written_anew(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "README.md"
    stale.write_text(README.replace("| DeiT-Tiny, 1,024 px | 1", "| DeiT-Tiny, 1,024 px | 9"))
    monkeypatch.setattr(tables, "TEXTS", (stale,))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for arguments, status, printed in ((["--check"], 1, "is not"), ([], 0, "is now"), ([], 0, "")):
        monkeypatch.setattr(sys, "argv", ["tables.py", *arguments])
        assert tables.main() == status and printed in capsys.readouterr().out
    assert stale.read_text("utf-8") == README


# Text


def h200(n: int, method: str, column: str) -> float:
    return float(row("attention-h200", what="attention", n=n, method=method)[column])


def of_saliency(size: int, method: str, column: str) -> float:
    return float(row("model-saliency-h200", img_size=size, method=method)[column])


def tiled_rows() -> list[tables.Row]:
    """Tiled attention on both models, over all sizes and settings."""
    every = [one for name in tables.GPU_ATTENTION.values() for one in record(name)["rows"]]
    return [one for one in every if one["what"] == "attention" and "tiled-" in one["method"]]


def span(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def worst_call() -> float:
    """Largest error of a call on either model, relative to its target."""
    return max(
        one["largest_call_error_percent"] / (100 * float(one["method"].rpartition(":")[2]))
        for one in tiled_rows()
        if one["method"].startswith("tiled-error:")
    )


def settings(name: str, *keys: str) -> list[float]:
    return [record(name)["settings"][key] for key in keys]


def limits() -> list[float]:
    found = record("attention-h200")["settings"]["limits"]
    return [found["gigabytes_per_second"], found["teraflops"]]


def softmaxes() -> list[float]:
    """Cost of screening in softmaxes, in float32."""
    every = [one for one in record("trees-cpu")["rows"] if one["dtype"] == "float32"]
    return span([one["multiple_of_softmax"] for one in every if "multiple_of_softmax" in one])


def tree_costs() -> list[float]:
    one = row("trees-cpu", what="trees", method="gamma:0.005", threads=1)
    return [one["microseconds_per_grid"], one["speedup"]]


def tree_speeds() -> list[float]:
    """Speed of DeiT-Tiny with trees in the last four blocks."""
    methods = ("gamma:0.05", "quadrant-gap:0.8", "optimal:0.002")
    return span([row("evaluate-deit-h200", method=method)["speedup"] for method in methods])


def full_deit(column: str) -> float:
    return float(row("evaluate-deit-h200", method="full")[column])


def random_heads() -> list[float]:
    one = row("attention-random-h200", what="attention", n=16384, method="auto")
    return [one["heads"], one["speedup"]]


ERROR, SPEED, WORST = "error_l2_percent", "speedup", "worst_block_error_percent"
EXPONENTS = ("exponent_dense", "exponent_error_percent", "exponent_tiled")
# Sentences of docs/benchmarks.md, and the values of the records in their order.
PAGE_FACTS: list[Fact] = [
    ("the paper: {} bright minorities", lambda: settings("synthetic", "settings")),
    (
        "The last two columns are {} instances",
        lambda: [row("probe-embedded", method="block-mean", group="all")["instances"]],
    ),
    (
        "With no tile expanded at all, the error at 16,384 tokens is {} %",
        lambda: [h200(16384, "tiled-tiles:0", ERROR)],
    ),
    (
        "to the power {}, that of tiles at {} % error to the power {}",
        lambda: settings("attention-h200", *EXPONENTS),
    ),
    (
        "Scratch memory is {} to {} % of K and V",
        lambda: span([one["extra_memory_percent"] for one in tiled_rows()]),
    ),
    (
        "With a CUDA graph, the break-even point is {} tokens",
        lambda: settings("attention-h200", "break_even_tokens"),
    ),
    (
        "Without a graph, a call with tiles takes {} to {} ms longer",
        lambda: span([one["milliseconds_eager"] - one["milliseconds"] for one in tiled_rows()]),
    ),
    ("the error is {} times its target", lambda: [worst_call()]),
    (
        "the worst block of DeiT-Tiny has an error of {} %, and the mean of the four is {} %",
        lambda: [h200(16384, "tiled-tiles:0", column) for column in (WORST, ERROR)],
    ),
    (
        "the bandwidth of a large copy, {} GB/s, and of its flops over the speed of a large product, "
        "{} TFLOPS",
        limits,
    ),
    (
        "it has an error of {} % at {}x and {} % at {}x. Its other rows",
        lambda: [h200(4096, m, c) for m in ("pisa:0.05", "pisa:0.2") for c in (ERROR, SPEED)],
    ),
    (
        "moves the features by {} % at 1,792 px. Replacing cuDNN by flash attention alone moves them "
        "by {} %",
        lambda: [of_saliency(1792, method, ERROR) for method in ("error:0.03", "full-flash")],
    ),
    (
        "DeiT-Tiny, {} ImageNet images, float16, one H200, batch {}, 224 px",
        lambda: [full_deit("images"), *settings("evaluate-deit-h200", "batch_size")],
    ),
    (
        "relative to {} of the full model",
        lambda: [round(full_deit("images_per_second"), -2)],
    ),
    ("in the last four blocks runs at {}x to {}x of the full model", tree_speeds),
    (
        "A 16x16 tree takes {} µs on one core, {} times less than the grid-by-grid reference",
        tree_costs,
    ),
    ("costs as much as {} to {} softmaxes", softmaxes),
    (
        "with its {} % interval by the bootstrap",
        lambda: [float(record("reduction-deit-cpu")["settings"]["interval"].split()[0])],
    ),
    ("chosen on {} images of even index", lambda: settings("reduction-deit-cpu", "choosing")),
    (
        "in CUDA graphs, which leave the host out, `` runs at {}x at 1,792 px and at {}x at 3,584 px",
        lambda: [of_saliency(size, "error:0.05", SPEED) for size in (1792, 3584)],
    ),
    ("(one image, {} heads; ``) run at {}x: all heads", random_heads),
    ("speed to {}x with 4,096 tokens", lambda: [h200(4096, "auto", "speedup_eager")]),
    (
        "tangent tiles run at {}x and mean tiles at {}x",
        lambda: [h200(65536, method, SPEED) for method in ("tiled-tiles:0.2", "mean-tiles:0.2")],
    ),
]
README_FACTS: list[Fact] = [
    (
        "A bright minority of {} % of the tokens holds {} % of the softmax mass",
        lambda: [
            record("gallery")["rows"][0][name]
            for name in ("minority_area_percent", "gibbs_mass_percent")
        ],
    ),
    (
        "Tiles pay off from about {} tokens on, on a CPU from {}",
        lambda: [*settings("attention-h200", "break_even_tokens"), LEAST_TOKENS["native"]],
    ),
    ("a GPU runs dense attention below {} tokens", lambda: [LEAST_TOKENS["cuda"]]),
]
# Numbers of other kinds: names, sizes, versions and settings.
OTHERS = (
    r"below 1x|relative L2 error|H200|8x8 tiles|16x16 grid|expands about 6 % of the tiles",
    r"\(blocks 2, 5, 8, 11; 3 heads of 64\)|6 heads of 64|groups of 128 queries|bfloat16|\bL2\b",
    r"ViT-S/14|up to 65,536 tokens in all|about 0\.5 ms|a target of 0\.03|Algorithm 1",
    r"(?:at|[Bb]elow|from|[Ww]ith) (?:1,024|4,096|16,384|65,536)(?: tokens)?",
    r"torch \d+\.\d+\.\d+|Triton \d+\.\d+\.\d+|float(?:16|32|64)|Python 3\.11|Apache-2\.0",
    r"batch 1,|2 cores of an|trained at 224 px|AVX-512",
)


def prose(text: str) -> str:
    """The text without code, tables, link targets and headings, with single spaces."""
    text = re.sub(r"```[^`]*```|^\|.*$|^#.*$|<!--.*?-->", "", text, flags=re.M)
    return " ".join(re.sub(r"`[^`]*`", "``", re.sub(r"\]\([^)]*\)", "]", text)).split())


def at_precision_of(shown: str, value: float) -> str:
    """Format a value like `shown`: as many decimals, halves up, with or without commas."""
    places = len(shown.partition(".")[2])
    number = Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
    return f"{number:,f}" if "," in shown else f"{number:f}"


@pytest.mark.parametrize(("text", "facts"), [(README, README_FACTS), (PAGE, PAGE_FACTS)])
def test_every_number_of_the_text_is_in_a_record(text, facts):
    text, spans = prose(text), []
    for template, values in facts:
        pattern = re.escape(template).replace(r"\{\}", rf"({NUMBER.pattern})")
        found = re.search(pattern, text)
        assert found is not None, f"the text does not contain {template!r}"
        expected = [at_precision_of(*pair) for pair in zip(found.groups(), values(), strict=True)]
        assert list(found.groups()) == expected, template
        spans.append(found.span())
    spans += [found.span() for pattern in OTHERS for found in re.finditer(pattern, text)]
    assert [
        text[max(0, number.start() - 40) : number.end() + 20]
        for number in NUMBER.finditer(text)
        if not any(start <= number.start() and number.end() <= end for start, end in spans)
    ] == []


def test_the_frames_are_those_of_the_records():
    """Versions, blocks, heads and the dense path of the runs that the texts describe."""
    made = [record(path.stem)["environment"] for path in tables.ROOT.glob("records/*-h200*.json")]
    assert {one["torch"].partition("+")[0] for one in made} == {"2.11.0"}
    assert {one["triton"] for one in made} == {"3.6.0"}
    assert record("attention-cpu")["environment"]["torch"].startswith("2.13.0")
    named = set(re.findall(r"(?:torch|Triton) \d+\.\d+\.\d+", prose(PAGE) + prose(README)))
    assert named == {"torch 2.11.0", "Triton 3.6.0", "torch 2.13.0"}
    assert "torch 2.11.0, " in prose(README)
    for name, heads in (
        ("attention-h200", 3),
        ("attention-saliency-h200", 6),
        ("attention-cpu", 3),
    ):
        every = record(name)["rows"]
        assert record(name)["settings"]["blocks"] == [2, 5, 8, 11]
        assert {(one["heads"], one["dim"]) for one in every} == {(heads, 64)}
        dense = [one for one in every if one["method"] == "dense"]
        assert all(one["batch"] == 1 for one in dense if one["n"] == 65536)
        assert name == "attention-cpu" or {one["path"] for one in dense} <= {"cudnn", "default"}


def test_records_keep_their_command_and_no_folder_and_are_named():
    paths = sorted(ROOT.glob("records/*.json"))
    for path in paths:
        text = path.read_text("utf-8")
        assert json.loads(text)["environment"]["command"].startswith("bmfa ")
        assert not re.search(r"[\s\"=](?:/|~/|[A-Z]:\\)\w", text)  # no path from a root
    named = set(re.findall(r"`([\w-]+)\.json`", PAGE))
    assert named == {path.stem for path in paths} - {"gallery"}
