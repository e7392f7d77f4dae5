"""The chapter on single pictures inside a model."""

from bmfa.evidence.page import figures
from bmfa.evidence.page.markup import Column, decimal, figure, paragraph, table, tiny
from bmfa.evidence.page.records import Evidence, number, text
from bmfa.records import Row

MEASURES = (
    ("Gap of one mean", "gap", 3),
    ("E", "error", 4),
    ("Certificate", "certificate", 4),
    ("Leaf %", "leaf_percent", 1),
    ("Mass moved %", "moved_percent", 2),
    ("Output KL", "output_kl", 3),
)
KEPT = 0.05  # an E this small moves no more than a sixth of the mass (Pinsker)


def content(evidence: Evidence) -> str:
    """What the class token attends to, and what the trees of several rules keep of it."""
    rows = evidence.rows("picture")
    intro = paragraph(
        "What a model looks at: the attention of one query over the picture, exact and on the trees "
        "of several rules. E is the divergence of that attention, over all keys; the certificate is "
        "a proven bound on it, from the exact scores where the rule reads them, else from block "
        "statistics of the keys, which is loose.",
        _difference(evidence),
        _changed(rows),
    )
    caption = (
        "Bright tokens are attended to; lines are the borders of the leaves. Under every tree: E, leaf "
        "ratio, and the class that the model says with the last layers screened."
    )
    columns = [Column("Picture"), Column("Method", code=True)]
    columns += [Column(head, places) for head, _, places in MEASURES]
    columns += [Column("Full says"), Column("Screened says")]
    body = [_row(row) for row in rows]
    return (
        intro
        + figure(figures.pictures, evidence, caption)
        + table("The same in numbers", columns, body)
    )


def _row(row: Row) -> list[object]:
    classes = [text(row, f"{which}_class") for which in ("full", "screened")]
    row = row | {"output_kl": tiny(number(row, "output_kl"))}
    return [
        text(row, "title"),
        text(row, "method"),
        *(row.get(n) for _, n, _ in MEASURES),
        *classes,
    ]


def _difference(evidence: Evidence) -> str:
    """The paper's cases are others; how these were chosen."""
    count = evidence.setting("picture", "chosen_from")
    theirs = (
        "The paper's four cases are COCO instances with scores made from annotations, which are "
        "above; it shows no attention of a model."
    )
    if count is None:
        return theirs
    return (
        f"{theirs} Of the first {count} embedded pictures these are the one with the smallest figure, "
        "the one with the most centred, the one with most clutter, and "
        f"{evidence.setting('picture', 'failure')}."
    )


def _changed(rows: list[Row]) -> str:
    """Which rules change what the model says, and which do not."""
    changed = [row for row in rows if text(row, "full_class") != text(row, "screened_class")]
    if not changed:
        return "No rule shown here changes what the model says of these pictures."
    said = [
        f"{text(row, 'method')} turns {text(row, 'full_class')} into {text(row, 'screened_class')} "
        f"(E {decimal(number(row, 'error'), 2)})"
        for row in changed
    ]
    kept = any((number(row, "error") or 0.0) < KEPT for row in changed)
    elsewhere = (
        " Where the attention shown is kept all the same, the harm is done in other queries, heads "
        "or layers."
        if kept
        else ""
    )
    return f"Where the class changes: {'; '.join(said)}.{elsewhere}"
