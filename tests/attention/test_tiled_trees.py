"""Trees and statistics of masked tiled calls, compared with the tiles that the reference expands."""

from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch

from bmfa import Grid, screened_attention
from bmfa.attention.kernels.reference import tiled_attention
from bmfa.attention.tiling import Tiling

# Few groups have few probes, which may miss a target; here the target only selects tiles.
pytestmark = pytest.mark.filterwarnings("ignore:screened_attention measured:UserWarning")

SIDE = 8


class Masked:
    """Two images with a mask each, and the trees of a tiled call by definition."""

    def __init__(self, shape: tuple[int, int], prefix: int, tau: float, **criterion: Any) -> None:
        generator = torch.Generator().manual_seed(sum(shape))
        self.grid, self.prefix, self.tau, self.criterion = Grid(*shape), prefix, tau, criterion
        tokens = torch.randn(
            3, 2, 2, prefix + self.grid.size, 8, dtype=torch.float64, generator=generator
        )
        self.q, self.k, self.v = 2 * tokens[0], 2 * tokens[1], tokens[2]
        self.valid = torch.rand(2, self.grid.size, generator=generator) < 0.6
        self.valid.view(2, *shape)[0, : min(SIDE, shape[0] - 1), :SIDE] = False  # no token at all
        self.valid.view(2, *shape)[1, 0, 0] = True
        self.valid.view(2, *shape)[1, :SIDE, SIDE : 2 * SIDE] = False
        self.valid.view(2, *shape)[1, 0, SIDE] = True  # one token
        self.tiling = Tiling(self.grid, SIDE)
        expanded = {"error": criterion.get("error", 0.1)}
        if "leaves" in criterion:
            expanded = {"expand": self.tiling.tiles_within(criterion["leaves"])}
        self.expanded = tiled_attention(
            self.q.numpy(),
            self.k.numpy(),
            self.v.numpy(),
            self.tiling,
            prefix=prefix,
            scale=8**-0.5,
            tau=tau,
            valid=self.valid.numpy(),
            **expanded,
        ).expanded  # (B, heads, R, T)
        scores = self.q @ self.k.transpose(2, 3) * 8**-0.5
        self.scores = scores[..., prefix:]  # (B, heads, prefix + N, N)

    def call(self, backend: str, **options: Any) -> Any:
        tensors = [self.q, self.k, self.v]
        valid = self.valid
        missing = (~valid)[:, None, :, None]
        missing = torch.cat((missing.new_zeros(2, 1, self.prefix, 1), missing), 2)
        tensors = [x.masked_fill(missing, torch.nan) for x in tensors]
        settings = {"prefix": self.prefix, "tau": self.tau, "backend": backend}
        return screened_attention(
            *tensors, grid=self.grid, valid=valid, **settings, **self.criterion, **options
        )

    @cached_property
    def tiles(self) -> list[list[int]]:
        """The tokens of every tile."""
        return [[t for t in row if t >= 0] for row in self.tiling.slot_tokens.tolist()]

    def leaves(self, image: int, head: int, query: int) -> list[list[int]]:
        """The leaves that a query sees, as lists of valid tokens, tile by tile."""
        tiles = self.tiles
        marks = np.ones(len(tiles), bool)
        if query >= self.prefix:
            own = next(i for i, tokens in enumerate(tiles) if query - self.prefix in tokens)
            marks = self.expanded[image, head, own]
        leaves: list[list[int]] = []
        for tokens, expanded in zip(tiles, marks, strict=True):
            present = [t for t in tokens if self.valid[image, t]]
            leaves += [[t] for t in present] if expanded else [present] if present else []
        return leaves


CASES = [
    ((9, 17), 0, 1.0, {"leaves": 0.5}),
    ((5, 30), 2, 0.7, {"leaves": 0.7}),
    ((9, 9), 1, 1.0, {"leaves": 1.0}),
    ((16, 16), 3, 2.0, {"leaves": 0.4}),
]


@pytest.mark.parametrize(("shape", "prefix", "tau", "criterion"), CASES)
def test_trees_of_masked_tiles(
    shape: tuple[int, int], prefix: int, tau: float, criterion: dict[str, Any]
) -> None:
    case = Masked(shape, prefix, tau, **criterion)
    result = case.call("eager", allow_dense=False)
    check_trees(case, result)


