"""`bmfa bench model`: time and error of a screened model against the dense model on its best path."""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bmfa import timing
from bmfa.attention.result import Screened, Stats
from bmfa.checks import check_integer
from bmfa.evidence.bench import dense
from bmfa.evidence.bench.attention import default_backend
from bmfa.evidence.bench.errors import missed_targets_ignored
from bmfa.evidence.bench.graphs import capture_once, run_as_timed
from bmfa.evidence.bench.inputs import check_one_grid, load_any_size, read_images
from bmfa.evidence.bench.saliency import intersection_over_union, load_decoder, masks
from bmfa.evidence.bench.settings import DTYPES, TileSetting
from bmfa.evidence.bench.verify import check_backend
from bmfa.evidence.runner import Progress
from bmfa.grid import Grid
from bmfa.models import LoadedModel, patch
from bmfa.models.families import find_vision_transformer
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.records import Record, Row, environment

SIZES = {"cuda": (1024, 2048, 4096), "cpu": (512, 1024, 2048)}
DEFAULT_METHODS = {
    "cuda": ("error:0.03", "error:0.1", "leaves:0.1"),
    "cpu": ("error:0.03", "error:0"),
}
DENSE_PATHS = ("cudnn", "flash")  # on CUDA, where torch has a choice
INTERRUPTED = "interrupted by the keyboard or SIGINT; later sizes are absent, too"
TIMING = (
    "median of forward passes that take turns, all in CUDA graphs (milliseconds) where all can be "
    "captured, and call by call (milliseconds_eager); mean over images"
)
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
        methods: Settings such as `tiles:0.03`, `leaves:0.05` or `error:0.1`.
        layers: Layers to patch: `"all"`, `"last-K"` or indices.
        form: `"tiled"` to use tiles even where dense attention is faster.
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
    methods: tuple[str, ...] = DEFAULT_METHODS["cpu"]
    layers: str | Sequence[int] = "all"
    form: str | None = None
    batch_size: int = 1
    images: int | None = None
    dtype: str | None = None
    device: str = "cpu"
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, low=1)
        check_integer("repeats", self.repeats, low=1)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; pass one of {', '.join(DTYPES)}")
        check_integer("images", self.image_count, low=1)
        if self.image_count % self.batch_size:
            raise ValueError(
                f"images is {self.images} and batch_size {self.batch_size}; pass a multiple of it"
            )
        for name in self.methods:
            TileSetting.parse(name)

    @property
    def image_count(self) -> int:
        """The number of images, by default those of one batch."""
        return self.batch_size if self.images is None else self.images

    @property
    def dtype_name(self) -> str:
        """The dtype, or the default of the device."""
        cuda = torch.device(self.device).type == "cuda"
        return self.dtype or ("bfloat16" if cuda else "float32")


def default_methods(device: str) -> tuple[str, ...]:
    """Return the methods for a device."""
    return DEFAULT_METHODS.get(torch.device(device).type, DEFAULT_METHODS["cpu"])


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
    rows: list[Row] = []
    kind = torch.device(settings.device).type
    chosen = list(sizes) or list(SIZES.get(kind, SIZES["cpu"]))
    weights, names, absent = "", list[str](), dict[str, str]()
    with torch.inference_mode(), missed_targets_ignored():
        for index, size in enumerate(chosen):
            try:
                benchmark = _SizeBenchmark(settings, check_integer("img_size", size, low=16))
                weights, names = benchmark.weights, benchmark.names
                rows += benchmark.rows()
                del benchmark  # frees its models before the next ones are made
            except KeyboardInterrupt:
                if not rows:
                    raise
                absent[f"{size} pixels"] = INTERRUPTED
                break
            if progress is not None:
                progress(index + 1, len(chosen))
    recorded = {
        "model": settings.model,
        "layers": settings.layers,
        "form": settings.form,
        "repeats": settings.repeats,
        "seed": settings.seed,
        "weights": weights,
        "decoder": settings.decoder and os.path.basename(settings.decoder),
        "images": names,
        "sizes": chosen,
        "batch_size": settings.batch_size,
        "timing": TIMING,
        "error": ERROR,
        **({"absent": absent} if absent else {}),
    }
    return Record("bench", recorded, rows, environment(settings.device))


