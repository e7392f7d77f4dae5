"""COCO and LVIS instance files in their published form, with the images that they describe."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bmfa.data.images import ImageError, ImageFiles
from bmfa.data.instances import AnnotationError, Instance, InstanceImage, Tally
from bmfa.data.masks import MaskError, decode_mask

MISSING_IMAGE = "missing image"
UNREADABLE_IMAGE = "unreadable image"
OTHER_SIZE = "image of another size than annotated"
UNKNOWN_CATEGORY = "unknown category"
# Faults that may be gone when the files are read again.
FILE_FAULTS = (UNREADABLE_IMAGE, OTHER_SIZE)
_PART_ANNOTATIONS = 128  # annotations in a part, unless the caller says otherwise


class ImageRecord(NamedTuple):
    """An image as the annotation file describes it; `names` are possible file names, best first."""

    id: int
    width: int
    height: int
    names: tuple[str, ...]


class _AnnotatedImage(NamedTuple):
    """An image, its entry in the folder or zip (None if missing), and its annotations."""

    image: ImageRecord
    entry: str | None
    annotations: list[dict[str, Any]]


class InstancePart:
    """Images with their annotations; a few are small to pickle, and decoded where they are read."""

    def __init__(self, images: ImageFiles, rows: list[_AnnotatedImage]) -> None:
        self.images, self._rows = images, rows

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._rows)

    def parts(self, instances: int = _PART_ANNOTATIONS) -> Iterator["InstancePart"]:
        """Yield consecutive images in parts of at least so many annotations, but for the last."""
        rows: list[_AnnotatedImage] = []
        count = 0
        for row in self._rows:
            rows.append(row)
            count += len(row.annotations)
            if count >= instances:
                yield InstancePart(self.images, rows)
                rows, count = [], 0
        if rows:
            yield InstancePart(self.images, rows)

    def listing(self) -> list[str]:
        """Return the id and the file of every image; it changes when a missing file is added."""
        return [f"{row.image.id}\n{row.entry}" for row in self._rows]

    def instances(self, tally: Tally | None = None) -> Iterator[Instance]:
        """Yield every usable instance, image by image; `tally` counts the others."""
        tally = Tally() if tally is None else tally
        for row in self._rows:
            image = self._read(row, tally) if row.annotations else None
            if image is not None:
                yield from _decode_instances(image, row.annotations, tally)

    def _read(self, row: _AnnotatedImage, tally: Tally) -> InstanceImage | None:
        name, instances = row.image.names[0], len(row.annotations)
        if row.entry is None:
            tally.fault(MISSING_IMAGE, name, instances)
            return None
        try:
            pixels = self.images.read(row.entry)
        except ImageError as error:
            tally.fault(UNREADABLE_IMAGE, str(error), instances)
            return None
        annotated = (row.image.height, row.image.width)
        if pixels.shape[:2] != annotated:
            # The annotations may ignore the EXIF orientation.
            pixels = self.images.read(row.entry, upright=False)
        if pixels.shape[:2] != annotated:
            tally.fault(OTHER_SIZE, row.entry, instances)
            return None
        return InstanceImage(row.image.id, row.entry, pixels)


class InstanceFiles(InstancePart):
    """The instances of an annotation file, with images from a folder or a zip.

    Args:
        annotations: COCO or LVIS (v0.5, v1) instances file.
        images: folder or zip that holds the images.

    Raises:
        AnnotationError: the annotation file cannot be read or is not an instances file.
        ImageError: no image of the annotation file is found.
    """

    def __init__(self, annotations: str | os.PathLike[str], images: str | os.PathLike[str]) -> None:
        self.annotations = AnnotationFile(annotations)
        files, listed = ImageFiles(images), self.annotations.images
        of_image = dict(self.annotations.of_image)
        rows = [
            _AnnotatedImage(image, files.find(image.names), of_image.pop(image.id, []))
            for image in listed
        ]
        if not any(row.entry for row in rows):
            sought = "; ".join(" or ".join(image.names) for image in listed[:2])
            shown = f", such as {', '.join(files.entries[:3])}" if files.entries else ""
            raise ImageError(
                f"{files.path} holds none of the {len(listed)} images of {self.annotations.path}: "
                f"looked for {sought or 'nothing, the file lists no image'}; found "
                f"{len(files.entries)} images{shown}; pass the folder or zip that holds them"
            )
        for identity, annotated in of_image.items():
            unlisted = ImageRecord(identity, 0, 0, (f"image {identity}, not among images",))
            rows.append(_AnnotatedImage(unlisted, None, annotated))
        super().__init__(files, rows)


def _decode_instances(
    image: InstanceImage, annotations: list[dict[str, Any]], tally: Tally
) -> Iterator[Instance]:
    height, width = image.pixels.shape[:2]
    for annotation in annotations:
        identity, category = annotation["id"], annotation["category"]
        name = f"annotation {identity} of {image.name}"
        if category is None:
            tally.fault(UNKNOWN_CATEGORY, name)
            continue
        try:
            mask = decode_mask(annotation["segmentation"], height, width)
        except MaskError as error:
            tally.fault(str(error), name)
            continue
        area, crowd = float(annotation.get("area", mask.sum())), bool(annotation.get("iscrowd"))
        frequency = category.get("frequency")
        yield Instance(image, identity, category["name"], frequency, area, crowd, mask)


class AnnotationFile:
    """A COCO or LVIS (v0.5, v1) instances file, parsed and checked.

    Args:
        path: the JSON file.

    Raises:
        AnnotationError: the file cannot be read, or an entry is wrong; the message says which.

    Attributes:
        images: the images in the order of the file.
        of_image: the annotations by the id of their image, each with its category or None.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        content = _read_json(self.path)
        for section, fields in _FIELDS.items():
            _check_section(self.path, content, section, fields)
        self.images = tuple(map(_image, content["images"]))
        twice = [one for one, count in Counter(one.id for one in self.images).items() if count > 1]
        if twice:
            raise AnnotationError(
                f"{self.path}: several images have the id {twice[0]}; give each image its own id"
            )
        categories = {category["id"]: category for category in content["categories"]}
        self.of_image: dict[int, list[dict[str, Any]]] = {}
        for annotation in content["annotations"]:
            annotation["category"] = categories.get(annotation["category_id"])
            self.of_image.setdefault(annotation["image_id"], []).append(annotation)


