"""Exact attention: the dense path of "auto", and the queries that a certificate or an audit asks for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention.inputs import AttentionInputs, check_finite_scores
from bmfa.attention.kernels import eager, native
from bmfa.attention.kernels.eager.certificate import UNIT, attention_rounding, score_rounding
from bmfa.attention.result import Audit, Computed
from bmfa.checks import has_values

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


def dense_attention(inputs: AttentionInputs, in_graph: bool = False) -> Tensor:
    """(B, H, Q, e) attention by `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        inputs: Inputs of the call.
        in_graph: True if the launches are recorded in a graph, where host time does not count.

    Raises:
        ValueError: If q or k on a CPU hold NaN or infinity, or if scores overflow.
    """
    q, k, v = inputs.zero_invalid()
    valid = inputs.valid_keys
    mask = None if valid is None else valid[:, None, None, :]
    options: dict[str, Any] = {"scale": inputs.scale / inputs.tau, "enable_gqa": inputs.shares_keys}
    if q.numel() == 0:  # fused CUDA kernels do not support an empty batch
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    if mask is None and _cudnn_must_be_selected(q, k, v, in_graph):
        with sdpa_kernel(HOPPER_PRIORITY, set_priority=True):
            return scaled_dot_product_attention(q, k, v, **options)
    output = scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    if not q.is_cuda and has_values(q):
        check_finite_scores(q, k, inputs.scale)
    return output


def native_dense_attention(inputs: AttentionInputs) -> Tensor:
    """(B, H, Q, e) attention by the native kernel.

    Raises:
        ValueError: If q or k hold NaN or infinity, or if scores overflow.
    """
    return native.exact_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        scale=inputs.scale,
        tau=inputs.tau,
        prefix=inputs.prefix,
        valid=inputs.valid,
        mask_queries=inputs.self_attention,
    )


def attention_operations(shape: Sequence[int], keys: int | None = None) -> float:
    """Floating-point operations of dense attention on queries of shape (B, H, Q, d) and as many keys,
    or the number of keys."""
    batch, heads, queries, dim = shape
    return 4.0 * batch * heads * dim * queries * (queries if keys is None else keys)


def _cudnn_must_be_selected(q: Tensor, k: Tensor, v: Tensor, in_graph: bool) -> bool:
    """True if cuDNN is the fastest backend of SDPA and torch would take another one."""
    if not q.is_cuda or torch.compiler.is_compiling():
        return False
    if torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    if not in_graph and attention_operations(q.shape, k.shape[2]) < LEAST_CUDNN_OPERATIONS:
        return False
    own_choice: int = torch._fused_sdp_choice(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return own_choice != SDPBackend.CUDNN_ATTENTION.value


def exact_attention(
    inputs: AttentionInputs, queries: Tensor | slice, *, double: bool = False
) -> Tensor:
    """(B, H, n, e) exact attention of some queries, in float64 or, if the inputs allow, float32."""
    q, k, v = inputs.flat_double if double else inputs.flat
    batch, heads = inputs.q.shape[:2]
    valid = inputs.valid_keys
    if valid is not None:  # (B times key heads, prefix + N)
        valid = valid.expand(batch, -1)
        valid = valid.repeat_interleave(inputs.k.shape[1], 0)
    some = q[:, queries]  # (B H, n, d)
    # The queries of all heads that share keys, one after the other.
    shared = some.reshape(len(k), inputs.share * some.shape[1], q.shape[-1])
    output = eager.dense_attention(shared, k, v, scale=inputs.scale, tau=inputs.tau, valid=valid)
    return output.reshape(batch, heads, some.shape[1], v.shape[-1])


def apply_fallback(inputs: AttentionInputs, computed: Computed, fallback: float) -> None:
    """Recompute exactly the queries whose certificate is not at most `fallback` * |output|.

    They are computed in float64, and their certificate becomes the bound of that and of the rounding to
    the dtype of the output; their bound on E becomes 0.

    Args:
        inputs: Inputs of the call.
        computed: Its output, certificate and energy_bound, which are changed.
        fallback: Largest accepted relative error.
    """
    output, certificate = computed.output, computed.certificate
    assert certificate is not None and computed.energy_bound is not None
    size = torch.linalg.vector_norm(output.detach(), dim=-1, dtype=torch.float64)
    above = ~(certificate <= fallback * size)  # NaN counts as above
    if (valid := inputs.valid_queries) is not None:
        above = above & valid.unsqueeze(1)
    computed.recomputed = above
    if not bool(above.any()):
        return
    queries = above.flatten(0, 1).any(0).nonzero().squeeze(1)  # recomputed in all heads
    exact = exact_attention(inputs, queries, double=True)
    rounded = exact.to(output.dtype)
    bound = exact_bound(inputs, exact.detach(), rounded.detach(), queries)
    some = above[:, :, queries]
    mixed = rounded.where(some.unsqueeze(-1), output[:, :, queries])
    computed.output = output.index_copy(2, queries, mixed)
    bound = bound.where(some, certificate[:, :, queries])
    computed.certificate = certificate.index_copy(2, queries, bound)
    computed.energy_bound = computed.energy_bound.where(~above, 0.0)


def exact_bound(
    inputs: AttentionInputs,
    computed: Tensor,
    output: Tensor,
    queries: Tensor | slice,
    key_terms: int = 1,
) -> Tensor:
    """(B, H, n) upper bound on |output - a|, from an attention a that was computed in float64.

    Args:
        inputs: Inputs of the call.
        computed: (B, H, n, e) the attention in float64: exact attention, or that of trees.
        output: (B, H, n, e), the output to bound.
        queries: The n queries.
        key_terms: Largest number of keys whose mean is a key of a.
    """
    q, k, v = (x.detach() for x in inputs.flat_double)
    lead = inputs.q.shape[:2]
    largest_key, largest_value, diameter = (
        x.repeat_interleave(inputs.share, 0)
        for x in (
            _norm(k).amax(-1, keepdim=True),
            _norm(v).amax(-1, keepdim=True),
            value_diameter(inputs, v),
        )
    )  # (B H, 1)
    largest_score = _norm(q[:, queries]) * largest_key  # (B H, n)
    score = score_rounding(q.shape[-1] + key_terms, abs(inputs.scale / inputs.tau) * largest_score)
    rounding = attention_rounding(score, k.shape[1], diameter, largest_value)
    distance = _norm(output.double() - computed)
    return (distance + rounding.view(*lead, -1)) * (1 + 1000 * UNIT)


def value_diameter(inputs: AttentionInputs, v: Tensor) -> Tensor:
    """(G, 1) upper bound on the diameter of the valid values (G, prefix + N, e) in float64, where G is
    B times the number of heads."""
    mask = torch.ones(1, 1, dtype=torch.bool, device=v.device)
    if inputs.valid_keys is not None:
        mask = inputs.valid_keys
        mask = mask.expand(len(inputs.q), -1).repeat_interleave(len(v) // max(1, len(inputs.q)), 0)
    center = v.where(mask.unsqueeze(-1), 0.0).sum(1, keepdim=True) / v.shape[1]
    radius = _norm(v - center).where(mask, 0.0).amax(-1, keepdim=True)
    return 2 * radius + 4 * UNIT * (v.shape[-1] + 8) * _norm(v).amax(-1, keepdim=True)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm


def audit_output(inputs: AttentionInputs, output: Tensor, fraction: float) -> Audit | None:
    """Measure the relative error at a random fraction of the query positions, at least one.

    Invalid queries do not count; None if no query is left.
    """
    total = inputs.q.shape[2]
    count = max(1, round(fraction * total))
    with torch.no_grad():
        queries = torch.randperm(total, device=output.device)[:count]
        exact = exact_attention(inputs, queries).double()
        errors = (output[:, :, queries].double() - exact).norm(dim=-1) / exact.norm(dim=-1)
        if (valid := inputs.valid_queries) is not None:
            errors = errors[valid[:, None, queries].expand_as(errors)]
    if errors.numel() == 0:
        return None
    ordered = errors.nan_to_num(0.0).flatten().sort().values  # 0 / 0 where both outputs are 0
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return Audit(len(ordered), float(ordered.mean()), float(p95), float(ordered[-1]))
