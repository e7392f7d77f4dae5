"""What screening would bring for a model at a size on this machine, before anything is tuned."""

import json
import math
import os
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention

from bmfa.attention.api import screened_attention
from bmfa.attention.dispatch import exact_choice
from bmfa.attention.kernels import native
from bmfa.attention.result import Screened
from bmfa.checks import check_integer
from bmfa.data.drawn.scenes import draw_scene
from bmfa.grid import Grid
from bmfa.models.image_sample import sample_images
from bmfa.models.loading import LoadedModel, find_preprocessing
from bmfa.models.patching import evaluating, patch
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.models.tables import Parts, Table, by_reason
from bmfa.models.tuning import Tuner, check_errors
from bmfa.records import environment
from bmfa.timing import clock

ERRORS = (0.01, 0.03, 0.1)
# Images that are timed. Their densities differ by a tenth or two; each takes a few passes.
IMAGES = 2
# Passes that are timed after the first one: as many as these seconds allow, at most three. If they allow
# none, the first one counts, of which the cold start is a small part.
PASS_SECONDS, MOST_PASSES = 6.0, 3
# Calls of a kernel are timed for this long, at least one: with each error target on the inputs of each
# layer, and dense and exact attention, whose time does not depend on values, once for all layers.
CALL_SECONDS, SHARED_SECONDS = 0.04, 0.25
CUDA_CALLS = 8  # between two synchronizations, so that launches overlap with kernels as in a model
# Speed from which the verdict recommends a setting: passes repeat to a few percent.
LEAST_SPEED = 1.1
# Sides of grids up to which the verdict looks for the first one over which tiles run by default.
MOST_SIDE = 512
# The images that are made without any: noise whose amplitude falls with the frequency f as 1 / f^0.75,
# one drawn scene, and a mosaic of 3x3 of them. error=0.03 expands 7, 21 and 42 % of their tiles in
# DeiT-Tiny at 1,024 px, and 17 to 31 % of those of four photographs; 20, 46 and 42 % in a ViT-S/14 at
# 672 px, and 18 to 53 % of those of the photographs. Those of the noise, 7 and 20 %, are interpolated
# between powers that were measured; the others were measured.
NOISE_POWER, MOSAIC_SIDES = 0.75, (1, 3)


@dataclass(frozen=True)
class SettingEstimate:
    """What one setting of `bmfa.patch` would do; `estimate` makes these.

    Attributes:
        error: Error target of attention; 0 is exact attention, by the native kernel on a CPU.
        milliseconds: Time of a pass, the mean over the images.
        speedup: The time of a dense pass, divided by it.
        slowest: The speed on the image on which it is least.
        fastest: The speed on the image on which it is greatest.
        density: Mean share of the tiles that are expanded; 1.0 where attention is exact.
        tiled_layers: The number of layers that run tiles; the others run exact attention.

    Example:
        >>> SettingEstimate(0.03, 50.0, 2.0, 1.9, 2.1, 0.2, 12).speed
        '1.9x to 2.1x'
    """

    error: float
    milliseconds: float
    speedup: float
    slowest: float
    fastest: float
    density: float
    tiled_layers: int

    @property
    def speed(self) -> str:
        """The speed as text: a range if images differ."""
        ends = (f"{self.slowest:.1f}x", f"{self.fastest:.1f}x")
        return ends[0] if ends[0] == ends[1] else " to ".join(ends)


