"""Pictures in batches, measured by one process or many, and continued after an end that came early."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from bmfa.checks import check_integer
from bmfa.data.imagenet import LabelledPicture, Skipped
from bmfa.data.pictures import PictureError
from bmfa.evidence.runner.processes import Processes
from bmfa.evidence.runner.resume import Check, Checkpoint, Part, digest, weights_digest
from bmfa.models import LoadedModel, Preprocessing

_BATCHES_AHEAD = 2

Progress = Callable[[int, int], None]  # pictures done, of how many
Sums = dict[str, dict[str, float]]  # of every key, numbers to add up


class Source(Protocol):
    """Pictures by their index; those of a folder, the embedded ones, or a list."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> LabelledPicture:
        """One picture; PictureError where it cannot be read."""
        ...

    def names(self) -> list[tuple[str, int | None]]:
        """All names, with labels as far as they are known without reading."""
        ...


@dataclass(frozen=True)
class Listed:
    """Pictures in memory."""

    pictures: Sequence[LabelledPicture]

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, index: int) -> LabelledPicture:
        """One picture."""
        return self.pictures[index]

    def names(self) -> list[tuple[str, int | None]]:
        """Names and labels, a name with the fingerprint of its pixels."""
        return [(f"{p.name} {digest([p.pixels.tobytes()])}", p.label) for p in self.pictures]


@dataclass(frozen=True, eq=False)
class Batch:
    """Pictures that go through the model together, as read: every one with its index."""

    places: list[int]
    pixels: Tensor | None  # (B, 3, height, width); None where not one could be read
    labels: list[int | None]
    skipped: list[str]


