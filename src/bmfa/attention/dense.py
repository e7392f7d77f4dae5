"""Exact attention: the dense path of "auto"."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.call import Call, check_finite_scores, zero_invalid
from bmfa.attention.kernels import native
from bmfa.checks import has_values, is_compiling

# Backends of SDPA by their speed on Hopper and later; torch takes the first that supports a call.
HOPPER_PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Floating-point operations from which cuDNN saves more than the 0.03 ms of host time that selecting it
# takes: 3e10 operations take dense attention about 0.1 ms on an H200, and cuDNN saves a third of that.
# Measured by `bmfa bench attention --device cuda`, dense-flash and dense-cudnn at 4,096 tokens.
LEAST_CUDNN_OPERATIONS = 3e10


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    call: Call,
    backend: str = "dense",
    in_graph: bool = False,
) -> Tensor:
    """(B, H, Q, e) exact attention.

    Args:
        q: Queries, as in `Call`.
        k: Keys.
        v: Values.
        valid: Spatial tokens that exist.
        call: Description of the call.
        backend: "native" for the native kernel, "dense" for `scaled_dot_product_attention`.
        in_graph: True if the launches are recorded in a graph, where host time does not count.

    Raises:
        ValueError: If q or k on a CPU hold NaN or infinity, or if scores overflow.
    """
    if backend == "native":
        return native.exact_attention(
            q, k, v, scale=call.scale, tau=call.tau, prefix=call.prefix, valid=valid,
            mask_queries=call.self_attention,
        )  # fmt: skip
    options: dict[str, Any] = {"scale": call.factor}
    if q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    if valid is not None:
        q, k, v = zero_invalid(q, k, v, valid, call)
        mask = call.key_mask(valid)
        assert mask is not None
        options["attn_mask"] = mask[:, None, None, :]
    if q.numel() == 0:  # fused CUDA kernels do not support an empty batch
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, **options)
    if valid is None and _cudnn_must_be_selected(q, k, v, in_graph):
        with sdpa_kernel(HOPPER_PRIORITY, set_priority=True):
            return scaled_dot_product_attention(q, k, v, **options)
    output = scaled_dot_product_attention(q, k, v, **options)
    if not q.is_cuda and has_values(q):
        check_finite_scores(q, k, call.scale)
    return output


def attention_operations(shape: Sequence[int], keys: int | None = None) -> float:
    """Floating-point operations of dense attention on queries of shape (B, H, Q, d) and as many keys,
    or the number of keys."""
    batch, heads, queries, dim = shape
    return 4.0 * batch * heads * dim * queries * (queries if keys is None else keys)


def _cudnn_must_be_selected(q: Tensor, k: Tensor, v: Tensor, in_graph: bool) -> bool:
    """True if cuDNN is the fastest backend of SDPA and torch would take another one."""
    if not q.is_cuda or is_compiling():
        return False
    if torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    if not in_graph and attention_operations(q.shape, k.shape[2]) < LEAST_CUDNN_OPERATIONS:
        return False
    own_choice: int = torch._fused_sdp_choice(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return own_choice != SDPBackend.CUDNN_ATTENTION.value
