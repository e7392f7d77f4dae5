"""COCO and LVIS instance files in their published form, with the images that they describe."""

import json
import math
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from bmfa.data.images import ImageError, ImageFiles
from bmfa.data.instances import AnnotationError, Instance, InstanceImage, InstanceSource, Tally
from bmfa.packages import load_package

MISSING_IMAGE = "missing image"
UNREADABLE_IMAGE = "unreadable image"
OTHER_SIZE = "image of another size than annotated"
# Faults that may be gone when the files are read again.
FILE_FAULTS = (UNREADABLE_IMAGE, OTHER_SIZE)
UNKNOWN_CATEGORY = "unknown category"
DEGENERATE = "degenerate polygon"
MALFORMED_POLYGON = "malformed polygon"
MALFORMED_RUNS = "malformed run lengths"
OUTSIDE = "mask outside the image"
EMPTY = "empty mask"

# Polygons that reach further than this many image sides are refused: pycocotools allocates memory
# for every fifth of a pixel along an edge.
_MAX_SIDES = 16

# The type of a field of an annotation file.
_FIELDS: dict[str, dict[str, Any]] = {
    "categories": {"id": int, "name": str, "frequency": str | None},
    "images": {
        **dict.fromkeys(("id", "width", "height"), int),
        **dict.fromkeys(("file_name", "coco_url"), str | None),
    },
    "annotations": {
        **dict.fromkeys(("id", "category_id", "image_id"), int),
        **dict.fromkeys(("area", "iscrowd"), int | float | None),
        "segmentation": list | dict,  # polygons or run lengths
    },
}
# Run lengths as text: characters with a continuation bit, and one without it, for each number.
# pycocotools would read beyond the end of a text that breaks off inside of a number.
_RUNS = re.compile(r"(?:[P-o]{0,6}[0-O])*")


class MaskError(ValueError):
    """Raised for an annotation without a usable mask; the message is one of the reasons above."""


class _AnnotatedImage(NamedTuple):
    """An image as annotated, its entry in the folder or zip (None if missing), its annotations."""

    id: int
    name: str
    shape: tuple[int, int]  # height, width
    entry: str | None
    annotations: list[dict[str, Any]]


class InstanceFiles(InstanceSource):
    """The instances of an annotation file, with images from a folder or a zip.

    Args:
        annotations: COCO or LVIS (v0.5, v1) instances file.
        images: folder or zip that holds the images.

    Raises:
        AnnotationError: the annotation file cannot be read or is not an instances file.
        ImageError: no image of the annotation file is found.
    """

    def __init__(self, annotations: str | os.PathLike[str], images: str | os.PathLike[str]) -> None:
        self.annotations, self.images = Path(annotations), ImageFiles(images)
        content = read_annotations(self.annotations)
        self._categories = {category["id"]: category for category in content["categories"]}
        of_image: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for annotation in content["annotations"]:
            of_image[annotation["image_id"]].append(annotation)
        self._rows, listed = [], content["images"]
        for image in listed:
            names, shape = _file_names(image), (image["height"], image["width"])
            annotated, entry = of_image.pop(image["id"], []), self.images.find(names)
            self._rows.append(_AnnotatedImage(image["id"], names[0], shape, entry, annotated))
        if not any(row.entry for row in self._rows):
            sought = " or ".join(_file_names(listed[0])) if listed else "nothing"
            raise ImageError(
                f"{self.images.path} holds none of the {len(listed)} images of {self.annotations}: "
                f"looked for {sought}; found {len(self.images.entries)} images, such as "
                f"{', '.join(self.images.entries[:3])}; pass the folder or zip that holds them"
            )
        for identity, annotated in of_image.items():
            name = f"image {identity}, not among images"
            self._rows.append(_AnnotatedImage(identity, name, (0, 0), None, annotated))

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._rows)

    def read(self, index: int, tally: Tally) -> Iterator[Instance]:
        """Yield every usable instance of an image; `tally` counts the others."""
        row = self._rows[index]
        image = self._read_image(row, tally) if row.annotations else None
        if image is None:
            return
        for annotation in row.annotations:
            identity, category = annotation["id"], self._categories.get(annotation["category_id"])
            try:
                if category is None:
                    raise MaskError(UNKNOWN_CATEGORY)
                mask = decode_mask(annotation["segmentation"], *row.shape)
            except MaskError as error:
                tally.fault(str(error), f"annotation {identity} of {image.name}")
                continue
            area, crowd = annotation.get("area"), bool(annotation.get("iscrowd"))
            area, frequency = float(mask.sum() if area is None else area), category.get("frequency")
            yield Instance(image, identity, category["name"], frequency, area, crowd, mask)

    def _read_image(self, row: _AnnotatedImage, tally: Tally) -> InstanceImage | None:
        fault, name = MISSING_IMAGE, row.name
        if row.entry is not None:
            fault, name = OTHER_SIZE, row.entry
            try:
                # Second as it is stored: the annotations may ignore the EXIF orientation.
                for upright in (True, False):
                    pixels = self.images.read(row.entry, upright=upright)
                    if pixels.shape[:2] == row.shape:
                        return InstanceImage(row.id, row.entry, pixels)
            except ImageError as error:
                fault, name = UNREADABLE_IMAGE, str(error)
        tally.fault(fault, name, len(row.annotations))
        return None


