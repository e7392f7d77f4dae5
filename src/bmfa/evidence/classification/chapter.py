"""The chapters on classification and on token reduction, and the claims of the paper."""

from collections.abc import Iterable, Sequence

from bmfa.evidence.classification import figures
from bmfa.evidence.page import paper
from bmfa.evidence.page.blocks import (
    METHOD,
    Block,
    Chapter,
    Column,
    Commands,
    NotMeasured,
    Table,
    describe,
    illustrate,
    paragraph,
    with_paper,
)
from bmfa.evidence.page.claims import Verdict, claim, judge_direction
from bmfa.evidence.page.formats import format_number, format_percent, format_small
from bmfa.evidence.page.model_runs import (
    EMBEDDED,
    NEGLIGIBLE_KL,
    ModelRun,
    evaluation_runs,
    is_reduction,
    judged_run,
)
from bmfa.evidence.page.origins import describe_origin
from bmfa.evidence.page.record_set import (
    RecordSet,
    command_for,
    get_number,
    get_text,
    need_number,
    require_any,
)
from bmfa.records import Row

BMFA, RANDOM = paper.BMFA, paper.RANDOM
MEASURES = (
    Column("top1_percent", "Top-1 %", 2),
    Column("top5_percent", "Top-5 %", 2),
    Column("drop_pp", "Drop pp", 2),
    Column("agreement_percent", "Agreement %", 2),
    Column("output_kl", "Output KL", 3, small=True),
    Column("leaf_percent", "Leaf %", 2),
    Column("final_tokens", "Tokens left", 0),
    Column("gflops", "GFLOPs", 3),
    Column("images_per_second", "Images/s", 0),
    Column("images_per_second_end_to_end", "End to end", 0),
    Column("speedup", "Speed-up", 2),
)
PAPER_MEASURES = (
    Column("paper_top1_percent", "Paper: top-1 %", 3),
    Column("paper_drop_pp", "Drop pp", 3),
    Column("paper_agreement_percent", "Agreement %", 3),
    Column("paper_leaf_percent", "Leaf %", 3),
    Column("paper_speedup", "Speed-up", 3),
)
SMALL_DROP = 1.0  # percentage points of top-1
# Two methods have the same cost if their operations differ by at most this share: the share of tokens
# kept has steps of a token, which are about one percent.
SAME_COST = 0.02
SCHEDULE_COLUMNS = (
    Column("baseline", "Operations of", code=True),
    Column("schedule", "Schedule"),
    Column("images", "Images", 0),
    Column("gflops", "GFLOPs", 3),
    Column("agreement_percent", "Agreement %", 1),
    Column("output_kl", "Output KL", 3, small=True),
    Column("gain_pp", "Gain pp", 1),
    Column("interval", "95 % interval"),
)
LEAST_COMPARED = 3  # methods of the same cost that make a table
EQUAL_COST = tuple(
    column
    for key in ("gflops", "agreement_percent", "output_kl", "top1_percent", "drop_pp", "speedup")
    for column in MEASURES
    if column.key == key
)


def _content(records: RecordSet) -> list[Block]:
    runs = evaluation_runs(records)
    illustrations = [
        *illustrate(
            figures.top1,
            records,
            "Top-1 against leaf ratio, as in the paper's figure; the horizontal line is the full "
            "model. Up and to the left is better.",
        ),
        *illustrate(
            figures.accuracy,
            records,
            "Top-1 against speed, as in the paper's figure, for rules and reductions. Up and to the "
            f"right is better. {_timing_conditions(records)}",
        ),
    ]
    rules = [run.filter(lambda row: not is_reduction(row)) for run in runs]
    return [
        *paragraph(
            "Accuracy with the rules applied, and the cost: floating-point operations, images per "
            "second of the model alone and end to end, and the speed-up over the full model of the "
            "same run.",
            f"The paper classifies the 50,000 validation images of ImageNet with {paper.MODEL}.",
            *(_describe(run) for run in runs),
            *(_drops(run) for run in runs),
            *(describe(_fastest_rule, run) for run in runs),
        ),
        *(illustrations or [Commands(records.commands("evaluate"))]),
        *(_table(run) for run in rules if run.rows),
    ]


def _describe(run: ModelRun) -> str:
    best = get_number(run.full or {}, "top1_percent")
    accuracy = (
        "" if best is None else f"; the full model classifies {format_percent(best, 1)} correctly"
    )
    if run.model == EMBEDDED:
        return (
            f"The embedded model classifies {run.images:,} images of 24 classes{accuracy}. These "
            "are not the thousand classes of ImageNet, so the drops are not comparable with the paper's."
        )
    return f"{run.title} classifies {run.images:,} images here{accuracy}."


