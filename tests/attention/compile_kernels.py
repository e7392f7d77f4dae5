"""Compile kernels for Hopper on a machine without a GPU; run by test_triton_compiles.py.

Prints a line for each kernel.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bmfa.attention.kernels.triton.tiles import launch
from bmfa.attention.tiling import Tiling
from bmfa.grid import Grid

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
POINTERS |= {torch.float64: "*fp64"}
POINTERS |= {torch.int32: "*i32", torch.uint8: "*u8"}


def build(kernel, tensors, rest, options):
    """Compile with tensors of these dtypes, followed by the other arguments of a launch."""
    signature = {n: POINTERS[t] for n, t in zip(kernel.arg_names, tensors, strict=False)}
    constants = {}
    for index, value in enumerate(rest, len(tensors)):
        parameter = kernel.params[index]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=HOPPER, options=options)


def tiled(dim, dtype, masked, prefix, group_tiles, queries=None):
    """Compile all kernels; with `queries`, a grid of their own and the number of queries before it, only
    those that it makes a difference to, for three heads that share keys."""
    side, mask = 128, torch.uint8 if masked else dtype
    strides = ((3 * side**2 * dim, dim, 3 * dim),) * 4
    query_grid, before = queries or (None, prefix)
    tiling = Tiling(
        Grid(side, side), query_grid=query_grid, group_tiles=group_tiles, probes_per_group=1
    )
    tokens = before + tiling.queries.grid.size
    key = launch.CallKey(
        (1, 3, tokens, dim), strides, dtype, 0, masked, 1 if queries is None else 3, tiling, prefix,
        0.125,
    )  # fmt: skip
    chain = launch.prepare_attention(key, 0.1, 0.0, 0.5).sequence
    dtypes = dict.fromkeys(("q", "k", "v", "o"), dtype) | {"valid": mask}
    dtypes |= {"expanded_count": torch.int32, "coarse_bits": torch.int32, "probes": torch.float64}
    dtypes |= {name: piece[2] for name, piece in chain.workspace.tensors.items()}
    for plan, places in chain.steps:
        if queries is not None and "OWN_GRID" not in plan.kernel.arg_names:
            continue
        tensors = [dtypes[chain.names[place]] for place in places]
        built = build(plan.kernel, tensors, plan.rest, plan.options)
        own = "" if queries is None else "own grid "
        print(plan.kernel.__name__, dim, dtype, f"{own}shared {built.metadata.shared}")


if __name__ == "__main__":
    tiled(64, torch.bfloat16, False, 1, 2)
    tiled(80, torch.bfloat16, True, 17, 1)  # no power of 2, and other shapes than S = 64
    tiled(64, torch.bfloat16, True, 1, 1, (Grid(60, 100, frames=2), 3))
    if "--all" in sys.argv:
        for groups in (1, 2):
            tiled(128, torch.float16, True, 0, groups)
            for dim in (32, 72, 96, 128):
                tiled(dim, torch.bfloat16, False, 17, groups)
            tiled(128, torch.float32, True, 1, groups)
            tiled(80, torch.float16, False, 17, groups, (Grid(200, 210), 0))
            tiled(128, torch.float32, True, 0, groups, (Grid(60, 100, frames=2), 17))
