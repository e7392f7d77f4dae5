"""Choose a setting for each layer of a model on a person's images, within a tolerance."""

import math
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bmfa.attention.api import screened_attention
from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid
from bmfa.models.families import find_vision_transformer
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
from bmfa.models.search import Combination, LayerSetting, Search, SettingProblem, with_setting
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
    tuner = AttentionTuner(model, images, options, batch_size, limit, seed)
    if tuner.vit.not_tunable:
        raise TypeError(
            f"{type(tuner.model).__name__} is not supported by tune: {tuner.vit.not_tunable}; pass "
            "error= to bmfa.patch"
        )
    if batch_size > (calibrating := len(tuner.images["calibration"])):
        raise ValueError(
            f"batch_size is {batch_size} and {calibrating} images calibrate; pass at least "
            f"{2 * batch_size} images (and limit), or a smaller batch_size"
        )
    indices = layer_indices(layers, len(tuner.vit.attentions))
    steps = len(indices) * len(errors) + 4  # measurements of layers, and of the model
    with tuner.running(progress, steps), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # settings that miss their target are measured, not used
        plan = tuner.make_plan(found, tolerance, errors, indices, repeats)
    if not plan.holds:
        warnings.warn(
            f"the plan changes {plan.measure} by {plan.measured_change:.3g} on {plan.test_images} "
            f"images that took no part in the choice, above the tolerance of {plan.tolerance:g}; "
            "pass more images (and limit), or a smaller tolerance",
            stacklevel=2,
        )
    return plan


