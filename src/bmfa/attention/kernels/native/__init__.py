"""Tiled and exact attention in C++ on a CPU, without gradients.

`tiles.cpp` has the steps of `kernels/reference/tiles.py` and `product.h` what they are made of;
`library` finds and loads the build for the processor, and `compile` makes it.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bmfa.attention.kernels.native import library
from bmfa.attention.tiling import (
    ERROR_AIM,
    LARGEST_SHRINKAGE,
    LEVEL_RATIO,
    NUM_LEVELS,
    SMALLEST_CORRECTION,
    STEEP_FALL,
    STEEP_RISE,
    UNIFORM_SHARE,
    TiledAttention,
    Tiling,
)
from bmfa.trees.build import check_finite_products

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_CHANNELS = 256  # of keys and of values
MAX_TILE_SLOTS = 64


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
    ]


class _Call(ctypes.Structure):
    """`Call` of tiles.cpp: the same fields in the same order."""

    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "output")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "dtype", "batch", "heads", "share", "queries", "keys", "d", "e", "query_prefix",
                "prefix", "threads", "mask_stride", "queries_masked",
            )
        ),
        ("valid", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("factor", ctypes.c_double),
        ("largest", ctypes.c_uint32 * 2),
        *(
            (name, ctypes.c_int64)
            for name in (
                "tiles", "tile_slots", "groups", "group_slots", "probe_groups", "group_probes",
                "levels",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "tile_tokens", "group_tokens", "group_order", "quantiles", "thresholds",
            )
        ),
        *(
            (name, ctypes.c_double)
            for name in (
                "uniform_share", "error_aim", "steep_fall", "steep_rise", "largest_shrinkage",
                "smallest_correction", "error", "expand", "exact_above",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("expanded", "exact", "expanded_count", "probes")
        ),
    ]  # fmt: skip


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the native kernels cannot run on these tensors, or None if they can."""
    gradients = q.requires_grad or k.requires_grad or v.requires_grad
    gradients = gradients and torch.is_grad_enabled()
    return unsupported_kind(q.device.type, q.dtype, max(k.shape[-1], v.shape[-1]), gradients)


def unsupported_kind(
    device: str, dtype: torch.dtype, channels: int, requires_grad: bool
) -> str | None:
    """Return why the native kernels cannot run on tensors of this kind, or None if they can."""
    if device != "cpu":
        return f"the tensors are on {device}, and native kernels run on a CPU"
    if dtype not in DTYPES:
        return f"the dtype is {dtype}, and native kernels take float32, bfloat16 and float16"
    if channels > MAX_CHANNELS:
        return f"a head has {channels} channels, and the most is {MAX_CHANNELS}"
    if requires_grad:
        return "gradients are required, which native kernels do not compute"
    return _unavailable_reason()


def _unavailable_reason() -> str | None:
    return library.unavailable_reason()


# torch.compile takes the result as a constant. The mark is that of
# torch.compiler.assume_constant_result, which would load the compiler on import.
_unavailable_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    tau: float = 1.0,
    prefix: int = 0,
    valid: Tensor | None = None,
    mask_queries: bool = False,
) -> Tensor:
    """Compute attention as `scaled_dot_product_attention` does.

    Args:
        q: (B, H, Q, d).
        k: (B, H or a divisor of it, prefix + N, d).
        v: (B, as many, prefix + N, e).
        scale: Factor of q . k.
        tau: Temperature.
        prefix: Number of keys that `valid` does not include.
        valid: bool (B or 1, N), the keys that exist.
        mask_queries: True if `valid` is a mask of the queries, too. The others become 0.

    Returns:
        (B, H, Q, e) output in the dtype of q.

    Raises:
        ValueError: If q or k hold NaN or infinity, or if scores overflow.
    """
    call, output, _tensors = _describe(q, k, v, prefix, scale / tau, valid, mask_queries)
    if q.numel():
        _run(call, "bmfa_exact_attention")
    _check_scores(call, q, k, scale, prefix, valid, mask_queries)
    return output


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, prefix: int, scale: float, tau: float = 1.0,
    error: float | None = None, expand: float | None = None, valid: Tensor | None = None,
    exact_above: float = 1.0, query_prefix: int | None = None,
) -> tuple[TiledAttention, bool]:  # fmt: skip
    """Compute tiled attention as specified by `bmfa.attention.kernels.reference.tiled_attention`.

    The arguments are those of the specification, in float32 or half precision.

    Returns:
        The result, and whether every head was computed exactly.

    Raises:
        ValueError: If q or k hold NaN or infinity, or if scores overflow.
    """
    query_prefix = prefix if query_prefix is None else query_prefix
    mask_queries = tiling.query_grid is None
    call, output, _tensors = _describe(q, k, v, prefix, scale / tau, valid, mask_queries)
    batch, heads = q.shape[:2]
    geometry = _geometry(tiling, heads, query_prefix)
    call.query_prefix = query_prefix
    call.tiles, call.tile_slots = tiling.tiles, tiling.slots
    call.groups, call.group_slots = tiling.groups, tiling.queries.slots
    call.probe_groups = tiling.probe_groups(query_prefix)
    call.group_probes, call.levels = tiling.probes_per_group, NUM_LEVELS
    call.tile_tokens = geometry.tile_tokens.data_ptr()
    call.group_tokens = geometry.group_tokens.data_ptr()
    call.group_order = geometry.group_order.data_ptr()
    call.quantiles, call.thresholds = geometry.quantiles.data_ptr(), geometry.thresholds.data_ptr()
    call.uniform_share, call.error_aim = UNIFORM_SHARE, ERROR_AIM
    call.steep_fall, call.steep_rise = STEEP_FALL, STEEP_RISE
    call.largest_shrinkage, call.smallest_correction = LARGEST_SHRINKAGE, SMALLEST_CORRECTION
    call.error = -1.0 if error is None else error
    call.expand = -1.0 if expand is None else expand / tiling.tiles
    call.exact_above = exact_above
    lead = (batch, heads)
    expanded = torch.empty((*lead, tiling.groups, tiling.tiles), dtype=torch.bool)
    exact = torch.empty(lead, dtype=torch.bool)
    count = torch.empty((*lead, tiling.groups), dtype=torch.int32)
    probes = torch.empty((*lead, tiling.probes(query_prefix), 3), dtype=torch.float64)
    call.expanded, call.exact = expanded.data_ptr(), exact.data_ptr()
    call.expanded_count, call.probes = count.data_ptr(), probes.data_ptr()
    _run(call, "bmfa_tiled_attention")
    _check_scores(call, q, k, scale, prefix, valid, mask_queries)
    return TiledAttention(output, count, probes, expanded), bool(exact.all())


