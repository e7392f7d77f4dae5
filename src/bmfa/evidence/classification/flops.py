"""Floating-point operations of a model on one image, two for every multiply-add."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bmfa.attention.result import Screened
from bmfa.evidence.model_methods import Layers, applied
from bmfa.models import LoadedModel
from bmfa.models.flops import attention_flops, count_flops
from bmfa.models.reducing import final_tokens
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.trees.rules import Rule

# The setting "gflops" of a record.
COUNTING = (
    "torch's flop counter on one image, 2 flops for a multiply-add, matrix products and "
    "convolutions alone; a screened layer counts each query's products with prefix keys, with the "
    "spatial keys its rule reads (all of them, or the leaves where it reads no score), and with the "
    "values of prefix and leaves, whatever a backend computes beside these"
)


@dataclass(frozen=True)
class Cost:
    """Operations for one image, and the tokens after the last block if they are reduced."""

    flops: int
    final_tokens: int | None = None


def costs(
    model: LoadedModel, pixels: Tensor, methods: Sequence[str], layers: Layers, seed: int = 0
) -> dict[str, Cost]:
    """Count the operations of every method on one image.

    A copy of the model in float32 on the CPU is counted, so that no fused kernel hides its products
    and the counts are the same on every device.

    Args:
        model: The model.
        pixels: (1, 3, H, W) preprocessed image.
        methods: `full`, names of rules and names of reductions.
        layers: Layers that rules screen.
        seed: Seed of random methods.

    Returns:
        The cost by method.
    """
    counted = replace(model, model=deepcopy(model.model).to("cpu", torch.float32).eval())
    pixels = pixels.to("cpu", torch.float32)
    found = {}
    count = partial(count_flops, counted.model, pixels, counted.options)
    with torch.inference_mode():
        full = count()
        for name in methods:
            with applied(counted.model, name, layers, seed) as method:
                if method.rule is not None:
                    found[name] = Cost(full + _added_flops(counted, pixels, method.rule))
                elif method.policy is not None:
                    found[name] = Cost(
                        count_flops(counted.model, pixels, counted.options),
                        final_tokens(counted.model),
                    )
                else:
                    found[name] = Cost(full)
    return found


def tree_flops(inputs: LayerInputs, screened: Screened, rule: Rule) -> int:
    """Return the operations of a screened layer as `COUNTING` defines them."""
    batch, heads, queries, width = inputs.q.shape
    leaves = int(screened.tree.leaf_count.sum())
    trees = batch * heads * queries
    spatial = leaves if rule.needs == "nothing" else trees * inputs.grid.size
    return 2 * width * (2 * trees * inputs.prefix + spatial + leaves)


@dataclass(eq=False)
class _AddedFlops:
    """An observer that adds the operations of screened layers minus those of full attention."""

    rule: Rule
    flops: int = 0

    def __call__(self, inputs: LayerInputs, screened: Screened) -> None:
        full = attention_flops(inputs.q.shape, inputs.k.shape, inputs.k.shape)
        self.flops += tree_flops(inputs, screened, self.rule) - full


def _added_flops(model: LoadedModel, pixels: Tensor, rule: Rule) -> int:
    """Return what screening adds to the operations of the full model, usually negative."""
    difference = _AddedFlops(rule)
    with observe(model.model, difference):
        model.logits(pixels)
    return difference.flops
