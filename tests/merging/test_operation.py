"""Proportional attention, matching and pooling in torch against the float64 reference; backends."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import merging_oracle
from bmfa.merging.dispatch import (
    BACKENDS,
    check_backend,
    merge_tokens,
    proportional_attention,
    unit_mean_keys,
)
from bmfa.merging.kernels import eager
from bmfa.merging.operation import assign_bipartite, match_bipartite, pool


def test_attention_adds_log_size() -> None:
    for prefix, mass, dtype in itertools.product(
        [0, 1, 5], [False, True], [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    ):
        generator = torch.Generator().manual_seed(prefix)
        q, k, v = (torch.randn(2, 3, 11, 8, generator=generator).to(dtype) for _ in range(3))
        size = torch.randint(1, 9, (2, 11), generator=generator).float()
        output, masses = eager.proportional_attention(
            q, k, v, size, scale=0.3, prefix=prefix, mass=mass
        )
        assert output.dtype == dtype and output.shape == q.shape
        assert (masses is not None) == mass
        # A weight and a value each round once, and so does a sum of 11 weighted values.
        rounding = max(4 * torch.finfo(dtype).eps, 1e-6)
        for index in range(2):
            arrays = (tensor[index].double().numpy() for tensor in (q, k, v, size))
            expected, expected_mass = merging_oracle.proportional_attention(*arrays, 0.3, prefix)
            np.testing.assert_allclose(
                output[index].double().numpy(), expected, atol=rounding * float(v.abs().max())
            )
            if masses is not None:
                assert masses.dtype == torch.float32
                found = masses[index].sum(0).double().numpy() / 3  # mean over three heads
                np.testing.assert_allclose(found, expected_mass, atol=rounding)
                np.testing.assert_allclose(found.sum(), 1.0, rtol=1e-5)


def test_attention_with_sizes_is_attention_over_repeated_tokens() -> None:
    for mass in [False, True]:
        generator = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(1, 2, 5, 4, generator=generator).double() for _ in range(3))
        size = torch.tensor([[1.0, 3.0, 2.0, 1.0, 4.0]])
        repeated = [tensor.repeat_interleave(size[0].long(), 2) for tensor in (k, v)]
        expected = scaled_dot_product_attention(q, *repeated, scale=0.7)
        output, _ = proportional_attention(q, k, v, size, scale=0.7, prefix=1, mass=mass)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)


def merge_by_features(
    x: torch.Tensor, size: torch.Tensor, features: torch.Tensor, r: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge with one prefix token by features that are not normalised."""
    source, destination = match_bipartite(features, None, r, prefix=1)
    assignment = assign_bipartite(source, destination, x.shape[1], 1)
    return *pool(x, size, assignment, x.shape[1] - r), assignment


def test_merge_by_hand() -> None:
    # Positions: class 0 | even 2, 4, 6 | odd 1, 3, 5. 4 equals 3; 6 is near 5; 2 is far from all.
    features = torch.tensor([[[0.0], [1.0], [9.0], [4.0], [4.0], [6.0], [6.5]]])
    size = torch.tensor([[1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0]])
    x = features.clone()
    x[0, 4] = 8.0
    merged, sizes, assignment = merge_by_features(x, size, features, 2)
    assert merged[0, :, 0].tolist() == [0.0, 9.0, 1.0, 5.0, 6.25]  # class, 2, then 1, 3 + 4, 5 + 6
    assert sizes[0].tolist() == [1.0, 1.0, 1.0, 4.0, 2.0]
    assert assignment.dtype == torch.int32
    assert assignment[0].tolist() == [0, 2, 1, 3, 3, 4, 4]


def test_many_tokens_may_merge_into_one_and_ties_go_to_the_lowest_index() -> None:
    x = torch.arange(7.0).view(1, 7, 1)
    merged, _, assignment = merge_by_features(x, torch.ones(1, 7), torch.zeros(1, 7, 2), 2)
    assert assignment[0].tolist() == [0, 2, 2, 3, 2, 4, 1]  # 2 and 4 merge into 1, 6 remains
    assert merged[0, 2, 0].item() == pytest.approx((1 + 2 + 4) / 3)


