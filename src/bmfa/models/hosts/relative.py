"""SAM 1 and ViTDet: blocks with global attention and decomposed relative positions.

The score of a query at (y, x) and a key at (v, u) has two terms for their relative position,
q . Rh[y - v] and q . Rw[x - u], with a vector for each distance. For one query they depend on the row or
the column of the key alone, so they are products of query and key, with one more dimension for each row
and each column:

    q' = [q, (q . Rh[y - v] for all rows v) / scale, (q . Rw[x - u] for all columns u) / scale]
    k' = [k, 1 at the row of the key, 1 at its column]

and scale q' . k' is the score of the host. Screened attention then needs no bias. The Triton kernels
take no heads of d + H + W dimensions, so on CUDA these layers run the code of the host by default.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.hosts.base import AttentionReplacement, VisionTransformer, class_name, is_noop
from bmfa.models.override import override_method, restore_method
from bmfa.models.packed_calls import watch_blocks

_WINDOWS = "attention inside windows"
_ROTARY = "rotary positions"
_GRID = "its blocks work on maps, not on sequences of tokens"


class DecomposedAttention(AttentionReplacement):
    """Computes q, k, v and the output as the host does, with relative positions as products."""

    def _replace(self, module: nn.Module) -> None:
        override_method(module, self)

    def _undo(self, module: nn.Module) -> None:
        restore_method(module)

    def uses_host(self, x: Any) -> bool:
        """False: `run` decides, which knows the grid."""
        return False

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module, whose input has the shape (B, H, W, C)."""
        x = args[0] if args else kwargs["hidden_states"]
        # Integers, not symbols: whatever depends on a grid is a constant of a compiled graph.
        grid = Grid(int(x.shape[1]), int(x.shape[2]))
        host = partial(forward, *args, **kwargs)
        refused = bool(kwargs.get("output_attentions"))
        call = partial(self._run, module, x, grid, host, refused)
        return self.function.token_grid.passes.run_with(grid, call)

    def _run(
        self, module: Any, x: Tensor, grid: Grid, forward: Callable[[], Any], attentions: bool
    ) -> Any:
        relative = hasattr(module, "rel_pos_h")
        if self.function.uses_host_on(grid, x.flatten(1, 2)) or (relative and self._needs_host(x)):
            return forward()
        if attentions:
            raise ValueError(
                "output_attentions=True is not supported in patched models, which compute no attention "
                "matrix; call bmfa.unpatch(model)"
            )
        family = FAMILIES_BY_ATTENTION[class_name(module)]
        heads = getattr(module, "num_heads", None) or module.num_attention_heads
        qkv = module.qkv(x).reshape(x.shape[0], grid.size, 3, heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, N, d) each
        if hasattr(module, "q_norm"):
            q, k = module.q_norm(q), module.k_norm(k)
        if relative:
            q, k = with_relative_positions(
                q,
                k,
                family.positions(module, grid.height, module.rel_pos_h),
                family.positions(module, grid.width, module.rel_pos_w),
                module.scale,
            )
        output = self.function(q, k, v, None, _dropout(module), False, module.scale)
        output = module.proj(output.transpose(1, 2).reshape(*x.shape[:3], -1))
        if hasattr(module, "proj_drop") and not is_noop(module.proj_drop):
            output = module.proj_drop(output)
        return family.result(output)

    def _needs_host(self, x: Tensor) -> bool:
        """True on CUDA, whose kernels take no heads that long, if the layer may run dense."""
        function: Any = self.function
        may_run_dense = getattr(function, "decision", None) is not None
        return x.is_cuda and may_run_dense and function.observer is None


