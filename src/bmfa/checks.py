"""Checks of arguments. Every message states the value received and what to pass instead."""

import math
from collections.abc import Iterable
from functools import reduce

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_number(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
) -> float:
    """Return a finite real number in [low, high], or (low, high] with `open_low`, as a float."""
    value = python_number(value)
    bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{']' if math.isfinite(high) else ')'}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; pass a real number in {bounds}{_item_of(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(
            f"{name} is too large for a float; pass a finite number in {bounds}"
        ) from None
    inside = low < number <= high if open_low else low <= number <= high
    if not math.isfinite(number) or not inside:
        raise ValueError(f"{name} is {number!r}; pass a finite number in {bounds}")
    return number


def check_integer(name: str, value: object, *, low: int, high: int | None = None) -> int:
    """Return an integer in [low, high]."""
    value = python_number(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} is {value!r}; pass an integer {_range(low, high)}{_item_of(value)}"
        )
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is {value}; pass an integer {_range(low, high)}")
    return value


def check_error(error: object, name: str = "error", *, open_low: bool = False) -> float:
    """Return a target for a relative error, a fraction."""
    number = check_number(name, error, low=0.0, open_low=open_low)
    if number > 1.0:
        raise ValueError(f"{name} is {number:g}; pass a fraction: 0.03 is 3 %")
    return number


def check_leaves(leaves: object, *, size: int | None = None) -> float | int:
    """Return a budget of leaves: a float in (0, 1] is a fraction of the tokens, an int >= 2 a count.

    The int 1 is refused because it is easily mistaken for the fraction 1.0.
    """
    leaves = python_number(leaves)
    if isinstance(leaves, float):
        return check_number("leaves", leaves, low=0.0, high=1.0, open_low=True)
    if leaves == 1 and not isinstance(leaves, bool):
        raise ValueError(
            "leaves is the integer 1, which may mean one leaf or all tokens; pass leaves=1.0 for all "
            "tokens, an integer of at least 2 for a count, or rule=bmfa.rules.GlobalMean() for one leaf"
        )
    return check_integer("leaves", leaves, low=2, high=size)


def _range(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"


def python_number(value: object) -> object:
    """Return NumPy scalars and symbolic numbers of a compiler as Python numbers, others unchanged."""
    if isinstance(value, np.generic):
        return value.item()
    if is_compiling() and isinstance(value, (int, float)):
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        return guard_scalar(value)
    return value


def _item_of(value: object) -> str:
    return ", not a tensor: call .item()" if isinstance(value, Tensor) else ""


def is_compiling() -> bool:
    """True while torch.compile or torch.export traces the caller."""
    return torch.compiler.is_compiling()


def has_values(tensor: Tensor) -> bool:
    """False if the numbers in a tensor cannot be read.

    This is so in graphs that are being compiled or exported, on the meta device, and for fake tensors.
    """
    return not (is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))


def check_flag(name: str, value: object) -> bool:
    """Return a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; pass True or False")
    return value


def check_tau(tau: object) -> float:
    """Return the temperature, a finite number above 0."""
    return check_number("tau", tau, low=0.0, open_low=True)


def check_floating(name: str, tensor: object) -> Tensor:
    """Return a dense tensor of a floating-point dtype."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; pass a torch.Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} is a {kind} tensor; pass a dense one, padded, with valid= as mask")
    if tensor.dtype not in FLOATS:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise TypeError(f"{name} has dtype {tensor.dtype}; pass one of {accepted} ({name}.float())")
    return tensor


def check_scores(scores: object, size: int | None = None) -> Tensor:
    """Return scores of shape (..., n) with n >= 1, or n == size if a size is given."""
    tensor = check_floating("scores", scores)
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        raise ValueError(f"scores have shape {tuple(tensor.shape)}; pass (..., n) with n >= 1")
    if size is not None and tensor.shape[-1] != size:
        raise ValueError(
            f"scores end in {tensor.shape[-1]} tokens and the grid has {size}; "
            "pass (..., height * width) in raster order, without prefix tokens"
        )
    return tensor


