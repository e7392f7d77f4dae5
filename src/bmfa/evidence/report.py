"""All experiments of `bmfa report`, on the embedded data and model and on the user's own."""

import tomllib
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
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

_CHOICES = tomllib.loads(Path(__file__).with_name("report.toml").read_text("utf-8"))
METHODS: dict[str, list[str]] = _CHOICES["methods"]
COMPARISONS: dict[str, dict[str, Any]] = _CHOICES["comparisons"]
DEIT = "timm:deit_tiny_patch16_224"
# The paper's figures are of a centre crop of 224 pixels from a shorter side of 256.
DEIT_CROP_PCT = 0.875
# Batch size and timings of which the median counts; rules are slow on a CPU.
CPU_TIMING, GPU_TIMING = (10, 3), (256, 5)


Own = tuple[LoadedModel, LabelledImages]


def load_own(
    weights: str,
    images: str,
    name: str = DEIT,
    labels: str | None = None,
    class_map: str | None = None,
    limit: int = 100,
) -> Own:
    """Load the user's model and list its images; DeiT-Tiny has the crop of the paper.

    Args:
        weights: File of weights.
        images: Folder or zip of images.
        name: Name of the model as in `load_model`.
        labels: File of labels; None reads them from the names of folders.
        class_map: File with the class of every folder; None reads it from the names of folders.
        limit: Number of images.
    """
    options: dict[str, Any] = {"class_map": class_map, "limit": limit}
    # First without the model, so that a wrong folder is found before the weights are read.
    LabelledImages(images, labels, **options)
    model = load_model(name, weights, crop_pct=DEIT_CROP_PCT if name == DEIT else None)
    return model, LabelledImages(images, labels, classes=class_names(model), **options)


def run(
    *,
    seed: int = 0,
    workers: int = 1,
    coco: Sequence[str] | None = None,
    lvis: Sequence[str] | None = None,
    own: Own | None = None,
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
    given = (("coco", coco), ("lvis", lvis))
    files = {name: InstanceFiles(*paths) for name, paths in given if paths}
    instances: dict[str, Any] = {"workers": workers, "seed": seed}
    yield "synthetic", synthetic.run([*DEFAULT_METHODS, *METHODS["synthetic"]], seed=seed)
    yield "failure-curve", synthetic.failure_curve(seed=seed)
    yield "gallery", synthetic.gallery(seed=seed)
    scenes = EmbeddedScenes(seed=seed)
    sources: dict[str, InstanceSource] = {"embedded": scenes, **files}
    methods = [*DEFAULT_METHODS, *COMPARABLE_METHODS]
    for (dataset, source), mode in product(sources.items(), MODES):
        record = probes.run(source, dataset=dataset, mode=mode, methods=methods, **instances)
        yield f"probe-{dataset}-{mode}", record
    yield "ablation", ablation.run(scenes, dataset="embedded", workers=workers)
    yield "blocks", cases.blocks(seed=seed)
    yield "cases", cases.run(EmbeddedObjects(seed=seed), dataset="embedded", **instances)
    for dataset, source in files.items():
        yield f"cases-{dataset}", cases.run(source, dataset=dataset, **instances)
    yield "failures", failures.run(seed=seed)
    yield from run_models(own, seed=seed, device=device)
    yield "bench", bench.run(repeats=3, seed=seed)


def run_models(
    own: Own | None = None,
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
    options: dict[str, Any] = {"seed": seed, "device": device}
    batch_size, repeats = CPU_TIMING if device == "cpu" else GPU_TIMING
    timing: dict[str, Any] = {"batch_size": batch_size, "repeats": repeats, **options}
    model = load_model("embedded")
    few, many = EmbeddedImages(layer_images, seed), EmbeddedImages(images, seed)
    last, single = _layer_choices(model)
    yield "closed-loop", closed_loop.run(model, many, METHODS["closed-loop"], **options)
    layers = closed_loop.run(model, few, METHODS["layers"], layers=last, **options)
    yield "closed-loop-layers", layers
    layers = closed_loop.run(model, few, METHODS["single-layers"], layers=single, **options)
    yield "closed-loop-single", layers
    yield "faster", faster.run(model, **options)
    for name, choices in COMPARISONS.items():
        yield f"comparison-{name}", comparison.run(model, **choices, **options)
    yield "images", model_cases.run(model, count=images, **options)
    methods = [FULL, *METHODS["evaluate"], *METHODS["embedded-reductions"]]
    yield "evaluate", classification.run(model, many, methods, **timing)
    if own is None:
        return
    model, labelled = own
    yield "own-closed-loop", closed_loop.run(model, labelled, METHODS["closed-loop"], **options)
    last, _ = _layer_choices(model)
    layers = closed_loop.run(model, labelled, METHODS["layers"], layers=last, **options)
    yield "own-closed-loop-layers", layers
    methods = [FULL, *METHODS["evaluate"], *METHODS["reductions"]]
    yield "own-evaluate", classification.run(model, labelled, methods, **timing)


def _layer_choices(model: LoadedModel) -> tuple[list[str | list[int]], list[str | list[int]]]:
    """Return the choices of the last K layers, and those of single layers."""
    depth = len(find_vision_transformer(model.model).attentions)
    last = [f"last-{count}" for count in (2, 4, 8) if count < depth]
    return [*last, "all"], [[layer] for layer in range(depth)]


def explore(own: Own | None = None, *, seed: int = 0, device: str = "cpu") -> Exploration:
    """Record the first image for the explorer: of the user's own model, or of the embedded one.

    Args:
        own: The user's model and images.
        seed: Seed of the embedded images.
        device: Device of the model.

    Raises:
        ValueError: If no image of the user can be read.
    """
    images: LabelledImages | EmbeddedImages
    model, images = own or (load_model("embedded"), EmbeddedImages(1, seed))
    image = next(iter(images), None)
    if image is None:
        raise ValueError("no image could be read for the explorer; pass other images")
    return explorer.run(model, image, drawn=own is None, device=device)
