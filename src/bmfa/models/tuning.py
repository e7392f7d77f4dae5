"""Choose a setting for each layer of a model on a person's images, within a tolerance."""

import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.attention.api import screened_attention
from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid
from bmfa.models.families import VisionTransformer, find_vision_transformer
from bmfa.models.image_sample import sample_images, split_images
from bmfa.models.layer_settings import LayerSetting, SettingProblem, add_between
from bmfa.models.loading import LoadedModel, find_preprocessing
from bmfa.models.measures import MEASURES, Function, Measure, find_measure
from bmfa.models.patching import (
    install_layers,
    is_patched,
    layer_indices,
    patch,
    planned_options,
    unpatch,
)
from bmfa.models.plan import ModelFingerprint, Plan
from bmfa.models.preprocessing import Preprocessing
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.models.search import Combination, Search
from bmfa.records import environment, round_digits
from bmfa.timing import synchronize, time_alternating

Progress = Callable[[int, int], None]  # steps done, of how many
Times = Mapping[int, Mapping[float | None, float]]

# Error targets that are tried in each layer: the change of a layer grows about in proportion to its
# target, so steps of a factor of 1.5 to 2 leave the optimum at most that far from a setting.
ERRORS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
# Images that are used: half of them calibrate, the others validate and test. The change differs by a
# factor of up to 3 between photographs (0.014 to 0.040 with one plan of DeiT-Tiny at 768 px), so more
# images predict better; on a CPU a forward pass at high resolution takes seconds.
IMAGES = {"cuda": 32, "cpu": 8}
# Share of the time of dense attention that a setting must save; medians of five repeat to about 1 %.
LEAST_GAIN = 0.02
# Calls between two synchronisations on CUDA, so that launches overlap with kernels as in a model.
CUDA_CALLS = 8


