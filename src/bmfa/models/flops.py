"""Floating-point operations of a model by torch's counter, two for every multiply-add."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def attention_flops(
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Return 2 B H Q K (d + e), the formula of fused attention on (B, H, Q, d) and (B, H, K, e)."""
    batch, heads, queries, width = query_shape
    return 2 * batch * heads * queries * key_shape[2] * (width + value_shape[3])


# The flop counter of torch has no formula for the fused attention of CPUs.
_FORMULAS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops
}


def count_flops(model: nn.Module, pixels: Tensor, options: Mapping[str, Any] | None = None) -> int:
    """Count the matrix products and convolutions of one call.

    Args:
        model: The model. In float32 on the CPU no fused kernel hides its products, so the counts are the
            same on every device.
        pixels: (B, 3, height, width) images.
        options: Keyword arguments of the call.

    Returns:
        The number of operations.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.load_model("embedded").model
        >>> count_flops(model, torch.zeros(1, 3, 112, 112))
        516580032
    """
    from torch.utils.flop_counter import FlopCounterMode  # loads triton

    with (
        torch.inference_mode(),
        FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter,
    ):
        model(pixels, **(options or {}))
    return int(counter.get_total_flops())
