"""Records that come with the library: runs on real data, which `bmfa report` shows by default."""

import tomllib
from collections.abc import Collection
from pathlib import Path

from bmfa.evidence.page.origins import mark_recorded
from bmfa.records import Record

_CHOICES = tomllib.loads(Path(__file__).with_name("report.toml").read_text("utf-8"))
# The records on the page by file name, with the data that stands for them.
SHOWN: dict[str, str] = _CHOICES["recorded"]
# A wheel holds the folder `records` of the repository here.
PACKAGED = Path(__file__).parent / "recorded"


def folder() -> Path:
    """Return the folder of the records: in the package, or `records` of a checkout.

    Example:
        >>> (folder() / "synthetic.json").is_file()
        True
    """
    source = Path(__file__).parents[2]
    checkout = source.parent / "records"
    return checkout if source.name == "src" and checkout.is_dir() else PACKAGED


def load(without: Collection[str] = ()) -> tuple[dict[str, Record], list[str]]:
    """Read the records that the page shows by default.

    Args:
        without: kinds of data that the user has: `"coco"`, `"lvis"` or `"model"`.

    Returns:
        The records by file name without suffix, marked as recorded; and a sentence for each one that
        cannot be read.

    Example:
        >>> records, problems = load(without=["model"])
        >>> sorted({record.settings["dataset"] for record in records.values() if
        ...     record.experiment == "probe"}), problems
        (['coco', 'lvis'], [])
    """
    records: dict[str, Record] = {}
    problems: list[str] = []
    for name, kind in SHOWN.items():
        path = folder() / f"{name}.json"
        if kind in without:
            continue
        try:
            records[name] = mark_recorded(Record.from_json(path.read_text("utf-8"), path.name))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition(";")[0]
            problems.append(
                f"the recorded run {name} is not shown ({reason}); install bmfa again to get it back"
            )
    return records, problems


def mark(records: Collection[Record]) -> list[Record]:
    """Return the records, those marked that came with the library."""
    known = load()[0].values()
    return [next((k for k in known if k == mark_recorded(r)), r) for r in records]
