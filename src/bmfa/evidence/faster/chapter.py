"""The chapter on the speed of a patched model on large images."""

from typing import Any

from bmfa.evidence.faster.figures import best_setting, cpu_models, setting_title
from bmfa.evidence.methods import FULL
from bmfa.evidence.page import paper
from bmfa.evidence.page.chapter import Chapter
from bmfa.evidence.page.claims import Verdict, claim
from bmfa.evidence.page.formats import format_number
from bmfa.evidence.page.origins import describe_data
from bmfa.evidence.page.record_set import MissingValueError, RecordSet, need_number
from bmfa.records import Record, Row

MOST_IOU_CHANGE = 0.02  # a mask is called unchanged if its IoU changes by at most this


def values(records: RecordSet) -> dict[str, Any]:
    """Return the settings, the one that the figure shows, and the whole models timed on a CPU."""
    by_model = {rows[0]["model"]: rows for rows in cpu_models(records)}  # at the largest size
    timed = [record for record in records.of("bench") if cpu_models(RecordSet(record))]
    return {
        "settings": records.rows("faster", what="setting"),
        "full": records.by_method("faster", what="setting")[FULL],
        "best": _best(records),
        "title": setting_title,
        "environment": records.of("faster")[-1].environment,
        "models": [(rows[0], rows[-1]) for rows in by_model.values()],
        "timed": RecordSet(timed),
        "data": describe_data(timed),
    }


def _best(records: RecordSet) -> Row:
    """The row of the setting that the figure shows."""
    name = best_setting(records.rows("faster", what="setting"), MOST_IOU_CHANGE)
    found = records.by_method("faster", what="setting")
    if name not in found:
        raise MissingValueError(name)
    return found[name]


PROTOTYPE = paper.IMAGENET[paper.BMFA].speedup


@claim(
    "Leaf ratio is not yet a speed-up: end-to-end speed relative to the full model",
    f"{PROTOTYPE:g} (prototype, DeiT-Tiny)",
    "faster",
)
def end_to_end(records: RecordSet) -> tuple[str, Verdict, str, list[Record]]:
    best = _best(records)
    speedup, change = need_number(best, "speedup"), need_number(best, "mask_iou_change")
    ours = (
        f"{format_number(speedup, 2)}, mask IoU {'+' if change >= 0 else ''}{format_number(change)}"
    )
    ahead = speedup > 1 and abs(change) <= MOST_IOU_CHANGE
    tokens = format_number(need_number(best, "n"), 0)
    note = (
        f"The embedded model at {tokens} tokens with tiles and {setting_title(best)}; the paper "
        "replaces scores after computing all of them, at 196 tokens."
    )
    return ours, Verdict.AHEAD if ahead else Verdict.AGREES, note, records.of("faster")


FASTER = Chapter(
    "faster",
    "Faster, with the error known",
    "faster/faster.html.j2",
    "faster",
    (end_to_end,),
    values,
)
