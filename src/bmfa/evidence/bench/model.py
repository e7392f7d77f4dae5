"""Whole models at high resolution: end to end time, the dense model on its best path beside."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bmfa import timing
from bmfa.attention import dispatch as tiled
from bmfa.attention.result import Screened
from bmfa.checks import check_integer
from bmfa.evidence.bench import dense_paths
from bmfa.evidence.bench.attention_methods import Setting
from bmfa.evidence.bench.attention_rows import DTYPES
from bmfa.evidence.bench.long_models import load_long, pictures_of, pixels_of
from bmfa.evidence.bench.self_check import check_backend
from bmfa.evidence.runner import Progress
from bmfa.grid import Grid
from bmfa.models import LoadedModel, patch
from bmfa.models.hosts import Host, find_host
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.records import Record, Row, environment

SIZES = {"cuda": (1024, 2048, 4096), "cpu": (512,)}
METHODS = ("error:0.1", "error:0.2", "tiles:0.03")
FULL = ("cudnn", "flash")
HOW = ("model", "layers", "form", "repeats", "seed")


@dataclass(frozen=True)
class Settings:
    """Which model is run, and how."""

    model: str = "embedded"
    weights: str | None = None
    data_dir: str | None = None
    methods: tuple[str, ...] = METHODS
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
            Setting.parse(name)

    @property
    def kind(self) -> str:
        """The kind of device."""
        return torch.device(self.device).type

    @property
    def precision(self) -> str:
        """Name of the dtype."""
        return self.dtype or ("bfloat16" if self.kind == "cuda" else "float32")


def run(settings: Settings, sizes: Sequence[int] = (), progress: Progress | None = None) -> Record:
    """Rows for every size of picture, after a check of the kernels against the oracle."""
    rows: list[Row] = []
    chosen = list(sizes) or list(SIZES.get(settings.kind, SIZES["cpu"]))
    said = ""
    names: list[str] = []
    with torch.inference_mode():
        for index, size in enumerate(chosen):
            bench = _Bench(settings, check_integer("img_size", size, low=16))
            said, names = bench.weights, bench.names
            rows += bench.rows()
            del bench  # its models, before the next ones are made
            if progress is not None:
                progress(index + 1, len(chosen))
    made = {
        **{name: getattr(settings, name) for name in HOW},
        "weights": said,
        "pictures": names,
        "sizes": chosen,
        "batch_size": settings.batch_size,
        "timing": "median of forward passes that take turns, all in CUDA graphs (milliseconds) where "
        "all can be captured, and call by call (milliseconds_eager)",
        "error": "relative L2 of the final features against the dense model of the same dtype",
    }
    return Record("bench", made, rows, environment(settings.device))


@dataclass
class _Ear:
    """Notes what ran in every screened layer."""

    forms: list[str] = field(default_factory=list)
    densities: list[float] = field(default_factory=list)

    def __call__(self, call: LayerInputs, screened: Screened) -> None:
        density = screened.stats.density
        self.forms.append(screened.stats.form)
        self.densities += [] if density is None else [density]


class _Bench:
    """One model at one size: a copy of it for each method, the parameters shared."""

    def __init__(self, settings: Settings, size: int) -> None:
        self.settings, self.size = settings, size
        self.place = torch.device(settings.device)
        self.dtype = DTYPES[settings.precision]
        self.loaded, self.weights = load_long(
            settings.model, settings.weights, size=size, seed=settings.seed
        )
        self.loaded.model.to(self.place, self.dtype)
        self.host: Host = find_host(self.loaded.model)
        pictures, self.names = pictures_of(settings.data_dir, settings.batch_size, settings.seed)
        self.pixels = pixels_of(self.loaded, pictures, settings.device).to(self.dtype)
        self.grid = self._grid()

    def rows(self) -> list[Row]:
        """The dense model by every path, and screened by every setting."""
        check_backend(self._backend(), self.dtype, self.settings.device, [self._shape()[1]])
        dense_paths.settle(self.place, self.dtype)
        full = self._full()
        works = {**full, **{name: self._screened(name) for name in self.settings.methods}}
        eager = timing.time_alternating(
            {name: self._forward(model) for name, model in works.items()},
            self.settings.repeats,
            self.place,
        )
        graphs = self._graphs(works)
        times = graphs or eager
        best = min(full, key=lambda name: times[name])
        truth = features(works[best], self.loaded, self.pixels)
        with tiled.as_recorded(graphs is not None):
            rows = [self._row(name, m, times, eager, best, truth) for name, m in works.items()]
        dense = next(row for row in rows if row["method"] == best)
        return [{**dense, "method": "full", "path": best.removeprefix("full-")}, *rows]

    def _full(self) -> dict[str, nn.Module]:
        """The model by each fused path that is preferred; on a processor there is no choice."""
        model = self.loaded.model
        if self.place.type != "cuda":
            return {"full-default": model}
        return {f"full-{name}": _Preferring(model, name) for name in FULL}

    def _screened(self, name: str) -> nn.Module:
        """A copy that is screened; it shares its parameters with the model."""
        model = self.loaded.model
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        asked = Setting.parse(name).asked(self.grid)
        how = {name: getattr(self.settings, name) for name in ("layers", "form")}
        return patch(deepcopy(model, shared), **how, **asked)

    def _forward(self, model: nn.Module) -> timing.Work:
        return lambda: model(self.pixels, **self.loaded.options)

    def _graphs(self, works: dict[str, nn.Module]) -> dict[str, float] | None:
        if self.place.type != "cuda":
            return None
        calls = {name: self._forward(model) for name, model in works.items()}
        return timing.time_alternating_graphs(calls, self.settings.repeats)

    def _row(
        self,
        name: str,
        model: nn.Module,
        times: dict[str, float],
        eager: dict[str, float],
        best: str,
        truth: Tensor,
    ) -> Row:
        ear = _Ear()
        with observe(model, ear):
            got = features(model, self.loaded, self.pixels)
        apart = (got.double() - truth.double()).flatten(1).norm(dim=1)
        heads, dim = self._shape()
        peak = timing.peak_bytes(self._forward(model), self.place)
        return {
            "what": "model",
            "img_size": self.size,
            "n": self.grid.size,
            "heads": heads,
            "dim": dim,
            "dtype": self.settings.precision,
            "batch": len(self.pixels),
            "method": name,
            "density_percent": 100 * sum(ear.densities) / len(ear.densities)
            if ear.densities
            else None,
            "tiled_layers": ear.forms.count("tiled"),
            "layers": len(self.host.attentions),
            "error_l2_percent": 100 * float((apart / truth.double().flatten(1).norm(dim=1)).mean()),
            "milliseconds": times[name],
            "milliseconds_eager": eager[name],
            "speedup": times[best] / times[name],
            "speedup_eager": eager[best] / eager[name],
            "peak_mebibytes": None if peak is None else peak / 2**20,
        }

    def _grid(self) -> Grid:
        projection: Any = self.host.projection
        down, across = (
            int(side // step)
            for side, step in zip(self.pixels.shape[-2:], projection.stride, strict=True)
        )
        return Grid(down, across)

    def _shape(self) -> tuple[int, int]:
        """Heads and their width."""
        attention: Any = self.host.attentions[0]
        heads = getattr(attention, "num_heads", None) or attention.num_attention_heads
        width: Any = self.host.projection
        return int(heads), int(width.out_channels) // int(heads)

    def _backend(self) -> str:
        return "triton" if self.place.type == "cuda" else "eager"


class _Preferring(nn.Module):
    """A model with one dense path preferred to the others."""

    def __init__(self, model: nn.Module, path: str) -> None:
        super().__init__()
        self.model, self.path = model, path

    def forward(self, *args: Any, **options: Any) -> Any:
        with dense_paths.preferring(self.path):
            return self.model(*args, **options)


def features(model: nn.Module, loaded: LoadedModel, pixels: Tensor) -> Tensor:
    """(B, tokens, dim): what the last block gives, after the norm that follows it where one is known."""
    found: list[Any] = []
    handle = _last(model).register_forward_hook(lambda *call: found.append(call[2]))
    try:
        model(pixels, **loaded.options)
    finally:
        handle.remove()
    output: Tensor = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
    return output.clone()


def _last(model: nn.Module) -> nn.Module:
    for module in model.modules():
        norm = getattr(module, "norm", None)
        if hasattr(module, "blocks") and isinstance(norm, nn.Module):
            return norm
    return find_host(model).blocks[-1]
