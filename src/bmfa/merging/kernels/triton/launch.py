"""Proportional attention and token merging by fused Triton kernels, as operators of torch."""

from collections.abc import Callable
from importlib import import_module
from os import environ
from typing import Any

import torch
from torch import Tensor

from bmfa.merging.kernels.triton import operators

PAIRS = ("none", "sum", "harmonic")
MAXIMUM_TOKENS = 512
MAXIMUM_KEY_BYTES = 65536  # of one head, padded to powers of two: keys and values share the chip
OLDEST_TRITON = (3, 2)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor,
    *,
    scale: float,
    prefix: int = 1,
    mass: bool = False,
    others: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """softmax(q k^T scale + log size_j) v, and the attention that every token receives.

    q, k, v are (B, heads, T, d), of any strides; size (B, T) counts the tokens merged into each. The
    mass (B, parts, 2, T) is to be added over its parts: the attention on token j, summed over heads,
    of the prefix queries on average (0) and of the other queries (1); without a prefix the two agree.
    Without `others` it is (B, parts, 1, T), the first of them.
    Its weights are rounded as the values' dtype rounds them. Equal inputs give equal bits.
    """
    _check_once(_check_attend, (q, k, v, size), prefix)
    output, total = operators.attend(q, k, v, _flat(size), float(scale), prefix, mass, others)
    return output, total if mass else None


