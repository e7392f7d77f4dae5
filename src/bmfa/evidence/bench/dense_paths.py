"""The dense paths of scaled_dot_product_attention, and exact attention to judge all others by."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

PATHS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# What torch chooses for a call on its own.
DEFAULT = "default"
# Scores that the path which writes them all out may hold.
MOST_SCORES = {"cuda": 2**31, "cpu": 2**24}
# Scores of exact attention held at once, in float64.
CHUNK_SCORES = 2**25


def dense_path(name: str) -> Attend:
    """Attention by one path alone; DEFAULT is the plain call."""
    if name == DEFAULT:
        return scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with only(name):
            return scaled_dot_product_attention(q, k, v)

    return attend


@contextmanager
def only(name: str) -> Iterator[None]:
    """One path alone, without its warnings of what it does not serve; DEFAULT changes nothing."""
    if name == DEFAULT:
        yield
        return
    with warnings.catch_warnings(), sdpa_kernel([PATHS[name]]):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def preferring(name: str) -> Iterator[None]:
    """One path first, the others where it does not serve a call.

    Leaving puts back the order that was found: torch has its own from the first call on, see `settle`.
    """
    rest = [path for other, path in PATHS.items() if other != name]
    with sdpa_kernel([PATHS[name], *rest], set_priority=True):
        yield


def settle(device: torch.device, dtype: torch.dtype) -> None:
    """Let torch choose its order of the paths; a first call inside `preferring` would hide it."""
    q = torch.zeros(1, 1, 16, 64, device=device, dtype=dtype)
    scaled_dot_product_attention(q, q, q)


def refusal(name: str, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why a path does not run; None where it does."""
    batch, heads, tokens, _ = q.shape
    scores = batch * heads * tokens**2
    if name == "math" and scores > MOST_SCORES.get(q.device.type, MOST_SCORES["cpu"]):
        return f"it would write {scores:.1e} scores"
    try:
        dense_path(name)(q, k, v)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of any queries in float64, the softmax spelt out."""
    keys, values = k.double().transpose(-2, -1), v.double()
    rows = max(1, CHUNK_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    scale = 1 / math.sqrt(q.shape[-1])
    outputs = [
        (some.double() @ keys * scale).softmax(-1) @ values for some in torch.split(q, rows, dim=2)
    ]
    return torch.cat(outputs, 2)
