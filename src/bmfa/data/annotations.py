"""COCO and LVIS instance files in their published form, parsed and checked."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bmfa.data.instances import AnnotationError

_FREQUENCIES = ("r", "c", "f")


class Category(NamedTuple):
    """A category's name and, in LVIS, its frequency: r(are), c(ommon) or f(requent)."""

    name: str
    frequency: str | None


class PictureRecord(NamedTuple):
    """A picture as the file describes it; `names` are those it may have on disk, likeliest first."""

    id: int
    width: int
    height: int
    names: tuple[str, ...]


class InstanceRecord(NamedTuple):
    """An annotation before its mask is decoded; no category where the file does not define it."""

    id: int
    category: Category | None
    area: float | None
    crowd: bool
    segmentation: Any


class AnnotationFile:
    """A COCO or LVIS (v0.5, v1) instances file."""

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
        """The annotations of one picture, in the file's order."""
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

    def orphans(self) -> Iterator[int]:
        """Picture ids that annotations refer to and the file does not list."""
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
    """The content of a JSON file, or one line that says where it broke."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return json.loads(text)
    except OSError as error:
        raise AnnotationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise AnnotationError(
            f"{path} is no JSON text: byte {error.start} of {len(error.object)} is not UTF-8; "
            "pass the annotation file itself, unpacked"
        ) from error
    except json.JSONDecodeError as error:
        raise AnnotationError(f"{path} {_where_broken(error)}; fetch or write it again") from error
    except (ValueError, RecursionError) as error:
        raise AnnotationError(f"{path} is no annotation file: {error}") from error


def _where_broken(error: json.JSONDecodeError) -> str:
    text = error.doc
    ends_early = not text[error.pos :].strip() or not text.rstrip().endswith(("}", "]"))
    state = "is cut off" if ends_early else "is no valid JSON"
    byte, size = len(text[: error.pos].encode()), len(text.encode())
    place = f"byte {byte} of {size} (line {error.lineno}, column {error.colno})"
    return f"{state} at {place}: {error.msg}"


class _Object:
    """A JSON object with its place in the file, for checks that name the place."""

    __slots__ = ("fields", "file", "place")

    def __init__(self, fields: Any, file: str, place: str) -> None:
        self.file, self.place, self.fields = file, place, fields
        if not isinstance(fields, dict):
            raise AnnotationError(
                f"{file}: {place or 'the top level'} is {_brief(fields)}, not an object; pass a COCO "
                "or LVIS instances file, which has images, annotations and categories"
            )

    def fail(self, key: str, accepted: str) -> AnnotationError:
        place = f"{self.place}.{key}" if self.place else key
        state = f"is {_brief(self.fields[key])}" if key in self.fields else "is missing"
        return AnnotationError(
            f"{self.file}: {place} {state}, and a COCO or LVIS instances file has {accepted} there"
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
            raise self.fail(key, "a text")
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
        # LVIS v1 has nothing else; the last folder tells train2017 from val2017.
        names.append("/".join(urlsplit(picture.text("coco_url")).path.split("/")[-2:]))
    # LVIS v0.5 names pictures as COCO did in 2014; since 2017 they bear their id alone.
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
