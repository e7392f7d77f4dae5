"""Arguments of the kernels that are no tensors, by their names."""

from typing import Any

import torch

from bmfa.kernels.triton.tiled.sizes import GROUP, SIDE

Strides = tuple[int, ...]


def common_arguments(
    heads: int,
    dim: int,
    dtype: torch.dtype,
    masked: bool,
    height: int,
    width: int,
    prefix: int,
    factor: float,
    aligned: bool,
) -> dict[str, Any]:
    """Arguments of most kernels, by their names."""
    down, across = -(-height // SIDE), -(-width // SIDE)
    return {
        "heads": heads,
        "prefix": prefix,
        "height": height,
        "width": width,
        "across": across,
        "tiles": down * across,
        "groups": -(-down * across // GROUP),
        "factor": factor,
        "D": dim,
        "BLOCK_D": max(16, power_of_2(dim)),
        "SIDE": SIDE,
        "GROUP": GROUP,
        "PREFIX": 0 if prefix == 0 else max(16, power_of_2(prefix)),
        "ALIGNED": aligned,
        "MASKED": masked,
        "RAGGED": bool(height % SIDE or width % SIDE),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def named_strides(names: str, strides: tuple[Strides, ...]) -> dict[str, int]:
    """The strides of tensors as the kernels call them."""
    return {
        f"{name}_{what}": stride
        for name, own in zip(names, strides, strict=True)
        for what, stride in zip(("batch", "head", "row"), own, strict=True)
    }


def power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
