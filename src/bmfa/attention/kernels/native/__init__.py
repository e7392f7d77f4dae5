"""Tiled and exact attention in C++ on a CPU, without gradients.

`tiles.cpp` has the steps of `kernels/reference/tiles.py` and `product.h` what they are made of;
`library` finds and loads the build for the processor, and `compile` makes it.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bmfa.attention.choice import Levels, choose, level_thresholds
from bmfa.attention.kernels.native import library
from bmfa.attention.tiling import FARTHEST, NUM_LEVELS, UNIFORM_SHARE, TiledAttention, Tiling
from bmfa.checks import check_finite_products

Array = npt.NDArray[Any]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_CHANNELS = 256  # of keys and of values
MAX_THREADS = 256
PART_SLOTS = 64  # keys of a tile, at most
MOST_KEPT_BYTES = 160 << 20  # of scratch memory that a thread keeps between calls
_EXACT, _MEASURE, _ATTEND = range(3)  # steps of a call
last_call = threading.local()  # its scratch memory, in each thread; None frees it


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *_fields(ctypes.c_int64, "batch head token")]


class _Call(ctypes.Structure):
    """`Call` of tiles.cpp: the same fields in the same order."""

    _fields_ = [
        *_fields(_Tensor, "q k v output"),
        *_fields(ctypes.c_int64, "dtype heads share queries keys d e query_prefix threads"),
        *_fields(ctypes.c_void_p, "parallel scratch"),
        *_fields(ctypes.c_double, "factor"),
        *_fields(ctypes.c_uint32 * 2, "largest"),
        *_fields(ctypes.c_int64, "images"),
        *_fields(ctypes.c_void_p, "key_tokens key_count query_tokens query_count"),
        *_fields(ctypes.c_int64, "tiles parts groups group_slots probe_groups group_probes levels"),
        *_fields(ctypes.c_void_p, "part_tokens part_count member_tokens member_count group_order"),
        *_fields(ctypes.c_void_p, "quantiles thresholds"),
        *_fields(ctypes.c_double, "uniform_share farthest"),
        *_fields(ctypes.c_void_p, "found norm weight threshold shrinkage exact"),
        *_fields(ctypes.c_void_p, "expanded expanded_count probes"),
    ]

    def point(self, **arrays: Array) -> None:
        """Set fields to the addresses of arrays, and keep these as long as the call."""
        self.kept = [*getattr(self, "kept", ()), *arrays.values()]
        for name, array in arrays.items():
            setattr(self, name, array.ctypes.data)


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the native kernels cannot run on these tensors, or None if they can."""
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
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
    return library.unavailable_reason()


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
    call, output = _describe(q, k, v, None, scale / tau, prefix, valid, mask_queries)
    if q.numel():
        run = _load(call)
        for image in range(len(q)):
            run(image, _EXACT)
    _check_scores(call, q, k, scale, prefix, valid, mask_queries)
    return output


def prepare_tiles(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, prefix: int, scale: float, tau: float = 1.0,
    valid: Tensor | None = None, query_prefix: int | None = None,
) -> Callable[..., TiledAttention]:  # fmt: skip
    """Prepare tiled attention as specified by `bmfa.attention.kernels.reference.tiled_attention`.

    The arguments are those of the specification, in float32 or half precision.

    Returns:
        A function of error, expand and dense_threshold, which returns the result. Called again for a
        single image, it does not measure the probes again. The results of all calls share their memory.
        Another native call of the thread ends its use: both have the same scratch memory.
        It raises a ValueError if q or k hold NaN or infinity, or if scores overflow.
    """
    query_prefix = prefix if query_prefix is None else query_prefix
    mask_queries = tiling.query_grid is None
    call, output = _describe(q, k, v, tiling, scale / tau, prefix, valid, mask_queries)
    batch, heads = q.shape[:2]
    draws, probes = tiling.probes_per_group, tiling.probes(query_prefix)
    call.query_prefix, call.uniform_share, call.levels = query_prefix, UNIFORM_SHARE, NUM_LEVELS
    call.probe_groups, call.group_probes = tiling.probe_groups(query_prefix), draws
    call.point(**_probe_draws(tiling, heads, query_prefix))
    expanded = np.empty((batch, heads, tiling.groups, tiling.tiles), np.bool_)
    count = np.empty((batch, heads, tiling.groups), np.int32)
    errors = np.empty((batch, heads, probes, 3))
    call.point(expanded=expanded, expanded_count=count, probes=errors)
    found, norm = np.empty((heads, probes, 4, NUM_LEVELS)), np.empty((heads, probes))
    levels = Levels(found, norm, np.empty((heads, probes)))
    call.point(**levels._asdict())
    run, measured = _load(call), -1  # the image that scratch memory holds

    def attend(
        *, error: float | None, expand: float | None, dense_threshold: float
    ) -> TiledAttention:
        nonlocal measured
        share = None if expand is None else expand / tiling.tiles
        call.farthest = 0.0 if error is None else FARTHEST
        exact = True
        for image in range(batch):
            if image != measured:
                run(image, _MEASURE)
                measured = image
            choice = choose(
                levels, draws, target=error, aim=tiling.error_aim, share=share,
                dense_threshold=dense_threshold,
            )  # fmt: skip
            call.threshold, call.shrinkage, call.exact = (x.ctypes.data for x in choice)
            run(image, _ATTEND)
            exact = exact and bool(choice.exact.all())
        _check_scores(call, q, k, scale, prefix, valid, mask_queries)
        if exact:  # nothing is left for probes to measure
            errors[:] = 0.0
        results = [torch.from_numpy(x) for x in (count, errors, expanded)]
        return TiledAttention(output, results[0], results[1], results[2], exact)

    return attend


