"""The kernels of both backends against float64 references; Triton on a GPU or in its interpreter."""

import itertools
import math
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import merging_oracle

pytest.importorskip("triton")

from bmfa.merging.kernels import eager
from bmfa.merging.kernels.triton import attention, merge, operators
from bmfa.merging.operation import pool
from compile_kernels import SHARED_MEMORY, compile_kernels

Array = NDArray[np.float64]
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HALVES = (torch.float16, torch.bfloat16)
DTYPES = {eager: (torch.float64, torch.float32, *HALVES), operators: (torch.float32, torch.float16)}
needs_gpu = pytest.mark.skipif(not GPU, reason="no CUDA device")
both = pytest.mark.parametrize("kernels", DTYPES, ids=["eager", "triton"])


def seeds(fast: int, slow_until: int) -> pytest.MarkDecorator:
    """Seeds of the default run, then those of the long one."""
    more = pytest.param(range(fast, slow_until), marks=pytest.mark.slow, id="more")
    return pytest.mark.parametrize("seeds", [pytest.param(range(fast), id="few"), more])


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new buffers with NaN or a huge integer, so that an element that is not written shows."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> Tensor:
        buffer: Tensor = empty(*args, **options)  # type: ignore[call-overload]
        return buffer.fill_(math.nan if buffer.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", poisoned)


def array(tensor: Tensor) -> Array:
    return tensor.double().cpu().numpy()


def random_heads(seed: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v (B, H, T, d) as the strided views that timm makes."""
    batch, heads, tokens, dim = shape
    generator = torch.Generator().manual_seed(seed)
    joint = torch.randn(batch, tokens, 3, heads, dim, generator=generator) * 1.5
    return list(joint.to(DEVICE, dtype).permute(2, 0, 3, 1, 4).unbind(0))


def random_sizes(seed: int, batch: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 9, (batch, tokens), generator=generator).float().to(DEVICE)


def check_attention(
    kernels: ModuleType, q: Tensor, k: Tensor, v: Tensor, size: Tensor, prefix: int, mass: bool
) -> None:
    scale = q.shape[-1] ** -0.5
    options = {"scale": scale, "prefix": prefix}
    output, masses = kernels.proportional_attention(q, k, v, size, mass=mass, **options)
    images = zip(*map(array, (q, k, v, size)), strict=True)
    formula = [merging_oracle.proportional_attention(*image, **options) for image in images]
    exact, expected = (np.stack(parts) for parts in zip(*formula, strict=True))
    assert output.dtype == q.dtype and output.shape == q.shape and (masses is not None) == mass
    # A weight and a value each round once, and so does a sum of weighted values.
    eps = torch.finfo(q.dtype).eps
    rtol, atol = 0.0, max(4 * eps, 1e-6)
    error = np.abs(array(output) - exact).max()
    assert error <= atol * float(v.abs().max())
    if kernels is operators:
        assert output.transpose(1, 2).is_contiguous()
        # Twice the error of the eager path, and one rounding of the largest value.
        in_torch, _ = eager.proportional_attention(q, k, v, size, mass=True, **options)
        eager_error = np.abs(array(in_torch) - exact).max()
        assert error <= 2 * eager_error + eps * np.abs(exact).max()
        # Logits carry the rounding of float32 products of d terms and are exponentiated.
        logit = (np.abs(array(q)) @ np.abs(array(k)).swapaxes(-1, -2)).max() * scale
        rtol, atol = 2 * (q.shape[-1] + 8) * 2.0**-24 * max(1.0, logit), 1e-12
        if q.dtype != torch.float32:
            # The weights are rounded once to half precision, whose least numbers are this far apart.
            rtol += eps / 2
            atol = q.shape[1] * torch.finfo(q.dtype).smallest_normal * eps
    if masses is not None:
        assert masses.dtype == torch.float32
        # The mass is summed over heads, of which the formula takes the mean.
        mean = array(masses).sum(1) / q.shape[1]
        np.testing.assert_allclose(mean, expected, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("poison")
@both
@seeds(8, 18)
def test_attention_is_the_formula(kernels: ModuleType, seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        tokens = int(rng.choice([rng.integers(2, 40), rng.integers(60, 150), 16, 17, 64, 129]))
        heads = int(rng.integers(1, 4 if tokens < 40 else 2))
        shape = (int(rng.integers(1, 3)), heads, tokens, int(rng.choice([16, 24, 64])))
        dtype = DTYPES[kernels][seed % len(DTYPES[kernels])]
        q, k, v = random_heads(seed, shape, dtype)
        prefix = int(rng.integers(0, min(3, tokens)))
        size = random_sizes(seed, shape[0], tokens)
        check_attention(kernels, q, k, v, size, prefix, bool(seed % 3))


@both
def test_attention_with_sizes_is_attention_over_repeated_tokens(kernels: ModuleType) -> None:
    q, k, v = random_heads(3, (1, 2, 5, 16), torch.float32)
    size = torch.tensor([[1.0, 3.0, 2.0, 1.0, 4.0]], device=DEVICE)
    repeated = [tensor.repeat_interleave(size[0].long(), 2) for tensor in (k, v)]
    expected = scaled_dot_product_attention(q, *repeated, scale=0.2)
    for mass in (False, True):
        output, _ = kernels.proportional_attention(q, k, v, size, scale=0.2, prefix=1, mass=mass)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_a_prefix_may_cross_tiles_and_blocks_of_keys() -> None:
    for tokens, prefix in [(70, 66), (130, 65), (150, 5)]:
        q, k, v = random_heads(3, (1, 1, tokens, 16), torch.float16)
        check_attention(operators, q, k, v, random_sizes(3, 1, tokens), prefix, True)


def test_two_blocks_hold_all_keys_with_little_padding() -> None:
    for tokens in [1, 15, 16, 31, 133, 189, 197, 256, 257, 300, 512]:
        blocks = attention.key_blocks(tokens)
        assert tokens <= sum(blocks) <= max(16, 4 * tokens // 3 + 16)
        assert all(block == 0 or (block >= 16 and block.bit_count() == 1) for block in blocks)


def test_several_tiles_per_program_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_heads(5, (1, 2, 75, 16), torch.float16)
    size, results = random_sizes(5, 1, 75), []
    for tiles in (1, 2, 9):
        config = attention.LaunchConfig(16, tiles, 4, 1)
        monkeypatch.setattr(attention, "launch_config", lambda *_, config=config: config)
        attention._prepare.cache_clear()
        results.append(attention.launch_attention(q, k, v, size, 0.25, 1, True))
    attention._prepare.cache_clear()
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_attention_of_constant_and_huge_inputs() -> None:
    values = [0.0, 1.0, 2.0**15]  # products and sums of powers of two are exact
    for dtype, value in itertools.product([torch.float16, torch.float32], values):
        size = torch.full((1, 21), 1e6, device=DEVICE)
        x = torch.full((1, 2, 21, 16), value, dtype=dtype, device=DEVICE)
        output, mass = operators.proportional_attention(
            x, x, x, size, scale=1.0, prefix=1, mass=True
        )
        torch.testing.assert_close(output, x, rtol=2e-3, atol=0)
        assert mass is not None
        received = mass.sum(1)
        torch.testing.assert_close(received, torch.full_like(received, 2 / 21), rtol=1e-6, atol=0)


def check_merge(
    kernels: ModuleType, x: Tensor, size: Tensor, features: Array, keys: Tensor | None,
    parts: Tensor | None, r: int, prefix: int,
) -> None:  # fmt: skip
    """Compare with the reference on float64 features (B, T, F)."""
    x_new, size_new, assignment = kernels.merge_tokens(x, size, keys, parts, r, prefix=prefix)
    batch, tokens, channels = x.shape
    assert x_new.shape == (batch, tokens - r, channels)
    assert (x_new.dtype, size_new.dtype) == (x.dtype, torch.float32)
    assert assignment.dtype == torch.int32
    for b in range(batch):
        weight = None if parts is None else array(parts[b]).sum(0)
        pairs = merging_oracle.match_bipartite(features[b], weight, r, prefix)
        order = merging_oracle.bipartite_order(pairs, tokens, prefix)
        assert assignment[b].tolist() == merging_oracle.assignment(pairs, order, tokens)
        groups = merging_oracle.groups(pairs, order)
        expected, expected_size = merging_oracle.pool(array(x[b]), array(size[b]), groups)
        np.testing.assert_array_equal(array(size_new[b]), expected_size)
        # Up to T terms in float32 before one rounding to the dtype of x.
        bound = torch.finfo(x.dtype).eps / 2 + (tokens + 4) * 2.0**-23
        atol = bound * float(x.abs().max())
        np.testing.assert_allclose(array(x_new[b]), expected, rtol=0, atol=atol)


def merge_case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """x, size, keys, parts of the weight, r and prefix, with costs that are exact in every dtype.

    Keys have four entries of +1 or -1 in every head, so that unit keys have entries of +-1/2; weights
    are small integers. Many costs are equal.
    """
    rng = np.random.default_rng(seed)
    tokens = int(rng.choice([rng.integers(2, 12), rng.integers(12, 34), rng.integers(34, 70)]))
    prefix = int(rng.integers(0, min(3, tokens)))
    batch, heads = int(rng.integers(1, 3)), int(rng.choice([1, 2, 4]))
    channels, dim = int(rng.choice([1, 5, 20, 65])), int(rng.choice([4, 16, 24, 70]))
    most = (tokens - prefix) // 2
    r = [0, most, int(rng.integers(0, most + 1))][seed % 3]
    dtype = (torch.float32, torch.float16)[seed % 2]
    x = torch.from_numpy(rng.integers(-8, 9, (batch, channels, tokens))).to(DEVICE, dtype)
    one_head = np.zeros((batch, 1, tokens, dim))
    columns = np.argsort(rng.random((batch, 1, tokens, min(dim, 6))), axis=-1)[..., :4]
    np.put_along_axis(one_head, columns, rng.choice([-1.0, 1.0], columns.shape), axis=-1)
    keys = torch.from_numpy(one_head).to(DEVICE, dtype).expand(-1, heads, -1, -1)
    parts = torch.from_numpy(rng.integers(0, 4, (batch, 3, tokens))).float().to(DEVICE)
    return x.transpose(1, 2), random_sizes(seed, batch, tokens), keys, parts, r, prefix


@pytest.mark.usefixtures("poison")
@both
@seeds(9, 24)
def test_merge_is_the_definition(kernels: ModuleType, seeds: range) -> None:
    for weighted, seed in itertools.product([False, True], seeds):
        x, size, keys, parts, r, prefix = merge_case(seed)
        features = array(keys).mean(1) / 2  # keys of length 2
        check_merge(kernels, x, size, features, keys, parts if weighted else None, r, prefix)


@pytest.mark.usefixtures("poison")
@both
@seeds(3, 9)
def test_features_are_unit_mean_keys_or_layer_norms(kernels: ModuleType, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        tokens, channels, heads, dim = (23, 40, 3, 24) if seed % 2 else (37, 70, 2, 80)
        x = (3 * torch.randn(1, tokens, channels, generator=generator) + 1).to(DEVICE)
        k = random_heads(seed, (1, heads, tokens, dim), torch.float32)[1]
        size, parts = random_sizes(seed, 1, tokens), torch.rand(1, 6, tokens, generator=generator)
        unit, normed = merging_oracle.unit_mean_keys, merging_oracle.layer_norm
        for keys, features in ((None, normed(array(x[0]))), (k, unit(array(k[0])))):
            check_merge(kernels, x, size, features[None], keys, parts.to(DEVICE), 6, seed % 3)


def test_matching_in_smaller_steps_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, size, keys, parts, _, prefix = merge_case(10)
    r, results = (x.shape[1] - prefix) // 2, []
    for block_dst, block_c in ((64, 64), (16, 16)):
        monkeypatch.setattr(merge, "BLOCK_DST", block_dst)
        monkeypatch.setattr(merge, "BLOCK_C", block_c)
        merge._prepare.cache_clear()
        results.append(merge.launch_merge(x, size, keys, parts, r, prefix))
    merge._prepare.cache_clear()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@both
def test_ties_go_to_the_lowest_positions(kernels: ModuleType) -> None:
    x, size = torch.ones(1, 23, 4, device=DEVICE), torch.ones(1, 23, device=DEVICE)
    _, size_new, assignment = kernels.merge_tokens(x, size, None, None, 4, prefix=1)
    # Positions 2, 4, 6 and 8 merge into position 1, which follows the class token and 7 others.
    assert [assignment[0, i].item() for i in (1, 2, 4, 6, 8)] == [8] * 5
    assert size_new[0, 8].item() == 5
    assert assignment[0, 10].item() == 1


def test_half_precision_is_averaged_in_float32() -> None:
    for dtype in HALVES:
        x = torch.full((1, 2, 3), 1.0, dtype=dtype)
        x[0, 1] += 2 * torch.finfo(dtype).eps
        size, together = torch.full((1, 2), 100.0), torch.zeros(1, 2, dtype=torch.int32)
        merged, sizes = pool(x, size, together, 1)
        assert merged.dtype == dtype and sizes.tolist() == [[200.0]]
        assert merged[0, 0, 0].item() == 1.0 + torch.finfo(dtype).eps


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_every_token_has_a_new_position_if_costs_overflow() -> None:
    for value in [0.0, 1e4, 1e30]:
        generator = torch.Generator().manual_seed(1)
        x = (torch.randn(2, 31, 12, generator=generator) * value).to(DEVICE)
        size = random_sizes(1, 2, 31)
        weight = torch.full((2, 1, 31), 3e38, device=DEVICE)
        for parts in (None, weight):
            x_new, size_new, assignment = operators.merge_tokens(x, size, None, parts, 7, prefix=1)
            torch.testing.assert_close(size_new.sum(1), size.sum(1), rtol=0, atol=0)
            expected, _ = pool(x.double(), size, assignment, 24)
            torch.testing.assert_close(x_new, expected.float(), rtol=1e-5, atol=1e-6 * value)
            for row in assignment:
                assert sorted(set(row.tolist())) == list(range(24))


@pytest.mark.usefixtures("poison")
@both
def test_unit_mean_keys(kernels: ModuleType) -> None:
    for dtype, shape in itertools.product(DTYPES[kernels], [(2, 3, 37, 24), (1, 1, 5, 64)]):
        _, k, _ = random_heads(2, shape, dtype)
        features = kernels.unit_mean_keys(k)
        wide = torch.promote_types(dtype, torch.float32)
        assert features.dtype == (dtype if kernels is operators else wide)
        exact = np.stack([merging_oracle.unit_mean_keys(array(image)) for image in k])
        atol = torch.finfo(features.dtype).eps / 2 + 8 * 2.0**-23
        np.testing.assert_allclose(array(features), exact, rtol=0, atol=atol)
        zero = torch.zeros_like(features)
        assert torch.equal(kernels.unit_mean_keys(torch.zeros_like(k)), zero)


def test_an_empty_batch_stays_empty() -> None:
    q, k, v = (tensor[:0] for tensor in random_heads(0, (1, 2, 9, 16), torch.float16))
    size = torch.ones(0, 9, device=DEVICE)
    output, mass = operators.proportional_attention(q, k, v, size, scale=1.0, prefix=1, mass=True)
    assert output.shape == (0, 2, 9, 16) and mass is not None and mass.shape == (0, 2, 9)
    x = operators.unit_mean_keys(k)
    assert operators.merge_tokens(x, size, k, None, 2, prefix=1)[0].shape == (0, 7, 16)


def test_operators_work_with_fake_tensors_compilers_and_flop_counters() -> None:
    q, k, v = random_heads(4, (2, 3, 21, 16), torch.float16)
    size = random_sizes(4, 2, 21)
    checks = ("test_schema", "test_faketensor")
    x = torch.randn(2, 21, 20, device=DEVICE)
    for operator, arguments in (
        (torch.ops.bmfa.proportional_attention, (q, k, v, size, 0.25, 1, True)),
        (torch.ops.bmfa.merge_tokens, (x, size, k, size.unsqueeze(1), 5, 1)),
        (torch.ops.bmfa.unit_mean_keys, (k,)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=checks)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, mass = operators.proportional_attention(
            q, k, v, size, scale=0.25, prefix=1, mass=True
        )
        tokens = output.transpose(1, 2).reshape(2, 21, 48)
        return operators.merge_tokens(tokens, size, k, mass, 5, prefix=1)[0]

    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        expected = block(q, k, v)
    assert counter.get_total_flops() == 4 * 2 * 3 * 21 * 21 * 16 + 2 * 2 * 11 * 10 * 16
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), expected, rtol=0, atol=0)


def test_unsupported_inputs_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(*tensors: Tensor | None) -> str:
        return operators.unsupported_reason(*tensors) or ""

    tokens = torch.zeros(1, 9, 8, device=DEVICE)
    assert operators.unsupported_reason(tokens, None) is None
    assert "float64" in reason(tokens.double())
    assert "at most 512" in reason(torch.zeros(1, 513, 8, device=DEVICE))
    assert reason(tokens, torch.zeros(1, 600, 9, device=DEVICE)) == ""  # parts of a mass
    wide = torch.zeros(1, 1, 200, 128, device=DEVICE)
    assert "do not fit on chip" in reason(wide)
    assert "do not fit on chip" in reason(tokens, wide)
    assert operators.unsupported_reason(wide.half()) is None
    trained = torch.zeros(1, 9, 8, device=DEVICE, requires_grad=True)
    assert "torch.no_grad()" in reason(trained)
    with torch.no_grad():
        assert operators.unsupported_reason(trained) is None
    monkeypatch.setattr(operators, "_INTERPRETED", False)
    assert "need a CUDA device" in reason(torch.zeros(1, 9, 8))
    monkeypatch.setattr(operators, "_TRITON_PROBLEM", "Triton is not installed")
    assert reason(tokens) == "Triton is not installed"


@pytest.mark.gpu
@needs_gpu
def test_attention_at_full_size() -> None:
    for dtype, tokens in itertools.product(HALVES, [197, 189, 149, 101, 257]):
        q, k, v = random_heads(0, (256, 3, tokens, 64), dtype)
        size = random_sizes(0, 256, tokens)
        check_attention(operators, q, k, v, size, 1, True)
        check_attention(operators, q, k, v, size, 1, False)
        one, two = (
            operators.proportional_attention(q, k, v, size, scale=0.125, prefix=1, mass=True)
            for _ in range(2)
        )
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True) if a is not None)


def check_pairs_are_cheapest(
    features: Array, weight: Array | None, assignment: NDArray[np.int32], r: int
) -> None:
    """Assert for one image with one prefix token that the r pairs are the cheapest, up to rounding."""
    even, odd = np.arange(2, len(features), 2), np.arange(1, len(features), 2)
    distance = ((features[even][:, None] - features[odd][None]) ** 2).sum(-1)
    factor = 1.0 if weight is None else weight[even][:, None] + weight[odd][None]
    cost = distance * factor
    largest = (features**2).sum(-1).max() * max(1.0, np.max(factor))
    rounding = (features.shape[1] + 8) * 2.0**-23 * largest
    together = assignment[even][:, None] == assignment[odd][None]
    merges = together.any(1)
    assert merges.sum() == r
    chosen = cost[np.arange(len(even)), together.argmax(1)]
    assert (chosen[merges] <= cost[merges].min(1) + rounding).all()
    if not merges.all():
        assert chosen[merges].max() <= cost[~merges].min() + 2 * rounding


@pytest.mark.gpu
@needs_gpu
def test_merge_at_full_size() -> None:
    for weighted, dtype, (tokens, r) in itertools.product(
        [False, True], HALVES, [(197, 8), (149, 12), (101, 8), (197, 98), (261, 16)]
    ):
        generator = torch.Generator(device=DEVICE).manual_seed(tokens)
        x = torch.randn(256, tokens, 192, device=DEVICE, generator=generator).to(dtype)
        keys = torch.randn(256, 3, tokens, 64, device=DEVICE, generator=generator).to(dtype)
        parts = torch.rand(256, 3, tokens, device=DEVICE, generator=generator) if weighted else None
        size = random_sizes(1, 256, tokens)
        x_new, size_new, assignment = operators.merge_tokens(x, size, keys, parts, r, prefix=1)
        pooled, sizes = pool(x, size, assignment, tokens - r)
        torch.testing.assert_close(size_new, sizes, rtol=0, atol=0)
        # At most one rounding to the dtype of x apart.
        torch.testing.assert_close(x_new, pooled, rtol=torch.finfo(dtype).eps, atol=1e-6)
        features = operators.unit_mean_keys(keys[:8])
        for b in range(8):
            weight = None if parts is None else array(parts[b]).sum(0)
            check_pairs_are_cheapest(array(features[b]), weight, assignment[b].cpu().numpy(), r)
        again = operators.merge_tokens(x, size, keys, parts, r, prefix=1)
        assert torch.equal(again[0], x_new) and torch.equal(again[2], assignment)


@pytest.mark.skipif(GPU, reason="a GPU runs the kernels themselves")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    built = compile_kernels("merging", tmp_path)
    names = {"proportional_attention_kernel": 2, "merge_kernel": 2, "unit_mean_keys_kernel": 1}
    assert Counter(x.kernel for x in built) == names
    assert max(x.shared for x in built) <= SHARED_MEMORY
