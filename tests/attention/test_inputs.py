"""Arguments as users of scaled_dot_product_attention pass them: supported, or refused with a hint."""

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa import Grid, rules, screen, screen_keys, screened_attention

GRID, PREFIX = Grid(9, 12), 2
SIZE = PREFIX + GRID.size
EXACT: tuple[dict[str, Any], ...] = (  # settings with exact outputs, of every form
    {},
    {"allow_dense": False, "leaves": 1.0},
    {"rule": rules.ExactGap(0.0)},
)

HALF = (torch.float16, torch.bfloat16)


def tokens(batch: int = 2, heads: int = 2, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(3, batch, heads, SIZE, width, generator=generator))


def attend(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    return screened_attention(q, k, v, **{"grid": GRID, "prefix": PREFIX} | settings).output


def refuses(kind: type[Exception], message: str, *qkv: Any, **settings: Any) -> str:
    """Assert that a call raises, and return what it says."""
    with pytest.raises(kind, match=message) as caught:
        attend(*(qkv or tokens()), **settings)
    return str(caught.value)


def test_sdpa_arguments_are_refused_with_a_hint() -> None:
    for name, value, hint in (
        ("attn_mask", torch.ones(1, dtype=torch.bool), "pass valid="),
        ("attn_mask", None, "pass valid="),
        ("dropout_p", 0.1, "leave the argument out"),
        ("is_causal", True, "every query sees every token"),
        ("enable_gqa", True, "fewer heads than q without it"),
    ):
        refuses(TypeError, f"takes no {name}: .*{hint}", **{name: value})
    q, k, v = tokens()
    with pytest.raises(TypeError, match=r"got 4; name the others.*pass valid="):
        screened_attention(q, k, v, None, grid=GRID)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"no grid; pass grid=\(height, width\)"):
        screened_attention(q, k, v)  # type: ignore[call-arg]
    refuses(TypeError, "unexpected keyword argument 'gird'", gird=1)
    parameters = inspect.signature(screened_attention).parameters
    assert list(parameters)[:5] == ["q", "k", "v", "grid", "prefix"]
    assert not {"attn_mask", "args", "kwargs"} & set(parameters)


# Grids


def test_a_pair_is_accepted_wherever_a_grid_is() -> None:
    q, k, v = tokens()
    scores, keys = q[..., PREFIX:, 0], k[:, :, PREFIX:]
    for call in (
        lambda grid: attend(q, k, v, grid=grid),
        lambda grid: attend(q, k, v, grid=grid, allow_dense=False, error=0.1),
        lambda grid: attend(q, k, v, grid=grid, rule="gamma:0.1"),
        lambda grid: screen(scores, grid, "gamma:0.1").leaf_index,
        lambda grid: screen_keys(q, keys, grid, "gamma:0.1").leaf_index,
    ):
        for pair in ((9, 12), [9, 12], torch.Size((9, 12)), (np.int64(9), 12)):
            assert torch.equal(call(pair), call(GRID))


def test_invalid_grids_are_refused() -> None:
    for grid, message in (
        (108, r"grid is 108; pass Grid\(height, width\), or the pair"),
        ((2, 9, 12), r"grid is \(2, 9, 12\); did you mean Grid\(9, 12\)\?"),
        (None, "grid is None"),
    ):
        refuses(TypeError, message, grid=grid)
        with pytest.raises(TypeError, match=message):
            screen(torch.zeros(108), grid, "gamma:0.1")
    refuses(ValueError, r"k has 110 tokens; .* make 108; pass prefix=2 if the first 2", prefix=0)
    refuses(ValueError, "make 122; pass the grid of the tokens", grid=Grid(10, 12))


# Numbers and names


