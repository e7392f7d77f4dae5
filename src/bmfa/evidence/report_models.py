"""The model experiments of the page: the embedded model, and a person's own on their pictures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bmfa.data.classification import EmbeddedPictures, LabelledPictures
from bmfa.evidence.classification import run as evaluation
from bmfa.evidence.closed_loop import run as closed_loop
from bmfa.evidence.pictures import model_cases
from bmfa.models import LoadedModel, load_model
from bmfa.models.hosts import find_host
from bmfa.records import Record

# The paper's rules at its settings, Algorithm 1 from its printed threshold down, and what goes past.
METHODS = (
    *("fixed-blocks:2", "global-mean", "random-quadrants:0.25", "random-quadrants:0.5"),
    *("quadrant-gap:0.8", "quadrant-gap:0.5", "variance:0.8", "variance:0.2"),
    *("gamma:0.8", "gamma:0.2", "gamma:0.05", "gamma:0.02"),
    *("exact-gap:1", "exact-gap:0.5", "mass:0.005", "mass:0.001"),
    *("optimal:0.05", "optimal:0.02", "optimal:0.005", "optimal:0.002"),
)
LAYER_METHODS = (
    *("fixed-blocks:2", "random-quadrants:0.25", "quadrant-gap:0.8"),
    *("gamma:0.05", "optimal:0.002"),
)
SINGLE_METHODS = ("global-mean", "fixed-blocks:2", "gamma:0.05", "optimal:0.002")
RULES = (
    *("fixed-blocks:2", "random-quadrants:0.25", "random-quadrants:0.5"),
    *("quadrant-gap:0.8", "quadrant-gap:0.5", "gamma:0.05", "optimal:0.02", "optimal:0.002"),
)
MERGERS = (
    *("tome:8", "tome:12", "free-energy:8", "free-energy:12", "pitome:0.95", "tofu:0.95"),
    *("diffrate:0.95", "crossget:0.95", "dct:0.95", "evit:0.7", "random-pool:8", "fixed-pool:2"),
)
# The class of an embedded picture is in few tokens, so that it takes more merging to tell.
EMBEDDED_MERGERS = (
    *("tome:8", "tome:16", "tome:24", "free-energy:8", "free-energy:16", "free-energy:24"),
    *("pitome:0.8", "tofu:0.8", "diffrate:0.8", "crossget:0.8", "dct:0.8", "evit:0.3"),
    *("random-pool:8", "random-pool:16", "fixed-pool:2"),
)
DEIT = "timm:deit_tiny_patch16_224"
# The reference figures are of a centre crop of 224 from a shorter side of 256.
CROP_PCT = 0.875
LIMIT = 100
# Pictures in a batch, and timings of which the median counts: rules are slow on a processor.
CPU_TIMING, GPU_TIMING = (10, 3), (256, 5)


@dataclass(frozen=True)
class OwnModel:
    """A person's model and pictures: DeiT-Tiny on ImageNet, as in the paper, unless named else."""

    weights: str
    pictures: str
    name: str = DEIT
    labels: str | None = None
    limit: int = LIMIT

    def load(self) -> tuple[LoadedModel, LabelledPictures]:
        """The model, the paper's cropped as its figures are, and its pictures."""
        pictures = LabelledPictures(self.pictures, self.labels, limit=self.limit)
        crop = CROP_PCT if self.name == DEIT else None
        return load_model(self.name, self.weights, crop_pct=crop), pictures


def run(
    own: tuple[LoadedModel, LabelledPictures] | None = None,
    *,
    seed: int = 0,
    images: int = 100,
    layer_images: int = 30,
    device: str = "cpu",
) -> Iterator[tuple[str, Record]]:
    """The records of the embedded model, then those of a person's own."""
    model = load_model("embedded")
    few, many = EmbeddedPictures(layer_images, seed), EmbeddedPictures(images, seed)
    yield "closed-loop", closed_loop.run(model, many, METHODS, seed=seed, device=device)
    for name, choices, methods in _choices(model):
        record = closed_loop.run(model, few, methods, layers=choices, seed=seed, device=device)
        yield f"closed-loop-{name}", record
    yield "pictures", model_cases.run(model, count=images, seed=seed, device=device)
    yield "evaluate", _evaluate(model, many, EMBEDDED_MERGERS, seed, device)
    if own is not None:
        yield from _own(*own, seed, device)


def _own(
    model: LoadedModel, pictures: LabelledPictures, seed: int, device: str
) -> Iterator[tuple[str, Record]]:
    yield "own-closed-loop", closed_loop.run(model, pictures, METHODS, seed=seed, device=device)
    name, choices, methods = _choices(model)[0]
    record = closed_loop.run(model, pictures, methods, layers=choices, seed=seed, device=device)
    yield f"own-closed-loop-{name}", record
    yield "own-evaluate", _evaluate(model, pictures, MERGERS, seed, device)


def _evaluate(
    model: LoadedModel,
    pictures: LabelledPictures | EmbeddedPictures,
    mergers: Sequence[str],
    seed: int,
    device: str,
) -> Record:
    """Accuracy and speed of rules and reductions."""
    size, repeats = CPU_TIMING if device == "cpu" else GPU_TIMING
    return evaluation.run(
        model,
        pictures,
        ("full", *RULES, *mergers),
        batch_size=size,
        repeats=repeats,
        seed=seed,
        device=device,
    )


def _choices(model: LoadedModel) -> list[tuple[str, list[str | list[int]], Sequence[str]]]:
    """Several layers counted from the last, and each layer alone."""
    depth = len(find_host(model.model).attentions)
    last: list[str | list[int]] = [f"last-{count}" for count in (2, 4, 8) if count < depth]
    alone: list[str | list[int]] = [[layer] for layer in range(depth)]
    return [("layers", [*last, "all"], LAYER_METHODS), ("single", alone, SINGLE_METHODS)]
