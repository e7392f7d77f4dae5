"""Instances from an annotation file and the pictures it describes."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bmfa.data.annotations import AnnotationFile, Category, InstanceRecord, PictureRecord
from bmfa.data.instances import Instance, Picture, Tally
from bmfa.data.masks import MaskError, decode_mask
from bmfa.data.pictures import PictureError, PictureFiles

MISSING_PICTURE = "missing picture"
UNREADABLE_PICTURE = "unreadable picture"
OTHER_SIZE = "picture of another size than annotated"
UNKNOWN_CATEGORY = "unknown category"
# Faults of the files, which may be mended between two runs.
FAULTS_OF_FILES = (UNREADABLE_PICTURE, OTHER_SIZE)


@dataclass(frozen=True)
class _Row:
    """A picture, where it lies (None where it is missing), and its annotations."""

    picture: PictureRecord
    entry: str | None
    annotations: list[InstanceRecord]


class InstanceFiles:
    """The instances of an annotation file, with pictures from a folder or a zip."""

    def __init__(
        self, annotations: str | os.PathLike[str], pictures: str | os.PathLike[str]
    ) -> None:
        self.annotations = AnnotationFile(annotations)
        self.pictures = PictureFiles(pictures)
        self._entries = {p.id: self.pictures.find(p.names) for p in self.annotations.pictures}
        if not any(self._entries.values()):
            raise PictureError(self._nothing_found())

    def __len__(self) -> int:
        return len(self.annotations.pictures)

    def parts(self, instances: int = 128) -> Iterator["InstancePart"]:
        """Consecutive pictures with at least so many annotations together; the last may have fewer."""
        rows: list[_Row] = []
        gathered = 0
        for row in self._rows():
            rows.append(row)
            gathered += len(row.annotations)
            if gathered >= instances:
                yield InstancePart(self.pictures, rows)
                rows, gathered = [], 0
        if rows:
            yield InstancePart(self.pictures, rows)

    def instances(self, tally: Tally | None = None) -> Iterator[Instance]:
        """Every usable instance, picture by picture; the others are counted in `tally`."""
        tally = Tally() if tally is None else tally
        for part in self.parts():
            yield from part.instances(tally)

    def _rows(self) -> Iterator[_Row]:
        for picture in self.annotations.pictures:
            yield _Row(picture, self._entries[picture.id], self.annotations.of_picture(picture.id))
        for identity in self.annotations.orphans():
            unlisted = PictureRecord(identity, 0, 0, (f"picture {identity}, not among images",))
            yield _Row(unlisted, None, self.annotations.of_picture(identity))

    def _nothing_found(self) -> str:
        sought = [" or ".join(picture.names) for picture in self.annotations.pictures[:2]]
        found = self.pictures.entries
        shown = f", such as {', '.join(found[:3])}" if found else ""
        return (
            f"{self.pictures.path} holds none of the {len(self)} pictures of {self.annotations.path}: "
            f"looked for {'; '.join(sought) or 'nothing, the file lists no picture'}; "
            f"found {len(found)} pictures{shown}; pass the folder or zip that holds them"
        )


class InstancePart:
    """A few pictures with their annotations; it pickles small, and decodes where it is read."""

    def __init__(self, pictures: PictureFiles, rows: list[_Row]) -> None:
        self._pictures, self._rows = pictures, rows

    def __len__(self) -> int:
        return len(self._rows)

    def parts(self, instances: int = 128) -> Iterator["InstancePart"]:
        """Itself: a part is not cut further."""
        yield self

    def listing(self) -> list[str]:
        """The pictures and the files that hold them; it changes when a missing one is supplied."""
        return [f"{row.picture.id}\n{row.entry}" for row in self._rows]

    def instances(self, tally: Tally) -> Iterator[Instance]:
        """Every usable instance, picture by picture; the others are counted in `tally`."""
        for row in self._rows:
            picture = self._read(row, tally) if row.annotations else None
            if picture is not None:
                yield from _decoded(picture, row.annotations, tally)

    def _read(self, row: _Row, tally: Tally) -> Picture | None:
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
            # The annotations may be of the picture as it is stored, whatever its EXIF data say.
            pixels = self._pictures.read(row.entry, upright=False)
        if pixels.shape[:2] != annotated:
            tally.fault(OTHER_SIZE, row.entry, instances)
            return None
        return Picture(row.picture.id, row.entry, pixels)


def _decoded(picture: Picture, records: list[InstanceRecord], tally: Tally) -> Iterator[Instance]:
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
        yield _instance(picture, record, record.category, mask)


def _instance(
    picture: Picture, record: InstanceRecord, category: Category, mask: NDArray[np.bool_]
) -> Instance:
    area = float(mask.sum()) if record.area is None else float(record.area)
    return Instance(picture, record.id, category.name, category.frequency, area, record.crowd, mask)