@dataclass(frozen=True, repr=False)
class Estimate(Table):
    """What screening would bring for a model; `estimate` makes these.

    `str` is a table, and notebooks show it as HTML.

    Attributes:
        model: Class of the model.
        img_size: (height, width) of the images in pixels.
        images: Number of images that were timed.
        synthetic: True if they are synthetic, so that speeds are a range.
        tokens: Tokens of an image in the last layer, without class and register tokens.
        layers: Number of layers whose attention can be screened.
        reasons: Why the other blocks cannot be screened, and why layers stay exact at `headline`.
        dense_milliseconds: Time of a pass of the model as it is.
        attention_share: Share of it that attention takes.
        dense_mebibytes: Largest memory that a dense pass allocates beyond the weights.
        screened_mebibytes: The same with the setting `headline`.
        settings: The settings, exact attention first.
        headline: The error target of the verdict and of the memory.
        dense_below: The side in pixels below which dense attention is about as fast; None if it is not
            known.
        environment: Versions, device and processor.

    Example:
        >>> import bmfa
        >>> found = bmfa.estimate(bmfa.load_model("embedded"))
        >>> found.img_size, found.tokens, found.layers
        ((128, 128), 256, 8)
        >>> [one.error for one in found.settings]
        [0.0, 0.01, 0.03, 0.1]
    """

    model: str
    img_size: tuple[int, int]
    images: int
    synthetic: bool
    tokens: int
    layers: int
    reasons: tuple[str, ...]
    dense_milliseconds: float
    attention_share: float
    dense_mebibytes: float
    screened_mebibytes: float
    settings: tuple[SettingEstimate, ...]
    headline: float
    dense_below: int | None
    environment: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """What to do, in one line.

        Example:
            >>> import bmfa
            >>> bmfa.estimate(bmfa.load_model("embedded")).verdict.split()[0] != ""
            True
        """
        exact = self.settings[0]
        tiles = next(one for one in self.settings if one.error == self.headline)
        grows = self.dense_below is not None and self.dense_below > max(self.img_size)
        below = f" below {self.dense_below} px" if grows else ""
        if tiles.slowest >= LEAST_SPEED and tiles.speedup > exact.speedup:
            return f"{tiles.speed} at `error={tiles.error:g}`"
        if exact.slowest >= LEAST_SPEED:
            return f"{exact.speed} at `error=0`, which is exact; tiles gain nothing{below}"
        return f"stay dense{below}"

    def to_dict(self) -> dict[str, Any]:
        """Return all values as numbers, text and lists, with the verdict.

        Example:
            >>> import bmfa
            >>> bmfa.estimate(bmfa.load_model("embedded")).to_dict()["tokens"]
            256
        """
        return asdict(self) | {"verdict": self.verdict}

    def to_json(self) -> str:
        """Return `to_dict` as JSON.

        Example:
            >>> import bmfa, json
            >>> json.loads(bmfa.estimate(bmfa.load_model("embedded")).to_json())["synthetic"]
            True
        """
        return json.dumps(self.to_dict(), indent=2)

    def parts(self) -> Parts:
        """Return the table, with a line for each setting."""
        lines = [("setting", "speed", "ms", "tiles expanded", "tiled layers")]
        lines += [("dense", "1.0x", f"{self.dense_milliseconds:.4g}", "", "")]
        for one in self.settings:
            numbers = (f"{one.milliseconds:.4g}", f"{100 * one.density:.0f} %")
            lines.append((f"error={one.error:g}", one.speed, *numbers, str(one.tiled_layers)))
        height, width = self.img_size
        title = (
            f"{self.model} at {height}x{width} px, {self.tokens} tokens: {self.layers} layers can"
        )
        images = "synthetic images" if self.synthetic else "given images"
        notes = (
            *self.reasons,
            f"attention: {100 * self.attention_share:.0f} % of a dense pass of "
            f"{self.dense_milliseconds:.4g} ms, on {self.images} {images}",
            f"memory: {self.dense_mebibytes:.0f} MiB dense, {self.screened_mebibytes:.0f} MiB at "
            f"error={self.headline:g}, beyond the weights",
            f"verdict: {self.verdict}",
        )
        return f"{title} be screened", lines, 0, notes

    def __repr__(self) -> str:
        return f"Estimate({self.model}, {self.img_size[0]}x{self.img_size[1]} px: {self.verdict})"


