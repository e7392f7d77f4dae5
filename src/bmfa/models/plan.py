"""Plans: settings for each layer of a model, chosen on the user's images, in a readable JSON file.

`Plan` has settings of attention (`bmfa.tune`), and `ReductionPlan` a schedule of merging
(`bmfa.tune_reduction`).
"""

import hashlib
import json
import math
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from bmfa.checks import check_integer, check_number
from bmfa.files import write_atomic
from bmfa.merging import Policy, parse
from bmfa.models.families import find_vision_transformer
from bmfa.models.search import Check, LayerSetting, Positive
from bmfa.models.tables import Parts, Table
from bmfa.records import Record, Row, environment

# Version of the files; a plan of another version is refused.
PLAN_VERSION = 4
# Names of the policies that take a schedule.
SCHEDULED = ("tome", "pitome", "tofu", "diffrate", "crossget", "free-energy", "random-pool")
# Elements of every parameter that the fingerprint reads, evenly spaced: training changes some of them in
# every parameter that it changes. Reading all weights of a large model would take longer than patching.
_HASHED_ELEMENTS = 16
# Share by which the predicted and the measured time differ where a sentence says why.
EXPLAINED = 0.03
_MOST = 2**53  # the largest integer of a file; all up to it are exact in any reader of JSON
_DIGITS = 16  # of a hash in hexadecimal, 64 bits
# What the model of a plan must share with another one, and what to do where it does not.
_REMEDIES = {
    "name": "pass that model",
    "layers": "build the model with the same arguments",
    "architecture": "build the model with the same arguments, the size of the images apart",
    "dtype": "call model.to(torch.{})",
    "weights": "load the weights that it was made for",
}
# Position embeddings are resampled to the size of the images, so they are not what identifies a model.
_POSITIONS = ("pos_", "position")


