"""Instances of annotated images, and the count of those that were skipped."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmfa.packages import load_package

SIZES = ("small", "medium", "large")
_SIZE_EDGES = (32.0**2, 96.0**2)  # square pixels, as COCO defines them
_MAX_NAMES = 5  # names that are kept for each reason


class AnnotationError(ValueError):
    """Raised for an annotation file that cannot be used, and with `strict` for one of its entries."""


def size_group(area: float) -> str:
    """Return the size group of COCO: small below 32^2 pixels, large from 96^2 on."""
    return SIZES[sum(area >= edge for edge in _SIZE_EDGES)]


@dataclass(frozen=True, eq=False)
class InstanceImage:
    """An image: id, name and pixels (height, width, 3) uint8 RGB."""

    id: int
    name: str
    pixels: NDArray[np.uint8]

    @cached_property
    def grey(self) -> Any:
        """The image as an 8-bit greyscale Pillow image."""
        return load_package("PIL.Image").fromarray(self.pixels).convert("L")

    def instances(
        self, first: int, masks: Iterable[tuple[str, NDArray[np.bool_]]]
    ) -> list["Instance"]:
        """Return objects that were drawn, of categories and masks, numbered from `first` on."""
        return [
            Instance(self, identity, category, None, float(mask.sum()), False, mask)
            for identity, (category, mask) in enumerate(masks, first)
        ]


@dataclass(frozen=True, eq=False)
class Instance:
    """One object of an image.

    Args:
        image: the image.
        annotation_id: id in the annotation file.
        category: name of the category.
        frequency: frequency of the category in LVIS, r, c or f.
        area: area in pixels as annotated, or of the mask.
        crowd: True if the annotation covers a group of objects.
        mask: (height, width) bool, True on the pixels of the object.
    """

    image: InstanceImage
    annotation_id: int
    category: str
    frequency: str | None
    area: float
    crowd: bool
    mask: NDArray[np.bool_]

    @property
    def size(self) -> str:
        """Size group: small, medium or large."""
        return size_group(self.area)


@dataclass
class Tally:
    """Counts of the instances that were not used, by reason, with the names of the first few.

    Args:
        strict: True to raise at the first fault.
        faults: instances with wrong data, by reason.
        left_out: instances that the protocol excludes, by reason.
        names: names of the first instances, by reason.
    """

    strict: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def fault(self, reason: str, name: str, instances: int = 1) -> None:
        """Count a fault; raise AnnotationError if `strict`."""
        if self.strict:
            raise AnnotationError(
                f"{name}: {reason}; correct it, or read without strict to skip it"
            )
        self.merge(Tally(faults=Counter({reason: instances}), names={reason: [name]}))

    def leave_out(self, reason: str, name: str) -> None:
        """Count an instance that the protocol excludes."""
        self.merge(Tally(left_out=Counter({reason: 1}), names={reason: [name]}))

    def merge(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        self.faults += other.faults
        self.left_out += other.left_out
        for reason, names in other.names.items():
            self.names[reason] = [*self.names.get(reason, []), *names][:_MAX_NAMES]

    def lines(self) -> list[str]:
        """Return a line for each reason: the number of instances, and the names of the first."""
        lines = []
        for reason, count in [*self.faults.items(), *self.left_out.items()]:
            more = ["..."] if count > len(self.names[reason]) else []
            lines.append(f"{reason}: {count} ({', '.join([*self.names[reason], *more])})")
        return lines


class InstanceSource(Sized):
    """Annotated images by index: those of files, or images that are drawn."""

    @abstractmethod
    def read(self, index: int, tally: Tally) -> Iterator[Instance]:
        """Yield every usable instance of an image; `tally` counts the others."""

    def instances(self, tally: Tally | None = None) -> Iterator[Instance]:
        """Yield every usable instance, image by image; `tally` counts the others."""
        tally = Tally() if tally is None else tally
        for index in range(len(self)):
            yield from self.read(index, tally)