def test_merge_matches_the_reference() -> None:
    for seed in range(24):
        rng = np.random.default_rng(seed)
        prefix = int(rng.integers(0, 4))
        tokens = prefix + int(rng.integers(2, 30))
        r = int(rng.integers(0, (tokens - prefix) // 2 + 1))
        x = rng.normal(size=(2, tokens, 5))
        keys = rng.normal(size=(2, 3, tokens, 4)) if seed % 2 else None
        size = rng.integers(1, 6, (2, tokens)).astype(float)
        parts = rng.random((2, 3, tokens)).astype(np.float32) if seed % 3 else None
        merged, sizes, assignment = merge_tokens(
            torch.from_numpy(x),
            torch.from_numpy(size).float(),
            None if keys is None else torch.from_numpy(keys),
            None if parts is None else torch.from_numpy(parts),
            r,
            prefix=prefix,
        )
        for index in range(2):
            features = (
                merging_oracle.layer_norm(x[index])
                if keys is None
                else merging_oracle.unit_mean_keys(keys[index])
            )
            weight = None if parts is None else parts[index].sum(0).astype(float)
            pairs = merging_oracle.match_bipartite(features, weight, r, prefix)
            order = merging_oracle.bipartite_order(pairs, tokens, prefix)
            expected, expected_size = merging_oracle.pool(
                x[index], size[index], merging_oracle.groups(pairs, order)
            )
            assert assignment[index].tolist() == merging_oracle.assignment(pairs, order, tokens)
            # float64 tokens, float32 sizes
            scale = np.abs(expected).max()
            np.testing.assert_allclose(merged[index].numpy(), expected, rtol=0, atol=1e-6 * scale)
            np.testing.assert_allclose(sizes[index].numpy(), expected_size, rtol=1e-6)


def test_half_precision_is_averaged_in_float32() -> None:
    for dtype in [torch.float16, torch.bfloat16]:
        x = torch.full((1, 5, 3), 1.0, dtype=dtype)
        x[0, 2] = 1.0 + 2 * torch.finfo(dtype).eps
        size = torch.tensor([[1.0, 100.0, 100.0, 1.0, 1.0]])
        features = torch.tensor([[[0.0], [5.0], [5.0], [9.0], [20.0]]])
        merged, sizes, _ = merge_by_features(x, size, features, 1)
        assert merged.dtype == dtype and sizes.dtype == torch.float32
        assert merged[0, 2, 0].item() == 1.0 + torch.finfo(dtype).eps
        assert sizes[0].tolist() == [1.0, 1.0, 200.0, 1.0]


def test_auto_is_eager_on_the_cpu_and_triton_runs_or_raises() -> None:
    k = torch.randn(1, 2, 4, 2, dtype=torch.float64)
    expected = eager.unit_mean_keys(k)
    assert torch.equal(unit_mean_keys(k), expected)
    assert torch.equal(unit_mean_keys(k, "eager"), expected)
    with pytest.raises(ValueError, match=r"backend='triton' cannot run: .*pass backend='auto'"):
        unit_mean_keys(k, "triton")
    assert [check_backend(name) for name in BACKENDS] == ["auto", "eager", "triton"]
    with pytest.raises(ValueError, match="backend is 'cuda'; pass one of auto, eager, triton"):
        check_backend("cuda")


def test_inputs_that_do_not_fit_are_refused() -> None:
    q, ones = torch.ones(1, 2, 10, 16), torch.ones
    attention = {"q": q, "k": q, "v": q, "size": ones(1, 10), "scale": 1.0, "prefix": 1}
    merging = {"x": ones(1, 10, 4), "size": ones(1, 10), "keys": q, "weight": None, "r": 2}
    for call, usual, change, message in [
        (merge_tokens, merging, {"r": 5}, "r is 5; of 10 tokens, 1 of them prefix .* from 0 to 4"),
        (merge_tokens, merging, {"r": -1}, "r is -1"),
        (merge_tokens, merging, {"prefix": 11}, "prefix is 11; pass an integer from 0 to 10"),
        (merge_tokens, merging, {"size": ones(1, 9)}, r"size has shape \(1, 9\); pass \(1, 10\)"),
        (merge_tokens, merging, {"weight": ones(10)}, r"weight .* \(10,\); pass \(1, parts, 10\)"),
        (merge_tokens, merging, {"weight": ones(1, 10)}, r"weight has shape \(1, 10\)"),
        (merge_tokens, merging, {"keys": ones(1, 10, 4)}, r"keys .* \(1, 10, 4\); pass \(1, H, 10"),
        (merge_tokens, merging, {"keys": ones(1, 2, 9, 4)}, r"keys have shape \(1, 2, 9, 4\)"),
        (merge_tokens, merging, {"x": ones(10, 4)}, r"x has shape \(10, 4\); .* as \(B, T, C\)"),
        (
            proportional_attention,
            attention,
            {"k": q[:, :, 1:]},
            r"k .* \(1, 2, 9, 16\); pass \(1, 2, 10",
        ),
        (proportional_attention, attention, {"size": ones(1, 9)}, r"size has shape \(1, 9\)"),
        (proportional_attention, attention, {"prefix": 11}, "prefix is 11"),
        (proportional_attention, attention, {"q": q[0]}, r"q has shape \(2, 10, 16\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**({"prefix": 1} | usual | change))  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"v is torch\.float64 and q is torch\.float32"):
        proportional_attention(**(attention | {"v": q.double()}))  # type: ignore[arg-type]
