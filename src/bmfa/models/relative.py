"""SAM 1 and ViTDet: blocks with global attention and decomposed relative positions.

The score of a query at (y, x) and a key at (v, u) has two terms for their relative position,
q . Rh[y - v] and q . Rw[x - u], with a vector for each distance. For one query they depend on the row or
the column of the key alone, so they are products of query and key, with one more dimension for each row
and each column:

    q' = [q, (q . Rh[y - v] for all rows v) / scale, (q . Rw[x - u] for all columns u) / scale]
    k' = [k, 1 at the row of the key, 1 at its column]

and scale q' . k' is the score of the model. Screened attention then needs no bias. The Triton kernels
take no heads of d + H + W dimensions, so on CUDA these layers run the code of the model by default.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.replacement import AttentionReplacement, dropout_of


class DecomposedAttention(AttentionReplacement):
    """Computes q, k, v and the output as the model does, with relative positions as products."""

    def run(self, module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module, whose input has the shape (B, H, W, C)."""
        x = args[0] if args else kwargs["hidden_states"]
        # Integers, not symbols: whatever depends on a grid is a constant of a compiled graph.
        grid = Grid(int(x.shape[1]), int(x.shape[2]))
        self.function.passes.set_grid(grid)
        heads = getattr(module, "num_heads", None) or module.num_attention_heads
        relative, dim = hasattr(module, "rel_pos_h"), x.shape[-1] // heads
        longer = dim + grid.height + grid.width if relative else dim
        shape = (x.shape[0], heads, grid.size, longer)
        if self.function.runs_host(shape, x, plain=not (relative and x.is_cuda)):
            return method(*args, **kwargs)
        if kwargs.get("output_attentions"):
            raise ValueError(
                "output_attentions=True is not supported in patched models, which compute no attention "
                "matrix; call bmfa.unpatch(model)"
            )
        qkv = module.qkv(x).reshape(x.shape[0], grid.size, 3, heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, N, d) each
        if hasattr(module, "q_norm"):
            q, k = module.q_norm(q), module.k_norm(k)
        if relative:
            # Vectors (size, size, d) of the relative positions, from the function of the model.
            owner: Any = module if hasattr(module, "get_rel_pos") else _module_of(module)
            rows = owner.get_rel_pos(grid.height, grid.height, module.rel_pos_h)
            columns = owner.get_rel_pos(grid.width, grid.width, module.rel_pos_w)
            q, k = with_relative_positions(q, k, rows, columns, module.scale)
        output = self.function(q, k, v, dropout_p=dropout_of(module), scale=module.scale)
        output = module.proj(output.transpose(1, 2).reshape(*x.shape[:3], -1))
        if hasattr(module, "proj_drop"):
            return module.proj_drop(output)  # timm
        return (output, None) if "Sam" in type(module).__name__ else (output,)


def _module_of(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]


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
