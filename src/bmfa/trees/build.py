"""Scores, or queries and keys, to trees."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bmfa.checks import (
    check_finite,
    check_floating,
    check_integer,
    check_number,
    check_scores,
    check_tau,
    check_valid,
)
from bmfa.grid import Grid, check_grid
from bmfa.trees.keys import KeyLevels, KeyPyramid
from bmfa.trees.pyramid import Counts, Pyramid, ScorePyramid
from bmfa.trees.rules import Context, Decision, Rule, as_rule
from bmfa.trees.sharing import Reducer, ShareBy, check_share_by, groups_of
from bmfa.trees.tree import Tree

# Scores held at once; a few times as many numbers are alive while a chunk is screened.
CHUNK_ELEMENTS = 1 << 20

# A chunk of the flat batch: where it lies, and how its pyramid is made.
Chunk = tuple[slice, Callable[[Counts], Pyramid]]


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
    """Build the trees of `rule` on (..., N) scores in raster order.

    Args:
        scores: (..., N) floating-point scores in raster order, N = height * width.
        grid: The grid of the N tokens, or its sides (height, width).
        rule: A rule of `bmfa.rules`, or its name, e.g. `"gamma:0.005"`.
        tau: The temperature, above 0.
        max_depth: The depth at which no block is split; None goes down to single tokens.
        valid: bool, broadcasts to the scores: the tokens that exist. All do by default.
        share: Dimensions of the scores over which one tree serves all. The trees keep these
            dimensions with size 1.
        share_by: How the node scores of the pairs that share a tree are aggregated: "max" (the
            conservative default), "mean" or a quantile in [0, 1].

    Returns:
        A `Tree` of shape `scores.shape[:-1]`, with size 1 in the shared dimensions.
    """
    grid = check_grid(grid)
    rule = as_rule(rule)
    check_scores(scores, grid.size)
    screening = Screening(scores, grid, rule, tau, max_depth, valid, share, share_by)
    flat = scores.detach().reshape(-1, grid.size)
    screening.check_finite("scores", scores, valid)
    mask = screening.valid

    def chunks() -> Iterator[Chunk]:
        step = max(1, CHUNK_ELEMENTS // grid.size)
        for start in range(0, len(flat), step):
            part = slice(start, min(start + step, len(flat)))

            def pyramid(counts: Counts, part: slice = part) -> Pyramid:
                tokens, some = (
                    flat[part].to(screening.dtype).T,
                    screening.columns(mask, part, screening.members),
                )
                return ScorePyramid(screening.layout, counts, screening.tau, tokens, some)

            yield part, pyramid

    return screening.run(chunks())


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
    """Build the trees of `rule` on the scores scale * q k^T without forming them.

    The trees are those of `screen` on the (..., Q, N) scores. Rules that read means alone take them
    from mean keys; the others stream the scores of a chunk of queries at a time.

    Args:
        q: (..., Q, d) queries.
        k: (..., N, d) the spatial keys alone, in raster order, of the dtype and device of q.
        grid: The grid of the N tokens, or its sides (height, width).
        rule: A rule of `bmfa.rules`, or its name, e.g. `"gamma:0.005"`.
        scale: The factor of the products, 1 / sqrt(d) by default.
        tau, max_depth, share, share_by: As in `screen`.
        valid: bool, (..., 1, N) or a shape that broadcasts to it: the keys that exist.

    Returns:
        A `Tree` of shape `q.shape[:-1]`, with size 1 in the shared dimensions.
    """
    grid = check_grid(grid)
    rule = as_rule(rule)
    scale = check_queries(q, k, grid, scale)
    like = q[..., :1].expand(*q.shape[:-1], grid.size)
    valid = None if valid is None else _mask_of_heads(check_valid(valid, like.shape))
    screening = Screening(like, grid, rule, tau, max_depth, valid, share, share_by)
    heads = q.shape[:-2].numel()
    queries = q.detach().to(screening.dtype).reshape(heads, *q.shape[-2:]) * scale  # (G, Q, d)
    keys = k.detach().to(screening.dtype).reshape(heads, *k.shape[-2:])  # (G, N, d)
    mask = screening.valid
    per_head = mask
    if mask is not None:
        if mask.shape[1] > 1:
            per_head = mask.repeat_interleave(heads // mask.shape[1], dim=1)
        keys = keys.where(per_head.T.unsqueeze(-1), 0.0)  # type: ignore[union-attr]
    check_finite_products(q, keys, scale, screening.dtype)
    if rule.needs == "nothing" or screening.trees == 0:
        return screening.run(iter(()))
    levels = KeyLevels.of(screening.layout, keys, per_head)

    def chunks() -> Iterator[Chunk]:
        for heads, some in query_chunks(len(queries), queries.shape[1], grid.size, CHUNK_ELEMENTS):
            first = heads.start * queries.shape[1] + some.start
            count = (heads.stop - heads.start) * (some.stop - some.start)
            part = slice(first, first + count)

            def pyramid(
                counts: Counts, part: slice = part, heads: slice = heads, some: slice = some
            ) -> Pyramid:
                made = KeyPyramid(levels, heads, queries[heads, some], counts, screening.tau)
                if rule.needs == "means":
                    return made
                return made.tokens(screening.columns(mask, part, screening.members))

            yield part, pyramid

    return screening.run(chunks())


def query_chunks(
    heads: int, queries: int, size: int, elements: int
) -> Iterator[tuple[slice, slice]]:
    """Whole heads at once where they are small, parts of one head's queries where they are not.

    About `elements` scores a chunk, of `size` keys for each query.
    """
    step = max(1, elements // size)
    if queries <= step:
        together = max(1, step // max(1, queries))
        for head in range(0, heads, together):
            yield slice(head, min(head + together, heads)), slice(0, queries)
        return
    for head in range(heads):
        for query in range(0, queries, step):
            yield slice(head, head + 1), slice(query, min(query + step, queries))


def check_queries(q: Tensor, k: Tensor, grid: Grid, scale: float | None) -> float:
    """Shapes and dtypes of queries and spatial keys; the scale, 1 / sqrt(d) by default."""
    scale = check_products(q, k, scale)
    if k.shape[-2] != grid.size:
        raise ValueError(
            f"k has {k.shape[-2]} tokens and the {grid.height}x{grid.width} grid {grid.size}; "
            "pass the spatial keys alone, without prefix tokens"
        )
    return scale


def check_products(q: Tensor, k: Tensor, scale: float | None) -> float:
    """Queries and keys that go together; the scale of their products, 1 / sqrt(d) by default."""
    check_floating("q", q)
    check_floating("k", k)
    if q.dtype != k.dtype or q.device != k.device:
        raise TypeError(
            f"q is {q.dtype} on {q.device} and k {k.dtype} on {k.device}; pass one dtype and device"
        )
    ends, others = q.shape, k.shape
    fits = len(ends) >= 2 and len(others) == len(ends) and ends[:-2] == others[:-2]
    if not fits or ends[-1] != others[-1] or ends[-1] == 0:
        raise ValueError(
            f"q has shape {tuple(ends)} and k {tuple(others)}; pass (..., Q, d) and (..., N, d)"
        )
    if scale is None:
        return float(ends[-1] ** -0.5)
    return check_number("scale", scale)


def check_finite_products(q: Tensor, keys: Tensor, scale: float, dtype: torch.dtype) -> None:
    """Raise where a query or a valid key is not finite, or their products may overflow a dtype."""
    largest = abs(scale) * keys.shape[-1]
    for tensor in (q, keys):
        if tensor.numel():
            some = tensor.detach()
            largest *= max(-float(some.amin()), float(some.amax()))  # NaN where one is in it
    if largest < torch.finfo(dtype).max:
        return
    check_finite("queries", q)
    check_finite("keys", keys)
    if q.numel() and keys.numel():
        raise ValueError(
            f"scores of up to {largest:.3g} overflow {dtype}; pass float64, or smaller queries and keys"
        )


def _mask_of_heads(valid: Tensor) -> Tensor:
    """The mask with one row for all queries of a head: keys exist for all of them or for none."""
    if valid.dim() < 2 or valid.shape[-2] <= 1:
        return valid
    if not bool((valid == valid[..., :1, :]).all()):
        raise ValueError(
            "valid differs between queries of a head; pass (..., 1, N), one mask for the keys"
        )
    return valid[..., :1, :]


def sums_finite(tensor: Tensor) -> bool:
    """Whether the sum is finite, as it is where all entries are, unless they are huge."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return bool(torch.isfinite(tensor.detach().sum(dtype=torch.float32 if half else None)))


