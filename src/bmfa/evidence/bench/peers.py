"""Sparse attention of other packages, timed where they are installed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmfa.evidence.bench.dense import Attention
from bmfa.grid import Grid
from bmfa.packages import is_installed, load_package
from bmfa.trees.layout import tile_layout

PISA_SIDE = 8
PISA_BLOCK = PISA_SIDE**2
# Shares of the keys that are read: blocks kept, or the area of a neighbourhood.
SHARES = (0.1, 0.3)
# PISA approximates the blocks that it does not keep, so smaller shares are of interest too.
PISA_SHARES = (0.05, 0.1, 0.2, 0.3)


def available() -> tuple[list[str], dict[str, str]]:
    """Return the peers that are installed, and why each other one is not timed."""
    missing = {n: peer.module for n, peer in PEERS.items() if not is_installed(peer.module)}
    absent = {name: f"{module} is not installed" for name, module in missing.items()}
    return [name for name in PEERS if name not in missing], absent


def calls(names: Sequence[str], grid: Grid, prefix: int) -> dict[str, tuple[Attention, float]]:
    """Return the attention function and the density of every setting of some peers."""
    return {
        f"{name}:{share:g}": PEERS[name].make(grid, prefix, share)
        for name in names
        for share in PEERS[name].shares
    }


def _sparge(grid: Grid, prefix: int, share: float) -> tuple[Attention, float]:
    """SpargeAttn selects a share of the blocks and drops the others."""
    sparge: Any = load_package("spas_sage_attn").spas_sage2_attn_meansim_topk_cuda
    return (lambda q, k, v: sparge(q, k, v, topk=share, is_causal=False)), share


def _natten(grid: Grid, prefix: int, share: float) -> tuple[Attention, float]:
    """A square neighbourhood of every query; only prefix queries read prefix keys."""
    na2d: Any = load_package("natten").na2d
    side = max(3, int(share**0.5 * min(grid.height, grid.width))) // 2 * 2 + 1

    def neighbourhood(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = (len(q), grid.height, grid.width, q.shape[1], q.shape[3])
        maps = [x[:, :, prefix:].transpose(1, 2).reshape(shape) for x in (q, k, v)]
        spatial = na2d(*maps, kernel_size=(side, side)).flatten(1, 2).transpose(1, 2)
        first = torch.nn.functional.scaled_dot_product_attention(q[:, :, :prefix], k, v)
        return torch.cat((first, spatial), 2)  # (B, H, prefix + N, d)

    return neighbourhood, side**2 / grid.size


def _piecewise(
    name: str, grid: Grid, prefix: int, share: float, **options: Any
) -> tuple[Attention, float]:
    """PISA: a share of the blocks is exact, others have their mean, and with a bias a slope.

    With a bias, blocks are selected as in its own models, by score and by how values follow keys.
    """

    def piecewise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        function = getattr(load_package("piecewise_attn"), name)
        if q.is_cuda:
            load_package("triton").set_allocator(_allocate)
        output: Tensor = function(q, k, v, density=share, block_size=PISA_BLOCK, **options)
        return output

    blocks = -(-(grid.size + prefix) // PISA_BLOCK)
    return TileOrdered(piecewise, grid, prefix), max(1, int(share * blocks)) / blocks


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate device memory for Triton: the descriptors that PISA's kernels make need some."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


class TileOrdered:
    """Attention of a peer on tokens in the order of 8x8 tiles, so that a block of 64 is a tile.

    Prefix tokens come last, in a block of their own if no tile is ragged. The permutation is not
    timed, because a model would permute its tokens once.
    """

    def __init__(self, attention: Attention, grid: Grid, prefix: int) -> None:
        self.attention = attention
        tokens = tile_layout(grid, PISA_SIDE).token_rank.argsort()
        self.order = torch.cat((tokens + prefix, torch.arange(prefix)))
        self.permutations: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of prefix tokens and spatial tokens in raster order."""
        order, inverse = self._permutation(q.device)
        q, k, v = (x.index_select(2, order) for x in (q, k, v))
        return self.attention(q, k, v).index_select(2, inverse)

    def bind(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Return a call of the peer alone on tokens in its own order, with outputs in that order."""
        order, _ = self._permutation(q.device)
        q, k, v = (x.index_select(2, order) for x in (q, k, v))
        return lambda: self.attention(q, k, v)

    def _permutation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # On the device, because a copy from the host cannot be captured in a CUDA graph.
        if device not in self.permutations:
            self.permutations[device] = self.order.to(device), self.order.argsort().to(device)
        return self.permutations[device]


# Grid, prefix and share to the attention function and its density.
Maker = Callable[[Grid, int, float], tuple[Attention, float]]


class Peer(NamedTuple):
    """The package to import, the function that makes its attention, and the shares to time."""

    module: str
    make: Maker
    shares: tuple[float, ...] = SHARES


_pisa = partial(_piecewise, "piecewise_sparse_attention", use_bias=True)
_pisa_zeroth = partial(_piecewise, "piecewise_sparse_attention_0th")
PEERS = {
    "sparge": Peer("spas_sage_attn", _sparge),
    "natten": Peer("natten", _natten),
    "pisa": Peer("piecewise_attn", _pisa, PISA_SHARES),
    "pisa-0th": Peer("piecewise_attn", _pisa_zeroth, PISA_SHARES),
}
