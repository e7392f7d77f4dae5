"""Build trees from scores, or from queries and keys."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bmfa.checks import (
    check_finite,
    check_finite_products,
    check_integer,
    check_products,
    check_scores,
    check_tau,
    check_valid,
)
from bmfa.grid import Grid, check_grid
from bmfa.trees.keys import KeyLevels, KeyPyramid, query_chunks
from bmfa.trees.pyramid import Counts, Pyramid, ScorePyramid, repeat_columns
from bmfa.trees.rules import Rule, as_rule
from bmfa.trees.rules.base import Context, Decision
from bmfa.trees.sharing import ShareBy, aggregate_scores, assign_trees, check_share_by
from bmfa.trees.tree import Tree

# Scores of a chunk: 4 MiB in float32. About four such tensors are alive while a chunk is screened, which
# together fit the last-level cache of a server processor.
CHUNK_ELEMENTS = 1 << 20


def screen(
    scores: Tensor,
    grid: Grid | tuple[int, int],
    rule: Rule | str,
    *,
    tau: float = 1.0,
    max_depth: int | None = None,
    valid: Tensor | None = None,
    share: int | Sequence[int] | None = None,
    share_by: ShareBy = "max",
) -> Tree:
    """Build one tree for each row of scores.

    Args:
        scores: (..., N) float16, bfloat16, float32 or float64 scores in raster order,
            N = height * width, without prefix tokens.
        grid: Grid of the N tokens, or its sides (height, width).
        rule: Rule that decides the splits, or its name, such as `"gamma:0.005"`.
        tau: Temperature, above 0, in units of the scores.
        max_depth: Depth at which no block is split; None for no limit.
        valid: bool tensor that broadcasts to `scores`, True for tokens that exist. None for all.
            Other tokens may hold anything.
        share: Dimensions of `scores` over which one tree serves all. The trees keep these
            dimensions with size 1.
        share_by: Aggregate of the node scores of the rows that share a tree: `"max"`, `"mean"` or a
            quantile in [0, 1].

    Returns:
        A `Tree` of shape `scores.shape[:-1]`, with size 1 in the shared dimensions.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If shapes do not fit, a number is out of range, or a valid score is not finite.

    Example:
        >>> import torch, bmfa
        >>> scores = torch.zeros(2, 64)
        >>> scores[0, 9] = 6.0  # one outlier in the first row
        >>> tree = bmfa.screen(scores, (8, 8), "gamma:0.005")
        >>> tree.leaf_count
        tensor([10,  1])
        >>> bmfa.screen(scores, (8, 8), "gamma:0.005", share=0).leaf_count
        tensor([10])
    """
    grid, rule = check_grid(grid), as_rule(rule)
    check_scores(scores, grid.size)
    batch = _Batch(scores, grid, rule, tau, max_depth, valid, share, share_by)
    half = scores.dtype in (torch.float16, torch.bfloat16)
    # A finite sum proves that all scores are finite, in one pass; huge scores may still overflow it.
    if not bool(torch.isfinite(scores.detach().sum(dtype=torch.float32 if half else None))):
        check_finite("scores", scores, valid)
    return _build(batch, _score_pyramids(batch, scores.detach().reshape(-1, grid.size)))


def screen_keys(
    q: Tensor,
    k: Tensor,
    grid: Grid | tuple[int, int],
    rule: Rule | str,
    *,
    scale: float | None = None,
    tau: float = 1.0,
    max_depth: int | None = None,
    valid: Tensor | None = None,
    share: int | Sequence[int] | None = None,
    share_by: ShareBy = "max",
) -> Tree:
    """Build one tree for each query from queries and keys, without the (Q, N) score matrix.

    The trees are those of `screen` on the scores `scale * q @ k.mT`, except where a node score is
    within rounding of the threshold. Rules that read means alone use mean keys; other rules compute
    the scores of a chunk of queries at a time.

    Args:
        q: (..., Q, d) floating-point queries.
        k: (..., N, d) spatial keys in raster order, without prefix tokens, of the dtype and device
            of `q`.
        grid: Grid of the N tokens, or its sides (height, width).
        rule: Rule that decides the splits, or its name, such as `"gamma:0.005"`.
        scale: Factor of the products; None for 1 / sqrt(d).
        tau: Temperature, above 0, in units of the scores.
        max_depth: Depth at which no block is split; None for no limit.
        valid: bool tensor that broadcasts to (..., 1, N), True for keys that exist. None for all.
        share: Dimensions of the (..., Q, N) scores over which one tree serves all.
        share_by: Aggregate of the node scores of the queries that share a tree: `"max"`, `"mean"` or
            a quantile in [0, 1].

    Returns:
        A `Tree` of shape `q.shape[:-1]`, with size 1 in the shared dimensions.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If shapes do not fit, a number is out of range, `valid` differs between the
            queries of a head, or the products may overflow.

    Example:
        >>> import torch, bmfa
        >>> generator = torch.Generator().manual_seed(0)
        >>> q = torch.randn(1, 2, 5, 16, generator=generator)  # (B, heads, Q, d)
        >>> k = torch.randn(1, 2, 64, 16, generator=generator)
        >>> tree = bmfa.screen_keys(q, k, (8, 8), "gamma:0.05")
        >>> tree.shape
        (1, 2, 5)
        >>> exact = bmfa.screen(q @ k.mT / 4, (8, 8), "gamma:0.05")
        >>> torch.equal(tree.leaf_index, exact.leaf_index)
        True
    """
    grid, rule = check_grid(grid), as_rule(rule)
    scale = check_products(q, k, scale)
    if k.shape[-2] != grid.size:
        raise ValueError(
            f"k has {k.shape[-2]} tokens and the {grid.height}x{grid.width} grid {grid.size}; "
            "pass the spatial keys alone, without prefix tokens"
        )
    like = q[..., :1].expand(*q.shape[:-1], grid.size)  # of the shape of the scores
    if valid is not None:
        valid = _one_mask_per_head(check_valid(valid, like.shape))
    batch = _Batch(like, grid, rule, tau, max_depth, valid, share, share_by)
    heads = q.shape[:-2].numel()
    queries = q.detach().to(batch.dtype).reshape(heads, *q.shape[-2:]) * scale  # (G, Q, d)
    keys = k.detach().to(batch.dtype).reshape(heads, *k.shape[-2:])  # (G, N, d)
    head_mask = repeat_columns(batch.valid, heads)
    if head_mask is not None:
        keys = keys.where(head_mask.T.unsqueeze(-1), 0.0)
    check_finite_products(q, keys, scale, batch.dtype)
    return _build(batch, _key_pyramids(batch, keys, head_mask, queries))


class _Batch:
    """A batch of score rows, the members, and the trees they get."""

    def __init__(
        self,
        scores: Tensor,
        grid: Grid,
        rule: Rule,
        tau: float,
        max_depth: int | None,
        valid: Tensor | None,
        share: int | Sequence[int] | None,
        share_by: ShareBy,
    ) -> None:
        """Check the options of `screen` for scores of this shape, dtype and device."""
        if max_depth is not None:
            max_depth = check_integer("max_depth", max_depth, low=0)
        lead = tuple(scores.shape[:-1])
        columns = None if valid is None else _distinct_masks(check_valid(valid, scores.shape), lead)
        fewest = grid.size if columns is None or columns.numel() == 0 else int(columns.sum(0).min())
        rule.check(grid, fewest)
        self.rule, self.max_depth, self.tau = rule, max_depth, check_tau(tau)
        self.layout = rule.layout(grid).to(scores.device)
        float64 = scores.dtype == torch.float64 or rule.float64_statistics
        self.dtype = torch.float64 if float64 else torch.float32  # of the statistics
        self.share_by = check_share_by(share_by)
        self.members = torch.Size(lead).numel()
        self.valid = columns  # (N, C) bool, each column for members / C consecutive members
        self.shape = lead  # of the trees
        self.tree_of_member: Tensor | None = None  # (members,); None for one tree each
        if share is not None:
            self.shape, self.tree_of_member = assign_trees(lead, share, scores.device)
        self.trees = torch.Size(self.shape).numel()
        self.tree_valid = self._tree_masks()  # (N, C) bool, each column for trees / C trees

    def context(self, counts: Counts, trees: int) -> Context:
        """The context of the decisions for some of the trees."""
        shared = self.tree_of_member is not None
        return Context(self.layout, counts, self.tau, trees, self.max_depth, shared)

    def mask_of(self, part: slice) -> Tensor | None:
        """(N, b) or (N, 1) masks of some members."""
        if self.valid is None or self.valid.shape[1] == 1:
            return self.valid
        members = torch.arange(part.start, part.stop, device=self.valid.device)
        return self.valid[:, members // (self.members // self.valid.shape[1])]

    def _tree_masks(self) -> Tensor | None:
        """Return the masks of the trees; raise ValueError if members of a tree have different ones."""
        tree, valid = self.tree_of_member, self.valid
        if tree is None or valid is None or valid.shape[1] == 1:
            return valid
        columns = torch.arange(self.members, device=tree.device) // (self.members // valid.shape[1])
        of_tree = columns.new_zeros(self.trees).scatter_(0, tree, columns)  # of any of its members
        pairs = torch.unique(torch.stack((of_tree[tree], columns), 1), dim=0)
        if not torch.equal(valid[:, pairs[:, 0]], valid[:, pairs[:, 1]]):
            raise ValueError(
                "valid differs between query-head pairs that share a tree; share only over "
                "dimensions along which valid is constant"
            )
        return valid[:, of_tree]


def _distinct_masks(valid: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(N, C) mask, each column for the same number of consecutive members of the batch."""
    full = valid.view((1,) * (len(lead) + 1 - valid.dim()) + tuple(valid.shape))
    varying = [dim for dim, size in enumerate(full.shape[:-1]) if size != 1]
    lead = lead[: varying[-1] + 1] if varying else ()
    rows = full.expand(*lead, *full.shape[len(lead) :])
    return rows.reshape(torch.Size(lead).numel(), full.shape[-1]).T