class Screening:
    """One call: the checked settings, and how a batch becomes trees chunk by chunk."""

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
        self.rule = rule
        self.tau = check_tau(tau)
        self.max_depth = None if max_depth is None else check_integer("max_depth", max_depth, low=0)
        self.lead = tuple(scores.shape[:-1])
        self.device = scores.device
        double = scores.dtype == torch.float64 or rule.double
        self.dtype = torch.float64 if double else torch.float32
        self.layout = rule.layout(grid).to(scores.device)
        self.valid = _mask_columns(valid, scores.shape)
        counted = self.valid is not None and self.valid.numel() > 0
        rule.check(grid, int(self.valid.sum(0).min()) if counted else grid.size)  # type: ignore[union-attr]
        self.share_by = check_share_by(share_by)
        self.shape, self.groups = groups_of(self.lead, scores.dim(), share, scores.device)
        if self.groups is not None and self.valid is not None and self.valid.shape[1] > 1:
            self._check_shared_mask()

    def check_finite(self, name: str, scores: Tensor, valid: Tensor | None) -> None:
        """Raise where a valid score is not finite; one sum where all are."""
        if not sums_finite(scores):
            check_finite(name, scores, valid)

    def columns(self, mask: Tensor | None, part: slice, trees: int) -> Tensor | None:
        """(N, b) the masks of a part of so many trees; (N, 1) where one serves them all."""
        if mask is None or mask.shape[1] == 1:
            return mask
        members = torch.arange(part.start, part.stop, device=mask.device)
        return mask[:, members // (trees // mask.shape[1])]

    def run(self, chunks: Iterator[Chunk]) -> Tree:
        """Decide every tree, chunk by chunk or from aggregated scores."""
        if self.trees == 0:
            none = torch.zeros(self.layout.block_count, 0, dtype=torch.bool, device=self.device)
            return self._tree(Decision(none))
        unread = self.rule.needs == "nothing" or self.layout.block_count == 0
        if not unread and self.groups is None and not self.rule.together:
            return self._tree(self._direct(chunks))
        empty = torch.empty(0, self.trees, device=self.device)
        context = self._context(slice(0, self.trees), self._tree_mask(), self.trees)
        return self._tree(self.rule.decide(empty if unread else self._aggregate(chunks), context))

    @property
    def members(self) -> int:
        """How many query-head pairs there are."""
        return int(torch.Size(self.lead).numel())

    @property
    def trees(self) -> int:
        """How many trees there are."""
        return int(torch.Size(self.shape).numel())

    def _direct(self, chunks: Iterator[Chunk]) -> Decision:
        parts = []
        for part, pyramid in chunks:
            context = self._context(part, self.valid, self.members)
            parts.append(self.rule.screen(pyramid(context.counts), context))
        return _joined(parts)

    def _aggregate(self, chunks: Iterator[Chunk]) -> Tensor:
        """(rows, trees) node scores, aggregated over the members of each tree."""
        reducer = Reducer(self.groups, self.trees, self.share_by)
        for part, pyramid in chunks:
            counts = self._context(part, self.valid, self.members).counts
            reducer.add(part, self.rule.scores(pyramid(counts)))
        return reducer.result()

    def _context(self, part: slice, mask: Tensor | None, trees: int) -> Context:
        counts = Counts.of(self.layout, self.dtype, self.columns(mask, part, trees))
        count, shared = part.stop - part.start, self.groups is not None
        return Context(self.layout, counts, self.tau, count, self.max_depth, shared)

    def _tree_mask(self) -> Tensor | None:
        """The mask with one column for each tree."""
        if self.groups is None or self.valid is None or self.valid.shape[1] == 1:
            return self.valid
        return self.valid[:, self._masks()[self._first_members()]]

    def _masks(self) -> Tensor:
        """(B,) which column of the mask serves each member of the flat batch."""
        assert self.valid is not None
        return torch.arange(self.members, device=self.device) // (
            self.members // self.valid.shape[1]
        )

    def _first_members(self) -> Tensor:
        """(trees,) the first member of each shared tree."""
        assert self.groups is not None
        first = torch.zeros(self.trees, dtype=torch.int64, device=self.device)
        members = torch.arange(self.members, device=self.device)
        return first.scatter_(0, self.groups.flip(0), members.flip(0))

    def _check_shared_mask(self) -> None:
        assert self.groups is not None and self.valid is not None
        masks = self._masks()
        first = masks[self._first_members()][self.groups]
        pairs = torch.unique(torch.stack((first, masks), 1), dim=0)
        if not torch.equal(self.valid[:, pairs[:, 0]], self.valid[:, pairs[:, 1]]):
            raise ValueError(
                "valid differs between query-head pairs that share a tree; share only over "
                "dimensions along which valid is constant"
            )

    def _tree(self, decision: Decision) -> Tree:
        members = self.members // max(1, self.trees)
        context = self._context(slice(0, self.trees), None, self.trees)
        tree = Tree.decided(decision, context, str(self.rule), self.shape)
        return replace(tree, valid=self._tree_mask(), members=members)


def _joined(parts: list[Decision]) -> Decision:
    if len(parts) == 1:
        return parts[0]

    def cat(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if any(t is None for t in tensors) else torch.cat(tensors, dim=1)

    split = cat("split")
    assert split is not None
    return Decision(split, cat("limited"), cat("labels"))


def _mask_columns(valid: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """The mask as (N, C) columns, each for the same number of consecutive members of the batch."""
    if valid is None:
        return None
    check_valid(valid, shape)
    full = valid.view((1,) * (len(shape) - valid.dim()) + tuple(valid.shape))
    varying = [place for place, size in enumerate(full.shape[:-1]) if size != 1]
    lead = tuple(shape)[: varying[-1] + 1] if varying else ()
    rows = full.expand(*lead, *full.shape[len(lead) :]).reshape(torch.Size(lead).numel(), shape[-1])
    return rows.T
