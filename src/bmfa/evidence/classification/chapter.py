"""The chapter on classification: accuracy of the rules, and what they cost."""

from collections.abc import Sequence
from typing import Any

from bmfa.evidence.page import figures, paper, runs
from bmfa.evidence.page.markup import Column, decimal, figure, made_by, paragraph, table, tiny
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.evidence.page.runs import Run
from bmfa.records import Row

MEASURES = (
    ("Top-1 %", "top1_percent", 2),
    ("Top-5 %", "top5_percent", 2),
    ("Drop pp", "drop_pp", 2),
    ("Agreement %", "agreement_percent", 2),
    ("Output KL", "output_kl", 3),
    ("Leaf %", "leaf_percent", 2),
    ("Tokens left", "final_tokens", 0),
    ("GFLOPs", "gflops", 3),
    ("Images/s", "images_per_second", 0),
    ("End to end", "images_per_second_end_to_end", 0),
    ("Speed-up", "speedup", 2),
)
PRINTED = (
    ("Paper: top-1 %", "top1_percent", 3),
    ("Drop pp", "drop_pp", 3),
    ("Agreement %", "agreement_percent", 3),
    ("Leaf %", "leaf_percent", 3),
    ("Speed-up", "speedup", 3),
)


def content(evidence: Evidence) -> str:
    """Accuracy of the rules, and what they cost."""
    found = runs.evaluations(evidence)
    intro = paragraph(
        "Accuracy with the rules in place, and the price: floating-point operations, images per "
        "second of the model alone and end to end, and the speed-up against the full model in the "
        "same run.",
        _frame(found),
        *(_drop(run) for run in found),
        *(_speed(run) for run in found),
    )
    shown = ""
    if figures.top1.drawable(evidence.records):
        caption = (
            "Top-1 against leaf ratio, as the paper's figure has it; the horizontal line is the full "
            "model. Up and to the left is better."
        )
        shown = figure(figures.top1, evidence, caption)
    if figures.accuracy.drawable(evidence.records):
        caption = (
            "Top-1 against speed, as the paper's figure has it, rules and reductions together. Up and "
            f"to the right is better. {_timing(evidence)}"
        )
        shown += figure(figures.accuracy, evidence, caption)
    tables = "".join(
        comparison(run, [row for row in run.rows if not runs.is_reduction(row)]) for run in found
    )
    return intro + shown + tables + ("" if shown else made_by(evidence, "evaluate"))


def _frame(found: Sequence[Run]) -> str:
    """What was classified here, and what in the paper."""
    theirs = f"The paper classifies ImageNet's 50,000 validation pictures with {paper.MODEL}."
    sentences = []
    for run in found:
        best = None if run.full is None else number(run.full, "top1_percent")
        said = "" if best is None else f", of which the full model gets {decimal(best, 1)} % right"
        if run.model == runs.EMBEDDED:
            sentences.append(
                f"The embedded model has {run.images:,} pictures of ten classes{said}: easier than "
                "ImageNet's thousand, so a drop of points is no drop of the paper's."
            )
        else:
            sentences.append(f"{run.title} has {run.images:,} pictures here{said}.")
    return " ".join([theirs, *sentences])


def _timing(evidence: Evidence) -> str:
    """Where and how the speeds were taken; one sentence for every evaluation."""
    said = []
    for record in evidence.records:
        settings, place = record.settings, record.environment
        if record.experiment != "evaluate" or not settings.get("repeats"):
            continue
        frame = [
            str(place.get("device_name", "")),
            f"torch {place['torch']}" if "torch" in place else "",
            str(settings.get("dtype", "")),
            f"batches of {settings['batch_size']}" if "batch_size" in settings else "",
            f"median of {settings['repeats']}",
        ]
        model = runs.Run(str(settings.get("model", runs.EMBEDDED)), None, []).title
        said.append(f"{model}: {', '.join(part for part in frame if part)}.")
    return " ".join(said)


def _drop(run: Run) -> str:
    """What the paper's rule, a coin and the optimal tree lose."""
    named = [paper.QUADRANTS[0], paper.RANDOM[0], paper.FIXED]
    optimal = [text(row, "method") for row in run.family("optimal")]
    said = [
        f"{decimal(run.value(method, 'drop_pp'), 2)} with {method} "
        f"({decimal(run.value(method, 'leaf_percent'), 1)} % leaves)"
        for method in [*named, *optimal]
        if run.value(method, "drop_pp") is not None
    ]
    return f"{run.title}, points lost: {', '.join(said)}." if said else ""


def _speed(run: Run) -> str:
    """Whether any rule is faster than the full model."""
    speeds = [(number(r, "speedup"), r) for r in run.rows if not runs.is_reduction(r)]
    known = [(speed, text(row, "method")) for speed, row in speeds if speed is not None]
    if not known:
        return ""
    best, method = max(known)
    words = (
        f"no rule is faster than the full model, {method} comes nearest"
        if best < 1
        else f"{method} is the fastest rule"
    )
    return f"{run.title}, speed: {words} ({decimal(best, 2)} times)."


def comparison(run: Run, rows: Sequence[Row]) -> str:
    """The columns that some row fills, and the paper's."""
    if not rows:
        return ""
    every = [*([run.full] if run.full is not None else []), *rows]
    ours = [m for m in MEASURES if any(number(row, m[1]) is not None for row in every)]
    columns = [Column("Method", code=True), *(Column(head, places) for head, _, places in ours)]
    columns += [Column(head, places, paper=True) for head, _, places in PRINTED]
    body = [
        [text(row, "method"), *(_shown(row).get(name) for _, name, _ in ours), *_printed(row)]
        for row in every
    ]
    return table(f"{run.heading}; the paper: {paper.MODEL}, ImageNet", columns, body)


def _shown(row: Row) -> Row:
    return row | {"output_kl": tiny(number(row, "output_kl"))}


def _printed(row: Row) -> list[Any]:
    printed = paper.IMAGENET.get(text(row, "method"))
    return [None if printed is None else getattr(printed, name) for _, name, _ in PRINTED]
