"""Images with class labels: folders by class, flat folders with a label file, embedded images.

`LabelledImages` and `EmbeddedImages` are map-style datasets for `torch.utils.data.DataLoader`:
they have a length, give an image by index, and pickle for worker processes.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
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

PathLike = str | os.PathLike[str]
# The class of every image (empty if unknown), how they were found, and a warning.
_Labels = tuple[dict[str, int], str, str | None]


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
        path: PathLike,
        labels: PathLike | None = None,
        *,
        class_map: PathLike | None = None,
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
            raise ImageError("a label file and a class map are given; pass one of them")
        class_names = () if classes is None or isinstance(classes, int) else classes
        count = classes if isinstance(classes, int) else len(class_names) or None
        if labels is not None:
            found = _read_labels(self.files, Path(labels))
        elif class_map is not None:
            found = _read_class_map(self.files, Path(class_map))
        else:
            found = _classes_of_folders(self.files, class_names, count)
        self._labels, self.label_source, self.label_warning = found
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
    return _numbered(load_package("timm.data").ImageNetInfo().label_names())


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _folders(files: ImageFiles) -> dict[str, str]:
    """Return the name of the folder of every image."""
    return {entry: PurePosixPath(entry).parent.name for entry in files.entries}


def _classes_of_folders(
    files: ImageFiles, class_names: Sequence[str], count: int | None
) -> _Labels:
    """Return the classes that the names of the folders mean to a model with `count` classes."""
    folders, warning = _folders(files), None
    names, first = sorted(set(folders.values())), files.entries[0]
    index, wordnet = _numbered(names), all(map(_WNID.fullmatch, names))
    # Sorted order for a model that was trained on these folders alone.
    if wordnet and (count != len(names) or count == _IMAGENET_CLASSES):
        index, source = {name: _class_index(name) for name in names}, "folders by WordNet id"
    elif all(map(str.isdecimal, names)):
        index, source = {name: int(name) for name in names}, "folders by class index"
    elif len(names) == 1:
        return {}, "none", None
    elif not wordnet and (other := next((e for e in folders if _kind(e) != _kind(first)), None)):
        raise ImageError(
            f"{files.path} has {first} and {other}, whose folders do not have one meaning; pass one "
            "folder of class folders that are named all by class indices, all by WordNet ids or all "
            "otherwise, or the class of every folder in a class map (--class-map FILE)"
        )
    elif set(names) <= set(class_names):
        index = {name: list(class_names).index(name) for name in names}
        source = "folders by the class names of the model"
    else:
        shown = [f"{name} {number}" for name, number in index.items()]
        if len(shown) > _MAX_SHOWN:
            shown[_MAX_SHOWN - 1 : -1] = ["..."]
        source = f"folders in sorted order: {', '.join(shown)}"
        if count is not None and len(names) < count:
            warning = (
                f"{len(names)} folders in sorted order are taken as classes 0 to {len(names) - 1} of "
                f"the model's {count}; if they are others, top-1 means nothing: pass --class-map FILE"
            )
    return {entry: index[name] for entry, name in folders.items()}, source, warning


def _kind(entry: str) -> tuple[object, ...]:
    """Return what the folders of all images must share if they are to be classes."""
    folder = PurePosixPath(entry).parent
    return folder.parent, not folder.name, folder.name.isdecimal(), _is_label(folder.name)


def _read_class_map(files: ImageFiles, path: Path) -> _Labels:
    """Return the class of every folder: lines with names in order, or lines `NAME INDEX`."""
    lines, folders = _read_lines(path, "class map"), _folders(files)
    pairs = [re.fullmatch(r"(.+?)(?:\s*,\s*|\s+)(\d+)", line) for line in lines]
    index = {pair[1]: int(pair[2]) for pair in pairs if pair}
    # A name may end with a number: the lines are names if they are those of the folders.
    if set(folders.values()) <= set(lines) or not all(pairs):
        index = _numbered(lines)
    missing = sorted(set(folders.values()) - index.keys())
    if missing or len(index) < len(lines):
        fault = f"has no class for {missing[0]!r}" if missing else "names a folder twice"
        raise ImageError(
            f"class map {path} {fault}; write each folder name once, in the order of the model's "
            "outputs or with its index"
        )
    labels = {entry: index[name] for entry, name in folders.items()}
    return labels, f"class map {path.name}", None


def _read_lines(path: Path, what: str) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"{what} {path} cannot be read: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def _read_labels(files: ImageFiles, path: Path) -> _Labels:
    """Return labels from lines `NAME LABEL` or `NAME,LABEL`; further columns are ignored."""
    by_name: dict[str, int] = {}
    for number, line in enumerate(_read_lines(path, "label file")):
        name, label, *_ = [*re.split(r"[\s,]+", line), ""]
        if _is_label(label):
            by_name[name] = _class_index(label)
        elif number or not label:  # not a header
            raise ImageError(
                f"label file {path} has a line {line!r}; "
                "write NAME LABEL, the label a class index or a WordNet id"
            )
    found = {}
    for entry in files.entries:
        names = (entry, PurePosixPath(entry).name, PurePosixPath(entry).stem)
        if (name := next(filter(by_name.__contains__, names), None)) is not None:
            found[entry] = by_name[name]
    if not found:
        raise ImageError(
            f"label file {path} names none of the {len(files.entries)} images in {files.path}, "
            f"e.g. {files.entries[0]}"
        )
    return found, "label file", None


def _is_label(text: str) -> bool:
    return text.isdecimal() or _WNID.fullmatch(text) is not None


def _class_index(label: str) -> int:
    """Return the class that a class index or a WordNet id means."""
    if not label.isdecimal() and label not in _imagenet_wnids():
        raise ImageError(
            f"{label} is not a class of ImageNet-1K; pass the class of every folder in a class map "
            "(--class-map FILE)"
        )
    return int(label) if label.isdecimal() else _imagenet_wnids()[label]
