"""Attention by a Monarch matrix, after MonarchAttention (Yaras et al., arXiv 2505.18698): a baseline.

Softmax is the row-stochastic matrix A that maximises sum A s + H(A), with scores s and the entropy H.
On an m x b grid a Monarch matrix is

    A[(l, j), (k, i)] = L_j[l, k] R_k[j, i]

for a query in row l and column j and a key in row k and column i, with row-stochastic L_j (m x m) and
R_k (b x b). The maximum alternates between the factors; each step has a closed form:

    R_k[j, :] = softmax_i(c qbar_kj . k_ki),       qbar_kj = sum_l L_j[l, k] q_lj / sum_l L_j[l, k]
    L_j[l, :] = softmax_k(c q_lj . ktilde_kj + H(R_k[j, :])),       ktilde_kj = sum_i R_k[j, i] k_ki

starting from L_j = 1, so qbar_kj = q_kj. Prefix keys are further columns of L, and prefix queries are
exact. The cost is N (m + b) scores for each step.
"""

import torch
from torch import Tensor

from bmfa.evidence.bench.topk import at_least_float32, exact_rows
from bmfa.grid import Grid

# Least total weight of a row of the grid by which mean queries are divided: float32 is exact to 2^-24
# of the weight of all queries, and rows with less weight do not contribute to any output.
LEAST_WEIGHT = 2.0**-24


def monarch_attention(
    q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, prefix: int, steps: int
) -> Tensor:
    """Compute attention by a Monarch matrix in torch operations.

    Args:
        q, k, v: (B, H, prefix + N, d), spatial tokens in raster order.
        grid: Grid of the N spatial tokens.
        prefix: Number of tokens before the grid.
        steps: Number of updates of both factors, at least 1.

    Returns:
        (B, H, prefix + N, d) output in the dtype of q.
    """
    left, _, values = monarch_factors(q, k, v, grid=grid, prefix=prefix, steps=steps)
    rows = grid.height
    spatial = left[..., :rows] @ values.transpose(2, 3)
    spatial = spatial + left[..., rows:] @ v[:, :, None, :prefix]  # (B, H, b, m, d)
    output = spatial.transpose(2, 3).flatten(2, 3)
    return torch.cat((exact_rows(q[:, :, :prefix], k, v), output), 2)


def monarch_factors(
    q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, prefix: int, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return L (B, H, b, m, m + prefix), R (B, H, m, b, b) and R v (B, H, m, b, d)."""
    scale = q.shape[-1] ** -0.5
    shape = (*q.shape[:2], grid.height, grid.width, q.shape[-1])
    queries, keys, values = (x[:, :, prefix:].reshape(shape) for x in (q, k, v))
    columns = queries.transpose(2, 3)  # (B, H, b, m, d)
    prefix_logits = at_least_float32(columns @ k[:, :, None, :prefix].transpose(3, 4)) * scale
    means = queries
    for step in range(steps):
        logits = at_least_float32(means @ keys.transpose(3, 4)) * scale  # (B, H, m, b, b)
        right = logits.softmax(-1)
        entropy = logits.logsumexp(-1) - (right * logits).sum(-1)  # (B, H, m, b)
        right = right.to(v.dtype)
        mean_keys = (right @ keys).transpose(2, 3)  # (B, H, b, m, d)
        row_logits = at_least_float32(columns @ mean_keys.transpose(3, 4)) * scale
        row_logits = row_logits + entropy.transpose(2, 3).unsqueeze(3)  # (B, H, b, m, m)
        left = torch.cat((row_logits, prefix_logits), -1).softmax(-1)
        if step + 1 < steps:
            of_rows = left[..., : grid.height].transpose(3, 4)  # (B, H, b, k, l)
            weight = of_rows.sum(-1, keepdim=True).clamp(min=LEAST_WEIGHT)
            means = ((of_rows / weight).to(q.dtype) @ columns).transpose(2, 3)
    return left.to(v.dtype), right, right @ values