class _Field(NamedTuple):
    """What a field of an annotation file accepts, in words and as a predicate of its value."""

    accepted: str
    valid: Callable[[Any], bool]
    default: Any = None


def _at_least(low: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value < math.inf


_INTEGER = _Field("an integer", lambda value: type(value) is int)
_SIDE = _Field("an integer of at least 1", lambda value: type(value) is int and value >= 1)
_TEXT = _Field("a string", lambda value: isinstance(value, str))
_OPTIONAL_TEXT = _TEXT._replace(default="")
_MASK = _Field(
    "a list of polygons or an object of run lengths", lambda value: isinstance(value, (list, dict))
)
_FIELDS: dict[str, dict[str, _Field]] = {
    "categories": {
        "id": _INTEGER,
        "name": _TEXT,
        "frequency": _Field("r, c, f or nothing", lambda value: value in (None, "r", "c", "f")),
    },
    "images": {
        "id": _INTEGER,
        "width": _SIDE,
        "height": _SIDE,
        "file_name": _OPTIONAL_TEXT,
        "coco_url": _OPTIONAL_TEXT,
    },
    "annotations": {
        "id": _INTEGER,
        "category_id": _INTEGER,
        "image_id": _INTEGER,
        "segmentation": _MASK,
        "area": _Field("a number of at least 0", _at_least(0), 0),
        "iscrowd": _Field("0 or 1", lambda value: value in (0, 1), 0),
    },
}


def _check_section(path: Path, content: Any, section: str, fields: dict[str, _Field]) -> None:
    """Raise AnnotationError for the first entry of a section that is not as the format says."""
    entries = content.get(section) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise AnnotationError(
            f"{path} has no list {section}; pass a COCO or LVIS instances file, which has images, "
            "annotations and categories"
        )
    for index, entry in enumerate(entries):
        for name, field in fields.items():
            value = entry.get(name, field.default) if isinstance(entry, dict) else None
            if not field.valid(value):
                raise AnnotationError(
                    f"{path}: {section}[{index}].{name} is {json.dumps(value)[:40]}, and a COCO or "
                    f"LVIS instances file has {field.accepted} there"
                )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise AnnotationError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AnnotationError(
            f"{path} is not JSON, or was cut off: {error}; pass the annotation file itself, unpacked"
        ) from error


def _image(image: dict[str, Any]) -> ImageRecord:
    names = []
    if "file_name" in image:
        names.append(image["file_name"].removeprefix("./"))
    if "coco_url" in image:
        # LVIS v1 has no other name; the last folder distinguishes train2017 and val2017.
        names.append("/".join(urlsplit(image["coco_url"]).path.split("/")[-2:]))
    # LVIS v0.5 has the file names of COCO 2014; since 2017 a file is named by its id.
    names.append(f"{image['id']:012d}.jpg")
    return ImageRecord(image["id"], image["width"], image["height"], tuple(dict.fromkeys(names)))
