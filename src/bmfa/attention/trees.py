"""A tree for every query: those of a rule, attention over their leaves, and the partition of tiles."""

import torch
from torch import Tensor

from bmfa.attention.call import Call, check_finite_scores, flatten_heads, zero_invalid
from bmfa.attention.kernels import eager
from bmfa.attention.tiling import unflatten
from bmfa.checks import has_values
from bmfa.trees.build import screen_keys
from bmfa.trees.layout import tile_layout
from bmfa.trees.pyramid import Counts, repeat_columns
from bmfa.trees.rules import ExactGap
from bmfa.trees.tree import Tree


def attend_trees(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call
) -> tuple[Tensor, Tree]:
    """Build a tree for each query and attend to its leaves; return (B, H, Q, e) and the trees.

    Raises:
        ValueError: If q or k hold NaN or infinity, or if scores overflow.
    """
    if has_values(q):
        check_finite_scores(*zero_invalid(q, k, v, valid, call)[:2], call.scale)
    dtype, lead = torch.promote_types(q.dtype, torch.float32), q.shape[:2]
    queries, keys, values = flatten_heads(q, k, v, valid, call, dtype)
    tree = _build(queries, keys, lead, valid, call)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    rule = call.rule
    if gradients and isinstance(rule, ExactGap) and rule.epsilon == 0.0 and call.max_depth is None:
        # The leaves are tokens, or blocks with equal scores, whose common gradient is not that of each
        # of their keys.
        mask = call.key_mask(valid)
        if mask is not None and len(mask) > 1:
            mask = mask.repeat_interleave(lead[1], 0)
        output = eager.dense_attention(
            queries, keys, values, scale=call.scale, tau=call.tau, valid=mask
        )
    else:
        output = eager.tree_attention(
            queries, keys, values, tree.flat(), prefix=call.prefix, scale=call.scale
        )
    return unflatten(output, 0, lead).to(q.dtype), tree


def build_trees(q: Tensor, k: Tensor, valid: Tensor | None, call: Call) -> Tree:
    """Build the trees of `attend_trees` alone."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys, _ = flatten_heads(q, k, k, valid, call, dtype)
    return _build(queries, keys, q.shape[:2], valid, call)


def _build(q: Tensor, k: Tensor, lead: torch.Size, valid: Tensor | None, call: Call) -> Tree:
    assert call.rule is not None
    return screen_keys(
        unflatten(q.detach(), 0, lead),
        unflatten(k[:, call.prefix :].detach(), 0, lead),
        call.grid,
        call.rule,
        scale=call.scale,
        tau=call.tau,
        max_depth=call.max_depth,
        valid=None if valid is None else valid[:, None, None, :],
    )


def tile_tree(expanded: Tensor, valid: Tensor | None, call: Call) -> Tree:
    """Build the partition of the spatial keys that every query of tiles sees, (B, H, Q).

    A leaf is a token of an expanded tile, or an unexpanded tile. Queries before the grid see
    every token.

    Args:
        expanded: (B, H, R, T) bool, the tiles that every group of queries expands.
        valid: bool (B or 1, N), the spatial tokens that exist.
        call: Description of the call.
    """
    device, tiling = expanded.device, call.tiling
    layout = tile_layout(tiling.grid, tiling.side).to(device)
    slots = tiling.slot_tokens.to(device)
    group = torch.empty(tiling.queries.grid.size, dtype=torch.int64, device=device)  # of each query
    members = tiling.queries.slot_tokens.to(device)
    groups = torch.arange(tiling.groups, device=device).unsqueeze(-1).expand_as(members)
    group[members[members >= 0]] = groups[members >= 0]
    several = (slots >= 0).sum(-1) > 1  # a tile of one token is a leaf either way
    split = expanded[:, :, group][..., several]  # (B, H, N, blocks)
    prefix = split.new_ones(*split.shape[:2], call.query_prefix, split.shape[-1])
    split = torch.cat((prefix, split), 2)
    shape = tuple(split.shape[:3])
    blocks = split.flatten(0, 2).T.contiguous()  # (blocks, B H Q)
    masks = None if valid is None else valid.T  # (N, B or 1)
    if masks is not None and layout.block_count:
        # A tile with one valid token is a leaf; one without is not.
        several_valid = Counts.from_mask(layout, torch.float32, masks).blocks[0] > 1
        blocks &= repeat_columns(several_valid, blocks.shape[1])  # type: ignore[arg-type]
    return Tree(layout, blocks, shape, call.tau, call.setting, masks, block_means=False)
