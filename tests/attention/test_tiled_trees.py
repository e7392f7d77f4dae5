"""Trees and statistics of masked tiled calls, compared with the tiles that the reference expands."""

from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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

    def call(self, order: str, backend: str, **options: Any) -> Any:
        tensors = [self.q, self.k, self.v]
        valid = self.valid
        missing = (~valid)[:, None, :, None]
        missing = torch.cat((missing.new_zeros(2, 1, self.prefix, 1), missing), 2)
        tensors = [x.masked_fill(missing, torch.nan) for x in tensors]
        if order == "z":
            tensors = [x[:, :, self.rows(order)] for x in tensors]
            valid = valid[:, self.grid.z_order]
        settings = {"prefix": self.prefix, "tau": self.tau, "order": order, "backend": backend}
        return screened_attention(
            *tensors, grid=self.grid, valid=valid, **settings, **self.criterion, **options
        )

    def rows(self, order: str) -> Tensor:
        """The queries in an order, prefix first."""
        spatial = self.grid.z_order if order == "z" else torch.arange(self.grid.size)
        return torch.cat((torch.arange(self.prefix), self.prefix + spatial))

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


@pytest.mark.parametrize("order", ["raster", "z"])
@pytest.mark.parametrize(("shape", "prefix", "tau", "criterion"), CASES)
def test_trees_of_masked_tiles(
    shape: tuple[int, int], prefix: int, tau: float, criterion: dict[str, Any], order: str
) -> None:
    case = Masked(shape, prefix, tau, **criterion)
    result = case.call(order, "eager", form="tiled")
    check_trees(case, result, order)


def check_trees(case: Masked, result: Any, order: str) -> None:
    tree, rows = result.tree, case.rows(order)
    index, count, ratio = tree.leaf_index, tree.leaf_count, tree.leaf_ratio
    scores = case.scores[:, :, rows].masked_fill(~case.valid[:, None, None], torch.nan)
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
    some = {*range(case.prefix), *generator.choice(len(rows), 40).tolist()}
    for place, query in enumerate(rows.tolist()):
        for image, head in np.ndindex(2, 2):
            missing = query >= case.prefix and not case.valid[image, query - case.prefix]
            if missing and place not in some:
                continue
            leaves = case.leaves(image, head, query)
            if not missing:
                ratios.append(len(leaves) / int(case.valid[image].sum()))
            assert int(count[image, head, place]) == len(leaves)
            assert float(ratio[image, head, place]) == pytest.approx(
                len(leaves) / int(case.valid[image].sum())
            )
            if place not in some:
                continue
            got = index[image, head, place]
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


@pytest.mark.parametrize("order", ["raster", "z"])
def test_one_mask_for_all_images(order: str) -> None:
    case = Masked((16, 16), 1, 1.0, error=0.2)
    case.valid = case.valid[:1].expand(2, -1).clone()
    both = case.call(order, "eager", form="tiled")
    case.valid = case.valid[:1]
    one = screened_attention(
        *(x[:, :, case.rows(order)] for x in (case.q, case.k, case.v)),
        grid=case.grid,
        prefix=1,
        valid=case.valid[0, case.grid.z_order if order == "z" else slice(None)],
        order=order,
        error=0.2,
        form="tiled",
    )
    assert torch.equal(one.tree.leaf_index, both.tree.leaf_index)
    assert one.stats.density == both.stats.density
    assert one.stats.leaf_ratio == both.stats.leaf_ratio


@pytest.mark.parametrize("order", ["raster", "z"])
def test_dense_calls_have_every_valid_token_as_a_leaf(order: str) -> None:
    case = Masked((9, 17), 2, 1.0)
    result = case.call(order, "auto")
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
    result = screened_attention(q, k, v, grid=grid, leaves=0.3, form="tiled")
    marks = tiled_attention(
        q.numpy(), k.numpy(), v.numpy(), tiling, scale=8**-0.5, expand=tiling.tiles_within(0.3)
    ).expanded
    amounts = np.unique(marks.sum(-1))
    assert len(amounts) > 2 and amounts[-1] / 9 > marks.mean() + 0.1
    assert result.stats.density == pytest.approx(float(marks.mean()), rel=1e-12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_tiles_of_triton_in_z_order() -> None:
    """In Z-order the tiles and groups of the Triton kernels are numbered in Z-order."""
    pytest.importorskip("triton")
    torch.manual_seed(1)
    grid, device = Grid(32, 32), "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, 2, 1, grid.size, 32, device=device)
    k *= torch.linspace(0.1, 3, grid.size, device=device).view(-1, 1)  # tiles of unequal losses
    valid = torch.rand(2, grid.size, device=device) < 0.6
    valid.view(2, 16, 64)[0, 1] = False  # a group in Z-order without a query
    valid.view(2, 16, 64)[1, 5] = False  # a tile without a key
    result = screened_attention(
        q, k, v, grid=grid, valid=valid, leaves=0.4, order="z", form="tiled", backend="triton"
    )
    index = result.tree.leaf_index.cpu()[..., grid.z_order]  # keys in Z-order, as the queries
    valid = valid.cpu()
    assert torch.equal(index >= 0, valid[:, None, None].expand_as(index))
    shares, ratios = [], []
    for image in range(2):
        tokens = valid[image].nonzero().squeeze(1).tolist()
        tiles = {token // 64 for token in tokens}
        for group in range(16):
            members = [token for token in tokens if token // 64 == group]
            seen = [index[image, 0, query] for query in members]
            assert all(torch.equal(row, seen[0]) for row in seen)
            if members:
                leaves = [seen[0].view(16, 64)[tile] for tile in sorted(tiles)]
                expanded = sum(len(row[row >= 0].unique()) > 1 for row in leaves)
                shares.append(expanded / len(tiles))
            ratios += [(int(row.max()) + 1) / len(tokens) for row in seen]
    assert 0 < min(shares) < max(shares) and len(shares) == 30
    assert result.stats.density == pytest.approx(np.mean(shares))
    assert result.stats.leaf_ratio == pytest.approx(np.mean(ratios))
