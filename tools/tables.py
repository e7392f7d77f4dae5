"""Write the tables of README.md, docs/benchmarks.md and docs/merging.md from the records.

    python tools/tables.py           writes the tables; `make docs` does so
    python tools/tables.py --check   writes nothing, and ends with status 1 if a table would change

A table follows a marker in the text, `<!-- table: NAME -->`, and a blank line; NAME is a key of TABLES.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TEXTS = (ROOT / "README.md", *(ROOT / "docs" / name for name in ("benchmarks.md", "merging.md")))
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n\n)(?:\|.*\n)*")

Row = dict[str, Any]
Lines = list[list[str]]  # the titles of the columns, then the cells of every row

SAME_COST = 0.02  # operations of two methods that count as equal
DEIT, SALIENCY = "DeiT-Tiny", "ViT-S/14, saliency"
GPU_ATTENTION = {DEIT: "attention-h200", SALIENCY: "attention-saliency-h200"}
CPU_ATTENTION = {DEIT: "attention-cpu", SALIENCY: "attention-saliency-cpu"}
CPU_MODELS = {DEIT: "model-cpu", SALIENCY: "model-saliency-cpu"}


@lru_cache(maxsize=64)
def record(name: str) -> Row:
    """Return a record of `records/`."""
    content: Row = json.loads((ROOT / "records" / f"{name}.json").read_text("utf-8"))
    return content


def rows(name: str, **keys: Any) -> list[Row]:
    """Return the rows of a record with these values."""
    return [row for row in record(name)["rows"] if all(row.get(k) == v for k, v in keys.items())]


def row(name: str, **keys: Any) -> Row:
    """Return the only row of a record with these values."""
    found = rows(name, **keys)
    if len(found) != 1:
        raise LookupError(f"records/{name}.json has {len(found)} rows with {keys}; expected one")
    return found[0]


def times(factor: float) -> str:
    """Format a speed relative to dense attention."""
    return f"{factor:.2f}x" if factor < 10 else f"{factor:.1f}x"


def milliseconds(value: float) -> str:
    """Format a time with three significant digits or all digits before the point."""
    return f"{value:#.3g}" if value < 100 else f"{value:,.0f}"


def cells(columns: dict[str, Callable[[Row], str]], found: Iterable[Row]) -> Lines:
    """Return the titles, and the cells of every row."""
    return [[*columns], *([cell(one) for cell in columns.values()] for one in found)]


def blank_repeats(lines: Lines, count: int) -> Lines:
    """Empty each of the first cells that repeats the one above, as long as all before it do."""
    shown = [lines[0]]
    for above, line in pairwise(lines):
        same = next((i for i in range(count) if line[i] != above[i]), count)
        shown.append([""] * same + line[same:])
    return shown


SCREENING = {
    "block mean": "block-mean",
    "mean + variance / 2": "mean-variance",
    "fixed quadtree, depth 2": "fixed-depth:2",
    "Algorithm 1, `gamma:0.005`": "gamma:0.005",
    "look-ahead 2, `gamma-h2:0.005`": "gamma-h2:0.005",
    **{f"`{m}`": m for m in ("certified:0.005", "mass:0.002", "optimal:0.001", "optimal:0.005")},
}


def screening() -> Lines:
    """Underestimates and leaves of a method, by placement and on instances."""
    placements = ("corner", "centred", "scattered")
    lines = [["method", *placements, "instances", "P95 of instances"]]
    for title, method in SCREENING.items():
        probed = row("probe-embedded", method=method, group="all")
        found = [rows("synthetic", method=method, placement=place) for place in placements]
        measured = [one[0] if one else None for one in found] + [probed]
        values = [one and f"{one['mean_gap']:.3f} ({one['leaf_percent']:.1f})" for one in measured]
        lines.append([title, *(value or "" for value in values), f"{probed['p95_gap']:.3f}"])
    return lines


def gpu_attention(settings: Sequence[tuple[int, str]]) -> Lines:
    """One setting of attention of DeiT-Tiny at one number of tokens in each row."""

    def if_tiled(text: str, otherwise: str = "") -> Callable[[Row], str]:
        return lambda one: text.format(**one) if one["ran"] == "tiled" else otherwise

    columns: dict[str, Callable[[Row], str]] = {
        "tokens": lambda one: f"{one['n']:,}",
        "setting": lambda one: f"`{one['method'].removeprefix('tiled-')}`",
        "tiles expanded": if_tiled("{density_percent:.0f} %", "dense"),
        "error": if_tiled("{error_l2_percent:.1f} %"),
        "P95 of queries": if_tiled("{error_p95_query_percent:.0f} %"),
        "ms": lambda one: f"{one['milliseconds']:.3f}",
        "dense ms": lambda one: f"{dense(one)['milliseconds']:.3f}",
        "speed": lambda one: times(one["speedup"]),
        "without graphs": lambda one: times(one["speedup_eager"]),
    }

    def dense(one: Row) -> Row:
        return row("attention-h200", what="attention", n=one["n"], method="dense")

    found = (row("attention-h200", what="attention", n=n, method=name) for n, name in settings)
    return cells(columns, found)


GPU_SETTINGS = [
    (n, method)
    for n in (4096, 16384, 65536)
    for method in (
        "tiled-tiles:0",
        "tiled-tiles:0.01",
        "tiled-tiles:0.06",
        "tiled-tiles:0.2",
        "auto",
    )
]


def error_at_speed(found: Sequence[Row], speedup: float) -> float | None:
    """Relative L2 error in percent at a speed, or None if no setting is that fast.

    Between neighbouring settings on the frontier the logarithm of the error is linear in the logarithm
    of the speed. If the slowest setting is faster than the speed, its error is returned.
    """
    frontier: list[tuple[float, float]] = []  # speed and error rise
    points = sorted(((one["speedup"], one["error_l2_percent"]) for one in found), reverse=True)
    for speed, error in points:
        if not frontier or error < frontier[0][1]:
            frontier.insert(0, (speed, error))
    if not frontier or frontier[-1][0] < speedup:
        return None
    speeds, errors = zip(*frontier, strict=True)
    return float(np.exp(np.interp(np.log(speedup), np.log(speeds), np.log(errors))))


EQUAL_SPEEDS = {
    (DEIT, 4096): (2.0, 1.5),
    (DEIT, 16384): (6.0, 3.5, 2.5),
    (DEIT, 65536): (8.0, 6.0, 4.0),
    (SALIENCY, 4096): (1.7, 1.6),
    (SALIENCY, 16384): (6.0, 4.2, 3.5),
}


def equal_speed() -> Lines:
    """Errors of tangent tiles and of mean tiles at one speed, interpolated between settings."""
    lines = [["model", "tokens", "speed", "tangent tiles", "mean tiles"]]
    for (model, n), speeds in EQUAL_SPEEDS.items():
        measured = rows(GPU_ATTENTION[model], what="attention", n=n)
        for speed in speeds:
            line = [model, f"{n:,}", f"{speed}x"]
            for kind in ("tiled-", "mean-tiles:"):
                found = [one for one in measured if one["method"].startswith(kind)]
                error = error_at_speed(found, speed)
                line.append("not reached" if error is None else f"{error:.1f} %")
            lines.append(line)
    return blank_repeats(lines, 2)


def by_model(
    title: str,
    methods: dict[str, str],
    columns: Sequence[tuple[str, int]],
    cell: Callable[[Row], str],
) -> Lines:
    """Return a row for each method, and a column for each model and number of tokens."""
    lines = [[title, *(f"{model}, {n:,}" for model, n in columns)]]
    for shown, method in methods.items():
        keys = {"what": "attention", "method": method}
        found = (row(GPU_ATTENTION[model], n=n, **keys) for model, n in columns)
        lines.append([shown, *map(cell, found)])
    return lines


def methods() -> Lines:
    """Error and speed of a method of any kind."""
    names = ("tiles:0", "tiles:0.06", "mean-tiles:0.1", "mean-tiles:0.2", "topk:0.2", "monarch:1")
    listed = {f"`{m}`": f"tiled-{m}" if m.startswith("tiles") else m for m in names}
    columns = [(model, n) for model in (DEIT, SALIENCY) for n in (4096, 16384)]
    text = "{error_l2_percent:.1f} % ({speedup:.1f}x)"
    return by_model("method", listed, columns, lambda one: text.format(**one))


def targets() -> Lines:
    """Error of the output that a target gives, tiles expanded for it, and speed."""
    listed = {f"{target:g}": f"tiled-error:{target:g}" for target in (0.02, 0.03, 0.05, 0.1)}
    columns = [(DEIT, 16384), (DEIT, 65536), (SALIENCY, 4096), (SALIENCY, 16384)]
    text = "{error_l2_percent:.1f} % ({density_percent:.0f} %, {speedup:.1f}x)"
    return by_model("`error=`", listed, columns, lambda one: text.format(**one))


def kernels() -> Lines:
    """Each Triton kernel of a call with 16,384 tokens, against its limit, without historical ones."""
    columns: dict[str, Callable[[Row], str]] = {
        "kernel": "`{kernel}`".format_map,
        "launches": "{launches}".format_map,
        "ms": "{milliseconds:.3f}".format_map,
        "limit, ms": "{limit_milliseconds:.3f}".format_map,
        "limit / time": "{limit_percent:.0f} %".format_map,
    }
    every = rows("attention-h200", what="kernel", n=16384)
    return cells(columns, (one for one in every if not one["kernel"].startswith("mean_")))


def gpu_models_short() -> Lines:
    """The model of `gpu_models` with two targets."""
    lines = [["model, image", "full", "`error=0.03`", "`error=0.05`", "error of the features"]]
    for size in (1792, 3584):
        every = rows("model-saliency-h200", img_size=size)
        full = min(one["milliseconds_eager"] for one in every if one["method"].startswith("full"))
        found = [
            row("model-saliency-h200", img_size=size, method=f"error:{e}") for e in (0.03, 0.05)
        ]
        errors = " and ".join(f"{one['error_l2_percent']:.1f} %" for one in found)
        speeds = [times(one["speedup_eager"]) for one in found]
        lines.append([f"{SALIENCY}, {size:,} px", f"{full:.1f} ms", *speeds, errors])
    return lines


def gpu_models() -> Lines:
    """A whole model at two sizes, calls one by one."""
    lines = [["model", "image", "full", "setting", "tiles expanded", "patched", "speed"]]
    lines[0] += ["error of the features", "mask IoU"]
    settings = [f"error:{target:g}" for target in (0.02, 0.03, 0.05, 0.1)]
    for size in (1792, 3584):
        every = rows("model-saliency-h200", img_size=size)
        full = min(one["milliseconds_eager"] for one in every if one["method"].startswith("full"))
        for method in (*settings, "leaves:0.1", "leaves:0.2", "mean-tiles:0.184"):
            one = row("model-saliency-h200", img_size=size, method=method)
            expanded = (
                f"{one['density_percent']:.0f} %" if one.get("tiled_layers") != 0 else "dense"
            )
            line = [SALIENCY, f"{size:,} px", f"{full:.1f} ms", f"`{method}`", expanded]
            line += [f"{one['milliseconds_eager']:.1f} ms", times(one["speedup_eager"])]
            lines.append([*line, f"{one['error_l2_percent']:.1f} %", f"{one['mask_iou']:.2f}"])
    return blank_repeats(lines, 3)


def cpu_attention(model: str, threads: Sequence[int | None]) -> Lines:
    """Settings of attention on a CPU, on these numbers of threads; None if the record has one."""
    lines = [["tokens", "setting", "tiles expanded", "error"]]
    for count in threads:
        suffix = {None: "", 1: ", 1 thread"}.get(count, f", {count} threads")
        lines[0] += [f"ms{suffix}", f"speed{suffix}"]
    few = ("exact", "tiled-error:0.03")
    many = ("exact", "tiled-tiles:0", "tiled-error:0.03", "tiled-error:0.05", "tiled-error:0.1")
    many += ("eager-error:0.03",)
    for n, listed in ((1024, few), (4096, many), (16384, many)):
        for method in listed:
            keys = {"what": "attention", "n": n, "method": method}
            timed = [row(CPU_ATTENTION[model], threads=count, **keys) for count in threads]
            line = [f"{n:,}", f"`{method.removeprefix('tiled-')}`"]
            one = timed[0]
            line += [f"{one['density_percent']:.0f} %", f"{one['error_l2_percent']:.1f} %"]
            for each in timed:
                line += [milliseconds(each["milliseconds"]), times(each["speedup"])]
            lines.append(line)
    return blank_repeats(lines, 1)


def cpu_models(sizes: Sequence[tuple[str, int]]) -> Lines:
    """Whole models on a CPU, full and with two targets."""
    lines = [["model, image", "full", "`error=0`", "`error=0.03`", "error of the features"]]
    for model, size in sizes:
        full, exact, tiles = (
            row(CPU_MODELS[model], img_size=size, method=method)
            for method in ("full", "error:0", "error:0.03")
        )
        line = [f"{model}, {size:,} px", f"{full['milliseconds']:,.0f} ms"]
        line += [times(exact["speedup"]), times(tiles["speedup"])]
        lines.append([*line, f"{tiles['error_l2_percent']:.1f} %"])
    return lines


def reductions() -> Lines:
    """Reductions in DeiT-Tiny."""
    columns: dict[str, Callable[[Row], str]] = {
        "method": "`{method}`".format_map,
        "agreement": "{agreement_percent:.1f} %".format_map,
        "output KL": "{output_kl:.4f}".format_map,
        "speed": lambda one: times(one["speedup"]),
    }
    names = ("tome:8", "free-energy:8", "tome:12", "free-energy:12")
    return cells(columns, (row("evaluate-deit-h200", method=m, timed="graph") for m in names))


def schedules() -> Lines:
    """A baseline, and schedules of its operations, on each half of the images and on both."""
    lines = [["GFLOPs of", "images", "schedule", "GFLOPs", "agreement", "output KL"]]
    lines[0].append("gain in points")
    for baseline in ("tome:8", "tome:12"):
        for images in ("odd", "even", "both"):
            for kind in ("baseline", "fixed", "tuned"):
                keys = {"baseline": baseline, "schedule": kind, "reported_on": images}
                one = row("reduction-deit-cpu", **keys)
                schedule = f"`{baseline}`" if kind == "baseline" else kind
                gain = "{gain_pp:.1f} ({gain_low_pp:.1f} to {gain_high_pp:.1f})"
                text = "{gflops:.3f}|{agreement_percent:.1f} %|{output_kl:.4f}"
                line = [f"`{baseline}`", images, schedule, *text.format(**one).split("|")]
                lines.append([*line, "" if kind == "baseline" else gain.format(**one)])
    return blank_repeats(lines, 2)


def policies() -> Lines:
    """Reductions in DeiT-Tiny with about the operations of a setting of ToMe, by output KL."""
    name, lines = "evaluate-rules-deit-h200", [["GFLOPs of", "policy", "GFLOPs", "agreement"]]
    lines[0] += ["output KL", "speed"]
    for baseline in ("tome:8", "tome:12"):
        cost = row(name, method=baseline)["gflops"]
        similar = [one for one in rows(name) if abs(one["gflops"] - cost) <= SAME_COST * cost]
        for one in sorted(similar, key=lambda one: one["output_kl"]):
            text = "`{method}`|{gflops:.3f}|{agreement_percent:.1f} %|{output_kl:.4f}".format(**one)
            lines.append([f"`{baseline}`", *text.split("|"), times(one["speedup"])])
    return blank_repeats(lines, 1)


TABLES: dict[str, Callable[[], Lines]] = {
    "screening": screening,
    "gpu-attention": lambda: gpu_attention(GPU_SETTINGS),
    "equal-speed": equal_speed,
    "methods": methods,
    "targets": targets,
    "kernels": kernels,
    "gpu-models": gpu_models,
    "gpu-models-short": gpu_models_short,
    "reductions": reductions,
    "schedules": schedules,
    "policies": policies,
    "cpu-attention": partial(cpu_attention, DEIT, (1, 2)),
    "cpu-attention-saliency": partial(cpu_attention, SALIENCY, (None,)),
    "cpu-models": lambda: cpu_models([(DEIT, 512), (DEIT, 1024), (DEIT, 2048), (SALIENCY, 896)]),
    "cpu-models-short": lambda: cpu_models([(DEIT, 1024), (DEIT, 2048), (SALIENCY, 896)]),
}


def markdown(lines: Lines) -> str:
    """Return a table in Markdown."""
    head, *body = (f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
    rule = "|" + "---|" * len(lines[0])
    return "\n".join((head, rule, *(line.replace("|  |", "| |") for line in body))) + "\n"


def with_tables(text: str) -> str:
    """Return a text with its tables as the records have them."""
    return MARKED.sub(lambda found: found[1] + markdown(TABLES[found[2]]()), text)


def main() -> int:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path in TEXTS if with_tables(text := path.read_text("utf-8")) != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is not' if check else 'is now'} as the records have it")
        if not check:
            path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