def _timing_conditions(records: RecordSet) -> str:
    """The machine and the batches of every evaluation that was timed."""
    sentences = []
    for record in records.of("evaluate"):
        settings, environment = record.settings, record.environment
        if not settings.get("repeats"):
            continue
        conditions = [
            str(environment.get("device_name", "")),
            f"torch {environment['torch']}" if "torch" in environment else "",
            str(settings.get("dtype", "")),
            f"batches of {settings['batch_size']}" if "batch_size" in settings else "",
            f"median of {settings['repeats']}",
        ]
        title = ModelRun(str(settings.get("model", EMBEDDED)), None, []).title
        sentences.append(f"{title}: {', '.join(part for part in conditions if part)}.")
    return " ".join(sentences)


def _drops(run: ModelRun) -> str:
    rows = [*map(run.row, (BMFA, RANDOM, paper.FIXED)), *run.family("optimal")]
    drops = [
        f"{format_number(drop, 2)} with {row['method']} "
        f"({format_percent(get_number(row, 'leaf_percent'), 1)} leaves)"
        for row in rows
        if (drop := get_number(row, "drop_pp")) is not None
    ]
    return f"{run.title}, drop of top-1 in percentage points: {', '.join(drops)}." if drops else ""


def _fastest_rule(run: ModelRun) -> str:
    best, method = _fastest(row for row in run.rows if not is_reduction(row))
    found = "the fastest rule" if best >= 1 else "the fastest, but slower than the full model"
    return f"{run.title}, speed: {method} is {found} ({format_number(best, 2)} times)."


def _fastest(rows: Iterable[Row]) -> tuple[float, str]:
    """The largest speed-up and its method; MissingValueError if no row was timed."""
    timed = (row for row in rows if get_number(row, "speedup") is not None)
    return max(require_any((need_number(r, "speedup"), get_text(r, "method")) for r in timed))


def _table(run: ModelRun) -> Block:
    """The measures of which any row has a number, and those of the paper."""
    rows, printed = run.all_rows, paper.IMAGENET
    measures = [m for m in MEASURES if any(get_number(row, m.key) is not None for row in rows)]
    return Table(
        f"{run.caption}; the paper: {paper.MODEL}, ImageNet",
        [METHOD, *measures, *PAPER_MEASURES],
        [with_paper(row, printed.get(get_text(row, "method"))) for row in rows],
    )


def _reductions(records: RecordSet) -> list[Block]:
    runs = figures.reduction_runs(records)
    if not runs:
        methods = "--method tome:8 --method free-energy:8"
        return [NotMeasured(f"bmfa evaluate {methods} --json evaluate.json")]
    printed = paper.IMAGENET["tome:8"]
    return [
        *paragraph(
            "Token reduction shortens the sequence for all later layers instead of screening the "
            "attention. The paper compares six methods in a figure and prints the numbers of one: "
            f"tome:8 loses {format_number(printed.drop_pp)} percentage points at "
            f"{format_number(printed.speedup)} times the speed of the full model. free-energy is the "
            "method of this library: it merges the tokens whose merge costs the least free energy, "
            "mass times distortion.",
            *(
                describe(_compare_with_tome, run, get_text(row, "method").partition(":")[2])
                for run in runs
                for row in run.family("free-energy")
            ),
            *(_indistinguishable(run) for run in runs),
        ),
        *illustrate(
            figures.reductions,
            records,
            "Agreement with the full model and output KL against the operations per image; the line "
            "is the cost of the full model. Up and to the left is better for the agreement, down and to "
            "the left for the KL.",
        ),
        *(block for run in runs for block in _equal_operations(run)),
        *_schedules(records),
        *(_table(run) for run in runs),
    ]


