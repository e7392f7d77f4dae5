"""Numbers in Markdown, compared with the records that they come from."""

import json
import re
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import numpy as np

from bmfa.evidence.bench.summary import own_rows

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "records"
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+")

Row = dict[str, Any]
Fact = tuple[str, Callable[[], Sequence[float]]]


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text("utf-8"))
    return found


def row(name: str, **keys: Any) -> Row:
    """The only row of a record with these values."""
    rows = [one for one in record(name)["rows"] if all(one.get(k) == v for k, v in keys.items())]
    assert len(rows) == 1, f"{name} has {len(rows)} rows with {keys}"
    return rows[0]


def at_precision_of(shown: str, value: float) -> str:
    """Format a value like `shown`: as many decimals, halves up, commas, no zero before a dot."""
    places = len(shown.partition(".")[2])
    number = Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
    text = f"{number:,f}" if "," in shown else f"{number:f}"
    return text.removeprefix("0") if shown.startswith(".") else text


# Tables


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table."""
    found = []
    for lines in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        head, _, *body = (
            [cell.strip() for cell in line.strip("|\n").split("|")] for line in lines.splitlines()
        )
        found.append((head, body))
    return found


def expected_cell(cell: str, template: str, *values: float | None) -> str:
    """The text a cell should have: empty without values, else the values at the precision shown."""
    if None in values:
        return ""
    shown = NUMBER.findall(re.sub(r"`[^`]*`", "", cell))
    if len(shown) != len(values):
        return template.format(*values)
    return template.format(*map(at_precision_of, shown, values))  # type: ignore[arg-type]


METHODS = {
    "block mean": "block-mean",
    "mean + variance / 2": "mean-variance",
    "fixed quadtree, depth 2": "fixed-depth:2",
    "Algorithm 1, `gamma:0.005`": "gamma:0.005",
    "look-ahead 2, `gamma-h2:0.005`": "gamma-h2:0.005",
}


def screening_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """Underestimates and leaves of a method, by placement and on instances."""
    method = METHODS.get(cells[0]) or cells[0].strip("`")
    probed = row("probe-embedded", method=method, group="all")
    expected = [cells[0]]
    for name, cell in zip(head[1:], cells[1:], strict=True):
        if name == "P95 of instances":
            expected.append(expected_cell(cell, "{}", probed["p95_gap"]))
            continue
        some = [
            one
            for one in record("synthetic")["rows"]
            if one["method"] == method and one["placement"] == name
        ]
        found = probed if name == "instances" else some[0] if some else None
        values = [None] if found is None else [found["mean_gap"], found["leaf_percent"]]
        expected.append(expected_cell(cell, "{} ({})", *values))
    return expected


def attention_row(name: str, n: int, method: str) -> Row:
    """The row of a method of `bmfa bench attention`; those of single kernels have a method, too."""
    return row(name, what="attention", n=n, method=method)


def tokens_of(text: str) -> int:
    """The number of a text such as "random q, k, v, 16,384"."""
    (count,) = NUMBER.findall(text)
    return int(count.replace(",", ""))


def speed_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """One setting of attention at one number of tokens."""
    n, method = tokens_of(cells[0]), cells[1].strip("`")
    ours = attention_row("attention-h200", n, method if method == "auto" else f"tiled-{method}")
    dense = attention_row("attention-h200", n, "dense")
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


ATTENTION = {"DeiT-Tiny": "attention-h200", "ViT-S/14, saliency": "attention-saliency-h200"}


def error_at_speed(rows: Sequence[Row], speedup: float) -> float | None:
    """Relative L2 error in percent at a speed, or None if no setting is that fast.

    Between neighbouring settings on the frontier the logarithm of the error is linear in the logarithm
    of the speed. If the slowest setting is faster than the speed, its error is returned.
    """
    frontier: list[tuple[float, float]] = []  # speed and error rise
    for speed, error in sorted(
        ((one["speedup"], one["error_l2_percent"]) for one in rows), reverse=True
    ):
        if not frontier or error < frontier[0][1]:
            frontier.insert(0, (speed, error))
    if not frontier or frontier[-1][0] < speedup:
        return None
    speeds, errors = zip(*frontier, strict=True)
    return float(np.exp(np.interp(np.log(speedup), np.log(speeds), np.log(errors))))


def at_speed_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """Errors of tangent tiles and of mean tiles at one speed, interpolated between settings."""
    model = above["model"] = cells[0] or above["model"]
    n = above["n"] = tokens_of(cells[1]) if cells[1] else above["n"]
    speedup = float(cells[2].rstrip("x"))
    rows = [one for one in own_rows(record(ATTENTION[model])["rows"]) if one["n"] == n]
    expected = cells[:3]
    for cell, start in zip(cells[3:], ("tiled-", "mean-tiles:"), strict=True):
        error = error_at_speed([one for one in rows if one["method"].startswith(start)], speedup)
        expected.append("not reached" if error is None else expected_cell(cell, "{} %", error))
    return expected


def model_and_tokens(title: str) -> tuple[str, int]:
    """The parts of a column title such as "DeiT-Tiny, 4,096"."""
    model, _, tokens = title.rpartition(", ")  # ", " is not part of a number
    return model, tokens_of(tokens)


def method_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """Error and speed of a method of any kind, by model and number of tokens."""
    method = cells[0].strip("`")
    name = f"tiled-{method}" if method.startswith("tiles:") else method
    expected = [cells[0]]
    for title, cell in zip(head[1:], cells[1:], strict=True):
        model, n = model_and_tokens(title)
        ours = attention_row(ATTENTION[model], n, name)
        expected.append(
            expected_cell(cell, "{} % ({}x)", ours["error_l2_percent"], ours["speedup"])
        )
    return expected


def target_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """Error of the output that a target gives, tiles expanded for it and speed; empty if not timed."""
    expected = [cells[0]]
    for title, cell in zip(head[1:], cells[1:], strict=True):
        model, n = model_and_tokens(title)
        keys = {"what": "attention", "n": n, "method": f"tiled-error:{float(cells[0]):g}"}
        rows = record(ATTENTION[model])["rows"]
        if not any(all(one.get(k) == v for k, v in keys.items()) for one in rows):
            expected.append("")
            continue
        ours = row(ATTENTION[model], **keys)
        values = ours["error_l2_percent"], ours["density_percent"], ours["speedup"]
        expected.append(expected_cell(cell, "{} % ({} %, {}x)", *values))
    return expected


def kernel_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """One Triton kernel of a call with 16,384 tokens, against its limit."""
    ours = row("attention-h200", what="kernel", n=16384, kernel=cells[0].strip("`"))
    templates = {
        "kernel": (cells[0],),
        "launches": ("{}", ours["launches"]),
        "ms": ("{}", ours["milliseconds"]),
        "limit, ms": ("{}", ours["limit_milliseconds"]),
        "limit / time": ("{} %", ours["limit_percent"]),
    }
    return [expected_cell(cell, *templates[name]) for name, cell in zip(head, cells, strict=True)]


CPU_ATTENTION = {"DeiT-Tiny": "attention-cpu", "ViT-S/14, saliency": "attention-saliency-cpu"}
CPU_MODELS = {"DeiT-Tiny": "model-cpu", "ViT-S/14, saliency": "model-saliency-cpu"}


def cpu_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """One setting of attention on a CPU, on 1 and on 2 threads."""
    title = above["title"] = cells[0] or above["title"]
    model, n = model_and_tokens(title)
    method = cells[1].strip("`")
    method = method if method.startswith(("exact", "eager-")) else f"tiled-{method}"
    one, two = (
        row(CPU_ATTENTION[model], what="attention", n=n, method=method, threads=threads)
        for threads in (1, 2)
    )
    templates = {
        "model, tokens": (cells[0],),
        "setting": (cells[1],),
        "tiles expanded": ("{} %", one["density_percent"]),
        "error": ("{} %", one["error_l2_percent"]),
        "ms, 1 thread": ("{}", one["milliseconds"]),
        "speed, 1 thread": ("{}x", one["speedup"]),
        "ms, 2 threads": ("{}", two["milliseconds"]),
        "speed, 2 threads": ("{}x", two["speedup"]),
    }
    return [expected_cell(cell, *templates[name]) for name, cell in zip(head, cells, strict=True)]


def cpu_model_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """A whole model on a CPU at one size, full and with two targets."""
    model, size = model_and_tokens(cells[0].removesuffix(" px"))
    full, exact, tiles = (
        row(CPU_MODELS[model], img_size=size, method=method)
        for method in ("full", "error:0", "error:0.03")
    )
    templates = {
        "model, image": (cells[0],),
        "full": ("{} ms", full["milliseconds"]),
        "`error=0`": ("{}x", exact["speedup"]),
        "`error=0.03`": ("{}x", tiles["speedup"]),
        "error of the features": ("{} %", tiles["error_l2_percent"]),
    }
    return [expected_cell(cell, *templates[name]) for name, cell in zip(head, cells, strict=True)]


MODELS = {"ViT-S/14, saliency": "model-saliency-h200"}


def model_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """A whole model at one size and one setting, calls one by one."""
    model = above["model"] = cells[0] or above["model"]
    size = above["size"] = cells[1] or above["size"]
    keys = {"img_size": tokens_of(size.removesuffix(" px"))}
    full = min(
        one["milliseconds_eager"]
        for one in record(MODELS[model])["rows"]
        if one["img_size"] == keys["img_size"] and one["method"].startswith("full")
    )
    ours = row(MODELS[model], method=cells[3].strip("`"), **keys)
    dense = ours.get("tiled_layers") == 0
    templates = {
        "model": (cells[0],),
        "image": (cells[1] and "{} px", keys["img_size"]),
        "full": (cells[1] and "{} ms", full),
        "setting": (cells[3],),
        "tiles expanded": ("dense",) if dense else ("{} %", ours["density_percent"]),
        "patched": ("{} ms", ours["milliseconds_eager"]),
        "speed": ("{}x", ours["speedup_eager"]),
        "error of the features": ("{} %", ours["error_l2_percent"]),
        "mask IoU": ("{}", ours.get("mask_iou")),
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


def schedule_row(head: list[str], cells: list[str], above: Row) -> list[str]:
    """A baseline, or a schedule of its operations, on one half of the images or on both."""
    baseline = above["baseline"] = cells[0].strip("`") or above["baseline"]
    images = above["images"] = cells[1] or above["images"]
    kind = cells[2] if cells[2] in ("fixed", "tuned") else "baseline"
    ours = row("reduction-deit-cpu", baseline=baseline, schedule=kind, reported_on=images)
    gain = (ours["gain_pp"], ours["gain_low_pp"], ours["gain_high_pp"])
    templates = {
        "GFLOPs of": (cells[0],),
        "images": (cells[1],),
        "schedule": (kind if kind != "baseline" else f"`{baseline}`",),
        "GFLOPs": ("{}", ours["gflops"]),
        "agreement": ("{} %", ours["agreement_percent"]),
        "output KL": ("{}", ours["output_kl"]),
        "gain in points": ("",) if kind == "baseline" else ("{} ({} to {})", *gain),
    }
    return [expected_cell(cell, *templates[name]) for name, cell in zip(head, cells, strict=True)]


# By the first two column headers.
TABLES: dict[tuple[str, ...], Callable[[list[str], list[str], Row], list[str]]] = {
    ("method", "corner"): screening_row,
    ("tokens", "setting"): speed_row,
    ("model", "tokens"): at_speed_row,
    ("method", "DeiT-Tiny, 4,096"): method_row,
    ("`error=`", "DeiT-Tiny, 16,384"): target_row,
    ("kernel", "launches"): kernel_row,
    ("model", "image"): model_row,
    ("model, tokens", "setting"): cpu_row,
    ("model, image", "full"): cpu_model_row,
    ("method", "agreement"): reduction_row,
    ("GFLOPs of", "images"): schedule_row,
}


def expected_rows(head: list[str], rows: list[list[str]]) -> list[list[str]]:
    """The rows that the records give for a table with this header."""
    above: Row = {}  # cells that are empty repeat the row above
    return [TABLES[tuple(head[:2])](head, cells, above) for cells in rows]


# Prose


def prose(text: str) -> str:
    """The text without code, tables, link targets and headings, with single spaces."""
    text = re.sub(r"```[^`]*```|^\|.*$|^#.*$|<!--.*?-->", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`", "``", re.sub(r"\]\([^)]*\)", "]", text))
    return " ".join(text.split())


def find_fact(text: str, template: str) -> re.Match[str] | None:
    return re.search(re.escape(template).replace(r"\{\}", rf"({NUMBER.pattern})"), text)


def check_fact(text: str, fact: Fact) -> None:
    """Assert that the text contains the sentence, with the values of the records."""
    template, values = fact
    found = find_fact(text, template)
    assert found is not None, f"the text does not contain {template!r}"
    assert found[0] == template.format(*map(at_precision_of, found.groups(), values()))


def unchecked_numbers(text: str, facts: Sequence[Fact], others: Sequence[str]) -> list[str]:
    """Numbers of the text that are neither in a fact nor in one of the other patterns."""
    spans = [found.span() for template, _ in facts if (found := find_fact(text, template))]
    spans += [found.span() for pattern in others for found in re.finditer(pattern, text)]
    return [
        text[max(0, number.start() - 40) : number.end() + 20]
        for number in NUMBER.finditer(text)
        if not any(start <= number.start() and number.end() <= end for start, end in spans)
    ]
