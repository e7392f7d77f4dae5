"""COCO and LVIS instance files in their published form, with the pictures that they describe."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bmfa.data.instances import AnnotationError, Instance, Picture, Tally
from bmfa.data.masks import MaskError, decode_mask
from bmfa.data.pictures import PictureError, PictureFiles

MISSING_PICTURE = "missing picture"
UNREADABLE_PICTURE = "unreadable picture"
OTHER_SIZE = "picture of another size than annotated"
UNKNOWN_CATEGORY = "unknown category"
# Faults that may be gone when the files are read again.
FILE_FAULTS = (UNREADABLE_PICTURE, OTHER_SIZE)
_FREQUENCIES = ("r", "c", "f")
_PART_ANNOTATIONS = 128  # annotations in a part, unless the caller says otherwise


class Category(NamedTuple):
    """A category: its name and, in LVIS, its frequency r(are), c(ommon) or f(requent)."""

    name: str
    frequency: str | None


class PictureRecord(NamedTuple):
    """A picture as the annotation file describes it; `names` are possible file names, best first."""

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
    """The instances of an annotation file, with pictures from a folder or a zip.

    Args:
        annotations: COCO or LVIS (v0.5, v1) instances file.
        pictures: folder or zip that holds the pictures.

    Raises:
        AnnotationError: the annotation file cannot be read or is not an instances file.
        PictureError: no picture of the annotation file is found.
    """

    def __init__(
        self, annotations: str | os.PathLike[str], pictures: str | os.PathLike[str]
    ) -> None:
        self.annotations = AnnotationFile(annotations)
        self.pictures = PictureFiles(pictures)
        self._entries = {p.id: self.pictures.find(p.names) for p in self.annotations.pictures}
        if not any(self._entries.values()):
            raise PictureError(self._nothing_found())

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.annotations.pictures)

    def parts(self, instances: int = _PART_ANNOTATIONS) -> Iterator["InstancePart"]:
        """Yield consecutive pictures in parts of at least so many annotations, but for the last."""
        rows: list[_AnnotatedPicture] = []
        count = 0
        for row in self._rows():
            rows.append(row)
            count += len(row.annotations)
            if count >= instances:
                yield InstancePart(self.pictures, rows)
                rows, count = [], 0
        if rows:
            yield InstancePart(self.pictures, rows)

    def instances(self, tally: Tally | None = None) -> Iterator[Instance]:
        """Yield every usable instance, picture by picture; `tally` counts the others."""
        tally = Tally() if tally is None else tally
        for part in self.parts():
            yield from part.instances(tally)

    def _rows(self) -> Iterator["_AnnotatedPicture"]:
        for picture in self.annotations.pictures:
            records = self.annotations.of_picture(picture.id)
            yield _AnnotatedPicture(picture, self._entries[picture.id], records)
        for identity in self.annotations.unlisted_pictures():
            unlisted = PictureRecord(identity, 0, 0, (f"picture {identity}, not among images",))
            yield _AnnotatedPicture(unlisted, None, self.annotations.of_picture(identity))

    def _nothing_found(self) -> str:
        sought = [" or ".join(picture.names) for picture in self.annotations.pictures[:2]]
        found = self.pictures.entries
        shown = f", such as {', '.join(found[:3])}" if found else ""
        return (
            f"{self.pictures.path} holds none of the {len(self)} pictures of {self.annotations.path}: "
            f"looked for {'; '.join(sought) or 'nothing, the file lists no picture'}; "
            f"found {len(found)} pictures{shown}; pass the folder or zip that holds them"
        )


@dataclass(frozen=True)
class _AnnotatedPicture:
    """A picture, its entry in the folder or zip (None if missing), and its annotations."""

    picture: PictureRecord
    entry: str | None
    annotations: list[InstanceRecord]


class InstancePart:
    """A few pictures with their annotations; small to pickle, decoded in the process that reads it."""

    def __init__(self, pictures: PictureFiles, rows: list[_AnnotatedPicture]) -> None:
        self._pictures, self._rows = pictures, rows

    def __len__(self) -> int:
        return len(self._rows)

    def parts(self, instances: int = _PART_ANNOTATIONS) -> Iterator["InstancePart"]:
        """Yield the part itself: it is not split further."""
        yield self

    def listing(self) -> list[str]:
        """Return the id and the file of every picture; it changes when a missing file is added."""
        return [f"{row.picture.id}\n{row.entry}" for row in self._rows]

    def instances(self, tally: Tally) -> Iterator[Instance]:
        """Yield every usable instance, picture by picture; `tally` counts the others."""
        for row in self._rows:
            picture = self._read(row, tally) if row.annotations else None
            if picture is not None:
                yield from _decode_instances(picture, row.annotations, tally)

    def _read(self, row: _AnnotatedPicture, tally: Tally) -> Picture | None:
        name, instances = row.picture.names[0], len(row.annotations)
        if row.entry is None:
            tally.fault(MISSING_PICTURE, name, instances)
            return None
        try:
            pixels = self._pictures.read(row.entry)
        except PictureError as error:
            tally.fault(UNREADABLE_PICTURE, str(error), instances)
            return None
        annotated = (row.picture.height, row.picture.width)
        if pixels.shape[:2] != annotated:
            # The annotations may ignore the EXIF orientation.
            pixels = self._pictures.read(row.entry, upright=False)
        if pixels.shape[:2] != annotated:
            tally.fault(OTHER_SIZE, row.entry, instances)
            return None
        return Picture(row.picture.id, row.entry, pixels)


def _decode_instances(
    picture: Picture, records: list[InstanceRecord], tally: Tally
) -> Iterator[Instance]:
    height, width = picture.pixels.shape[:2]
    for record in records:
        name = f"annotation {record.id} of {picture.name}"
        if record.category is None:
            tally.fault(UNKNOWN_CATEGORY, name)
            continue
        try:
            mask = decode_mask(record.segmentation, height, width)
        except MaskError as error:
            tally.fault(str(error), name)
            continue
        area = float(mask.sum()) if record.area is None else float(record.area)
        yield Instance(picture, record.id, *record.category, area, record.crowd, mask)


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
        self.pictures = tuple(map(_picture, top.objects("images")))
        self._annotations: dict[int, list[dict[str, Any]]] = {}
        for annotation in top.objects("annotations"):
            picture_id = _check_annotation(annotation)
            self._annotations.setdefault(picture_id, []).append(annotation.fields)
        self._check_unique_pictures()

    def __len__(self) -> int:
        return sum(map(len, self._annotations.values()))

    def of_picture(self, picture_id: int) -> list[InstanceRecord]:
        """Return the annotations of one picture in the order of the file."""
        return [
            InstanceRecord(
                annotation["id"],
                self.categories.get(annotation["category_id"]),
                annotation.get("area"),
                bool(annotation.get("iscrowd", 0)),
                annotation["segmentation"],
            )
            for annotation in self._annotations.get(picture_id, [])
        ]

    def unlisted_pictures(self) -> Iterator[int]:
        """Return ids of pictures that annotations refer to but the file does not list."""
        listed = {picture.id for picture in self.pictures}
        return (picture_id for picture_id in self._annotations if picture_id not in listed)

    def _check_unique_pictures(self) -> None:
        seen: set[int] = set()
        for position, picture in enumerate(self.pictures):
            if picture.id in seen:
                raise AnnotationError(
                    f"{self.path}: images[{position}].id repeats {picture.id}; "
                    "give each picture its own id"
                )
            seen.add(picture.id)


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


def _picture(picture: _Object) -> PictureRecord:
    identity = picture.integer("id")
    names: list[str] = []
    if "file_name" in picture.fields or "coco_url" not in picture.fields:
        names.append(picture.text("file_name").removeprefix("./"))
    if "coco_url" in picture.fields:
        # LVIS v1 has no other name; the last folder distinguishes train2017 and val2017.
        names.append("/".join(urlsplit(picture.text("coco_url")).path.split("/")[-2:]))
    # LVIS v0.5 has the file names of COCO 2014; since 2017 a file is named by its id.
    names.append(f"{identity:012d}.jpg")
    width, height = picture.integer("width", 1), picture.integer("height", 1)
    return PictureRecord(identity, width, height, tuple(dict.fromkeys(names)))


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