def _equal_operations(run: ModelRun) -> list[Block]:
    """The reductions with the operations of each setting of ToMe, by output KL."""
    blocks: list[Block] = []
    for tome in run.family("tome"):
        cost = get_number(tome, "gflops")
        rows = [] if cost is None else [r for r in run.rows if _costs_as_much(r, cost)]
        rows = [row for row in rows if get_number(row, "output_kl") is not None]
        if len(rows) < LEAST_COMPARED:
            continue
        rows.sort(key=lambda row: need_number(row, "output_kl"))
        best, name = rows[0], get_text(tome, "method")
        blocks += paragraph(
            f"{run.heading}, {len(rows)} reductions within {100 * SAME_COST:g} % of the "
            f"{format_number(cost)} GFLOPs of {name}: {get_text(best, 'method')} changes the output "
            f"least (KL {format_small(get_number(best, 'output_kl'))}, agreement "
            f"{format_percent(get_number(best, 'agreement_percent'), 1)}); {name} has "
            f"{format_small(get_number(tome, 'output_kl'))} and "
            f"{format_percent(get_number(tome, 'agreement_percent'), 1)}."
        )
        caption = f"{run.caption}: reductions at the operations of {name}, by output KL"
        measures = [m for m in EQUAL_COST if any(get_number(r, m.key) is not None for r in rows)]
        blocks.append(Table(caption, [METHOD, *measures], rows))
    return blocks


def _schedules(records: RecordSet) -> list[Block]:
    """Schedules of free-energy on images that did not choose them, beside ToMe."""
    rows = [
        {**row, "interval": f"{format_number(low, 1)} to {format_number(high, 1)}"}
        for row in records.rows("reduction", reported_on="both")
        if (low := get_number(row, "gain_low_pp")) is not None
        and (high := get_number(row, "gain_high_pp")) is not None
    ]
    if not rows:
        return []
    origins = "; ".join(dict.fromkeys(map(describe_origin, records.of("reduction"))))
    return [
        *paragraph(
            "The schedule of free-energy, the tokens that it removes in each layer, was chosen on "
            "images of ImageNet, so its lead in the tables above may be too favourable. Here half of "
            "the images chose a schedule (tuned) and the other half measured it, both ways round, at "
            "the operations of each baseline; fixed is the schedule that the library has. The gain is "
            "in agreement over the baseline on the same images, with its 95 % interval."
        ),
        Table(
            f"DeiT-Tiny, {origins}: schedules of free-energy on images that did not choose them",
            SCHEDULE_COLUMNS,
            rows,
        ),
        Commands(records.commands("reduction")),
    ]


def _costs_as_much(row: Row, gflops: float) -> bool:
    cost = get_number(row, "gflops")
    return cost is not None and abs(cost - gflops) <= SAME_COST * gflops


def _compare_with_tome(run: ModelRun, budget: str) -> str:
    ours, kl = run.values(f"free-energy:{budget}", "agreement_percent", "output_kl")
    theirs, their_kl = run.values(f"tome:{budget}", "agreement_percent", "output_kl")
    relation = "compared with"
    if max(kl, their_kl) < NEGLIGIBLE_KL:
        relation = "indistinguishable from"
    elif ours >= theirs and kl < their_kl:
        relation = "ahead of"
    elif ours <= theirs and kl > their_kl:
        relation = "behind"
    return (
        f"{run.title}, {budget} tokens per layer: free-energy has an agreement of "
        f"{format_percent(ours, 1)} (output KL {format_small(kl)}), {relation} tome with "
        f"{format_percent(theirs, 1)} ({format_small(their_kl)})."
    )


def _indistinguishable(run: ModelRun) -> str:
    """A warning if most reductions leave the output of the model unchanged."""
    unchanged = [row for row in run.rows if (get_number(row, "output_kl") or 0.0) < NEGLIGIBLE_KL]
    if 2 * len(unchanged) <= len(run.rows):
        return ""
    model = run.title_in_sentence
    return (
        f"{model[0].upper()}{model[1:]} hardly distinguishes the reductions: {len(unchanged)} of "
        f"{len(run.rows)} leave its output unchanged (KL below {NEGLIGIBLE_KL:g}), because a few tokens "
        "carry the class of its images."
    )


COMMAND = command_for("evaluate")
TOME = paper.IMAGENET["tome:8"]
COMPARED = (BMFA, RANDOM, paper.FIXED)


def _reduced(records: RecordSet) -> ModelRun:
    runs = evaluation_runs(records)
    return judged_run([run for run in runs if any(map(is_reduction, run.rows))])


def _accuracy_words(drops: Sequence[float]) -> str:
    ours, random, fixed = (format_number(drop, 2) for drop in drops)
    return f"{ours}; random {random}, fixed {fixed}"