def read_annotations(path: Path) -> Any:
    """Read and check a COCO or LVIS (v0.5, v1) instances file.

    Returns:
        The content: lists of categories, images and annotations, whose fields are checked.

    Raises:
        AnnotationError: the file cannot be read, or an entry is wrong; the message says which.
    """
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise AnnotationError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AnnotationError(
            f"{path} is not JSON, or was cut off: {error}; pass the annotation file itself, unpacked"
        ) from error
    for section, fields in _FIELDS.items():
        entries = content.get(section) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise AnnotationError(
                f"{path} has no list {section}; pass a COCO or LVIS instances file, which has images, "
                "annotations and categories"
            )
        for index, entry in enumerate(entries):
            for name, kind in fields.items():
                value = entry.get(name) if isinstance(entry, dict) else None
                if not isinstance(value, kind):
                    raise AnnotationError(
                        f"{path}: {section}[{index}].{name} is {json.dumps(value)[:40]}, and of type "
                        f"{getattr(kind, '__name__', kind)} in a COCO or LVIS instances file"
                    )
    return content


def _file_names(image: dict[str, Any]) -> list[str]:
    """Return the possible names of the file of an image, best first."""
    # LVIS v0.5 has the file names of COCO 2014; since 2017 a file is named by its id.
    names = [(image.get("file_name") or "").removeprefix("./"), f"{image['id']:012d}.jpg"]
    # LVIS v1 has no other name; the last folder distinguishes train2017 and val2017.
    names.insert(1, "/".join(urlsplit(image.get("coco_url") or "").path.split("/")[-2:]))
    return list(dict.fromkeys(filter(None, names)))


def decode_mask(segmentation: Any, height: int, width: int) -> NDArray[np.bool_]:
    """Decode a COCO segmentation.

    Args:
        segmentation: list of polygons, or run lengths {"size", "counts"} as list or string.
        height: height of the image in pixels.
        width: width of the image in pixels.

    Returns:
        (height, width) bool with at least one True.

    Raises:
        MaskError: the segmentation is malformed, empty or outside the image.
    """
    is_polygons = isinstance(segmentation, list)
    mask = (_fill_polygons if is_polygons else _expand_runs)(segmentation, height, width)
    if not mask.any():
        raise MaskError(DEGENERATE if is_polygons else EMPTY)
    return mask


def _fill_polygons(polygons: list[Any], height: int, width: int) -> NDArray[np.bool_]:
    """Return the union of polygons; pycocotools would end the process at some that are refused here."""
    for polygon in polygons:
        even = isinstance(polygon, list) and len(polygon) % 2 == 0
        if not even or not all(type(x) in (int, float) and abs(x) < math.inf for x in polygon):
            raise MaskError(MALFORMED_POLYGON)
    # Fewer than three points enclose nothing, and pycocotools reads four numbers as a box.
    polygons = [polygon for polygon in polygons if len(polygon) >= 6]
    if not polygons:
        raise MaskError(DEGENERATE)
    x = [number for polygon in polygons for number in polygon[::2]]
    y = [number for polygon in polygons for number in polygon[1::2]]
    apart = min(x) >= width or max(x) <= 0 or min(y) >= height or max(y) <= 0
    if apart or max(map(abs, x + y)) > _MAX_SIDES * max(height, width):
        raise MaskError(OUTSIDE)
    coco = load_package("pycocotools.mask")
    return _decode(coco.merge(coco.frPyObjects(polygons, height, width)))


def _expand_runs(segmentation: dict[str, Any], height: int, width: int) -> NDArray[np.bool_]:
    """Return the mask of run lengths; pycocotools ignores what a list lacks, and parts of numbers."""
    if segmentation.get("size") != [height, width]:
        raise MaskError(OUTSIDE)
    counts, as_list = segmentation.get("counts"), False
    if isinstance(counts, list):
        as_list = all(type(n) is int for n in counts) and sum(counts) == height * width
    if not as_list and not (isinstance(counts, str) and _RUNS.fullmatch(counts)):
        raise MaskError(MALFORMED_RUNS)
    coco = load_package("pycocotools.mask")
    try:
        return _decode(coco.frPyObjects(segmentation, height, width) if as_list else segmentation)
    except (ValueError, OverflowError):
        raise MaskError(MALFORMED_RUNS) from None


def _decode(runs: Any) -> NDArray[np.bool_]:
    with warnings.catch_warnings():
        # pycocotools 2.0 does not yet take NumPy 2's `copy` argument.
        warnings.simplefilter("ignore", DeprecationWarning)
        return np.asarray(load_package("pycocotools.mask").decode(runs)).view(bool)