def with_relative_positions(
    q: Tensor, k: Tensor, rows: Tensor, columns: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Extend queries and keys so that their products contain decomposed relative positions.

    Args:
        q: (B, heads, H * W, d) queries; k likewise.
        k: Keys.
        rows: (H, H, d) vectors of the rows of query and key.
        columns: (W, W, d) vectors of their columns.
        scale: Of the products.

    Returns:
        Queries and keys (B, heads, H * W, d + H + W).
    """
    height, width = len(rows), len(columns)
    maps = q.reshape(*q.shape[:2], height, width, -1)  # (B, heads, H, W, d)
    by_row = torch.einsum("bnhwc,hkc->bnhwk", maps, rows).flatten(2, 3) / scale
    by_column = torch.einsum("bnhwc,wkc->bnhwk", maps, columns).flatten(2, 3) / scale
    index = torch.arange(height * width, device=k.device)
    row = nn.functional.one_hot(index // width, height)
    column = nn.functional.one_hot(index % width, width)
    one = torch.cat((row, column), -1).to(k.dtype).expand(*k.shape[:2], -1, -1)
    return torch.cat((q, by_row.to(q.dtype), by_column.to(q.dtype)), -1), torch.cat((k, one), -1)


def _dropout(module: Any) -> float:
    if not module.training:
        return 0.0
    return float(
        module.attn_drop.p if hasattr(module, "attn_drop") else getattr(module, "dropout", 0)
    )


def _module_positions(module: nn.Module, size: int, table: Tensor) -> Tensor:
    """Vectors (size, size, d) of the relative positions, from the function of the host."""
    positions: Tensor = sys.modules[type(module).__module__].get_rel_pos(size, size, table)
    return positions


def _method_positions(module: Any, size: int, table: Tensor) -> Tensor:
    positions: Tensor = module.get_rel_pos(size, size, table)
    return positions


@dataclass(frozen=True)
class RelativeFamily:
    """The parts of a tower, and what the forward of its attention does beside attention."""

    blocks: str
    attention: str  # name in the block
    projection: str
    classes: tuple[str, ...]  # of the attention
    positions: Callable[[Any, int, Tensor], Tensor]
    result: Callable[[Tensor], Any]


_SAM = "transformers.models.sam.modeling_sam."
_VITDET = "transformers.models.vitdet.modeling_vitdet."
_VITDET_FAMILY = RelativeFamily(
    "encoder.layer",
    "attention",
    "embeddings.projection",
    (_VITDET + "VitDetAttention",),
    _module_positions,
    lambda output: (output,),
)
# By the class of the tower.
FAMILIES = {
    "timm.models.vision_transformer_sam.VisionTransformerSAM": RelativeFamily(
        "blocks",
        "attn",
        "patch_embed.proj",
        ("timm.models.vision_transformer_sam.Attention",),
        _module_positions,
        lambda output: output,
    ),
    _SAM + "SamVisionEncoder": RelativeFamily(
        "layers",
        "attn",
        "patch_embed.projection",
        (_SAM + "SamVisionAttention", _SAM + "SamVisionSdpaAttention"),
        _method_positions,
        lambda output: (output, None),
    ),
    _VITDET + "VitDetModel": _VITDET_FAMILY,
    _VITDET + "VitDetBackbone": _VITDET_FAMILY,
}
FAMILIES_BY_ATTENTION = {name: family for family in FAMILIES.values() for name in family.classes}


def find_towers(model: nn.Module) -> list[VisionTransformer]:
    """List the towers in a model with decomposed relative positions."""
    towers = (module for module in model.modules() if class_name(module) in FAMILIES)
    return [_host(tower, FAMILIES[class_name(tower)]) for tower in towers]


def _host(tower: nn.Module, family: RelativeFamily) -> VisionTransformer:
    blocks: tuple[Any, ...] = tuple(tower.get_submodule(family.blocks).children())
    dense: dict[int, str] = {}
    for index, block in enumerate(blocks):
        if block.window_size > 0:
            dense[index] = _WINDOWS
        elif getattr(getattr(block, family.attention), "rope", None) is not None:
            dense[index] = _ROTARY
    return VisionTransformer(
        replacement=DecomposedAttention,
        tower=tower,
        blocks=blocks,
        attentions=tuple(
            getattr(block, family.attention) for i, block in enumerate(blocks) if i not in dense
        ),
        projection=tower.get_submodule(family.projection),
        prefix=0,
        layout=None,
        reads_spatial_tokens=True,
        watch=watch_blocks,
        dense_blocks=dense,
        not_reducible=_GRID,
    )
