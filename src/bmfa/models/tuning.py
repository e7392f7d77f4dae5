"""Choose a setting for each layer of a model on a person's images, within a tolerance."""

import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.checks import check_integer, check_number, python_number
from bmfa.grid import Grid
from bmfa.models.checked_search import COARSE_STEP, CheckedSearch
from bmfa.models.families import VisionTransformer, find_vision_transformer
from bmfa.models.image_sample import find_preprocessing, sample_images, split_counts
from bmfa.models.layer_timing import TimedLayer
from bmfa.models.loading import LoadedModel
from bmfa.models.measures import MEASURES, Function, Measure, find_measure
from bmfa.models.patching import (
    install_functions,
    install_layers,
    is_patched,
    layer_indices,
    planned_options,
    unpatch,
)
from bmfa.models.plan import ModelFingerprint, Plan
from bmfa.models.preprocessing import Preprocessing
from bmfa.models.setting_search import LayerSetting, SettingSearch, add_between
from bmfa.records import environment, round_digits
from bmfa.timing import synchronize

Progress = Callable[[int, int], None]  # steps done, of how many
Times = Mapping[int, Mapping[float | None, float]]

# Error targets that are tried in each layer: the change of a layer grows about in proportion to its
# target, so steps of a factor of 1.5 to 2 leave the optimum at most that far from a setting.
ERRORS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
# Images that are used: half of them choose, the others check and confirm. The change differs by a
# factor of up to 3 between photographs (0.014 to 0.040 with one plan of DeiT-Tiny at 768 px), so more
# images predict better; on a CPU a forward pass at high resolution takes seconds.
IMAGES = {"cuda": 32, "cpu": 8}
# Share of the time of dense attention that a setting must save; medians of five repeat to about 1 %.
LEAST_GAIN = 0.02


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

    Half of the images choose. For each layer alone and each error target, they measure the time of
    its attention on this device and the change of the output of the model. Targets between two of
    `errors` are interpolated. The fastest combination that is predicted to stay within the tolerance
    is then checked end to end on a quarter of the images. If it fails there, its layers are measured
    alone on these, too, and the next combination is chosen by the larger one of both changes of each
    layer. Then layers get faster settings while the check holds. A single error target for all layers
    that holds is never predicted to be faster than the plan. A layer in which nothing is gained stays
    dense.

    The last quarter takes no part in the choice: `plan.measured_change` is of these images. With
    fewer than six images there is no such quarter, and it is of the checking ones. If it exceeds the
    tolerance, `tune` warns.

    The model is the same afterwards, also if an error or Ctrl-C ends the call. Apply the plan with
    `bmfa.patch(model, plan=plan)`. Tune in the dtype, on the device and at the size of the later use.

    Args:
        model: A model that `patch` supports, or what `load_model` returns.
        images: A (N, 3, height, width) tensor or a list of (3, height, width) tensors, preprocessed;
            a DataLoader of such tensors, of tuples that begin with one or of dictionaries with
            `pixel_values`; or the path of a folder or zip of images. At least two images, all of
            one size; six or more are better.
        tolerance: The largest change of the output that is accepted, above 0, in units of the measure.
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
        seed: Seed of which images are used, and which of them choose, check and confirm.
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
    settings = _Settings(
        check_tolerance(tolerance),
        find_measure(measure),
        _check_errors(errors),
        check_integer("batch_size", batch_size, low=1),
        check_integer("seed", seed, low=0),
        check_integer("repeats", repeats, low=1),
    )
    module = model.model if isinstance(model, LoadedModel) else model
    host = find_vision_transformer(module)
    if is_patched(module):
        raise ValueError("the model is patched or reduced; call bmfa.unpatch(model) first")
    if host.not_tunable:
        raise TypeError(
            f"{type(module).__name__} is not supported by tune: {host.not_tunable}; pass error= to "
            "bmfa.patch"
        )
    indices = layer_indices(layers, len(host.attentions))
    if times is not None:
        _check_times(times, indices, settings.errors)
    if options is None:
        options = model.options if isinstance(model, LoadedModel) else {}
    limit = _default_limit(module, batch_size) if limit is None else limit
    limit = check_integer("limit", limit, low=2)
    if isinstance(images, (str, os.PathLike)):
        preprocess = find_preprocessing(model, preprocess, img_size)
    elif img_size is not None or preprocess is not None:
        raise ValueError(
            "img_size and preprocess are for images of a folder; leave them out, and pass tensors of "
            "the size of the model"
        )
    generator = torch.Generator().manual_seed(seed)
    images = sample_images(images, preprocess, limit, generator)
    parts = _split(images, batch_size)
    steps = _Steps(progress, len(host.attentions), len(indices) * len(settings.errors))
    run = _Tuner(module, host, settings, dict(options), steps)
    with closing(steps), _unchanged(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # settings that miss their target are measured, not used
        plan = run.make_plan(parts, indices, times)
    if not plan.holds:
        warnings.warn(
            f"the plan changes {plan.measure} by {plan.measured_change:.3g} on {plan.confirming} "
            "images that took no part in the choice, above the tolerance of "
            f"{plan.tolerance:g}; pass more images (and limit), or a smaller tolerance",
            stacklevel=2,
        )
    return plan


@dataclass(frozen=True)
class _Settings:
    tolerance: float
    measure: Measure
    errors: tuple[float, ...]
    batch_size: int
    seed: int
    repeats: int


@dataclass
class _Steps:
    """Counts steps: settings whose change is measured, layers that are timed, and three more.

    The three are the references, the check and the time of the whole model.
    """

    progress: Progress | bool
    timed: int
    candidates: int
    done: int = 0
    bar: Any = None

    def __post_init__(self) -> None:
        self.total = 3 + self.timed + self.candidates
        if self.progress is True and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=self.total, unit=" steps", leave=False, dynamic_ncols=True)

    def advance(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update()
        elif callable(self.progress):
            self.progress(self.done, self.total)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


@dataclass
class _Tuner:
    """One run of `tune` on a model."""

    model: nn.Module
    host: VisionTransformer
    settings: _Settings
    options: dict[str, Any]
    steps: _Steps

    def make_plan(self, parts: "_Parts", layers: Sequence[int], times: Times | None) -> Plan:
        choosing, checking, confirming = map(
            self._to_model, (parts.choosing, parts.checking, parts.confirming)
        )
        measure = self.settings.measure
        # What is not additive is ranked by features, and only checked by itself.
        additive = measure if measure.power is not None else MEASURES["features"]
        references = self._outputs(additive, choosing)
        self._check_equal(additive, references, choosing)
        own = references if additive is measure else self._outputs(measure, choosing)
        if additive is not measure:
            self._check_equal(measure, own, choosing)
        self.steps.advance()
        timed = self._time_layers(choosing[0], times)
        grids, dtype = _layer_grids(timed), timed[0].dtype
        candidates = self._candidates(additive, references, choosing, layers, timed, grids)
        search = self._make_search(candidates, additive, grids, (choosing, own), checking)
        chosen, checks = search.run(), search.rows
        self.steps.advance()
        dense_ms, planned_ms = self._time_model(choosing[0], chosen, grids)
        if times is None and planned_ms >= dense_ms and any(chosen.values()):
            # The layers gain less than patching a model costs.
            chosen = search.stay_dense(
                f"dense: the patched model was not faster, {planned_ms:g} ms against {dense_ms:g} ms"
            )
            planned_ms = dense_ms
        checked = checks[search.best]
        measured = checked["measured_change"]
        if confirming:
            confirmed = self._outputs(measure, confirming)
            measured = self._change(measure, grids, confirmed, confirming, chosen)
        self.steps.advance()
        alone = search.alone
        candidates = [replace(s, checking_change=alone.get((s.layer, s.error))) for s in candidates]
        by_setting = {(s.layer, s.error): s for s in candidates}
        settings = tuple(by_setting[layer, error] for layer, error in sorted(chosen.items()))
        saved = sum(
            by_setting[s.layer, None].milliseconds - s.milliseconds
            for s in settings
            if s.error is not None
        )
        device = choosing[0].device
        return Plan(
            model=ModelFingerprint.of(self.model),
            img_size=(int(choosing[0].shape[-2]), int(choosing[0].shape[-1])),
            grids=tuple((grid.height, grid.width) for grid in grids),
            batch_size=self.settings.batch_size,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            measure=measure.name,
            tolerance=self.settings.tolerance,
            layers=settings,
            candidates=tuple(candidates),
            predicted_change=checked["predicted_change"],
            checked_change=checked["measured_change"],
            measured_change=measured,
            checks=tuple(checks),
            dense_milliseconds=dense_ms,
            # A sum of layers that exceeds the model can only come from the noise of short times.
            predicted_milliseconds=max(dense_ms - saved, 0.01 * dense_ms),
            milliseconds=planned_ms,
            choosing=sum(len(batch) for batch in choosing),
            checking=sum(len(batch) for batch in checking),
            confirming=sum(len(batch) for batch in confirming),
            seed=self.settings.seed,
            environment=environment(str(device)),
        )

    def _make_search(
        self,
        candidates: Sequence[LayerSetting],
        additive: Measure,
        grids: Sequence[Grid],
        choosing: tuple[Sequence[Tensor], Sequence[Any]],
        checking: Sequence[Tensor],
    ) -> CheckedSearch:
        """Return the search of the plan; `choosing` are batches and their outputs by the measure."""
        measure = self.settings.measure
        references = self._outputs(measure, checking)
        features = (
            references if additive is measure else self._outputs(additive, checking)
        )  # in which layers alone are measured
        search = SettingSearch(candidates, additive.power or 1)
        check_choosing = partial(self._change, measure, grids, choosing[1], choosing[0])
        budget = self.settings.tolerance**search.power
        if additive is not measure:
            budget = self._find_budget(search, check_choosing)
        return CheckedSearch(
            search,
            self.settings.tolerance,
            budget,
            check=partial(self._change, measure, grids, references, checking),
            check_choosing=check_choosing,
            check_alone=lambda layer, error: self._change(
                additive, grids, features, checking, {layer: error}
            ),
            predicts=additive is measure,
        )

    def _to_model(self, batches: Sequence[Tensor]) -> list[Tensor]:
        floating = (p for p in self.model.parameters() if p.is_floating_point())
        parameter = next(floating, torch.empty(0))
        return [batch.to(parameter.device, parameter.dtype) for batch in batches]

    def _outputs(self, measure: Measure, batches: Sequence[Tensor]) -> list[Any]:
        return [measure.outputs(self.model, batch, self.options) for batch in batches]

    def _compare(
        self, measure: Measure, references: Sequence[Any], batches: Sequence[Tensor], what: str
    ) -> float:
        """Return the change of the model as it is now from the references."""
        total = 0.0
        for reference, batch in zip(references, batches, strict=True):
            output = measure.outputs(self.model, batch, self.options)
            total += len(batch) * measure.compare(reference, output)
        mean = total / sum(len(batch) for batch in batches)
        if not math.isfinite(mean):
            raise ValueError(
                f"the measure {measure.name!r} returned {mean} with {what}; it must return a finite "
                "number, and the model finite outputs"
            )
        if mean < -self.settings.tolerance:
            raise ValueError(
                f"the measure {measure.name!r} returned {mean:g} with {what}; it must grow with the "
                "change from 0, its value for equal outputs (return 1 - IoU rather than IoU - 1)"
            )
        return round_digits(measure.change(max(mean, 0.0)), 6)  # rounding may be below 0

    def _check_equal(
        self, measure: Measure, references: Sequence[Any], batches: Sequence[Tensor]
    ) -> None:
        """Raise unless the unchanged model is within the tolerance of itself."""
        change = self._compare(measure, references, batches, "two runs of the unchanged model")
        if change > self.settings.tolerance:
            raise ValueError(
                f"the measure {measure.name!r} returned {change:g} for two runs of the unchanged model, "
                f"above the tolerance of {self.settings.tolerance:g}; it must be 0 for equal outputs "
                "(return 1 - IoU rather than IoU), and the model must be deterministic"
            )

    def _time_layers(self, batch: Tensor, times: Times | None) -> list[TimedLayer]:
        """Run the model once, dense, and time the attention of every layer on the way."""
        token_grid = self.host.make_token_grid(self.host.prefix, self.host.suffix)
        errors = () if times is not None else self.settings.errors
        never_dense = {"allow_dense": False}  # so that hosts pass q, k, v of every call
        functions = [
            TimedLayer(
                index,
                token_grid,
                never_dense,
                errors=errors,
                repeats=self.settings.repeats,
                finished=self.steps.advance,
            )
            for index in range(len(self.host.attentions))
        ]
        install_functions(self.host, token_grid, functions)
        try:
            self.settings.measure.outputs(self.model, batch, self.options)
        finally:
            unpatch(self.model)
        for function in functions:
            given = function.milliseconds if times is None else times.get(function.layer, {})
            function.milliseconds = {error: round_digits(ms, 5) for error, ms in given.items()}
        return functions

    def _candidates(
        self,
        measure: Measure,
        references: Sequence[Any],
        batches: Sequence[Tensor],
        layers: Sequence[int],
        timed: Sequence[TimedLayer],
        grids: Sequence[Grid],
    ) -> list[LayerSetting]:
        """Measure the change of each layer alone, for settings that are faster than dense attention."""
        candidates: list[LayerSetting] = []
        for function in timed:
            layer, milliseconds = function.layer, function.milliseconds
            dense = milliseconds.get(None, 0.0)
            settings = [LayerSetting(layer, None, dense, 0.0)]
            for error in self.settings.errors if layer in layers else ():
                change = None
                if milliseconds[error] < (1.0 - LEAST_GAIN) * dense:
                    change = self._change(measure, grids, references, batches, {layer: error})
                settings.append(LayerSetting(layer, error, milliseconds[error], change))
                self.steps.advance()
            candidates += add_between(settings)
        return candidates

    def _change(
        self,
        measure: Measure,
        grids: Sequence[Grid],
        references: Sequence[Any],
        batches: Sequence[Tensor],
        errors: Mapping[int, float | None],
    ) -> float:
        """Return the change with these error targets."""
        targets = {layer: error for layer, error in errors.items() if error is not None}
        if not targets:
            return 0.0
        install_layers(self.model, self.host, planned_options(targets), grids)
        try:
            what = f"error={targets} by layer"
            return self._compare(measure, references, batches, what)
        finally:
            unpatch(self.model)

    def _find_budget(self, search: SettingSearch, check: Callable[..., float]) -> float:
        """Return the largest budget of features that the measure accepts on the choosing images."""
        budget = search.largest
        if budget == 0.0:
            return 1.0  # no setting changes the features of these images
        while budget > search.smallest:
            chosen = search.fastest(budget)
            if check(chosen) <= self.settings.tolerance:
                break
            budget = COARSE_STEP * search.cost(chosen)
        else:
            return 0.0
        # One step back by half of the factor, if that holds too.
        wider = budget / COARSE_STEP**0.5
        return wider if check(search.fastest(wider)) <= self.settings.tolerance else budget

    def _time_model(
        self, batch: Tensor, chosen: Mapping[int, float | None], grids: Sequence[Grid]
    ) -> tuple[float, float]:
        """Return the milliseconds of the unpatched and of the patched model, timed in turns."""
        targets = {layer: error for layer, error in chosen.items() if error is not None}
        samples: tuple[list[float], list[float]] = ([], [])
        for repeat in range(self.settings.repeats + 1):
            for index, errors in enumerate(({}, targets)):
                install_layers(self.model, self.host, planned_options(errors), grids)
                milliseconds = self._time_forward(batch)
                if repeat > 0:  # the first one warms up
                    samples[index].append(milliseconds)
        unpatch(self.model)
        dense = round_digits(statistics.median(samples[0]), 5)
        return dense, (round_digits(statistics.median(samples[1]), 5) if targets else dense)

    def _time_forward(self, batch: Tensor) -> float:
        synchronize(batch.device)
        start = time.perf_counter()
        self.model(batch, **self.options)
        synchronize(batch.device)
        return 1e3 * (time.perf_counter() - start)


def _layer_grids(layers: Sequence[TimedLayer]) -> tuple[Grid, ...]:
    """Return the grid of every layer, or raise if one of them has none or several."""
    for layer in layers:
        if len(layer.grids) != 1:
            found = ", ".join(sorted(f"{g.height}x{g.width}" for g in layer.grids)) or "none"
            raise ValueError(
                f"layer {layer.layer} of the model was called with {len(layer.grids)} grids of tokens "
                f"({found}), and a plan is for one grid in each layer; pass error= to bmfa.patch"
            )
    return tuple(next(iter(layer.grids)) for layer in layers)


def check_tolerance(tolerance: object) -> float:
    """Return a tolerance above 0."""
    number = python_number(tolerance)
    if isinstance(number, (int, float)) and not isinstance(number, bool) and number == 0:
        raise ValueError(
            "tolerance is 0, which only the unpatched model keeps; pass a number above 0, such as 0.03"
        )
    return check_number("tolerance", tolerance, low=0.0, open_low=True)


def _check_errors(errors: Sequence[float]) -> tuple[float, ...]:
    if isinstance(errors, (str, int, float)) or not hasattr(errors, "__iter__"):
        raise TypeError(f"errors is {errors!r}; pass a list of error targets, such as [0.03, 0.1]")
    checked = {check_number("errors", error, low=0.0, open_low=True) for error in errors}
    if not checked:
        raise ValueError("errors is empty; pass at least one error target, such as [0.03, 0.1]")
    return tuple(sorted(checked))


def _check_times(times: Times, layers: Sequence[int], errors: Sequence[float]) -> None:
    if not isinstance(times, Mapping) or not all(isinstance(x, Mapping) for x in times.values()):
        raise TypeError(
            f"times is {times!r}; pass milliseconds by layer and error target, such as "
            "{0: {None: 2.5, 0.1: 1.2}}"
        )
    for layer in layers:
        for error in (None, *errors):
            if error not in times.get(layer, {}):
                what = "dense attention (None)" if error is None else f"error={error:g}"
                raise ValueError(
                    f"times lacks {what} of layer {layer}; pass milliseconds for every layer and every "
                    "one of errors, or leave times out"
                )
            check_number("times", times[layer][error], low=0.0, open_low=True)


def _default_limit(model: nn.Module, batch_size: int) -> int:
    device = next((p.device.type for p in model.parameters()), "cpu")
    return max(IMAGES.get(device, IMAGES["cpu"]), 2 * batch_size)


@dataclass(frozen=True)
class _Parts:
    """Batches of the images that choose, check and take no part in the choice."""

    choosing: Sequence[Tensor]
    checking: Sequence[Tensor]
    confirming: Sequence[Tensor]


def _split(images: Tensor, batch_size: int) -> _Parts:
    """Divide the images: half of them choose, the others check and confirm."""
    count = len(images)
    if count < 2:
        raise ValueError(
            "there is only 1 image; pass at least two, because the settings are checked on images "
            "that did not choose them"
        )
    counts = split_counts(count)
    half = counts[0]
    if batch_size > half:
        raise ValueError(
            f"batch_size is {batch_size} and {half} of {count} images choose the settings; pass at "
            f"least {2 * batch_size} images (and limit), or a smaller batch_size"
        )
    parts = torch.split(images, counts)
    return _Parts(*(torch.split(part, batch_size) if len(part) else () for part in parts))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
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
