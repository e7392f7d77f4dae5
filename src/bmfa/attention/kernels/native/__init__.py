"""Tiled and exact attention in C++ on a CPU, without gradients.

`tiles.cpp` has the steps of `kernels/reference/tiles.py` and `product.h` what they are made of;
`library` finds and loads the build for the processor, and `compile` makes it.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bmfa.attention.choice import Levels, choose, level_thresholds
from bmfa.attention.kernels.native import library
from bmfa.attention.tiling import FARTHEST, NUM_LEVELS, UNIFORM_SHARE, TiledAttention, Tiling
from bmfa.checks import check_finite_products

Mask = npt.NDArray[np.bool_]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_CHANNELS = 256  # of keys and of values
MAX_THREADS = 256
PART_SLOTS = 64  # keys of a tile, at most
_EXACT, _MEASURE, _ATTEND = range(3)  # steps of a call


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
    ]


class _Call(ctypes.Structure):
    """`Call` of tiles.cpp: the same fields in the same order."""

    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "output")),
        *((name, ctypes.c_int64) for name in (
            "dtype", "heads", "share", "queries", "keys", "d", "e", "query_prefix", "threads",
        )),
        *((name, ctypes.c_void_p) for name in ("parallel", "scratch")),
        ("factor", ctypes.c_double),
        ("largest", ctypes.c_uint32 * 2),
        ("images", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (
            "key_tokens", "key_count", "query_tokens", "query_count",
        )),
        *((name, ctypes.c_int64) for name in (
            "tiles", "parts", "groups", "group_slots", "probe_groups", "group_probes", "levels",
        )),
        *((name, ctypes.c_void_p) for name in (
            "part_tokens", "part_count", "member_tokens", "members", "group_order", "quantiles",
            "thresholds",
        )),
        *((name, ctypes.c_double) for name in ("uniform_share", "farthest")),
        *((name, ctypes.c_void_p) for name in (
            "found", "norm", "weight", "threshold", "shrinkage", "exact", "expanded",
            "expanded_count", "probes",
        )),
    ]  # fmt: skip

    def point(self, **arrays: Tensor) -> None:
        """Set fields to the addresses of tensors, and keep these as long as the call."""
        self.kept = [*getattr(self, "kept", ()), *arrays.values()]
        for name, array in arrays.items():
            setattr(self, name, array.data_ptr())


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
    call, output = _describe(q, k, v, scale / tau, mask_queries and valid is not None)
    keys, queries = k.shape[2], q.shape[2]
    lists = _token_lists(None, prefix, queries, keys, valid, mask_queries)
    call.images = len(lists["key_count"])
    call.point(**lists)
    if q.numel():
        run = _load(call)
        for image in range(len(q)):
            run(image, _EXACT)
    _check_scores(call, q, k, scale, prefix, valid, mask_queries)
    return output


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, prefix: int, scale: float, tau: float = 1.0,
    error: float | None = None, expand: float | None = None, valid: Tensor | None = None,
    dense_threshold: float = 1.0, query_prefix: int | None = None,
) -> tuple[TiledAttention, bool]:  # fmt: skip
    """Compute tiled attention as specified by `bmfa.attention.kernels.reference.tiled_attention`.

    The arguments are those of the specification, in float32 or half precision.

    Returns:
        The result, and whether every head was computed exactly.

    Raises:
        ValueError: If q or k hold NaN or infinity, or if scores overflow.
    """
    attend = prepare_tiles(
        q, k, v, tiling, prefix=prefix, scale=scale, tau=tau, valid=valid, query_prefix=query_prefix
    )
    return attend(error, expand, dense_threshold)


def prepare_tiles(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, *, prefix: int, scale: float, tau: float = 1.0,
    valid: Tensor | None = None, query_prefix: int | None = None,
) -> Callable[[float | None, float | None, float], tuple[TiledAttention, bool]]:  # fmt: skip
    """Return `tiled_attention` of these arguments as a function of error, expand and dense_threshold.

    Called again for a single image, it does not measure the probes again. The results of all calls
    share their memory.
    """
    query_prefix = prefix if query_prefix is None else query_prefix
    mask_queries = tiling.query_grid is None
    call, output = _describe(q, k, v, scale / tau, mask_queries and valid is not None)
    batch, heads = q.shape[:2]
    call.query_prefix = query_prefix
    lists = _token_lists(tiling, prefix, q.shape[2], k.shape[2], valid, mask_queries)
    call.images, call.parts = lists["part_count"].shape
    call.tiles, call.groups, call.group_slots = tiling.tiles, *lists["member_tokens"].shape[1:]
    call.probe_groups = tiling.probe_groups(query_prefix)
    call.group_probes, call.levels = tiling.probes_per_group, NUM_LEVELS
    draws = _probe_draws(tiling, heads, query_prefix)
    call.point(**lists, **draws)
    call.uniform_share = UNIFORM_SHARE
    lead, probes = (batch, heads), tiling.probes(query_prefix)
    expanded = torch.empty((*lead, tiling.groups, tiling.tiles), dtype=torch.bool)
    count = torch.empty((*lead, tiling.groups), dtype=torch.int32)
    errors = torch.empty((*lead, probes, 3), dtype=torch.float64)
    found = torch.empty((heads, probes, 4, NUM_LEVELS), dtype=torch.float64)
    norm, weight = torch.empty((2, heads, probes), dtype=torch.float64)
    call.point(expanded=expanded, expanded_count=count, probes=errors)
    call.point(found=found, norm=norm, weight=weight)
    levels = Levels(found.numpy(), norm.numpy(), weight.numpy())
    run, measured = _load(call), -1  # the image that scratch memory holds

    def attend(
        error: float | None, expand: float | None, dense_threshold: float
    ) -> tuple[TiledAttention, bool]:
        nonlocal measured
        share = None if expand is None else expand / tiling.tiles
        call.farthest = 0.0 if error is None else FARTHEST
        exact = True
        for image in range(batch):
            if image != measured:
                run(image, _MEASURE)
                measured = image
            choice = choose(
                levels, tiling.probes_per_group, target=error, aim=tiling.error_aim, share=share,
                dense_threshold=dense_threshold,
            )  # fmt: skip
            call.threshold, call.shrinkage, call.exact = (x.ctypes.data for x in choice)
            run(image, _ATTEND)
            exact = exact and bool(choice.exact.all())
        _check_scores(call, q, k, scale, prefix, valid, mask_queries)
        return TiledAttention(output, count, errors, expanded), exact

    return attend


@lru_cache(maxsize=32)
def _probe_draws(tiling: Tiling, heads: int, query_prefix: int) -> dict[str, Tensor]:
    """Return the order of the groups, the numbers that draw the probes, and the thresholds."""
    order = tiling.group_order
    groups = order[: tiling.probe_groups(query_prefix)].view(1, -1, 1)
    head = torch.arange(heads).view(-1, 1, 1)
    quantiles = tiling.probe_quantile(groups, head, torch.arange(tiling.probes_per_group))
    return {
        "group_order": order.int(),
        "quantiles": quantiles.double().contiguous(),
        "thresholds": torch.from_numpy(level_thresholds()),
    }


def _token_lists(
    tiling: Tiling | None, prefix: int, queries: int, keys: int, valid: Tensor | None,
    mask_queries: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the tokens that exist among all keys and queries, in each tile and in each group, as
    `Call` has them, for the images of a mask, or one."""
    if valid is None:
        return _all_tokens(tiling, prefix, queries, keys)
    exist = np.pad(valid.numpy(), ((0, 0), (prefix, 0)), constant_values=True)
    return _find_tokens(
        tiling, prefix, exist, exist if mask_queries else np.ones((1, queries), bool)
    )


