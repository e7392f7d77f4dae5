"""Quantiles of tensors of any size."""

import torch
from torch import Tensor


def quantile(values: Tensor, q: float | Tensor) -> Tensor:
    """Linearly interpolated quantiles over the last dimension.

    The same as `torch.quantile`, which refuses tensors of more than 2^24 elements.

    Args:
        values: (..., n) floating-point values, n >= 1.
        q: Quantile in [0, 1], or a (k,) tensor of quantiles.

    Returns:
        (...) quantiles of the dtype of `values`, or (..., k) for a tensor `q`.

    Example:
        >>> import torch
        >>> quantile(torch.tensor([4.0, 1.0, 2.0, 3.0]), 0.5)
        tensor(2.5000)
    """
    ordered = values.sort(-1).values
    rank = torch.as_tensor(q, dtype=torch.float64, device=values.device) * (values.shape[-1] - 1)
    low, high = rank.floor().long(), rank.ceil().long()
    return torch.lerp(ordered[..., low], ordered[..., high], (rank - low).to(values.dtype))
