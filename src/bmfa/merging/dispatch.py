"""Which kernel serves the operations that every block of a reduced model needs."""

from importlib import import_module
from typing import Any

from torch import Tensor

from bmfa.merging.kernels import eager

BACKENDS = ("auto", "eager", "triton")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor,
    *,
    scale: float,
    prefix: int,
    mass: bool,
    others: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Proportional attention and its mass: `kernels.eager.merging.attend` on a chosen backend."""
    kernel = choose(backend, q, k, v, size)
    output, masses = kernel.attend(
        q, k, v, size, scale=scale, prefix=prefix, mass=mass, others=others
    )
    return output, masses


def merge(
    x: Tensor,
    size: Tensor,
    features: Tensor | None,
    weight: Tensor | None,
    r: int,
    *,
    prefix: int,
    pair: str,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Bipartite merging: `kernels.eager.merging.merge` on a chosen backend."""
    kernel = choose(backend, x, size, features, weight)
    merged, sizes, target = kernel.merge(x, size, features, weight, r, prefix=prefix, pair=pair)
    return merged, sizes, target


def tome_features(k: Tensor, backend: str = "auto") -> Tensor:
    """Unit mean-head keys: `kernels.eager.merging.tome_features` on a chosen backend."""
    features: Tensor = choose(backend, k).tome_features(k)
    return features


def check_backend(backend: object) -> str:
    """The name of a backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; pass one of {', '.join(BACKENDS)}")
    return str(backend)


_LOADED: list[Any] = []


def _fused() -> Any:
    """The fused kernels, loaded when first asked for."""
    if not _LOADED:
        _LOADED.append(import_module("bmfa.merging.kernels.triton.launch"))
    return _LOADED[0]


def choose(backend: str, *tensors: Tensor | None) -> Any:
    """The module that serves some tensors: "auto" takes Triton on CUDA wherever it can."""
    on_cuda = tensors[0] is not None and tensors[0].is_cuda
    if backend == "eager" or (backend == "auto" and not on_cuda):
        return eager
    triton = _fused()
    reason = triton.unsupported(*tensors)
    if reason is None:
        return triton
    if backend == "triton":
        raise ValueError(f"backend 'triton' cannot run: {reason}; pass 'auto' or 'eager'")
    return eager
