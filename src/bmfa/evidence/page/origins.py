"""Where the numbers of a record come from: drawn data, a recorded run, or data of the user."""

from collections.abc import Iterable
from dataclasses import replace

from bmfa.evidence.page import paper
from bmfa.records import Record

SYNTHETIC, EMBEDDED, RECORDED, OWN = "synthetic", "embedded", "recorded", "own"
# Experiments on scores that are defined by a formula.
_FORMULAS = ("synthetic", "failure-curve", "gallery")
# The key of `environment` that marks a record which came with the package, and its value.
_KEY = "origin"


def mark_recorded(record: Record) -> Record:
    """Return the record marked as one that came with the package."""
    return replace(record, environment={**record.environment, _KEY: RECORDED})


def origin(record: Record) -> str:
    """Return `"synthetic"`, `"embedded"`, `"recorded"` or `"own"`.

    Example:
        >>> origin(Record("probe", {"dataset": "embedded"}, [], {}))
        'embedded'
        >>> origin(Record("probe", {"dataset": "coco"}, [], {}))
        'own'
    """
    if record.environment.get(_KEY) == RECORDED:
        return RECORDED
    if record.experiment in _FORMULAS:
        return SYNTHETIC
    drawn = EMBEDDED in (record.settings.get("dataset"), record.settings.get("model"))
    return EMBEDDED if drawn else OWN


# What replaces recorded data by a person's own, by the data set or the model of a record.
REPLACED_BY = {
    "coco": "bmfa report --coco ANNOTATIONS IMAGES",
    "lvis": "bmfa report --lvis ANNOTATIONS IMAGES",
    "timm:deit_tiny_patch16_224": "bmfa report --weights FILE --imagenet DIR",
}


def recorded_sources(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return which of the records came with the library, and the commands that replace them."""
    names, commands = [], []
    for record in records:
        if origin(record) == RECORDED:
            subject = str(record.settings.get("dataset") or record.settings.get("model"))
            names.append(f"{paper.title(subject)}, {describe_data([record])}")
            commands += [REPLACED_BY[subject]] if subject in REPLACED_BY else []
    return {"names": list(dict.fromkeys(names)), "commands": list(dict.fromkeys(commands))}


def describe_size(record: Record) -> str:
    """Return the number of instances, images or settings as a phrase, "" if it is unknown.

    Example:
        >>> describe_size(Record("evaluate", {}, [{"images": 500}], {}))
        '500 images'
    """
    named = record.settings.get("images", 0)
    sizes = {
        "setting": record.settings.get("settings", 0) * (record.experiment == "synthetic"),
        "instance": _largest(record, "instances"),
        "image": _largest(record, "images") or (named if isinstance(named, int) else len(named)),
    }
    for noun, number in sizes.items():
        if number:
            return f"{number:,} {noun}{'' if number == 1 else 's'}"
    return ""


def describe_data(records: Iterable[Record]) -> str:
    """Return origin and size of each record, equal phrases once.

    A recorded run has its machine and date.

    Example:
        >>> describe_data([Record("evaluate", {"model": "embedded"}, [{"images": 9}], {})])
        'embedded, 9 images'
        >>> frame = {"device_name": "NVIDIA H200", "date": "2026-11-17"}
        >>> describe_data([mark_recorded(Record("evaluate", {}, [], frame))])
        'recorded on NVIDIA H200 (2026-11-17)'
    """
    phrases = []
    for record in records:
        found = origin(record)
        if found == RECORDED:
            machine, date = (record.environment.get(key) for key in ("device_name", "date"))
            found += f" on {machine or 'another machine'}" + (f" ({date})" if date else "")
        phrases.append(", ".join(filter(None, (found, describe_size(record)))))
    return "; ".join(dict.fromkeys(phrases))


def caption(title: str, record: Record) -> str:
    """Return a title with the size of a record, and with its origin if it came with the package."""
    recorded = origin(record) == RECORDED
    data = describe_data([record]) if recorded else describe_size(record)
    return ", ".join(filter(None, (title, data)))


def _largest(record: Record, column: str) -> int:
    return max((v for row in record.rows if isinstance(v := row.get(column), int)), default=0)