@dataclass(frozen=True)
class ModelFingerprint:
    """Identifies a model by its architecture and a sample of its weights.

    It is that of the vision encoder without its position embeddings, which depend on the size of the
    images: the same weights have the same fingerprint in a model that was built for another size, inside
    a wrapper, and in a class of the same name in another module.

    Args:
        name: The name of the class.
        layers: The number of attention layers.
        dtype: The dtype of the first floating-point parameter, e.g. `"float32"`.
        architecture: Hash of the names and shapes of all parameters.
        weights: Hash of a sample of the weights.

    Example:
        >>> import bmfa
        >>> model = bmfa.load_model("embedded").model
        >>> fingerprint = ModelFingerprint.from_model(model)
        >>> fingerprint.layers, fingerprint.dtype
        (8, 'float32')
    """

    name: str
    layers: int
    dtype: str
    architecture: str
    weights: str

    @classmethod
    def from_model(cls, model: nn.Module) -> "ModelFingerprint":
        """Compute the fingerprint of a model.

        Args:
            model: A model that `patch` supports.

        Returns:
            The fingerprint.

        Raises:
            TypeError: If the model is not supported.
        """
        vit = find_vision_transformer(model)
        parameters = {
            name: parameter.detach()
            for name, parameter in vit.encoder.named_parameters()
            if not any(part in name for part in _POSITIONS)
        }
        floating = (p.dtype for p in parameters.values() if p.is_floating_point())
        shapes = "\n".join(f"{name} {tuple(p.shape)}" for name, p in parameters.items())
        samples = torch.cat([torch.empty(0).double(), *map(_sample, parameters.values())])
        hashes = (hashlib.sha256(data) for data in (shapes.encode(), samples.numpy().tobytes()))
        return cls(
            type(vit.encoder).__qualname__,
            len(vit.attentions),
            str(next(floating, torch.float32)).removeprefix("torch."),
            *(found.hexdigest()[:_DIGITS] for found in hashes),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanFile(Table):
    """What both kinds of plans share: their file, their table and the check of the model."""

    kind: ClassVar[str] = "any"
    made_by: ClassVar[str] = "bmfa.tune"
    experiment: ClassVar[str]  # of the record

    model: ModelFingerprint
    img_size: tuple[int, int]
    checks: tuple[Check, ...]
    calibration_images: int
    validation_images: int
    test_images: int
    seed: int
    environment: Mapping[str, Any] = field(default_factory=lambda: environment())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, whole or not at all.

        Args:
            path: The file; its folder is created if it is missing.

        Raises:
            OSError: If the file cannot be written.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> plan = bmfa.tune(model, torch.zeros(2, 3, 112, 112), errors=[0.1], repeats=1)
            >>> plan.save("plan.json")
            >>> bmfa.Plan.load("plan.json") == plan
            True
            >>> os.remove("plan.json")
        """
        write_atomic(Path(path), self.to_json())

    def to_json(self) -> str:
        """Return the text of the file that `save` writes.

        Returns:
            JSON text with one line for each setting.

        Raises:
            ValueError: If a number is infinite or NaN.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> plan = bmfa.tune(model, torch.zeros(2, 3, 112, 112), errors=[0.1], repeats=1)
            >>> print(plan.to_json()[:24])
            {
              "plan": "attention",
        """
        entries = {"plan": self.kind, "version": PLAN_VERSION, **asdict(self)}
        lines = (f"  {json.dumps(name)}: {_format(value)}" for name, value in entries.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan; `PlanFile.load` reads one of any kind.

        Args:
            path: A file that `save` wrote.

        Returns:
            The plan.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is a plan of another kind or version, or damaged; the message names the
                field.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> plan = bmfa.tune(model, torch.zeros(2, 3, 112, 112), errors=[0.1], repeats=1)
            >>> plan.save("plan.json")
            >>> model = bmfa.patch(model, plan=bmfa.Plan.load("plan.json"))
            >>> os.remove("plan.json")
        """
        try:
            data = _decode(dict, json.loads(Path(path).read_text(encoding="utf-8")), "the file")
            kinds = {kind.kind: kind for kind in (Plan, ReductionPlan) if issubclass(kind, cls)}
            for name, accepted in (("plan", list(kinds)), ("version", [PLAN_VERSION])):
                if data.get(name) not in accepted:
                    read = " or ".join(map(repr, accepted))
                    raise ValueError(f"it has {name} {data.get(name)!r}, and {read} is read here")
            kind, _ = kinds[data.pop("plan")], data.pop("version")
            plan: Self = _decode(kind, data, "")
        except OSError as error:
            reason = f"{error.strerror}); pass a file that Plan.save wrote"
            raise type(error)(f"plan {path} cannot be read ({reason}") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a plan, or damaged: {error}; make it again with {cls.made_by}"
            ) from None
        return plan

    def check_model(self, model: nn.Module) -> None:
        """Raise unless the plan is for this model.

        Args:
            model: A model that `patch` supports.

        Raises:
            TypeError: If the model is not supported.
            ValueError: If the plan is for another model.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> plan = bmfa.tune(model, torch.zeros(2, 3, 112, 112), errors=[0.1], repeats=1)
            >>> plan.check_model(model)
        """
        other = ModelFingerprint.from_model(model)
        for name, remedy in _REMEDIES.items():
            here, there = getattr(self.model, name), getattr(other, name)
            if here != there:
                raise ValueError(
                    f"the plan does not fit: its model has {name} {here}, and this one has {there}; "
                    f"{remedy.format(here)}, or make a plan for this model with {self.made_by}"
                )

    def table(self) -> list[Row]:
        """Return the rows of the table that `print` shows, one for each layer or block."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Return the sentences below the table: change and time, predicted and measured."""
        raise NotImplementedError

    def parts(self) -> Parts:
        """Return the table and the sentences below it."""
        rows = self.table()
        lines = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
        return "", lines, len(lines[0]), ["", *self.notes()]

    def to_record(self) -> Record:
        """Return the plan as the record of an experiment.

        Returns:
            A record with the rows of `table`; its settings are the fields of the plan.

        Example:
            >>> ReductionPlan.load("plan.json").to_record().rows[3]  # doctest: +SKIP
            {'block': 3, 'removed': 24, 'tokens_left': 172}
        """
        settings = asdict(self)
        del settings["environment"]
        return Record(self.experiment, settings, self.table(), self.environment)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(PlanFile):
    """Settings for each layer of a model at one image size, with what was predicted and measured.

    `bmfa.tune` makes these, and `bmfa.patch(model, plan=...)` applies them. Times are of a batch on the
    device of the plan. `print(plan)` shows it as a table.

    Args:
        model: The fingerprint of the model.
        img_size: The height and width of the images in pixels.
        grids: The height and width of the grid of tokens in every layer.
        batch_size: The number of images in a batch.
        dtype: The dtype of q, k and v.
        device: The device, e.g. `"cpu"`.
        measure: `"features"`, `"logits"` or the name of a function.
        tolerance: The largest change of the output that was accepted.
        candidates: Every setting that was measured, layer by layer.
        measured_change: The change of the whole model on the test images, which took no part in the
            choice; on the validation images if there are none.
        checks: Every combination that was checked, in order, the plan among them. For `"features"` and
            `"logits"` the first one is the fastest that is predicted to be within the tolerance.
        dense_milliseconds: The time of the unpatched model.
        exact_milliseconds: The time of the patched model with dense attention in every layer, None in
            plans of earlier versions. It is less than that of the unpatched one where the native kernel
            is faster.
        predicted_milliseconds: The time that follows from the attention of the layers.
        milliseconds: The time of the patched model.
        calibration_images: The number of images on which each layer alone was measured.
        validation_images: The number of images on which combinations were checked. More than one check
            chooses, too.
        test_images: The number of images that took no part in the choice, 0 if there were too few.
        seed: The seed of the split into these.
        effort: What the time was enough for, and what more would bring; empty without `minutes`.
        environment: Versions, device and processor.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.load_model("embedded").model
        >>> images = torch.rand(2, 3, 112, 112, generator=torch.Generator().manual_seed(0))
        >>> plan = bmfa.tune(model, images, tolerance=0.05, errors=[0.1], repeats=1)
        >>> len(plan.layers), plan.measured_change <= 0.05
        (8, True)
    """

    kind: ClassVar[str] = "attention"
    experiment: ClassVar[str] = "tune"

    grids: tuple[tuple[int, int], ...]
    batch_size: int
    dtype: str
    device: str
    measure: str
    tolerance: Positive
    candidates: tuple[LayerSetting, ...]
    measured_change: float
    dense_milliseconds: Positive
    predicted_milliseconds: Positive
    milliseconds: Positive
    exact_milliseconds: Positive | None = None
    effort: str = ""

    def __post_init__(self) -> None:
        if [check.holds for check in self.checks if check.chosen] != [True]:
            raise ValueError("checks has not exactly one that is chosen and holds")
        layers = list(range(self.model.layers))
        dense = [s.layer for s in self.candidates if s.error is None]
        chosen, planned = [s.layer for s in self.layers], [*range(len(self.chosen.settings))]
        for found in (dense, chosen, planned, [*range(len(self.grids))]):
            if found != layers:
                raise ValueError(
                    f"candidates, checks and grids are of layers {found}, and the model has "
                    f"{len(layers)} layers"
                )

    @property
    def chosen(self) -> Check:
        """The check of the combination of the plan."""
        return next(check for check in self.checks if check.chosen)

    @property
    def layers(self) -> tuple[LayerSetting, ...]:
        """The chosen setting of every layer."""
        chosen = set(enumerate(self.chosen.settings))
        return tuple(s for s in self.candidates if (s.layer, s.error) in chosen)

    @property
    def errors(self) -> dict[int, float]:
        """The error target of every layer that is not dense, by its index."""
        return {s.layer: s.error for s in self.layers if s.error is not None}

    @property
    def predicted_change(self) -> float | None:
        """The change that follows from the layers alone; None if the measure is a function."""
        return self.chosen.predicted_change

    @property
    def validation_change(self) -> float:
        """The change of the whole model on the validation images."""
        return self.chosen.validation_change

    @property
    def holds(self) -> bool:
        """True if the measured change is within the tolerance."""
        return self.measured_change <= self.tolerance

    @property
    def speedup(self) -> float:
        """The time of the unpatched model over that of the patched one, both measured."""
        return self.dense_milliseconds / self.milliseconds

    def table(self) -> list[Row]:
        """Return the table that `print` shows.

        Returns:
            A row for the chosen setting of every layer, with the keys `layer`, `setting`,
            `change_alone`, `milliseconds`, `dense_milliseconds` and `speedup`.

        Example:
            >>> Plan.load("plan.json").table()[2]  # doctest: +SKIP
            {'layer': 2, 'setting': 'error=0.1', 'change_alone': '0.88 %', ...}
        """
        dense = {s.layer: s.milliseconds for s in self.candidates if s.error is None}
        return [
            {
                "layer": s.layer,
                "setting": s.name,
                "change_alone": self._format(s.change),
                "milliseconds": s.milliseconds,
                "dense_milliseconds": dense[s.layer],
                "speedup": f"{dense[s.layer] / s.milliseconds:.2f}x",
            }
            for s in self.layers
        ]

    def notes(self) -> list[str]:
        """Return the sentences below the table, on the whole model.

        Returns:
            The change and the time, predicted and measured.

        Example:
            >>> Plan.load("plan.json").notes()[-1]  # doctest: +SKIP
            'time: 4597.4 ms dense, 4176.7 ms predicted (1.10x), 3754.2 ms measured (1.22x)'
        """
        change, (height, width) = self._format, self.img_size
        device = self.environment.get("device_name", self.device)
        tested = "none, because fewer than six images were given"
        if self.test_images:
            tested = f"{change(self.measured_change)} measured on {self.test_images}"
        predicted_speedup = self.dense_milliseconds / self.predicted_milliseconds
        lines = [
            f"{self.measure} at {width}x{height} px, {self.dtype}, batches of {self.batch_size} on "
            f"{device}: {len(self.errors)} of {len(self.layers)} layers attend over tiles",
            f"change: {change(self.predicted_change)} predicted from {self.calibration_images} "
            f"calibration images, {change(self.validation_change)} measured on "
            f"{self.validation_images} validation images, tolerance {change(self.tolerance)}",
            f"test images: {tested}",
            f"time: {self.dense_milliseconds:.5g} ms dense, {self.predicted_milliseconds:.5g} ms "
            f"predicted ({predicted_speedup:.2f}x), {self.milliseconds:.5g} ms measured "
            f"({self.speedup:.2f}x)",
        ]
        exact, predicted = self.exact_milliseconds, self.predicted_milliseconds
        if exact and self.errors and abs(predicted / self.milliseconds - 1) > EXPLAINED:
            lines.append(
                f"predicted and measured: with dense layers the patched model takes {exact:.5g} ms; its "
                f"layers save {exact - predicted:.5g} ms timed alone, where their inputs stay in the "
                f"cache, and {exact - self.milliseconds:.5g} ms in the model"
            )
        if self.effort:
            lines.append(self.effort)
        if not self.holds:
            lines.append("the change exceeds the tolerance: pass more images (limit)")
        return lines

    def _format(self, change: float | None) -> str:
        """Format a change: in nats for logits, otherwise in percent."""
        if change is None:
            return "none"
        return f"{change:.3g} nats" if self.measure == "logits" else f"{100 * change:.2f} %"

    def to_record(self) -> Record:
        """Return the plan as the record of an experiment, from which its figure is drawn.

        Returns:
            A record with a row for each setting that was measured; its settings have the totals.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> plan = bmfa.tune(model, torch.zeros(2, 3, 112, 112), errors=[0.1], repeats=1)
            >>> plan.to_record().rows[1]["setting"]
            'error=0.1'
        """
        chosen, dense = self.layers, {s.layer: s for s in self.candidates if s.error is None}
        rows = [
            {"setting": s.name, **asdict(s)}
            | {"dense_milliseconds": dense[s.layer].milliseconds, "chosen": s in chosen}
            for s in self.candidates
        ]
        return replace(super().to_record(), rows=rows)


@dataclass(frozen=True, kw_only=True, repr=False)
class ReductionPlan(PlanFile):
    """The tokens that each block of a model removes at one image size, with what was measured.

    `bmfa.tune_reduction` makes these, and `bmfa.reduce(model, plan=...)` applies them. `print(plan)`
    shows it as a table.

    Args:
        model: The fingerprint of the model.
        img_size: The height and width of the images in pixels.
        grid: The height and width of the grid of tokens.
        policy: The name of the policy, e.g. `"free-energy"`.
        schedule: The number of tokens that each block removes.
        target: What was requested, `"gflops"` or `"agreement"`.
        target_value: The GFLOPs of an image, or the share of the images that keep their class.
        full_gflops: The GFLOPs of an image in the full model.
        gflops: The GFLOPs of an image with this schedule.
        calibration_kl: The output KL on the calibration images: the mean divergence of the class
            probabilities from those of the full model.
        calibration_agreement: The share of these images whose class is that of the full model.
        output_kl: The output KL on images that took no part in the choice, or on the validation images
            if there are none.
        agreement: The share of the same images whose class is that of the full model.
        checks: Every schedule that was checked for a target of agreement, in order. The change is the
            share of images whose class is another one.
        calibration_images: The number of images on which each block alone was measured.
        validation_images: The number of images on which a target of agreement was checked, which
            chooses, too; 0 for a target of GFLOPs.
        test_images: The number of images that took no part in the choice, 0 if there were too few.
        seed: The seed of the split into these.
        environment: Versions, device and processor.

    Example:
        >>> import bmfa, torch
        >>> loaded = bmfa.load_model("embedded")
        >>> images = torch.rand(4, 3, 112, 112, generator=torch.Generator().manual_seed(0))
        >>> plan = bmfa.tune_reduction(loaded, images, gflops=0.42)
        >>> len(plan.schedule), plan.gflops <= 0.42
        (8, True)
    """

    kind: ClassVar[str] = "reduction"
    made_by: ClassVar[str] = "bmfa.tune_reduction"
    experiment: ClassVar[str] = "tune-reduction"

    grid: tuple[int, int]
    policy: str
    schedule: tuple[int, ...]
    target: str
    target_value: float
    full_gflops: Positive
    gflops: float
    calibration_kl: float
    calibration_agreement: float
    output_kl: float
    agreement: float

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, SCHEDULED)
        check_choice("target", self.target, ("gflops", "agreement"))
        if len(self.schedule) != self.model.layers:  # one number would be a count for every block
            raise ValueError(
                f"schedule has {len(self.schedule)} numbers of tokens, and the model has "
                f"{self.model.layers} blocks"
            )

    @property
    def reduction(self) -> Policy:
        """The policy with its schedule, as `bmfa.reduce` takes it.

        Example:
            >>> str(ReductionPlan.load("plan.json").reduction)  # doctest: +SKIP
            'free-energy:0,0,0,24,8,20,0,24,0,20,0,0'
        """
        return parse(f"{self.policy}:{','.join(map(str, self.schedule))}")

    @property
    def holds(self) -> bool:
        """True if the target is kept; one of agreement on the images that took no part in the choice."""
        if self.target == "gflops":
            return self.gflops <= self.target_value
        return self.agreement >= self.target_value

    def table(self) -> list[Row]:
        """Return a row for each block: `block`, `removed` and `tokens_left`, of the spatial tokens.

        Example:
            >>> plan.table()[3]  # doctest: +SKIP
            {'block': 3, 'removed': 24, 'tokens_left': 172}
        """
        so_far = zip(self.schedule, accumulate(self.schedule), strict=True)
        return [
            {"block": block, "removed": removed, "tokens_left": math.prod(self.grid) - total}
            for block, (removed, total) in enumerate(so_far)
        ]

    def notes(self) -> list[str]:
        """Return sentences on the reduced model: its operations, its output KL and its agreement."""
        (height, width), removed = self.img_size, sum(self.schedule)
        target = f"an agreement of {100 * self.target_value:.1f} %"
        if self.target == "gflops":
            target = f"at most {self.target_value:g} GFLOPs"
        tested = f"{self.test_images} test images"
        if not self.test_images:
            tested = f"{self.validation_images} validation images"
        lines = [
            f"{self.policy} at {width}x{height} px for {target}: {removed} of {math.prod(self.grid)} "
            "spatial tokens are removed",
            f"operations: {self.gflops:.4g} of {self.full_gflops:.4g} GFLOPs "
            f"({100 * self.gflops / self.full_gflops:.1f} %)",
            f"{self.calibration_images} calibration images: {100 * self.calibration_agreement:.1f} % "
            f"keep their class, output KL {self.calibration_kl:.3g} nats",
            f"{tested}: {100 * self.agreement:.1f} % keep their class, output KL "
            f"{self.output_kl:.3g} nats",
        ]
        if not self.holds:
            lines.append("the target is missed: pass more images (limit)")
        return lines


