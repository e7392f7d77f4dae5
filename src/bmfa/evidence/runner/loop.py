"""The measurement loop: every method on the same images, compared with the full model."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from bmfa.attention.result import Screened
from bmfa.environment import amx_refused
from bmfa.evidence.methods import FULL
from bmfa.evidence.metrics import compare
from bmfa.evidence.model_methods import Layers, applied, parse
from bmfa.evidence.runner import Progress
from bmfa.evidence.runner.batches import Batch, ImageBatches, image_settings, no_images_error
from bmfa.evidence.runner.parts import Part, add, compute_parts, weights_digest
from bmfa.models import LoadedModel, Recording, unpatch
from bmfa.models.embedded import EmbeddedViT
from bmfa.models.screened_layer import LayerInputs, observe

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Columns = dict[str, Tensor]  # (B,) each
Case = tuple[str, Layers]  # a method, and the layers that it screens if it is a rule


class Subject:
    """A model on its device and in its dtype, without a patch."""

    def __init__(
        self,
        model: LoadedModel,
        device: str = "cpu",
        *,
        amp: bool = False,
        dtype: str | None = None,
    ) -> None:
        if amp and dtype not in (None, "float32"):
            raise ValueError(f"amp and dtype {dtype} are given; pass one of them")
        self.device, self.amp, self.dtype = torch.device(device), amp, parse_dtype(dtype)
        unsafe = (amp or dtype == "bfloat16") and self.device.type == "cpu"
        # oneDNN would kill the process: it uses an AMX that is advertised but not granted.
        if unsafe and "ONEDNN_MAX_CPU_ISA" not in os.environ and amx_refused():
            raise ValueError(
                "bfloat16 products are unsafe here: AMX is advertised but refused; "
                "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
            )
        unpatch(model.model)
        if self.dtype is not None:
            # The caller's model keeps its own dtype.
            model = replace(model, model=deepcopy(model.model).to(self.device, self.dtype))
        model.model.to(self.device)
        self.model = model

    def load(self, batch: Batch) -> Tensor:
        """Return the (B, 3, H, W) pixels of a batch; copies from pinned memory do not block."""
        return batch.pixels.to(self.device, self.dtype, non_blocking=True)

    def logits(self, pixels: Tensor) -> Tensor:
        """Return the (B, classes) outputs of the model as it is patched now."""
        half = torch.bfloat16 if self.device.type == "cpu" else torch.float16
        with torch.autocast(self.device.type, dtype=half, enabled=self.amp):
            return self.model.logits(pixels)

    def finite_logits(self, pixels: Tensor, name: str) -> Tensor:
        """Return the outputs in float32; raise ValueError if they are not finite."""
        logits = self.logits(pixels).float()
        if not bool(torch.isfinite(logits).all()):
            raise ValueError(
                f"{name} gives outputs that are not finite; try --dtype bfloat16, or float32"
            )
        return logits

    def compare(
        self, name: str, pixels: Tensor, full: Tensor, labels: Sequence[Any], errors: bool = False
    ) -> Columns:
        """Compare the model as it is patched now with the full model, image by image.

        Args:
            name: What the model is patched with, for messages.
            pixels: (B, 3, H, W) images.
            full: (B, classes) outputs of the full model.
            labels: (B,) classes, None where unknown.
            errors: True to measure the error E of trees too.

        Returns:
            The columns of `bmfa.evidence.metrics.compare`, and of a screened model those of its trees.
        """
        with observed_trees(self.model.model, errors) as trees:
            logits = self.finite_logits(pixels, name)
        return compare(full, logits, labels) | trees()

    def sums(self, batch: Batch, cases: Mapping[str, Case], seed: int, errors: bool) -> Part:
        """Return the sums of every case over a batch; random rules draw for each image alone."""
        pixels, labels = self.load(batch), batch.labels
        full = self.finite_logits(pixels, self.model.name)
        _check_labels(labels, full.shape[-1])
        found = {FULL: _sum(compare(full, full, labels), labels)}
        for key, (name, layers) in cases.items():
            alone, parts = parse(name).random, []
            for start in range(0, len(labels), 1 if alone else len(labels)):
                some = slice(start, start + 1 if alone else None)
                own_seed = seed + batch.indices[start] * alone
                with applied(self.model.model, name, layers, own_seed):
                    columns = self.compare(name, pixels[some], full[some], labels[some], errors)
                parts.append(_sum(columns, labels[some]))
            found[key] = add(parts)
        return found


class Segmenter(Subject):
    """The embedded model with its mask head; `masks` are (B, H, W) bool of the last call."""

    def __init__(self, model: LoadedModel, device: str = "cpu") -> None:
        if not isinstance(model.model, EmbeddedViT):
            raise TypeError(
                f"the model is {type(model.model).__name__}; pass load_model('embedded'), which has "
                "a mask head"
            )
        super().__init__(model, device)

    def logits(self, pixels: Tensor) -> Tensor:
        """Return the (B, classes) outputs, and keep the masks."""
        logits, masks = cast(EmbeddedViT, self.model.model).forward_dense(pixels)
        self.masks = masks.cpu() > 0
        return logits


@torch.inference_mode()
def measure_images(
    subject: Subject,
    batches: ImageBatches,
    cases: Mapping[str, Case],
    settings: Mapping[str, Any],
    *,
    errors: bool = False,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Measure every case on all images, in all processes of a run.

    Args:
        subject: The model.
        batches: The images.
        cases: The cases by key.
        settings: The settings that partial results depend on, `seed` among them.
        errors: True to measure the error E of trees too.
        resume: File of partial results.
        progress: Called with the images done and their number.

    Returns:
        The sums over images by key, `full` first, and what a record says of its images.

    Raises:
        ValueError: If no image could be read, a label is not a class of the model, or an output is
            not finite.
    """

    def compute(numbers: Sequence[int]) -> Iterator[Part]:
        for batch in batches.read(numbers):
            some = batch.indices and subject.sums(batch, cases, settings["seed"], errors)
            yield {"skipped": list(map(str, batch.errors)), "sums": some or {}}

    def identity() -> dict[str, Any]:
        weights = {"weights": weights_digest(subject.model.model), "device": subject.device.type}
        return {**settings, **weights, **batches.identity()}

    parts = compute_parts(
        batches.sizes, compute, resume=resume, identity=identity, progress=progress
    )
    total = add([{"skipped": [], "sums": {}}, *parts])
    if not total["sums"]:
        raise no_images_error(total["skipped"])
    return total["sums"], image_settings(batches, total["skipped"])


