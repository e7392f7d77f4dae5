"""The merge operation in torch: match tokens, number the remaining ones, average each group.

Shapes: x (B, T, C) holds the tokens, prefix tokens first; size (B, T) float32 counts the original
    tokens that each token stands for. An `assignment` (B, T) int32 maps every old token to its new
    position, or to -1 if the token is pruned.
"""

import torch
from torch import Tensor


def match_bipartite(
    features: Tensor, weight: Tensor | None, r: int, *, prefix: int
) -> tuple[Tensor, Tensor]:
    """Match each token at an even position with its cheapest partner at an odd position.

    The cost of a pair is cost(a, b) = (weight_a + weight_b) |f_a - f_b|^2, without the factor if
    weight is None. Prefix tokens are not matched. The lowest index wins among equal costs.

    Args:
        features: (B, T, F) any floating dtype; costs are computed in float32 or wider.
        weight: (B, T) or None.
        r: number of pairs to return.
        prefix: number of leading tokens that are not matched.

    Returns:
        Two (B, r) int64 tensors: the positions of the tokens that merge, cheapest first, and of the
        tokens that they merge into.
    """
    even, odd = _even_and_odd(features.shape[1], prefix, features.device)
    f = features.to(torch.promote_types(features.dtype, torch.float32))
    a, b = f[:, even], f[:, odd]
    norms = a.square().sum(-1).unsqueeze(2) + b.square().sum(-1).unsqueeze(1)
    cost = torch.baddbmm(norms, a, b.transpose(1, 2), alpha=-2.0)  # (B, even, odd)
    if weight is not None:
        cost = cost * (weight[:, even].unsqueeze(2) + weight[:, odd].unsqueeze(1))
    cheapest, partner = cost.min(2)
    source = cheapest.argsort(dim=1, stable=True)[:, :r]
    return even[source], odd[partner.gather(1, source)]


def assign_bipartite(source: Tensor, destination: Tensor, tokens: int, prefix: int) -> Tensor:
    """Return the assignment (B, T) whose new order is prefix, remaining even, then odd positions."""
    even, odd = _even_and_odd(tokens, prefix, source.device)
    order = torch.cat((torch.arange(prefix, device=source.device), even, odd))
    return assign(source, destination, tokens, order)


def assign(source: Tensor, destination: Tensor, tokens: int, order: Tensor | None = None) -> Tensor:
    """Return the assignment (B, T) int32 after the sources moved to their destinations.

    Args:
        source: (B, r) positions of the tokens that merge.
        destination: (B, r) positions of the tokens that they merge into.
        tokens: T.
        order: (T) positions in the order in which the remaining tokens are numbered; None keeps it.
    """
    remains = torch.ones(len(source), tokens, dtype=torch.int32, device=source.device)
    remains.scatter_(1, source, 0)
    if order is None:
        position = remains.cumsum(1, dtype=torch.int32) - 1
    else:
        numbers = remains[:, order].cumsum(1, dtype=torch.int32) - 1
        position = torch.empty_like(numbers)
        position[:, order] = numbers
    return position.scatter(1, source, position.gather(1, destination))


def pool(
    x: Tensor, size: Tensor, assignment: Tensor, count: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Average the tokens of each new position.

    Args:
        x: (B, T, C) tokens.
        size: (B, T) float32.
        assignment: (B, T) new position of each token; tokens with -1 are dropped.
        count: number of new positions T'.
        weight: (B, T) weights of the averages; `size` if None.

    Returns:
        Tokens (B, T', C) in the dtype of x, averaged in float32 or wider, and summed sizes (B, T').
    """
    weight = size if weight is None else weight
    pruned = assignment < 0
    weight, size = weight.masked_fill(pruned, 0.0), size.masked_fill(pruned, 0.0)
    index = assignment.clamp(min=0).long()
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    weight = weight.to(values.dtype)
    total = values.new_zeros(len(x), count).scatter_add(1, index, weight)
    share = weight / total.gather(1, index).where(~pruned, 1.0)  # (B, T)
    rows = index.unsqueeze(-1).expand_as(values)
    means = values.new_zeros(len(x), count, x.shape[2])
    means = means.scatter_add(1, rows, values * share[..., None])
    sizes = size.new_zeros(len(x), count).scatter_add(1, index, size)
    return means.to(x.dtype), sizes


def _even_and_odd(tokens: int, prefix: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the even and the odd positions from `prefix` on."""
    even = torch.arange(prefix + prefix % 2, tokens, 2, device=device)
    odd = torch.arange(prefix + 1 - prefix % 2, tokens, 2, device=device)
    return even, odd