@claim(
    "BMFA loses less accuracy than random retention or fixed blocks: drop of top-1 in percentage points",
    _accuracy_words([paper.IMAGENET[method].drop_pp for method in COMPARED]),
    COMMAND,
)
def _accuracy(records: RecordSet) -> tuple[str, Verdict, str]:
    run = judged_run(evaluation_runs(records))
    drops = [run.value(method, "drop_pp") for method in COMPARED]
    holds = drops[0] < min(drops[1:])
    verdict = judge_direction(holds)
    if run.is_papers_model and run.images == paper.IMAGENET_IMAGES:
        verdict = Verdict.REPRODUCED if holds else Verdict.NOT_AS_CLAIMED
    elif drops[0] == min(drops[1:]):
        verdict = Verdict.LEVEL
    best = format_percent(get_number(run.full or {}, "top1_percent"), 1)
    note = (
        f"{run.heading}, the full model {best}; the paper: {paper.MODEL}, "
        f"{paper.IMAGENET_IMAGES:,} images of ImageNet. {paper.FIT_NOTE}."
    )
    return _accuracy_words(drops), verdict, note


@claim(
    "Screening after all scores are computed gives no speed-up: speed relative to the full model",
    f"{format_number(paper.IMAGENET[BMFA].speedup, 2)} times",
    COMMAND,
)
def _no_speedup(records: RecordSet) -> tuple[str, Verdict, str]:
    run = judged_run(evaluation_runs(records))
    best, method = _fastest(r for r in run.rows if get_number(r, "leaf_percent") is not None)
    own = get_number(run.row(BMFA), "speedup")
    note = run.heading + ("" if own is None else f"; {BMFA} {format_number(own, 2)} times")
    verdict = Verdict.AGREES if best < 1 else Verdict.AHEAD
    note += ". The machine is named at the end of this page."
    return f"{format_number(best, 2)} times ({method})", verdict, note


@claim(
    "Merging preserves accuracy and is faster: drop of top-1 and speed-up of tome:8",
    f"{format_number(TOME.drop_pp, 2)} points, {format_number(TOME.speedup, 2)} times",
    COMMAND,
)
def _merging(records: RecordSet) -> tuple[str, Verdict, str]:
    run = _reduced(records)
    drop, speed = run.value("tome:8", "drop_pp"), get_number(run.row("tome:8"), "speedup")
    verdict = judge_direction(drop <= SMALL_DROP and (speed is None or speed > 1))
    note = f"{run.heading}; not the paper's machine{'' if speed is not None else ', not timed'}."
    return f"{format_number(drop, 2)} points, {format_number(speed, 2)} times", verdict, note


@claim(
    "The best merging at the operations of tome:8: agreement and output KL",
    f"{format_percent(TOME.agreement_percent, 2)} (tome:8, ImageNet)",
    COMMAND,
)
def _best_merging(records: RecordSet) -> tuple[str, Verdict, str]:
    run = _reduced(records)
    theirs, their_kl = run.values("tome:8", "agreement_percent", "output_kl")
    method = _free_energy_at_equal_cost(run)
    ours, kl = run.values(method, "agreement_percent", "output_kl")
    note = f"{run.heading}: tome:8 has {format_percent(theirs, 2)}, {format_small(their_kl)}"
    costs = [get_number(run.row(name), "gflops") for name in (method, "tome:8")]
    if None not in costs:
        note += f"; {format_number(costs[0])} against {format_number(costs[1])} GFLOPs"
    if max(kl, their_kl) < NEGLIGIBLE_KL:
        verdict, note = Verdict.LEVEL, f"{note}; both leave the output unchanged"
    elif ours >= theirs and kl < their_kl:
        verdict = Verdict.AHEAD
    elif ours >= theirs or kl < their_kl:
        verdict = Verdict.LEVEL
    else:
        verdict = Verdict.DIFFERS
    shown = f"{format_percent(ours, 2)}, {format_small(kl)} ({method})"
    return shown, verdict, f"{note}."


def _free_energy_at_equal_cost(run: ModelRun) -> str:
    """The setting of free-energy with most operations that are no more than those of tome:8."""
    limit = get_number(run.row("tome:8"), "gflops")
    costs = [
        (cost, get_text(row, "method"))
        for row in run.family("free-energy")
        if limit is not None
        and (cost := get_number(row, "gflops")) is not None
        and (1 - SAME_COST) * limit <= cost <= limit
    ]
    return max(costs)[1] if costs else "free-energy:8"


CLASSIFICATION = Chapter(
    "classification",
    "Classification",
    "evaluate",
    _content,
    (_accuracy, _no_speedup, _merging, _best_merging),
)
REDUCTIONS = Chapter("reductions", "Token reduction", "evaluate", _reductions)