def merge(
    x: Tensor,
    size: Tensor,
    features: Tensor | None,
    weight: Tensor | None,
    r: int,
    *,
    prefix: int = 1,
    pair: str = "none",
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge r tokens of each sequence: new tokens, new sizes, new position of every old token.

    Even positions a choose among odd positions b the one with the least
    pair(weight_a, weight_b) |f_a - f_b|^2, where pair is 1 ("none"), w_a + w_b ("sum") or
    w_a w_b / (w_a + w_b) ("harmonic"); the r cheapest choices merge into size-weighted means. Ties go
    to the lowest position. The first `prefix` tokens never take part. New order: prefix, remaining
    even positions, odd positions.

    The features are (B, T, F), or keys (B, heads, T, d) for their unit means over heads, or None for
    the layer norm of x; they are made on the way, in the dtype they come from. The weight is (B, T),
    or (B, ..., T) to be added up, as the mass of `attend` is.
    """
    _check_once(_check_merge, (x, size, features, weight), r, prefix, pair)
    flat_weight = None if weight is None else _flat(weight)
    new: tuple[Tensor, Tensor, Tensor] = operators.merge(
        x, _flat(size), features, flat_weight, r, prefix, pair
    )
    return new


def tome_features(k: Tensor) -> Tensor:
    """The mean over heads of the keys (B, heads, T, d), divided by its length: (B, T, d)."""
    _check_heads("k", k)
    _refuse(unsupported(k))
    features: Tensor = operators.tome_features(k)
    return features


def unsupported(*tensors: Tensor | None) -> str | None:
    """Why these kernels cannot serve the tensors of a call, or None where they can.

    Sequences are dimension 1 of three-dimensional and dimension 2 of four-dimensional tensors.
    """
    if _ABSENT is not None:
        return _ABSENT
    differentiated = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_cuda and not (_INTERPRETED and tensor.device.type == "cpu"):
            return f"the tensors are on {tensor.device}, and Triton kernels need a CUDA device"
        if tensor.dtype not in _FLOATS:
            return f"the dtype is {tensor.dtype}, and the kernels take float16, bfloat16 or float32"
        if differentiated and tensor.requires_grad:
            return "gradients are asked for, and the kernels have none; use torch.no_grad()"
        reason = _too_large(tensor) if tensor.ndim > 2 else None
        if reason is not None:
            return reason
    return None


def _too_large(tensor: Tensor) -> str | None:
    tokens, dim = tensor.shape[-2:]
    if tokens > MAXIMUM_TOKENS:
        return f"there are {tokens} tokens, and the kernels hold at most {MAXIMUM_TOKENS} on chip"
    if tensor.ndim == 4 and _padded(tokens) * _padded(dim) * tensor.itemsize > MAXIMUM_KEY_BYTES:
        return (
            f"{tokens} keys of dimension {dim} in {tensor.dtype} do not fit on chip: padded to powers "
            f"of two they may take {MAXIMUM_KEY_BYTES} bytes"
        )
    return None


def _padded(length: int) -> int:
    return max(16, 1 << (length - 1).bit_length())


def _look_for_triton() -> str | None:
    try:
        found: str = import_module("triton").__version__
    except ImportError as error:
        return f"Triton does not load ({error}); run: pip install triton"
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"Triton is {found}; the kernels need {oldest} or newer: pip install -U triton"
    return None


_ABSENT = _look_for_triton()
# Triton decides when kernels are defined, so a later change of the environment has no effect.
_INTERPRETED = environ.get("TRITON_INTERPRET") == "1"


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"the triton backend cannot run: {reason}; or use the eager backend")


def _describe(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


_PASSED: set[Any] = set()


def _check_once(check: Callable[..., None], tensors: tuple[Any, ...], *options: Any) -> None:
    """Checks read kinds and shapes: what passed, passes again, unless gradients are switched on."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        check(*tensors, *options)
        return
    kinds = [
        (tensor.shape, tensor.dtype, tensor.device) if isinstance(tensor, Tensor) else type(tensor)
        for tensor in tensors
    ]
    key = (check, options, *kinds)
    if key not in _PASSED:
        check(*tensors, *options)
        _PASSED.add(key)


def _check_attend(q: Tensor, k: Tensor, v: Tensor, size: Tensor, prefix: int) -> None:
    _check_heads("q", q)
    tokens = q.shape[2]
    for name, tensor in (("k", k), ("v", v)):
        _check_shape(name, tensor, tuple(q.shape))
        _check_dtype(name, tensor, q.dtype)
    _check_shape("size", size, (q.shape[0], tokens))
    _check_prefix(prefix, tokens)
    _refuse(unsupported(q, k, v, size))


def _check_merge(
    x: Tensor,
    size: Tensor,
    features: Tensor | None,
    weight: Tensor | None,
    r: int,
    prefix: int,
    pair: str,
) -> None:
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise ValueError(f"x is {_describe(x)}; pass tokens as (B, T, C)")
    batch, tokens, _ = x.shape
    if features is not None and (*features.shape[:1], *features.shape[-2:-1]) != (batch, tokens):
        raise ValueError(
            f"features is {_describe(features)}; pass ({batch}, {tokens}, F) as x has, "
            f"keys ({batch}, heads, {tokens}, d), or None"
        )
    if features is not None and features.ndim not in (3, 4):
        raise ValueError(f"features is {_describe(features)}; pass three or four dimensions")
    _check_shape("size", size, (batch, tokens))
    if weight is not None:
        _check_shape("weight", weight, (batch, *weight.shape[1:-1], tokens))
    _check_pair(pair, weight)
    _check_prefix(prefix, tokens)
    most = (tokens - prefix) // 2
    if not 0 <= r <= most:
        raise ValueError(
            f"r is {r}; of {tokens} tokens, {prefix} of them prefix, merge from 0 to {most}"
        )
    _refuse(unsupported(x, size, features, weight))


def _check_heads(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.ndim != 4 or tensor.shape[2] == 0:
        raise ValueError(
            f"{name} is {_describe(tensor)}; pass (B, heads, T, d) with a token or more"
        )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {_describe(tensor)}; pass {shape}, as the other tensors have")


def _check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype} and q is {dtype}; pass one dtype for q, k and v")


def _check_prefix(prefix: int, tokens: int) -> None:
    if not 0 <= prefix <= tokens:
        raise ValueError(f"prefix is {prefix}; pass from 0 to the {tokens} tokens there are")


def _check_pair(pair: str, weight: Tensor | None) -> None:
    if pair not in PAIRS:
        raise ValueError(f"pair is {pair!r}; pass one of {', '.join(map(repr, PAIRS))}")
    if pair != "none" and weight is None:
        raise ValueError(f"pair is {pair!r} and weight is None; pass weight (B, T) or pair='none'")


def _flat(values: Tensor) -> Tensor:
    """float32 and contiguous: the kernels take no strides of vectors."""
    if values.dtype == torch.float32 and values.is_contiguous():
        return values
    return values.to(torch.float32).contiguous()
