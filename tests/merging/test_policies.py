"""Token reduction: kernels and policies against the float64 oracle, names, budgets, conservation."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa import Grid
from bmfa.merging import (
    DCT,
    CrossGET,
    DiffRate,
    EViT,
    FixedPool,
    FreeEnergy,
    GridDCT,
    Moment,
    PiToMe,
    Policy,
    RandomPool,
    Step,
    ToFu,
    ToMe,
    parse,
)
from bmfa.merging.dispatch import choose
from bmfa.merging.kernels import eager
from bmfa.merging.kernels import reference as oracle
from bmfa.merging.policies.base import kept, removed
from bmfa.merging.policies.diffrate import DEIT_TINY

Array = NDArray[np.float64]
NAMES = [
    "tome:8",
    "tome:0.95",
    "pitome:0.95",
    "tofu:0.95",
    "tofu:8",
    "diffrate:0.8g",
    "diffrate:0.9g",
    "diffrate:0.95",
    "diffrate:8",
    "crossget:0.95",
    "dct:0.95",
    "dct2:0.95",
    "evit:0.7",
    "random-pool:8",
    "fixed-pool:2",
    "free-energy:8",
]
MERGING = ("tome:3", "pitome:3", "crossget:3", "random-pool:3", "fixed-pool:2", "free-energy:3")


def moment(
    seed: int,
    *,
    grid: tuple[int, int] = (4, 5),
    prefix: int = 1,
    layer: int = 1,
    depth: int = 4,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
    others: bool = True,
) -> Moment:
    """Random tokens of random sizes, and the attention mass of random queries."""
    generator = torch.Generator().manual_seed(seed)
    tokens = prefix + grid[0] * grid[1]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (draw(batch, 2, tokens, 6) for _ in range(3))
    size = torch.randint(1, 5, (batch, tokens), generator=generator).float()
    size[:, :prefix] = 1.0
    _, mass = eager.attend(q, k, v, size, scale=0.4, prefix=prefix, mass=True, others=others)
    x = draw(batch, tokens, 7)
    return Moment(layer, depth, Grid(*grid), prefix, x, size, k, mass)


def acting(name: str) -> int:
    """A block of four in which the policy acts."""
    return 1 if name.startswith("free-energy") else 2


def arrays(picture: Moment, index: int) -> tuple[Array, Array, Array]:
    """x, size and unit mean-head keys of one picture."""
    x, size, k = (t[index].double().numpy() for t in (picture.x, picture.size, picture.k))
    return x, size, oracle.unit_keys(k)


def stepped(policy: Policy, picture: Moment) -> Step:
    """What a policy does with a moment in which it must act."""
    step = policy.step(picture)
    assert step is not None
    return step


def check_step(step: Step, index: int, x: Array, size: Array, place: list[int]) -> None:
    """Positions are equal; values as close as their float64 and sizes' float32 allow."""
    assert step.target is not None
    assert step.target[index].tolist() == place
    np.testing.assert_allclose(step.x[index].numpy(), x, rtol=0, atol=1e-6 * np.abs(x).max())
    np.testing.assert_allclose(step.size[index].numpy(), size, rtol=1e-6)


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_attention_adds_log_size(prefix: int, mass: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(prefix)
    q, k, v = (torch.randn(2, 3, 11, 8, generator=generator).to(dtype) for _ in range(3))
    size = torch.randint(1, 9, (2, 11), generator=generator).float()
    output, masses = eager.attend(q, k, v, size, scale=0.3, prefix=prefix, mass=mass)
    assert output.dtype == dtype and output.shape == q.shape
    assert (masses is not None) == mass
    for index in range(2):
        wide = (t[index].double().numpy() for t in (q, k, v, size))
        expected, expected_mass = oracle.attend(*wide, 0.3, prefix)
        # A weight and a value each round once, and so does a sum of 11 weighted values.
        tolerance = max(4 * torch.finfo(dtype).eps, 1e-6) * float(v.abs().max())
        np.testing.assert_allclose(output[index].double().numpy(), expected, atol=tolerance)
        if masses is not None:
            assert masses.dtype == torch.float32
            found = masses[index].sum(0).double().numpy() / 3  # of three heads
            np.testing.assert_allclose(
                found.T, expected_mass, atol=max(4 * torch.finfo(dtype).eps, 1e-6)
            )
            np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-5)