def check_products(q: Tensor, k: Tensor, scale: float | None) -> float:
    """Check that the shapes and dtypes of queries and keys fit; return the scale of their products."""
    check_floating("q", q)
    check_floating("k", k)
    if q.dtype != k.dtype or q.device != k.device:
        raise TypeError(
            f"q is {q.dtype} on {q.device} and k {k.dtype} on {k.device}; pass one dtype and device"
        )
    fits = q.dim() >= 2 and k.dim() == q.dim() and q.shape[:-2] == k.shape[:-2]
    if not fits or q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; pass (..., Q, d) and (..., N, d)"
        )
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    return check_number("scale", scale)


def check_valid(valid: object, shape: Iterable[int]) -> Tensor:
    """Return a bool mask that broadcasts to `shape` with at least one True in every row."""
    shape = torch.Size(shape)
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
        received = valid.dtype if isinstance(valid, Tensor) else type(valid).__name__
        raise TypeError(f"valid is {received}; pass a torch.bool tensor, True where a token exists")
    try:
        common = torch.broadcast_shapes(valid.shape, shape)  # type: ignore[no-untyped-call]
        fits = common == shape and valid.shape[-1] == shape[-1]
    except (RuntimeError, IndexError):
        fits = False
    if not fits:
        raise ValueError(
            f"valid has shape {tuple(valid.shape)}; pass one that broadcasts to {tuple(shape)}"
        )
    if has_values(valid) and not bool(valid.any(-1).all()):
        row = tuple((~valid.any(-1)).nonzero()[0].tolist())
        raise ValueError(
            f"valid leaves no token at leading index {row}; leave at least one in every row"
        )
    return valid


def check_finite(name: str, tensor: Tensor, valid: Tensor | None = None) -> None:
    """Raise ValueError with the index and value of the first NaN or infinity of a valid entry."""
    bad = ~torch.isfinite(tensor)
    if valid is not None:
        bad &= valid
    if bool(bad.any()):
        index = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name} hold {tensor[index].item()} at index {index} ({int(bad.sum())} such entries); "
            f"pass finite {name} and use valid= for tokens that do not exist"
        )


def check_finite_products(q: Tensor, keys: Tensor, scale: float, dtype: torch.dtype) -> None:
    """Raise ValueError if a query or a key is not finite, or their products may overflow `dtype`."""
    largest = abs(scale) * keys.shape[-1]
    for tensor in (q, keys):
        if tensor.numel():
            values = tensor.detach()
            largest *= max(-float(values.amin()), float(values.amax()))  # NaN propagates
    if largest < torch.finfo(dtype).max:
        return
    check_finite("queries", q)
    check_finite("keys", keys)
    if q.numel() and keys.numel():
        raise ValueError(
            f"scores of up to {largest:.3g} overflow {dtype}; pass float64, or smaller queries and keys"
        )


def as_tensors(**values: float | Tensor) -> list[Tensor]:
    """Return finite values, broadcast to one shape and in one dtype.

    The dtype is that to which the tensors promote, at least float32; float64 if all are numbers.
    """
    tensors = {n: check_floating(n, v) for n, v in values.items() if isinstance(v, Tensor)}
    numbers = {n: check_number(n, v) for n, v in values.items() if n not in tensors}
    start = torch.float32 if tensors else torch.float64
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()), start)
    device = next((tensor.device for tensor in tensors.values()), None)
    checked = tensors | numbers
    converted = [torch.as_tensor(checked[name], dtype=dtype, device=device) for name in values]
    for name, tensor in zip(values, converted, strict=True):
        check_finite(name, tensor)
    try:
        return list(torch.broadcast_tensors(*converted))  # type: ignore[no-untyped-call]
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes do not broadcast: {shapes}; pass shapes that do") from None


def check_elements(name: str, tensor: Tensor, inside: Tensor, accepted: str) -> None:
    """Raise ValueError with the first element of `tensor` for which `inside` is False."""
    if not bool(inside.all()):
        raise ValueError(f"{name} holds {tensor[~inside][0].item()!r}; pass {accepted}")
