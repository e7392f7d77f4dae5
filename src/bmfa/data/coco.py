"""COCO and LVIS instance files in their published form, with the images that they describe."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
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
_FREQUENCIES = ("r", "c", "f")
_PART_ANNOTATIONS = 128  # annotations in a part, unless the caller says otherwise


class Category(NamedTuple):
    """A category: its name and, in LVIS, its frequency r(are), c(ommon) or f(requent)."""

    name: str
    frequency: str | None


class ImageRecord(NamedTuple):
    """An image as the annotation file describes it; `names` are possible file names, best first."""

    id: int
    width: int
    height: int
    names: tuple[str, ...]


class InstanceRecord(NamedTuple):
    """An annotation with its mask still encoded; the category is None if the file lacks it."""

    id: int
    category: Category | None
    area: float | None
    crowd: bool
    segmentation: Any


class InstanceFiles:
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
        self.images = ImageFiles(images)
        self._entries = {p.id: self.images.find(p.names) for p in self.annotations.images}
        if not any(self._entries.values()):
            raise ImageError(self._nothing_found())

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.annotations.images)

    def parts(self, instances: int = _PART_ANNOTATIONS) -> Iterator["InstancePart"]:
        """Yield consecutive images in parts of at least so many annotations, but for the last."""
        rows: list[_AnnotatedImage] = []
        count = 0
        for row in self._rows():
            rows.append(row)
            count += len(row.annotations)
            if count >= instances:
                yield InstancePart(self.images, rows)
                rows, count = [], 0
        if rows:
            yield InstancePart(self.images, rows)

    def instances(self, tally: Tally | None = None) -> Iterator[Instance]:
        """Yield every usable instance, image by image; `tally` counts the others."""
        tally = Tally() if tally is None else tally
        for part in self.parts():
            yield from part.instances(tally)

    def _rows(self) -> Iterator["_AnnotatedImage"]:
        for image in self.annotations.images:
            records = self.annotations.of_image(image.id)
            yield _AnnotatedImage(image, self._entries[image.id], records)
        for identity in self.annotations.unlisted_images():
            unlisted = ImageRecord(identity, 0, 0, (f"image {identity}, not among images",))
            yield _AnnotatedImage(unlisted, None, self.annotations.of_image(identity))

    def _nothing_found(self) -> str:
        sought = [" or ".join(image.names) for image in self.annotations.images[:2]]
        found = self.images.entries
        shown = f", such as {', '.join(found[:3])}" if found else ""
        return (
            f"{self.images.path} holds none of the {len(self)} images of {self.annotations.path}: "
            f"looked for {'; '.join(sought) or 'nothing, the file lists no image'}; "
            f"found {len(found)} images{shown}; pass the folder or zip that holds them"
        )


@dataclass(frozen=True)
class _AnnotatedImage:
    """An image, its entry in the folder or zip (None if missing), and its annotations."""

    image: ImageRecord
    entry: str | None
    annotations: list[InstanceRecord]


class InstancePart:
    """A few images with their annotations; small to pickle, decoded in the process that reads it."""

    def __init__(self, images: ImageFiles, rows: list[_AnnotatedImage]) -> None:
        self._images, self._rows = images, rows

    def __len__(self) -> int:
        return len(self._rows)

    def parts(self, instances: int = _PART_ANNOTATIONS) -> Iterator["InstancePart"]:
        """Yield the part itself: it is not split further."""
        yield self

    def listing(self) -> list[str]:
        """Return the id and the file of every image; it changes when a missing file is added."""
        return [f"{row.image.id}\n{row.entry}" for row in self._rows]

    def instances(self, tally: Tally) -> Iterator[Instance]:
        """Yield every usable instance, image by image; `tally` counts the others."""
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
            pixels = self._images.read(row.entry)
        except ImageError as error:
            tally.fault(UNREADABLE_IMAGE, str(error), instances)
            return None
        annotated = (row.image.height, row.image.width)
        if pixels.shape[:2] != annotated:
            # The annotations may ignore the EXIF orientation.
            pixels = self._images.read(row.entry, upright=False)
        if pixels.shape[:2] != annotated:
            tally.fault(OTHER_SIZE, row.entry, instances)
            return None
        return InstanceImage(row.image.id, row.entry, pixels)


def _decode_instances(
    image: InstanceImage, records: list[InstanceRecord], tally: Tally
) -> Iterator[Instance]:
    height, width = image.pixels.shape[:2]
    for record in records:
        name = f"annotation {record.id} of {image.name}"
        if record.category is None:
            tally.fault(UNKNOWN_CATEGORY, name)
            continue
        try:
            mask = decode_mask(record.segmentation, height, width)
        except MaskError as error:
            tally.fault(str(error), name)
            continue
        area = float(mask.sum()) if record.area is None else float(record.area)
        yield Instance(image, record.id, *record.category, area, record.crowd, mask)


class AnnotationFile:
    """A COCO or LVIS (v0.5, v1) instances file, parsed and checked.

    Args:
        path: the JSON file.

    Raises:
        AnnotationError: the file cannot be read, or an entry is wrong; the message says which.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        top = _Object(parse_json(self.path), str(self.path), "")
        self.categories = dict(map(_category, top.objects("categories")))
        self.images = tuple(map(_image, top.objects("images")))
        self._annotations: dict[int, list[dict[str, Any]]] = {}
        for annotation in top.objects("annotations"):
            image_id = _check_annotation(annotation)
            self._annotations.setdefault(image_id, []).append(annotation.fields)
        self._check_unique_images()

    def __len__(self) -> int:
        return sum(map(len, self._annotations.values()))

    def of_image(self, image_id: int) -> list[InstanceRecord]:
        """Return the annotations of one image in the order of the file."""
        return [
            InstanceRecord(
                annotation["id"],
                self.categories.get(annotation["category_id"]),
                annotation.get("area"),
                bool(annotation.get("iscrowd", 0)),
                annotation["segmentation"],
            )
            for annotation in self._annotations.get(image_id, [])
        ]

    def unlisted_images(self) -> Iterator[int]:
        """Return ids of images that annotations refer to but the file does not list."""
        listed = {image.id for image in self.images}
        return (image_id for image_id in self._annotations if image_id not in listed)

    def _check_unique_images(self) -> None:
        seen: set[int] = set()
        for position, image in enumerate(self.images):
            if image.id in seen:
                raise AnnotationError(
                    f"{self.path}: images[{position}].id repeats {image.id}; "
                    "give each image its own id"
                )
            seen.add(image.id)