@dataclass
class _StatsObserver:
    """Keeps the statistics of the screened layers of the last forward pass."""

    stats: list[Stats] = field(default_factory=list)

    def __call__(self, inputs: LayerInputs, screened: Screened) -> None:
        self.stats.append(screened.stats)

    @property
    def density(self) -> float | None:
        """Mean share of tiles expanded over the layers that know it."""
        densities = [stats.density for stats in self.stats]
        known = [density for density in densities if density is not None]
        return sum(known) / len(known) if known else None

    @property
    def tiled_layers(self) -> int:
        return sum(stats.form == "tiled" for stats in self.stats)


class _SizeBenchmark:
    """One model at one size, with a copy for each method that shares the parameters."""

    def __init__(self, settings: Settings, size: int) -> None:
        self.settings, self.size = settings, size
        self.device = torch.device(settings.device)
        self.dtype = DTYPES[settings.dtype_name]
        self.loaded, self.weights = load_any_size(
            settings.model, settings.weights, size=size, seed=settings.seed
        )
        self.loaded.model.to(self.device, self.dtype)
        self.vit = find_vision_transformer(self.loaded.model)
        check_one_grid(self.vit)
        images, self.names = read_images(settings.data_dir, settings.image_count, settings.seed)
        pixels = self.loaded.preprocess.batch(images).to(settings.device).to(self.dtype)
        self.batches = torch.split(pixels, settings.batch_size)
        self.pixels = self.batches[0].clone()  # CUDA graphs read every batch from here
        self.decoder = None
        if settings.decoder is not None:
            self.decoder = load_decoder(settings.decoder).to(settings.device)
        projection: Any = self.vit.projection
        height, width = (
            int(side // stride)
            for side, stride in zip(self.pixels.shape[-2:], projection.stride, strict=True)
        )
        self.grid = Grid(height, width)
        attention: Any = self.vit.attentions[0]
        self.heads = int(getattr(attention, "num_heads", None) or attention.num_attention_heads)
        self.head_dim = int(projection.out_channels) // self.heads

    def rows(self) -> list[Row]:
        """Return the rows of the dense model on every path and of every method."""
        check_backend(
            default_backend(self.device), self.dtype, self.settings.device, [self.head_dim]
        )
        dense.initialize_priority(self.device, self.dtype)
        full = self._dense_models()
        models = {**full, **{name: self._screened_model(name) for name in self.settings.methods}}
        works = {name: self._forward(model) for name, model in models.items()}
        eager = self._mean_over_batches(
            lambda: timing.time_alternating(works, self.settings.repeats, self.device)
        )
        times = self._times_in_graphs(works) or eager
        best = min(full, key=lambda name: times[name])
        expected = [final_features(models[best], self.loaded, x) for x in self.batches]
        rows = [
            {
                **self._frame(name),
                **self._errors(model, expected, in_graph=times is not eager),
                "milliseconds": times[name],
                "milliseconds_eager": eager[name],
                "speedup": times[best] / times[name],
                "speedup_eager": min(eager[other] for other in full) / eager[name],
                "peak_mebibytes": self._peak(model, in_graph=times is not eager),
            }
            for name, model in models.items()
        ]
        fastest = next(row for row in rows if row["method"] == best)
        return [{**fastest, "method": "full", "path": best.removeprefix("full-")}, *rows]

    def _each_batch(self) -> Iterator[Tensor]:
        """Put one batch of images after the other where the models read them."""
        for batch in self.batches:
            self.pixels.copy_(batch)
            yield batch

    def _mean_over_batches(self, time_all: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return the mean over batches of the milliseconds by name."""
        samples = [time_all() for _ in self._each_batch()]
        return {name: statistics.fmean(one[name] for one in samples) for name in samples[0]}

    def _times_in_graphs(self, works: Mapping[str, timing.Work]) -> dict[str, float] | None:
        """Return milliseconds in CUDA graphs; None on a CPU, or if one model cannot be captured."""
        if self.device.type != "cuda":
            return None
        graphs: dict[str, timing.CapturedCalls] = {}
        for name, work in works.items():
            graph = timing.capture_calls(work, 1)
            if graph is None:
                return None
            graph.milliseconds()
            graphs[name] = graph

        def time_all() -> dict[str, float]:
            samples: dict[str, list[float]] = {name: [] for name in graphs}
            for _ in range(self.settings.repeats):
                for name, graph in graphs.items():
                    samples[name].append(graph.milliseconds())
            return {name: statistics.median(times) for name, times in samples.items()}

        return self._mean_over_batches(time_all)

    def _dense_models(self) -> dict[str, nn.Module]:
        """Return the model with each fused path preferred; a CPU offers no choice."""
        model = self.loaded.model
        if self.device.type != "cuda":
            return {"full-default": model}
        return {f"full-{name}": _PreferringPath(model, name) for name in DENSE_PATHS}

    def _screened_model(self, name: str) -> nn.Module:
        model = self.loaded.model
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        arguments: dict[str, Any] = TileSetting.parse(name).arguments(self.grid)
        arguments |= {"layers": self.settings.layers, "allow_dense": self.settings.form is None}
        return patch(deepcopy(model, shared), **arguments)

    def _forward(self, model: nn.Module) -> timing.Work:
        return lambda: model(self.pixels, **self.loaded.options)

    def _frame(self, method: str) -> Row:
        return {
            "what": "model",
            "img_size": self.size,
            "n": self.grid.size,
            "heads": self.heads,
            "dim": self.head_dim,
            "dtype": self.settings.dtype_name,
            "batch": len(self.pixels),
            "method": method,
        }

    def _errors(self, model: nn.Module, expected: Sequence[Tensor], *, in_graph: bool) -> Row:
        """Compare features and masks with the dense model, computed as they were timed."""
        observer = _StatsObserver()
        errors: list[float] = []
        agreements: list[float] = []
        densities: list[float] = []

        def forward() -> Tensor:
            observer.stats.clear()
            return final_features(model, self.loaded, self.pixels)

        with observe(model, observer):
            compute = capture_once(forward, self.device) if in_graph else forward
            for index, _ in enumerate(self._each_batch()):
                output = compute()
                dense_output = expected[index].double()
                difference = (output.double() - dense_output).flatten(1).norm(dim=1)
                errors += (difference / dense_output.flatten(1).norm(dim=1)).tolist()
                if observer.density is not None:
                    densities.append(observer.density)
                if self.decoder is not None:
                    agreements += self._mask_agreement(output, expected[index])
        density = statistics.fmean(densities) if densities else None
        row: Row = {
            "density_percent": None if density is None else 100 * density,
            "tiled_layers": observer.tiled_layers,
            "layers": len(self.vit.attentions),
            "error_l2_percent": 100 * statistics.fmean(errors),
        }
        return {**row, "mask_iou": statistics.fmean(agreements)} if agreements else row

    def _mask_agreement(self, output: Tensor, expected: Tensor) -> list[float]:
        assert self.decoder is not None
        found, wanted = (
            masks(self.decoder, features, self.grid, self.vit.prefix)
            for features in (output, expected)
        )
        agreement: list[float] = intersection_over_union(found, wanted).tolist()
        return agreement

    def _peak(self, model: nn.Module, *, in_graph: bool) -> float | None:
        forward = self._forward(model)
        if in_graph:
            peak = run_as_timed(forward, self.device).peak_bytes
        else:
            peak = timing.peak_bytes(forward, self.device)
        return None if peak is None else peak / 2**20


class _PreferringPath(nn.Module):
    """A model whose attention prefers one dense path."""

    def __init__(self, model: nn.Module, path: str) -> None:
        super().__init__()
        self.model, self.path = model, path

    def forward(self, *args: Any, **options: Any) -> Any:
        with dense.preferring(self.path):
            return self.model(*args, **options)


def final_features(model: nn.Module, loaded: LoadedModel, pixels: Tensor) -> Tensor:
    """Return (B, tokens, dim): the output of the final norm, or of the last block without one."""
    outputs: list[Any] = []
    handle = _last_module(model).register_forward_hook(lambda *call: outputs.append(call[2]))
    try:
        model(pixels, **loaded.options)
    finally:
        handle.remove()
    output: Tensor = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
    return output.clone()


def _last_module(model: nn.Module) -> nn.Module:
    for module in model.modules():
        norm = getattr(module, "norm", None)
        if hasattr(module, "blocks") and isinstance(norm, nn.Module):
            return norm
    return find_vision_transformer(model).blocks[-1]
