"""Select the backend of proportional attention and token merging, or explain why one cannot run."""

from types import ModuleType
from typing import Literal, get_args

from torch import Tensor

from bmfa.merging.kernels import eager

Backend = Literal["auto", "eager", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def proportional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor,
    *,
    scale: float,
    prefix: int,
    mass: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax(q k^T scale + log(size)) v, and on request the attention each token receives.

    A key that stands for n tokens counts n times, as if it were repeated.

    Args:
        q: (B, H, T, d) queries; k and v have the same shape and dtype, with any strides.
        k: keys.
        v: values.
        size: (B, T) number of original tokens that each key stands for.
        scale: factor of the scores.
        prefix: number of leading tokens that are not spatial.
        mass: True to return the mass as well.
        backend: "auto" selects Triton on CUDA if it supports the inputs, and eager otherwise.

    Returns:
        The output (B, H, T, d), and the mass or None. The mass is (B, parts, T) float32; summed
        over its parts it is the attention on each key, averaged over the prefix queries (over all
        queries if prefix is 0) and summed over heads. Equal inputs give equal bits.

    Raises:
        ValueError: shapes do not match, or `backend="triton"` cannot run, with the reason.
        TypeError: q, k and v differ in dtype.

    Example:
        >>> import torch
        >>> q = k = v = torch.ones(1, 2, 5, 8)
        >>> size = torch.tensor([[1.0, 1.0, 2.0, 1.0, 5.0]])
        >>> _, mass = proportional_attention(q, k, v, size, scale=1.0, prefix=1, mass=True)
        >>> mass.sum(1) / 2  # the mean over two heads
        tensor([[0.1000, 0.1000, 0.2000, 0.1000, 0.5000]])
    """
    if q.dim() != 4 or q.shape[2] == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; pass (B, H, T, d) with T >= 1")
    _check_shapes((q.shape[0], q.shape[2]), prefix, size)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != q.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; pass {tuple(q.shape)}, the shape of q"
            )
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and q is {q.dtype}; pass q, k and v alike")
    kernels = _select(backend, q, k, v, size)
    output, masses = kernels.proportional_attention(
        q, k, v, size, scale=scale, prefix=prefix, mass=mass
    )
    return output, masses


def merge_tokens(
    x: Tensor,
    size: Tensor,
    keys: Tensor | None,
    weight: Tensor | None,
    r: int,
    *,
    prefix: int,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the r cheapest pairs of tokens by bipartite matching.

    Each token a at an even position chooses the token b at an odd position with the least

        cost(a, b) = (weight_a + weight_b) |f_a - f_b|^2,

    and the r cheapest choices merge into averages weighted by size. The lowest position wins among
    equal costs. Prefix tokens are not matched. The new order is the prefix, the remaining even
    positions, then the odd positions.

    Args:
        x: (B, T, C) tokens, prefix tokens first.
        size: (B, T) number of original tokens that each token stands for.
        keys: (B, H, T, d) whose normalised means over heads are the features f; None takes the
            layer norm of x.
        weight: (B, parts, T), summed over its parts, as `proportional_attention` returns the mass;
            None leaves the factor out of the cost.
        r: number of pairs, at most (T - prefix) // 2.
        prefix: number of leading tokens that are not spatial.
        backend: "auto" selects Triton on CUDA if it supports the inputs, and eager otherwise.

    Returns:
        Tokens (B, T - r, C), sizes (B, T - r) float32, and the assignment (B, T) int32: the new
        position of every old token.

    Raises:
        ValueError: shapes do not match, r is out of range, or `backend="triton"` cannot run, with
            the reason.

    Example:
        >>> import torch
        >>> x, keys = torch.randn(1, 17, 8), torch.randn(1, 2, 17, 4)
        >>> merged, size, _ = merge_tokens(x, torch.ones(1, 17), keys, None, 4, prefix=1)
        >>> merged.shape, size.sum().item()
        (torch.Size([1, 13, 8]), 17.0)
    """
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; pass tokens as (B, T, C)")
    batch, tokens, _ = x.shape
    _check_shapes((batch, tokens), prefix, size)
    if keys is not None and (keys.dim() != 4 or keys.shape[::2] != (batch, tokens)):
        raise ValueError(
            f"keys have shape {tuple(keys.shape)}; pass ({batch}, H, {tokens}, d), or None"
        )
    if weight is not None and (weight.dim() != 3 or weight.shape[::2] != (batch, tokens)):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; pass ({batch}, parts, {tokens}), or None"
        )
    most = (tokens - prefix) // 2
    if not 0 <= r <= most:
        raise ValueError(
            f"r is {r}; of {tokens} tokens, {prefix} of them prefix tokens, merge from 0 to {most}"
        )
    kernels = _select(backend, x, size, keys, weight)
    merged, sizes, assignment = kernels.merge_tokens(x, size, keys, weight, r, prefix=prefix)
    return merged, sizes, assignment


def unit_mean_keys(k: Tensor, backend: Backend = "auto") -> Tensor:
    """Average keys (B, H, T, d) over heads and normalise each to unit length: (B, T, d).

    The inner product of two of them is the cosine that ToMe and others match tokens by. The eager
    backend returns float32 or wider, Triton the dtype of the keys.
    """
    features: Tensor = _select(backend, k).unit_mean_keys(k)
    return features


def check_backend(backend: object) -> Backend:
    """Return the name of a backend, or raise ValueError with the names that exist."""
    for name in BACKENDS:
        if backend == name:
            return name
    raise ValueError(f"backend is {backend!r}; pass one of {', '.join(BACKENDS)}")


def _select(backend: Backend, first: Tensor, *others: Tensor | None) -> ModuleType:
    """Return the module that computes with these inputs: "auto" tries Triton on CUDA only."""
    if backend == "eager" or (backend == "auto" and not first.is_cuda):
        return eager
    from bmfa.merging.kernels.triton import operators

    if (reason := operators.unsupported_reason(first, *others)) is None:
        return operators
    if backend == "triton":
        raise ValueError(f"backend='triton' cannot run: {reason}; pass backend='auto' or 'eager'")
    return eager


def _check_shapes(batch_and_tokens: tuple[int, int], prefix: int, size: Tensor) -> None:
    if size.shape != batch_and_tokens:
        raise ValueError(f"size has shape {tuple(size.shape)}; pass {batch_and_tokens}, (B, T)")
    if not 0 <= prefix <= batch_and_tokens[1]:
        raise ValueError(f"prefix is {prefix}; pass an integer from 0 to {batch_and_tokens[1]}")