def parse_json(path: Path) -> Any:
    """Return the content of a JSON file; AnnotationError says in one line where it is damaged."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return json.loads(text)
    except OSError as error:
        raise AnnotationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise AnnotationError(
            f"{path} is not JSON text: byte {error.start} of {len(error.object)} is not UTF-8; "
            "pass the annotation file itself, unpacked"
        ) from error
    except json.JSONDecodeError as error:
        raise AnnotationError(f"{path} {_damage(error)}; download or write it again") from error
    except (ValueError, RecursionError) as error:
        raise AnnotationError(f"{path} is not an annotation file: {error}") from error


def _damage(error: json.JSONDecodeError) -> str:
    text = error.doc
    ends_early = not text[error.pos :].strip() or not text.rstrip().endswith(("}", "]"))
    state = "is cut off" if ends_early else "is not valid JSON"
    byte, size = len(text[: error.pos].encode()), len(text.encode())
    position = f"byte {byte} of {size} (line {error.lineno}, column {error.colno})"
    return f"{state} at {position}: {error.msg}"


class _Object:
    """A JSON object with its path in the file, such as `annotations[3]`, for error messages."""

    __slots__ = ("fields", "file", "path")

    def __init__(self, fields: Any, file: str, path: str) -> None:
        self.file, self.path, self.fields = file, path, fields
        if not isinstance(fields, dict):
            raise AnnotationError(
                f"{file}: {path or 'the top level'} is {_brief(fields)}, not an object; pass a COCO "
                "or LVIS instances file, which has images, annotations and categories"
            )

    def fail(self, key: str, accepted: str) -> AnnotationError:
        path = f"{self.path}.{key}" if self.path else key
        state = f"is {_brief(self.fields[key])}" if key in self.fields else "is missing"
        return AnnotationError(
            f"{self.file}: {path} {state}, and a COCO or LVIS instances file has {accepted} there"
        )

    def objects(self, key: str) -> Iterator["_Object"]:
        items = self.fields.get(key)
        if not isinstance(items, list):
            raise self.fail(key, "a list of objects")
        return (_Object(item, self.file, f"{key}[{index}]") for index, item in enumerate(items))

    def integer(self, key: str, low: int | None = None) -> int:
        value = self.fields.get(key)
        if type(value) is not int or (low is not None and value < low):
            raise self.fail(key, "an integer" if low is None else f"an integer of at least {low}")
        return value

    def text(self, key: str) -> str:
        value = self.fields.get(key)
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value


def _brief(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _category(category: _Object) -> tuple[int, Category]:
    frequency = category.fields.get("frequency")
    if frequency is not None and frequency not in _FREQUENCIES:
        raise category.fail("frequency", "r, c, f or nothing")
    return category.integer("id"), Category(category.text("name"), frequency)


def _image(image: _Object) -> ImageRecord:
    identity = image.integer("id")
    names: list[str] = []
    if "file_name" in image.fields or "coco_url" not in image.fields:
        names.append(image.text("file_name").removeprefix("./"))
    if "coco_url" in image.fields:
        # LVIS v1 has no other name; the last folder distinguishes train2017 and val2017.
        names.append("/".join(urlsplit(image.text("coco_url")).path.split("/")[-2:]))
    # LVIS v0.5 has the file names of COCO 2014; since 2017 a file is named by its id.
    names.append(f"{identity:012d}.jpg")
    width, height = image.integer("width", 1), image.integer("height", 1)
    return ImageRecord(identity, width, height, tuple(dict.fromkeys(names)))


def _check_annotation(annotation: _Object) -> int:
    annotation.integer("id")
    annotation.integer("category_id")
    if not isinstance(annotation.fields.get("segmentation"), (list, dict)):
        raise annotation.fail("segmentation", "a list of polygons or an object of run lengths")
    area = annotation.fields.get("area", 0)
    if type(area) not in (int, float) or not math.isfinite(area) or area < 0:
        raise annotation.fail("area", "a number of at least 0")
    if annotation.fields.get("iscrowd", 0) not in (0, 1):
        raise annotation.fail("iscrowd", "0 or 1")
    return annotation.integer("image_id")
