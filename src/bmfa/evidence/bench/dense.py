"""Dense baselines: the paths of scaled_dot_product_attention, and exact attention in float64."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v to outputs

PATHS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
DEFAULT = "default"  # the path that torch selects
# Largest number of scores that the path "math", which writes all of them, is run for.
MAX_MATH_SCORES = 2**31
# Scores of `exact_attention` in memory at once: 256 MiB in float64.
CHUNK_SCORES = 2**25


def dense_path(name: str) -> Attention:
    """Return attention by one path alone, or the plain call for `DEFAULT`."""
    if name == DEFAULT:
        return scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with warnings.catch_warnings(), sdpa_kernel([PATHS[name]]):
            warnings.simplefilter("ignore")
            return scaled_dot_product_attention(q, k, v)

    return attention


@contextmanager
def preferring(name: str) -> Iterator[None]:
    """Try one path first and the others after it, on CUDA."""
    # `sdpa_kernel` restores the priority that it finds, and torch sets its own in the first call.
    q = torch.zeros(1, 1, 16, 64, device="cuda", dtype=torch.float16)
    scaled_dot_product_attention(q, q, q)
    rest = [path for other, path in PATHS.items() if other != name]
    with sdpa_kernel([PATHS[name], *rest], set_priority=True):
        yield


def unsupported_reason(name: str, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why a path does not run on these inputs, or None if it does."""
    batch, heads, tokens, _ = q.shape
    scores = batch * heads * tokens**2
    if name == "math" and scores > MAX_MATH_SCORES:
        return f"it would write {scores:.1e} scores"
    try:
        dense_path(name)(q, k, v)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v in float64, some queries at a time.

    Args:
        q: (B, H, Q, d) queries.
        k: (B, H, N, d) keys.
        v: (B, H, N, d) values.

    Returns:
        (B, H, Q, d) float64.
    """
    keys, values = k.double().transpose(-2, -1), v.double()
    rows = max(1, CHUNK_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    scale = 1 / math.sqrt(q.shape[-1])
    outputs = [
        (queries.double() @ keys * scale).softmax(-1) @ values
        for queries in torch.split(q, rows, dim=2)
    ]
    return torch.cat(outputs, 2)
