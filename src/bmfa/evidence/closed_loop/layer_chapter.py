"""The chapter on layers: how many can be screened, and which one alone matters."""

from bmfa.evidence.page import figures, paper, runs
from bmfa.evidence.page.markup import decimal, figure, paragraph
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.evidence.page.runs import Run


def content(evidence: Evidence) -> str:
    """How far outputs move the more layers are screened, and which layer alone matters."""
    several, single = runs.depths(evidence), runs.depths(evidence, single=True)
    if not several and not single:
        command = "bmfa closed-loop --layers last-2 --layers last-4 --layers all --json layers.json"
        return f'<p class="absent">Not measured here. Get it with <code>{command}</code></p>'
    intro = paragraph(
        "The same rules in more and more layers, counted from the last, then in one layer alone. The "
        "paper shows its figure in a supplement that is not available; in its text, every method "
        "degrades with more layers and its rule stays ahead of random retention (last-2, last-4, last-8 "
        "and all layers).",
        *(_persists(run, [c for c in choices if not run.takes_all(c)]) for run, choices in several),
        *(_weakest(run) for run, _ in single),
    )
    caption = (
        "Agreement (left) and output KL (right). The embedded model has eight layers: its last-8 would "
        "be all of them."
    )
    return intro + figure(figures.layers, runs.of_depths(evidence, True), caption)


def persists(run: Run, choices: list[str]) -> list[str]:
    """The choices of layers in which the paper's rule keeps more than random retention.

    Where both agree alike, the output KL decides.
    """
    ahead = []
    for choice in choices:
        rule, coin = (
            _kept(run, method, choice) for method in (paper.QUADRANTS[0], paper.RANDOM[0])
        )
        if rule is not None and coin is not None and rule > coin:
            ahead.append(choice)
    return ahead


def _kept(run: Run, method: str, choice: str) -> tuple[float, float] | None:
    """Agreement and the negative of the output KL: more is better."""
    for row in run.rows:
        if text(row, "method") == method and text(row, "layers") == choice:
            agreement, kl = number(row, "agreement_percent"), number(row, "output_kl")
            return None if agreement is None else (agreement, -(kl or 0.0))
    return None


def _persists(run: Run, choices: list[str]) -> str:
    ahead = persists(run, choices)
    if not ahead:
        return ""
    where = "in all of them" if len(ahead) == len(choices) else f"in {', '.join(ahead)}"
    return (
        f"{run.title}, {', '.join(choices)}: {paper.QUADRANTS[0]} is ahead of {paper.RANDOM[0]} "
        f"{where}."
    )


def _weakest(run: Run) -> str:
    """The layer in which a mean does most harm."""
    rows = [row for row in run.rows if text(row, "method") == "global-mean"]
    worst = max(rows, key=lambda row: number(row, "output_kl") or 0.0, default=None)
    if worst is None:
        return ""
    return (
        f"One mean for all keys does most harm in layer {text(worst, 'layers')} of the "
        f"{run.title.lower() if run.model == runs.EMBEDDED else run.title} (output KL "
        f"{decimal(number(worst, 'output_kl'), 3)})."
    )
