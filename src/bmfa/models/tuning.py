"""Choose a setting for each layer of a model on a person's images, within a tolerance."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.attention.api import screened_attention
from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid
from bmfa.models.families import VisionTransformer, find_vision_transformer
from bmfa.models.image_sample import sample_images
from bmfa.models.loading import LoadedModel
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
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.models.search import Combination, LayerSetting, Search, SettingProblem
from bmfa.records import environment, round_digits
from bmfa.timing import synchronize, time_alternating

# Error targets that are tried in each layer: the change of a layer grows about in proportion to its
# target, so steps of a factor of 1.3 to 2 leave the optimum at most that far from a setting. Each target
# takes a forward pass for each layer and calibration image.
ERRORS = (0.01, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2)
# Images that are used: half of them calibrate, the others validate and test. The change differs by a
# factor of up to 3 between photographs (0.014 to 0.040 with one plan of DeiT-Tiny at 768 px), so more
# images predict better; on a CPU a forward pass at high resolution takes seconds.
IMAGES = {"cuda": 32, "cpu": 8}
# Share of the time of dense attention that a setting must save; medians of five repeat to about 1 %.
LEAST_GAIN = 0.02
# Calls between two synchronisations on CUDA, so that launches overlap with kernels as in a model.
CUDA_CALLS = 8
# A mean change of equal outputs may be this far below 0 by rounding.
ROUNDING = 1e-6


def tune(
    model: nn.Module | LoadedModel,
    images: Any,
    tolerance: float = 0.03,
    measure: str | Function = "features",
    *,
    errors: Sequence[float] = ERRORS,
    layers: str | Sequence[int] = "all",
    options: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    limit: int | None = None,
    seed: int = 0,
    repeats: int = 5,
    progress: bool = True,
) -> Plan:
    """Choose the fastest settings of attention that keep the output of a model within a tolerance.

    Half of the images calibrate: for each layer alone and each error target, they measure the time of
    its attention on this device and the change of the output of the model. The fastest combination that
    is predicted to stay within the tolerance is then validated end to end, on these and on a quarter of
    the images. The ratio of its change to the tolerance scales what is predicted, and the next
    combination is chosen, until no faster one holds. A single error target for all layers that holds is
    never predicted to be faster than the plan. A layer in which nothing is gained stays dense.

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
            one size; six or more are better. Images of a folder have the preprocessing of the model
            (of `load_model`, or of timm).
        tolerance: The largest change of the output that is accepted, above 0, in units of the measure:
            0.03 is 3 % of the features.
        measure: `"features"` is the relative L2 distance of the tokens after the last block, the root
            of its mean square over images; squares of the changes of layers add. `"logits"` is the
            mean KL divergence of the class probabilities in nats, which adds itself. A function of two
            outputs (reference, output) of the model returns a number that is 0 for equal outputs and
            grows with the change, e.g. 1 - IoU; it is only checked end to end.
        errors: Error targets to try in each layer.
        layers: The layers that may change: `"all"`, `"last-K"` or indices.
        options: Keyword arguments of every call of the model. None takes those of `load_model`.
        batch_size: The number of images in a call; times are of such a batch.
        limit: The number of images to use. None is 32 on CUDA and 8 elsewhere, or two batches if these
            are more.
        seed: Seed of which images are used, and which of them calibrate, validate and test.
        repeats: The number of times each call is timed; the median counts.
        progress: True shows a progress bar on a terminal.

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
        >>> plan = bmfa.tune(model, images, tolerance=0.05, errors=[0.1], repeats=1)
        >>> plan.measured_change <= 0.05
        True
        >>> patched = bmfa.patch(model, plan=plan)
    """
    found = find_measure(measure)
    tolerance, errors = check_tolerance(tolerance, found.name), _check_errors(errors)
    repeats = check_integer("repeats", repeats, low=1)
    parts = prepare(model, images, options, IMAGES, batch_size, limit, seed)
    module, vit, _, sample, _ = parts
    if vit.not_tunable:
        raise TypeError(
            f"{type(module).__name__} is not supported by tune: {vit.not_tunable}; pass error= to "
            "bmfa.patch"
        )
    indices, calibrating = layer_indices(layers, len(vit.attentions)), len(sample["calibration"])
    if batch_size > calibrating:
        raise ValueError(
            f"batch_size is {batch_size} and {calibrating} images calibrate; pass at least "
            f"{2 * batch_size} images (and limit), or a smaller batch_size"
        )
    total = len(indices) * len(errors) + 4  # measurements of layers, and of the model
    with running(module, progress, total, " steps") as advance, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # settings that miss their target are measured, not used
        tuner = _AttentionTuner(*parts, advance, found, tolerance, errors, repeats)
        plan = tuner.make_plan(indices, seed)
    if not plan.holds:
        warnings.warn(
            f"the plan changes {plan.measure} by {plan.measured_change:.3g} on {plan.test_images} "
            f"images that took no part in the choice, above the tolerance of {plan.tolerance:g}; "
            "pass more images (and limit), or a smaller tolerance",
            stacklevel=2,
        )
    return plan


@dataclass(eq=False)
class Tuner:
    """Runs a model with settings of its layers on images, inside of `running(model, ...)`.

    Args:
        model: The model.
        vit: Its parts.
        options: Keyword arguments of every call.
        images: (n, 3, height, width) "calibration", "validation" and "test" images.
        batch_size: The number of images in a call.
        advance: Counts a measurement.
        references: What the unchanged model returns, by the outputs of a measure and the name of the
            images.
    """

    model: nn.Module
    vit: VisionTransformer
    options: Mapping[str, Any]
    images: Mapping[str, Tensor]
    batch_size: int
    advance: Callable[[], object]
    references: dict[Any, list[Any]] = field(default_factory=dict, init=False)

    @cached_property
    def batches(self) -> dict[str, Sequence[Tensor]]:
        """Batches of the images, where there are any."""
        parts = self.images.items()
        return {name: torch.split(part, self.batch_size) for name, part in parts if len(part)}

    def place(self, batch: Tensor) -> Tensor:
        """Return a batch in the dtype and on the device of the model."""
        floating = (p for p in self.model.parameters() if p.is_floating_point())
        parameter = next(floating, torch.empty(0))
        return batch.to(parameter.device, parameter.dtype)

    def install(self, chosen: Combination) -> None:
        """Change the model to a combination of settings; an empty one changes nothing."""
        raise NotImplementedError

    def outputs(self, measure: Measure, images: str, chosen: Combination = ()) -> Iterator[Any]:
        """Yield what a measure compares for each batch of images."""
        self.install(chosen)
        try:
            for batch in self.batches[images]:
                yield measure.outputs(self.model, self.place(batch), self.options)
        finally:
            unpatch(self.model)

    def change(self, measure: Measure, images: str, chosen: Combination) -> float:
        """Return the change of the output on images, which is one step."""
        self.advance()
        key = measure.outputs, images
        if key not in self.references:
            self.references[key] = list(self.outputs(measure, images))
        pairs = zip(self.references[key], self.outputs(measure, images, chosen), strict=True)
        changes = [measure.compare(reference, output) for reference, output in pairs]
        mean = statistics.fmean(changes, weights=map(len, self.batches[images]))
        if not math.isfinite(mean) or mean < -ROUNDING:
            raise ValueError(
                f"the measure {measure.name!r} returned {mean:g} with the settings {chosen}; it must be "
                "finite and grow with the change from 0, its value for equal outputs (return 1 - IoU "
                "rather than IoU - 1), and the outputs of the model must be finite"
            )
        return measure.change(max(mean, 0.0))

    def common_fields(self, seed: int) -> dict[str, Any]:
        """Return the fields that plans of attention and of merging share."""
        first = self.place(self.batches["calibration"][0])
        return {f"{name}_images": len(part) for name, part in self.images.items()} | {
            "model": ModelFingerprint.from_model(self.model),
            "img_size": (int(first.shape[-2]), int(first.shape[-1])),
            "seed": seed,
            "environment": environment(str(first.device)),
        }


@dataclass(eq=False)
class _AttentionTuner(Tuner):
    """One run of `tune` on a model."""

    measure: Measure
    tolerance: float
    errors: Sequence[float]
    repeats: int
    times: dict[int, Mapping[float | None, float]] = field(default_factory=dict)  # by layer
    grids: dict[int, Grid] = field(default_factory=dict)

    def make_plan(self, layers: Sequence[int], seed: int) -> Plan:
        # What is not additive is ranked by features, and only checked by itself.
        power = self.measure.power
        additive = MEASURES["features"] if power is None else self.measure
        depth = len(self.vit.attentions)
        for measure in dict.fromkeys((additive, self.measure)):
            self.check_deterministic(measure)
        batch = self.place(self.batches["calibration"][0])
        self.time_layers(batch)
        candidates = []
        for layer in range(depth):
            dense = self.times[layer][None]
            candidates.append(LayerSetting(layer, None, dense, 0.0))
            for error in self.errors if layer in layers else ():
                milliseconds, change = self.times[layer][error], None
                if milliseconds < (1.0 - LEAST_GAIN) * dense:
                    alone = tuple(error if index == layer else None for index in range(depth))
                    change = self.change(additive, "calibration", alone)
                candidates.append(LayerSetting(layer, error, milliseconds, change))
        problem = SettingProblem(
            candidates, additive.power or 1, partial(self.change, self.measure)
        )
        budget = sum(problem.costs.values()) if power is None else self.tolerance**power
        search = Search(problem, self.tolerance, power, budget)
        chosen = search.run()
        dense_ms, planned_ms = time_model(self, batch, chosen.settings)
        if planned_ms >= dense_ms and any(chosen.settings):
            # The layers gain less than patching a model costs.
            chosen = search.check(problem.dense)
            planned_ms = dense_ms
        measured = chosen.validation_change
        if "test" in self.batches:
            measured = self.change(self.measure, "test", chosen.settings)
        saved = problem.price(problem.dense) - chosen.price
        return Plan(
            grids=tuple((self.grids[i].height, self.grids[i].width) for i in range(depth)),
            batch_size=len(batch),
            dtype=str(batch.dtype).removeprefix("torch."),
            device=str(batch.device),
            measure=self.measure.name,
            tolerance=self.tolerance,
            candidates=tuple(candidates),
            measured_change=measured,
            checks=tuple(replace(check, chosen=check is chosen) for check in search.checks),
            dense_milliseconds=dense_ms,
            # A sum of layers that exceeds the model can only come from the noise of short times.
            predicted_milliseconds=max(dense_ms - saved, 0.01 * dense_ms),
            milliseconds=planned_ms,
            **self.common_fields(seed),
        )

    def change(self, measure: Measure, images: str, chosen: Combination) -> float:
        return round_digits(super().change(measure, images, chosen), 6)

    def check_deterministic(self, measure: Measure) -> None:
        """Raise unless the unchanged model is within the tolerance of itself."""
        change = self.change(measure, "calibration", ())
        if change > self.tolerance:
            raise ValueError(
                f"the measure {measure.name!r} returned {change:g} for two runs of the unchanged model, "
                f"above the tolerance of {self.tolerance:g}; it must be 0 for equal outputs "
                "(return 1 - IoU rather than IoU), and the model must be deterministic"
            )

    def install(self, chosen: Combination) -> None:
        errors = {layer: error for layer, error in enumerate(chosen) if error is not None}
        if errors:
            grids = [self.grids[layer] for layer in range(len(chosen))]
            install_layers(self.model, self.vit, planned_options(errors), grids)

    def time_layers(self, batch: Tensor) -> None:
        """Run the model once with exact attention, and time the attention of every layer on the way.

        Dense attention is what a patched model runs where it is exact: on a CPU the native kernel, where
        it is faster than that of torch.
        """

        def note(inputs: LayerInputs, _: object) -> None:
            runs.add((inputs.layer, inputs.grid))
            if inputs.layer not in self.times:
                found = time_attention(inputs, self.errors, self.repeats)
                self.times[inputs.layer] = {key: round_digits(ms, 5) for key, ms in found.items()}

        runs: set[tuple[int, Grid]] = set()
        patch(self.model, error=0.0)
        try:
            with observe(self.model, note):
                self.measure.outputs(self.model, batch, self.options)
        finally:
            unpatch(self.model)
        self.grids = dict(runs)
        if sorted(layer for layer, _ in runs) != list(range(len(self.vit.attentions))):
            raise ValueError(
                f"the layers of the model attend on {sorted(runs, key=str)}, and a plan is for one grid "
                "in each layer, all of which run in each pass; pass error= to bmfa.patch"
            )


def time_model(tuner: _AttentionTuner, batch: Tensor, chosen: Combination) -> tuple[float, float]:
    """Return the milliseconds of the unpatched and of the patched model, timed in turns."""
    samples: dict[Combination, list[float]] = {(): [], chosen: []}
    for _ in range(tuner.repeats + 1):  # the first one warms up
        for combination, found in samples.items():
            tuner.install(combination)
            synchronize(batch.device)
            start = time.perf_counter()
            tuner.model(batch, **tuner.options)
            synchronize(batch.device)
            found.append(1e3 * (time.perf_counter() - start))
            unpatch(tuner.model)
    dense, planned = (round_digits(statistics.median(found[1:]), 5) for found in samples.values())
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


def prepare(
    model: nn.Module | LoadedModel,
    images: Any,
    options: Mapping[str, Any] | None,
    usual: Mapping[str, int],
    batch_size: int,
    limit: int | None,
    seed: int,
) -> tuple[nn.Module, VisionTransformer, dict[str, Any], dict[str, Tensor], int]:
    """Return the first arguments of a `Tuner`; raise if the model is patched.

    Args:
        model: As in `tune`, like the others.
        images: The images.
        options: Keyword arguments of every call.
        usual: The number of images by device, where `limit` is None: at least two batches.
        batch_size: The number of images in a call.
        limit: The number of images to use.
        seed: Seed of their order.

    Returns:
        The module, its parts, the keyword arguments of its calls, the images, their number in a call.
    """
    module, own = (model.model, model.options) if isinstance(model, LoadedModel) else (model, {})
    vit = find_vision_transformer(module)
    if is_patched(module):
        raise ValueError("the model is patched or reduced; call bmfa.unpatch(model) first")
    device = next((p.device.type for p in module.parameters()), "cpu")
    least = 2 * check_integer("batch_size", batch_size, low=1)
    limit = max(usual.get(device, usual["cpu"]), least) if limit is None else limit
    options = dict(own if options is None else options)
    return module, vit, options, sample_images(images, model, limit, seed), batch_size


def check_tolerance(tolerance: object, measure: str = "features") -> float:
    """Return a tolerance above 0, and at most 1 for features."""
    high = 1.0 if measure == "features" else math.inf
    try:
        return check_number("tolerance", tolerance, low=0.0, high=high, open_low=True)
    except ValueError as error:
        raise ValueError(f"{error}; it is a fraction of the output: 0.05 is 5 %") from None


def _check_errors(errors: Any) -> tuple[float, ...]:
    if isinstance(errors, str) or not isinstance(errors, Iterable) or not list(errors):
        raise TypeError(f"errors is {errors!r}; pass a list of error targets, such as [0.03, 0.1]")
    return tuple(sorted({check_number("errors", x, low=0.0, open_low=True) for x in errors}))


@contextmanager
def running(
    model: nn.Module, progress: bool, total: int, unit: str
) -> Iterator[Callable[[], object]]:
    """Evaluate a model without gradients, and restore it however the block ends.

    Args:
        model: The model.
        progress: Whether to show a bar on a terminal.
        total: About how many steps there are.
        unit: Their name.

    Yields:
        A function that counts a step.
    """
    from tqdm import tqdm

    training = [module for module in model.modules() if module.training]
    model.eval()
    bar = {"leave": False, "dynamic_ncols": True, "disable": None if progress else True}
    try:
        with torch.no_grad(), tqdm(total=total, unit=unit, **bar) as steps:
            yield steps.update
    finally:
        unpatch(model)
        for module in training:
            module.training = True
