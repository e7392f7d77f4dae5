"""Sparse attention of other packages, where installed: found by import, never part of this one."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bmfa.experiments.dense_paths import Attend
from bmfa.grid import Grid

FLEX_BLOCK = 128
# Their main setting, swept: blocks kept, or the side of a neighbourhood as a share of the grid's.
SHARES = (0.1, 0.3)


def available(asked: tuple[str, ...] = ()) -> tuple[list[str], dict[str, str]]:
    """Peers to time, and why the others are not; one that was asked for must be there."""
    present, absent = [], {}
    for name, (module, _) in PEERS.items():
        if find_spec(module) is None:
            if name in asked:
                raise ValueError(
                    f"peer {name!r} needs the package {module}, which is not installed"
                )
            absent[name] = f"{module} is not installed"
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
        f"{name}:{share:g}": PEERS[name][1](grid, prefix, share)
        for name in names
        for share in SHARES
    }


def _sparge(grid: Grid, prefix: int, share: float) -> tuple[Attend, float]:
    """SpargeAttn's own choice of a share of blocks; the others are dropped."""
    attend: Any = import_module("spas_sage_attn").spas_sage2_attn_meansim_topk_cuda
    return (lambda q, k, v: attend(q, k, v, topk=share, is_causal=False)), share


def _natten(grid: Grid, prefix: int, share: float) -> tuple[Attend, float]:
    """A square neighbourhood of every query; prefix keys are seen by the prefix queries alone."""
    na2d: Any = import_module("natten").na2d
    side = max(3, int(share**0.5 * min(grid.height, grid.width))) // 2 * 2 + 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = (len(q), grid.height, grid.width, q.shape[1], q.shape[3])
        maps = [x[:, :, prefix:].transpose(1, 2).reshape(shape) for x in (q, k, v)]
        spatial = na2d(*maps, kernel_size=(side, side)).flatten(1, 2).transpose(1, 2)
        first = torch.nn.functional.scaled_dot_product_attention(q[:, :, :prefix], k, v)
        return torch.cat((first, spatial), 2)

    return attend, side**2 / grid.size


def _flex(grid: Grid, prefix: int, share: float) -> tuple[Attend, float]:
    """flex_attention over the blocks of keys whose mean scores are highest; the others are dropped."""
    module: Any = import_module("torch.nn.attention.flex_attention")
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
PEERS: dict[str, tuple[str, Maker]] = {
    "sparge": ("spas_sage_attn", _sparge),
    "natten": ("natten", _natten),
    "flex": ("torch.nn.attention.flex_attention", _flex),
}
