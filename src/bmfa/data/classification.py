"""Images with class labels: folders by class, flat folders with a label file, embedded images.

`LabelledImages` and `EmbeddedImages` are map-style datasets for `torch.utils.data.DataLoader`:
they have a length, give an image by index, and pickle for worker processes.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from bmfa.checks import check_integer
from bmfa.data.drawn.badges import BADGE_CLASSES, BADGE_IMAGE_SIZE, draw_badge
from bmfa.data.images import ImageError, ImageFiles
from bmfa.packages import load_package

_WNID = re.compile(r"n\d{8}")  # WordNet id, such as n01440764
_IMAGENET_CLASSES = 1000
_MAX_SHOWN = 5  # names of classes that a message lists

# The class of every folder by its name (empty if unknown), how they were found, and a warning.
_Classes = tuple[Mapping[str, int], str, str | None]


@dataclass(frozen=True, eq=False)
class LabelledImage:
    """An image and its class.

    Args:
        name: name of the image in messages.
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


class LabelledImages:
    """The images of a folder or zip in the order of their names, with labels.

    Labels are read from the names of the folders, or from a label file. A folder named by an integer
    is the class of that index, and one named by a WordNet id the class of ImageNet-1K. Folders with
    other names are the classes of the model that have these names or, if some have none, the classes
    0, 1, 2, ... in sorted order, as in torchvision's `ImageFolder`. A flat folder without a label file
    has no labels.

    Args:
        path: folder or zip.
        labels: file with a name and a label on each line; None takes the names of the folders.
        class_map: file with the class of every folder: the names of the folders in the order of the
            model's outputs, one on each line, or lines `NAME INDEX`. None takes the names of the
            folders.
        classes: the names of the model's outputs, or their number; None if unknown.
        limit: number of images to take; None takes all.
        strict: True if an experiment is to end at an image that cannot be read instead of skipping it.

    Attributes:
        label_source: how labels were found, as a phrase.
        label_warning: a sentence if the labels may not be the classes of the model, else None.

    Raises:
        ImageError: there is no image, a label cannot be interpreted, or the names of the folders
            have more than one meaning.

    Example:
        >>> import tempfile, pathlib
        >>> from PIL import Image
        >>> from bmfa.data import LabelledImages
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("cat", "dog"):
        ...     (root / name).mkdir()
        ...     Image.new("RGB", (8, 8)).save(root / name / "1.png")
        >>> images = LabelledImages(root, classes=2)
        >>> images.names(), images.label_source
        ([('cat/1.png', 0), ('dog/1.png', 1)], 'folders in sorted order: cat 0, dog 1')
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        labels: str | os.PathLike[str] | None = None,
        *,
        class_map: str | os.PathLike[str] | None = None,
        classes: Sequence[str] | int | None = None,
        limit: int | None = None,
        strict: bool = False,
    ) -> None:
        self.files, self.strict = ImageFiles(path), strict
        if not self.files.entries:
            raise ImageError(f"no images in {path}; pass a folder or zip of jpg, png or webp")
        if limit is not None:
            check_integer("limit", limit, low=1)
        if labels is not None and class_map is not None:
            raise ImageError(
                "a label file and a class map are given; pass one of them, because either decides the "
                "class of every image"
            )
        class_names = () if classes is None or isinstance(classes, int) else classes
        count = classes if isinstance(classes, int) else len(class_names) or None
        self.label_source = "label file"
        self.label_warning: str | None = None
        if labels is not None:
            self._labels = _read_labels(self.files, Path(labels))
        else:
            folders = {entry: PurePosixPath(entry).parent.name for entry in self.files.entries}
            names = sorted(set(folders.values()))
            if class_map is not None:
                found = _read_class_map(Path(class_map), names)
            else:
                found = _classes_of_folders(self.files, names, class_names, count)
            index, self.label_source, self.label_warning = found
            self._labels = {entry: index[name] for entry, name in folders.items() if index}
        for entry, label in self._labels.items():
            if count is not None and label >= count:
                raise ImageError(
                    f"{entry} has class {label}, and the model {count} classes; pass the model of "
                    "these images, or labels in its order (--labels FILE or --class-map FILE)"
                )
        self.entries = tuple(islice(self._labels or self.files.entries, limit))

    def __len__(self) -> int:
        """Return the number of images, unreadable ones included."""
        return len(self.entries)

    def __getitem__(self, index: int) -> LabelledImage:
        """Read one image.

        Raises:
            ImageError: the image cannot be read.
            ImagesLostError: the folder or zip has vanished.
        """
        entry = self.entries[index]
        return LabelledImage(entry, self.files.read(entry), self._labels.get(entry))

    def names(self) -> list[tuple[str, int | None]]:
        """Return the name and the label of every image without reading it."""
        return [(entry, self._labels.get(entry)) for entry in self.entries]


class EmbeddedImages:
    """The first images of the embedded set with their classes, drawn when they are read.

    Args:
        count: number of images, at least 1.
        seed: seed of the set.
        size: side in pixels; the content of an image does not depend on it.

    Example:
        >>> from bmfa.data import EmbeddedImages
        >>> image = EmbeddedImages(10)[3]
        >>> image.pixels.shape, image.label_name
        ((128, 128, 3), 'dotted triangle, 1 tick')
    """

    def __init__(self, count: int, seed: int = 0, size: int = BADGE_IMAGE_SIZE) -> None:
        self.count, self.seed = check_integer("count", count, low=1), seed
        self.size = check_integer("size", size, low=32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> LabelledImage:
        if not 0 <= index < self.count:
            raise IndexError(f"index is {index}; pass an integer from 0 to {self.count - 1}")
        pixels, label, mask = draw_badge(self.seed, index, self.size)
        return LabelledImage(self._name(index), pixels, label, BADGE_CLASSES[label], mask)

    def __iter__(self) -> Iterator[LabelledImage]:
        return (self[index] for index in range(self.count))

    def names(self) -> list[tuple[str, int | None]]:
        """Return the name of every image without drawing it, and no labels."""
        return [(self._name(index), None) for index in range(self.count)]

    def _name(self, index: int) -> str:
        """Return what `bmfa screen` takes, with the seed if it is not the default."""
        return f"embedded:{index}" if self.seed == 0 else f"embedded:{index}, seed {self.seed}"


@cache
def imagenet_names() -> tuple[str, ...]:
    """Return the 1000 class names of ImageNet-1K in the order of a model's outputs."""
    info = load_package("timm.data").ImageNetInfo()
    return tuple(map(info.index_to_description, range(_IMAGENET_CLASSES)))


