"""Proportional attention and token merging in torch operations, on any device and with gradients."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, normalize, scaled_dot_product_attention

from bmfa.merging.operation import assign_bipartite, match_bipartite, pool


def proportional_attention(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, *, scale: float, prefix: int, mass: bool
) -> tuple[Tensor, Tensor | None]:
    """See `bmfa.merging.dispatch.proportional_attention`; the mass has one part."""
    bias = size.log()[:, None, None]  # (B, 1, 1, T)
    if not mass and q.dtype in (torch.float32, torch.float64):
        # SDPA takes the bias in the dtype of q; half precision would round it.
        return scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=scale), None
    logits = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    weights = (logits + bias).softmax(-1)  # (B, H, T, T)
    output = weights.to(v.dtype) @ v
    if not mass:
        return output, None
    reading = weights.sum(1).float()[:, : prefix or None]  # (B, queries, T)
    return output, reading.mean(1, keepdim=True)


def merge_tokens(
    x: Tensor, size: Tensor, keys: Tensor | None, weight: Tensor | None, r: int, *, prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `bmfa.merging.dispatch.merge_tokens`."""
    features = layer_norm(x, x.shape[-1:]) if keys is None else unit_mean_keys(keys)
    total = None if weight is None else weight.sum(1)
    source, destination = match_bipartite(features, total, r, prefix=prefix)
    assignment = assign_bipartite(source, destination, x.shape[1], prefix)
    merged, sizes = pool(x, size, assignment, x.shape[1] - source.shape[1])
    return merged, sizes, assignment


def unit_mean_keys(k: Tensor) -> Tensor:
    """Return (B, T, d) in float32 or wider: the mean over heads of keys (B, H, T, d), normalised."""
    return normalize(k.mean(1, dtype=torch.promote_types(k.dtype, torch.float32)), dim=-1)
