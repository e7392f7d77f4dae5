"""The claim of the paper on single instances."""

from bmfa.evidence.images import figures as _  # noqa: F401 - draws the figures of the chapters
from bmfa.evidence.page import paper
from bmfa.evidence.page.claims import Measured, claim, judge_direction
from bmfa.evidence.page.record_set import RecordSet, get_text, need_number, require_any

# A claim about a small part that holds nearly all mass: percentages, and a gap that loses 1 - exp(-2),
# or 86 % of it.
LARGE_AREA, LEAST_MASS, LEAST_GAP = 20.0, 90.0, 2.0


@claim("four-instances")
def four_instances(records: RecordSet) -> Measured:
    # On the paper's data set if there are instances of it, else on all others.
    read = records.of("cases", dataset="coco") or records.of("cases")
    found = [row for record in read for row in record.rows]
    rows = require_any(row for row in found if get_text(row, "method").startswith("gamma:"))
    columns = {"areas": "minority_area_percent", "masses": "gibbs_mass_percent", "gaps": "gap"}
    shown = {name: [need_number(row, key) for row in rows] for name, key in columns.items()}
    holds = max(shown["areas"]) < LARGE_AREA and min(shown["masses"]) > LEAST_MASS
    holds = holds and min(shown["gaps"]) > LEAST_GAP
    datasets = sorted({paper.dataset_title(get_text(row, "dataset")) for row in rows})
    return judge_direction(holds), {**shown, "datasets": datasets}, read