def check_choice(name: str, value: object, accepted: Sequence[str]) -> None:
    """Raise unless a value is one of those that are accepted."""
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}; pass one of {', '.join(accepted)}")


def _decode(kind: Any, value: Any, name: str) -> Any:
    """Convert JSON data to the type of a field; raise a ValueError that names the field."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):  # with None
        return None if value is None else _decode(arguments[0], value, name)
    if kind is float or origin is Annotated:
        return check_number(name, value, low=0.0, open_low=origin is Annotated)
    if kind is int:
        return check_integer(name, value, low=0, high=_MOST)
    if origin is tuple:
        count = "" if arguments[-1] is ... else f" of {len(arguments)} numbers"
        if not isinstance(value, list) or (count and len(value) != len(arguments)):
            raise ValueError(f"{name} is not a list{count}")
        return tuple(_decode(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    expected = kind if kind in (str, bool) else dict
    if not isinstance(value, expected):
        raise ValueError(f"{name} is {value!r}, which is not of the type {expected.__name__}")
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return value
    hints = {one.name: get_type_hints(kind, include_extras=True)[one.name] for one in fields(kind)}
    for one in fields(kind):
        if one.name not in value and one.default is not MISSING:  # a file of an earlier version
            value[one.name] = one.default
    for wrong in sorted(hints.keys() ^ value.keys()):
        what = "lacks" if wrong in hints else "does not have"
        raise ValueError(f"{name or 'a plan'} {what} the field {wrong!r}")
    prefix = f"{name}." if name else ""
    return kind(**{one: _decode(hint, value[one], prefix + one) for one, hint in hints.items()})


def _format(value: Any) -> str:
    """JSON text of an entry, with one line for each object of a list."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        rows = ",\n".join(f"    {json.dumps(row, allow_nan=False)}" for row in value)
        return f"[\n{rows}\n  ]"
    return json.dumps(value, allow_nan=False)


def _sample(parameter: Tensor) -> Tensor:
    """Return evenly spaced elements of a parameter, the last one among them, as float64."""
    flat = parameter.flatten()
    step = max(1, flat.numel() // _HASHED_ELEMENTS)
    return flat[(flat.numel() - 1) % step :: step].double().cpu()
