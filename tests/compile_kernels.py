"""Compile Triton kernels for Hopper on a machine without a GPU: a compiler may refuse what the
interpreter runs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bmfa.attention.kernels.triton.tiles import launch
from bmfa.attention.tiling import Tiling
from bmfa.grid import Grid
from bmfa.merging.kernels.triton import attention, features, merge

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024  # bytes that a program may have
HALF, BRAIN, SINGLE, INT = torch.float16, torch.bfloat16, torch.float32, torch.int32
POINTERS = {BRAIN: "*bf16", HALF: "*fp16", SINGLE: "*fp32", torch.float64: "*fp64"}
POINTERS |= {INT: "*i32", torch.uint8: "*u8"}


class Built(NamedTuple):
    """A compiled kernel, its head dimension, and bytes of shared memory."""

    kernel: str
    dim: int
    shared: int


def compile_kernels(which: str, folder: Path) -> list[Built]:
    """Compile "merging", "tiles" or "more tiles" in a process without the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, __file__, which]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (line.split() for line in done.stdout.splitlines())
    return [Built(name, int(dim), int(shared)) for name, dim, shared in lines]


def build(kernel, dtypes, rest, options, dim=64):
    """Compile with tensors of these dtypes, followed by the other arguments of a launch."""
    signature = {n: POINTERS[t] for n, t in zip(kernel.arg_names, dtypes, strict=False)}
    constants = {}
    for index, value in enumerate(rest, len(dtypes)):
        parameter = kernel.params[index]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature, constants)
    options = {name: value for name, value in options.items() if value is not None}
    built = triton.compile(source, target=HOPPER, options=options)
    print(kernel.__name__, dim, built.metadata.shared)


def tiled(dim, dtype, masked, prefix, group_tiles, query_grid=None, query_prefix=0):
    """Compile all kernels; with a grid of the queries, for three heads that share keys."""
    side, mask = 128, torch.uint8 if masked else dtype
    strides = ((3 * side**2 * dim, dim, 3 * dim),) * 4
    tiling = Tiling(Grid(side, side), 8, query_grid, group_tiles, probes_per_group=1)
    before, shared = (prefix, 1) if query_grid is None else (query_prefix, 3)
    queries, rest = (
        before + tiling.queries.grid.size,
        (dtype, 0, masked, shared, tiling, prefix, 0.125),
    )
    key = launch.CallKey((1, 3, queries, dim), strides, *rest)
    chain = launch.prepare_attention(key, 0.1, 0.0, 0.5).sequence
    dtypes = dict.fromkeys(("q", "k", "v", "o"), dtype) | {"valid": mask}
    dtypes |= {"expanded_count": INT, "coarse_bits": INT, "probes": torch.float64}
    dtypes |= {name: piece[2] for name, piece in chain.workspace.tensors.items()}
    for plan, places in chain.steps:
        tensors = [dtypes[chain.names[place]] for place in places]
        build(plan.kernel, tensors, plan.rest, plan.options, dim)


def qkv(tokens, dtype):
    """q, k and v (2, 3, tokens, 64) as the strided views that timm makes."""
    return torch.empty(2, tokens, 3, 3, 64, dtype=dtype, device="meta").permute(2, 0, 3, 1, 4)


def merging():
    for tokens, dtype in ((197, HALF), (40, BRAIN)):
        q, k, v = qkv(tokens, dtype)
        strides = (*q.stride(), *k.stride(), *v.stride())
        found = attention._prepare(0, dtype, q.shape, strides, 0.125, 1, True)
        dtypes = (dtype, dtype, dtype, SINGLE, dtype, SINGLE)
        build(found.kernel, dtypes, found.rest, found.options)
    for tokens, dtype, parts in ((197, HALF, 0), (40, SINGLE, 3)):
        x = torch.empty(2, tokens, 192, dtype=dtype, device="meta")
        f = x if parts else qkv(tokens, dtype)[1]
        shapes = (tuple(x.shape), x.stride(), (dtype, tuple(f.shape), f.stride()))
        found = merge._prepare(0, dtype, *shapes, parts, 8, 1)
        dtypes = (dtype, SINGLE, dtype, SINGLE, dtype, SINGLE, INT)
        build(found.kernel, dtypes, found.rest, found.options)
    found = features.prepare_unit_mean_keys(qkv(197, BRAIN)[1])
    build(found.kernel, (BRAIN, BRAIN), found.rest, found.options)


if __name__ == "__main__":
    if sys.argv[1] == "merging":
        merging()
    elif sys.argv[1] == "tiles":
        tiled(80, BRAIN, True, 17, 1, Grid(60, 100, frames=2), 3)  # the dimension is no power of 2
    else:
        tiled(64, BRAIN, False, 1, 2)
        tiled(128, SINGLE, True, 1, 2)
