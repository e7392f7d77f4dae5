"""`bmfa bench model`: time and error of a screened model against the dense model on its best path."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from bmfa import timing
from bmfa.attention.result import Stats
from bmfa.checks import check_integer
from bmfa.evidence.bench import measure
from bmfa.evidence.bench.inputs import check_one_grid, load_any_size, read_images
from bmfa.evidence.bench.methods import (
    arguments,
    default_backend,
    dtype_name,
    for_device,
    missed_targets_ignored,
    parse,
)
from bmfa.evidence.bench.saliency import load_decoder, masks
from bmfa.evidence.bench.verify import check_backend
from bmfa.evidence.metrics import mask_iou, mean, mean_percent, relative_errors
from bmfa.evidence.model_methods import PLAN, copy_sharing_weights
from bmfa.evidence.runner import Progress
from bmfa.evidence.runner.loop import DTYPES
from bmfa.grid import Grid
from bmfa.models import patch
from bmfa.models.families import find_vision_transformer
from bmfa.models.measures import features
from bmfa.models.screened_layer import observe
from bmfa.records import Record, Row, environment

SIZES = {"cuda": (1024, 2048, 4096), "cpu": (512, 1024, 2048)}
DEFAULT_METHODS = {
    "cuda": ("error:0.03", "error:0.1", "leaves:0.1"),
    "cpu": ("error:0.03", "error:0"),
}
# Rows of the dense model: on CUDA torch has a choice of paths.
DENSE_MODELS = {"cuda": ("full-cudnn", "full-flash"), "cpu": ("full-default",)}
ERROR = (
    "relative L2 of the final features against the dense model of the same dtype, and intersection "
    "over union of the decoder's masks with those of the dense model; means over images"
)


@dataclass(frozen=True)
class Settings:
    """A model, its images and methods, and how they are timed.

    Args:
        model: Name of the model.
        weights: File of weights; a timm model without one has random weights.
        data_dir: Folder of images; embedded scenes without.
        decoder: File of weights of a saliency decoder, for the agreement of masks.
        methods: Names such as `tiles:0.03`, `leaves:0.05`, `error:0.1` or `plan:FILE`; a default for
            the device without any.
        layers: Layers to patch: `"all"`, `"last-K"` or indices.
        allow_dense: False to use tiles even where dense attention is faster.
        batch_size: Images in a batch.
        images: Images over which errors and times are averaged, a multiple of `batch_size`; as
            many by default.
        dtype: `"bfloat16"` (default on CUDA), `"float16"` or `"float32"`.
        device: Device of the model.
        repeats: Timings of which the median counts.
        seed: Seed of random weights and of embedded scenes.

    Raises:
        ValueError: If a number, a dtype or a method is not valid.
    """

    model: str = "embedded"
    weights: str | None = None
    data_dir: str | None = None
    decoder: str | None = None
    methods: tuple[str, ...] = ()
    layers: str | Sequence[int] = "all"
    allow_dense: bool = True
    batch_size: int = 1
    images: int | None = None
    dtype: str | None = None
    device: str = "cpu"
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, low=1)
        check_integer("repeats", self.repeats, low=1)
        dtype_name(self.dtype, torch.device(self.device))
        images = self.batch_size if self.images is None else self.images
        if check_integer("images", images, low=1) % self.batch_size:
            raise ValueError(
                f"images is {self.images} and batch_size {self.batch_size}; pass a multiple of it"
            )
        for name in self.methods:
            if not name.startswith(PLAN):
                parse(name)


def run(settings: Settings, sizes: Sequence[int] = (), progress: Progress | None = None) -> Record:
    """Time a model at several sizes of images, dense and screened.

    The kernels are first compared with float64 attention on small grids. An interrupted run returns the
    sizes that are complete.

    Args:
        settings: The model and how it is timed.
        sizes: Sides of the images in pixels; a default for the device without any.
        progress: Called with the sizes done and their number.

    Returns:
        A record of rows for every size: the dense model on its best path, on every path, and the
        model screened by every method.

    Raises:
        ValueError: If the model does not support a size, or the verification fails.
    """
    device = torch.device(settings.device)
    chosen = list(sizes) or list(for_device(SIZES, device))
    known: dict[str, Any] = {"weights": "", "images": []}

    def measure_size(size: int) -> list[Row]:
        benchmark = SizeBenchmark(settings, check_integer("img_size", size, low=16))
        known.update(weights=benchmark.weights, images=benchmark.names)
        return benchmark.rows()

    with torch.inference_mode(), missed_targets_ignored():
        rows, absent = measure.each_size(chosen, measure_size, progress)
    recorded = {
        "model": settings.model,
        "layers": settings.layers,
        "allow_dense": settings.allow_dense,
        "repeats": settings.repeats,
        "seed": settings.seed,
        **known,
        "decoder": settings.decoder and os.path.basename(settings.decoder),
        "sizes": chosen,
        "batch_size": settings.batch_size,
        "timing": for_device(measure.TIMING, device),
        "error": ERROR,
        **({"absent": absent} if absent else {}),
    }
    return Record("bench", recorded, rows, environment(settings.device))


class SizeBenchmark:
    """One model at one size, with a copy for each method that shares the parameters."""

    def __init__(self, settings: Settings, size: int) -> None:
        self.settings, self.size = settings, size
        self.device = torch.device(settings.device)
        self.dtype = dtype_name(settings.dtype, self.device)
        self.loaded, self.weights = load_any_size(
            settings.model, settings.weights, size=size, seed=settings.seed
        )
        self.loaded.model.to(self.device, DTYPES[self.dtype])
        self.vit = find_vision_transformer(self.loaded.model)
        check_one_grid(self.vit)
        images, self.names = read_images(
            settings.data_dir, settings.images or settings.batch_size, settings.seed
        )
        pixels = self.loaded.preprocess.batch(images).to(self.device).to(DTYPES[self.dtype])
        self.batches = torch.split(pixels, settings.batch_size)
        self.pixels = self.batches[0].clone()  # CUDA graphs read every batch from here
        decoder = settings.decoder
        self.decoder = None if decoder is None else load_decoder(decoder).to(self.device)
        projection: Any = self.vit.projection
        height, width = pixels.shape[-2:]
        self.grid = Grid(height // projection.stride[0], width // projection.stride[1])
        attention: Any = self.vit.attentions[0]
        self.heads = int(getattr(attention, "num_heads", None) or attention.num_attention_heads)
        self.head_dim = int(projection.out_channels) // self.heads

    def rows(self) -> list[Row]:
        """Return the rows of the dense model on every path and of every method."""
        check_backend(
            default_backend(self.device), DTYPES[self.dtype], str(self.device), self.head_dim
        )
        dense_names = for_device(DENSE_MODELS, self.device)
        models = dict.fromkeys(dense_names, self.loaded.model)
        for name in self.settings.methods or for_device(DEFAULT_METHODS, self.device):
            models[name] = self._screened_model(name)
        works = {name: self._forward(model) for name, model in models.items()}
        times = measure.mean_times(
            (works for _ in self._batches()), self.settings.repeats, self.device
        )
        best = min(dense_names, key=lambda name: times[name][0])
        with measure.on_path(best):
            expected = [self._features(models[best]) for _ in self._batches()]
        measured: dict[str, Row] = {}
        for name, model in models.items():
            with measure.on_path(name):
                measured[name] = self._measure(name, model, expected)
        return measure.compared_rows(measured, times)

    def _batches(self) -> Iterator[Tensor]:
        """Put one batch of images after the other where the models read them."""
        for batch in self.batches:
            yield self.pixels.copy_(batch)

    def _screened_model(self, name: str) -> nn.Module:
        if name.startswith(PLAN):
            plan = name.removeprefix(PLAN)
            return patch(copy_sharing_weights(self.loaded.model), plan=plan)
        options: dict[str, Any] = arguments(name, self.grid)
        options |= {"layers": self.settings.layers, "allow_dense": self.settings.allow_dense}
        return patch(copy_sharing_weights(self.loaded.model), **options)

    def _forward(self, model: nn.Module) -> timing.Work:
        return lambda: model(self.pixels, **self.loaded.options)

    def _features(self, model: nn.Module) -> Tensor:
        """Return (B, tokens, dim): the tokens after the last block and its norm."""
        return features(model, self.pixels, self.loaded.options)[0].clone()

    def _measure(self, name: str, model: nn.Module, expected: Sequence[Tensor]) -> Row:
        """Return everything about a model but its time: features and masks against the dense model."""
        stats: list[Stats] = []
        errors: list[float] = []
        agreements: list[float] = []
        densities: list[float | None] = []

        def forward() -> Tensor:
            stats.clear()
            return self._features(model)

        with observe(model, lambda inputs, screened: stats.append(screened.stats)):
            for wanted, _ in zip(expected, self._batches(), strict=True):
                output, _ = measure.run_as_timed(forward, self.device)
                errors += relative_errors(output, wanted).tolist()
                densities.append(mean(one.density for one in stats))
                if self.decoder is not None:
                    where = self.grid, self.vit.prefix
                    pair = (masks(self.decoder, x, *where) for x in (output, wanted))
                    agreements += mask_iou(*pair).tolist()
        _, peak = measure.run_as_timed(self._forward(model), self.device)
        return {
            "what": "model",
            "img_size": self.size,
            "n": self.grid.size,
            "heads": self.heads,
            "dim": self.head_dim,
            "dtype": self.dtype,
            "batch": len(self.pixels),
            "method": name,
            "density_percent": mean_percent(densities),
            "tiled_layers": sum(one.form == "tiled" for one in stats),
            "layers": len(self.vit.attentions),
            "error_l2_percent": 100 * fmean(errors),
            **({"mask_iou": fmean(agreements)} if agreements else {}),
            "peak_mebibytes": None if peak is None else peak / 2**20,
        }
