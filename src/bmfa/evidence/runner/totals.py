"""Sums over images: each batch is measured once, by one process, and saved to a checkpoint."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from bmfa.data.classification import SkippedImages
from bmfa.evidence.runner import Progress
from bmfa.evidence.runner.batches import Batch, ImageBatches, no_images_error
from bmfa.evidence.runner.resume import Check, Checkpoint, Part, weights_digest
from bmfa.models import LoadedModel

# Relative rounding error allowed for sums that are otherwise in the range 0 to the image count.
ROUNDING = 1e-6

Sums = dict[str, dict[str, float]]  # the sums of a batch, by key


class Totals(Protocol):
    """A dataclass of sums over images for one key, usually a method."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    images: int

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the least and the largest possible value of every sum for `images` images."""
        ...


TotalsType = TypeVar("TotalsType", bound=Totals)


@dataclass(frozen=True, eq=False)
class Reference:
    """Images on the device with the outputs of the full model."""

    pixels: Tensor  # (B, 3, H, W)
    indices: list[int]
    labels: list[int | None]
    full: Tensor  # (B, classes) logits

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def labelled(self) -> int:
        """Number of images with a label."""
        return sum(label is not None for label in self.labels)

    def single(self) -> Iterator["Reference"]:
        """Yield the images one by one."""
        for i, (index, label) in enumerate(zip(self.indices, self.labels, strict=True)):
            yield Reference(self.pixels[i : i + 1], [index], [label], self.full[i : i + 1])

    def count_agreeing(self, logits: Tensor) -> int:
        """Count the images that get the class of the full model."""
        return int((logits.argmax(-1) == self.full.argmax(-1)).sum())

    def count_correct(self, logits: Tensor) -> int:
        """Count the images that get their own class."""
        return sum(a == b for a, b in zip(logits.argmax(-1).tolist(), self.labels, strict=True))

    def count_top_k(self, logits: Tensor, k: int) -> int:
        """Count the images with fewer than k classes of larger score than their own."""
        count = 0
        for scores, label in zip(logits.cpu(), self.labels, strict=True):
            count += label is not None and int((scores > scores[label]).sum()) < k
        return count

    def sum_output_kl(self, logits: Tensor) -> float:
        """Sum KL(full || approximate) of the output distributions over the images."""
        full, approximate = (x.double().log_softmax(-1) for x in (self.full, logits))
        return float((full.exp() * (full - approximate)).sum())


def sum_over_images(
    batches: ImageBatches,
    measure: Callable[[Batch], Sums],
    totals_type: type[TotalsType],
    checkpoint: Checkpoint,
    progress: Progress | None = None,
) -> tuple[dict[str, TotalsType], SkippedImages]:
    """Measure every batch and add up the sums.

    Each batch is measured by one process as if it were alone, and the sums are exact, so the totals
    do not depend on the number of processes nor on where a run was interrupted. Batches of the
    checkpoint in which images could not be read are read again, and measured again if more can be
    read now.

    Args:
        batches: The images.
        measure: Returns the sums of one batch by key.
        totals_type: The dataclass of the sums of a key.
        checkpoint: Receives the result of every batch.
        progress: Called with the images done and their number.

    Returns:
        The totals by key, and the images that could not be read.

    Raises:
        ValueError: If no image could be read.
    """
    processes, saved = checkpoint.processes, checkpoint.parts
    done = {n: part for n, part in saved.items() if n < len(batches) and not part["skipped"]}
    left = [number for number in range(len(batches)) if number not in done]

    def measure_number(number: int) -> Part:
        batch = next(read)
        if number in saved and saved[number]["skipped"] == batch.skipped:
            return saved[number]
        return {"skipped": batch.skipped, "sums": measure(batch) if len(batch) else {}}

    with closing(iter(batches.read(processes.mine(left)))) as read:
        for parts in processes.rounds(left, measure_number):
            done |= dict(parts)
            checkpoint.add(dict(parts))
            if progress is not None:
                progress(sum(len(batches.indices(number)) for number in done), len(batches.source))
    checkpoint.write()
    return _add_up([done[number] for number in sorted(done)], totals_type)


def _add_up(
    parts: Sequence[Part], totals_type: type[TotalsType]
) -> tuple[dict[str, TotalsType], SkippedImages]:
    skipped = SkippedImages()
    for part in parts:
        for reason in part["skipped"]:
            skipped.add(reason)
    sums: list[Sums] = [part["sums"] for part in parts if part["sums"]]
    if not sums:
        raise no_images_error(skipped)
    return {key: totals_type(**_sum([one[key] for one in sums])) for key in sums[0]}, skipped


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up equal names exactly, so that the order and the grouping of the parts do not matter."""
    columns = {name: [part[name] for part in parts] for name in parts[0]}
    return {
        name: sum(values) if all(isinstance(x, int) for x in values) else math.fsum(values)
        for name, values in columns.items()
    }


def run_identity(model: LoadedModel, batches: ImageBatches, device: str) -> dict[str, Any]:
    """Return what partial results depend on, besides the settings in a record."""
    return {
        "weights": weights_digest(model.model),
        "number of images": len(batches.source),
        "names of images": batches.digest(),
        "device": torch.device(device).type,
    }


def check_part(batches: ImageBatches, keys: Iterable[str], totals_type: type[Totals]) -> Check:
    """Return a check of the parts that `sum_over_images` saves.

    Args:
        batches: The batches of this run.
        keys: The keys that every part has.
        totals_type: The dataclass of the sums of a key, with their ranges.

    Returns:
        A function of the number of a batch and its part that returns a phrase about the first
        impossible value, or None.
    """
    expected = set(keys)

    def check(number: int, part: Part) -> str | None:
        if not isinstance(part, dict) or part.keys() != {"skipped", "sums"}:
            return "it does not consist of skipped and sums"
        skipped, sums = part["skipped"], part["sums"]
        if not isinstance(skipped, list) or not all(isinstance(one, str) for one in skipped):
            return "skipped is not a list of reasons"
        images = len(batches.indices(number)) - len(skipped)
        if not isinstance(sums, dict) or sums.keys() != (expected if images > 0 else set()):
            return "sums are not those of the methods of this run"
        faults = (_fault(key, sums[key], totals_type, images) for key in sums)
        return next(filter(None, faults), None)

    return check


def _fault(key: str, values: Any, totals_type: type[Totals], images: int) -> str | None:
    fields = totals_type.__dataclass_fields__
    if not isinstance(values, dict) or values.keys() != fields.keys():
        return f"the sums of {key} are not {', '.join(fields)}"
    for name, field in fields.items():
        accepted = int if field.type is int else (int, float)
        if not isinstance(values[name], accepted) or isinstance(values[name], bool):
            return f"{name} of {key} is {values[name]!r}, which is not a number of its kind"
    ranges = {"images": (images, images), **totals_type(**values).ranges()}
    for name, (low, high) in ranges.items():
        if not low <= values[name] <= high:
            return f"{name} of {key} is {values[name]}, outside the range {low:g} to {high:g}"
    return None


def check_labels(labels: Sequence[int | None], classes: int) -> None:
    """Raise ValueError if a label is not a class of the model."""
    beyond = next((label for label in labels if label is not None and label >= classes), None)
    if beyond is not None:
        raise ValueError(
            f"an image has class {beyond}, and the model {classes} classes; "
            "pass the model of these images, or labels in its order"
        )


def check_outputs(logits: Tensor, name: str) -> Tensor:
    """Return the outputs; raise ValueError if one is not finite, as after an overflow in float16."""
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(
            f"{name} gives outputs that are not finite; try --dtype bfloat16, or float32"
        )
    return logits