@dataclass(frozen=True, eq=False)
class _Geometry:
    tile_tokens: Tensor  # (T, S) int32
    group_tokens: Tensor  # (R, S) int32
    group_order: Tensor  # (R,) int32
    quantiles: Tensor  # (H, P) float64
    thresholds: Tensor  # (levels,) float64


@lru_cache(maxsize=32)
def _geometry(tiling: Tiling, heads: int, query_prefix: int) -> _Geometry:
    order = tiling.group_order
    groups = order[: tiling.probe_groups(query_prefix)].view(1, -1, 1)
    head = torch.arange(heads).view(-1, 1, 1)
    quantiles = tiling.probe_quantile(groups, head, torch.arange(tiling.probes_per_group))
    thresholds = LEVEL_RATIO ** torch.arange(NUM_LEVELS, dtype=torch.float64)
    thresholds[-1] = 0.0
    return _Geometry(
        tiling.slot_tokens.to(torch.int32).contiguous(),
        tiling.queries.slot_tokens.to(torch.int32).contiguous(),
        order.to(torch.int32).contiguous(),
        quantiles.double().contiguous(),
        thresholds,
    )


def _describe(
    q: Tensor, k: Tensor, v: Tensor, prefix: int, factor: float, valid: Tensor | None,
    mask_queries: bool,
) -> tuple[_Call, Tensor, list[Tensor]]:  # fmt: skip
    """Return a call, its output, and the tensors that it points to, which must outlive it."""
    q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, queries, d = q.shape
    e = v.shape[-1]
    # As hosts use it: the channels of all heads of a token are contiguous.
    output = torch.empty((batch, queries, heads, e), dtype=q.dtype).transpose(1, 2)
    call = _Call()
    for name, x in (("q", q), ("k", k), ("v", v), ("output", output)):
        setattr(call, name, _Tensor(x.data_ptr(), *x.stride()[:3]))
    call.dtype, call.batch, call.heads = DTYPES[q.dtype], batch, heads
    call.share, call.queries, call.keys = heads // max(1, k.shape[1]), queries, k.shape[2]
    call.d, call.e, call.prefix, call.factor = d, e, prefix, factor
    call.threads = torch.get_num_threads()
    if valid is not None:
        valid = valid.contiguous()
        call.valid = valid.data_ptr()
        call.mask_stride = 0 if len(valid) == 1 else valid.shape[1]
        call.queries_masked = mask_queries
    return call, output, [q, k, v, *([] if valid is None else [valid])]


def _run(call: _Call, function: str) -> None:
    loaded = library.load()
    if loaded is None:
        raise RuntimeError(f"native kernels cannot run: {library.unavailable_reason()}")
    loaded.bmfa_scratch_bytes.restype = ctypes.c_int64
    scratch = _allocate(loaded.bmfa_scratch_bytes(ctypes.byref(call)) + 64)
    call.scratch = -(-scratch.data_ptr() // 64) * 64
    getattr(loaded, function)(ctypes.byref(call))


def _allocate(size: int) -> Tensor:
    """Scratch memory of a call, in bytes; its contents do not matter."""
    return torch.empty(size, dtype=torch.uint8)


def _check_scores(
    call: _Call, q: Tensor, k: Tensor, scale: float, prefix: int, valid: Tensor | None,
    mask_queries: bool,
) -> None:  # fmt: skip
    """Raise a ValueError if q or k are not finite or scores overflow, from the largest magnitudes."""
    largest = abs(scale) * k.shape[-1]
    for bits in call.largest:
        largest *= ctypes.c_float.from_buffer(ctypes.c_uint32(bits)).value
    if largest < torch.finfo(torch.float32).max:
        return
    if valid is not None:
        mask = torch.cat((valid.new_ones(len(valid), prefix), valid), 1)[:, None, :, None]
        q, k = q.where(mask, 0.0) if mask_queries else q, k.where(mask, 0.0)
    check_finite_products(q, k, scale, torch.float32)
