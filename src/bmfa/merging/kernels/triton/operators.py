"""The Triton kernels as operators of torch, for torch.compile, fake tensors and the flop counter.

This module loads without Triton, so that `unsupported_reason` can say that it is missing; the
modules with the kernels are imported by the first call.
"""

from collections.abc import Callable
from importlib import import_module
from os import environ
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from bmfa.packages import load_package

# The attention kernel holds all keys of a head on chip, the merge kernel ranks all even positions of a
# image against each other: 256 x 256 comparisons at 512 tokens, four times as many beyond.
MAX_TOKENS = 512
# Bytes of the keys of one head, padded to powers of two. Keys and values together take twice as
# much of the 227 KiB of shared memory of a multiprocessor of compute capability 9.0.
MAX_KEY_BYTES = 65536
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Defined without torch.library.custom_op, whose wrappers cost 10 to 25 microseconds a call.
_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "proportional_attention(Tensor q, Tensor k, Tensor v, Tensor size, float scale, int prefix,"
    " bool mass) -> (Tensor, Tensor)"
)
_library.define(
    "merge_tokens(Tensor x, Tensor size, Tensor? keys, Tensor? weight, SymInt r, int prefix)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define("unit_mean_keys(Tensor k) -> Tensor")


def proportional_attention(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, *, scale: float, prefix: int, mass: bool
) -> tuple[Tensor, Tensor | None]:
    """See `bmfa.merging.dispatch.proportional_attention`.

    The mass sums the weights as they are multiplied with the values, rounded to the dtype of v.
    """
    output, masses = torch.ops.bmfa.proportional_attention.default(
        q, k, v, _contiguous_float32(size), float(scale), prefix, mass
    )
    return output, masses if mass else None


def merge_tokens(
    x: Tensor, size: Tensor, keys: Tensor | None, weight: Tensor | None, r: int, *, prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `bmfa.merging.dispatch.merge_tokens`; features are rounded to the dtype of keys or x."""
    weight = None if weight is None else _contiguous_float32(weight)
    new: tuple[Tensor, Tensor, Tensor] = torch.ops.bmfa.merge_tokens.default(
        x, _contiguous_float32(size), keys, weight, r, prefix
    )
    return new


def unit_mean_keys(k: Tensor) -> Tensor:
    """See `bmfa.merging.dispatch.unit_mean_keys`."""
    features: Tensor = torch.ops.bmfa.unit_mean_keys.default(k)
    return features


def unsupported_reason(first: Tensor, *others: Tensor | None) -> str | None:
    """Return the reason why the kernels cannot run on these inputs, or None if they can.

    Args:
        first: x (B, T, C), or q or k (B, H, T, d): it gives the number of tokens.
        others: the other inputs of the call.
    """
    if _TRITON_PROBLEM is not None:
        return _TRITON_PROBLEM
    tensors = [tensor for tensor in (first, *others) if tensor is not None]
    for tensor in tensors:
        if not tensor.is_cuda and not (_INTERPRETED and tensor.device.type == "cpu"):
            return f"the inputs are on {tensor.device}, and Triton kernels need a CUDA device"
        if tensor.dtype not in _DTYPES:
            return f"the dtype is {tensor.dtype}, and the kernels take float16, bfloat16 or float32"
        if tensor.requires_grad and torch.is_grad_enabled():
            return "gradients are enabled, and the kernels have no backward; use torch.no_grad()"
    tokens = first.shape[-2]
    if tokens > MAX_TOKENS:
        return f"there are {tokens} tokens, and the kernels take at most {MAX_TOKENS}"
    for tensor in tensors:
        if tensor.dim() == 4 and _key_bytes(tensor) > MAX_KEY_BYTES:
            return (
                f"{tokens} keys of dimension {tensor.shape[3]} in {tensor.dtype} do not fit on chip: "
                f"padded to powers of two they may take {MAX_KEY_BYTES} bytes"
            )
    return None


def _key_bytes(heads: Tensor) -> int:
    tokens, dim = (max(16, 1 << (length - 1).bit_length()) for length in heads.shape[2:])
    return tokens * dim * heads.itemsize


_TRITON_PROBLEM: str | None = None
try:
    load_package("triton")
except ImportError as error:
    _TRITON_PROBLEM = f"Triton does not load ({error}); run: pip install triton"
# Triton reads the variable when kernels are defined, so a later change has no effect.
_INTERPRETED = environ.get("TRITON_INTERPRET") == "1"


def _contiguous_float32(values: Tensor) -> Tensor:
    """The kernels take sizes and weights without strides."""
    return values.to(torch.float32).contiguous()


def _launcher(module: str, function: str) -> Callable[..., Any]:
    """A launch, whose module is imported by the first call."""

    def launch(*arguments: Any) -> Any:
        kernels = import_module(f"bmfa.merging.kernels.triton.{module}")
        return getattr(kernels, function)(*arguments)

    return launch


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, scale: float, prefix: int, mass: bool
) -> tuple[Tensor, Tensor]:
    from bmfa.merging.kernels.triton.attention import mass_shape

    batch, heads, tokens, dim = q.shape
    output = q.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
    shape = mass_shape(q.shape, q.dtype, prefix) if mass else (0,)
    return output, q.new_empty(shape, dtype=torch.float32)


def _merge_fake(
    x: Tensor, size: Tensor, keys: Tensor | None, weight: Tensor | None, r: int, prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, channels = x.shape
    x_new = x.new_empty((batch, tokens - r, channels))
    size_new = x.new_empty((batch, tokens - r), dtype=torch.float32)
    return x_new, size_new, x.new_empty((batch, tokens), dtype=torch.int32)


def _keys_fake(k: Tensor) -> Tensor:
    batch, _, tokens, dim = k.shape
    return k.new_empty((batch, tokens, dim))


for _name, _impl, _fake in (
    ("proportional_attention", _launcher("attention", "launch_attention"), _attention_fake),
    ("merge_tokens", _launcher("merge", "launch_merge"), _merge_fake),
    ("unit_mean_keys", _launcher("features", "launch_unit_mean_keys"), _keys_fake),
):
    _library.impl(_name, _impl, "CUDA")
    _library.impl(_name, _impl, "CPU")  # Triton's interpreter
    torch.library.register_fake(f"bmfa::{_name}", _fake, lib=_library)


@register_flop_formula(torch.ops.bmfa.proportional_attention)
def _attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """Count the two matrix products, as torch counts scaled_dot_product_attention."""
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[2] * (dim + v[3])


@register_flop_formula(torch.ops.bmfa.merge_tokens)
def _merge_flops(
    x: torch.Size, size: torch.Size, keys: torch.Size | None, *_: object, **__: object
) -> int:
    """Count the product of the features at even and at odd positions."""
    batch, tokens, channels = x
    features = channels if keys is None else keys[-1]
    return 2 * batch * ((tokens + 1) // 2) * (tokens // 2) * features
