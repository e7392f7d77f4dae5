"""Floating-point operations of a model on one image, two for every multiply-add."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from bmfa.attention.result import Screened
from bmfa.evidence.model_methods import Layers, applied
from bmfa.models import LoadedModel
from bmfa.models.flops import attention_flops, count_flops
from bmfa.models.reducing import final_tokens
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.records import Row
from bmfa.trees.rules import Rule

# The setting "gflops" of a record.
COUNTING = (
    "torch's flop counter on one image, 2 flops for a multiply-add, matrix products and "
    "convolutions alone; a screened layer counts each query's products with prefix keys, with the "
    "spatial keys its rule reads (all of them, or the leaves where it reads no score), and with the "
    "values of prefix and leaves, whatever a backend computes beside these"
)


def costs(
    model: LoadedModel, pixels: Tensor, methods: Sequence[str], layers: Layers, seed: int = 0
) -> dict[str, Row]:
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
        For each method `gflops`, and `final_tokens`: the tokens after the last block if reduced.
    """
    counted = replace(model, model=deepcopy(model.model).to("cpu", torch.float32).eval())
    pixels = pixels.to("cpu", torch.float32)
    found: dict[str, Row] = {}
    with torch.inference_mode():
        full = count_flops(counted.model, pixels, counted.options)
        for name in methods:
            flops, tokens = full, None
            with applied(counted.model, name, layers, seed) as method:
                if method.rule is not None:
                    flops += _added_flops(counted, pixels, method.rule)
                elif method.policy is not None:
                    flops = count_flops(counted.model, pixels, counted.options)
                    tokens = final_tokens(counted.model)
            # Tiles have as many operations as the image needs, which are not counted.
            known = method.plan is None or method.policy is not None
            found[name] = {"final_tokens": tokens, "gflops": flops / 1e9 if known else None}
    return found


def tree_flops(inputs: LayerInputs, screened: Screened, rule: Rule) -> int:
    """Return the operations of a screened layer as `COUNTING` defines them."""
    batch, heads, queries, width = inputs.q.shape
    leaves = int(screened.tree.leaf_count.sum())
    trees = batch * heads * queries
    spatial = leaves if rule.needs == "nothing" else trees * inputs.grid.size
    return 2 * width * (2 * trees * inputs.prefix + spatial + leaves)


def _added_flops(model: LoadedModel, pixels: Tensor, rule: Rule) -> int:
    """Return the operations of screened layers minus those of full attention, usually negative."""
    added = []

    def count(inputs: LayerInputs, screened: Screened) -> None:
        full = attention_flops(inputs.q.shape, inputs.k.shape, inputs.k.shape)
        added.append(tree_flops(inputs, screened, rule) - full)

    with observe(model.model, count):
        model.logits(pixels)
    return sum(added)
