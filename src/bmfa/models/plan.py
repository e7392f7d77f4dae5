"""Plans: settings for each layer of a model, chosen on the user's images, in a readable JSON file.

`ModelFingerprint`, `write_plan` and `read_plan` serve every kind of plan; `Plan` is that of `bmfa.tune`.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.checks import check_integer, check_number
from bmfa.files import write_atomic
from bmfa.grid import Grid
from bmfa.models.families import find_vision_transformer
from bmfa.models.hosts.base import class_name
from bmfa.models.measures import MEASURES
from bmfa.models.setting_search import Combination, LayerSetting, SettingSearch
from bmfa.records import Record, Row, environment

# Version of the files; a plan of another version is refused.
PLAN_VERSION = 2
# Elements of every parameter that the fingerprint reads, evenly spaced: training changes some of them in
# every parameter that it changes. Reading all weights of a large model would take longer than patching.
_HASHED_ELEMENTS = 16
_DIGITS = 16  # of a hash in hexadecimal, 64 bits
# Keys that every file of a plan begins with.
_KIND, _VERSION = "plan", "version"


@dataclass(frozen=True)
class ModelFingerprint:
    """Identifies a model: its class, its architecture and a sample of its weights.

    Args:
        name: The module path and name of the class.
        layers: The number of attention layers.
        parameters: The number of parameters.
        dtype: The dtype of the first floating-point parameter, e.g. `"float32"`.
        architecture: Hash of the names and shapes of all parameters.
        weights: Hash of a sample of the weights.

    Example:
        >>> import bmfa
        >>> model = bmfa.load_model("embedded").model
        >>> fingerprint = ModelFingerprint.of(model)
        >>> fingerprint.layers, fingerprint.dtype
        (8, 'float32')
        >>> fingerprint.mismatch(model) is None
        True
    """

    name: str
    layers: int
    parameters: int
    dtype: str
    architecture: str
    weights: str

    @classmethod
    def of(cls, model: nn.Module) -> "ModelFingerprint":
        """Compute the fingerprint of a model.

        Args:
            model: A model that `patch` supports; wrappers of `torch.compile` and of data-parallel
                training are looked through.

        Returns:
            The fingerprint.

        Raises:
            TypeError: If the model is not supported.
        """
        layers = len(find_vision_transformer(model).attentions)
        inner = _unwrap(model)
        parameters = dict(inner.named_parameters())
        shapes = "\n".join(f"{name} {tuple(p.shape)}" for name, p in parameters.items())
        floating = (p.dtype for p in parameters.values() if p.is_floating_point())
        return cls(
            class_name(inner),
            layers,
            sum(p.numel() for p in parameters.values()),
            str(next(floating, torch.float32)).removeprefix("torch."),
            hashlib.sha256(shapes.encode()).hexdigest()[:_DIGITS],
            _hash_weights(list(parameters.values())),
        )

    def check(self, model: nn.Module, make_again: str) -> None:
        """Raise a ValueError unless a model has this fingerprint; `make_again` names the remedy."""
        mismatch = self.mismatch(model)
        if mismatch is not None:
            raise ValueError(
                f"the plan does not fit: {mismatch}; make a plan for this model with {make_again}"
            )

    def mismatch(self, model: nn.Module) -> str | None:
        """Say how a model differs from the one with this fingerprint.

        Args:
            model: A model that `patch` supports.

        Returns:
            A clause that names the difference, or None if there is none.

        Raises:
            TypeError: If the model is not supported.
        """
        other = ModelFingerprint.of(model)
        if other.name != self.name:
            return f"it is for {self.name}, and the model is {other.name}"
        if (other.architecture, other.layers) != (self.architecture, self.layers):
            return (
                f"it is for {self.layers} layers and {self.parameters:,} parameters, and the model has "
                f"{other.layers} and {other.parameters:,}, or other shapes"
            )
        if other.dtype != self.dtype:
            return f"it is for {self.dtype} weights, and the model has {other.dtype}"
        if other.weights != self.weights:
            return "it is for other weights of the same architecture"
        return None


def write_plan(path: str | os.PathLike[str], kind: str, content: Mapping[str, Any]) -> None:
    """Write the file of a plan, whole or not at all.

    Args:
        path: The file; its folder is created if it is missing.
        kind: What the plan is for, e.g. `"attention"`.
        content: JSON values by name. A list of objects gets one line for each object.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If a number is infinite or NaN.
    """
    write_atomic(Path(path), format_plan(kind, content))


def format_plan(kind: str, content: Mapping[str, Any]) -> str:
    """Return the text that `write_plan` writes."""
    entries = {_KIND: kind, _VERSION: PLAN_VERSION, **content}
    lines = (f"  {json.dumps(name)}: {_format(value)}" for name, value in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_plan(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Read the file of a plan.

    Args:
        path: A file that `write_plan` wrote.
        kind: What the plan must be for, e.g. `"attention"`.

    Returns:
        The content that was passed to `write_plan`.

    Raises:
        OSError: If the file cannot be read; the message names it.
        ValueError: If it is not a plan of this kind and version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise type(error)(
            f"plan {path} cannot be read ({error.strerror}); pass a file that Plan.save wrote"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; pass a file that Plan.save wrote") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON (line {error.lineno}: {error.msg}); pass a file that Plan.save wrote"
        ) from None
    if not isinstance(data, dict) or _KIND not in data:
        raise ValueError(f"{path} is not a plan; pass a file that Plan.save wrote")
    if data[_KIND] != kind:
        raise ValueError(
            f"{path} is a plan of the kind {data[_KIND]!r}; pass one of the kind {kind!r}"
        )
    if data.get(_VERSION) != PLAN_VERSION:
        raise ValueError(
            f"{path} has plan version {data.get(_VERSION)!r} and this bmfa reads version "
            f"{PLAN_VERSION}; make the plan again with this version of bmfa"
        )
    return {name: value for name, value in data.items() if name not in (_KIND, _VERSION)}


@dataclass(frozen=True)
class Plan:
    """Settings for each layer of a model at one image size, with what was predicted and measured.

    `bmfa.tune` makes these, and `bmfa.patch(model, plan=...)` applies them. Times are of a batch on the
    device of the plan.

    Args:
        model: The fingerprint of the model.
        img_size: The height and width of the images in pixels.
        grids: The height and width of the grid of tokens in every layer.
        batch_size: The number of images in a batch.
        dtype: The dtype of q, k and v.
        device: The device, e.g. `"cpu"`.
        measure: `"features"`, `"logits"` or the name of a function.
        tolerance: The largest change of the output that was accepted.
        layers: The chosen setting of every layer.
        candidates: Every setting that was measured, and those interpolated between two of them.
        predicted_change: The change that follows from the layers alone on the choosing images, None for
            other measures than `"features"` and `"logits"`.
        checked_change: The change of the whole model on the checking images.
        measured_change: The change of the whole model on the confirming images, which took no part in
            the choice; on the checking images if there are none.
        checks: Every combination that was checked, in order: `errors`, the target of each layer (None is
            dense), the number of `tiled_layers`, `attention_milliseconds` of all layers,
            `predicted_change`, `choosing_change` (measured on the choosing images, None if it was not),
            `measured_change` on the checking images, whether it `holds` on both, whether it is the
            `chosen` one, and `why` it was checked.
        dense_milliseconds: The time of the unpatched model.
        predicted_milliseconds: The time that follows from the attention of the layers.
        milliseconds: The time of the patched model.
        choosing: The number of images on which the settings were chosen.
        checking: The number of images on which combinations were checked. More than one check chooses,
            too.
        confirming: The number of images that took no part in the choice, 0 if there were too few.
        seed: The seed of the split into these.
        environment: Versions, device and processor.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.load_model("embedded").model
        >>> images = torch.rand(2, 3, 112, 112, generator=torch.Generator().manual_seed(0))
        >>> plan = bmfa.tune(model, images, tolerance=0.05, errors=[0.1], repeats=1)
        >>> len(plan.layers), plan.measured_change <= 0.05
        (8, True)
    """

    model: ModelFingerprint
    img_size: tuple[int, int]
    grids: tuple[tuple[int, int], ...]
    batch_size: int
    dtype: str
    device: str
    measure: str
    tolerance: float
    layers: tuple[LayerSetting, ...]
    candidates: tuple[LayerSetting, ...]
    predicted_change: float | None
    checked_change: float
    measured_change: float
    checks: tuple[Row, ...]
    dense_milliseconds: float
    predicted_milliseconds: float
    milliseconds: float
    choosing: int
    checking: int
    confirming: int
    seed: int
    environment: Mapping[str, Any] = field(default_factory=lambda: environment())

    @property
    def holds(self) -> bool:
        """True if the measured change is within the tolerance."""
        return self.measured_change <= self.tolerance

    @property
    def expected_change(self) -> float:
        """The change that is expected on other images: the mean over choosing and checking images.

        It is the root mean square for features. For the choosing images the predicted change counts, if
        none was measured.

        Example:
            >>> Plan.load("plan.json").expected_change  # doctest: +SKIP
            0.0287
        """
        row = next(row for row in self.checks if row["chosen"])
        choosing = row["choosing_change"]
        choosing = row["predicted_change"] if choosing is None else choosing
        if choosing is None:  # all layers are dense
            return float(self.checked_change)
        power = self._power or 1
        total = self.choosing * choosing**power + self.checking * self.checked_change**power
        return float((total / (self.choosing + self.checking)) ** (1.0 / power))

    @property
    def speedup(self) -> float:
        """The time of the unpatched model over that of the patched one, both measured."""
        return self.dense_milliseconds / self.milliseconds

    @property
    def predicted_speedup(self) -> float:
        """The speed-up that follows from the times of the layers."""
        return self.dense_milliseconds / self.predicted_milliseconds

    @property
    def errors(self) -> dict[int, float]:
        """The error target of every layer that is not dense, by its index."""
        return {s.layer: s.error for s in self.layers if s.error is not None}

    @property
    def times(self) -> dict[int, dict[float | None, float]]:
        """Measured milliseconds by layer and error target (None is dense), for `tune(times=...)`."""
        times: dict[int, dict[float | None, float]] = {}
        for setting in self.candidates:
            if not setting.interpolated:
                times.setdefault(setting.layer, {})[setting.error] = setting.milliseconds
        return times

    def single_target(self) -> Row | None:
        """Return the fastest single error target that is predicted to be within the tolerance.

        Layers in which the target saves no time stay dense. It shows what the choice for each layer is
        worth.

        Returns:
            `error`, `predicted_change`, `predicted_milliseconds` and `measured_change` on the checking
            images (None if it was not checked, because the plan is faster anyway); or None if no target
            is within the tolerance, or it is not known how the changes of the measure add.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> times = {layer: {None: 1.0, 0.1: 0.5} for layer in range(8)}
            >>> plan = bmfa.tune(
            ...     model, torch.zeros(2, 3, 112, 112), 10.0, errors=[0.1], repeats=1, times=times
            ... )
            >>> plan.single_target()["error"]
            0.1
        """
        search = self._search()
        if search is None:
            return None
        singles = [
            {"error": error} | self._predict(search, chosen)
            for error, chosen in search.single_targets().items()
            if search.change(chosen) <= self.tolerance
        ]
        return min(singles, key=lambda row: float(row["predicted_milliseconds"]), default=None)

    def optimum(self) -> Row | None:
        """Return the fastest combination that is predicted to be within the tolerance.

        It is what the measured times and changes allow on the choosing images. The plan is slower if
        this combination does not hold on the checking images.

        Returns:
            `errors`, the target of each layer (None is dense), `predicted_change`,
            `predicted_milliseconds` and `measured_change` on the checking images; or None if it is not
            known how the changes of the measure add.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> times = {layer: {None: 1.0, 0.1: 0.5} for layer in range(8)}
            >>> plan = bmfa.tune(
            ...     model, torch.zeros(2, 3, 112, 112), 10.0, errors=[0.1], repeats=1, times=times
            ... )
            >>> plan.optimum()["errors"] == [0.1] * 8
            True
        """
        search = self._search()
        if search is None:
            return None
        chosen = search.fastest(self.tolerance**search.power)
        errors = [chosen[layer] for layer in sorted(chosen)]
        return {"errors": errors} | self._predict(search, chosen)

    def _search(self) -> SettingSearch | None:
        """Return a search of the candidates, None if it is not known how their changes add."""
        if self._power is None:
            return None
        return SettingSearch(self.candidates, self._power)

    @property
    def _power(self) -> int | None:
        """The power of the change that adds over layers."""
        return MEASURES[self.measure].power if self.measure in MEASURES else None

    def _predict(self, search: SettingSearch, chosen: Combination) -> Row:
        """Return the predicted change and time of a combination, and what its check has measured."""
        dense = search.milliseconds(dict.fromkeys(chosen))
        errors = [chosen[layer] for layer in sorted(chosen)]
        checked = (row["measured_change"] for row in self.checks if row["errors"] == errors)
        return {
            "predicted_change": search.change(chosen),
            "predicted_milliseconds": self.dense_milliseconds
            - (dense - search.milliseconds(chosen)),
            "measured_change": next(checked, None),
        }

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
            >>> Plan.load("plan.json") == plan
            True
            >>> os.remove("plan.json")
        """
        write_atomic(Path(path), self.to_json())

    def to_json(self) -> str:
        """Return the text of the file that `save` writes.

        Returns:
            JSON text with one line for each setting.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> plan = bmfa.tune(model, torch.zeros(2, 3, 112, 112), errors=[0.1], repeats=1)
            >>> print(plan.to_json()[:24])
            {
              "plan": "attention",
        """
        return format_plan("attention", asdict(self))

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
        chosen, dense = set(self.layers), {s.layer: s for s in self.candidates if s.error is None}
        rows = [
            {
                "layer": s.layer,
                "setting": s.name,
                "error": s.error,
                "change": s.change,
                "milliseconds": s.milliseconds,
                "dense_milliseconds": dense[s.layer].milliseconds,
                "checking_change": s.checking_change,
                "interpolated": s.interpolated,
                "chosen": s in chosen,
            }
            for s in self.candidates
        ]
        settings = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("layers", "candidates", "environment")
        }
        totals = {
            "speedup": self.speedup,
            "predicted_speedup": self.predicted_speedup,
            "expected_change": self.expected_change,
            "single_target": self.single_target(),
            "optimum": self.optimum(),
        }
        return Record("tune", settings | totals, rows, self.environment)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan.

        Args:
            path: A file that `save` wrote.

        Returns:
            The plan.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is not a plan for attention, or of another version.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> plan = bmfa.tune(model, torch.zeros(2, 3, 112, 112), errors=[0.1], repeats=1)
            >>> plan.save("plan.json")
            >>> model = bmfa.patch(model, plan=Plan.load("plan.json"))
            >>> os.remove("plan.json")
        """
        data = read_plan(path, "attention")
        try:
            plan = cls(
                model=ModelFingerprint(**data.pop("model")),
                img_size=read_sides(data.pop("img_size")),
                grids=tuple(map(read_sides, data.pop("grids"))),
                checks=tuple(data.pop("checks")),
                layers=tuple(map(_checked_setting, data.pop("layers"))),
                candidates=tuple(map(_checked_setting, data.pop("candidates"))),
                **data,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a complete plan ({error}); make it again with bmfa.tune"
            ) from None
        layers = plan.model.layers
        if [s.layer for s in plan.layers] != list(range(layers)) or len(plan.grids) != layers:
            raise ValueError(
                f"{path} is not a complete plan (it has {len(plan.layers)} settings and "
                f"{len(plan.grids)} grids for {layers} layers); make it again with bmfa.tune"
            )
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
        self.model.check(model, "bmfa.tune")

    @property
    def grid(self) -> tuple[int, int] | None:
        """The height and width of the grid of tokens, None if layers have different ones."""
        return self.grids[0] if len(set(self.grids)) == 1 else None

    @property
    def token_grids(self) -> tuple[Grid, ...]:
        """The grid of tokens in every layer."""
        return tuple(Grid(height, width) for height, width in self.grids)


def _checked_setting(row: Mapping[str, Any]) -> LayerSetting:
    setting = LayerSetting(**row)
    check_integer("layer", setting.layer, low=0)
    check_number("milliseconds", setting.milliseconds, low=0.0)
    for name in ("error", "change", "checking_change"):
        if getattr(setting, name) is not None:
            check_number(name, getattr(setting, name), low=0.0)
    return setting


def read_sides(values: Any) -> tuple[int, int]:
    """Return the height and width of an image or a grid in the data of a plan."""
    height, width = values
    return check_integer("height", height, low=1), check_integer("width", width, low=1)


def _format(value: Any) -> str:
    """JSON text of an entry, with one line for each object of a list."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        rows = ",\n".join(f"    {json.dumps(row, allow_nan=False)}" for row in value)
        return f"[\n{rows}\n  ]"
    if isinstance(value, Mapping):
        return json.dumps(value, indent=2, allow_nan=False).replace("\n", "\n  ")
    return json.dumps(value, allow_nan=False)


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile and of data-parallel training."""
    while True:
        name = "_orig_mod" if hasattr(model, "_orig_mod") else "module"
        inner = model._modules.get(name)
        is_wrapper = isinstance(model, nn.DataParallel) or type(model).__module__.startswith(
            ("torch._dynamo", "torch.nn.parallel")
        )
        if inner is None or not is_wrapper:
            return model
        model = inner


def _hash_weights(parameters: list[nn.Parameter]) -> str:
    """Hash evenly spaced elements of every parameter, the last one among them, as float64."""
    samples: dict[torch.device, list[Tensor]] = {}  # one transfer from each device
    for parameter in parameters:
        flat = parameter.detach().flatten()
        step = max(1, flat.numel() // _HASHED_ELEMENTS)
        sample = flat[(flat.numel() - 1) % step :: step].double()
        samples.setdefault(parameter.device, []).append(sample)
    digest = hashlib.sha256()
    for parts in samples.values():
        digest.update(torch.cat(parts).cpu().numpy().tobytes())
    return digest.hexdigest()[:_DIGITS]
