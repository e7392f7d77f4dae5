"""A batch of trees: which blocks are split, and everything that follows from that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bmfa.bounds import output_bound
from bmfa.checks import check_scores
from bmfa.grid import Grid
from bmfa.trees.layout import Layout, Level
from bmfa.trees.pyramid import Counts, ScorePyramid
from bmfa.trees.rules import Context, Decision

# Trees handled at once where every token of every tree is looked at.
CHUNK_ELEMENTS = 1 << 19

Box = tuple[int, int, int, int]  # top, left, bottom, right; half open


@dataclass(frozen=True, eq=False)
class Tree:
    """Trees over one grid, one for each index of `shape`; a partition of the grid into rectangles.

    Kept as one bit (a byte) for each block that could be split: a million trees on 16x16 take
    85 MB. Leaves come in depth-first order, children from top left to bottom right.
    """

    layout: Layout
    split: Tensor  # (blocks, B) bool, B the product of shape
    shape: tuple[int, ...]
    tau: float
    rule: str
    valid: Tensor | None = None  # (N, C) bool, each column for B / C consecutive trees
    limited: Tensor | None = None  # (n, B) bool: blocks at max_depth that asked for a split
    max_depth: int | None = None
    labels: Tensor | None = None  # (blocks, B) int8
    members: int = 1  # how many query-head pairs each tree serves

    @classmethod
    def decided(
        cls, decision: Decision, context: Context, rule: str, shape: tuple[int, ...] | None = None
    ) -> "Tree":
        """The trees of a decision, in one dimension unless a shape is given."""
        return cls(
            context.layout,
            decision.split,
            (context.trees,) if shape is None else shape,
            context.tau,
            rule,
            limited=decision.limited,
            max_depth=context.max_depth,
            labels=decision.labels,
        )

    @classmethod
    def from_boxes(
        cls,
        layout: Layout,
        boxes: Sequence[Sequence[Box]],
        shape: tuple[int, ...],
        tau: float,
        rule: str,
        valid: Tensor | None = None,
    ) -> "Tree":
        """Trees from the leaves of each, which must be nodes of the layout."""
        split = torch.zeros(layout.block_count, len(boxes), dtype=torch.bool)
        blocks = torch.cat([level.boxes for level in layout.levels]).tolist()
        for column, leaves in enumerate(boxes):
            area = torch.full((layout.grid.height, layout.grid.width), layout.grid.size + 1)
            for top, left, bottom, right in leaves:
                area[top:bottom, left:right] = (bottom - top) * (right - left)
            for row, (top, left, bottom, right) in enumerate(blocks):
                smallest = area[top:bottom, left:right].min()
                split[row, column] = smallest < (bottom - top) * (right - left)
        return cls(layout, split, tuple(shape), tau, rule, valid)

    @property
    def grid(self) -> Grid:
        """The grid under the trees."""
        return self.layout.grid

    @property
    def device(self) -> torch.device:
        """Where the trees lie."""
        return self.split.device

    def __repr__(self) -> str:
        many = f"{self.split.shape[1]} trees {self.shape}" if self.shape else "one tree"
        shared = f", each for {self.members} query-head pairs" if self.members > 1 else ""
        return (
            f"Tree({many} on {self.grid.height}x{self.grid.width}, {self.rule}{shared}: "
            f"{self.leaf_count.double().mean():.4g} leaves, "
            f"{100 * self.leaf_ratio.double().mean():.4g} % of tokens)"
        )

    def flat(self) -> "Tree":
        """The same trees in one dimension."""
        return replace(self, shape=(self.split.shape[1],))

    def __getitem__(self, index: Any) -> "Tree":
        """The trees at an index over the leading dimensions."""
        flat = torch.arange(self.split.shape[1], device=self.device).view(self.shape)[index]
        columns = flat.flatten()

        def pick(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or tensor.shape[1] == 1:
                return tensor if tensor is None or tensor is self.valid else tensor[:, columns]
            repeats = max(1, self.split.shape[1] // max(1, tensor.shape[1]))
            return tensor.index_select(1, columns // repeats)

        return replace(
            self,
            split=self.split.index_select(1, columns),
            shape=tuple(flat.shape),
            valid=pick(self.valid),
            limited=pick(self.limited),
            labels=pick(self.labels),
        )

    def to(self, device: torch.device | str) -> "Tree":
        """The same trees on another device."""
        names = ("split", "valid", "limited", "labels")
        moved = {n: t.to(device) for n in names if (t := getattr(self, n)) is not None}
        return replace(self, layout=self.layout.to(device), **moved)

    def mask_of_heads(self, heads: int) -> Tensor | None:
        """(N, heads) or (N, 1): the mask of each head, which all its queries share."""
        if self.valid is None or self.valid.shape[1] == 1:
            return self.valid
        if self.valid.shape[1] > heads:
            return self.valid[:, :: self.valid.shape[1] // heads]
        return self.valid.repeat_interleave(heads // self.valid.shape[1], dim=1)

    @property
    def counts(self) -> Counts:
        """Valid tokens of every block, a column for each mask."""
        return Counts.of(self.layout, torch.float32, self.valid)

    @property
    def leaf_count(self) -> Tensor:
        """(...) leaves that hold a valid token."""
        return self._collect(lambda part: part._leaf_count()).view(self.shape)

    @property
    def node_count(self) -> Tensor:
        """(...) nodes visited: leaves and splits."""
        splits = self._collect(lambda part: part.split.sum(0))
        return self.leaf_count + splits.view(self.shape)

    @property
    def leaf_ratio(self) -> Tensor:
        """(...) leaves as a fraction of the valid tokens."""
        if self.valid is None:
            return self.leaf_count / self.grid.size
        total = self.valid.sum(0)
        repeats = self.split.shape[1] // max(1, len(total))
        return self.leaf_count / total.repeat_interleave(repeats).view(self.shape)

    @property
    def leaf_index(self) -> Tensor:
        """(..., N) the leaf of every token, numbered as in leaf_boxes; -1 where not valid."""
        return self._collect(lambda part: part._leaf_index()).view(*self.shape, self.grid.size)

    @property
    def leaf_boxes(self) -> Tensor:
        """(..., L, 4) top, left, bottom, right of the leaves, half open; zeros beyond leaf_count."""
        nodes = torch.cat([_with_tokens(level, self.grid.width) for level in self.layout.levels])
        return self._by_leaf(lambda part: nodes.unsqueeze(1).expand(-1, part.split.shape[1], -1))

    @property
    def leaf_labels(self) -> Tensor:
        """(..., L) index into rules.LABELS of every leaf of a certified tree."""
        if self.labels is None:
            raise ValueError(f"{self.rule} labels no leaves; screen with rules.Certified")
        return self._by_leaf(lambda part: part._node_rows(part.labels))

    @property
    def depth_limited(self) -> Tensor:
        """(..., L) leaves that the depth limit kept from being split."""
        return self._by_leaf(lambda part: part._node_rows(part._limited_blocks()))

    def refines(self, other: "Tree") -> Tensor:
        """(...) whether every leaf lies inside a leaf of the other tree; shapes broadcast."""
        if self.grid != other.grid:
            raise ValueError(f"the trees lie on {self.grid} and {other.grid}; compare on one grid")
        try:
            shape = torch.broadcast_shapes(self.shape, other.shape)  # type: ignore[no-untyped-call]
        except RuntimeError:
            raise ValueError(
                f"the trees have shapes {self.shape} and {other.shape}; pass shapes that broadcast"
            ) from None
        fine, coarse = self._broadcast(shape), other._broadcast(shape)
        if self.layout is other.layout:
            return ~(coarse.split & ~fine.split).any(0).view(shape)
        if self.valid is not None or other.valid is not None:
            raise ValueError("trees of different hierarchies are compared without valid= only")
        pairs = fine.leaf_index.long() * self.grid.size + coarse.leaf_index
        distinct = 1 + (pairs.sort(-1).values.diff(dim=-1) != 0).sum(-1)
        return (distinct == fine.leaf_count).view(shape)

    def _broadcast(self, shape: tuple[int, ...]) -> "Tree":
        """The flat batch of the trees that stand at each index of a shape they broadcast to."""
        trees = torch.arange(self.split.shape[1], device=self.device).view(self.shape)
        return self.flat()[trees.expand(shape).flatten()]

    def reconstruct(self, scores: Tensor) -> Tensor:
        """(..., N) the mean score of its leaf at every token."""
        return self._on_scores(scores, lambda part, pyramid: part._reconstruct(pyramid))

    def error(self, scores: Tensor) -> Tensor:
        """E = F - F~ = tau KL(q || p) of every tree on its scores, exact to rounding.

        q is the distribution that has the mean score of its leaf at every token, and p that of the
        scores; both are over the valid spatial tokens alone. Attention over tiles adds corrections to
        its mean tiles: for its trees this is E without them, and no measure of its output.

        Args:
            scores: (..., N) spatial scores, scaled but not divided by tau, whose leading dimensions
                the trees broadcast to. Tokens that are not valid may hold anything.

        Returns:
            (...) errors in float32, or float64 for such scores.
        """
        check_scores(scores, self.grid.size)
        working = torch.float64 if scores.dtype == torch.float64 else torch.float32
        exact = self._on_scores(scores.double(), lambda part, pyramid: part.error_on(pyramid))
        return exact.to(working)

    def output_bound(self, scores: Tensor, values: Tensor) -> Tensor:
        """(...) V_max sqrt(2 E / tau): how far the attention output can be from the exact one.

        V_max is the norm of the longest value of a valid token.

        Args:
            scores: (..., N) scores, as for `error`.
            values: (..., N, d) with the leading dimensions of the trees, or, as attention has them,
                without the last of these, over which all queries of a head share their values.

        Returns:
            (...) float64 bounds.
        """
        per_tree = values.dim() == len(self.shape) + 2
        if not per_tree and values.dim() != len(self.shape) + 1:
            raise ValueError(
                f"values have shape {tuple(values.shape)} and the trees {self.shape}; pass "
                "(..., N, d) with the trees' leading dimensions, or all but the last of them"
            )
        norms = torch.linalg.vector_norm(values.double(), dim=-1)  # (..., N)
        norms = norms if per_tree else norms.unsqueeze(-2)
        if self.valid is not None:
            norms = norms.where(self._mask(), 0.0)
        longest = norms.amax(-1)
        return output_bound(self.error(scores).double(), longest, tau=self.tau)

    def _mask(self) -> Tensor:
        """(..., N) the valid tokens of every tree; (N,) where one mask serves all."""
        assert self.valid is not None
        if self.valid.shape[1] == 1:
            return self.valid.squeeze(1)
        repeats = self.split.shape[1] // max(1, self.valid.shape[1])
        return self.valid.repeat_interleave(repeats, 1).T.view(*self.shape, self.grid.size)

    def _collect(self, compute: Callable[["Tree"], Tensor]) -> Tensor:
        """Compute on the flat batch, so many trees at once that the intermediates stay small."""
        trees = self.split.shape[1]
        step = max(1, CHUNK_ELEMENTS // self.grid.size)
        if trees <= step:
            return compute(self.flat()[:])
        return torch.cat([compute(self.flat()[i : i + step]) for i in range(0, trees, step)])

    def _leaf_count(self) -> Tensor:
        counts, first = self.counts, self.layout.levels[0]
        if self.valid is None:
            roots = torch.tensor(first.size + first.tokens.numel(), device=self.device)
        else:
            roots = self.valid[first.tokens].sum(0)
            if counts.blocks:
                roots = roots + (counts.blocks[0] > 0).sum(0)
        grown = sum(
            ((branching - 1) * split).sum(0)
            for branching, split in zip(counts.branching, self._levels(), strict=True)
        )
        return (roots + grown + torch.zeros_like(self.split[:1].sum(0))).round().long()

    def _levels(self) -> list[Tensor]:
        """The (n, B) splits of every level that has blocks."""
        offsets = self.layout.offsets
        depths = range(len(self.layout.levels) - 1)
        return [self.split[offsets[d] : offsets[d + 1]] for d in depths]

    def _leaves(self) -> list[Tensor]:
        """(n + t, B) for every level: which of its blocks and tokens are leaves with valid tokens."""
        counts, above = self.counts, None
        leaves: list[Tensor] = []
        for level, split in zip(self.layout.levels, [*self._levels(), self.split[:0]], strict=True):
            if above is None:
                ends = self.split.new_ones(level.tokens.numel(), self.split.shape[1])
                reached = torch.ones_like(split)
            else:
                ends, reached = above[level.token_parents], above[level.parents]
            if self.valid is not None:
                ends = ends & self.valid[level.tokens]
                if level.size:
                    reached = reached & (counts.blocks[len(leaves)] > 0)
            leaves.append(torch.cat((reached & ~split, ends)))
            above = split
        return leaves

    def leaf_nodes(self) -> Tensor:
        """(blocks + N, B) which nodes are leaves: blocks of all levels, then tokens in raster order."""
        leaves = self._leaves()
        tokens = self.split.new_zeros(self.grid.size, self.split.shape[1])
        blocks = []
        for level, rows in zip(self.layout.levels, leaves, strict=True):
            blocks.append(rows[: level.size])
            tokens[level.tokens] = rows[level.size :]
        return torch.cat((*blocks, tokens))

    def _leaf_index(self) -> Tensor:
        begins = self.split.new_zeros(self.grid.size, self.split.shape[1])
        for level, leaves in zip(self.layout.levels, self._leaves(), strict=True):
            starts = torch.cat((level.starts, level.token_starts))
            begins[starts] |= leaves
        index = begins.cumsum(0, dtype=torch.int32).sub_(1)[self.layout.token_rank]
        if self.valid is not None:
            index = index.masked_fill(~self.valid, -1)
        return index.T.contiguous()

    def _node_rows(self, blocks: Tensor | None) -> Tensor:
        """(nodes, B) values of all blocks and tokens from those of the blocks; tokens have 0."""
        assert blocks is not None
        rows = []
        for depth, level in enumerate(self.layout.levels):
            offsets = self.layout.offsets
            rows.append(blocks[offsets[depth] : offsets[depth + 1]])
            rows.append(blocks.new_zeros(level.tokens.numel(), blocks.shape[1]))
        return torch.cat(rows)

    def _limited_blocks(self) -> Tensor:
        blocks = torch.zeros_like(self.split)
        if self.limited is not None and self.max_depth is not None:
            start = self.layout.offsets[self.max_depth]
            blocks[start : start + self.limited.shape[0]] = self.limited
        return blocks

    def _by_leaf(self, values: Callable[["Tree"], Tensor]) -> Tensor:
        """(..., L, *) values of the leaves in order, out of (nodes, B, *) values of all nodes."""
        most = int(self.leaf_count.max()) if self.split.shape[1] else 0
        order = torch.cat([torch.cat((v.starts, v.token_starts)) for v in self.layout.levels])
        order = order.argsort(stable=True)

        def pick(part: "Tree") -> Tensor:
            tree, place = torch.cat(part._leaves())[order].T.nonzero().unbind(-1)
            counts = part.leaf_count
            rank = torch.arange(len(tree), device=tree.device) - (counts.cumsum(0) - counts)[tree]
            rows = values(part)
            out = rows.new_zeros(part.split.shape[1], most, *rows.shape[2:])
            out[tree, rank] = rows[order[place], tree]
            return out

        picked = self._collect(pick)
        return picked.view((*self.shape, *picked.shape[1:]))

    def _on_scores(
        self, scores: Tensor, compute: Callable[["Tree", ScorePyramid], Tensor]
    ) -> Tensor:
        """Compute on (..., N) scores whose leading dimensions the trees broadcast to."""
        check_scores(scores, self.grid.size)
        lead = scores.shape[:-1]
        trees = torch.arange(self.split.shape[1], device=self.device).view(self.shape)
        try:
            columns = trees.expand(lead).flatten()
        except RuntimeError:
            raise ValueError(
                f"scores have leading dimensions {tuple(lead)} and the trees {self.shape}; "
                "pass the scores the trees were made for"
            ) from None
        flat = scores.reshape(-1, self.grid.size)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        step = max(1, CHUNK_ELEMENTS // self.grid.size)
        parts = []
        for start in range(0, max(1, len(flat)), step):
            part = self.flat()[columns[start : start + step]]
            parts.append(compute(part, part._pyramid(flat[start : start + step].T)))
        result = torch.cat(parts)
        return result.view((*lead, *result.shape[1:]))

    def _pyramid(self, tokens: Tensor) -> ScorePyramid:
        counts = Counts.of(self.layout, tokens.dtype, self.valid)
        return ScorePyramid(self.layout, counts, self.tau, tokens, self.valid)

    def _reconstruct(self, pyramid: ScorePyramid) -> Tensor:
        tokens = pyramid.tokens.clone()
        held = pyramid.mean(0) if pyramid.depth else tokens[:0]  # the mean of the leaf above
        for depth, split in enumerate(self._levels()):
            below = self.layout.levels[depth + 1]
            ends = below.tokens
            tokens[ends] = torch.where(
                split[below.token_parents], pyramid.tokens[ends], held[below.token_parents]
            )
            if below.size:
                mean = pyramid.mean(depth + 1)
                held = torch.where(split[below.parents], mean, held[below.parents])
        return tokens.T.contiguous()

    def error_on(self, pyramid: ScorePyramid) -> Tensor:
        """(B,) E of the flat batch of trees on the scores of a pyramid.

        E = -tau log(1 - lost), `lost` the share of Z that the splits not made would recover. Where
        that is most of it, 1 - lost is rounding: the mass the leaves hold is added up instead.
        """
        lost = torch.zeros_like(pyramid.log_partition())
        for depth, split in enumerate(self._levels()):
            lost += (pyramid.gain(depth) * ~split).sum(0)
        error = lost.clamp(max=0.5).neg_().log1p_().neg_()
        if bool((lost > 0.5).any()):
            error = torch.where(lost > 0.5, -self._log_held(pyramid), error)
        return error * self.tau

    def _log_held(self, pyramid: ScorePyramid) -> Tensor:
        """(B,) log of the share of Z the leaves hold: that of the roots, and what splits recover."""
        first, log_partition = self.layout.levels[0], pyramid.log_partition()
        held = pyramid.root_share()
        if len(first.tokens):
            ends = (pyramid.tokens[first.tokens] / self.tau - log_partition).exp_()
            held += (ends if self.valid is None else ends * self.valid[first.tokens]).sum(0)
        for depth, split in enumerate(self._levels()):
            held += (pyramid.gain(depth) * split).sum(0)
        # A share that small has lost digits, or all of them, to underflow.
        if bool((held < 1e-30).any()):
            return self._log_mass(pyramid) - log_partition
        return held.log_()

    def _log_mass(self, pyramid: ScorePyramid) -> Tensor:
        """(B,) log of the mass n exp(M / tau) the leaves hold together."""
        rows = []
        for depth, leaves in enumerate(self._leaves()):
            level = self.layout.levels[depth]
            logits = pyramid.tokens[level.tokens] / self.tau
            if level.size:
                mean, counts = pyramid.mean(depth), pyramid.counts.blocks[depth]
                logits = torch.cat((mean / self.tau + counts.log(), logits))
            rows.append(logits.masked_fill(~leaves, -torch.inf))
        return torch.cat(rows).logsumexp(0)


def _with_tokens(level: Level, width: int) -> Tensor:
    """(n + t, 4) boxes of the blocks and the tokens of a level."""
    top, left = level.tokens // width, level.tokens % width
    return torch.cat((level.boxes, torch.stack((top, left, top + 1, left + 1), -1)))
