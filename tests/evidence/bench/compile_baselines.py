"""Compile the kernels of the baselines for Hopper without a GPU; run by test_baselines_compile.py."""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bmfa.evidence.bench.mean_tiles import launch
from bmfa.evidence.bench.topk import kernels as topk

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
POINTERS |= {torch.int32: "*i32"}


def build(kernel, tensors, rest, options):
    """Compile with tensors of these dtypes, followed by the other arguments of a launch."""
    signature = dict(zip(kernel.arg_names, (POINTERS[x] for x in tensors), strict=False))
    constants = {}
    for index, value in enumerate(rest, len(tensors)):
        parameter = kernel.params[index]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options)
    print(kernel.__name__)


def mean_tiles(dim, dtype, prefix):
    side = 64
    strides = ((3 * side**2 * dim, dim, 3 * dim),) * 4
    key = launch.CallKey(1, 3, dim, strides, dtype, 0, side, side, prefix)
    sequence = launch.prepare(key, 4).sequence
    dtypes = dict.fromkeys(("q", "k", "v", "o"), dtype)
    dtypes |= dict.fromkeys(("expanded_count", "coarse_bits"), torch.int32)
    dtypes |= {name: piece[2] for name, piece in sequence.workspace.tensors.items()}
    for step, indices in sequence.steps:
        tensors = [dtypes[sequence.names[index]] for index in indices]
        build(step.kernel, tensors, step.rest, step.options)


def keep_or_drop(dim, dtype, prefix):
    options = {"num_warps": topk.NUM_WARPS, "num_stages": topk.NUM_STAGES}
    block, precision = topk._dot_block(dim), "tf32"
    strides = (64 * dim, 4096 * dim, dim)
    rest = (*strides, 3, 64, 0.125, dim, block, topk.BLOCK_R, topk.TILES_PER_PROGRAM, 64, precision)
    build(topk.mass_kernel, (dtype, dtype, torch.float32), rest, options)
    rest = (
        *strides * 3,
        3,
        prefix,
        64,
        6,
        0.125,
        dim,
        block,
        64,
        topk._dot_block(prefix),
        precision,
    )
    build(topk.listed_tiles_kernel, (dtype, dtype, dtype, torch.int32, dtype), rest, options)


if __name__ == "__main__":
    mean_tiles(64, torch.bfloat16, 1)
    keep_or_drop(64, torch.bfloat16, 1)
