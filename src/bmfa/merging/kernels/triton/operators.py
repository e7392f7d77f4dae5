"""The merging kernels as operators of torch: what compilers, fake tensors and flop counters see."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# Defined without the wrappers of torch.library.custom_op, which cost 10 to 25 microseconds a call.
_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor size, float scale, int prefix, bool mass,"
    " bool others) -> (Tensor, Tensor)"
)
_library.define(
    "merge(Tensor x, Tensor size, Tensor? features, Tensor? weight, SymInt r, int prefix, str pair)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define("tome_features(Tensor k) -> Tensor")


@cache
def _kernels(module: str) -> Any:
    """The module with the kernels: it needs Triton, this one does not."""
    return import_module(f"bmfa.merging.kernels.triton.{module}")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor,
    scale: float,
    prefix: int,
    mass: bool,
    others: bool,
) -> Any:
    return _kernels("proportional").launch_attend(q, k, v, size, scale, prefix, mass, others)


def _merge(
    x: Tensor,
    size: Tensor,
    features: Tensor | None,
    weight: Tensor | None,
    r: int,
    prefix: int,
    pair: str,
) -> Any:
    return _kernels("bipartite").launch_merge(x, size, features, weight, r, prefix, pair)


def _tome_features(k: Tensor) -> Any:
    return _kernels("features").launch_tome_features(k)


def _fake_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor,
    scale: float,
    prefix: int,
    mass: bool,
    others: bool,
) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, dim = q.shape
    output = q.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
    kernels = _kernels("proportional") if mass else None
    shape = (0,) if kernels is None else kernels.mass_shape(q.shape, q.dtype, prefix, others)
    return output, q.new_empty(shape, dtype=torch.float32)


def _fake_merge(
    x: Tensor,
    size: Tensor,
    features: Tensor | None,
    weight: Tensor | None,
    r: int,
    prefix: int,
    pair: str,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, channels = x.shape
    x_new = x.new_empty((batch, tokens - r, channels))
    size_new = x.new_empty((batch, tokens - r), dtype=torch.float32)
    return x_new, size_new, x.new_empty((batch, tokens), dtype=torch.int32)


def _fake_tome_features(k: Tensor) -> Tensor:
    batch, _, tokens, dim = k.shape
    return k.new_empty((batch, tokens, dim))


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attend": (_attend, _fake_attend),
    "merge": (_merge, _fake_merge),
    "tome_features": (_tome_features, _fake_tome_features),
}
for _name, (_run, _fake) in _OPERATORS.items():
    _library.impl(_name, _run, "CUDA")
    _library.impl(_name, _run, "CPU")  # in Triton's interpreter
    torch.library.register_fake(f"bmfa::{_name}", _fake, lib=_library)

attend: Any = torch.ops.bmfa.attend.default
merge: Any = torch.ops.bmfa.merge.default
tome_features: Any = torch.ops.bmfa.tome_features.default


@register_flop_formula(torch.ops.bmfa.attend)
def _attend_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """The two products, as torch counts scaled_dot_product_attention."""
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[2] * (dim + v[3])


@register_flop_formula(torch.ops.bmfa.merge)
def _merge_flops(
    x: torch.Size, size: torch.Size, features: torch.Size | None, *_: object, **__: object
) -> int:
    """The product of the even with the odd positions; the rest moves memory."""
    batch, tokens, channels = x
    width = channels if features is None else features[-1]
    return 2 * batch * ((tokens + 1) // 2) * (tokens // 2) * width
