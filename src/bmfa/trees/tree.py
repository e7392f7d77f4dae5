"""A batch of trees: which blocks are split, and everything that follows from that."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bmfa.bounds import output_bound
from bmfa.checks import check_scores
from bmfa.grid import Grid
from bmfa.trees.errors import leaf_means, tree_error
from bmfa.trees.layout import Layout, Level
from bmfa.trees.pyramid import Counts, ScorePyramid, repeat_columns

# Tokens of all trees handled at once by properties that visit every token of every tree: 2 MB in
# float32, so that the temporaries stay in the second-level cache.
CHUNK_ELEMENTS = 1 << 19


@dataclass(frozen=True, eq=False)
class Tree:
    """Trees over one grid, one for each index of `shape`.

    A tree is a partition of the grid into rectangles, its leaves. It is stored as one byte for each
    block that can be split: a million trees on a 16x16 grid take 85 MB. Leaves are numbered in
    depth-first order, children from top left to bottom right. Indexing selects trees over the leading
    dimensions, as indexing a tensor of that shape does.

    Trees are made by `bmfa.screen`, `bmfa.screen_keys` and `bmfa.screened_attention`.

    Args:
        layout: Block hierarchy.
        split: (blocks, B) bool, B the product of `shape`: blocks that are split.
        shape: Leading dimensions.
        tau: Temperature.
        rule: Name of the rule that decided the splits.
        valid: (N, C) bool masks, each column for B / C consecutive trees; None if all tokens exist.
        limited: (blocks, B) bool: those at `max_depth` that the rule would split.
        max_depth: Depth limit, or None.
        labels: (blocks, B) int8 index into `bmfa.rules.LABELS`, for `Certified`.
        members: Number of query-head pairs that each tree serves.
        block_means: True if the attention of the trees has the mean score of its leaf at every token.
            False for tiled attention, whose trees say which tokens are merged and no more.

    Example:
        >>> import torch, bmfa
        >>> scores = torch.zeros(2, 16)
        >>> scores[0, 0] = 6.0
        >>> tree = bmfa.screen(scores, (4, 4), "gamma:0.005")
        >>> tree
        Tree(2 trees (2,) on 4x4, gamma:0.005: 4 leaves, 25 % of tokens)
        >>> tree[0]
        Tree(one tree on 4x4, gamma:0.005: 7 leaves, 43.75 % of tokens)
    """

    layout: Layout
    split: Tensor
    shape: tuple[int, ...]
    tau: float
    rule: str
    valid: Tensor | None = None
    limited: Tensor | None = None
    max_depth: int | None = None
    labels: Tensor | None = None
    members: int = 1
    block_means: bool = True

    @property
    def grid(self) -> Grid:
        """The grid of the spatial tokens."""
        return self.layout.grid

    @property
    def device(self) -> torch.device:
        """Device of the trees."""
        return self.split.device

    def __repr__(self) -> str:
        trees = f"{self.split.shape[1]} trees {self.shape}" if self.shape else "one tree"
        shared = f", each for {self.members} query-head pairs" if self.members > 1 else ""
        return (
            f"Tree({trees} on {self.grid}, {self.rule}{shared}: "
            f"{self.leaf_count.double().mean():.4g} leaves, "
            f"{100 * self.leaf_ratio.double().mean():.4g} % of tokens)"
        )

    def flat(self) -> "Tree":
        """Return the same trees with one leading dimension.

        Returns:
            A `Tree` of shape (B,).

        Example:
            >>> import torch, bmfa
            >>> bmfa.screen(torch.zeros(2, 3, 16), (4, 4), "gamma:0.005").flat().shape
            (6,)
        """
        return replace(self, shape=(self.split.shape[1],))

    def __getitem__(self, index: Any) -> "Tree":
        """Return the trees at an index over the leading dimensions."""
        flat = torch.arange(self.split.shape[1], device=self.device).view(self.shape)[index]
        columns = flat.flatten()

        def select(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or (tensor is self.valid and tensor.shape[1] == 1):
                return tensor
            repeats = max(1, self.split.shape[1] // max(1, tensor.shape[1]))
            return tensor.index_select(1, columns // repeats)

        return replace(
            self,
            split=self.split.index_select(1, columns),
            shape=tuple(flat.shape),
            valid=select(self.valid),
            limited=select(self.limited),
            labels=select(self.labels),
        )

    def to(self, device: torch.device | str) -> "Tree":
        """Return the trees on another device.

        Args:
            device: Device, as for `torch.Tensor.to`.

        Returns:
            A `Tree` with all tensors on `device`.

        Example:
            >>> import torch, bmfa
            >>> bmfa.screen(torch.zeros(16), (4, 4), "gamma:0.005").to("cpu").device
            device(type='cpu')
        """
        names = ("split", "valid", "limited", "labels")
        moved = {n: t.to(device) for n in names if (t := getattr(self, n)) is not None}
        return replace(self, layout=self.layout.to(device), **moved)

    @property
    def leaf_count(self) -> Tensor:
        """(...) int64: number of leaves that hold a valid token.

        Example:
            >>> import torch, bmfa
            >>> bmfa.screen(torch.zeros(2, 16), (4, 4), "fixed-depth:1").leaf_count
            tensor([4, 4])
        """
        counts = [
            torch.stack([leaves.sum(0) for leaves in part.level_leaves()]).sum(0)
            for part, _ in self._chunks()
        ]
        return torch.cat(counts).view(self.shape)

    @property
    def node_count(self) -> Tensor:
        """(...) int64: number of nodes visited, leaves plus splits.

        Example:
            >>> import torch, bmfa
            >>> bmfa.screen(torch.zeros(2, 16), (4, 4), "fixed-depth:1").node_count
            tensor([5, 5])
        """
        return self.leaf_count + self.split.sum(0).view(self.shape)

    @property
    def leaf_ratio(self) -> Tensor:
        """(...) leaves as a fraction of the valid tokens, in (0, 1].

        Example:
            >>> import torch, bmfa
            >>> bmfa.screen(torch.zeros(2, 16), (4, 4), "fixed-depth:1").leaf_ratio
            tensor([0.2500, 0.2500])
        """
        if self.valid is None:
            return self.leaf_count / self.grid.size
        total = self.valid.sum(0)
        repeats = self.split.shape[1] // max(1, len(total))
        return self.leaf_count / total.repeat_interleave(repeats).view(self.shape)

    @property
    def leaf_index(self) -> Tensor:
        """(..., N) int32: leaf of every token, numbered as in `leaf_boxes`; -1 if not valid.

        Example:
            >>> import torch, bmfa
            >>> bmfa.screen(torch.zeros(8), (2, 4), "fixed-depth:1").leaf_index
            tensor([0, 0, 1, 1, 2, 2, 3, 3], dtype=torch.int32)
        """
        index = torch.cat([part._leaf_index() for part, _ in self._chunks()])
        return index.view(*self.shape, self.grid.size)

    @property
    def leaf_boxes(self) -> Tensor:
        """(..., L, 4) int64: top, left, bottom, right of every leaf, half open.

        L is the largest leaf count of the batch; rows beyond `leaf_count` are zeros.

        Example:
            >>> import torch, bmfa
            >>> bmfa.screen(torch.zeros(16), (4, 4), "fixed-depth:1").leaf_boxes.tolist()
            [[0, 0, 2, 2], [0, 2, 2, 4], [2, 0, 4, 2], [2, 2, 4, 4]]
        """
        nodes = torch.cat([_node_boxes(level, self.grid.width) for level in self.layout.levels])
        return self._by_leaf(lambda part: nodes.unsqueeze(1).expand(-1, part.split.shape[1], -1))

    @property
    def leaf_labels(self) -> Tensor:
        """(..., L) int8: index into `bmfa.rules.LABELS` of every leaf of a certified tree.

        Raises:
            ValueError: If the rule is not `Certified`.

        Example:
            >>> import torch, bmfa
            >>> scores = torch.zeros(16)
            >>> scores[0] = 6.0
            >>> tree = bmfa.screen(scores, (4, 4), "certified:0.5", max_depth=1)
            >>> [bmfa.rules.LABELS[label] for label in tree.leaf_labels.tolist()]
            ['must-refine', 'safe', 'safe', 'safe']
        """
        if self.labels is None:
            raise ValueError(f"{self.rule} labels no leaves; screen with rules.Certified")
        return self._by_leaf(lambda part: part._node_rows(part.labels))

    @property
    def depth_limited(self) -> Tensor:
        """(..., L) bool: leaves that the rule would split but `max_depth` does not allow.

        Example:
            >>> import torch, bmfa
            >>> scores = torch.zeros(16)
            >>> scores[0] = 6.0
            >>> bmfa.screen(scores, (4, 4), "gamma:0.005", max_depth=1).depth_limited
            tensor([ True, False, False, False])
        """
        return self._by_leaf(
            lambda part: part._node_rows(
                part.split & False if part.limited is None else part.limited
            )
        )

    def refines(self, other: "Tree") -> Tensor:
        """Compare trees on one grid.

        Args:
            other: Trees whose shape broadcasts with that of these trees.

        Returns:
            (...) bool: True if every leaf of the tree is inside a leaf of the other tree.

        Raises:
            ValueError: If the grids differ, the shapes do not broadcast, or trees of different block
                hierarchies have masks.

        Example:
            >>> import torch, bmfa
            >>> fine, coarse = (
            ...     bmfa.screen(torch.zeros(16), (4, 4), f"fixed-depth:{depth}") for depth in (2, 1)
            ... )
            >>> fine.refines(coarse), coarse.refines(fine)
            (tensor(True), tensor(False))
        """
        if self.grid != other.grid:
            raise ValueError(f"the trees are on {self.grid} and {other.grid}; compare on one grid")
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
            raise ValueError(
                "trees of different hierarchies have masks; compare trees made without valid="
            )
        pairs = fine.leaf_index.long() * self.grid.size + coarse.leaf_index
        distinct = 1 + (pairs.sort(-1).values.diff(dim=-1) != 0).sum(-1)
        return (distinct == fine.leaf_count).view(shape)

    def reconstruct(self, scores: Tensor) -> Tensor:
        """Replace every score by the mean of its leaf.

        Args:
            scores: (..., N) floating-point scores, to whose leading dimensions the trees broadcast.

        Returns:
            (..., N) mean scores in float32, or float64 for float64 scores.

        Raises:
            TypeError: If `scores` is not a floating-point tensor.
            ValueError: If the shape does not fit the trees.

        Example:
            >>> import torch, bmfa
            >>> scores = torch.arange(8.0)
            >>> bmfa.screen(scores, (2, 4), "fixed-depth:1").reconstruct(scores)
            tensor([0.5000, 0.5000, 2.5000, 2.5000, 4.5000, 4.5000, 6.5000, 6.5000])
        """
        return self._on_scores(scores, leaf_means)

    def error(self, scores: Tensor) -> Tensor:
        """Compute E = F - F~ = tau KL(q || p), exact to rounding.

        q is the attention distribution with the mean score of its leaf at every token, and p that of
        the scores; both are over the valid spatial tokens. The attention of a tiled call is not q
        unless all leaves are single tokens, and its trees are refused.

        Args:
            scores: (..., N) floating-point scores, scaled but not divided by tau, to whose leading
                dimensions the trees broadcast. Tokens that are not valid may hold anything.

        Returns:
            (...) errors in units of the scores, float32 or, for float64 scores, float64.

        Raises:
            TypeError: If `scores` is not a floating-point tensor.
            ValueError: If the shape does not fit the trees, or if they are those of a tiled call.

        Example:
            >>> import torch, bmfa
            >>> scores = torch.arange(8.0)
            >>> bmfa.screen(scores, (2, 4), "global-mean").error(scores)
            tensor(1.8789)
            >>> bmfa.gap(scores)
            tensor(1.8789)
        """
        check_scores(scores, self.grid.size)
        self._check_block_means("error")
        dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
        return self._on_scores(scores.double(), tree_error).to(dtype)

    def output_bound(self, scores: Tensor, values: Tensor) -> Tensor:
        """Bound the distance of the attention output from the exact output, V_max sqrt(2 E / tau).

        V_max is the largest norm of a value of a valid token.

        Args:
            scores: (..., N) floating-point scores, as for `error`.
            values: (..., N, d) floating-point values with the leading dimensions of the trees, or
                without the last of these, which is then that of queries with the same values.

        Returns:
            (...) float64 bounds on the L2 norm, in units of the values.

        Raises:
            TypeError: If `scores` is not a floating-point tensor.
            ValueError: If a shape does not fit the trees, or if they are those of a tiled call.

        Example:
            >>> import torch, bmfa
            >>> scores, values = torch.arange(8.0), torch.eye(8)
            >>> tree = bmfa.screen(scores, (2, 4), "fixed-depth:2")
            >>> tree.output_bound(scores, values)
            tensor(0., dtype=torch.float64)
        """
        self._check_block_means("output_bound")
        per_tree = values.dim() == len(self.shape) + 2
        if not per_tree and values.dim() != len(self.shape) + 1:
            raise ValueError(
                f"values have shape {tuple(values.shape)} and the trees {self.shape}; pass "
                "(..., N, d) with the trees' leading dimensions, or all but the last of them"
            )
        norms = torch.linalg.vector_norm(values.double(), dim=-1)  # (..., N)
        norms = norms if per_tree else norms.unsqueeze(-2)
        if self.valid is not None:
            norms = norms.where(self._token_mask(), 0.0)
        return output_bound(self.error(scores).double(), norms.amax(-1), tau=self.tau)

    def _check_block_means(self, name: str) -> None:
        """Refuse what is not true of the attention that a tiled call returns."""
        if not self.block_means and bool((self.leaf_ratio < 1).any()):
            raise ValueError(
                f"these trees are of a tiled call: they say which tokens are merged, and the attention "
                f"inside a merged tile is not uniform, so that {name} of the tree is not that of the "
                "output; read stats.error, or call bmfa.certify"
            )

    def mask_of_heads(self, heads: int) -> Tensor | None:
        """(N, heads) or (N, 1) bool: mask of each head, which all its queries share."""
        if self.valid is not None and self.valid.shape[1] > heads > 0:
            return self.valid[:, :: self.valid.shape[1] // heads]
        return repeat_columns(self.valid, heads)

    def level_splits(self) -> list[Tensor]:
        """(n, B) bool for every level that has blocks: blocks that are split."""
        sizes = [level.size for level in self.layout.levels[:-1]]
        return list(self.split.split(sizes))  # type: ignore[no-untyped-call]

    def level_leaves(self) -> list[Tensor]:
        """(n + t, B) bool for every level: blocks and tokens that are leaves with valid tokens."""
        counts = Counts.from_mask(self.layout, torch.float32, self.valid)
        parents: Tensor | None = None
        leaves: list[Tensor] = []
        splits = [*self.level_splits(), self.split[:0]]
        for level, split in zip(self.layout.levels, splits, strict=True):
            if parents is None:
                tokens = self.split.new_ones(level.tokens.numel(), self.split.shape[1])
                reached = torch.ones_like(split)
            else:
                tokens, reached = parents[level.token_parents], parents[level.parents]
            if self.valid is not None:
                tokens = tokens & self.valid[level.tokens]
                if level.size:
                    reached = reached & (counts.blocks[len(leaves)] > 0)
            leaves.append(torch.cat((reached & ~split, tokens)))
            parents = split
        return leaves

    def leaf_nodes(self) -> Tensor:
        """(blocks + N, B) bool: nodes that are leaves, first blocks, then tokens in raster order."""
        tokens = self.split.new_zeros(self.grid.size, self.split.shape[1])
        blocks = []
        for level, leaves in zip(self.layout.levels, self.level_leaves(), strict=True):
            blocks.append(leaves[: level.size])
            tokens[level.tokens] = leaves[level.size :]
        return torch.cat((*blocks, tokens))

    def _leaf_index(self) -> Tensor:
        begins = self.split.new_zeros(self.grid.size, self.split.shape[1])
        for level, leaves in zip(self.layout.levels, self.level_leaves(), strict=True):
            starts = torch.cat((level.starts, level.token_starts))
            begins[starts] |= leaves
        index = begins.cumsum(0, dtype=torch.int32).sub_(1)[self.layout.token_rank]
        if self.valid is not None:
            index = index.masked_fill(~self.valid, -1)
        return index.T.contiguous()

    def _node_rows(self, blocks: Any) -> Tensor:
        """(nodes, B) values of all blocks and tokens from those of the blocks; tokens have 0."""
        rows, levels = [], self.layout.levels
        for level, part in zip(levels, blocks.split([x.size for x in levels]), strict=True):
            rows += [part, part.new_zeros(level.tokens.numel(), part.shape[1])]
        return torch.cat(rows)

    def _by_leaf(self, node_values: Callable[["Tree"], Tensor]) -> Tensor:
        """(..., L, *) values of the leaves in order, from (nodes, B, *) values of all nodes."""
        most = int(self.leaf_count.max()) if self.split.shape[1] else 0
        levels = self.layout.levels
        order = torch.cat([torch.cat((v.starts, v.token_starts)) for v in levels])
        order = order.argsort(stable=True)

        def select(part: "Tree") -> Tensor:
            tree, position = torch.cat(part.level_leaves())[order].T.nonzero().unbind(-1)
            counts = part.leaf_count
            rank = torch.arange(len(tree), device=tree.device) - (counts.cumsum(0) - counts)[tree]
            values = node_values(part)
            out = values.new_zeros(part.split.shape[1], most, *values.shape[2:])
            out[tree, rank] = values[order[position], tree]
            return out

        selected = torch.cat([select(part) for part, _ in self._chunks()])
        return selected.view((*self.shape, *selected.shape[1:]))

    def _token_mask(self) -> Tensor:
        """(..., N) valid tokens of every tree, or (N,) if all have the same."""
        mask = repeat_columns(self.valid, self.split.shape[1])
        assert mask is not None
        return mask.squeeze(1) if mask.shape[1] == 1 else mask.T.view(*self.shape, self.grid.size)

    def _broadcast(self, shape: tuple[int, ...]) -> "Tree":
        """Return the flat batch of the trees at each index of a shape to which they broadcast."""
        trees = torch.arange(self.split.shape[1], device=self.device).view(self.shape)
        return self.flat()[trees.expand(shape).flatten()]

    def _chunks(self) -> Iterator[tuple["Tree", slice]]:
        """The flat batch, a chunk of trees at a time, and which trees these are."""
        flat, trees = self.flat(), self.split.shape[1]
        step = max(1, CHUNK_ELEMENTS // self.grid.size)
        for start in range(0, max(1, trees), step):
            part = slice(start, start + step)
            yield flat[part], part

    def _on_scores(
        self, scores: Tensor, compute: Callable[["Tree", ScorePyramid], Tensor]
    ) -> Tensor:
        """Compute on (..., N) scores to whose leading dimensions the trees broadcast."""
        check_scores(scores, self.grid.size)
        lead = scores.shape[:-1]
        try:
            trees = self._broadcast(lead)
        except RuntimeError:
            raise ValueError(
                f"scores have leading dimensions {tuple(lead)} and the trees {self.shape}; "
                "pass the scores the trees were made for"
            ) from None
        flat = scores.reshape(-1, self.grid.size)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        parts = []
        for part, rows in trees._chunks():
            tokens = flat[rows].T  # (N, b)
            counts = Counts.from_mask(self.layout, tokens.dtype, part.valid)
            pyramid = ScorePyramid(self.layout, counts, self.tau, tokens, part.valid)
            parts.append(compute(part, pyramid))
        result = torch.cat(parts)
        return result.view((*lead, *result.shape[1:]))


def _node_boxes(level: Level, width: int) -> Tensor:
    """(n + t, 4) boxes of the blocks and the tokens of a level."""
    top, left = level.tokens // width, level.tokens % width
    return torch.cat((level.boxes, torch.stack((top, left, top + 1, left + 1), -1)))
