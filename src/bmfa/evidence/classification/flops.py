"""Floating-point operations of a model on one picture, two for every multiply-add."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bmfa.attention.result import Screened
from bmfa.evidence.model_methods import Layers, applied
from bmfa.models import LoadedModel
from bmfa.models.reducing import final_tokens
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.trees.rules import Rule

COUNTING = (
    "torch's flop counter on one picture, 2 flops for a multiply-add, matrix products and "
    "convolutions alone; a screened layer counts each query's products with prefix keys, with the "
    "spatial keys its rule reads (all of them, or the leaves where it reads no score), and with the "
    "values of prefix and leaves, whatever a backend computes beside these"
)


@dataclass(frozen=True)
class Cost:
    """What one picture costs, and the tokens behind the last block where they are reduced."""

    flops: int
    final_tokens: int | None = None


def costs(
    model: LoadedModel, pixels: Tensor, methods: Sequence[str], layers: Layers, seed: int = 0
) -> dict[str, Cost]:
    """The cost of every method on a picture (1, 3, height, width).

    Counted on a copy of the model in float32 on the processor, so that no fused kernel hides its
    products and the same picture costs the same everywhere.
    """
    plain = replace(model, model=deepcopy(model.model).to("cpu", torch.float32).eval())
    pixels = pixels.to("cpu", torch.float32)
    found = {}
    with torch.inference_mode():
        whole = _count(plain, pixels)
        for name in methods:
            with applied(plain.model, name, layers, seed) as method:
                if method.rule is not None:
                    found[name] = Cost(whole + _saved(plain, pixels, method.rule))
                elif method.policy is not None:
                    found[name] = Cost(_count(plain, pixels), final_tokens(plain.model))
                else:
                    found[name] = Cost(whole)
    return found


def attention_flops(
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Scores and weighted values of (B, heads, tokens, d): the formula of every fused attention."""
    batch, heads, queries, width = query_shape
    return 2 * batch * heads * queries * key_shape[2] * (width + value_shape[3])


def tree_flops(call: LayerInputs, screened: Screened, rule: Rule) -> int:
    """A screened layer, see COUNTING."""
    batch, heads, queries, width = call.q.shape
    leaves = int(screened.tree.leaf_count.sum())
    trees = batch * heads * queries
    spatial = leaves if rule.needs == "nothing" else trees * call.grid.size
    return 2 * width * (2 * trees * call.prefix + spatial + leaves)


# Torch has formulas for the fused attention of GPUs; this is the one of processors.
_FORMULAS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops
}


def _count(model: LoadedModel, pixels: Tensor) -> int:
    with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
        model.logits(pixels)
    return int(counter.get_total_flops())


@dataclass(eq=False)
class _Difference:
    """Hears the screened layers, and adds what their trees cost more than full attention."""

    rule: Rule
    flops: int = 0

    def __call__(self, call: LayerInputs, screened: Screened) -> None:
        full = attention_flops(call.q.shape, call.k.shape, call.k.shape)
        self.flops += tree_flops(call, screened, self.rule) - full


def _saved(model: LoadedModel, pixels: Tensor, rule: Rule) -> int:
    """What screening adds to the flops of the full model; less than 0 where it saves."""
    difference = _Difference(rule)
    with observe(model.model, difference):
        model.logits(pixels)
    return difference.flops
