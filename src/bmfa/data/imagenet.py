"""Pictures with class labels: folders by class, or a flat folder with a label file."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from bmfa.checks import check_integer
from bmfa.data.drawn.embedded import figure_picture
from bmfa.data.drawn.figures import CLASSES
from bmfa.data.pictures import PictureError, PictureFiles

_WNID = re.compile(r"n\d{8}")
_NAMED = 5


@dataclass(frozen=True, eq=False)
class LabelledPicture:
    """A picture, (height, width, 3) RGB in 8 bits, and its class where it is known.

    `label` is the index of the class. `label_name` is its name where the data set has its own
    classes; without one, the model's name of that index is meant.
    """

    name: str
    pixels: NDArray[np.uint8]
    label: int | None = None
    label_name: str | None = None


@dataclass
class Skipped:
    """Pictures that could not be read: how many, and why the first few."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        """One picture more."""
        self.count += 1
        if len(self.reasons) < _NAMED:
            self.reasons.append(reason)

    def lines(self) -> list[str]:
        """What to tell the user; nothing where all were read."""
        if not self.count:
            return []
        more = ", ..." if self.count > len(self.reasons) else ""
        return [f"{self.count} unreadable pictures skipped: {'; '.join(self.reasons)}{more}"]


class ClassPictures:
    """The pictures of a folder or a zip in order of their names, with labels.

    Labels come from the folders' names (a class index or a WordNet id), or from a file with a name
    and a label on each line; a flat folder without such a file has none. `skipped` tells what could
    not be read in the last pass; with `strict` that raises instead.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        labels: str | os.PathLike[str] | None = None,
        *,
        wnids: Sequence[str] | None = None,
        limit: int | None = None,
        strict: bool = False,
    ) -> None:
        self.files = PictureFiles(path)
        self.strict = strict
        self.skipped = Skipped()
        if not self.files.entries:
            raise PictureError(f"no pictures in {path}; pass a folder or zip of jpg, png or webp")
        if limit is not None:
            check_integer("limit", limit, low=1)
        self._labels = self._read_labels(labels, wnids)
        self.entries = tuple(islice(self._labels or self.files.entries, limit))

    @property
    def labelled(self) -> bool:
        """Whether the pictures have labels."""
        return bool(self._labels)

    def __len__(self) -> int:
        """Pictures, those that cannot be read included."""
        return len(self.entries)

    def __iter__(self) -> Iterator[LabelledPicture]:
        self.skipped = Skipped()
        for index in range(len(self)):
            try:
                picture = self.read(index)
            except PictureError as error:
                if self.strict:
                    raise
                self.skipped.add(str(error))
                continue
            yield picture

    def read(self, index: int) -> LabelledPicture:
        """One picture by its place among the entries; raises where it cannot be read."""
        entry = self.entries[index]
        return LabelledPicture(entry, self.files.read(entry), self._labels.get(entry))

    def names(self) -> list[tuple[str, int | None]]:
        """Every entry with its label, nothing read."""
        return [(entry, self._labels.get(entry)) for entry in self.entries]

    def _read_labels(
        self, labels: str | os.PathLike[str] | None, wnids: Sequence[str] | None
    ) -> dict[str, int]:
        """The class of every entry; of none where nothing tells."""
        if labels is not None:
            return _from_file(self.files, Path(labels), wnids)
        folders = {entry: PurePosixPath(entry).parent.name for entry in self.files.entries}
        names = sorted(set(folders.values()))
        if all(_WNID.fullmatch(name) for name in names):
            index = _wnid_index(names, wnids)
            return {entry: index[name] for entry, name in folders.items()}
        if all(name.isdecimal() for name in names):
            return {entry: int(name) for entry, name in folders.items()}
        if len(names) == 1:
            return {}
        odd = next(name for name in names if not (name.isdecimal() or _WNID.fullmatch(name)))
        raise PictureError(
            f"{self.files.path} has a folder {odd!r}; name folders by class index or WordNet id, "
            "or pass a label file"
        )


class EmbeddedPictures:
    """The first pictures of the embedded set, each with its class, drawn when they are read."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count, self.seed = check_integer("count", count, low=1), seed

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[LabelledPicture]:
        return (self.read(index) for index in range(self.count))

    def read(self, index: int) -> LabelledPicture:
        """One picture by its index."""
        pixels, label, _ = figure_picture(self.seed, index)
        return LabelledPicture(self._name(index), pixels, label, CLASSES[label])

    def names(self) -> list[tuple[str, int | None]]:
        """Every picture's name, nothing drawn; a label is known with its picture alone."""
        return [(self._name(index), None) for index in range(self.count)]

    def _name(self, index: int) -> str:
        return f"embedded {self.seed}/{index}"


def embedded_pictures(count: int, seed: int = 0) -> EmbeddedPictures:
    """The first pictures of the embedded set, each with its class."""
    return EmbeddedPictures(count, seed)


def _wnid_index(names: Sequence[str], wnids: Sequence[str] | None) -> Mapping[str, int]:
    """Classes are numbered in the order of their WordNet ids."""
    if wnids is None:
        from bmfa.data.classes import imagenet_wnids

        wnids = imagenet_wnids()
    index = {wnid: number for number, wnid in enumerate(wnids)}
    unknown = [name for name in names if name not in index]
    if unknown:
        raise PictureError(
            f"{unknown[0]} is none of the {len(index)} classes; pass wnids= in the model's order"
        )
    return index


def _from_file(files: PictureFiles, path: Path, wnids: Sequence[str] | None) -> dict[str, int]:
    """Labels by entry, from lines `NAME LABEL` or `NAME,LABEL`; what follows a label is ignored."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PictureError(f"label file {path} cannot be read: {error}") from error
    rows = [re.split(r"[\s,]+", line.strip())[:2] for line in lines if line.strip()]
    if rows and len(rows[0]) == 2 and not _is_label(rows[0][1]):
        rows = rows[1:]  # a header
    bad = next((row for row in rows if len(row) < 2 or not _is_label(row[1])), None)
    if bad is not None:
        raise PictureError(
            f"label file {path} has a line {' '.join(bad)!r}; "
            "write NAME LABEL, the label a class index or a WordNet id"
        )
    number = _numbering([label for _, label in rows], wnids)
    by_name = {name: number(label) for name, label in rows}
    found = {entry: by_name[key] for entry in files.entries for key in _keys(entry, by_name)[:1]}
    if not found:
        raise PictureError(
            f"label file {path} names none of the {len(files.entries)} pictures in {files.path}, "
            f"e.g. {files.entries[0]}"
        )
    return found


def _numbering(labels: Sequence[str], wnids: Sequence[str] | None) -> Callable[[str], int]:
    names = sorted({label for label in labels if not label.isdecimal()})
    index = _wnid_index(names, wnids) if names else {}
    return lambda label: int(label) if label.isdecimal() else index[label]


def _keys(entry: str, known: Mapping[str, int]) -> list[str]:
    """The names under which a label file may list an entry."""
    path = PurePosixPath(entry)
    return [name for name in (entry, path.name, path.stem) if name in known]


def _is_label(text: str) -> bool:
    return text.isdecimal() or _WNID.fullmatch(text) is not None
