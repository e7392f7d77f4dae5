"""What the paper claims of classification, and of token reduction beside it."""

from bmfa.evidence.closed_loop.claims import FIT, where
from bmfa.evidence.page import paper, runs
from bmfa.evidence.page.markup import decimal, tiny
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.evidence.page.runs import Run
from bmfa.evidence.page.verdicts import Claim, Verdict, direction, missing

EXPERIMENT = "evaluate"


def claims(evidence: Evidence) -> list[Claim]:
    """The claims in the order of the chapters."""
    found = runs.evaluations(evidence)
    run = runs.papers_first(found)
    merged = [one for one in found if any(map(runs.is_reduction, one.rows))]
    return [_accuracy(run), _speed(run), *_reductions(runs.papers_first(merged))]


def _accuracy(run: Run | None) -> Claim:
    claim = "BMFA costs less accuracy than chance or a fixed grid: drop of top-1 in points"
    methods = (paper.QUADRANTS[0], paper.RANDOM[0], paper.FIXED)
    words = _drops([paper.IMAGENET[method].drop_pp for method in methods])
    drops = [] if run is None else [run.value(method, "drop_pp") for method in methods]
    known = [drop for drop in drops if drop is not None]
    if run is None or len(known) < len(methods):
        return missing(claim, words, EXPERIMENT)
    held = known[0] < known[1] and known[0] < known[2]
    level = known[0] <= known[1] and known[0] <= known[2]
    verdict = direction(held)
    if run.papers and run.images == paper.IMAGENET_PICTURES:
        verdict = Verdict.REPRODUCED if held else Verdict.NOT_AS_CLAIMED
    elif level and not held:
        verdict = Verdict.LEVEL
    best = number(run.full or {}, "top1_percent")
    note = (
        f"{where(run)}, the full model {decimal(best, 1)} %; the paper: {paper.MODEL}, ImageNet's "
        f"{paper.IMAGENET_PICTURES:,}. {FIT}."
    )
    return Claim(claim, words, _drops(known), verdict, note)


def _drops(values: list[float]) -> str:
    rule, coin, fixed = (decimal(value, 2) for value in values)
    return f"{rule}; chance {coin}, fixed {fixed}"


def _speed(run: Run | None) -> Claim:
    claim = "Screening after all scores are computed is no speed-up: images per second of the full"
    rule = paper.QUADRANTS[0]
    words = f"{decimal(paper.IMAGENET[rule].speedup, 2)} times"
    rows = (
        [] if run is None else [row for row in run.rows if number(row, "leaf_percent") is not None]
    )
    speeds = [(number(row, "speedup"), text(row, "method")) for row in rows]
    known = [(speed, method) for speed, method in speeds if speed is not None]
    if run is None or not known:
        return missing(claim, words, EXPERIMENT)
    best, method = max(known)
    verdict = Verdict.AGREES if best < 1 else Verdict.AHEAD
    own = run.value(rule, "speedup")
    note = f"{where(run)}" + ("" if own is None else f"; {rule} {decimal(own, 2)} times")
    note += ". The machine is named at the end of this page."
    return Claim(claim, words, f"{decimal(best, 2)} times ({method})", verdict, note)


def _reductions(run: Run | None) -> list[Claim]:
    printed = paper.IMAGENET["tome:8"]
    claim = "Merging keeps accuracy and gains speed: tome:8, drop and speed-up"
    words = f"{decimal(printed.drop_pp, 2)} points, {decimal(printed.speedup, 2)} times"
    drop, speed = (None if run is None else run.value("tome:8", c) for c in ("drop_pp", "speedup"))
    if run is None or drop is None:
        return [missing(claim, words, EXPERIMENT), _free_energy(run)]
    verdict = direction(drop <= 1.0 and (speed is None or speed > 1))
    said = f"{decimal(drop, 2)} points, {decimal(speed, 2)} times"
    note = f"{where(run)}; another machine than the paper's{'' if speed is not None else ', not timed'}."
    return [Claim(claim, words, said, verdict, note), _free_energy(run)]


def _free_energy(run: Run | None) -> Claim:
    claim = "The best merging at 8 tokens a layer: agreement and output KL"
    printed = paper.IMAGENET["tome:8"].agreement_percent
    words = f"{decimal(printed, 2)} % (tome:8, ImageNet)"
    methods = ("free-energy:8", "tome:8")
    pairs = [
        (run.value(m, "agreement_percent"), run.value(m, "output_kl")) if run else (None, None)
        for m in methods
    ]
    (ours, kl), (theirs, their_kl) = pairs
    if run is None or ours is None or kl is None or theirs is None or their_kl is None:
        return missing(claim, words, EXPERIMENT)
    verdict = Verdict.DIFFERS
    if ours >= theirs and kl < their_kl:
        verdict = Verdict.AHEAD
    elif ours >= theirs or kl < their_kl:
        verdict = Verdict.LEVEL
    note = f"{where(run)}: tome:8 has {decimal(theirs, 2)} %, {tiny(their_kl)}"
    if max(kl, their_kl) < runs.TELLING:
        verdict, note = Verdict.LEVEL, f"{note}; both leave the output where it was"
    said = f"{decimal(ours, 2)} %, {tiny(kl)} (free-energy:8)"
    return Claim(claim, words, said, verdict, f"{note}.")
