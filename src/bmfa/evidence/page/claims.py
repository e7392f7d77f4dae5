"""The summary: what the paper claims, what is measured here, and the verdict."""

from bmfa.evidence.ablation import claims as ablation_claims
from bmfa.evidence.classification import claims as classification_claims
from bmfa.evidence.closed_loop import claims as closed_loop_claims
from bmfa.evidence.page.markup import code, paragraph, prose
from bmfa.evidence.page.records import Evidence
from bmfa.evidence.page.verdicts import LEGEND, Claim
from bmfa.evidence.probes import claims as probe_claims
from bmfa.evidence.synthetic import claims as synthetic_claims

HEADS = ("Claim", "Paper", "Ours", "Verdict", "On the difference")


def claims(evidence: Evidence) -> list[Claim]:
    """All claims of the paper that this page can judge, in the order of its chapters."""
    return [
        *synthetic_claims.claims(evidence),
        *probe_claims.claims(evidence),
        *ablation_claims.claims(evidence),
        *closed_loop_claims.claims(evidence),
        *classification_claims.claims(evidence),
    ]


def summary(evidence: Evidence) -> str:
    """What the verdicts mean, and the table; on a narrow screen every row is a card."""
    heads = "".join(f'<th scope="col">{head}</th>' for head in HEADS)
    rows = "".join(_row(claim) for claim in claims(evidence))
    return (
        paragraph(LEGEND)
        + f'<table class="summary"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _row(claim: Claim) -> str:
    sign, word = claim.verdict.value
    kind = word.replace(" ", "-")
    command = f" {code(claim.command)}" if claim.command else ""
    return (
        f'<tr><th scope="row">{prose(claim.claim)}</th>'
        f'<td data-head="Paper">{prose(claim.printed)}</td>'
        f'<td data-head="Ours">{prose(claim.ours)}</td>'
        f'<td><span class="verdict {kind}"><span aria-hidden="true">{sign}</span> {word}</span></td>'
        f"<td>{prose(claim.note)}{command}</td></tr>"
    )