def _one_mask_per_head(valid: Tensor) -> Tensor:
    """Return the mask of the keys, which must be the same for all queries of a head."""
    if valid.dim() < 2 or valid.shape[-2] <= 1:
        return valid
    if not bool((valid == valid[..., :1, :]).all()):
        raise ValueError(
            "valid differs between queries of a head; pass (..., 1, N), one mask for the keys"
        )
    return valid[..., :1, :]


def _score_pyramids(batch: _Batch, scores: Tensor) -> Iterator[tuple[slice, Pyramid]]:
    """Chunks of (members, N) scores, each with its pyramid."""
    step = max(1, CHUNK_ELEMENTS // scores.shape[1])
    for start in range(0, len(scores), step):
        part = slice(start, min(start + step, len(scores)))
        mask = batch.mask_of(part)
        counts = Counts.from_mask(batch.layout, batch.dtype, mask)
        tokens = scores[part].to(batch.dtype).T  # (N, b)
        yield part, ScorePyramid(batch.layout, counts, batch.tau, tokens, mask)


def _key_pyramids(
    batch: _Batch, keys: Tensor, head_mask: Tensor | None, queries: Tensor
) -> Iterator[tuple[slice, Pyramid]]:
    """Chunks of (G, Q, d) queries, each with the pyramid of its scores of (G, N, d) keys."""
    levels = KeyLevels.from_keys(batch.layout, keys, head_mask)
    heads_total, queries_total, _ = queries.shape
    size = batch.layout.grid.size
    for heads, rows, part in query_chunks(heads_total, queries_total, size, CHUNK_ELEMENTS):
        mask = batch.mask_of(part)
        counts = Counts.from_mask(batch.layout, batch.dtype, mask)
        pyramid = KeyPyramid(levels, heads, queries[heads, rows], counts, batch.tau)
        yield part, pyramid if batch.rule.needs == "means" else pyramid.exact_scores(mask)


def _build(batch: _Batch, pyramids: Iterator[tuple[slice, Pyramid]]) -> Tree:
    """Decide the splits of every tree: chunk by chunk, or all trees from aggregated node scores."""
    rule, layout, mask = batch.rule, batch.layout, batch.tree_valid
    reads_scores = rule.needs != "nothing" and layout.block_count > 0
    if batch.trees == 0:
        decision = Decision(
            torch.zeros(layout.block_count, 0, dtype=torch.bool, device=layout.device)
        )
    elif batch.tree_of_member is None and not rule.needs_all_trees and reads_scores:
        decision = _concatenate(
            [
                rule.screen(pyramid, batch.context(pyramid.counts, part.stop - part.start))
                for part, pyramid in pyramids
            ]
        )
    else:
        scores = torch.empty(0, batch.trees, device=layout.device)
        if reads_scores:
            parts = ((part, rule.node_scores(pyramid)) for part, pyramid in pyramids)
            scores = aggregate_scores(parts, batch.tree_of_member, batch.trees, batch.share_by)
        counts = Counts.from_mask(layout, batch.dtype, repeat_columns(mask, batch.trees))
        decision = rule.decide(scores, batch.context(counts, batch.trees))
    return Tree(
        layout=layout,
        shape=batch.shape,
        tau=batch.tau,
        rule=str(rule),
        valid=mask,
        max_depth=batch.max_depth,
        members=batch.members // max(1, batch.trees),
        **vars(decision),
    )


def _concatenate(parts: list[Decision]) -> Decision:
    fields = zip(*(vars(part).values() for part in parts), strict=True)
    tensors = [None if field[0] is None else torch.cat(field, dim=1) for field in fields]
    return Decision(*tensors)  # type: ignore[arg-type]
