"""NaFlexViT of timm: batches of images with grids of their own, padded to equal length."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.hosts.base import VisionTransformer, class_name
from bmfa.models.hosts.timm import ATTENTIONS, ReplaceSDPA, TimmAttention
from bmfa.models.hosts.unsupported import raise_unsupported
from bmfa.models.override import override_method
from bmfa.models.packed_calls import (
    attend_images,
    begin_pass,
    carry_images,
    is_traced,
    runs_dense,
)
from bmfa.models.packing import (
    Packing,
    index_device,
    outside_graphs,
    pack,
    prepare_compiling,
    raster_order,
)
from bmfa.models.token_grid import TokenGrid

TOWER = "timm.models.naflexvit.NaFlexVit"
_PADDING = "its images may have different grids, and padding"


class NaFlexAttention(TimmAttention):
    """Runs the module's own forward with our attention inside of each image."""

    def uses_host(self, x: Any) -> bool:
        """False: `run` decides for the images of the pass."""
        return False

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module."""
        traced = is_traced(self.function.token_grid)
        return outside_graphs(self._run, forward, *args, traceable=traced, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        prepare_compiling()
        self.__dict__.update(state)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        packing = self.function.token_grid.packing
        if runs_dense(self.function, packing, args[0]):
            return forward(*args, **kwargs)
        if packing.own_mask:
            raise ValueError(
                "attn_mask is not supported in a patched NaFlexViT, which attends inside each image; "
                "pass patch_coord and patch_valid without attn_mask, or call bmfa.unpatch(model)"
            )
        with ReplaceSDPA(partial(self._attend, packing)):
            return forward(*args, **kwargs)

    def _attend(
        self,
        packing: Packing,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        attend = partial(attend_images, self.function, dropout=dropout_p, scale=scale)
        return packing.attend(attend, query, key, value)


@dataclass(eq=False)
class NaFlexReader:
    """Override of the tower's method that embeds patches; it makes the packing of the pass."""

    token_grid: TokenGrid

    def uses_host(self, x: Any) -> bool:
        """False: every pass has its images."""
        return False

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the embeddings, after reading where the patches of each image are."""
        coordinates = args[1] if len(args) > 1 else kwargs.get("patch_coord")
        outside_graphs(self._read, module, *args, traceable=coordinates is None, **kwargs)
        return forward(*args, **kwargs)

    def _read(
        self,
        module: Any,
        x: Tensor,
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> None:
        prefix = self.token_grid.prefix
        device = index_device(x)
        if patch_coord is None:
            height, width = module.embeds.dynamic_feat_size(x.shape[-2:])
            grid = Grid(int(height), int(width))
            orders = [(grid, torch.arange(grid.size, device=device))] * x.shape[0]
            patches = grid.size
        else:
            coordinates = patch_coord.cpu()
            batch, patches = coordinates.shape[:2]
            valid = torch.ones(batch, patches) if patch_valid is None else patch_valid.cpu()
            orders = []
            for positions, exists in zip(coordinates, valid.bool(), strict=True):
                index = exists.nonzero().flatten()
                grid, order = raster_order(positions[index])
                orders.append((grid, index[order]))
        tokens = prefix + patches
        images = []
        for row, (grid, order) in enumerate(orders):
            index = torch.cat((torch.arange(prefix, device=device), prefix + order))
            images.append((grid, row * tokens + index))
        packing = pack(images, (len(orders), tokens), x.device, own_mask=attn_mask is not None)
        begin_pass(self.token_grid, packing)


def find_towers(model: nn.Module) -> list[VisionTransformer]:
    """List the NaFlexViT towers in a model."""
    return [_host(module) for module in model.modules() if class_name(module) == TOWER]


def _host(tower: Any) -> VisionTransformer:
    blocks = tuple(tower.blocks)
    attentions = tuple(getattr(block, "attn", block) for block in blocks)
    for attention in attentions:
        if class_name(attention) not in ATTENTIONS:
            raise_unsupported(tower, attention)
    return VisionTransformer(
        replacement=NaFlexAttention,
        tower=tower,
        blocks=blocks,
        attentions=attentions,
        projection=tower.embeds.proj,
        prefix=int(tower.num_prefix_tokens),
        layout=None,
        reads_spatial_tokens=True,
        watch=watch_tower,
        not_reducible=_PADDING,
    )


def watch_tower(host: VisionTransformer, token_grid: TokenGrid) -> None:
    """Read the images of each forward pass, and let the blocks of the tower carry them."""
    prepare_compiling()
    override_method(host.tower, NaFlexReader(token_grid), "_forward_embeds")
    carry_images(host, token_grid)
