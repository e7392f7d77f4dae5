"""`bmfa bench model`: time and error of a screened model against the dense model on its best path."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bmfa import timing
from bmfa.attention.inputs import Backend
from bmfa.attention.result import Screened, Stats
from bmfa.checks import check_integer
from bmfa.evidence.bench import dense
from bmfa.evidence.bench.graphs import run_as_timed
from bmfa.evidence.bench.inputs import load_any_size, read_pictures
from bmfa.evidence.bench.settings import DTYPES, TileSetting
from bmfa.evidence.bench.verify import check_backend
from bmfa.evidence.runner import Progress
from bmfa.grid import Grid
from bmfa.models import LoadedModel, patch
from bmfa.models.hosts import find_host
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.records import Record, Row, environment

SIZES = {"cuda": (1024, 2048, 4096), "cpu": (512,)}
DEFAULT_METHODS = ("error:0.1", "error:0.2", "tiles:0.03")
DENSE_PATHS = ("cudnn", "flash")  # on CUDA, where torch has a choice
TIMING = (
    "median of forward passes that take turns, all in CUDA graphs (milliseconds) where all can be "
    "captured, and call by call (milliseconds_eager)"
)
ERROR = "relative L2 of the final features against the dense model of the same dtype"


@dataclass(frozen=True)
class Settings:
    """A model, its pictures and methods, and how they are timed.

    Args:
        model: Name of the model.
        weights: File of weights; a timm model without one has random weights.
        data_dir: Folder of pictures; embedded scenes without.
        methods: Settings such as `tiles:0.03`, `leaves:0.05` or `error:0.1`.
        layers: Layers to patch: `"all"`, `"last-K"` or indices.
        form: `"tiled"` to use tiles even where dense attention is faster.
        batch_size: Pictures in a batch.
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
    methods: tuple[str, ...] = DEFAULT_METHODS
    layers: str | Sequence[int] = "all"
    form: str | None = None
    batch_size: int = 1
    dtype: str | None = None
    device: str = "cpu"
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, low=1)
        check_integer("repeats", self.repeats, low=1)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; pass one of {', '.join(DTYPES)}")
        for name in self.methods:
            TileSetting.parse(name)

    @property
    def dtype_name(self) -> str:
        """The dtype, or the default of the device."""
        cuda = torch.device(self.device).type == "cuda"
        return self.dtype or ("bfloat16" if cuda else "float32")


def run(settings: Settings, sizes: Sequence[int] = (), progress: Progress | None = None) -> Record:
    """Time a model at several sizes of pictures, dense and screened.

    The kernels are first compared with float64 attention on small grids.

    Args:
        settings: The model and how it is timed.
        sizes: Sides of the pictures in pixels; a default for the device without any.
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
    weights, names = "", list[str]()
    with torch.inference_mode():
        for index, size in enumerate(chosen):
            benchmark = _SizeBenchmark(settings, check_integer("img_size", size, low=16))
            weights, names = benchmark.weights, benchmark.names
            rows += benchmark.rows()
            del benchmark  # frees its models before the next ones are made
            if progress is not None:
                progress(index + 1, len(chosen))
    recorded = {
        "model": settings.model,
        "layers": settings.layers,
        "form": settings.form,
        "repeats": settings.repeats,
        "seed": settings.seed,
        "weights": weights,
        "pictures": names,
        "sizes": chosen,
        "batch_size": settings.batch_size,
        "timing": TIMING,
        "error": ERROR,
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
        self.host = find_host(self.loaded.model)
        pictures, self.names = read_pictures(settings.data_dir, settings.batch_size, settings.seed)
        self.pixels = self.loaded.preprocess.batch(pictures).to(settings.device).to(self.dtype)
        projection: Any = self.host.projection
        height, width = (
            int(side // stride)
            for side, stride in zip(self.pixels.shape[-2:], projection.stride, strict=True)
        )
        self.grid = Grid(height, width)
        attention: Any = self.host.attentions[0]
        self.heads = int(getattr(attention, "num_heads", None) or attention.num_attention_heads)
        self.head_dim = int(projection.out_channels) // self.heads

    def rows(self) -> list[Row]:
        """Return the rows of the dense model on every path and of every method."""
        backend: Backend = "triton" if self.device.type == "cuda" else "eager"
        check_backend(backend, self.dtype, self.settings.device, [self.head_dim])
        dense.initialize_priority(self.device, self.dtype)
        full = self._dense_models()
        models = {**full, **{name: self._screened_model(name) for name in self.settings.methods}}
        works = {name: self._forward(model) for name, model in models.items()}
        eager = timing.time_alternating(works, self.settings.repeats, self.device)
        times = eager
        if self.device.type == "cuda":
            times = timing.time_alternating_graphs(works, self.settings.repeats) or eager
        best = min(full, key=lambda name: times[name])
        expected = final_features(models[best], self.loaded, self.pixels)
        rows = [
            {
                **self._frame(name),
                **self._error(model, expected, in_graph=times is not eager),
                "milliseconds": times[name],
                "milliseconds_eager": eager[name],
                "speedup": times[best] / times[name],
                "speedup_eager": eager[best] / eager[name],
                "peak_mebibytes": self._peak(model, in_graph=times is not eager),
            }
            for name, model in models.items()
        ]
        fastest = next(row for row in rows if row["method"] == best)
        return [{**fastest, "method": "full", "path": best.removeprefix("full-")}, *rows]

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
        arguments |= {"layers": self.settings.layers, "form": self.settings.form}
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

    def _error(self, model: nn.Module, expected: Tensor, *, in_graph: bool) -> Row:
        """Compare the final features with the dense model, as they were timed."""
        observer = _StatsObserver()

        def forward() -> Tensor:
            observer.stats.clear()
            return final_features(model, self.loaded, self.pixels)

        with observe(model, observer):
            output = run_as_timed(forward, self.device).result if in_graph else forward()
        difference = (output.double() - expected.double()).flatten(1).norm(dim=1)
        relative = difference / expected.double().flatten(1).norm(dim=1)
        density = observer.density
        return {
            "density_percent": None if density is None else 100 * density,
            "tiled_layers": observer.tiled_layers,
            "layers": len(self.host.attentions),
            "error_l2_percent": 100 * float(relative.mean()),
        }

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
    return find_host(model).blocks[-1]