def test_attention_with_sizes_is_attention_over_repeated_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 5, 4, generator=generator).double() for _ in range(3))
    size = torch.tensor([[1.0, 3.0, 2.0, 1.0, 4.0]])
    repeats = size[0].long()
    repeated = [t.repeat_interleave(repeats, 2) for t in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *repeated, scale=0.7)
    for mass in (False, True):
        output, _ = eager.attend(q, k, v, size, scale=0.7, prefix=1, mass=mass)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)


def test_merge_by_hand() -> None:
    # Positions: class 0 | even 2, 4, 6 | odd 1, 3, 5. 4 equals 3; 6 is near 5; 2 is far from all.
    features = torch.tensor([[[0.0], [1.0], [9.0], [4.0], [4.0], [6.0], [6.5]]])
    size = torch.tensor([[1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0]])
    x = features.clone()
    x[0, 4] = 8.0
    merged, sizes, target = eager.merge(x, size, features, None, 2)
    assert merged[0, :, 0].tolist() == [0.0, 9.0, 1.0, 5.0, 6.25]  # class, 2, then 1, 3 + 4, 5 + 6
    assert sizes[0].tolist() == [1.0, 1.0, 1.0, 4.0, 2.0]
    assert target.dtype == torch.int32
    assert target[0].tolist() == [0, 2, 1, 3, 3, 4, 4]


def test_many_tokens_may_merge_into_one_and_ties_go_to_the_lowest_index() -> None:
    x = torch.arange(7.0).view(1, 7, 1)
    features = torch.zeros(1, 7, 2)
    merged, sizes, target = eager.merge(x, torch.ones(1, 7), features, None, 2)
    assert target[0].tolist() == [0, 2, 2, 3, 2, 4, 1]  # 2 and 4 go to 1, 6 stays
    assert sizes[0].tolist() == [1.0, 1.0, 3.0, 1.0, 1.0]
    assert merged[0, 2, 0].item() == pytest.approx((1 + 2 + 4) / 3)


def test_weights_change_which_edges_are_cheap() -> None:
    features = torch.tensor([[[0.0], [0.0], [1.0], [9.0], [10.1]]])
    weight = torch.tensor([[0.0, 1.0, 1.0, 0.1, 0.1]])
    chosen = {}
    for pair in eager.PAIRS:
        source, _ = eager.match(features, weight, 1, pair=pair)
        chosen[pair] = source[0, 0].item()
    assert chosen == {"none": 2, "sum": 4, "harmonic": 4}
    with pytest.raises(ValueError, match="without weights"):
        eager.match(features, None, 1, pair="sum")
    with pytest.raises(ValueError, match="pass one of none, sum, harmonic"):
        eager.match(features, weight, 1, pair="product")


