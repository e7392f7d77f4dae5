"""The chapter on the speed of a patched model on large images."""

from bmfa.evidence.faster import figures
from bmfa.evidence.methods import FULL
from bmfa.evidence.page import paper
from bmfa.evidence.page.blocks import (
    Block,
    Chapter,
    Column,
    Table,
    describe,
    illustrate,
    paragraph,
)
from bmfa.evidence.page.claims import Verdict, claim
from bmfa.evidence.page.formats import format_number, format_percent
from bmfa.evidence.page.record_set import (
    RecordSet,
    get_number,
    get_text,
    need_number,
    require_any,
)
from bmfa.records import Row

MOST_IOU_CHANGE = 0.02  # a mask is called unchanged if its IoU changes by at most this
COLUMNS = (
    Column("setting", "Setting", code=True),
    Column("milliseconds", "ms an image", 0),
    Column("speedup", "Speed-up", 2),
    Column("mask_iou", "Mask IoU", 3),
    Column("change", "Change, 95 % interval"),
    Column("full_mask_iou", "IoU with the full model's mask", 3),
    Column("top1_percent", "Top-1 %", 1),
    Column("agreement_percent", "Agreement %", 1),
    Column("output_kl", "Output KL", 3, small=True),
    Column("error_percent", "Measured error of attention %", 2),
    Column("target_met_percent", "Calls that met the target %", 0),
    Column("feature_error_percent", "Change of the features %", 2),
    Column("density_percent", "Tiles expanded %", 1),
)


def _settings(records: RecordSet) -> list[Row]:
    return records.rows("faster", what="setting")


def _content(records: RecordSet) -> list[Block]:
    side = records.setting("faster", "side", 64)
    return [
        *paragraph(
            "The embedded model classifies an object and predicts its mask. Here it sees images of "
            f"{side} × {side} tokens, and attention takes most of its time. bmfa.patch replaces it "
            "by tiles with an error target; the weights and the code of the model stay as they are. "
            "With an error of 0 attention is exact, and what it gains is that of the kernel alone.",
            describe(_machine, records),
        ),
        *paragraph(describe(_headline, records), describe(_errors, records)),
        *illustrate(
            figures.faster,
            records,
            "Above: time of one image on this machine. Below: images of the same run; the patched "
            "model is the fastest setting whose IoU of the mask is within "
            f"{MOST_IOU_CHANGE:g} of the full model's, the whole interval of the change included. The "
            "difference shows pixels that the patch adds (orange) and "
            "removes (blue).",
        ),
        Table(
            "All settings; every image goes through all of them in turn",
            COLUMNS,
            [
                {
                    **row,
                    "setting": figures.setting_title(row),
                    "change": _interval(row),
                }
                for row in _settings(records)
            ],
        ),
    ]


def _interval(row: Row) -> str | None:
    values = [get_number(row, f"mask_iou_change{suffix}") for suffix in ("", "_low", "_high")]
    if get_text(row, "method") == FULL or None in values:
        return None
    change, low, high = (format_number(value) for value in values)
    return f"{change} ({low} to {high})"


def _best(records: RecordSet) -> Row:
    """The row that the figure shows."""
    rows = _settings(records)
    name = figures.best_setting(rows, MOST_IOU_CHANGE)
    return next(iter(require_any(row for row in rows if get_text(row, "method") == name)))


def _headline(records: RecordSet) -> str:
    full = next(iter(require_any(r for r in _settings(records) if get_text(r, "method") == FULL)))
    best = _best(records)
    return (
        f"With {figures.setting_title(best)}, an image takes "
        f"{format_number(need_number(best, 'milliseconds'), 0)} ms instead of "
        f"{format_number(need_number(full, 'milliseconds'), 0)} ms, "
        f"{format_number(need_number(best, 'speedup'), 1)} times as fast. The IoU of the mask is "
        f"{format_number(need_number(best, 'mask_iou'))} (full model "
        f"{format_number(need_number(full, 'mask_iou'))}), and the predicted class is that of the full "
        f"model for {format_percent(need_number(best, 'agreement_percent'), 0)} of "
        f"{get_text(best, 'images')} images."
    )


def _machine(records: RecordSet) -> str:
    """Say what ran on a CPU."""
    environment = records.of("faster")[0].environment
    if environment.get("device") != "cpu":
        return ""
    instructions = environment.get("instruction_set")
    kernels = f"kernels in C++ for {instructions}" if instructions else "operations of torch"
    return (
        f"Measured on {environment['device_name']}, {environment['threads']} threads, by {kernels}."
    )


def _errors(records: RecordSet) -> str:
    best = _best(records)
    return (
        "A patched layer measures its own error on probe queries: "
        f"{format_percent(need_number(best, 'error_percent'), 2)} on average, with "
        f"{format_percent(need_number(best, 'density_percent'), 1)} of the tiles expanded. "
        "bmfa.summary(model) shows both for every layer."
    )


PROTOTYPE = paper.IMAGENET[paper.BMFA].speedup


@claim(
    "Leaf ratio is not yet a speed-up: end-to-end speed relative to the full model",
    f"{PROTOTYPE:g} (prototype, DeiT-Tiny)",
    "bmfa report",
)
def _end_to_end(records: RecordSet) -> tuple[str, Verdict, str]:
    best = _best(records)
    speedup, change = need_number(best, "speedup"), need_number(best, "mask_iou_change")
    ours = (
        f"{format_number(speedup, 2)}, mask IoU {'+' if change >= 0 else ''}{format_number(change)}"
    )
    ahead = speedup > 1 and abs(change) <= MOST_IOU_CHANGE
    tokens = format_number(need_number(best, "n"), 0)
    note = (
        f"The embedded model at {tokens} tokens with tiles and {figures.setting_title(best)}; the paper "
        "replaces scores after computing all of them, at 196 tokens."
    )
    return ours, Verdict.AHEAD if ahead else Verdict.AGREES, note


FASTER = Chapter("faster", "Faster, with the error known", "faster", _content, (_end_to_end,))
