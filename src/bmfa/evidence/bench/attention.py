"""Attention against the number of tokens: speed, error, density and memory, dense paths beside."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from bmfa.attention.inputs import Backend
from bmfa.checks import check_integer
from bmfa.evidence.bench import attention_summary, peers
from bmfa.evidence.bench.attention_methods import DEFAULT_METHODS, Setting
from bmfa.evidence.bench.attention_rows import DTYPES, Plan, SizeBench
from bmfa.evidence.bench.qkv import RANDOM, Source
from bmfa.evidence.bench.self_check import check_backend
from bmfa.evidence.runner import Progress
from bmfa.records import Record, Row, environment

TOKENS = {"cuda": (196, 1024, 4096, 16384, 65536), "cpu": (196, 1024, 4096, 16384)}
BLOCKS = (2, 5, 8, 11)
TIMING = {
    "cuda": "median; calls in a CUDA graph (milliseconds), and one by one (milliseconds_eager); dense "
    "paths are chosen before the clock starts, speedup_eager is against the fastest one by one",
    "cpu": "median of calls that take turns",
}


def run(
    source: Source,
    *,
    tokens: Sequence[int] = (),
    sizes: Sequence[int] = (),
    blocks: Sequence[int] | None = None,
    methods: Sequence[str] = (),
    head_dim: int | None = None,
    dtype: str | None = None,
    backend: Backend | None = None,
    repeats: int = 5,
    peer: Sequence[str] = (),
    certificate: bool = True,
    progress: Progress | None = None,
) -> Record:
    """Rows for every number of tokens, after a check of all that is timed against the oracle.

    `sizes` are pixels, `tokens` square numbers; blocks are those of the model, clipped to its depth.
    """
    check_integer("repeats", repeats, low=1)
    kind = torch.device(source.device).type
    plan = Plan(
        tuple(str(Setting.parse(name)) for name in methods or _usual(DEFAULT_METHODS, kind)),
        backend or ("triton" if kind == "cuda" else "eager"),
        dtype or ("bfloat16" if kind == "cuda" else "float32"),
        source.device,
        repeats,
        tuple(peer),
        certificate,
    )
    if plan.dtype not in DTYPES:
        raise ValueError(f"dtype is {plan.dtype!r}; pass one of {', '.join(DTYPES)}")
    present, absent = peers.available(plan.peers)
    plan = replace(plan, peers=tuple(present))
    pixels = _sizes(source, tokens, sizes, _usual(TOKENS, kind))
    chosen = _blocks(source, blocks)
    notes: dict[str, str] = {}
    rows: list[Row] = []
    checked: set[int] = set()
    with torch.inference_mode():
        for index, size in enumerate(pixels):
            rows += _at_size(source, size, chosen, plan, notes, checked)
            if head_dim is not None:
                rows += _widened(source, size, chosen, head_dim, plan, notes, checked, rows)
            if progress is not None:
                progress(index + 1, len(pixels))
    if source.model == RANDOM:
        rows = [{**row, "keys": "random q, k, v"} for row in rows]
    settings = {
        **source.described(),
        "sizes": pixels,
        "blocks": list(chosen),
        "head_dim": head_dim,
        "backend": plan.backend,
        "repeats": repeats,
        "seed": source.seed,
        "timing": _usual(TIMING, kind),
        "error": "relative L2 of the output against float64 attention on the float32 q, k, v, mean over "
        "pictures and blocks, and of the worst block; error_queries of each head are compared",
        "self_check": "passed: tiled attention and dense paths against float64 on small grids",
        "absent": {**absent, **notes},
        **attention_summary.summary(rows),
    }
    return Record("bench", settings, rows, environment(source.device))


Value = TypeVar("Value")


def _usual(values: Mapping[str, Value], kind: str) -> Value:
    """What is taken on a kind of device without a word."""
    return values.get(kind, values["cpu"])


def _sizes(
    source: Source, tokens: Sequence[int], sizes: Sequence[int], usual: Sequence[int]
) -> list[int]:
    """Pixels, from pixels or from square numbers of tokens."""
    patch = source.plan[0]
    if sizes and tokens:
        raise ValueError("both --size and --tokens are given; pass one of them")
    for size in sizes:
        check_integer("size", size, low=patch)
        if size % patch:
            raise ValueError(
                f"size is {size}; pass a multiple of the model's {patch} pixel patches"
            )
    pixels = list(sizes)
    for count in () if sizes else tokens or usual:
        side = round(check_integer("tokens", count, low=1) ** 0.5)
        if side * side != count:
            raise ValueError(f"tokens is {count}; pass a square number, as {side * side}")
        pixels.append(side * patch)
    return pixels


def _blocks(source: Source, blocks: Sequence[int] | None) -> tuple[int, ...]:
    depth = source.plan[1]
    if blocks is None:
        return tuple(block for block in BLOCKS if block < depth) or (depth - 1,)
    return tuple(sorted({check_integer("blocks", b, low=0, high=depth - 1) for b in blocks}))


def _at_size(
    source: Source,
    size: int,
    blocks: Sequence[int],
    plan: Plan,
    notes: dict[str, str],
    checked: set[int],
) -> list[Row]:
    recorded = source.record(size, blocks)
    dim = recorded.shape[2]
    if dim not in checked:
        check_backend(plan.backend, DTYPES[plan.dtype], plan.device, [dim])
        checked.add(dim)
    return SizeBench(recorded, plan, notes).rows()


def _widened(
    source: Source,
    size: int,
    blocks: Sequence[int],
    head_dim: int,
    plan: Plan,
    notes: dict[str, str],
    checked: set[int],
    own: Sequence[Row],
) -> list[Row]:
    """Heads of another width, on random weights, beside the error on the model's own heads.

    Random keys have hardly any structure, so an error target would expand nothing.
    """
    shares = tuple(name for name in plan.methods if name.startswith("tiles:"))
    narrow = replace(plan, methods=shares, peers=(), certificate=False)
    rows = _at_size(source.widened(head_dim), size, blocks, narrow, notes, checked)
    known = {(row["n"], row["method"]): row.get("error_l2_percent") for row in own}
    return [
        {**row, "keys": "random weights", "own_error_percent": known.get((row["n"], row["method"]))}
        for row in rows
    ]