class Tuner:
    """Runs a model with settings of its layers on images.

    Args:
        model: The model, or what `load_model` returns.
        images: As in `tune`, or (n, 3, height, width) "calibration", "validation" and "test" images.
        options: As in `tune`, like the others.
        batch_size: The number of images in a call.
        limit: The number of images; None is `usual`, and at least two batches.
        seed: Seed of their order.
    """

    usual: ClassVar[Mapping[str, int]] = IMAGES  # by device

    def __init__(
        self,
        model: nn.Module | LoadedModel,
        images: Any,
        options: Mapping[str, Any] | None = None,
        batch_size: int = 1,
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model.model if isinstance(model, LoadedModel) else model
        self.vit = find_vision_transformer(self.model)
        if is_patched(self.model):
            raise ValueError("the model is patched or reduced; call bmfa.unpatch(model) first")
        if options is None and isinstance(model, LoadedModel):
            options = model.options
        self.options = dict(options or {})
        self.batch_size, self.seed = check_integer("batch_size", batch_size, low=1), seed
        floating = (p for p in self.model.parameters() if p.is_floating_point())
        self.parameter = next(floating, torch.empty(0))
        if limit is None:
            usual = self.usual.get(self.parameter.device.type, self.usual["cpu"])
            limit = max(usual, 2 * batch_size)
        given = isinstance(images, dict)
        self.images = images if given else sample_images(images, model, limit, seed)
        self.measured: dict[Any, float] = {}  # changes
        self.references: dict[Any, list[Any]] = {}  # what the unchanged model returns
        self.steps: Any = None

    @cached_property
    def batches(self) -> dict[str, Sequence[Tensor]]:
        """Batches of the images, where there are any."""
        parts = self.images.items()
        return {name: torch.split(part, self.batch_size) for name, part in parts if len(part)}

    @cached_property
    def batch(self) -> Tensor:
        """The first calibration images, in the dtype and on the device of the model."""
        return self.place(self.batches["calibration"][0])

    @property
    def tested(self) -> str:
        """The images that took no part in the choice; those of validation if there are none."""
        return "test" if "test" in self.batches else "validation"

    def place(self, batch: Tensor) -> Tensor:
        """Return a batch in the dtype and on the device of the model."""
        return batch.to(self.parameter.device, self.parameter.dtype)

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
        """Return the change of the output on images; it is measured once, which is one step."""
        key = measure, images, chosen
        if key not in self.measured:
            self.measured[key] = round_digits(self._change(measure, images, chosen), 6)
            self.steps.update()
        return self.measured[key]

    def _change(self, measure: Measure, images: str, chosen: Combination) -> float:
        reference = measure.outputs, images
        if reference not in self.references:
            self.references[reference] = list(self.outputs(measure, images))
        pairs = zip(self.references[reference], self.outputs(measure, images, chosen), strict=True)
        changes = [measure.compare(expected, output) for expected, output in pairs]
        mean = statistics.fmean(changes, weights=map(len, self.batches[images]))
        if not math.isfinite(mean) or mean < -ROUNDING:
            raise ValueError(
                f"the measure {measure.name!r} returned {mean:g} with the settings {chosen}; it must be "
                "finite and grow with the change from 0, its value for equal outputs (return 1 - IoU "
                "rather than IoU - 1), and the outputs of the model must be finite"
            )
        return measure.change(max(mean, 0.0))

    def common_fields(self) -> dict[str, Any]:
        """Return the fields that plans of attention and of merging share."""
        return {f"{name}_images": len(part) for name, part in self.images.items()} | {
            "model": ModelFingerprint.from_model(self.model),
            "img_size": tuple(self.batch.shape[-2:]),
            "seed": self.seed,
            "environment": environment(str(self.batch.device)),
        }

    @contextmanager
    def running(self, progress: bool, total: int) -> Iterator[None]:
        """Evaluate the model without gradients, and restore it however the block ends.

        Args:
            progress: Whether to show a bar on a terminal.
            total: About how many steps there are.
        """
        from tqdm import tqdm

        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        bar = {"leave": False, "dynamic_ncols": True, "disable": None if progress else True}
        try:
            with torch.no_grad(), tqdm(total=total, unit=" steps", **bar) as self.steps:
                yield
        finally:
            unpatch(self.model)
            for module in training:
                module.training = True


class AttentionTuner(Tuner):
    """One run of `tune` on a model."""

    def make_plan(
        self,
        measure: Measure,
        tolerance: float,
        errors: Sequence[float],
        layers: Sequence[int],
        repeats: int,
    ) -> Plan:
        """Calibrate, choose, validate and test; the arguments are those of `tune`, checked."""
        # What is not additive is ranked by features, and only checked by itself.
        additive = MEASURES["features"] if measure.power is None else measure
        for one in dict.fromkeys((additive, measure)):
            self.check_deterministic(one, tolerance)
        times = self.time_layers(measure, errors, repeats)
        dense: Combination = (None,) * len(times)
        candidates = []
        for layer, milliseconds in times.items():
            candidates.append(LayerSetting(layer, None, milliseconds[None], 0.0))
            for error in errors if layer in layers else ():
                change = None
                if milliseconds[error] < (1.0 - LEAST_GAIN) * milliseconds[None]:
                    alone = with_setting(dense, layer, error)
                    change = self.change(additive, "calibration", alone)
                candidates.append(LayerSetting(layer, error, milliseconds[error], change))
        problem = SettingProblem(candidates, additive.power or 1, partial(self.change, measure))
        everything = sum(problem.costs.values())
        budget = tolerance**measure.power if measure.power else everything
        search = Search(problem, tolerance, measure.power, budget)
        chosen = search.run()
        dense_ms, planned_ms = time_model(self, self.batch, chosen.settings, repeats)
        if planned_ms >= dense_ms and any(chosen.settings):
            # The layers gain less than patching a model costs.
            chosen, planned_ms = search.check(dense), dense_ms
        measured = chosen.validation_change
        if self.tested == "test":
            measured = self.change(measure, "test", chosen.settings)
        saved = problem.price(dense) - chosen.price
        return Plan(
            grids=tuple((grid.height, grid.width) for grid in self.grids),
            batch_size=len(self.batch),
            dtype=str(self.batch.dtype).removeprefix("torch."),
            device=str(self.batch.device),
            measure=measure.name,
            tolerance=tolerance,
            candidates=tuple(candidates),
            measured_change=measured,
            checks=search.checks(chosen),
            dense_milliseconds=dense_ms,
            # A sum of layers that exceeds the model can only come from the noise of short times.
            predicted_milliseconds=max(dense_ms - saved, 0.01 * dense_ms),
            milliseconds=planned_ms,
            **self.common_fields(),
        )

    def check_deterministic(self, measure: Measure, tolerance: float) -> None:
        """Raise unless the unchanged model is within the tolerance of itself."""
        change = self.change(measure, "calibration", ())
        if change > tolerance:
            raise ValueError(
                f"the measure {measure.name!r} returned {change:g} for two runs of the unchanged model, "
                f"above the tolerance of {tolerance:g}; it must be 0 for equal outputs "
                "(return 1 - IoU rather than IoU), and the model must be deterministic"
            )

    def install(self, chosen: Combination) -> None:
        errors = {layer: error for layer, error in enumerate(chosen) if error is not None}
        if errors:
            install_layers(self.model, self.vit, planned_options(errors), self.grids)

    def time_layers(
        self, measure: Measure, errors: Sequence[float], repeats: int
    ) -> dict[int, dict[float | None, float]]:
        """Run the model once with exact attention, and time the attention of every layer on the way.

        Dense attention is what a patched model runs where it is exact: on a CPU the native kernel, where
        it is faster than that of torch.
        """

        def note(inputs: LayerInputs, _: object) -> None:
            runs.add((inputs.layer, inputs.grid))
            if inputs.layer not in times:
                found = time_attention(inputs, errors, repeats)
                times[inputs.layer] = {key: round_digits(ms, 5) for key, ms in found.items()}

        runs: set[tuple[int, Grid]] = set()
        times: dict[int, dict[float | None, float]] = {}
        patch(self.model, error=0.0)
        try:
            with observe(self.model, note):
                measure.outputs(self.model, self.batch, self.options)
        finally:
            unpatch(self.model)
        if sorted(layer for layer, _ in runs) != list(range(len(self.vit.attentions))):
            raise ValueError(
                f"the layers of the model attend on {sorted(runs, key=str)}, and a plan is for one grid "
                "in each layer, all of which run in each pass; pass error= to bmfa.patch"
            )
        self.grids = [grid for _, grid in sorted(runs, key=lambda run: run[0])]
        return dict(sorted(times.items()))


def time_model(
    tuner: Tuner, batch: Tensor, chosen: Combination, repeats: int
) -> tuple[float, float]:
    """Return the milliseconds of the unpatched and of the patched model, timed in turns."""
    samples: dict[Combination, list[float]] = {(): [], chosen: []}
    for _ in range(repeats + 1):  # the first one warms up
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
