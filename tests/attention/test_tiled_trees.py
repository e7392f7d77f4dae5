"""Trees and statistics of masked tiled calls, compared with the tiles that the reference expands."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bmfa import Grid, Screened, screened_attention
from bmfa.attention.tiling import Tiling
from tiled_cases import TiledCase, make_case

# Few groups have few probes, which may miss a target; here the target only selects tiles.
pytestmark = pytest.mark.filterwarnings("ignore:screened_attention measured:UserWarning")


def masked_case(shape: tuple[int, int], prefix: int, tau: float = 1.0, **budget: Any) -> TiledCase:
    """Two images with a mask each."""
    options: dict[str, Any] = {"dims": (8, 8), "prefix": prefix, "tau": tau, "smooth": False}
    case = make_case(sum(shape), shape, batch=2, heads=2, dtype=torch.float64, **options, **budget)
    case = replace(case, q=2 * case.q, k=2 * case.k)
    valid = torch.rand(2, *shape, generator=torch.Generator().manual_seed(prefix)) < 0.6
    valid[0, : min(8, shape[0] - 1), :8] = False  # no token at all
    valid[1, 0, 0] = True
    valid[1, :8, 8:16] = False
    valid[1, 0, 8] = True  # one token
    return case.masked(valid.flatten(1))


def call(case: TiledCase, **options: Any) -> Screened:
    settings = {x: case.settings[x] for x in ("prefix", "tau")}
    settings |= {"grid": case.tiling.grid, "valid": case.valid} | options
    return screened_attention(case.q, case.k, case.v, **settings)


def leaves_of(case: TiledCase, marks: Any, image: int, query: int) -> list[list[int]]:
    """The leaves that a query sees, as lists of valid tokens, tile by tile."""
    tiles = [[t for t in row if t >= 0] for row in case.tiling.slot_tokens.tolist()]
    token = query - case.settings["prefix"]
    expanded = np.ones(len(tiles), bool)
    if token >= 0:
        expanded = marks[next(i for i, tokens in enumerate(tiles) if token in tokens)]
    leaves: list[list[int]] = []
    for tokens, alone in zip(tiles, expanded, strict=True):
        present = [t for t in tokens if case.valid[image, t]]
        leaves += [[t] for t in present] if alone else [present] if present else []
    return leaves


def test_trees_of_masked_tiles() -> None:
    settings = ((9, 17), 0, 1.0, 0.5), ((5, 30), 2, 0.7, 0.7), ((9, 9), 1, 1.0, 1.0)
    for shape, prefix, tau, leaves in (*settings, ((16, 16), 3, 2.0, 0.4)):
        case = masked_case(shape, prefix, tau, expand=Tiling(Grid(*shape)).tiles_within(leaves))
        check_trees(case, call(case, leaves=leaves, backend="eager"))


def check_trees(case: TiledCase, result: Screened) -> None:
    tree, prefix, marks = result.tree, case.settings["prefix"], case.oracle().expanded
    index, count, ratio = tree.leaf_index, tree.leaf_count, tree.leaf_ratio
    scores = (case.q @ case.k.mT)[..., prefix:].nan_to_num(0.0)
    whole = float(ratio.min()) == 1
    if not whole:
        with pytest.raises(ValueError, match=r"trees are of a tiled call.*read stats\.error"):
            tree.error(scores)
        with pytest.raises(ValueError, match="so that output_bound of the tree is not"):
            tree.output_bound(scores, case.v[:, :, prefix:])
    if prefix or whole:  # prefix queries see single tokens
        alone = tree if whole else tree[:, :, :prefix]
        assert not bool(alone.error(scores[:, :, : alone.shape[2]]).any())
    ratios = []
    for image, head, query in np.ndindex(*count.shape):
        leaves = leaves_of(case, marks[image, head], image, query)
        share = len(leaves) / int(case.valid[image].sum())
        ratios += [share] * bool(case.seen[image, 0, query])
        assert int(count[image, head, query]) == len(leaves)
        assert float(ratio[image, head, query]) == pytest.approx(share)
        if query % 5 == 0 or query < prefix:
            want = torch.full((case.tiling.grid.size,), -1)
            for number, leaf in enumerate(leaves):
                want[leaf] = number
            assert torch.equal(index[image, head, query], want)
    assert result.stats.leaf_ratio == pytest.approx(np.mean(ratios))
    # Expanded tiles over those that hold a token, of every group that has a query.
    slots = case.tiling.slot_tokens
    present = (case.valid[:, slots.clamp(min=0)] & (slots >= 0)).any(-1).numpy()  # (B, T)
    shares = (marks & present[:, None, None]).sum(-1) / present.sum(-1)[:, None, None]
    groups = np.broadcast_to(present[:, None], shares.shape)
    assert result.stats.density == pytest.approx(float(shares[groups].mean()))


def test_one_mask_for_all_images() -> None:
    case = masked_case((16, 16), 1)
    same = case.map(torch.nan_to_num).masked(case.valid[:1].expand(2, -1).clone())
    both = call(same, error=0.2, backend="eager")
    one = call(replace(same, valid=same.valid[0]), error=0.2, allow_dense=False)
    assert torch.equal(one.tree.leaf_index, both.tree.leaf_index)
    assert one.stats.density == both.stats.density
    assert one.stats.leaf_ratio == both.stats.leaf_ratio


def test_dense_calls_have_every_valid_token_as_a_leaf() -> None:
    case = masked_case((9, 17), 2)
    result = call(case)
    assert result.stats.form == "dense"
    assert result.stats.density == result.stats.leaf_ratio == 1.0
    assert torch.equal(result.tree.leaf_index[0, 0, 0] >= 0, case.valid[0])
    assert bool((result.tree.leaf_count == case.valid.sum(-1).view(2, 1, 1)).all())
    assert not bool(result.tree.error(torch.zeros(2, 2, 2 + 9 * 17, 9 * 17)).any())


def test_density_is_the_mean_over_groups_heads_and_images() -> None:
    expand = Tiling(Grid(24, 24)).tiles_within(0.3)
    case = make_case(0, (24, 24), smooth=False, prefix=0, batch=2, heads=2, expand=expand)
    q = case.q * torch.linspace(0, 2, 24 * 24).view(-1, 1)  # later groups expand more
    q[1] *= 2  # and the second image
    case = replace(case, q=q)
    marks = case.oracle().expanded
    amounts = np.unique(marks.sum(-1))
    assert len(amounts) > 2 and amounts[-1] / 9 > marks.mean() + 0.1
    density = call(case, leaves=0.3, allow_dense=False).stats.density
    assert density == pytest.approx(float(marks.mean()), rel=1e-12)
