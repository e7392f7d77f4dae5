"""Numbers in Markdown, compared with the records that they come from."""

import json
import re
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

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
    "block mean": "sparge-mean",
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
        "image": (cells[1] and "{} px", keys["img_size"]),
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


# By the first two column headers.
TABLES: dict[tuple[str, ...], Callable[[list[str], list[str], Row], list[str]]] = {
    ("method", "corner"): screening_row,
    ("tokens", "setting"): speed_row,
    ("`error=`", "4,096"): target_row,
    ("model", "image"): model_row,
    ("method", "agreement"): reduction_row,
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