def estimate(
    model: nn.Module | LoadedModel,
    images: Any = None,
    *,
    img_size: int | tuple[int, int] | None = None,
    errors: Sequence[float] = ERRORS,
    options: Mapping[str, Any] | None = None,
    limit: int = IMAGES,
    seed: int = 0,
) -> Estimate:
    """Estimate in seconds how much faster `bmfa.patch` would make a model on this machine.

    A dense pass is timed, and for each image a pass with the middle one of `errors`. On the q, k, v of
    each layer in this pass, the kernels are timed once for each setting. The time of a pass with another
    setting is that of the pass, less the time of its attention, plus that of the other setting. Passes
    of large images are timed once, so that speeds may be off by a tenth; `bmfa bench model` measures
    whole passes.

    How many tiles an error target expands depends on the images. Without images, three synthetic ones
    are used, noise, a drawn scene and a mosaic of nine, and speeds are a range, within which most
    photographs are. Memory is what torch allocates during a pass: on CUDA its peak, on a CPU that of all
    allocations that the profiler of torch sees, scratch memory of the native kernels included.

    The error of attention is not the change of the output, which `bmfa.tune` measures and keeps within
    a tolerance.

    Args:
        model: A model that `patch` supports and that is not patched, or what `load_model` returns.
        images: Images of one size as in `bmfa.tune`: tensors, a DataLoader, or the path of a folder or
            zip, which is read with the preprocessing of the model. None makes synthetic images.
        img_size: The side, or (height, width), of the images of a folder and of synthetic ones. None is
            the size of the model.
        errors: Error targets, above 0.
        options: Keyword arguments of every call of the model. None takes those of `load_model`.
        limit: The number of given images to use.
        seed: Seed of synthetic images, and of which of the given ones are used.

    Returns:
        An `Estimate`, whose `str` is a table.

    Raises:
        TypeError: If the model is not supported, with the reason.
        ValueError: If an argument is out of range, the model is patched, or it refuses the size.

    Example:
        >>> import bmfa
        >>> found = bmfa.estimate(bmfa.load_model("embedded", img_size=256))
        >>> found.tokens, found.synthetic, 0 < found.attention_share <= 1
        (1024, True, True)
    """
    tuner, errors = Tuner(model, {}, options), check_errors(errors)
    module, vit, device = tuner.model, tuner.vit, tuner.parameter.device
    tuner.check_tunable()
    limit = check_integer("limit", limit, low=1)
    pixels = _read(model, images, img_size, limit, seed)
    batches, headline = torch.split(tuner.place(pixels), 1), errors[len(errors) // 2]
    with evaluating(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a missed target is no matter of time
        dense, dense_bytes = _time_pass(partial(module, batches[0], **tuner.options), device)
        times: list[_AttentionTimes] = []
        screened, screened_bytes = [], 0
        patch(module, error=headline)
        for batch in batches:
            run = partial(module, batch, **tuner.options)
            milliseconds, peak = _time_pass(run, device)
            screened.append(milliseconds)
            screened_bytes = max(screened_bytes, peak)
            times.append(_AttentionTimes(errors, headline, times[0].shared if times else {}))
            with observe(module, times[-1]):
                run()
    rest = statistics.median(
        max(passed - one.milliseconds[headline], 0.0)
        for passed, one in zip(screened, times, strict=True)
    )
    settings, last, side = [], times[0].inputs, int(pixels.shape[-2])
    for error in (0.0, *errors):
        passes = [rest + one.milliseconds[error] for one in times]
        densities = [density for one in times for density in one.densities[error]]
        mean, density = statistics.fmean(passes), statistics.fmean(densities)
        ends = dense / max(passes), dense / min(passes)
        tiled = max(sum(x < 1.0 for x in one.densities[error]) for one in times)
        settings.append(SettingEstimate(error, mean, dense / mean, *ends, density, tiled))
    attention = min(statistics.fmean(one.milliseconds[None] for one in times), dense)
    tiles = statistics.fmean(one.milliseconds[headline] for one in times)
    return Estimate(
        model=type(module).__name__,
        img_size=(side, int(pixels.shape[-1])),
        images=len(batches),
        synthetic=images is None,
        tokens=last.grid.size,
        layers=len(vit.attentions),
        reasons=(
            *by_reason("not screened: blocks", vit.dense_blocks),
            *by_reason(f"exact at error={headline:g}: layers", times[0].exact),
        ),
        dense_milliseconds=dense,
        attention_share=attention / dense,
        dense_mebibytes=dense_bytes / 2**20,
        screened_mebibytes=screened_bytes / 2**20,
        settings=tuple(settings),
        headline=headline,
        dense_below=_dense_below(last, headline, side, dense, attention, tiles),
        environment=environment(str(device)),
    )


@dataclass(eq=False)
class _AttentionTimes:
    """Times of attention on the inputs of the layers in one pass, summed over layers."""

    errors: Sequence[float]
    headline: float
    # Of dense (None) and exact (0.0) attention by shape: their time does not depend on values.
    shared: dict[Any, dict[float | None, float]]
    milliseconds: dict[float | None, float] = field(default_factory=lambda: defaultdict(float))
    densities: dict[float, list[float]] = field(default_factory=lambda: defaultdict(list))
    exact: dict[int, str] = field(default_factory=dict)  # why, by layer, at the headline
    inputs: LayerInputs = field(init=False)  # of the last layer

    def __call__(self, inputs: LayerInputs, _: Screened) -> None:
        """Time a call of a layer, as an observer."""
        q, attend = inputs.q, partial(screened_attention, **inputs.arguments)
        key = (q.shape, inputs.grid)
        if key not in self.shared:
            works: dict[float | None, Any] = {
                None: partial(
                    scaled_dot_product_attention, q, inputs.k, inputs.v, scale=inputs.scale
                ),
                0.0: partial(attend, error=0.0),
            }
            self.shared[key] = {
                name: _time_calls(work, q.device, SHARED_SECONDS)[0] for name, work in works.items()
            }
        for name, milliseconds in self.shared[key].items():
            self.milliseconds[name] += milliseconds
        self.densities[0.0].append(1.0)
        for error in self.errors:
            setting = q.dtype, q.device.type, inputs.grid, {"error": error}
            choice = exact_choice(tuple(q.shape), *setting, in_graph=False)
            if choice is not None:
                milliseconds, density, reason = self.shared[key][0.0], 1.0, choice.reason
            else:
                milliseconds, (_, stats) = _time_calls(partial(attend, error=error), q.device)
                density, reason = stats.density, stats.reason
            self.milliseconds[error] += milliseconds
            self.densities[error].append(density)
            if density == 1.0 and error == self.headline:
                self.exact[inputs.layer] = reason.removeprefix("auto: ")
        self.inputs = inputs


def _dense_below(
    inputs: LayerInputs, error: float, height: int, dense: float, attention: float, tiles: float
) -> int | None:
    """Return the side in pixels of the smallest images on which tiles are expected to gain.

    It is at least the first one at which `auto` runs tiles. If the images are larger than that, the time
    R = `dense` - `attention` of everything else grows as the number of tokens, and the times A of dense
    attention and T of tiles as its square, at most: with r times as many tokens a pass is LEAST_SPEED =
    s times as fast if R + r A = s (R + r T), that is from r = (s - 1) R / (A - s T) on.

    Args:
        inputs: Inputs of a layer.
        error: The error target.
        height: Height of the images in pixels.
        dense: Milliseconds of a dense pass.
        attention: Those of its attention.
        tiles: Those of attention with the error target.
    """
    q, pixels = inputs.q, height / inputs.grid.height

    def runs_tiles(side: int) -> bool:
        shape = (*q.shape[:2], inputs.prefix + side * side, q.shape[3])
        setting = q.dtype, q.device.type, Grid(side, side), {"error": error}
        return exact_choice(shape, *setting, in_graph=False) is None

    side = next(filter(runs_tiles, range(1, MOST_SIDE + 1)), None)
    if side is None:
        return None
    if side * side > inputs.grid.size:
        return math.ceil(side * pixels)
    gain = attention - LEAST_SPEED * tiles
    if gain <= 0.0:
        return None
    ratio = (LEAST_SPEED - 1.0) * (dense - attention) / gain
    return math.ceil(max(side, math.ceil(math.sqrt(ratio * inputs.grid.size))) * pixels)


def _time_pass(run: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Return the milliseconds of a pass, and the largest number of bytes that it allocates."""
    try:
        first, peak = clock(partial(peak_bytes, run, device), device)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"the model does not run on these images ({str(error).splitlines()[0]}); build it for their "
            "size, e.g. bmfa.load_model(name, img_size=...)"
        ) from error
    repeats = min(MOST_PASSES, int(PASS_SECONDS / first))
    samples = [clock(run, device)[0] for _ in range(repeats)] or [first]
    return 1e3 * statistics.median(samples), peak


def _time_calls(
    work: Callable[[], Any], device: torch.device, seconds: float = CALL_SECONDS
) -> tuple[float, Any]:
    """Return the median milliseconds of a call, and what the last one returned."""
    samples: list[float] = []
    while sum(samples) < seconds:
        sample, result = clock(work, device, CUDA_CALLS if device.type == "cuda" else 1)
        samples.append(sample)
    return 1e3 * statistics.median(samples), result


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return how much memory torch holds during a call, at most, beyond what it held before.

    On CUDA its allocator counts. On a CPU, which has no such counter, the profiler of torch lists every
    allocation, and the peak of their running sum is returned.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    # The library of the profiler writes lines to standard error where this is not set.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    native.last_call.scratch = None  # so that the call allocates it
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        run()
    results: Any = profiled.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _read(
    model: nn.Module | LoadedModel,
    images: Any,
    img_size: int | tuple[int, int] | None,
    limit: int,
    seed: int,
) -> Tensor:
    """(n, 3, height, width) images, at most `limit`, or synthetic ones."""
    if images is not None:
        return sample_images(images, model, limit, seed, least=1, img_size=img_size)
    preprocess = find_preprocessing(model, img_size=img_size)
    size = img_size if preprocess is None else preprocess.size
    if size is None:
        raise ValueError(
            "the size of the model's images is not known; pass what bmfa.load_model returns as the "
            "model, img_size=..., or images"
        )
    return synthetic_images((size, size) if isinstance(size, int) else size, seed)


def synthetic_images(size: tuple[int, int], seed: int = 0) -> Tensor:
    """(3, 3, height, width) noise, a drawn scene and a mosaic of scenes, of mean 0 and variance 1."""
    generator = torch.Generator().manual_seed(check_integer("seed", seed, low=0))
    spectrum = torch.fft.rfft2(torch.randn(1, *size, generator=generator))
    rows, columns = torch.fft.fftfreq(size[0])[:, None], torch.fft.rfftfreq(size[1])
    frequency = (rows.square() + columns.square()).sqrt()  # (height, width // 2 + 1)
    frequency[0, 0] = math.inf
    noise = torch.fft.irfft2(spectrum / frequency**NOISE_POWER, s=size)
    images = [noise.expand(3, -1, -1)]
    for side in MOSAIC_SIDES:
        scenes = [draw_scene(seed, index)[0].image.pixels for index in range(side * side)]
        tiled = torch.from_numpy(np.stack(scenes)).float().reshape(side, side, *scenes[0].shape)
        mosaic = tiled.permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2)  # (3, height, width)
        images.append(interpolate(mosaic[None], size=size, mode="bicubic", antialias=True)[0])
    return torch.stack([(image - image.mean()) / image.std() for image in images])