@lru_cache(maxsize=32)
def _all_tokens(tiling: Tiling | None, prefix: int, queries: int, keys: int) -> dict[str, Tensor]:
    return _find_tokens(tiling, prefix, np.ones((1, keys), bool), np.ones((1, queries), bool))


def _find_tokens(
    tiling: Tiling | None, prefix: int, keys_exist: Mask, queries_exist: Mask
) -> dict[str, Tensor]:
    # NumPy, because operations of torch in several threads hang in a forked process.
    images, queries = len(keys_exist), queries_exist.shape[1]
    queries_exist = np.broadcast_to(queries_exist, (images, queries))
    lists: dict[str, npt.NDArray[np.int64]] = {
        "key": np.arange(keys_exist.shape[1]),
        "query": np.arange(queries),
    }
    found = {}
    if tiling is not None:
        blocks = -(-prefix // PART_SLOTS)
        parts = np.full((tiling.tiles + blocks, PART_SLOTS), -1)
        slots = tiling.slot_tokens.numpy()
        parts[: tiling.tiles, : tiling.slots] = np.where(slots < 0, -1, slots + prefix)
        parts[tiling.tiles :].flat[:prefix] = np.arange(prefix)
        groups = tiling.queries.slot_tokens.numpy()[tiling.group_order.numpy()]
        first = queries - tiling.queries.grid.size
        lists |= {"part": parts, "member": np.where(groups < 0, -1, groups + first)}
    for name, tokens in lists.items():
        exist = queries_exist if name in ("query", "member") else keys_exist
        present = exist[:, np.maximum(tokens, 0)] & (tokens >= 0)  # (images, *tokens.shape)
        order = np.argsort(~present, axis=-1, kind="stable")
        listed = np.take_along_axis(np.broadcast_to(tokens, present.shape), order, -1)
        found[f"{name}_tokens"] = torch.from_numpy(np.ascontiguousarray(listed, np.int32))
        count = "members" if name == "member" else f"{name}_count"
        found[count] = torch.from_numpy(np.ascontiguousarray(present.sum(-1), np.int32))
    return found


def _describe(q: Tensor, k: Tensor, v: Tensor, factor: float, zeros: bool) -> tuple[_Call, Tensor]:
    """Return a call and its output."""
    q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, queries, d = q.shape
    e = v.shape[-1]
    # As hosts use it: the channels of all heads of a token are contiguous.
    shape = (batch, queries, heads, e)
    if zeros:  # queries that do not exist are not written. torch.zeros hangs in a forked process
        zero = np.zeros((*shape[:3], e * q.element_size()), np.uint8)
        output = torch.from_numpy(zero).view(q.dtype).transpose(1, 2)
    else:
        output = torch.empty(shape, dtype=q.dtype).transpose(1, 2)
    call = _Call()
    for name, x in (("q", q), ("k", k), ("v", v), ("output", output)):
        setattr(call, name, _Tensor(x.data_ptr(), *x.stride()[:3]))
    call.kept = [q, k, v]
    call.dtype, call.heads = DTYPES[q.dtype], heads
    call.share, call.queries, call.keys = heads // max(1, k.shape[1]), queries, k.shape[2]
    call.d, call.e, call.factor = d, e, factor
    return call, output


def _load(call: _Call) -> Callable[[int, int], None]:
    """Return a function that runs a step of a call for an image, with scratch memory for all of them."""
    loaded = library.load()
    if loaded is None:
        raise RuntimeError(f"native kernels cannot run: {library.unavailable_reason()}")
    call.threads, call.parallel = min(torch.get_num_threads(), MAX_THREADS), library.parallel()
    scratch = _allocate(loaded.bmfa_scratch_bytes(ctypes.byref(call)) + 64)
    call.scratch = -(-scratch.data_ptr() // 64) * 64
    call.kept.append(scratch)

    def run(image: int, step: int) -> None:
        loaded.bmfa_attend(ctypes.byref(call), image, step)

    return run


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
