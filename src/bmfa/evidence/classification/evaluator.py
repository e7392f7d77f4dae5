"""A model under evaluation: apply methods to it one after another and sum what they give."""

import os
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from bmfa.environment import amx_refused
from bmfa.evidence.methods import FULL
from bmfa.evidence.model_methods import Layers, applied, count_leaves, parse
from bmfa.evidence.runner.batches import Batch
from bmfa.evidence.runner.totals import ROUNDING, Reference, Sums, check_labels, check_outputs
from bmfa.models import LoadedModel, unpatch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Total:
    """Sums over the images of one method."""

    images: int = 0
    labelled: int = 0
    agreeing: int = 0
    top1: int = 0
    top5: int = 0
    output_kl: float = 0.0
    leaf_ratio: float = 0.0

    def add(self, reference: Reference, logits: Tensor, leaf_ratio: float) -> None:
        """Add the (B, classes) outputs of some images and the sum of their leaf ratios."""
        self.images += len(reference)
        self.labelled += reference.labelled
        self.agreeing += reference.count_agreeing(logits)
        self.top1 += reference.count_correct(logits)
        self.top5 += reference.count_top_k(logits, 5)
        self.output_kl += reference.sum_output_kl(logits)
        self.leaf_ratio += leaf_ratio

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the least and the largest possible value of every sum for `images` images."""
        return {
            "labelled": (0, self.images),
            "agreeing": (0, self.images),
            "top5": (0, self.labelled),
            "top1": (0, self.top5),
            "output_kl": (-ROUNDING * self.images, sys.float_info.max),
            "leaf_ratio": (0, (1 + ROUNDING) * self.images),
        }

    def percent(self, correct: int) -> float | None:
        """Return a count in percent of the labelled images; None if none has a label."""
        return 100 * correct / self.labelled if self.labelled else None


class Evaluator:
    """A model on its device and in its dtype, to which methods are applied one after another."""

    def __init__(
        self,
        model: LoadedModel,
        layers: Layers,
        *,
        seed: int = 0,
        device: str = "cpu",
        amp: bool = False,
        dtype: str | None = None,
    ) -> None:
        self.layers, self.seed, self.amp = layers, seed, amp
        self.device, self.dtype = torch.device(device), _parse_dtype(dtype, amp)
        _check_bfloat16(self.device, amp or dtype == "bfloat16")
        unpatch(model.model)
        if self.dtype is not None:
            # The caller's model keeps its own dtype.
            model = replace(model, model=deepcopy(model.model).to(self.device, self.dtype))
        model.model.to(self.device)
        self.model = model

    def logits(self, pixels: Tensor) -> Tensor:
        """Return the (B, classes) outputs of the model as it is patched now."""
        half = torch.bfloat16 if self.device.type == "cpu" else torch.float16
        with torch.autocast(self.device.type, dtype=half, enabled=self.amp):
            return self.model.logits(pixels)

    def load(self, batch: Batch) -> Tensor:
        """Return the (B, 3, H, W) pixels of a batch on the device, in the dtype of the model."""
        return batch.to(self.device, self.dtype)

    def measure_all(self, batch: Batch, methods: Sequence[str]) -> Sums:
        """Measure every method on one batch."""
        pixels = self.load(batch)
        outputs = check_outputs(self.logits(pixels).float(), self.model.name)
        check_labels(batch.labels, outputs.shape[-1])
        reference = Reference(pixels, batch.indices, batch.labels, outputs)
        full = Total()
        full.add(reference, reference.full, 0.0)
        totals = {name: full if name == FULL else self.measure(reference, name) for name in methods}
        return {name: asdict(total) for name, total in totals.items()}

    def measure(self, reference: Reference, name: str) -> Total:
        """Measure one method; random rules draw for each image alone, independent of its batch."""
        random, total = parse(name).random, Total()
        for part in reference.single() if random else [reference]:
            seed = self.seed + (part.indices[0] if random else 0)
            with (
                applied(self.model.model, name, self.layers, seed),
                count_leaves(self.model.model) as leaves,
            ):
                logits = check_outputs(self.logits(part.pixels).float(), name)
            total.add(part, logits, leaves.sum)
        return total


def _check_bfloat16(device: torch.device, bfloat16: bool) -> None:
    """Raise if oneDNN would kill the process: it uses an AMX that is advertised but not granted."""
    unsafe = bfloat16 and device.type == "cpu" and "ONEDNN_MAX_CPU_ISA" not in os.environ
    if unsafe and amx_refused():
        raise ValueError(
            "bfloat16 products are unsafe here: AMX is advertised but refused; "
            "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
        )


def _parse_dtype(name: str | None, amp: bool) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; pass one of {', '.join(DTYPES)}")
    if amp and name != "float32":
        raise ValueError(f"amp and dtype {name} are given; pass one of them")
    return DTYPES[name]
