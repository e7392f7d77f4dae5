"""Sparse attention of other packages, where installed: found by import, never part of this one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmfa.evidence.bench.dense_paths import Attend
from bmfa.grid import Grid
from bmfa.packages import is_installed, load_package
from bmfa.trees.layout import tile_layout

FLEX_BLOCK = 128
PISA_SIDE = 8
PISA_BLOCK = PISA_SIDE**2
# Their main setting, swept: blocks kept, or the side of a neighbourhood as a share of the grid's.
SHARES = (0.1, 0.3)
# PISA stands in for the blocks that it does not keep, so that far fewer will do.
PISA_SHARES = (0.05, 0.1, 0.2, 0.3)


def available(asked: tuple[str, ...] = ()) -> tuple[list[str], dict[str, str]]:
    """Peers to time, and why the others are not; one that was asked for must be there."""
    present, absent = [], {}
    for name, peer in PEERS.items():
        if not is_installed(peer.module):
            if name in asked:
                raise ValueError(
                    f"peer {name!r} needs the package {peer.module}, which is not installed"
                )
            absent[name] = f"{peer.module} is not installed"
        elif name == "flex" and name not in asked:
            absent[name] = "not asked for: compiling takes longer than timing"
        else:
            present.append(name)
    unknown = set(asked) - set(PEERS)
    if unknown:
        raise ValueError(f"peer {min(unknown)!r} is unknown; pass one of {', '.join(PEERS)}")
    return present, absent


def methods(names: list[str], grid: Grid, prefix: int) -> dict[str, tuple[Attend, float]]:
    """Attention and density of every setting of some peers."""
    return {
        f"{name}:{share:g}": PEERS[name].make(grid, prefix, share)
        for name in names
        for share in PEERS[name].shares
    }


def _sparge(grid: Grid, prefix: int, share: float) -> tuple[Attend, float]:
    """SpargeAttn's own choice of a share of blocks; the others are dropped."""
    attend: Any = load_package("spas_sage_attn").spas_sage2_attn_meansim_topk_cuda
    return (lambda q, k, v: attend(q, k, v, topk=share, is_causal=False)), share


def _natten(grid: Grid, prefix: int, share: float) -> tuple[Attend, float]:
    """A square neighbourhood of every query; prefix keys are seen by the prefix queries alone."""
    na2d: Any = load_package("natten").na2d
    side = max(3, int(share**0.5 * min(grid.height, grid.width))) // 2 * 2 + 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = (len(q), grid.height, grid.width, q.shape[1], q.shape[3])
        maps = [x[:, :, prefix:].transpose(1, 2).reshape(shape) for x in (q, k, v)]
        spatial = na2d(*maps, kernel_size=(side, side)).flatten(1, 2).transpose(1, 2)
        first = torch.nn.functional.scaled_dot_product_attention(q[:, :, :prefix], k, v)
        return torch.cat((first, spatial), 2)

    return attend, side**2 / grid.size


def _pisa(grid: Grid, prefix: int, share: float) -> tuple[Attend, float]:
    """PISA, first order: a share of blocks is exact, all others count by their mean and one slope.

    Blocks are chosen as in its own models: by score, and by how far a block's values follow its keys.
    """
    return _piecewise("piecewise_sparse_attention", grid, prefix, share, use_bias=True)


def _pisa_zeroth(grid: Grid, prefix: int, share: float) -> tuple[Attend, float]:
    """PISA, zeroth order: a share of blocks is exact, all others count by their mean alone."""
    return _piecewise("piecewise_sparse_attention_0th", grid, prefix, share)


def _piecewise(
    name: str, grid: Grid, prefix: int, share: float, **options: Any
) -> tuple[Attend, float]:
    """A function of PISA's package, and the share of blocks it keeps: whole ones, at least one."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = getattr(load_package("piecewise_attn"), name)
        output: Tensor = found(q, k, v, density=share, block_size=PISA_BLOCK, **options)
        return output

    blocks = -(-(grid.size + prefix) // PISA_BLOCK)
    return TileOrdered(attend, grid, prefix), max(1, int(share * blocks)) / blocks


class TileOrdered:
    """A peer's attention over tokens tile by tile, so that 64 in a row are a tile of 8x8.

    Prefix tokens come last, in a block of their own where the tiles are whole; a single one is its
    own mean. Nothing is left out. The permutations are not timed: a model permutes its tokens once.
    """

    def __init__(self, attend: Attend, grid: Grid, prefix: int) -> None:
        self.attend = attend
        self.order = torch.cat(
            (tile_layout(grid, PISA_SIDE).token_order + prefix, torch.arange(prefix))
        )
        self.places: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of tokens in raster order after the prefix."""
        there, back = self._places(q.device)
        q, k, v = (x.index_select(2, there) for x in (q, k, v))
        return self.attend(q, k, v).index_select(2, back)

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """The peer alone, on tokens that are in its order already, its output in that order too."""
        there, _ = self._places(q.device)
        q, k, v = (x.index_select(2, there) for x in (q, k, v))
        return lambda: self.attend(q, k, v)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # Kept on the device: a copy from the host cannot be captured in a CUDA graph.
        if device not in self.places:
            self.places[device] = self.order.to(device), self.order.argsort().to(device)
        return self.places[device]


def _flex(grid: Grid, prefix: int, share: float) -> tuple[Attend, float]:
    """flex_attention over the blocks of keys whose mean scores are highest; the others are dropped."""
    module: Any = load_package("torch.nn.attention.flex_attention")
    compiled: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not compiled:
            flex = module.flex_attention
            compiled.append(torch.compile(flex) if q.is_cuda else flex)
        mask = _block_mask(module, q, k, share)
        output: Tensor = compiled[0](q, k, v, block_mask=mask)
        return output

    return attend, share


def _block_mask(module: Any, q: Tensor, k: Tensor, share: float) -> Any:
    means = [
        torch.stack([part.mean(2) for part in torch.split(x, FLEX_BLOCK, dim=2)], 2) for x in (q, k)
    ]
    scores = means[0] @ means[1].transpose(-2, -1)  # (B, heads, blocks, blocks)
    kept = max(1, round(share * scores.shape[-1]))
    order = scores.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    counts = torch.full(order.shape[:-1], kept, dtype=torch.int32, device=q.device)
    table = torch.zeros_like(scores, dtype=torch.bool)
    table.scatter_(-1, order[..., :kept].long(), True)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return table[b, h, query // FLEX_BLOCK, key // FLEX_BLOCK]

    return module.BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        order,
        counts,
        order,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=seen,
        seq_lengths=(q.shape[2], k.shape[2]),
        compute_q_blocks=False,
    )


Maker = Callable[[Grid, int, float], tuple[Attend, float]]


class Peer(NamedTuple):
    """The package to import, what makes its attention, and the shares to time."""

    module: str
    make: Maker
    shares: tuple[float, ...] = SHARES


PEERS = {
    "sparge": Peer("spas_sage_attn", _sparge),
    "natten": Peer("natten", _natten),
    "pisa": Peer("piecewise_attn", _pisa, PISA_SHARES),
    "pisa-0th": Peer("piecewise_attn", _pisa_zeroth, PISA_SHARES),
    "flex": Peer("torch.nn.attention.flex_attention", _flex),
}
