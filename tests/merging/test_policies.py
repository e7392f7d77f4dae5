"""Token-reduction policies against the float64 reference; names, budgets, conservation."""

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import merging_oracle
from bmfa import Grid
from bmfa.merging import EViT, FixedPool, LayerState, Policy, RandomPool, ReducedTokens, ToMe, parse
from bmfa.merging.kernels import eager
from bmfa.merging.policies.base import kept_count, removed_count
from bmfa.merging.policies.diffrate import DEIT_TINY
from cases import noise

Array = NDArray[np.float64]
NAMES = (
    "tome:8 tome:1 tome:1.0 tome:0.95 tome:0,3,0,2 pitome:0.95 tofu:0.95 tofu:8 diffrate:0.8g "
    "diffrate:0.9g diffrate:0.95 diffrate:8 crossget:0.95 dct:0.95 dct2:0.95 evit:0.7 random-pool:8 "
    "fixed-pool:2 free-energy:8"
)
MERGING = ("tome:3", "pitome:3", "crossget:3", "random-pool:3", "fixed-pool:2", "free-energy:3")


def layer_state(
    seed: int, *, grid: tuple[int, int] = (4, 5), prefix: int = 1, layer: int = 1, depth: int = 4
) -> LayerState:
    """Two images with random tokens of random sizes, and the attention mass of random queries."""
    tokens = prefix + grid[0] * grid[1]
    q, k, v = noise(3, 2, 2, tokens, 6, seed=seed)
    size = torch.randint(1, 5, (2, tokens), generator=torch.Generator().manual_seed(seed)).float()
    size[:, :prefix] = 1.0
    _, mass = eager.proportional_attention(q, k, v, size, scale=0.4, prefix=prefix, mass=True)
    x = noise(2, tokens, 7, seed=seed + 1000)
    return LayerState(layer, depth, Grid(*grid), prefix, x, size, k, mass)


def acting_block(name: str) -> int:
    """A block of four in which the policy acts."""
    return 1 if name.startswith("free-energy") else 2


def arrays(state: LayerState, index: int) -> tuple[Array, Array, Array]:
    """x, size and unit mean keys of one image."""
    x, size, k = (t[index].double().numpy() for t in (state.x, state.size, state.k))
    return x, size, merging_oracle.unit_mean_keys(k)


def reduce_tokens(policy: Policy | str, state: LayerState) -> ReducedTokens:
    """The result of a policy in a block in which it must act."""
    reduced = (parse(policy) if isinstance(policy, str) else policy).reduce(state)
    assert reduced is not None
    return reduced


def check_reduced(reduced: ReducedTokens, index: int, x: Array, size: Array, position: list[int]):
    """Positions are equal; values as close as their float64 and sizes' float32 allow."""
    assert reduced.assignment is not None
    assert reduced.assignment[index].tolist() == position
    np.testing.assert_allclose(reduced.x[index].numpy(), x, rtol=0, atol=1e-6 * np.abs(x).max())
    np.testing.assert_allclose(reduced.size[index].numpy(), size, rtol=1e-6)


def expected_pairs(name: str, state: LayerState, index: int) -> merging_oracle.Pairs:
    """The four pairs that a policy merges."""
    x, _, keys = arrays(state, index)
    if name == "pitome":
        return merging_oracle.pitome(keys, 4, state.prefix, state.layer, state.depth)
    if name == "crossget":
        return merging_oracle.crossget(keys, 4, state.prefix)
    if name == "free-energy":
        keys, weight = merging_oracle.layer_norm(x), state.attention[index].double().numpy()
        return merging_oracle.match_bipartite(keys, weight, 4, state.prefix)
    return merging_oracle.match_bipartite(keys, None, 4, state.prefix)


def test_policies_that_merge_pairs_match_the_reference() -> None:
    cases = [("tome:4", 1, 4), ("crossget:4", 1, 4)]
    cases += [*(("pitome:4", layer, 4) for layer in range(4)), ("tofu:4", 1, 4), ("tofu:4", 2, 4)]
    for text, layer, depth in (*cases, ("free-energy:2", 1, 2)):  # two blocks' worth in the second
        name, prunes = text.partition(":")[0], text == "tofu:4" and layer < 2
        average = merging_oracle.mlerp if name == "tofu" and not prunes else merging_oracle.pool
        for seed, index in itertools.product(range(6), range(2)):
            state = layer_state(seed, layer=layer, depth=depth, prefix=seed % 3)
            x, size, _ = arrays(state, index)
            pairs = expected_pairs(name, state, index)
            if name in ("pitome", "crossget"):
                order = merging_oracle.kept_order(pairs, len(x))
            else:
                order = merging_oracle.bipartite_order(pairs, len(x), state.prefix)
            merged = [] if prunes else pairs
            position = merging_oracle.assignment(merged, order, len(x))
            assert position.count(-1) == (4 if prunes else 0)
            expected = average(x, size, merging_oracle.groups(merged, order))
            check_reduced(reduce_tokens(text, state), index, *expected, position)


