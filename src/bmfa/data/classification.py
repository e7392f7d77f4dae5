"""Pictures with class labels: folders by class, flat folders with a label file, embedded pictures.

`LabelledPictures` and `EmbeddedPictures` are map-style datasets for `torch.utils.data.DataLoader`:
they have a length, give a picture by index, and pickle for worker processes.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmfa.checks import check_integer
from bmfa.data.drawn.badges import BADGE_CLASSES, BADGE_PICTURE_SIZE, draw_badge
from bmfa.data.pictures import PictureError, PictureFiles
from bmfa.packages import load_package

_WNID = re.compile(r"n\d{8}")  # WordNet id, such as n01440764
_MAX_REASONS = 5  # reasons that a summary lists


@dataclass(frozen=True, eq=False)
class LabelledPicture:
    """A picture and its class.

    Args:
        name: name of the picture in messages.
        pixels: (height, width, 3) uint8 RGB.
        label: index of the class, None if unknown.
        label_name: name of the class if the data set has its own classes; None means the name that
            the model gives to the index.
        mask: (height, width) bool, True inside the object; None if unknown.
    """

    name: str
    pixels: NDArray[np.uint8]
    label: int | None = None
    label_name: str | None = None
    mask: NDArray[np.bool_] | None = None


@dataclass
class SkippedPictures:
    """Number of pictures that could not be read, and the reasons of the first few."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        """Count one more picture."""
        self.count += 1
        if len(self.reasons) < _MAX_REASONS:
            self.reasons.append(reason)

    def lines(self) -> list[str]:
        """Return the message to the user in lines; none if every picture was read."""
        if not self.count:
            return []
        more = ", ..." if self.count > len(self.reasons) else ""
        return [f"{self.count} unreadable pictures skipped: {'; '.join(self.reasons)}{more}"]


class LabelledPictures:
    """The pictures of a folder or zip in the order of their names, with labels.

    Labels are read from the names of the folders (a class index or a WordNet id), or from a label
    file. A flat folder without a label file has no labels.

    Args:
        path: folder or zip.
        labels: file with a name and a label on each line; None takes the names of the folders.
        wnids: WordNet ids in the order of the model's outputs; None takes those of ImageNet-1K.
        limit: number of pictures to take; None takes all.
        strict: True to raise at a picture that cannot be read instead of skipping it.

    Raises:
        PictureError: there is no picture, or a label cannot be interpreted.
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
        self.skipped = SkippedPictures()
        if not self.files.entries:
            raise PictureError(f"no pictures in {path}; pass a folder or zip of jpg, png or webp")
        if limit is not None:
            check_integer("limit", limit, low=1)
        if labels is None:
            self._labels = _labels_from_folders(self.files, wnids)
        else:
            self._labels = _labels_from_file(self.files, Path(labels), wnids)
        self.entries = tuple(islice(self._labels or self.files.entries, limit))

    @property
    def labelled(self) -> bool:
        """True if the pictures have labels."""
        return bool(self._labels)

    def __len__(self) -> int:
        """Return the number of pictures, unreadable ones included."""
        return len(self.entries)

    def __getitem__(self, index: int) -> LabelledPicture:
        """Read one picture.

        Raises:
            PictureError: the picture cannot be read.
            PicturesLostError: the folder or zip has vanished.
        """
        entry = self.entries[index]
        return LabelledPicture(entry, self.files.read(entry), self._labels.get(entry))

    def __iter__(self) -> Iterator[LabelledPicture]:
        """Yield every readable picture; `skipped` counts the others, with `strict` they raise."""
        self.skipped = SkippedPictures()
        for index in range(len(self)):
            try:
                picture = self[index]
            except PictureError as error:
                if self.strict:
                    raise
                self.skipped.add(str(error))
                continue
            yield picture

    def names(self) -> list[tuple[str, int | None]]:
        """Return the name and the label of every picture without reading it."""
        return [(entry, self._labels.get(entry)) for entry in self.entries]