@contextmanager
def observed_trees(model: nn.Module, errors: bool = False) -> Iterator[Callable[[], Columns]]:
    """Observe the trees of the layers that run inside the block, their errors E only if asked to.

    The function that it yields returns means over the layers of one forward pass.
    """
    found: dict[str, list[Tensor]] = defaultdict(list)  # (B,) for every call of a layer

    def keep(inputs: LayerInputs, screened: Screened) -> None:
        values = {"leaf_ratio": screened.tree.leaf_ratio}  # (B, heads, queries)
        if errors:
            recording = Recording()
            recording(inputs, screened)
            values["attention_kl"] = recording[inputs.layer].errors[0]
        for name, value in values.items():
            found[name].append(value.double().flatten(1).mean(1))

    with observe(model, keep):
        yield lambda: {name: torch.stack(parts).mean(0) for name, parts in found.items()}


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name; raise ValueError if it is not in `DTYPES`."""
    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; pass one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def _sum(columns: Columns, labels: Sequence[int | None]) -> dict[str, float]:
    labelled = sum(label is not None for label in labels)
    sums = {name: values.sum().item() for name, values in columns.items()}
    return {"images": len(labels), "labelled": labelled, **sums}


def _check_labels(labels: Sequence[int | None], classes: int) -> None:
    beyond = next((label for label in labels if label is not None and label >= classes), None)
    if beyond is not None:
        raise ValueError(
            f"an image has class {beyond}, and the model {classes} classes; "
            "pass the model of these images, or labels in its order"
        )
