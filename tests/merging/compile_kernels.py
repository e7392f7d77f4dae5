"""Compile the merging kernels for Hopper on a machine without a GPU; run by test_triton_compiles.py."""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bmfa.merging.kernels.triton import attention, features, merge

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
}


def compile_launch(launch, *dtypes):
    """Compile the kernel of a cached launch with tensors of these dtypes."""
    kernel = launch.kernel
    signature = dict(zip(kernel.arg_names, (POINTERS[dtype] for dtype in dtypes), strict=False))
    constants = {}
    for index, value in enumerate(launch.rest, len(dtypes)):
        parameter = kernel.params[index]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    options = {name: value for name, value in launch.options.items() if value is not None}
    triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options)
    print(kernel.__name__)


def qkv(tokens, dtype):
    """q, k and v (2, 3, tokens, 64) as the strided views that timm makes."""
    return torch.empty(2, tokens, 3, 3, 64, dtype=dtype, device="meta").permute(2, 0, 3, 1, 4)


def compile_attention(tokens, dtype):
    q, k, v = qkv(tokens, dtype)
    strides = (*q.stride(), *k.stride(), *v.stride())
    launch = attention._prepare(0, dtype, q.shape, strides, 0.125, 1, True)
    compile_launch(launch, dtype, dtype, dtype, torch.float32, dtype, torch.float32)


def compile_merge(tokens, dtype, r, parts):
    x = torch.empty(2, tokens, 192, dtype=dtype, device="meta")
    f = x if parts else qkv(tokens, dtype)[1]
    shapes = (tuple(x.shape), x.stride(), (dtype, tuple(f.shape), f.stride()))
    launch = merge._prepare(0, dtype, *shapes, parts, r, 1)
    single = torch.float32
    compile_launch(launch, dtype, single, dtype, single, dtype, single, torch.int32)


if __name__ == "__main__":
    compile_attention(197, torch.float16)
    compile_attention(40, torch.bfloat16)
    compile_merge(197, torch.float16, 8, 0)
    compile_merge(40, torch.float32, 8, 3)
    k = qkv(197, torch.bfloat16)[1]
    compile_launch(features.prepare_unit_mean_keys(k), torch.bfloat16, torch.bfloat16)
