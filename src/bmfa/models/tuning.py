"""Choose a setting for each layer of a model on a person's images, within a tolerance."""

import hashlib
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bmfa.attention.api import screened_attention
from bmfa.checks import check_error, check_integer, check_number
from bmfa.grid import Grid
from bmfa.models.families import find_vision_transformer
from bmfa.models.image_sample import LEAST_TESTED, divide, part_sizes, sample_images
from bmfa.models.loading import LoadedModel
from bmfa.models.measures import MEASURES, Function, Measure, find_measure
from bmfa.models.patching import (
    copy_sharing_weights,
    evaluating,
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
from bmfa.models.tuning_run import Run
from bmfa.records import environment, round_digits
from bmfa.timing import median_milliseconds, time_alternating

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
# Combinations that are expected to be validated; three to six usually are.
EXPECTED_CHECKS = 6
# With a budget of time, up to so many times the usual number of images are used.
MORE_IMAGES = 4
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
    minutes: float | None = None,
    seed: int = 0,
    repeats: int = 5,
    resume: str | os.PathLike[str] | None = None,
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
            are more; four times as many with `minutes`.
        minutes: About how long to tune. The time of a forward pass tells how many error targets, and
            then how many images, this is enough for, and `plan.effort` what more would bring. None takes
            as long as all targets take.
        seed: Seed of which images are used, and which of them calibrate, validate and test.
        repeats: The number of times each call is timed; the median counts.
        resume: A file of measurements to continue from, created if it does not exist. It is written
            now and then, and when the call ends, also by an error or Ctrl-C. With another tolerance,
            only the validation runs again.
        progress: True shows a progress bar on a terminal or in a notebook.

    Returns:
        The plan.

    Raises:
        TypeError: If the model is not supported, or an argument has a wrong type.
        ValueError: If an argument is out of range, there are fewer than two images, they cannot be
            read or differ in size, the model is patched, or the measure returns NaN or falls below
            0. The model is unchanged. Also if the file to resume from belongs to another run.

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
    tolerance, errors = check_tolerance(tolerance, found.name), check_errors(errors)
    repeats = check_integer("repeats", repeats, low=1)
    if minutes is not None:
        minutes = check_number("minutes", minutes, low=0.0, open_low=True)
    more = 1 if minutes is None else MORE_IMAGES
    tuner = AttentionTuner(model, images, options, batch_size, limit, seed, more)
    tuner.check_tunable()
    if batch_size > (calibrating := len(tuner.images["calibration"])):
        raise ValueError(
            f"batch_size is {batch_size} and {calibrating} images calibrate; pass at least "
            f"{2 * batch_size} images (and limit), or a smaller batch_size"
        )
    indices = layer_indices(layers, len(tuner.vit.attentions))
    with tuner.running(progress, resume, "attention"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # settings that miss their target are measured, not used
        plan = tuner.make_plan(found, tolerance, errors, indices, repeats, minutes)
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
        more: A factor of `usual`.
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
        more: int = 1,
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
            limit = max(more * usual, 2 * batch_size)
        given = isinstance(images, dict)
        self.images = images if given else divide(sample_images(images, model, limit, seed))
        self.references: dict[Any, list[Any]] = {}  # what the unchanged model returns

    def check_tunable(self) -> None:
        """Raise unless the model takes images."""
        if self.vit.not_tunable:
            raise TypeError(
                f"{type(self.model).__name__} is not supported by tune and estimate: "
                f"{self.vit.not_tunable}; pass error= to bmfa.patch"
            )

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
            for done, batch in enumerate(self.batches[images], start=1):
                yield measure.outputs(self.model, self.place(batch), self.options)
                self.run.advance(ahead=len(self.batches[images]) - done)
        finally:
            unpatch(self.model)

    def change(self, measure: Measure, images: str, chosen: Combination) -> float:
        """Return the change of the output on images, which is measured once."""
        total = sum(map(len, self.images.values()))
        key = f"{measure.name} of {images} of {total} images: {list(chosen)}"
        found = partial(self._change, measure, images, chosen)
        return float(self.run.once(key, found, len(self.batches[images])))

    def _change(self, measure: Measure, images: str, chosen: Combination) -> float:
        key = measure, images
        if key not in self.references:
            self.references[key] = list(self.outputs(measure, images))
        pairs = zip(self.references[key], self.outputs(measure, images, chosen), strict=True)
        changes = [measure.compare(expected, output) for expected, output in pairs]
        mean = statistics.fmean(changes, weights=map(len, self.batches[images]))
        if not math.isfinite(mean) or mean < -ROUNDING:
            raise ValueError(
                f"the measure {measure.name!r} returned {mean:g} with the settings {chosen}; it must be "
                "finite and grow with the change from 0, its value for equal outputs (return 1 - IoU "
                "rather than IoU - 1), and the outputs of the model must be finite"
            )
        return round_digits(measure.change(max(mean, 0.0)), 6)

    def common_fields(self) -> dict[str, Any]:
        """Return the fields that plans of attention and of merging share."""
        return {f"{name}_images": len(part) for name, part in self.images.items()} | {
            "model": ModelFingerprint.from_model(self.model),
            "img_size": tuple(self.batch.shape[-2:]),
            "seed": self.seed,
            "environment": environment(str(self.batch.device)),
        }

    @contextmanager
    def running(
        self, progress: bool, resume: str | os.PathLike[str] | None = None, kind: str = ""
    ) -> Iterator[None]:
        """Evaluate the model without gradients, and restore it however the block ends.

        Args:
            progress: Whether to show a bar on a terminal or in a notebook.
            resume: As in `tune`.
            kind: What the plan is of, for the file.
        """
        from tqdm.auto import tqdm

        identity = {} if resume is None else self.identity(kind)
        # The mean rate: passes take about equally long, and an estimate from the last ones jumps.
        bar = tqdm(unit=" passes", leave=False, smoothing=0, disable=None if progress else True)
        with evaluating(self.model), bar:
            self.run = Run(bar, resume, identity)
            try:
                yield
            finally:
                self.run.save()

    def identity(self, kind: str) -> dict[str, Any]:
        """Return what the measurements depend on, apart from their settings."""
        from bmfa import __version__  # the package imports this module

        pixels = torch.cat(list(self.images.values())).cpu().contiguous()
        return {
            "bmfa": __version__,
            "plan": kind,
            "options": sorted(self.options),
            "model": asdict(ModelFingerprint.from_model(self.model)),
            "device": str(self.parameter.device),
            "threads": torch.get_num_threads(),
            "batch_size": self.batch_size,
            "images": hashlib.sha256(pixels.view(torch.uint8).numpy().tobytes()).hexdigest(),
        }


class AttentionTuner(Tuner):
    """One run of `tune` on a model."""

    grids: list[Grid] | None = None  # of the layers, once they were timed

    def make_plan(
        self,
        measure: Measure,
        tolerance: float,
        errors: Sequence[float],
        layers: Sequence[int],
        repeats: int,
        minutes: float | None = None,
    ) -> Plan:
        """Calibrate, choose, validate and test; the arguments are those of `tune`, checked."""
        # What is not additive is ranked by features, and only checked by itself.
        additive = MEASURES["features"] if measure.power is None else measure
        measures = list(dict.fromkeys((additive, measure)))
        expected, effort = partial(self.expected, len(layers), len(measures), repeats), ""
        seconds = 0.0
        if minutes is not None:
            seconds = self.run.once("seconds of a forward pass", self.time_pass)
            errors, effort = self.afford(errors, expected, seconds, minutes)
        phases = expected(len(errors), sum(map(len, self.images.values())))
        self.run.begin("check of the measure", phases)
        for one in measures:
            self.check_deterministic(one, tolerance)
        self.run.begin("times of layers", phases)
        key = f"times of layers: {repeats} repeats, errors {list(errors)}"
        timed = self.run.once(key, partial(self.time_layers, measure, errors, repeats))
        times = {layer: dict(zip((None, *errors), found, strict=True)) for layer, _, found in timed}
        self.grids = [Grid(*grid) for _, grid, _ in timed]
        dense: Combination = (None,) * len(times)
        gaining = [
            (layer, error)
            for layer, error in product(layers, errors)
            if times[layer][error] < (1.0 - LEAST_GAIN) * times[layer][None]
        ]
        phases["calibration"] = len(gaining) * len(self.batches["calibration"])
        self.run.begin("calibration", phases)
        changes: dict[Any, float] = {(layer, None): 0.0 for layer in times}
        for layer, error in gaining:
            alone = with_setting(dense, layer, error)
            changes[layer, error] = self.change(additive, "calibration", alone)
        candidates = [
            LayerSetting(layer, error, milliseconds, changes.get((layer, error)))
            for layer, found in times.items()
            for error, milliseconds in found.items()
            if error is None or layer in layers
        ]
        self.run.begin("validation", phases)
        problem = SettingProblem(candidates, additive.power or 1, partial(self.change, measure))
        everything = sum(problem.costs.values())
        budget = tolerance**measure.power if measure.power else everything
        search = Search(problem, tolerance, measure.power, budget)
        if minutes is not None:
            needed = seconds * (phases["times of the model"] + phases["test"])
            search.is_late = lambda: self.run.seconds + needed > 60 * minutes
        chosen = search.run()
        self.run.begin("times of the model", phases)
        dense_ms, exact_ms, planned_ms = time_model(self, self.batch, chosen.settings, repeats)
        if planned_ms >= min(dense_ms, exact_ms) and any(chosen.settings):
            # The layers gain less than patching a model costs.
            chosen, planned_ms = search.check(dense), exact_ms
        self.run.begin("test", phases)
        saved = problem.price(dense) - chosen.price
        return Plan(
            grids=tuple((height, width) for _, (height, width), _ in timed),
            batch_size=len(self.batch),
            dtype=str(self.batch.dtype).removeprefix("torch."),
            device=str(self.batch.device),
            measure=measure.name,
            tolerance=tolerance,
            candidates=tuple(candidates),
            measured_change=self.change(measure, self.tested, chosen.settings),
            checks=search.checks(chosen),
            dense_milliseconds=dense_ms,
            exact_milliseconds=exact_ms,
            # A sum of layers that exceeds the model can only come from the noise of short times.
            predicted_milliseconds=max(exact_ms - saved, 0.01 * exact_ms),
            milliseconds=planned_ms,
            effort=effort,
            **self.common_fields(),
        )

    def expected(
        self, layers: int, measures: int, repeats: int, targets: int, images: int
    ) -> dict[str, int]:
        """Return about how many forward passes each phase takes, at most."""
        calls = [math.ceil(size / self.batch_size) for size in part_sizes(images)]
        calibration, validation, test = calls
        return {
            "check of the measure": 2 * measures * calibration,
            # Attention is at most about half of a pass, and the tiles take less than dense attention.
            "times of layers": 1 + (targets + 1) * (repeats + 1) // 2,
            "calibration": layers * targets * calibration,
            "validation": validation + EXPECTED_CHECKS * (calibration + validation),
            "times of the model": 3 * (repeats + 1),
            "test": 2 * test,
        }

    def time_pass(self) -> float:
        """Return the seconds of a forward pass with dense attention."""
        model = copy_sharing_weights(self.model)
        self.install((), model)
        work = partial(model, self.batch, **self.options)
        return median_milliseconds(work, 1, self.batch.device) / 1e3

    def afford(
        self,
        errors: Sequence[float],
        expected: Callable[[int, int], Mapping[str, int]],
        seconds: float,
        minutes: float,
    ) -> tuple[list[float], str]:
        """Take as many error targets, and then images, as there is time for.

        Args:
            errors: All error targets.
            expected: Returns the forward passes for a number of targets and of images.
            seconds: The time of a pass.
            minutes: The time from the start of the run on.

        Returns:
            The targets, and a sentence that says what was taken and what more would bring.
        """
        images = torch.cat(list(self.images.values()))
        least = min(len(images), max(LEAST_TESTED, 2 * self.batch_size))
        levels = [(targets, least) for targets in range(1, len(errors) + 1)]
        levels += [(len(errors), number) for number in range(least + 1, len(images) + 1)]
        needed = [seconds / 60 * sum(expected(*level).values()) for level in levels]
        last = max((i for i, time in enumerate(needed) if time <= minutes), default=0)
        targets, number = levels[last]
        self.images = divide(images[:number])
        more = ", which is all there is"
        if targets < len(errors):
            time = f"about {needed[len(errors) - 1]:.2g} minutes"
            more = f"; all targets, and a plan that may be faster, take {time}"
        elif number < len(images):
            time = f"about {needed[-1]:.2g} minutes"
            more = f"; all {len(images)} images, which predict others better, take {time}"
        if needed[last] > minutes:
            more = f", the least, which takes longer{more}"
        # Spread evenly over the list, the middle one first.
        spread = (round((i + 0.5) * len(errors) / targets - 0.5) for i in range(targets))
        taken = f"{targets} of {len(errors)} error targets on {number} images"
        return [errors[index] for index in spread], f"{minutes:g} minutes: {taken}{more}"

    def check_deterministic(self, measure: Measure, tolerance: float) -> None:
        """Raise unless the unchanged model is within the tolerance of itself."""
        change = self.change(measure, "calibration", ())
        if change > tolerance:
            raise ValueError(
                f"the measure {measure.name!r} returned {change:g} for two runs of the unchanged model, "
                f"above the tolerance of {tolerance:g}; it must be 0 for equal outputs "
                "(return 1 - IoU rather than IoU), and the model must be deterministic"
            )

    def install(
        self, chosen: Combination, model: nn.Module | None = None, *, exact: bool | None = None
    ) -> None:
        """Change the model, or a copy.

        With `exact`, dense layers are those of a patched model, which on a CPU take about half as long.
        None chooses this in float32, where their outputs differ by rounding alone.
        """
        model = self.model if model is None else model
        exact = self.parameter.dtype == torch.float32 if exact is None else exact
        errors = {layer: error for layer, error in enumerate(chosen) if error is not None}
        options = {layer: {"error": 0.0} for layer in range(len(self.vit.attentions)) if exact}
        if options := options | planned_options(errors):
            install_layers(model, find_vision_transformer(model), options, self.grids)

    def time_layers(self, measure: Measure, errors: Sequence[float], repeats: int) -> list[Any]:
        """Run the model once with exact attention, and time the attention of every layer on the way.

        Dense attention is what a patched model runs where it is exact: on a CPU the native kernel, where
        it is faster than that of torch.

        Returns:
            For each layer its index, the height and width of its grid, and the milliseconds of dense
            attention and of each error target.
        """

        def note(inputs: LayerInputs, _: object) -> None:
            grid, known = (inputs.grid.height, inputs.grid.width), rows.get(inputs.layer)
            if known is None:
                found = time_attention(inputs, errors, repeats)
                milliseconds = [round_digits(found[error], 5) for error in (None, *errors)]
                rows[inputs.layer] = [inputs.layer, grid, milliseconds]
                self.run.advance((1 + len(errors)) * (1 + repeats) // (2 * depth))
            elif known[1] != grid:
                raise refused

        rows: dict[int, list[Any]] = {}
        depth = len(self.vit.attentions)
        refused = ValueError(
            "the layers of the model attend on several grids or not in each pass, and a plan is for one "
            "grid in each layer, all of which run; pass error= to bmfa.patch"
        )
        model = patch(copy_sharing_weights(self.model), error=0.0)
        with observe(model, note):
            measure.outputs(model, self.batch, self.options)
        if len(rows) < depth:
            raise refused
        return [rows[layer] for layer in range(depth)]


def time_model(
    tuner: AttentionTuner, batch: Tensor, chosen: Combination, repeats: int
) -> tuple[float, float, float]:
    """Return milliseconds of the model, timed in turns.

    Args:
        tuner: The model, and how it is patched.
        batch: Images.
        chosen: The settings of the layers.
        repeats: The number of times of which the median counts.

    Returns:
        The time of the unpatched model, of the patched one with dense attention in every layer, and of
        the patched one with these settings.
    """

    def measure() -> list[float]:
        works = {}
        dense: Combination = (None,) * len(chosen)
        for name, combination in (("dense", ()), ("exact", dense), ("planned", chosen)):
            model = copy_sharing_weights(tuner.model)
            if combination:
                tuner.install(combination, model, exact=True)
            works[name] = partial(call, model)
        times = time_alternating(works, repeats, batch.device)
        return [round_digits(milliseconds, 5) for milliseconds in times.values()]

    def call(model: nn.Module) -> None:
        model(batch, **tuner.options)
        tuner.run.advance()

    key = f"times of the model: {repeats} repeats, settings {list(chosen)}"
    dense_ms, exact_ms, planned_ms = tuner.run.once(key, measure, 3 * (repeats + 1))
    return dense_ms, exact_ms, planned_ms


def time_attention(
    inputs: LayerInputs, errors: Sequence[float], repeats: int
) -> dict[float | None, float]:
    """Return the milliseconds of exact attention (None) and of attention over tiles by error target."""
    calls = CUDA_CALLS if inputs.q.is_cuda else 1

    def attend(error: float | None) -> None:
        for _ in range(calls):
            screened_attention(**inputs.arguments, error=error or 0.0, allow_dense=error is None)

    works = {str(error): partial(attend, error) for error in (None, *errors)}
    medians = time_alternating(works, repeats, inputs.q.device)
    return {error: medians[str(error)] / calls for error in (None, *errors)}


def check_tolerance(tolerance: object, measure: str = "features") -> float:
    """Return a tolerance above 0; for features it is a fraction."""
    if measure == "features":
        return check_error(tolerance, "tolerance", open_low=True)
    return check_number("tolerance", tolerance, low=0.0, open_low=True)


def check_errors(errors: Any) -> tuple[float, ...]:
    if isinstance(errors, str) or not isinstance(errors, Iterable) or not list(errors):
        raise TypeError(f"errors is {errors!r}; pass a list of error targets, such as [0.03, 0.1]")
    return tuple(sorted({check_error(x, "errors", open_low=True) for x in errors}))