class Batches:
    """The batches of a source: which pictures make one up depends on nothing but its number."""

    def __init__(
        self,
        pictures: Iterable[LabelledPicture] | Source,
        preprocess: Preprocessing,
        size: int,
        workers: int = 0,
    ) -> None:
        self.size = check_integer("batch_size", size, low=1)
        self.workers = check_integer("workers", workers, low=0)
        self.source: Source = (
            pictures if hasattr(pictures, "read") else Listed(list(pictures))  # type: ignore[assignment]
        )
        self.strict = bool(getattr(pictures, "strict", False))
        self.preprocess = preprocess

    def __len__(self) -> int:
        return -(-len(self.source) // self.size)

    def places(self, number: int) -> range:
        """The indices of the pictures of a batch."""
        return range(number * self.size, min((number + 1) * self.size, len(self.source)))

    def read(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """Batches by their numbers; with workers, so many threads read ahead of the model."""
        if self.workers == 0:
            for number in numbers:
                yield self._joined(number, [self._prepared(place) for place in self.places(number)])
            return
        with ExitStack() as stack:
            # Threads that decode change the filters of warnings in turn: put them back at the end.
            stack.enter_context(warnings.catch_warnings())
            pool = stack.enter_context(ThreadPoolExecutor(self.workers))
            stack.callback(pool.shutdown, cancel_futures=True)
            pending: deque[tuple[int, list[Future[Any]]]] = deque()
            for number in numbers:
                futures = [pool.submit(self._prepared, place) for place in self.places(number)]
                pending.append((number, futures))
                if len(pending) > _BATCHES_AHEAD:
                    yield self._awaited(*pending.popleft())
            while pending:
                yield self._awaited(*pending.popleft())

    def first(self) -> Batch:
        """The first picture that can be read, alone."""
        skipped = Skipped()
        for place in range(len(self.source)):
            batch = self._joined(0, [self._prepared(place)], [place])
            if batch.pixels is not None:
                return batch
            skipped.add(*batch.skipped)
        raise nothing_read(skipped)

    def digest(self) -> str:
        """A fingerprint of the pictures' names and labels."""
        return digest(f"{name}\n{label}" for name, label in self.source.names())

    def _prepared(self, place: int) -> tuple[Tensor, int | None] | str:
        """A picture as the model takes it and its label, or why it cannot be read."""
        try:
            picture = self.source.read(place)
        except PictureError as error:
            if self.strict:
                raise
            return str(error)
        return self.preprocess(picture.pixels), picture.label

    def _awaited(self, number: int, futures: list[Future[Any]]) -> Batch:
        return self._joined(number, [future.result() for future in futures])

    def _joined(
        self, number: int, read: Sequence[Any], places: Sequence[int] | None = None
    ) -> Batch:
        numbered = list(zip(places or self.places(number), read, strict=True))
        good = [(place, *one) for place, one in numbered if not isinstance(one, str)]
        return Batch(
            [place for place, _, _ in good],
            torch.stack([pixels for _, pixels, _ in good]) if good else None,
            [label for _, _, label in good],
            [one for _, one in numbered if isinstance(one, str)],
        )


def collect(
    batches: Batches,
    measure: Callable[[Batch], Sums],
    processes: Processes,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> list[Part]:
    """What `measure` gives for every batch, in their order, the same in all processes.

    Each batch is measured once, by one process, as if that were alone; the first process keeps the
    parts of all in its checkpoint, so a run may continue with another number of processes. Batches
    with pictures that could not be read are read again, and measured again if more can be read now.
    """
    total = len(batches.source)
    known = processes.from_first(lambda: {} if checkpoint is None else dict(checkpoint.parts))
    numbers = range(len(batches))
    parts = {n: known[n] for n in numbers if n in known and not known[n]["skipped"]}
    left = [number for number in numbers if number not in parts]
    read = batches.read(processes.mine(left))

    def work(number: int) -> Part:
        batch = next(read)
        if number in known and known[number]["skipped"] == batch.skipped:
            return known[number]
        sums = measure(batch) if batch.pixels is not None else {}
        return {"skipped": batch.skipped, "sums": sums}

    for done in processes.rounds(left, work):
        parts |= dict(done)
        if checkpoint is not None:
            checkpoint.keep(dict(done))
        if progress is not None:
            progress(sum(len(batches.places(number)) for number in parts), total)
    if checkpoint is not None:
        checkpoint.write()
    return [parts[number] for number in sorted(parts)]


def identity(model: LoadedModel, batches: Batches, device: str) -> dict[str, Any]:
    """What partial results depend on beside the settings that a record shows."""
    return {
        "weights": weights_digest(model.model),
        "number of pictures": len(batches.source),
        "names of pictures": batches.digest(),
        "device": torch.device(device).type,
    }


class SumsType(Protocol):
    """A dataclass of the sums of one method over some pictures."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    images: int

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The least and the largest value of every sum, given how many pictures were counted."""
        ...


def check_part(batches: Batches, keys: Iterable[str], kind: type[SumsType]) -> Check:
    """Make the check of a part that was saved by `collect`.

    Args:
        batches: the batches of this run.
        keys: the methods that every part has.
        kind: the dataclass of a method's sums, which knows their ranges.

    Returns:
        A function of the number of a batch and its part. It returns a phrase that names the first
        value that cannot be, or None.
    """
    expected = set(keys)

    def check(number: int, part: Part) -> str | None:
        if not isinstance(part, dict) or part.keys() != {"skipped", "sums"}:
            return "it has no skipped and sums"
        skipped, sums = part["skipped"], part["sums"]
        if not isinstance(skipped, list) or not all(isinstance(one, str) for one in skipped):
            return "skipped is no list of reasons"
        images = len(batches.places(number)) - len(skipped)
        if not isinstance(sums, dict) or sums.keys() != (expected if images > 0 else set()):
            return "sums are not those of the methods of this run"
        return next(filter(None, (_fault(key, sums[key], kind, images) for key in sums)), None)

    return check


def _fault(key: str, values: Any, kind: type[SumsType], images: int) -> str | None:
    """What is wrong with the sums of one method over so many pictures."""
    if not isinstance(values, dict) or values.keys() != kind.__dataclass_fields__.keys():
        return f"the sums of {key} are not {', '.join(kind.__dataclass_fields__)}"
    for name, field in kind.__dataclass_fields__.items():
        accepted = int if field.type is int else (int, float)
        if not isinstance(values[name], accepted) or isinstance(values[name], bool):
            return f"{name} of {key} is {values[name]!r}, and no number of its kind"
    ranges = {"images": (images, images), **kind(**values).ranges()}
    for name, (low, high) in ranges.items():
        if not low <= values[name] <= high:
            return f"{name} of {key} is {values[name]}, outside the range {low:g} to {high:g}"
    return None


def nothing_read(skipped: Skipped) -> ValueError:
    """The error of a run that could not read one picture."""
    reason = f" ({skipped.reasons[0]})" if skipped.reasons else ""
    return ValueError(f"no picture could be read{reason}; pass pictures as JPEG, PNG, WEBP or BMP")


def skipped_in(parts: Iterable[Mapping[str, Any]]) -> Skipped:
    """What could not be read, in the order of the pictures."""
    skipped = Skipped()
    for part in parts:
        for reason in part["skipped"]:
            skipped.add(reason)
    return skipped