def test_bad_settings_are_refused_with_the_value() -> None:
    for change, message in (
        ({"backend": "cuda"}, "pass one of auto, native, eager, triton$"),
        ({"prefix": -1}, "prefix is -1"),
        ({"tau": 0.0}, "tau is 0.0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"error": -1.0}, "error is -1.0"),
        ({"error": 3}, "error is 3; pass a fraction: 0.03 is 3 %"),
        *(({"leaves": x}, f"leaves is {x}") for x in (0, 109, 1.5)),
        ({"leaves": 1}, r"one leaf or all tokens; pass leaves=1\.0"),
        ({"error": 0.1, "leaves": 3}, "error and leaves are given"),
        ({"rule": "gama:0.005"}, "rule 'gama:0.005' is unknown"),
        ({"rule": rules.Optimal(leaves=np.int64(200))}, "leaves is 200"),
        ({"max_depth": 2}, "max_depth is 2, which limits trees, and no rule is given"),
        ({"max_depth": -1}, "max_depth is -1"),
    ):
        refuses(ValueError, message, **change)
    refuses(TypeError, "allow_dense is None; pass True or False", allow_dense=None)
    refuses(TypeError, "Gamma is a class: pass an instance", rule=rules.Gamma)
    refuses(TypeError, "rule is 0.005; pass one of bmfa.rules", rule=0.005)
    for name in ("tau", "scale", "error", "leaves", "prefix"):
        for value in (np.bool_(True), True, torch.tensor(0.5), "0.5", 1j):
            text = refuses(TypeError, f"^{name} is", allow_dense=False, **{name: value})
            assert ("call .item()" in text) == isinstance(value, Tensor)


@pytest.mark.filterwarnings("ignore:screened_attention measured:UserWarning")  # few probes
def test_numpy_scalars_are_numbers() -> None:
    qkv = tokens()
    for plain, scalar in (
        ({"error": 0.1}, {"error": np.float64(0.1)}),
        ({"error": 0.5}, {"error": np.float32(0.5), "tau": np.float16(1.0)}),
        ({"leaves": 40}, {"leaves": np.int64(40)}),
        ({"leaves": 0.5}, {"leaves": np.float32(0.5)}),
        ({"prefix": PREFIX, "scale": 0.5}, {"prefix": np.int32(PREFIX), "scale": np.float32(0.5)}),
    ):
        common = {"grid": GRID, "prefix": PREFIX, "allow_dense": False}
        results = [screened_attention(*qkv, **common | x) for x in (plain, scalar)]
        assert torch.equal(results[0].output, results[1].output)
        assert results[0].stats.setting == results[1].stats.setting
    for plain, scalar in (
        (rules.Gamma(0.25, 2), rules.Gamma(np.float32(0.25), np.int64(2))),
        (rules.Optimal(0.25), rules.Optimal(np.float64(0.25))),
        (rules.Optimal(leaves=7), rules.Optimal(leaves=np.int64(7))),
        (rules.Optimal(leaves=0.5), rules.Optimal(leaves=np.float32(0.5))),
        (rules.FixedDepth(2), rules.FixedDepth(np.int8(2))),
    ):
        assert str(plain) == str(scalar)
        outputs = [attend(*qkv, rule=x) for x in (str(plain), plain, scalar)]
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[1], outputs[2])
    depths = [attend(*qkv, rule="gamma:0.1", max_depth=x) for x in (2, np.int64(2))]
    assert torch.equal(*depths)


# Masks


def test_masks_of_the_shapes_of_sdpa_and_of_any_strides() -> None:
    q, k, v = (x.double() for x in tokens())
    generator = torch.Generator().manual_seed(1)
    for shape in ((2, GRID.size), (2, 1, 1, GRID.size), (1, 1, 1, GRID.size)):
        valid = torch.rand(shape, generator=generator) > 0.3
        flat = valid.reshape(-1, GRID.size)
        mask = torch.cat((flat.new_ones(len(flat), PREFIX), flat), 1)[:, None, None]
        exact = scaled_dot_product_attention(q, k, v, attn_mask=mask).where(mask.mT, 0.0)
        for settings in EXACT:
            got = attend(q, k, v, valid=valid, **settings)
            torch.testing.assert_close(got.where(mask.mT, 0.0), exact)
            transposed = valid.mT.contiguous().mT if valid.dim() == 2 else valid
            assert torch.equal(attend(q, k, v, valid=transposed, **settings), got)


def test_invalid_masks_are_refused() -> None:
    def ones(*shape: int, device: str = "cpu") -> Tensor:
        return torch.ones(*shape, dtype=torch.bool, device=device)

    for valid, kind, message in (
        (ones(2, SIZE), ValueError, r"always valid: pass valid\[\.\.\., 2:\]"),
        (ones(2, 1, 1, SIZE), ValueError, "prefix tokens are always valid"),
        (ones(2, 2, 1, GRID.size), ValueError, r"shape \(2, 2, 1, 108\)"),
        (ones(9), ValueError, r"valid has shape \(9,\)"),
        (~ones(GRID.size), ValueError, "leaves no token"),
        (torch.zeros(2, GRID.size), TypeError, "valid is torch.float32; pass a torch.bool tensor"),
        (np.ones((2, GRID.size), bool), TypeError, "valid is ndarray"),
        (ones(2, GRID.size, device="meta"), ValueError, "valid is on meta"),
    ):
        refuses(kind, message, valid=valid)