def tune(
    model: nn.Module | LoadedModel,
    images: Any,
    tolerance: float = 0.03,
    measure: str | Function = "features",
    *,
    errors: Sequence[float] = ERRORS,
    layers: str | Sequence[int] = "all",
    img_size: int | tuple[int, int] | None = None,
    preprocess: Preprocessing | None = None,
    options: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    limit: int | None = None,
    seed: int = 0,
    repeats: int = 5,
    times: Times | None = None,
    progress: Progress | bool = True,
) -> Plan:
    """Choose the fastest settings of attention that keep the output of a model within a tolerance.

    Half of the images calibrate: for each layer alone and each error target, they measure the time of
    its attention on this device and the change of the output of the model. Targets between two of
    `errors` are interpolated. The fastest combination that is predicted to stay within the tolerance
    is then validated end to end on a quarter of the images. If it fails there, its layers are measured
    alone on these, too, and the next combination must be predicted to hold on both. Then layers get
    faster settings while the check holds. A single error target for all layers that holds is never
    predicted to be faster than the plan. A layer in which nothing is gained stays dense.

    The last quarter tests the plan and takes no part in the choice: `plan.measured_change` is of these
    images. With fewer than six images there is no such quarter, and it is of the validation images. If
    it exceeds the tolerance, `tune` warns.

    The model is the same afterwards, also if an error or Ctrl-C ends the call. Apply the plan with
    `bmfa.patch(model, plan=plan)`. Tune in the dtype, on the device and at the size of the later use.

    Args:
        model: A model that `patch` supports, or what `load_model` returns.
        images: A (N, 3, height, width) tensor or a list of (3, height, width) tensors, preprocessed;
            a DataLoader of such tensors, of tuples that begin with one or of dictionaries with
            `pixel_values`; or the path of a folder or zip of images. At least two images, all of
            one size; six or more are better.
        tolerance: The largest change of the output that is accepted, above 0, in units of the measure:
            0.03 is 3 % of the features.
        measure: `"features"` is the relative L2 distance of the tokens after the last block, the root
            of its mean square over images; squares of the changes of layers add. `"logits"` is the
            mean KL divergence of the class probabilities in nats, which adds itself. A function of two
            outputs (reference, output) of the model returns a number that is 0 for equal outputs and
            grows with the change, e.g. 1 - IoU; it is only checked end to end.
        errors: Error targets to try in each layer.
        layers: The layers that may change: `"all"`, `"last-K"` or indices.
        img_size: The side, or (height, width), of images of a folder in pixels.
        preprocess: The preprocessing of images of a folder. None takes that of the model.
        options: Keyword arguments of every call of the model. None takes those of `load_model`.
        batch_size: The number of images in a call; times are of such a batch.
        limit: The number of images to use. None is 32 on CUDA and 8 elsewhere, or two batches if these
            are more.
        seed: Seed of which images are used, and which of them calibrate, validate and test.
        repeats: The number of times each call is timed; the median counts.
        times: Milliseconds by layer and setting (None is dense) in place of measured ones, e.g.
            `plan.times`. The same images, seed and times give the same settings.
        progress: True shows a progress bar on a terminal. A function is called with the steps that are
            done and their number.

    Returns:
        The plan.

    Raises:
        TypeError: If the model is not supported, or an argument has a wrong type.
        ValueError: If an argument is out of range, there are fewer than two images, they cannot be
            read or differ in size, the model is patched, or the measure returns NaN or falls below
            0. The model is unchanged.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.load_model("embedded").model
        >>> images = torch.rand(2, 3, 112, 112, generator=torch.Generator().manual_seed(0))
        >>> times = {layer: {None: 1.0, 0.1: 0.5} for layer in range(8)}
        >>> plan = bmfa.tune(model, images, tolerance=0.05, errors=[0.1], times=times)
        >>> plan.measured_change <= 0.05
        True
        >>> patched = bmfa.patch(model, plan=plan)
    """
    found = find_measure(measure)
    tolerance, errors = check_tolerance(tolerance, found.name), _check_errors(errors)
    batch_size = check_integer("batch_size", batch_size, low=1)
    seed = check_integer("seed", seed, low=0)
    repeats = check_integer("repeats", repeats, low=1)
    module, host, options = check_tunable(model, options)
    if host.not_tunable:
        raise TypeError(
            f"{type(module).__name__} is not supported by tune: {host.not_tunable}; pass error= to "
            "bmfa.patch"
        )
    indices = layer_indices(layers, len(host.attentions))
    if times is not None:
        _check_times(times, indices, errors)
    device = next((p.device.type for p in module.parameters()), "cpu")
    default = max(IMAGES.get(device, IMAGES["cpu"]), 2 * batch_size)
    limit = check_integer("limit", default if limit is None else limit, low=2)
    if isinstance(images, (str, os.PathLike)):
        preprocess = find_preprocessing(model, preprocess, img_size)
    elif img_size is not None or preprocess is not None:
        raise ValueError(
            "img_size and preprocess are for images of a folder; leave them out, and pass tensors of "
            "the size of the model"
        )
    images = sample_images(images, preprocess, limit, torch.Generator().manual_seed(seed))
    parts = split_images(images, batch_size)
    parameter = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    batches = {
        name: torch.split(part.to(parameter.device, parameter.dtype), batch_size)
        if len(part)
        else ()
        for name, part in zip(("calibration", "validation", "test"), parts, strict=True)
    }
    steps = Steps(progress, 3 + len(host.attentions) + len(indices) * len(errors))
    with unchanged(module), steps, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # settings that miss their target are measured, not used
        tuner = _Tuner(module, host, found, options, tolerance, errors, repeats, steps, batches)
        plan = tuner.make_plan(indices, times, seed)
    if not plan.holds:
        warnings.warn(
            f"the plan changes {plan.measure} by {plan.measured_change:.3g} on {plan.test_images} "
            f"images that took no part in the choice, above the tolerance of {plan.tolerance:g}; "
            "pass more images (and limit), or a smaller tolerance",
            stacklevel=2,
        )
    return plan