def check_trees(case: Masked, result: Any) -> None:
    tree, queries = result.tree, case.q.shape[2]
    index, count, ratio = tree.leaf_index, tree.leaf_count, tree.leaf_ratio
    scores = case.scores.masked_fill(~case.valid[:, None, None], torch.nan)
    if float(ratio.min()) < 1:
        with pytest.raises(ValueError, match=r"trees are of a tiled call.*read stats\.error"):
            tree.error(scores)
        with pytest.raises(ValueError, match="so that output_bound of the tree is not"):
            tree.output_bound(scores, case.v[:, :, case.prefix :])
    if case.prefix or float(ratio.min()) == 1:  # prefix queries see single tokens
        alone = tree if float(ratio.min()) == 1 else tree[:, :, : case.prefix]
        assert not bool(alone.error(scores[:, :, : alone.shape[2]]).any())
    ratios = []
    generator = np.random.default_rng(0)
    some = {*range(case.prefix), *generator.choice(queries, 40).tolist()}
    for query in range(queries):
        for image, head in np.ndindex(2, 2):
            missing = query >= case.prefix and not case.valid[image, query - case.prefix]
            if missing and query not in some:
                continue
            leaves = case.leaves(image, head, query)
            if not missing:
                ratios.append(len(leaves) / int(case.valid[image].sum()))
            assert int(count[image, head, query]) == len(leaves)
            assert float(ratio[image, head, query]) == pytest.approx(
                len(leaves) / int(case.valid[image].sum())
            )
            if query not in some:
                continue
            got = index[image, head, query]
            want = torch.full((case.grid.size,), -1)
            for number, leaf in enumerate(leaves):
                want[leaf] = number
            assert got.tolist() == want.tolist()
    assert result.stats.leaf_ratio == pytest.approx(np.mean(ratios))
    assert result.stats.density == pytest.approx(density(case))


def density(case: Masked) -> float:
    """Expanded tiles over those that hold a token, of every group that has a query."""
    shares = []
    for image, head, group in np.ndindex(2, 2, case.tiling.groups):
        tiles = case.tiles
        present = [any(case.valid[image, t] for t in tokens) for tokens in tiles]
        if present[group]:
            shares.append(case.expanded[image, head, group][present].sum() / sum(present))
    return float(np.mean(shares))


def test_one_mask_for_all_images() -> None:
    case = Masked((16, 16), 1, 1.0, error=0.2)
    case.valid = case.valid[:1].expand(2, -1).clone()
    both = case.call("eager", allow_dense=False)
    case.valid = case.valid[:1]
    one = screened_attention(
        case.q,
        case.k,
        case.v,
        grid=case.grid,
        prefix=1,
        valid=case.valid[0],
        error=0.2,
        allow_dense=False,
    )
    assert torch.equal(one.tree.leaf_index, both.tree.leaf_index)
    assert one.stats.density == both.stats.density
    assert one.stats.leaf_ratio == both.stats.leaf_ratio


def test_dense_calls_have_every_valid_token_as_a_leaf() -> None:
    case = Masked((9, 17), 2, 1.0)
    result = case.call("auto")
    assert result.stats.form == "dense" and result.stats.density == 1.0
    tokens = case.valid.sum(-1)
    assert torch.equal(result.tree.leaf_count, tokens.view(2, 1, 1).expand(2, 2, 2 + 9 * 17))
    assert result.stats.leaf_ratio == 1.0
    assert torch.equal(result.tree.leaf_index[0, 0, 0] >= 0, case.valid[0])
    assert not bool(result.tree.error(case.scores).any())


def test_density_is_the_mean_over_groups_heads_and_images() -> None:
    torch.manual_seed(0)
    grid = Grid(24, 24)
    q, k, v = torch.randn(3, 2, 2, grid.size, 8)
    q *= torch.linspace(0, 2, grid.size).view(-1, 1)  # later groups expand more
    q[1] *= 2  # and the second image
    tiling = Tiling(grid)
    result = screened_attention(q, k, v, grid=grid, leaves=0.3, allow_dense=False)
    marks = tiled_attention(
        q.numpy(), k.numpy(), v.numpy(), tiling, scale=8**-0.5, expand=tiling.tiles_within(0.3)
    ).expanded
    amounts = np.unique(marks.sum(-1))
    assert len(amounts) > 2 and amounts[-1] / 9 > marks.mean() + 0.1
    assert result.stats.density == pytest.approx(float(marks.mean()), rel=1e-12)
