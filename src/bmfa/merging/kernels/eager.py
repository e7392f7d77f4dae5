"""Attention among tokens of different sizes, and merging of tokens, in torch operations.

x is (B, T, C), prefix tokens first; size (B, T) float32 counts the tokens that each one stands for.
"""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, normalize, scaled_dot_product_attention

PAIRS = ("none", "sum", "harmonic")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor,
    *,
    scale: float,
    prefix: int = 1,
    mass: bool = False,
    others: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(B, heads, T, d) softmax(q k^T scale + log size_j) v, the softmax in float32; and the mass.

    The mass is (B, parts, 2, T) float32, whose parts (here one) are to be added: the attention on
    token j of the prefix queries (0) and of the others (1), each a mean over queries and a sum over
    heads. Without prefix the first repeats the second. Without `others` it is (B, parts, 1, T), the
    first of them.
    """
    bias = size.log()[:, None, None]  # (B, 1, 1, T)
    if not mass and q.dtype in (torch.float32, torch.float64):
        # Half types would round the bias, so they take the long way.
        return scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=scale), None
    logits = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    weights = (logits + bias).softmax(-1)  # (B, heads, T, T)
    output = weights.to(v.dtype) @ v
    if not mass:
        return output, None
    over_heads = weights.sum(1).float()
    of_others = over_heads[:, prefix:].mean(1)
    of_prefix = over_heads[:, :prefix].mean(1) if prefix else of_others
    rows = (of_prefix, of_others) if others else (of_prefix,)
    return output, torch.stack(rows, 1).unsqueeze(1)


def merge(
    x: Tensor,
    size: Tensor,
    features: Tensor | None,
    weight: Tensor | None,
    r: int,
    *,
    prefix: int = 1,
    pair: str = "none",
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the r cheapest edges between even and odd positions: tokens, sizes, and where each went.

    cost(a, b) = pair(weight_a, weight_b) |f_a - f_b|^2, where pair is 1, the sum, or the harmonic
    w_a w_b / (w_a + w_b). Each token at an even position goes to its cheapest partner at an odd one;
    of equal costs the lowest index wins. Prefix tokens take no part. Merged tokens are means weighted
    by size. The new order is the prefix, the even positions left, then the odd ones; the target
    (B, T) int32 is the new position of every old token.

    The features are (B, T, F), or keys (B, heads, T, d) for their unit means over heads, or None for
    the layer norm of x. The weight is (B, T), or (B, ..., T) to be added up.
    """
    if features is None:
        features = layer_norm(x, x.shape[-1:])
    elif features.dim() == 4:
        features = tome_features(features)
    if weight is not None and weight.dim() > 2:
        weight = weight.flatten(1, -2).sum(1)
    source, destination = match(features, weight, r, prefix=prefix, pair=pair)
    target = bipartite_target(source, destination, x.shape[1], prefix)
    merged, sizes = pool(x, size, target, x.shape[1] - source.shape[1])
    return merged, sizes, target


def match(
    features: Tensor, weight: Tensor | None, r: int, *, prefix: int = 1, pair: str = "none"
) -> tuple[Tensor, Tensor]:
    """(B, r) positions of the tokens that merge, cheapest first, and of those they merge into."""
    even, odd = sides(features.shape[1], prefix, features.device)
    f = features.to(torch.promote_types(features.dtype, torch.float32))
    a, b = f[:, even], f[:, odd]
    norms = a.square().sum(-1).unsqueeze(2) + b.square().sum(-1).unsqueeze(1)
    cost = torch.baddbmm(norms, a, b.transpose(1, 2), alpha=-2.0)  # (B, even, odd)
    if pair != "none":
        if weight is None:
            raise ValueError(f"pair is {pair!r} without weights; pass weight, or pair='none'")
        cost = cost * _pairs(weight[:, even].unsqueeze(2), weight[:, odd].unsqueeze(1), pair)
    cheapest, partner = cost.min(2)
    source = cheapest.argsort(dim=1, stable=True)[:, :r]
    return even[source], odd[partner.gather(1, source)]


def tome_features(k: Tensor) -> Tensor:
    """(B, T, d) float32 unit mean over heads of the keys (B, heads, T, d)."""
    wide = torch.promote_types(k.dtype, torch.float32)
    return normalize(k.mean(1, dtype=wide), dim=-1)


def sides(tokens: int, prefix: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The even and the odd positions behind the prefix."""
    first = prefix + prefix % 2
    even = torch.arange(first, tokens, 2, device=device)
    odd = torch.arange(prefix + 1 - prefix % 2, tokens, 2, device=device)
    return even, odd


def bipartite_target(source: Tensor, destination: Tensor, tokens: int, prefix: int) -> Tensor:
    """(B, T) int32 new positions: the prefix, the even positions left, then the odd ones."""
    even, odd = sides(tokens, prefix, source.device)
    order = torch.cat((torch.arange(prefix, device=source.device), even, odd))
    return targets(source, destination, tokens, order)


def targets(
    source: Tensor, destination: Tensor, tokens: int, order: Tensor | None = None
) -> Tensor:
    """(B, T) int32 new positions once sources (B, r) left for their destinations.

    The tokens that stay are numbered in their own order, or in that of `order`, (T) positions.
    """
    stays = torch.ones(len(source), tokens, dtype=torch.int32, device=source.device)
    stays.scatter_(1, source, 0)
    if order is None:
        place = stays.cumsum(1, dtype=torch.int32) - 1
    else:
        numbers = stays[:, order].cumsum(1, dtype=torch.int32) - 1
        place = torch.empty_like(numbers)
        place[:, order] = numbers
    return place.scatter(1, source, place.gather(1, destination))


def pool(
    x: Tensor, size: Tensor, target: Tensor, count: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(B, count, C) means of the tokens of each target, weighted by size, and their summed sizes.

    Another weight (B, T) may be given for the means; tokens with target -1 are left out.
    """
    weight = size if weight is None else weight
    pruned = target < 0
    weight, size = weight.masked_fill(pruned, 0.0), size.masked_fill(pruned, 0.0)
    index = target.clamp(min=0).long()
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    total = wide.new_zeros(len(x), count).scatter_add(1, index, weight.to(wide.dtype))
    share = weight.to(wide.dtype) / total.gather(1, index).where(~pruned, 1.0)  # (B, T)
    rows = index.unsqueeze(-1).expand_as(wide)
    means = wide.new_zeros(len(x), count, x.shape[2]).scatter_add(1, rows, wide * share[..., None])
    sizes = size.new_zeros(len(x), count).scatter_add(1, index, size)
    return means.to(x.dtype), sizes


def _pairs(a: Tensor, b: Tensor, pair: str) -> Tensor:
    if pair == "sum":
        return a + b
    if pair == "harmonic":
        total = a + b
        return a * b / total.where(total > 0, 1.0)
    raise ValueError(f"pair is {pair!r}; pass one of {', '.join(PAIRS)}")
