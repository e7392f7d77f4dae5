"""Real queries, keys and values: what a model's attention is given for pictures of some size."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from bmfa.evidence.bench.long_models import Picture, load_long, pictures_of, pixels_of
from bmfa.grid import Grid
from bmfa.models.hosts import Host, find_host

Tensors = tuple[Tensor, Tensor, Tensor]
# A source without a model: q, k, v are normal and independent, with the heads of DeiT-Tiny.
RANDOM = "random"
RANDOM_HEADS, RANDOM_DIM, RANDOM_PATCH = 3, 64, 16


@dataclass(frozen=True, eq=False)
class Recorded:
    """q, k, v (pictures, heads, prefix + N, d) of some blocks, in float32."""

    grid: Grid
    prefix: int
    blocks: dict[int, Tensors]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Pictures, heads and head dimension."""
        q = next(iter(self.blocks.values()))[0]
        return q.shape[0], q.shape[1], q.shape[3]


@dataclass(frozen=True, eq=False)
class Source:
    """Which model sees which pictures."""

    model: str
    weights: str | None
    pictures: list[Picture]
    names: list[str]
    head_dim: int | None = None
    seed: int = 0
    device: str = "cpu"

    @classmethod
    def of(
        cls,
        model: str = "embedded",
        weights: str | None = None,
        data_dir: str | None = None,
        *,
        pictures: int = 1,
        head_dim: int | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> "Source":
        """The first pictures of a folder, or embedded scenes; with RANDOM so many random draws."""
        if model == RANDOM:
            if weights is not None or data_dir is not None:
                raise ValueError("model random has no weights and no pictures; leave both out")
            draws = [f"draw {index}" for index in range(pictures)]
            return cls(model, None, [], draws, head_dim, seed, device)
        found, names = pictures_of(data_dir, pictures, seed)
        return cls(model, weights, found, names, head_dim, seed, device)

    def widened(self, head_dim: int) -> "Source":
        """The same with heads of another width, hence random weights."""
        return Source(self.model, None, self.pictures, self.names, head_dim, self.seed, self.device)

    @cached_property
    def plan(self) -> tuple[int, int, str]:
        """Pixels along the side of a token, blocks of the model, and what its weights are."""
        if self.model == RANDOM:
            return RANDOM_PATCH, 1, "none"
        loaded, weights = load_long(self.model, self.weights, size=224, head_dim=self.head_dim)
        host = find_host(loaded.model)
        return _patch_size(host), len(host.attentions), weights

    def described(self) -> dict[str, Any]:
        """For the settings of a record."""
        return {"model": self.model, "weights": self.plan[2], "pictures": self.names}

    def record(self, size: int, blocks: Sequence[int]) -> Recorded:
        """What attention is given in some blocks, picture by picture, for pictures of size x size."""
        if self.model == RANDOM:
            return self._random(size // RANDOM_PATCH, blocks)
        loaded, _ = load_long(
            self.model, self.weights, size=size, head_dim=self.head_dim, seed=self.seed
        )
        model = loaded.model.to(self.device)
        host = find_host(model)
        heard: list[dict[int, Tensors]] = []
        for picture in self.pictures:
            pixels = pixels_of(loaded, [picture], self.device)
            heard.append(_heard(model, loaded.options, pixels, blocks))
        joined = {block: _joined([one[block] for one in heard]) for block in blocks}
        side = size // _patch_size(host)
        return Recorded(Grid(side, side), host.prefix, joined)

    def _random(self, side: int, blocks: Sequence[int]) -> Recorded:
        """Normal q, k, v on a grid of side x side, without a prefix."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (len(self.names), RANDOM_HEADS, side * side, self.head_dim or RANDOM_DIM)
        drawn: dict[int, Tensors] = {}
        for block in blocks:
            q, k, v = (torch.randn(shape, generator=generator).to(self.device) for _ in range(3))
            drawn[block] = (q, k, v)
        return Recorded(Grid(side, side), 0, drawn)


def _patch_size(host: Host) -> int:
    projection: Any = host.projection
    return int(projection.stride[0])


def _joined(parts: Sequence[Tensors]) -> Tensors:
    q, k, v = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return q, k, v


class _Enough(Exception):  # noqa: N818
    """All that is wanted was heard."""


class _Listening(TorchFunctionMode):
    """Notes what the wanted calls of scaled dot-product attention are given, one call a block."""

    def __init__(self, wanted: Sequence[int]) -> None:
        super().__init__()
        self.wanted, self.calls = set(wanted), 0
        self.found: dict[int, Tensors] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            if self.calls in self.wanted:
                q, k, v = (x.contiguous() for x in args[:3])
                self.found[self.calls] = (q, k, v)
            self.calls += 1
            if self.calls > max(self.wanted):
                raise _Enough
        return func(*args, **(kwargs or {}))


def _heard(
    model: torch.nn.Module, options: Any, pixels: Tensor, blocks: Sequence[int]
) -> dict[int, Tensors]:
    listening = _Listening(blocks)
    try:
        with torch.inference_mode(), listening:
            model(pixels, **options)
    except _Enough:
        return listening.found
    raise ValueError(
        f"{type(model).__name__} called scaled_dot_product_attention {listening.calls} times, too few "
        f"for block {max(blocks)}; unset TIMM_FUSED_ATTN, or pass a model whose attention is fused"
    )