def test_invalid_queries_and_keys_are_refused() -> None:
    valid = torch.ones(2, GRID.size, dtype=torch.bool)
    valid[:, 5] = False
    for settings, mask in itertools.product(EXACT, (None, valid)):
        for place, name in enumerate(("queries", "keys")):
            for bad in (torch.nan, torch.inf, -torch.inf):
                qkv = tokens()
                qkv[place][1, 0, PREFIX + 3, 2] = bad
                message = rf"{name} hold -?(nan|inf) at index \(1, 0, 5, 2\)"
                refuses(ValueError, message, *qkv, valid=mask, **settings)
        q, k, v = tokens()  # all scores are -inf, and no NaN comes of it
        overflowing = (1e20 * q.abs() + 1e20, -1e20 * k.abs() - 1e20, v)
        refuses(ValueError, "overflow", *overflowing, valid=mask, **settings)


# Tensors


def test_every_dtype_on_a_cpu_against_float64() -> None:
    for dtype, width in itertools.product((*HALF, torch.float32, torch.float64), (8, 3)):
        q, k, v = (x.to(dtype) for x in tokens())
        exact = scaled_dot_product_attention(q.double(), k.double(), v[..., :width].double())
        # The output is rounded once; what comes before is float32, also for half types.
        working = torch.promote_types(dtype, torch.float32)
        slack = torch.finfo(dtype).eps + 64 * torch.finfo(working).eps
        for settings in EXACT:
            got = attend(q, k, v[..., :width], **settings)
            assert got.dtype == dtype
            assert bool(((got.double() - exact).abs() <= slack * (1 + exact.abs())).all())
    q, k, v = tokens()  # scores beyond the range of float16
    q, k, v = (300 * q).half(), (300 * k).half(), v.half()
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert float((q.double() @ k.double().mT).abs().max()) * 8**-0.5 > torch.finfo(torch.half).max
    for settings in EXACT:
        got = attend(q, k, v, **settings).double()
        torch.testing.assert_close(got, exact, rtol=1e-2, atol=1e-2)


def test_gradients_of_every_form_are_those_of_dense_attention() -> None:
    def gradients(function: Any, **settings: Any) -> tuple[Tensor, ...]:
        qkv = [x.double().requires_grad_() for x in tokens()]
        return torch.autograd.grad(function(*qkv, **settings).sin().sum(), qkv)

    want = gradients(scaled_dot_product_attention)
    for settings in EXACT:
        torch.testing.assert_close(gradients(attend, **settings), want, rtol=1e-9, atol=1e-9)


def test_mismatched_tensors_are_refused() -> None:
    q, k, v = tokens()
    nested = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=torch.jagged)
    divisor = "as many key heads or a divisor of that number"
    three = [torch.cat((x, x[:, :1]), 1) for x in (k, v)]
    for qkv, kind, message in (
        ((q[0], k[0], v[0]), ValueError, r"for one head, q.unsqueeze\(1\)"),
        ((q[0, 0], k, v), ValueError, r"pass \(B, heads, tokens, d\)"),
        ((q.double(), k, v), TypeError, "pass one dtype and device"),
        ((q, k, v.double()), ValueError, "same batch, heads, tokens, dtype"),
        ((q, k, v[:, :, :5]), ValueError, "same batch, heads, tokens, dtype"),
        ((q, k.to("meta"), v.to("meta")), TypeError, "k torch.float32 on meta"),
        ((q, k, v.to("meta")), ValueError, "v .* on meta"),
        ((q.long(), k, v), TypeError, r"q has dtype torch.int64.*q.float\(\)"),
        ((q.numpy(), k, v), TypeError, "q is ndarray; pass a torch.Tensor"),
        ((q.to_sparse(), k, v), TypeError, "q is a torch.sparse_coo tensor; pass"),
        ((q[:1], k, v), ValueError, r"q has shape \(1, 2, 110, 8\) and k \(2,"),
        ((q[..., :4], k, v), ValueError, r"q has shape \(2, 2, 110, 4\)"),
        ((q, *three), ValueError, divisor),
        ((torch.cat((q, q), 1), *three), ValueError, divisor),
        ((nested, k, v), TypeError, "q is a nested tensor; pass a dense one, padded, with valid="),
    ):
        for settings in EXACT:
            refuses(kind, message, *qkv, **settings)
