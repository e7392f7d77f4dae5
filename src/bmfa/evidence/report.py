"""All experiments of `bmfa report`, on the embedded data and model and on the user's own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bmfa.data import EmbeddedObjects, EmbeddedScenes, InstanceFiles, InstanceSource
from bmfa.data.classification import EmbeddedImages, LabelledImages
from bmfa.data.probes import MODES
from bmfa.evidence.ablation import run as ablation
from bmfa.evidence.bench import trees as bench
from bmfa.evidence.classification import run as classification
from bmfa.evidence.closed_loop import run as closed_loop
from bmfa.evidence.comparison import run as comparison
from bmfa.evidence.explorer import run as explorer
from bmfa.evidence.explorer.run import Exploration
from bmfa.evidence.failures import run as failures
from bmfa.evidence.faster import run as faster
from bmfa.evidence.images import cases, model_cases
from bmfa.evidence.methods import COMPARABLE_METHODS, DEFAULT_METHODS, FULL
from bmfa.evidence.model_methods import class_names
from bmfa.evidence.probes import run as probes
from bmfa.evidence.synthetic import run as synthetic
from bmfa.models import LoadedModel, load_model
from bmfa.models.families import find_vision_transformer
from bmfa.records import Record

PROBE_METHODS = (*DEFAULT_METHODS, *COMPARABLE_METHODS)
# The pooled rule has one price for all settings, and the leaves of Algorithm 1 on the placement corner.
SYNTHETIC_METHODS = (*DEFAULT_METHODS, "optimal-leaves-pooled:0.05794")
# The paper's rules at its settings, Algorithm 1 from its printed threshold down, and further rules.
CLOSED_LOOP_METHODS = (
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
SINGLE_LAYER_METHODS = ("global-mean", "fixed-blocks:2", "gamma:0.05", "optimal:0.002")
EVALUATED_RULES = (
    *("fixed-blocks:2", "random-quadrants:0.25", "random-quadrants:0.5"),
    *("quadrant-gap:0.8", "quadrant-gap:0.5", "gamma:0.05", "optimal:0.02", "optimal:0.002"),
)
REDUCTIONS = (
    *("tome:8", "tome:12", "free-energy:8", "free-energy:12", "pitome:0.95", "tofu:0.95"),
    *("diffrate:0.95", "crossget:0.95", "dct:0.95", "evit:0.7", "random-pool:8", "fixed-pool:2"),
)
# The class of an embedded image depends on few tokens, so differences show only at larger budgets.
EMBEDDED_REDUCTIONS = (
    *("tome:8", "tome:16", "tome:24", "free-energy:8", "free-energy:16", "free-energy:24"),
    *("pitome:0.8", "tofu:0.8", "diffrate:0.8", "crossget:0.8", "dct:0.8", "evit:0.3"),
    *("random-pool:8", "random-pool:16", "fixed-pool:2"),
)
# Screening takes several times as long as merging, and its differences are several times as large.
COMPARISONS: dict[str, dict[str, Any]] = {
    "leaves": {"leaves": (25.0,), "policies": (), "baselines": (), "images": 40},
    "few-leaves": {
        "rules": ("fixed-blocks", "gamma", "gamma-h2", "exact-gap", "optimal"),
        "leaves": (6.25,),
        "policies": (),
        "baselines": (),
        "images": 40,
    },
    "merging": {"rules": (), "leaves": (), "images": 240},
}
DEIT = "timm:deit_tiny_patch16_224"
# The paper's figures are of a centre crop of 224 pixels from a shorter side of 256.
DEIT_CROP_PCT = 0.875
OWN_IMAGES = 100
# Batch size and timings of which the median counts; rules are slow on a CPU.
CPU_TIMING, GPU_TIMING = (10, 3), (256, 5)


@dataclass(frozen=True)
class OwnModel:
    """The user's model and images; the default is DeiT-Tiny on ImageNet, as in the paper.

    Args:
        weights: File of weights.
        images: Folder or zip of images.
        name: Name of the model as in `load_model`.
        labels: File of labels; None reads them from the names of folders.
        class_map: File with the class of every folder; None reads it from the names of folders.
        limit: Number of images.
    """

    weights: str
    images: str
    name: str = DEIT
    labels: str | None = None
    class_map: str | None = None
    limit: int = OWN_IMAGES

    def load(self) -> tuple[LoadedModel, LabelledImages]:
        """Load the model, DeiT-Tiny with the crop of the paper, and list its images."""
        # First without the model, so that a wrong folder is found before the weights are read.
        self._list_images(None)
        crop = DEIT_CROP_PCT if self.name == DEIT else None
        model = load_model(self.name, self.weights, crop_pct=crop)
        return model, self._list_images(model)

    def _list_images(self, model: LoadedModel | None) -> LabelledImages:
        return LabelledImages(
            self.images,
            self.labels,
            class_map=self.class_map,
            classes=None if model is None else class_names(model),
            limit=self.limit,
        )


def run(
    *,
    seed: int = 0,
    workers: int = 1,
    coco: Sequence[str] | None = None,
    lvis: Sequence[str] | None = None,
    own: OwnModel | None = None,
    device: str = "cpu",
) -> Iterator[tuple[str, Record]]:
    """Run all experiments and yield their names and records.

    Args:
        seed: Seed of data and random methods.
        workers: Worker processes of the probes.
        coco: Annotation file and image folder of COCO.
        lvis: Annotation file and image folder of LVIS.
        own: The user's model and images.
        device: Device of the models.

    Raises:
        ValueError: If a file cannot be used; it is opened before the first experiment.
    """
    loaded = own.load() if own is not None else None
    files = {
        name: InstanceFiles(*paths) for name, paths in (("coco", coco), ("lvis", lvis)) if paths
    }
    yield "synthetic", synthetic.run(SYNTHETIC_METHODS, seed=seed)
    yield "failure-curve", synthetic.failure_curve(seed=seed)
    yield "gallery", synthetic.gallery(seed=seed)
    embedded = EmbeddedScenes(seed=seed)
    sources: dict[str, InstanceSource] = {"embedded": embedded, **files}
    for dataset, source in sources.items():
        for mode in MODES:
            record = probes.run(
                source,
                dataset=dataset,
                mode=mode,
                methods=PROBE_METHODS,
                workers=workers,
                seed=seed,
            )
            yield f"probe-{dataset}-{mode}", record
    yield "ablation", ablation.run(embedded, dataset="embedded", workers=workers)
    yield "blocks", cases.blocks(seed=seed)
    objects: dict[str, InstanceSource] = {"embedded": EmbeddedObjects(seed=seed), **files}
    for dataset, source in objects.items():
        name = "cases" if dataset == "embedded" else f"cases-{dataset}"
        yield name, cases.run(source, dataset=dataset, workers=workers, seed=seed)
    yield "failures", failures.run(seed=seed)
    yield from run_models(loaded, seed=seed, device=device)
    yield "bench", bench.run(repeats=3, seed=seed)


def run_models(
    own: tuple[LoadedModel, LabelledImages] | None = None,
    *,
    seed: int = 0,
    images: int = 100,
    layer_images: int = 30,
    device: str = "cpu",
) -> Iterator[tuple[str, Record]]:
    """Run the experiments on the embedded model, then those on the user's own.

    Args:
        own: A model and its images.
        seed: Seed of data and random methods.
        images: Number of embedded images.
        layer_images: Number of embedded images for the comparison of layers.
        device: Device of the models.
    """
    model = load_model("embedded")
    few, many = EmbeddedImages(layer_images, seed), EmbeddedImages(images, seed)
    yield "closed-loop", closed_loop.run(model, many, CLOSED_LOOP_METHODS, seed=seed, device=device)
    for name, layers, methods in _layer_experiments(model):
        record = closed_loop.run(model, few, methods, layers=layers, seed=seed, device=device)
        yield f"closed-loop-{name}", record
    yield "faster", faster.run(model, seed=seed, device=device)
    for name, options in COMPARISONS.items():
        yield f"comparison-{name}", comparison.run(model, **options, seed=seed, device=device)
    yield "images", model_cases.run(model, count=images, seed=seed, device=device)
    yield "evaluate", _evaluate(model, many, EMBEDDED_REDUCTIONS, seed, device)
    if own is None:
        return
    model, labelled = own
    record = closed_loop.run(model, labelled, CLOSED_LOOP_METHODS, seed=seed, device=device)
    yield "own-closed-loop", record
    name, layers, methods = _layer_experiments(model)[0]
    record = closed_loop.run(model, labelled, methods, layers=layers, seed=seed, device=device)
    yield f"own-closed-loop-{name}", record
    yield "own-evaluate", _evaluate(model, labelled, REDUCTIONS, seed, device)


def explore(own: OwnModel | None = None, *, seed: int = 0, device: str = "cpu") -> Exploration:
    """Record the first image for the explorer: of the user's own model, or of the embedded one.

    Args:
        own: The user's model and images.
        seed: Seed of the embedded images.
        device: Device of the model.

    Raises:
        ValueError: If no image of the user can be read.
    """
    images: LabelledImages | EmbeddedImages
    if own is None:
        model, images = load_model("embedded"), EmbeddedImages(1, seed)
    else:
        model, images = own.load()
    image = next(iter(images), None)
    if image is None:
        raise ValueError("no image could be read for the explorer; pass other images")
    return explorer.run(model, image, drawn=own is None, device=device)


def _evaluate(
    model: LoadedModel,
    images: LabelledImages | EmbeddedImages,
    reductions: Sequence[str],
    seed: int,
    device: str,
) -> Record:
    batch_size, repeats = CPU_TIMING if device == "cpu" else GPU_TIMING
    return classification.run(
        model,
        images,
        (FULL, *EVALUATED_RULES, *reductions),
        batch_size=batch_size,
        repeats=repeats,
        seed=seed,
        device=device,
    )


def _layer_experiments(
    model: LoadedModel,
) -> list[tuple[str, list[str | list[int]], Sequence[str]]]:
    """Return name, layers and methods of two experiments: the last K layers, and single layers."""
    depth = len(find_vision_transformer(model.model).attentions)
    last: list[str | list[int]] = [f"last-{count}" for count in (2, 4, 8) if count < depth]
    single: list[str | list[int]] = [[layer] for layer in range(depth)]
    return [("layers", [*last, "all"], LAYER_METHODS), ("single", single, SINGLE_LAYER_METHODS)]