@cache
def _imagenet_wnids() -> dict[str, int]:
    """Return the class index of every WordNet id of ImageNet-1K."""
    names = load_package("timm.data").ImageNetInfo().label_names()
    return {wnid: number for number, wnid in enumerate(names)}


def _classes_of_folders(
    files: ImageFiles, names: Sequence[str], class_names: Sequence[str], count: int | None
) -> _Classes:
    """Return the classes that the names of the folders mean to a model with `count` classes."""
    wordnet = all(map(_WNID.fullmatch, names))
    # Sorted order for a model that was trained on these folders alone.
    if wordnet and (count != len(names) or count == _IMAGENET_CLASSES):
        return {name: _class_index(name) for name in names}, "folders by WordNet id", None
    if all(name.isdecimal() for name in names):
        return {name: int(name) for name in names}, "folders by class index", None
    if len(names) == 1:
        return {}, "none", None
    if not wordnet:
        _check_unambiguous(files, names)
    if set(names) <= set(class_names):
        by_name = {name: list(class_names).index(name) for name in names}
        return by_name, "folders by the class names of the model", None
    shown = [f"{name} {number}" for number, name in enumerate(names)]
    if len(shown) > _MAX_SHOWN:
        shown = [*shown[: _MAX_SHOWN - 1], "...", shown[-1]]
    warning = (
        f"{len(names)} folders in sorted order are taken as classes 0 to {len(names) - 1} of the "
        f"model's {count}; if they are others, top-1 means nothing: pass --class-map FILE"
    )
    index = {name: number for number, name in enumerate(names)}
    fewer = count is not None and len(names) < count
    return index, f"folders in sorted order: {', '.join(shown)}", warning if fewer else None