class Steps:
    """Counts steps, and shows them as a bar on a terminal or passes them to a function."""

    def __init__(self, progress: Progress | bool, total: int, unit: str = " steps") -> None:
        self.progress, self.total, self.done, self.bar = progress, total, 0, None
        if progress is True and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, unit=unit, leave=False, dynamic_ncols=True)

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def advance(self) -> None:
        """Count one step."""
        self.done += 1
        if self.bar is not None:
            self.bar.update()
        elif callable(self.progress):
            self.progress(self.done, max(self.done, self.total))


@dataclass(eq=False)
class _Tuner:
    """One run of `tune` on a model."""

    model: nn.Module
    host: VisionTransformer
    measure: Measure
    options: Mapping[str, Any]
    tolerance: float
    errors: tuple[float, ...]
    repeats: int
    steps: Steps
    images: Mapping[str, Sequence[Tensor]]  # batches for "calibration", "validation" and "test"
    references: dict[tuple[str, str], list[Any]] = field(
        default_factory=dict
    )  # by measure and images
    times: dict[int, Mapping[float | None, float]] = field(default_factory=dict)  # by layer
    grids: dict[int, Grid] = field(default_factory=dict)
    dtype: str = ""

    def make_plan(self, layers: Sequence[int], times: Times | None, seed: int) -> Plan:
        # What is not additive is ranked by features, and only checked by itself.
        additive = self.measure if self.measure.power is not None else MEASURES["features"]
        depth = len(self.host.attentions)
        for measure in dict.fromkeys((additive, self.measure)):
            self.check_deterministic(measure, (None,) * depth)
        self.steps.advance()
        batch = self.images["calibration"][0]
        self.time_layers(batch, times)

        def change_alone(layer: int, error: float, images: str = "validation") -> float:
            alone = tuple(error if index == layer else None for index in range(depth))
            return self.change(images, alone, additive)

        candidates: list[LayerSetting] = []
        for layer in range(depth):
            found = self.times[layer]
            settings = [LayerSetting(layer, None, found.get(None, 0.0), 0.0)]
            for error in self.errors if layer in layers else ():
                faster = found[error] < (1.0 - LEAST_GAIN) * found[None]
                change = change_alone(layer, error, "calibration") if faster else None
                settings.append(LayerSetting(layer, error, found[error], change))
                self.steps.advance()
            candidates += add_between(settings)
        problem = SettingProblem(candidates, additive.power or 1, self.change, change_alone)
        power = self.measure.power
        budget = problem.largest if power is None else self.tolerance**power
        search = Search(problem, self.tolerance, power, budget)
        chosen = search.run()
        self.steps.advance()
        dense_ms, planned_ms = self.time_model(batch, chosen.settings)
        if times is None and planned_ms >= dense_ms and any(chosen.settings):
            # The layers gain less than patching a model costs.
            chosen = search.stay_dense(
                f"dense: the patched model takes {planned_ms:g} ms, and the dense one {dense_ms:g} ms"
            )
            planned_ms = dense_ms
        assert chosen.validation_change is not None
        measured = chosen.validation_change
        if self.images["test"]:
            measured = self.change("test", chosen.settings)
        self.steps.advance()
        settings = [
            replace(s, validation_change=problem.alone.get((s.layer, s.error))) for s in candidates
        ]
        saved = problem.price(problem.dense) - problem.price(chosen.settings)
        device = str(batch.device)
        return Plan(
            model=ModelFingerprint.from_model(self.model),
            img_size=(int(batch.shape[-2]), int(batch.shape[-1])),
            grids=tuple((self.grids[i].height, self.grids[i].width) for i in range(depth)),
            batch_size=len(batch),
            dtype=self.dtype,
            device=device,
            measure=self.measure.name,
            tolerance=self.tolerance,
            layers=tuple(s for s in settings if s.error == chosen.settings[s.layer]),
            candidates=tuple(settings),
            predicted_change=chosen.predicted_change,
            validation_change=chosen.validation_change,
            measured_change=measured,
            checks=tuple(search.checks),
            dense_milliseconds=dense_ms,
            # A sum of layers that exceeds the model can only come from the noise of short times.
            predicted_milliseconds=max(dense_ms - saved, 0.01 * dense_ms),
            milliseconds=planned_ms,
            calibration_images=sum(map(len, self.images["calibration"])),
            validation_images=sum(map(len, self.images["validation"])),
            test_images=sum(map(len, self.images["test"])),
            seed=seed,
            environment=environment(device),
        )

    def change(self, images: str, chosen: Combination, measure: Measure | None = None) -> float:
        """Return the change of the output on one kind of images with these error targets."""
        measure, batches = measure or self.measure, self.images[images]
        references = self.references.setdefault((measure.name, images), [])
        for batch in batches[len(references) :]:
            references.append(measure.outputs(self.model, batch, self.options))
        self.install(chosen)
        try:
            outputs = (measure.outputs(self.model, batch, self.options) for batch in batches)
            changes = [
                len(batch) * measure.compare(reference, output)
                for batch, reference, output in zip(batches, references, outputs, strict=True)
            ]
        finally:
            unpatch(self.model)
        mean = sum(changes) / sum(map(len, batches))
        if not math.isfinite(mean) or mean < -self.tolerance:
            raise ValueError(
                f"the measure {measure.name!r} returned {mean:g} with the settings {chosen}; it must be "
                "finite and grow with the change from 0, its value for equal outputs (return 1 - IoU "
                "rather than IoU - 1), and the outputs of the model must be finite"
            )
        return round_digits(measure.change(max(mean, 0.0)), 6)  # rounding may be below 0

    def check_deterministic(self, measure: Measure, dense: Combination) -> None:
        """Raise unless the unchanged model is within the tolerance of itself."""
        change = self.change("calibration", dense, measure)
        if change > self.tolerance:
            raise ValueError(
                f"the measure {measure.name!r} returned {change:g} for two runs of the unchanged model, "
                f"above the tolerance of {self.tolerance:g}; it must be 0 for equal outputs "
                "(return 1 - IoU rather than IoU), and the model must be deterministic"
            )

    def install(self, chosen: Combination) -> None:
        """Patch the model with these error targets."""
        errors = {layer: error for layer, error in enumerate(chosen) if error is not None}
        if errors:
            grids = [self.grids[layer] for layer in range(len(chosen))]
            install_layers(self.model, self.host, planned_options(errors), grids)

    def time_layers(self, batch: Tensor, times: Times | None) -> None:
        """Run the model once with exact attention, and time the attention of every layer on the way.

        Dense attention is what a patched model runs where it is exact: on a CPU the native kernel, where
        it is faster than that of torch.
        """

        def note(inputs: LayerInputs, _: object) -> None:
            layer, grid = inputs.layer, inputs.grid
            if self.grids.setdefault(layer, grid) != grid:
                raise ValueError(
                    f"layer {layer} of the model attends on grids of {self.grids[layer]} and {grid} "
                    "tokens, and a plan is for one grid in each layer; pass error= to bmfa.patch"
                )
            if layer not in self.times:
                found = (times or {}).get(layer, {})
                if times is None:
                    found = time_attention(inputs, self.errors, self.repeats)
                self.times[layer] = {error: round_digits(ms, 5) for error, ms in found.items()}
                self.dtype = str(inputs.q.dtype).removeprefix("torch.")
                self.steps.advance()

        patch(self.model, error=0.0)
        try:
            with observe(self.model, note):
                self.measure.outputs(self.model, batch, self.options)
        finally:
            unpatch(self.model)
        unused = [layer for layer in range(len(self.host.attentions)) if layer not in self.grids]
        if unused:
            raise ValueError(
                f"layer {unused[0]} of the model did not run; a plan is for models that run every layer "
                "in each pass; pass error= to bmfa.patch"
            )

    def time_model(self, batch: Tensor, chosen: Combination) -> tuple[float, float]:
        """Return the milliseconds of the unpatched and of the patched model, timed in turns."""
        samples: dict[Combination, list[float]] = {(): [], chosen: []}
        for _ in range(self.repeats + 1):  # the first one warms up
            for combination, found in samples.items():
                self.install(combination)
                synchronize(batch.device)
                start = time.perf_counter()
                self.model(batch, **self.options)
                synchronize(batch.device)
                found.append(1e3 * (time.perf_counter() - start))
                unpatch(self.model)
        dense, planned = (
            round_digits(statistics.median(found[1:]), 5) for found in samples.values()
        )
        return dense, planned if any(chosen) else dense