def test_diffrate_matches_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few tokens to merge into, a cosine may be negative: such a source adds no size."""
    for seed, few in itertools.product(range(6), [False, True]):
        prefix = 1 + seed % 2
        keep, final = 16 - seed % 4, prefix + 1 if few else 11
        monkeypatch.setitem(DEIT_TINY, "0.8g", ((99, keep, 99), (99, final, 99)))
        state = layer_state(seed, prefix=prefix)
        reduced = reduce_tokens(parse("diffrate:0.8g"), state)
        for index in range(2):
            x, size, _ = arrays(state, index)
            attention = state.attention[index].double().numpy()
            expected = merging_oracle.diffrate(x, size, attention, keep, final, prefix)
            check_reduced(reduced, index, *expected)
            assert expected[2].count(-1) == len(x) - keep
        if few:
            assert reduced.size.sum() < state.size.sum() - 5, "no cosine was negative"
        # The numbers learnt for more tokens than there are change nothing.
        assert parse("diffrate:0.8g").reduce(layer_state(seed, layer=2)) is None
        monkeypatch.setitem(DEIT_TINY, "0.8g", ((99, 99), (99, 11)))
        most = reduce_tokens(parse("diffrate:0.8g"), state)
        assert most.x.shape[1] == 11 and most.assignment is not None
        assert int(most.assignment.min()) == 0
    # A budget prunes nothing, and the first block keeps all.
    assert parse("diffrate:4").reduce(layer_state(0, layer=0)) is None
    reduced = reduce_tokens(parse("diffrate:4"), layer_state(0))
    assert reduced.x.shape[1] == 21 - 4
    assert reduced.assignment is not None and int(reduced.assignment.min()) == 0


def test_learnt_numbers_are_for_one_model() -> None:
    parse("diffrate:0.8g").check(Grid(14, 14), 1, 12)
    for grid, prefix, depth in ((Grid(14, 14), 2, 12), (Grid(14, 14), 1, 8), (Grid(16, 16), 1, 12)):
        with pytest.raises(ValueError, match="197 tokens in 12 blocks"):
            parse("diffrate:0.8g").check(grid, prefix, depth)
    for keep, final in DEIT_TINY.values():
        assert len(keep) == len(final) == 12
        interleaved = [197, *itertools.chain(*zip(keep, final, strict=True))]
        assert interleaved == sorted(interleaved, reverse=True)


def test_evit_matches_the_reference() -> None:
    for seed in range(6):
        state = layer_state(seed, prefix=1 + seed % 2)
        reduced = reduce_tokens(EViT(0.6), state)
        for index in range(2):
            x, size, _ = arrays(state, index)
            attention = state.attention[index].double().numpy()
            tokens, position = merging_oracle.evit(x, attention, 0.6, state.prefix)
            sizes = np.array([size[np.array(position) == new].sum() for new in range(len(tokens))])
            check_reduced(reduced, index, tokens, sizes, position)
    for layer in range(12):  # it acts in three of twelve blocks
        assert EViT(0.7).reads_mass(layer, 12) == (layer in (3, 6, 9))
        reduced_or_none = EViT(0.7).reduce(layer_state(0, layer=layer, depth=12))
        assert (reduced_or_none is not None) == (layer in (3, 6, 9))


def test_dct_matches_the_reference() -> None:
    for share in [0.3, 0.5, 0.9]:
        state = layer_state(0, prefix=2)
        reduced = reduce_tokens(f"dct:{share}", state)
        for index in range(2):
            expected = merging_oracle.dct(state.x[index, 2:].numpy(), kept_count(share, 20))
            np.testing.assert_allclose(reduced.x[index, 2:].numpy(), expected, atol=1e-12)
        assert torch.equal(reduced.x[:, :2], state.x[:, :2])
        torch.testing.assert_close(reduced.size.sum(1), torch.full((2,), 22.0))
    state = layer_state(0, layer=0)
    reduced = reduce_tokens("dct2:0.5", state)
    rows, columns = 3, 4  # round(4 sqrt(0.5)), round(5 sqrt(0.5))
    for index in range(2):
        signal = state.x[index, 1:].view(4, 5, -1).numpy()
        along = np.stack([merging_oracle.dct(row, columns) for row in signal])
        expected = np.stack([merging_oracle.dct(along[:, c], rows) for c in range(columns)], 1)
        found = reduced.x[index, 1:].view(rows, columns, -1)
        np.testing.assert_allclose(found, expected, atol=1e-12)
    state.x.fill_(3.0)
    for policy in ("dct:0.4", "dct2:0.4"):  # a constant signal keeps its value, there and back
        reduced = reduce_tokens(policy, state)
        torch.testing.assert_close(reduced.x, torch.full_like(reduced.x, 3.0))
        assert reduced.unmerge_matrix is not None
        torch.testing.assert_close(reduced.unmerge_matrix @ reduced.x[:, 1:], state.x[:, 1:])


def test_random_pairs_are_disjoint_seeded_and_the_same_for_all_images() -> None:
    results = [reduce_tokens(RandomPool(6, seed), layer_state(0)) for seed in (0, 0, 1)]
    targets = [reduced.assignment for reduced in results if reduced.assignment is not None]
    assert torch.equal(targets[0], targets[1]) and not torch.equal(targets[0], targets[2])
    assert torch.equal(targets[0][0], targets[0][1])
    assert targets[0][0].bincount().max() == 2
    other = reduce_tokens(RandomPool(6), layer_state(0, layer=2)).assignment
    assert other is not None and not torch.equal(targets[0], other)


def test_fixed_tiles_with_remainders() -> None:
    state = layer_state(0, grid=(3, 5), layer=2)
    reduced = reduce_tokens(FixedPool(2), state)
    expected = [0, 1, 1, 2, 2, 3, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6]
    assert reduced.assignment is not None and reduced.assignment[1].tolist() == expected
    weights = state.size[0, [1, 2, 6, 7]].double()
    mean = (weights[:, None] * state.x[0, [1, 2, 6, 7]]).sum(0) / weights.sum()
    torch.testing.assert_close(reduced.x[0, 1], mean)
    assert FixedPool(2).reduce(layer_state(0, layer=1)) is None
    assert FixedPool(2).reduce(layer_state(0, layer=3)) is None


def test_free_energy_removes_the_budget_of_all_blocks_in_a_few() -> None:
    acting = {1: [0], 2: [1], 3: [1], 4: [1], 8: [2, 4, 6], 12: [3, 5, 7, 9]}
    acting[24] = [*range(6, 23, 2)]
    for (depth, blocks), budget in itertools.product(acting.items(), [1, 3]):
        policy, counts = parse(f"free-energy:{budget}"), []
        for layer in range(depth):
            reduced = policy.reduce(layer_state(0, grid=(8, 12), layer=layer, depth=depth))
            counts.append(0 if reduced is None else 97 - reduced.x.shape[1])
        assert sum(counts) == budget * depth
        assert [layer for layer in range(depth) if policy.reads_mass(layer, depth)] == blocks
        assert [layer for layer, count in enumerate(counts) if count] == blocks[: sum(counts)]
        removed = [counts[layer] for layer in blocks]
        assert max(removed) - min(removed) <= 1 and removed[0] == max(removed)
        assert parse("free-energy:0").reduce(layer_state(0, layer=blocks[0], depth=depth)) is None
    reduced = reduce_tokens("free-energy:0.95", layer_state(0, grid=(20, 20), layer=5, depth=12))
    assert 401 - reduced.x.shape[1] == removed_count(0.95**3, 400)


def test_merging_conserves_sizes_and_weighted_sums() -> None:
    for name, prefix in itertools.product(MERGING, [0, 1, 3]):
        state = layer_state(5, prefix=prefix, layer=acting_block(name))
        reduced = reduce_tokens(name, state)
        assert reduced.assignment is not None
        assert torch.equal(reduced.size.sum(1), state.size.sum(1))
        before = (state.x * state.size.unsqueeze(-1)).sum(1)
        torch.testing.assert_close((reduced.x * reduced.size.unsqueeze(-1)).sum(1), before)
        assert torch.equal(reduced.x[:, :prefix], state.x[:, :prefix])
        assert torch.equal(reduced.size[:, :prefix], state.size[:, :prefix])
        assert reduced.assignment[:, :prefix].tolist() == [list(range(prefix))] * 2
        # Every new position has an old token, and no token merges into the prefix.
        for row in reduced.assignment:
            assert row.unique().tolist() == list(range(reduced.x.shape[1]))
        assert int(reduced.assignment[:, prefix:].min()) >= prefix


def test_parse_and_str_are_inverse() -> None:
    for name in NAMES.split():
        assert str(parse(name)) == name
        assert parse(str(parse(name))) == parse(name)
    assert parse("tome:1") == ToMe(1) and parse("tome:1.0") == ToMe(1.0)
    assert removed_count(1, 196) == 1 and removed_count(1.0, 196) == 0
    assert parse("random-pool:8", seed=3) == RandomPool(8, 3)
    for policy, value in [(ToMe, "8"), (ToMe, True), (EViT, "0.5"), (FixedPool, 2.0)]:
        with pytest.raises(TypeError, match="pass"):
            policy(value)


def test_fractions_are_decimal_numbers() -> None:
    cases = [(0.95, 196, 187), (0.9, 10, 9), (0.55, 100, 55), (0.7, 10, 7), (0.975, 40, 39)]
    for share, tokens, left in [*cases, (1.0, 7, 7)]:
        assert tokens - removed_count(share, tokens) == kept_count(share, tokens) == left


def test_bad_names_say_what_is_accepted() -> None:
    for text, message in [
        ("tome", "reduction 'tome' has no value; reductions read NAME:VALUE"),
        ("tome:x", "reductions read NAME:VALUE, e.g. tome:8"),
        ("tome:-1", "tokens removed from a block is -1; pass an integer at least 0"),
        ("tome:²", "'²' is not a number"),
        ("tome:0.4", r"\[0.5, 1\]"),
        ("pitome:nan", "fraction kept by a block"),
        ("diffrate:0.7g", "'0.7g' are unknown; pass 0.8g or 0.9g"),
        ("crossget:0.0", r"\(0, 1\]"),
        ("dct:1.5", "fraction kept is 1.5"),
        ("evit:0", "fraction kept is 0.0"),
        ("fixed-pool:0", "side is 0; pass an integer at least 1"),
        ("fixed-pool:1.5", "side is 1.5; pass an integer"),
        ("mean-pool:3", "is unknown; pass NAME:VALUE with a name of tome, pitome"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse(text)


def test_budgets_beyond_the_tokens_of_the_grid_are_refused() -> None:
    rest = ",0" * 9
    for name, message in [
        ("tome:99", "removes 99 tokens a block, but of the 196 tokens of a 14x14 grid at most"),
        *((f"{x}:99", "at most 98") for x in ("free-energy", "pitome", "tofu", "random-pool")),
        ("crossget:196", "pass at most 195"),
        ("diffrate:196", "pass at most 195"),
        (f"diffrate:1,0,0{rest}", "the first block never merges tokens; pass 0 for it"),
        ("tome:0,1", "has 2 counts, and the model has 12 blocks"),
        (f"tome:98,50,0{rest}", "removes 50 tokens in block 1, but of the 98 tokens"),
        ("fixed-pool:15", "tiles larger than the 14x14 grid"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse(name).check(Grid(14, 14), 1, 12)
    parse(f"tome:98,49,24{rest}").check(Grid(14, 14), 1, 12)


def test_a_block_with_too_few_tokens_removes_half_of_them() -> None:
    for name in ["tome:16", "pitome:16", "tofu:16", "free-energy:16"]:
        reduced = reduce_tokens(name, layer_state(0, grid=(1, 7)))
        assert reduced.x.shape[1] == 1 + 7 - 3
        assert parse(name).reduce(layer_state(0, grid=(1, 1))) is None


def test_gradients_flow_through_the_averages() -> None:
    for name in ["tome:3", "tofu:3", "diffrate:3", "evit:0.5", "free-energy:3"]:
        state = layer_state(1, layer=acting_block(name))
        state.x.requires_grad_()
        reduce_tokens(name, state).x.square().sum().backward()
        assert state.x.grad is not None and bool(state.x.grad.isfinite().all())
        assert bool((state.x.grad != 0).any())
