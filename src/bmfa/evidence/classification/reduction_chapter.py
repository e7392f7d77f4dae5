"""The chapter on token reduction: merging and dropping tokens."""

from bmfa.evidence.classification.chapter import comparison
from bmfa.evidence.closed_loop.figures import reduced
from bmfa.evidence.page import figures, paper, runs
from bmfa.evidence.page.markup import decimal, figure, paragraph, tiny
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.evidence.page.runs import Run


def content(evidence: Evidence) -> str:
    """Merging and dropping tokens."""
    found = reduced(evidence)
    if not found:
        command = "bmfa evaluate --method tome:8 --method free-energy:8 --json evaluate.json"
        return f'<p class="absent">Not measured here. Get it with <code>{command}</code></p>'
    printed = paper.IMAGENET["tome:8"]
    intro = paragraph(
        "Token reduction shortens the sequence for every later layer instead of screening attention. "
        f"The paper compares six methods in a figure and prints the numbers of one: tome:8 loses "
        f"{decimal(printed.drop_pp, 3)} points at {decimal(printed.speedup, 3)} times the speed of "
        "the full model. free-energy is this library's: it merges what costs the least free energy, "
        "mass times distortion.",
        *(_merging(run) for run in found),
        *(_unmoved(run) for run in found),
    )
    caption = (
        "Agreement with the full model and output KL against the operations of one picture. Up, or "
        "down for KL, and to the left is better; the line is the full model's cost."
    )
    tables = "".join(comparison(run, run.rows) for run in found)
    shown = figure(figures.reductions, evidence, caption)
    return intro + shown + tables


def _merging(run: Run) -> str:
    """free-energy against tome at every budget that both have."""
    sentences = []
    for row in run.family("free-energy"):
        budget = text(row, "method").partition(":")[2]
        other = run.row(f"tome:{budget}")
        pair = [
            (number(one, "agreement_percent"), number(one, "output_kl")) for one in (row, other)
        ]
        (ours, kl), (theirs, their_kl) = pair
        if ours is None or kl is None or theirs is None or their_kl is None:
            continue
        word = "against"
        if max(kl, their_kl) < runs.TELLING:
            word = "too near to tell from"
        elif ours >= theirs and kl < their_kl:
            word = "ahead of"
        elif ours <= theirs and kl > their_kl:
            word = "behind"
        sentences.append(
            f"{run.title}, {budget} tokens a layer: free-energy agrees on {decimal(ours, 1)} % "
            f"(output KL {tiny(kl)}), {word} tome's {decimal(theirs, 1)} % ({tiny(their_kl)})."
        )
    return " ".join(sentences)


def _unmoved(run: Run) -> str:
    """Where most reductions keep every class, the pictures do not tell them apart."""
    kept = [row for row in run.rows if (number(row, "output_kl") or 0.0) < runs.TELLING]
    if 2 * len(kept) <= len(run.rows):
        return ""
    model = run.title.lower() if run.model == runs.EMBEDDED else run.title
    return (
        f"The {model} tells few reductions apart: {len(kept)} of {len(run.rows)} leave its output "
        f"where it was (KL below {runs.TELLING:g}), as a few tokens carry the class of its pictures."
    )