def time_attention(
    inputs: LayerInputs, errors: Sequence[float], repeats: int
) -> dict[float | None, float]:
    """Return the milliseconds of exact attention (None) and of attention over tiles by error target."""
    calls = CUDA_CALLS if inputs.q.is_cuda else 1
    names = ("q", "k", "v", "grid", "prefix", "scale", "valid")
    arguments = {name: getattr(inputs, name) for name in names}

    def attend(error: float | None) -> None:
        for _ in range(calls):
            screened_attention(**arguments, error=error or 0.0, allow_dense=error is None)

    works = {str(error): partial(attend, error) for error in (None, *errors)}
    medians = time_alternating(works, repeats, inputs.q.device)
    return {error: medians[str(error)] / calls for error in (None, *errors)}


def check_tunable(
    model: nn.Module | LoadedModel, options: Mapping[str, Any] | None
) -> tuple[nn.Module, VisionTransformer, dict[str, Any]]:
    """Return the module, its parts and the keyword arguments of its calls; raise if it is patched."""
    module = model.model if isinstance(model, LoadedModel) else model
    host = find_vision_transformer(module)
    if is_patched(module):
        raise ValueError("the model is patched or reduced; call bmfa.unpatch(model) first")
    if options is None:
        options = model.options if isinstance(model, LoadedModel) else {}
    return module, host, dict(options)


