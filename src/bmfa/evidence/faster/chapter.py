"""The chapter on the speed of a patched model on large images."""

from typing import Any

from bmfa.evidence.faster.figures import MOST_IOU_CHANGE, best_setting, cpu_models, setting_title
from bmfa.evidence.page.claims import Measured, Verdict, claim
from bmfa.evidence.page.origins import describe_data
from bmfa.evidence.page.record_set import RecordSet, need_number
from bmfa.evidence.page.rendering import chapter_values
from bmfa.records import Row


@chapter_values("faster")
def models_and_settings(records: RecordSet) -> dict[str, Any]:
    """Return the setting that the figure shows, and the whole models timed on a CPU."""
    by_model = {rows[0]["model"]: rows for rows in cpu_models(records)}  # at the largest size
    timed = [record for record in records.of("bench") if cpu_models(RecordSet(record))]
    return {
        "best": _best(records),
        "title": setting_title,
        "models": [(rows[0], rows[-1]) for rows in by_model.values()],
        "timed": RecordSet(timed),
        "data": describe_data(timed),
    }


def _best(records: RecordSet) -> Row:
    """The row of the setting that the figure of masks shows."""
    method = best_setting(records.rows("faster", what="setting"))
    return records.row("faster", what="setting", method=method)


@claim("end-to-end")
def end_to_end(records: RecordSet) -> Measured:
    best = _best(records)
    speedup, change = need_number(best, "speedup"), need_number(best, "mask_iou_change")
    ahead = speedup > 1 and abs(change) <= MOST_IOU_CHANGE
    return Verdict.AHEAD if ahead else Verdict.AGREES, {"best": best, "title": setting_title(best)}
