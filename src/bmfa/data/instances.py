"""What every source of annotated pictures yields: instances, and a tally of what was skipped."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bmfa.packages import load_package

SIZES = ("small", "medium", "large")
_SIZE_EDGES = (32.0**2, 96.0**2)
_EXAMPLES = 5


class AnnotationError(ValueError):
    """An annotation file, or with `strict` one of its entries, that cannot be used."""


def size_group(area: float) -> str:
    """COCO's size group: small below 32^2 pixels, large from 96^2."""
    return SIZES[sum(area >= edge for edge in _SIZE_EDGES)]


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture with its pixels, (height, width, 3) RGB in 8 bits."""

    id: int
    name: str
    pixels: NDArray[np.uint8]

    @cached_property
    def grey(self) -> Any:
        """The picture as an 8-bit grey Pillow image."""
        return load_package("PIL.Image").fromarray(self.pixels).convert("L")


@dataclass(frozen=True, eq=False)
class Instance:
    """One object of a picture; `mask` is (height, width) and True on the object's pixels."""

    picture: Picture
    annotation_id: int
    category: str
    frequency: str | None
    area: float
    crowd: bool
    mask: NDArray[np.bool_]

    @property
    def size(self) -> str:
        """The size group: small, medium or large."""
        return size_group(self.area)


@dataclass
class Tally:
    """Instances that were not used, counted by reason and named.

    A fault is something wrong with the data, and raises with `strict`; what a protocol leaves out
    on purpose is counted apart. Only the first few names of each reason are kept.
    """

    strict: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def fault(self, reason: str, name: str, instances: int = 1) -> None:
        """Count a fault; with `strict`, raise instead."""
        if self.strict:
            raise AnnotationError(
                f"{name}: {reason}; correct it, or read without strict to skip it"
            )
        self._count(self.faults, reason, [name], instances)

    def leave_out(self, reason: str, name: str) -> None:
        """Count an instance that the protocol leaves out."""
        self._count(self.left_out, reason, [name], 1)

    def merge(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        for mine, theirs in ((self.faults, other.faults), (self.left_out, other.left_out)):
            for reason, instances in theirs.items():
                self._count(mine, reason, other.names[reason], instances)

    def lines(self) -> list[str]:
        """One line for each reason: how many instances, and which ones first."""
        counted = [*self.faults.items(), *self.left_out.items()]
        return [f"{reason}: {count} ({self._first(reason, count)})" for reason, count in counted]

    def _first(self, reason: str, count: int) -> str:
        names = self.names[reason]
        return ", ".join(names) + (", ..." if count > len(names) else "")

    def _count(self, counts: Counter[str], reason: str, names: list[str], instances: int) -> None:
        counts[reason] += instances
        kept = self.names.setdefault(reason, [])
        kept.extend(names[: _EXAMPLES - len(kept)])


class InstanceSource(Protocol):
    """Annotated pictures, from files or made on the spot."""

    def __len__(self) -> int:
        """The number of pictures."""
        ...

    def parts(self, instances: int) -> Iterator["InstanceSource"]:
        """The same pictures in order, cut into small sources that pickle, of about so many instances."""
        ...

    def instances(self, tally: Tally) -> Iterator[Instance]:
        """Every usable instance, picture by picture; the others are counted in `tally`."""
        ...
