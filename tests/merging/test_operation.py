"""Backends of token reduction, and what they refuse; test_kernels.py has what they compute."""

import pytest
import torch

from bmfa.merging.dispatch import (
    BACKENDS,
    check_backend,
    merge_tokens,
    proportional_attention,
    unit_mean_keys,
)
from bmfa.merging.kernels import eager


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
    q, ones, attend = torch.ones(1, 2, 10, 16), torch.ones, proportional_attention
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
        (attend, attention, {"k": q[:, :, 1:]}, r"k .* \(1, 2, 9, 16\); pass \(1, 2, 10"),
        (attend, attention, {"size": ones(1, 9)}, r"size has shape \(1, 9\)"),
        (attend, attention, {"prefix": 11}, "prefix is 11"),
        (attend, attention, {"q": q[0]}, r"q has shape \(2, 10, 16\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**({"prefix": 1} | usual | change))  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"v is torch\.float64 and q is torch\.float32"):
        proportional_attention(**(attention | {"v": q.double()}))  # type: ignore[arg-type]