@lru_cache(maxsize=32)
def _probe_draws(tiling: Tiling, heads: int, query_prefix: int) -> dict[str, Array]:
    """Return the order of the groups, the numbers that draw the probes, and the thresholds."""
    groups = tiling.group_order[: tiling.probe_groups(query_prefix)].view(1, -1, 1)
    head = torch.arange(heads, device="cpu").view(-1, 1, 1)
    draws = torch.arange(tiling.probes_per_group, device="cpu")
    quantiles = tiling.probe_quantile(groups, head, draws)
    return {
        "group_order": tiling.group_order.int().numpy(),
        "quantiles": quantiles.double().contiguous().numpy(),
        "thresholds": level_thresholds(),
    }


@lru_cache(maxsize=32)
def _all_tokens(tiling: Tiling | None, prefix: int, queries: int, keys: int) -> dict[str, Array]:
    return _find_tokens(tiling, prefix, np.ones((1, keys), bool), np.ones((1, queries), bool))


def _find_tokens(
    tiling: Tiling | None, prefix: int, keys_exist: Array, queries_exist: Array
) -> dict[str, Array]:
    """Return the tokens that exist among all keys and queries, in each tile and in each group, as
    `Call` has them, for the images of a mask, or one."""
    # NumPy, because operations of torch in several threads hang in a forked process.
    queries = queries_exist.shape[1]
    queries_exist = np.broadcast_to(queries_exist, (len(keys_exist), queries))
    lists: dict[str, tuple[Array, Array]] = {
        "key": (np.arange(keys_exist.shape[1]), keys_exist),
        "query": (np.arange(queries), queries_exist),
    }
    if tiling is not None:
        parts = np.full((tiling.tiles - -prefix // PART_SLOTS, PART_SLOTS), -1)
        slots = tiling.slot_tokens.numpy()
        parts[: tiling.tiles, : tiling.slots] = np.where(slots < 0, -1, slots + prefix)
        parts[tiling.tiles :].flat[:prefix] = np.arange(prefix)
        groups = tiling.queries.slot_tokens.numpy()[tiling.group_order.numpy()]
        groups = np.where(groups < 0, -1, groups + queries - tiling.queries.grid.size)
        lists |= {"part": (parts, keys_exist), "member": (groups, queries_exist)}
    found = {}
    for name, (tokens, exist) in lists.items():
        present = exist[:, np.maximum(tokens, 0)] & (tokens >= 0)  # (images, *tokens.shape)
        order = np.argsort(~present, axis=-1, kind="stable")
        listed = np.take_along_axis(np.broadcast_to(tokens, present.shape), order, -1)
        found[f"{name}_tokens"] = np.ascontiguousarray(listed, np.int32)
        found[f"{name}_count"] = np.ascontiguousarray(present.sum(-1), np.int32)
    return found


def _describe(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling | None, factor: float, prefix: int,
    valid: Tensor | None, mask_queries: bool,
) -> tuple[_Call, Tensor]:  # fmt: skip
    """Return a call, with the tokens that exist, and its output."""
    q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, queries, d = q.shape
    e, keys = v.shape[-1], k.shape[2]
    # As hosts use it: the channels of all heads of a token are contiguous.
    shape = (batch, queries, heads, e)
    if valid is None:
        lists = _all_tokens(tiling, prefix, queries, keys)
        output = torch.empty(shape, dtype=q.dtype, device="cpu")
    else:
        exist = np.pad(valid.numpy(), ((0, 0), (prefix, 0)), constant_values=True)
        every = np.ones((1, queries), bool)
        lists = _find_tokens(tiling, prefix, exist, exist if mask_queries else every)
        # Queries that do not exist are not written. torch.zeros hangs in a forked process.
        zero = np.zeros((*shape[:3], e * q.element_size()), np.uint8)
        output = torch.from_numpy(zero).view(q.dtype)
    output = output.transpose(1, 2)
    call = _Call(
        *(_Tensor(x.data_ptr(), *x.stride()[:3]) for x in (q, k, v, output)),
        dtype=DTYPES[q.dtype], heads=heads, share=heads // max(1, k.shape[1]), queries=queries,
        keys=keys, d=d, e=e, factor=factor, images=len(lists["key_count"]),
    )  # fmt: skip
    call.kept = [q, k, v]
    call.point(**lists)
    if tiling is not None:
        call.tiles, call.parts = tiling.tiles, lists["part_count"].shape[1]
        call.groups, call.group_slots = lists["member_tokens"].shape[1:]
    return call, output


def _load(call: _Call) -> Callable[..., None]:
    """Return a function that runs a step of a call for an image, with scratch memory for all of them."""
    loaded = library.load()
    if loaded is None:
        raise RuntimeError(f"native kernels cannot run: {library.unavailable_reason()}")
    call.threads, call.parallel = min(torch.get_num_threads(), MAX_THREADS), library.parallel()
    scratch = _allocate(loaded.bmfa_scratch_bytes(ctypes.byref(call)) + 64)
    call.scratch = -(-scratch.data_ptr() // 64) * 64
    call.kept.append(scratch)
    return partial(loaded.bmfa_attend, ctypes.byref(call))


def _allocate(size: int) -> Tensor:
    """Scratch memory of a call, in bytes; its contents do not matter.

    A thread keeps that of its last call for the next one, up to MOST_KEPT_BYTES: new pages would take
    3 to 10 % of a call over 4,096 tokens, and up to half of one over 16,384.
    """
    kept: Tensor | None = getattr(last_call, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = torch.empty(size, dtype=torch.uint8, device="cpu")
        last_call.scratch = kept if size <= MOST_KEPT_BYTES else None
    return kept


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
