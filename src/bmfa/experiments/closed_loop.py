"""Screening inside a model: how far its outputs move, against the leaves that are left."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bmfa.checks import check_integer
from bmfa.data.imagenet import LabelledPicture
from bmfa.models import LoadedModel, layer_indices, patch, record, unpatch
from bmfa.models.hosts import find_host
from bmfa.records import Record, Row, environment
from bmfa.rules import RandomQuadrants, parse

# The paper's rules at its settings, then what goes past them.
DEFAULT_METHODS = (
    "fixed-blocks:2",
    "global-mean",
    "random-quadrants:0.25",
    "random-quadrants:0.5",
    "quadrant-gap:0.8",
    "quadrant-gap:0.5",
    "gamma:0.05",
    "gamma:0.02",
    "exact-gap:0.5",
    "exact-gap:0.2",
    "mass:0.005",
    "mass:0.002",
    "mass:0.001",
    "optimal:0.005",
    "optimal:0.002",
    "optimal:0.001",
)
FULL = "full"
PROTOCOL = (
    "one tree for each query and head over the spatial keys, prefix keys exact, every query screened; "
    "output_kl is KL(full || approximate); attention_kl is the mean of F - F~ over the spatial keys"
)
Layers = str | Sequence[int]
Progress = Callable[[int, int | None], None]  # pictures done, of how many


@dataclass
class Total:
    """Sums over the pictures of one method in one choice of layers."""

    images: int = 0
    labelled: int = 0
    agreeing: int = 0
    right: int = 0
    output_kl: float = 0.0
    leaf_ratio: float = 0.0
    attention_kl: float = 0.0

    def add(self, batch: "Batch", logits: Tensor, leaf_ratio: float, attention_kl: float) -> None:
        """The outputs (B, classes) of one batch, its mean leaf ratio and its mean attention KL."""
        full, approximate = (x.double().log_softmax(-1) for x in (batch.full, logits))
        chosen, size = logits.argmax(-1), len(logits)
        self.images += size
        self.labelled += sum(label is not None for label in batch.labels)
        self.agreeing += int((chosen == batch.full.argmax(-1)).sum())
        self.right += sum(a == b for a, b in zip(chosen.tolist(), batch.labels, strict=True))
        self.output_kl += float((full.exp() * (full - approximate)).sum())
        self.leaf_ratio += size * leaf_ratio
        self.attention_kl += size * attention_kl

    def row(self, method: str, layers: str) -> Row:
        """The means, in the units of the records."""
        row: Row = {
            "method": method,
            "layers": layers,
            "images": self.images,
            "leaf_percent": 100 * self.leaf_ratio / self.images,
            "agreement_percent": 100 * self.agreeing / self.images,
            "output_kl": self.output_kl / self.images,
            "attention_kl": self.attention_kl / self.images,
        }
        if self.labelled:
            row["top1_percent"] = 100 * self.right / self.labelled
        return row


@dataclass(frozen=True, eq=False)
class Batch:
    """Prepared pictures, their labels, and what the full model makes of them."""

    pixels: Tensor  # (B, 3, height, width)
    labels: list[int | None]
    full: Tensor  # (B, classes)

    def single(self) -> Iterator["Batch"]:
        """The pictures one by one."""
        for index, label in enumerate(self.labels):
            place = slice(index, index + 1)
            yield Batch(self.pixels[place], [label], self.full[place])


def run(
    model: LoadedModel,
    pictures: Iterable[LabelledPicture],
    methods: Sequence[str] = DEFAULT_METHODS,
    *,
    layers: Layers | Sequence[Layers] = "last-4",
    batch_size: int = 25,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Record:
    """Every method in every choice of layers, against the full model on the same pictures.

    `layers` is one choice ("all", "last-K", a list of indices) or a list of such choices. The first
    row is the full model's. The model is patched while this runs and left without any patch.
    """
    check_integer("batch_size", batch_size, low=1)
    choices = _choices(layers)
    _check(model, methods, choices)
    whole = Total()
    totals = {(method, name): Total() for name in choices for method in methods}
    model.model.to(device)
    with torch.inference_mode():
        for batch in _batches(model, pictures, batch_size, device):
            for (method, name), total in totals.items():
                _measure(model, batch, method, choices[name], seed + whole.images, total)
            whole.add(batch, batch.full, 1.0, 0.0)
            if progress is not None:
                progress(whole.images, len(pictures) if isinstance(pictures, Sized) else None)
    if not whole.images:
        raise ValueError("no picture could be read; pass pictures")
    rows = [whole.row(FULL, "none"), *(total.row(*key) for key, total in totals.items())]
    settings = {
        "model": model.name,
        "preprocessing": asdict(model.preprocess),
        "methods": list(methods),
        "layers": list(choices),
        "batch_size": batch_size,
        "seed": seed,
        "protocol": PROTOCOL,
        **_skipped(pictures),
    }
    return Record("closed-loop", settings, rows, environment(device))


def _measure(
    model: LoadedModel, batch: Batch, method: str, layers: Layers, seed: int, total: Total
) -> None:
    """One method on one batch; coins are drawn picture by picture, so that no batching shows."""
    alone = isinstance(parse(method), RandomQuadrants)
    for number, part in enumerate(batch.single() if alone else [batch]):
        patch(model.model, rule=parse(method, seed + number), layers=layers)
        try:
            with record(model.model) as recording:
                logits = model.logits(part.pixels)
        finally:
            unpatch(model.model)
        total.add(part, logits, recording.leaf_ratio, recording.error)


def _batches(
    model: LoadedModel, pictures: Iterable[LabelledPicture], size: int, device: str
) -> Iterator[Batch]:
    unpatch(model.model)
    rest = iter(pictures)
    while some := list(islice(rest, size)):
        pixels = torch.stack([model.preprocess(picture.pixels) for picture in some]).to(device)
        yield Batch(pixels, [picture.label for picture in some], model.logits(pixels))


def _choices(layers: Layers | Sequence[Layers]) -> dict[str, Layers]:
    """The choices of layers by the name that rows give them."""
    single = isinstance(layers, str) or all(isinstance(part, int) for part in layers)
    choices: list[Any] = [layers] if single else list(layers)
    return {c if isinstance(c, str) else ",".join(map(str, c)): c for c in choices}


def _check(model: LoadedModel, methods: Sequence[str], choices: dict[str, Layers]) -> None:
    """Raise before any picture is read."""
    if not methods:
        raise ValueError(f"no methods; pass some, e.g. {', '.join(DEFAULT_METHODS[:3])}")
    for method in methods:
        parse(method)
    depth = len(find_host(model.model).attentions)
    for layers in choices.values():
        layer_indices(layers, depth)


def _skipped(pictures: Iterable[LabelledPicture]) -> dict[str, Any]:
    """What a source of files could not read."""
    skipped = getattr(pictures, "skipped", None)
    return {} if skipped is None else {"skipped": skipped.count, "skipped_names": skipped.reasons}
