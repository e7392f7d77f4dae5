"""The page: an opening, the summary, the chapters and where it all was made."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from bmfa.evidence.page import figures, methods, paper, style
from bmfa.evidence.page.chapters import chapters, environment
from bmfa.evidence.page.claims import summary
from bmfa.evidence.page.markup import figure, paragraph
from bmfa.evidence.page.records import Evidence, in_order, text
from bmfa.records import Record

TITLE = "What attention loses when blocks become means"
OPENING = (
    "This page measures how much softmax mass attention loses when a block of tokens is replaced by "
    "its mean, how far the adaptive trees of the BMFA paper repair it, and which trees do better; "
    "the paper's numbers stand beside ours."
)
# The browser itself keeps the page from loading anything.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def build_page(records: Sequence[Record]) -> str:
    """One self-contained HTML page from any records; what is missing says how to get it."""
    evidence = Evidence(records)
    body = (
        _opening(evidence)
        + '<section id="summary"><h2>Summary</h2>'
        + summary(evidence)
        + "</section>"
        + _methods(evidence)
        + "".join(chapter.render(evidence) for chapter in chapters(evidence))
        + _environment(evidence)
    )
    sheet = style.css_variables() + files("bmfa.evidence.page").joinpath("page.css").read_text(
        "utf-8"
    )
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<title>{escape(TITLE)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{sheet}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )
    # Half of a surrogate pair, which JSON can hold, has no place in a file.
    return page.encode("utf-8", "replace").decode("utf-8")


def _opening(evidence: Evidence) -> str:
    links = "".join(
        f'<li><a href="#{chapter.name}">{escape(chapter.title)}</a></li>'
        for chapter in chapters(evidence)
    )
    caption = _gallery_caption(evidence)
    shown = figure(figures.gallery, evidence, caption) if evidence.has("gallery") else ""
    return (
        f'<header><h1>{escape(TITLE)}</h1><p class="opening">{escape(OPENING)}</p></header>{shown}'
        f'<nav aria-label="Chapters"><ul><li><a href="#summary">Summary</a></li>{links}'
        '<li><a href="#environment">Environment and versions</a></li></ul></nav>'
    )


def _gallery_caption(evidence: Evidence) -> str:
    """What the gallery shows, and where Algorithm 1 is blind in it."""
    rows = [r for r in evidence.rows("gallery") if text(r, "method") == paper.ALGORITHM_1]
    blind = [text(row, "placement") for row in rows if len(row.get("boxes", ())) == 1]
    where = f" It sees nothing where they are {' or '.join(blind)}." if blind else ""
    return (
        "A few bright tokens hold most of the softmax mass; each summary shows the mean score of its "
        f"leaves. Algorithm 1 of the paper compares the means of a block's quarters.{where} The "
        "optimal tree reads every score."
    )


def _methods(evidence: Evidence) -> str:
    names = [
        name
        for experiment in ("synthetic", "probe", "closed-loop", "evaluate")
        for name in in_order(evidence.rows(experiment), "method")
    ]
    content = methods.key(names)
    return f'<section id="methods"><h2>Methods</h2>{content}</section>' if content else ""


def _environment(evidence: Evidence) -> str:
    content = environment(evidence) if evidence.records else paragraph("No record is here.")
    return f'<section id="environment"><h2>Environment and versions</h2>{content}</section>'