def _check_unambiguous(files: ImageFiles, names: Sequence[str]) -> None:
    """Raise if ordinary names of folders can be understood in more than one way."""
    label = next((name for name in names if _is_label(name)), None)
    above = {PurePosixPath(entry).parent.parent for entry in files.entries}
    if label is not None:
        other = next(name for name in names if not _is_label(name))
        fault = f"a folder {label!r}, which is a class index or a WordNet id, beside "
        fault += f"the folder {other!r}" if other else "images of its own"
    elif "" in names:
        fault = "images beside its class folders"
    elif len(above) > 1:
        fault = f"class folders in several folders, {' and '.join(map(str, sorted(above)[:2]))}"
    else:
        return
    raise ImageError(
        f"{files.path} has {fault}; pass the one folder whose folders are the classes, or the class "
        "of every folder in a class map (--class-map FILE)"
    )


def _read_class_map(path: Path, folders: Sequence[str]) -> _Classes:
    """Return the class of every name: lines with names in order, or lines `NAME INDEX`."""
    lines = _read_lines(path, "class map")
    pairs = [re.fullmatch(r"(.+?)(?:\s*,\s*|\s+)(\d+)", line) for line in lines]
    # A name may end with a number: the lines are names if they are those of the folders.
    if set(folders) <= set(lines) or not all(pairs):
        index = {line: number for number, line in enumerate(lines)}
    else:
        index = {pair[1]: int(pair[2]) for pair in pairs if pair}
    missing = next((name for name in folders if name not in index), None)
    if missing is not None or len(index) < len(lines):
        fault = "names a folder twice" if missing is None else f"has no class for {missing!r}"
        raise ImageError(
            f"class map {path} {fault}; write each folder name once, in the order of the model's "
            "outputs or with its index"
        )
    return index, f"class map {path.name}", None


def _read_lines(path: Path, what: str) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"{what} {path} cannot be read: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def _read_labels(files: ImageFiles, path: Path) -> dict[str, int]:
    """Return labels by entry, from lines `NAME LABEL` or `NAME,LABEL`; further columns are ignored."""
    rows = [re.split(r"[\s,]+", line)[:2] for line in _read_lines(path, "label file")]
    if rows and len(rows[0]) == 2 and not _is_label(rows[0][1]):
        rows = rows[1:]  # a header
    bad = next((row for row in rows if len(row) < 2 or not _is_label(row[1])), None)
    if bad is not None:
        raise ImageError(
            f"label file {path} has a line {' '.join(bad)!r}; "
            "write NAME LABEL, the label a class index or a WordNet id"
        )
    by_name = {name: _class_index(label) for name, label in rows}
    found = {}
    for entry in files.entries:
        file = PurePosixPath(entry)
        name = next((name for name in (entry, file.name, file.stem) if name in by_name), None)
        if name is not None:
            found[entry] = by_name[name]
    if not found:
        raise ImageError(
            f"label file {path} names none of the {len(files.entries)} images in {files.path}, "
            f"e.g. {files.entries[0]}"
        )
    return found


def _is_label(text: str) -> bool:
    return text.isdecimal() or _WNID.fullmatch(text) is not None


def _class_index(label: str) -> int:
    """Return the class that a class index or a WordNet id means."""
    if label.isdecimal():
        return int(label)
    wnids = _imagenet_wnids()
    if label not in wnids:
        raise ImageError(
            f"{label} is none of the {len(wnids)} classes of ImageNet-1K; pass the class of every "
            "folder in a class map (--class-map FILE)"
        )
    return wnids[label]