@pytest.mark.parametrize("seed", range(40))
def test_merge_matches_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prefix = int(rng.integers(0, 4))
    tokens = prefix + int(rng.integers(2, 30))
    pair = eager.PAIRS[seed % 3]
    r = int(rng.integers(0, (tokens - prefix) // 2 + 1))
    x, features = rng.normal(size=(2, 2, tokens, 5))
    size = rng.integers(1, 6, (2, tokens)).astype(float)
    weight = rng.random((2, tokens)) * (rng.random((2, tokens)) < 0.8)
    weight = weight.astype(np.float32).astype(float)
    merged, sizes, target = eager.merge(
        torch.from_numpy(x),
        torch.from_numpy(size).float(),
        torch.from_numpy(features),
        torch.from_numpy(weight).float(),
        r,
        prefix=prefix,
        pair=pair,
    )
    for index in range(2):
        pairs = oracle.bipartite(features[index], weight[index], r, prefix, pair)
        order = oracle.bipartite_order(pairs, tokens, prefix)
        expected = oracle.pool(x[index], size[index], oracle.groups(pairs, order))
        step = Step(merged, sizes, target)
        check_step(step, index, *expected, oracle.targets(pairs, order, tokens))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_pitome_matches_the_oracle(seed: int, layer: int) -> None:
    picture = moment(seed, layer=layer, prefix=seed % 3)
    step = stepped(PiToMe(4), picture)
    for index in range(2):
        x, size, keys = arrays(picture, index)
        pairs = oracle.pitome(keys, 4, picture.prefix, layer, 4)
        order = oracle.kept_order(pairs, len(x))
        expected = oracle.pool(x, size, oracle.groups(pairs, order))
        check_step(step, index, *expected, oracle.targets(pairs, order, len(x)))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("layer", [1, 2])
def test_tofu_prunes_early_and_keeps_norms_later(seed: int, layer: int) -> None:
    picture = moment(seed, layer=layer)
    step = stepped(ToFu(4), picture)
    for index in range(2):
        x, size, keys = arrays(picture, index)
        pairs = oracle.bipartite(keys, None, 4, 1)
        order = oracle.bipartite_order(pairs, len(x), 1)
        if layer == 1:
            members = [[stay] for stay in order]
            place = oracle.targets([], order, len(x))
            assert place.count(-1) == 4
            check_step(step, index, *oracle.pool(x, size, members), place)
        else:
            members = oracle.groups(pairs, order)
            place = oracle.targets(pairs, order, len(x))
            check_step(step, index, *oracle.mlerp(x, size, members), place)


@pytest.mark.parametrize("seed", range(12))
def test_crossget_matches_the_oracle(seed: int) -> None:
    picture = moment(seed, prefix=seed % 3)
    step = stepped(CrossGET(7), picture)
    for index in range(2):
        x, size, keys = arrays(picture, index)
        pairs = oracle.crossget(keys, 7, picture.prefix)
        order = oracle.kept_order(pairs, len(x))
        expected = oracle.pool(x, size, oracle.groups(pairs, order))
        check_step(step, index, *expected, oracle.targets(pairs, order, len(x)))


@pytest.mark.parametrize("seed", range(12))
def test_diffrate_matches_the_oracle(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, final = 16 - seed % 4, 11
    monkeypatch.setitem(DEIT_TINY, "0.8g", ((99, keep), (99, final)))
    picture = moment(seed, prefix=1 + seed % 2)
    step = stepped(DiffRate("0.8g"), picture)
    for index in range(2):
        x, size, _ = arrays(picture, index)
        attention = picture.attention[index, 0].double().numpy()
        expected = oracle.diffrate(x, size, attention, keep, final, picture.prefix)
        check_step(step, index, *expected)
        assert expected[2].count(-1) == len(x) - keep


def test_diffrate_with_a_budget_prunes_nothing_and_spares_the_first_block() -> None:
    assert DiffRate(4).step(moment(0, layer=0)) is None
    step = stepped(DiffRate(4), moment(0))
    assert step.x.shape[1] == 21 - 4
    assert step.target is not None and int(step.target.min()) == 0


@pytest.mark.parametrize("seed", range(12))
def test_evit_matches_the_oracle(seed: int) -> None:
    picture = moment(seed, prefix=1 + seed % 2)
    step = stepped(EViT(0.6), picture)
    for index in range(2):
        x, size, _ = arrays(picture, index)
        attention = picture.attention[index, 0].double().numpy()
        tokens, place = oracle.evit(x, attention, 0.6, picture.prefix)
        sizes = np.array([size[np.array(place) == new].sum() for new in range(len(tokens))])
        check_step(step, index, tokens, sizes, place)


@pytest.mark.parametrize("layer", range(12))
def test_evit_acts_in_three_blocks_of_twelve(layer: int) -> None:
    policy = EViT(0.7)
    assert policy.reads_mass(layer, 12) == (layer in (3, 6, 9))
    assert (policy.step(moment(0, layer=layer, depth=12)) is not None) == (layer in (3, 6, 9))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_dct_matches_the_oracle(share: float) -> None:
    picture = moment(0, prefix=2)
    step = stepped(DCT(share), picture)
    left = kept(share, 20)
    for index in range(2):
        expected = oracle.dct(picture.x[index, 2:].numpy(), left)
        np.testing.assert_allclose(step.x[index, 2:].numpy(), expected, atol=1e-12)
    assert torch.equal(step.x[:, :2], picture.x[:, :2])
    torch.testing.assert_close(step.size.sum(1), torch.full((2,), 22.0))


def test_dct_on_the_grid_is_dct_along_both_sides() -> None:
    picture = moment(0, layer=0)
    step = stepped(GridDCT(0.5), picture)
    rows, columns = 3, 4  # round(4 sqrt(0.5)), round(5 sqrt(0.5))
    for index in range(2):
        signal = picture.x[index, 1:].view(4, 5, -1).numpy()
        along = np.stack([oracle.dct(row, columns) for row in signal])
        expected = np.stack([oracle.dct(along[:, c], rows) for c in range(columns)], 1)
        np.testing.assert_allclose(
            step.x[index, 1:].numpy(), expected.reshape(rows * columns, -1), atol=1e-12
        )


@pytest.mark.parametrize("policy", [DCT(0.4), GridDCT(0.4)])
def test_a_constant_signal_keeps_its_value_there_and_back(policy: Policy) -> None:
    picture = moment(0, layer=0)
    picture.x.copy_(torch.full_like(picture.x, 3.0))
    step = stepped(policy, picture)
    torch.testing.assert_close(step.x, torch.full_like(step.x, 3.0))
    assert step.spread is not None
    torch.testing.assert_close(step.spread @ step.x[:, 1:], picture.x[:, 1:])


def test_random_pairs_are_disjoint_seeded_and_the_same_for_all_pictures() -> None:
    steps = [stepped(RandomPool(6, seed), moment(0)) for seed in (0, 0, 1)]
    targets = [step.target for step in steps if step.target is not None]
    assert torch.equal(targets[0], targets[1]) and not torch.equal(targets[0], targets[2])
    assert torch.equal(targets[0][0], targets[0][1])
    assert targets[0][0].bincount().max() == 2
    other = stepped(RandomPool(6), moment(0, layer=2)).target
    assert other is not None and not torch.equal(targets[0], other)


def test_fixed_tiles_with_remainders() -> None:
    picture = moment(0, grid=(3, 5), layer=2)
    step = stepped(FixedPool(2), picture)
    expected = [0, 1, 1, 2, 2, 3, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6]
    assert step.target is not None and step.target[1].tolist() == expected
    weights = picture.size[0, [1, 2, 6, 7]].double()
    mean = (weights[:, None] * picture.x[0, [1, 2, 6, 7]]).sum(0) / weights.sum()
    torch.testing.assert_close(step.x[0, 1], mean)
    assert FixedPool(2).step(moment(0, layer=1)) is None
    assert FixedPool(2).step(moment(0, layer=3)) is None


@pytest.mark.parametrize("seed", range(12))
def test_free_energy_is_mass_times_distortion(seed: int) -> None:
    """The mass of the prefix queries, or of all where there is no prefix."""
    picture, whole = (
        moment(seed, layer=1, depth=2, prefix=seed % 3, others=others)
        for others in (FreeEnergy.reads_others, True)
    )
    step = stepped(FreeEnergy(2), picture)
    assert step.x.shape[1] == picture.x.shape[1] - 4  # two blocks' worth in the second
    for index in range(2):
        x, size, _ = arrays(picture, index)
        centred = x - x.mean(1, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
        of_prefix, of_others = whole.attention[index].double().numpy()
        weight = of_prefix if picture.prefix else of_others
        pairs = oracle.bipartite(normal, weight, 4, picture.prefix, "sum")
        order = oracle.bipartite_order(pairs, len(x), picture.prefix)
        expected = oracle.pool(x, size, oracle.groups(pairs, order))
        check_step(step, index, *expected, oracle.targets(pairs, order, len(x)))


@pytest.mark.parametrize(
    ("depth", "blocks"),
    [
        (1, [0]),
        (2, [1]),
        (3, [1]),
        (4, [1]),
        (8, [2, 4, 6]),
        (12, [3, 5, 7, 9]),
        (24, [6, 8, 10, 12, 14, 16, 18, 20, 22]),
    ],
)
@pytest.mark.parametrize("budget", [1, 3, 8])
def test_free_energy_merges_in_few_blocks_and_as_much(
    depth: int, blocks: list[int], budget: int
) -> None:
    policy, counts = FreeEnergy(budget), []
    for layer in range(depth):
        step = policy.step(moment(0, grid=(20, 24), layer=layer, depth=depth))
        counts.append(0 if step is None else 481 - step.x.shape[1])
    assert sum(counts) == budget * depth
    assert [layer for layer in range(depth) if policy.reads_mass(layer, depth)] == blocks
    assert [layer for layer, count in enumerate(counts) if count] == blocks[: sum(counts)]
    shares = [counts[layer] for layer in blocks]
    assert max(shares) - min(shares) <= 1 and shares[0] == max(shares)
    assert FreeEnergy(0).step(moment(0, layer=blocks[0], depth=depth)) is None


def test_free_energy_keeps_the_share_of_all_blocks_together() -> None:
    step = stepped(FreeEnergy(0.95), moment(0, grid=(20, 20), layer=5, depth=12))
    assert 401 - step.x.shape[1] == removed(0.95**3, 400)


def test_mass_times_distortion_bounds_the_loss_of_free_energy() -> None:
    """E of merging two tokens is at most their mass times an eighth of the squared score difference.

    To second order in the difference: E <= pi D^2 / 8 (1 + O(D)).
    """
    rng = np.random.default_rng(0)
    for _ in range(200):
        u, s = rng.normal(size=12), rng.integers(1, 6, 12).astype(float)
        u[1] = u[0] + 0.05 * rng.normal()
        full = np.log((s * np.exp(u)).sum())
        mass = (s[:2] * np.exp(u[:2])).sum() / np.exp(full)
        mean = (s[:2] * u[:2]).sum() / s[:2].sum()
        merged = np.append(s[2:] * np.exp(u[2:]), s[:2].sum() * np.exp(mean))
        loss, difference = full - np.log(merged.sum()), abs(u[1] - u[0])
        assert -1e-12 <= loss <= mass * difference**2 / 8 * (1 + difference) + 1e-12


@pytest.mark.parametrize("name", MERGING)
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("layer", [1, 2])
def test_merging_conserves_sizes_and_weighted_sums(name: str, prefix: int, layer: int) -> None:
    picture = moment(5, prefix=prefix, layer=layer)
    step = parse(name).step(picture)
    if step is None:
        assert (name, layer) in (("fixed-pool:2", 1), ("free-energy:3", 2))
        return
    assert step.target is not None
    assert torch.equal(step.size.sum(1), picture.size.sum(1))
    before = (picture.x * picture.size.unsqueeze(-1)).sum(1)
    torch.testing.assert_close((step.x * step.size.unsqueeze(-1)).sum(1), before)
    assert torch.equal(step.x[:, :prefix], picture.x[:, :prefix])
    assert torch.equal(step.size[:, :prefix], picture.size[:, :prefix])
    assert torch.equal(
        step.target[:, :prefix], torch.arange(prefix, dtype=torch.int32).expand(2, -1)
    )
    # Every new token is somebody's, and nobody merged into the prefix.
    for row in step.target:
        assert row.unique().tolist() == list(range(step.x.shape[1]))
    assert int(step.target[:, prefix:].min()) >= prefix


@pytest.mark.parametrize("name", [*MERGING, "tofu:3", "diffrate:3", "evit:0.5", "dct:0.8"])
def test_pictures_do_not_see_each_other(name: str) -> None:
    policy = parse(name)
    picture = moment(8, layer=acting(name))
    alone = Moment(
        picture.layer,
        4,
        picture.grid,
        1,
        picture.x[1:],
        picture.size[1:],
        picture.k[1:],
        picture.parts[1:],
    )
    together, single = stepped(policy, picture), stepped(policy, alone)
    torch.testing.assert_close(together.x[1:], single.x, rtol=1e-12, atol=1e-12)
    assert torch.equal(together.size[1:], single.size)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_gives_the_policy_that_says_it(name: str) -> None:
    assert str(parse(name)) == name
    assert parse(str(parse(name))) == parse(name)


def test_a_whole_number_is_a_count_and_any_other_a_share() -> None:
    assert parse("tome:1") == ToMe(1)
    assert parse("tome:1.0") == ToMe(1.0)
    assert str(ToMe(1.0)) == "tome:1.0"
    assert removed(1, 196) == 1 and removed(1.0, 196) == 0
    assert parse("random-pool:8", seed=3) == RandomPool(8, 3)


@pytest.mark.parametrize(
    ("share", "tokens", "left"),
    [(0.95, 196, 187), (0.9, 10, 9), (0.55, 100, 55), (0.7, 10, 7), (0.975, 40, 39), (1.0, 7, 7)],
)
def test_shares_are_decimal_fractions(share: float, tokens: int, left: int) -> None:
    assert tokens - removed(share, tokens) == left
    assert kept(share, tokens) == left


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tome", "reduction 'tome': could not convert"),
        ("tome:x", "reductions read NAME:VALUE, e.g. tome:8"),
        ("tome:-1", r"share kept by a block is -1.0; pass a finite number in \[0.5, 1\]"),
        ("tome:0.4", r"\[0.5, 1\]"),
        ("pitome:nan", "share kept by a block"),
        ("diffrate:0.7g", "'0.7g' are unknown; pass 0.8g or 0.9g"),
        ("crossget:0.0", r"\(0, 1\]"),
        ("dct:1.5", "share kept is 1.5"),
        ("evit:0", "share kept is 0.0"),
        ("fixed-pool:0", "side is 0; pass an integer at least 1"),
        ("fixed-pool:1.5", "invalid literal"),
        ("mean-pool:3", "is unknown; pass NAME:VALUE with a name of tome, pitome"),
    ],
)
def test_bad_names_say_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (ToMe(99), "tome:99 removes 99 tokens a block, but a 14x14 grid has 98 pairs"),
        (FreeEnergy(99), "98 pairs"),
        (PiToMe(150), "98 pairs"),
        (ToFu(99), "98 pairs"),
        (RandomPool(99), "98 pairs"),
        (CrossGET(196), "pass at most 195"),
        (DiffRate(196), "pass at most 195"),
        (FixedPool(15), "tiles larger than the 14x14 grid"),
    ],
)
def test_budgets_that_no_block_could_serve_are_refused(policy: Policy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy.check(Grid(14, 14), 1, 12)


def test_learnt_numbers_are_for_one_model() -> None:
    DiffRate("0.8g").check(Grid(14, 14), 1, 12)
    for grid, prefix, depth in ((Grid(14, 14), 2, 12), (Grid(14, 14), 1, 8), (Grid(16, 16), 1, 12)):
        with pytest.raises(ValueError, match="197 tokens in 12 blocks"):
            DiffRate("0.8g").check(grid, prefix, depth)
    for keep, final in DEIT_TINY.values():
        before = 197
        assert len(keep) == len(final) == 12
        for most, least in zip(keep, final, strict=True):
            assert before >= most >= least
            before = least


@pytest.mark.parametrize("name", ["tome:16", "pitome:16", "tofu:16", "free-energy:16"])
def test_where_tokens_run_out_a_block_merges_what_it_can(name: str) -> None:
    step = stepped(parse(name), moment(0, grid=(1, 7)))
    assert step.x.shape[1] == 1 + 7 - 3
    assert parse(name).step(moment(0, grid=(1, 1))) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_averaged_in_float32(dtype: torch.dtype) -> None:
    x = torch.full((1, 5, 3), 1.0, dtype=dtype)
    x[0, 2] = 1.0 + 2 * torch.finfo(dtype).eps
    size = torch.tensor([[1.0, 100.0, 100.0, 1.0, 1.0]])
    features = torch.tensor([[[0.0], [5.0], [5.0], [9.0], [20.0]]])
    merged, sizes, _ = eager.merge(x, size, features, None, 1)
    assert merged.dtype == dtype and sizes.dtype == torch.float32
    assert merged[0, 2, 0].item() == 1.0 + torch.finfo(dtype).eps
    assert sizes[0].tolist() == [1.0, 1.0, 200.0, 1.0]


@pytest.mark.parametrize("name", ["tome:3", "tofu:3", "diffrate:3", "evit:0.5", "free-energy:3"])
def test_gradients_flow_through_the_means(name: str) -> None:
    picture = moment(1, layer=acting(name))
    picture.x.requires_grad_()
    stepped(parse(name), picture).x.square().sum().backward()
    assert picture.x.grad is not None and bool(picture.x.grad.isfinite().all())
    assert bool((picture.x.grad != 0).any())


def test_backends_are_chosen_by_device_or_refused() -> None:
    tensor = torch.zeros(1, 4, 2)
    assert choose("auto", tensor) is eager
    assert choose("eager", tensor) is eager
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .*pass 'auto' or 'eager'"):
        choose("triton", tensor.double())


def _policies() -> list[Callable[[], Policy]]:
    return [
        lambda: ToMe("8"),  # type: ignore[arg-type]
        lambda: ToMe(True),
        lambda: EViT("0.5"),  # type: ignore[arg-type]
        lambda: FixedPool(2.0),  # type: ignore[arg-type]
        lambda: DCT(None),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("make", _policies())
def test_parameters_of_another_type_are_refused(make: Callable[[], Policy]) -> None:
    with pytest.raises(TypeError, match="pass"):
        make()
