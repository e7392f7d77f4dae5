"""What a method makes of pictures, beside what the full model makes of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Relative rounding of sums that cannot be negative, or exceed the number of pictures, but for it.
ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Reference:
    """Pictures on the device, their places and labels, and the outputs of the full model."""

    pixels: Tensor  # (B, 3, height, width)
    places: list[int]
    labels: list[int | None]
    full: Tensor  # (B, classes)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def labelled(self) -> int:
        """How many pictures have labels."""
        return sum(label is not None for label in self.labels)

    def single(self) -> Iterator["Reference"]:
        """The pictures one by one."""
        for index, (place, label) in enumerate(zip(self.places, self.labels, strict=True)):
            one = slice(index, index + 1)
            yield Reference(self.pixels[one], [place], [label], self.full[one])

    def agreeing(self, logits: Tensor) -> int:
        """How many pictures get the class that the full model gives them."""
        return int((logits.argmax(-1) == self.full.argmax(-1)).sum())

    def right(self, logits: Tensor) -> int:
        """How many pictures get their own class."""
        return sum(a == b for a, b in zip(logits.argmax(-1).tolist(), self.labels, strict=True))

    def among(self, logits: Tensor, count: int) -> int:
        """How many pictures have fewer than `count` classes before their own."""
        found = 0
        for scores, label in zip(logits.cpu(), self.labels, strict=True):
            found += label is not None and int((scores > scores[label]).sum()) < count
        return found

    def output_kl(self, logits: Tensor) -> float:
        """KL(full || approximate) of the output distributions, added up over the pictures."""
        full, approximate = (x.double().log_softmax(-1) for x in (self.full, logits))
        return float((full.exp() * (full - approximate)).sum())


def add_up(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums of equal names: exact, so that they do not depend on how parts are made up."""
    names = parts[0] if parts else {}
    return {name: _sum([part[name] for part in parts]) for name in names}


def _sum(values: Sequence[float]) -> float:
    return sum(values) if all(isinstance(x, int) for x in values) else math.fsum(values)


def check_labels(labels: Sequence[int | None], classes: int) -> None:
    """Raise where a label is none of the model's classes."""
    beyond = next((label for label in labels if label is not None and label >= classes), None)
    if beyond is not None:
        raise ValueError(
            f"a picture has class {beyond}, and the model {classes} classes; "
            "pass the model of these pictures, or labels in its order"
        )


def check_outputs(logits: Tensor, name: str) -> Tensor:
    """The outputs, if they are numbers: half precision may overflow."""
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(
            f"{name} gives outputs that are not finite; try --dtype bfloat16, or float32"
        )
    return logits