def check_tolerance(tolerance: object, measure: str = "features") -> float:
    """Return a tolerance above 0, and at most 1 for features."""
    high = 1.0 if measure == "features" else math.inf
    try:
        return check_number("tolerance", tolerance, low=0.0, high=high, open_low=True)
    except ValueError as error:
        raise ValueError(f"{error}; it is a fraction of the output: 0.05 is 5 %") from None


def _check_errors(errors: Sequence[float]) -> tuple[float, ...]:
    if isinstance(errors, (str, int, float)) or not hasattr(errors, "__iter__"):
        raise TypeError(f"errors is {errors!r}; pass a list of error targets, such as [0.03, 0.1]")
    checked = {check_number("errors", error, low=0.0, open_low=True) for error in errors}
    if not checked:
        raise ValueError("errors is empty; pass at least one error target, such as [0.03, 0.1]")
    return tuple(sorted(checked))


def _check_times(times: Times, layers: Sequence[int], errors: Sequence[float]) -> None:
    for layer, error in product(layers, (None, *errors)):
        try:
            check_number("times", times[layer][error], low=0.0, open_low=True)
        except (KeyError, IndexError, TypeError):
            what = "dense attention (None)" if error is None else f"error={error:g}"
            raise ValueError(
                f"times lacks {what} of layer {layer}; pass milliseconds by layer and target for each "
                "of them, such as {0: {None: 2.5, 0.1: 1.2}}, or leave times out"
            ) from None


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluate the model without gradients, and restore it however the block ends."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        unpatch(model)
        for module in training:
            module.training = True
