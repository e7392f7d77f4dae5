"""Arguments of the kernels that are no tensors, by their names."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmfa.attention.kernels.triton.tiled.sizes import GROUP, SIDE


class Frame(NamedTuple):
    """Where the tokens of a call lie, and how they are scored: what its kernels are compiled for."""

    batch: int
    heads: int
    dim: int
    strides: tuple[tuple[int, ...], ...]  # (batch, head, row) of q, k and perhaps v and the output
    dtype: torch.dtype
    device: int
    masked: bool
    height: int
    width: int
    prefix: int
    factor: float
    aligned: bool

    @classmethod
    def of(
        cls,
        tensors: tuple[Tensor, ...],
        valid: Tensor | None,
        height: int,
        width: int,
        prefix: int,
        factor: float,
        aligned: bool,
    ) -> "Frame":
        """From q, k and so on, (B, heads, prefix + N, d) each."""
        q = tensors[0]
        batch, heads, _, dim = q.shape
        strides = tuple(tensor.stride()[:3] for tensor in tensors)
        return cls(
            batch, heads, dim, strides, q.dtype, q.get_device(), valid is not None,
            height, width, prefix, factor, aligned,
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """As the kernels call them."""
        down, across = -(-self.height // SIDE), -(-self.width // SIDE)
        own = {
            f"{name}_{what}": stride
            for name, strides in zip("qkvo", self.strides, strict=False)
            for what, stride in zip(("batch", "head", "row"), strides, strict=True)
        }
        return {
            **own,
            "heads": self.heads,
            "prefix": self.prefix,
            "height": self.height,
            "width": self.width,
            "across": across,
            "tiles": down * across,
            "groups": -(-down * across // GROUP),
            "factor": self.factor,
            "D": self.dim,
            "BLOCK_D": max(16, power_of_2(self.dim)),
            "SIDE": SIDE,
            "GROUP": GROUP,
            "PREFIX": 0 if self.prefix == 0 else max(16, power_of_2(self.prefix)),
            "ALIGNED": self.aligned,
            "MASKED": self.masked,
            "RAGGED": bool(self.height % SIDE or self.width % SIDE),
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
        }


def mask_or_any(valid: Tensor | None, other: Tensor) -> Tensor:
    """The mask in bytes; where there is none the kernels read nothing of what stands in for it."""
    return other if valid is None else valid.contiguous().view(torch.uint8)


def power_of_2(number: int) -> int:
    """The least one that is no less."""
    return 1 << (number - 1).bit_length()