class EmbeddedPictures:
    """The first pictures of the embedded set with their classes, drawn when they are read.

    Args:
        count: number of pictures, at least 1.
        seed: seed of the set.
        size: side in pixels; the content of a picture does not depend on it.

    Example:
        >>> from bmfa.data import EmbeddedPictures
        >>> picture = EmbeddedPictures(10)[3]
        >>> picture.pixels.shape, picture.label_name
        ((128, 128, 3), 'dotted triangle, 1 tick')
    """

    def __init__(self, count: int, seed: int = 0, size: int = BADGE_PICTURE_SIZE) -> None:
        self.count, self.seed = check_integer("count", count, low=1), seed
        self.size = check_integer("size", size, low=32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> LabelledPicture:
        if not 0 <= index < self.count:
            raise IndexError(f"index is {index}; pass an integer from 0 to {self.count - 1}")
        pixels, label, mask = draw_badge(self.seed, index, self.size)
        return LabelledPicture(self._name(index), pixels, label, BADGE_CLASSES[label], mask)

    def __iter__(self) -> Iterator[LabelledPicture]:
        return (self[index] for index in range(self.count))

    def names(self) -> list[tuple[str, int | None]]:
        """Return the name of every picture without drawing it, and no labels."""
        return [(self._name(index), None) for index in range(self.count)]

    def _name(self, index: int) -> str:
        return f"embedded {self.seed}/{index}"


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """Return the 1000 WordNet ids of ImageNet-1K in the order of a model's outputs."""
    return tuple(_imagenet_info().label_names())


@cache
def imagenet_names() -> tuple[str, ...]:
    """Return the 1000 class names of ImageNet-1K in the order of a model's outputs."""
    info = _imagenet_info()
    return tuple(info.index_to_description(index) for index in range(1000))


def _imagenet_info() -> Any:
    return load_package("timm.data").ImageNetInfo()


def _labels_from_folders(files: PictureFiles, wnids: Sequence[str] | None) -> dict[str, int]:
    """Return the class of every entry by the name of its folder; empty for a flat folder."""
    folders = {entry: PurePosixPath(entry).parent.name for entry in files.entries}
    names = sorted(set(folders.values()))
    if all(_WNID.fullmatch(name) for name in names):
        index = _wnid_index(names, wnids)
        return {entry: index[name] for entry, name in folders.items()}
    if all(name.isdecimal() for name in names):
        return {entry: int(name) for entry, name in folders.items()}
    if len(names) == 1:
        return {}
    other = next(name for name in names if not _is_label(name))
    raise PictureError(
        f"{files.path} has a folder {other!r}; name folders by class index or WordNet id, "
        "or pass a label file"
    )


def _labels_from_file(
    files: PictureFiles, path: Path, wnids: Sequence[str] | None
) -> dict[str, int]:
    """Return labels by entry, from lines `NAME LABEL` or `NAME,LABEL`; further columns are ignored."""
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
    ids = sorted({label for _, label in rows if not label.isdecimal()})
    index = _wnid_index(ids, wnids) if ids else {}
    by_name = {name: int(label) if label.isdecimal() else index[label] for name, label in rows}
    found = {}
    for entry in files.entries:
        file = PurePosixPath(entry)
        name = next((name for name in (entry, file.name, file.stem) if name in by_name), None)
        if name is not None:
            found[entry] = by_name[name]
    if not found:
        raise PictureError(
            f"label file {path} names none of the {len(files.entries)} pictures in {files.path}, "
            f"e.g. {files.entries[0]}"
        )
    return found


def _wnid_index(names: Sequence[str], wnids: Sequence[str] | None) -> Mapping[str, int]:
    """Return the class index of every WordNet id; raise if one of `names` has none."""
    index = {
        wnid: number for number, wnid in enumerate(imagenet_wnids() if wnids is None else wnids)
    }
    unknown = [name for name in names if name not in index]
    if unknown:
        raise PictureError(
            f"{unknown[0]} is none of the {len(index)} classes; pass wnids= in the model's order"
        )
    return index


def _is_label(text: str) -> bool:
    return text.isdecimal() or _WNID.fullmatch(text) is not None
