"""Arguments as users of scaled_dot_product_attention pass them: supported, or refused with a hint."""

import copy
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import bmfa
from bmfa import Grid, rules, screen, screen_keys, screened_attention
from bmfa.models import embedded, patch
from bmfa.models.patching import layer_indices

GRID, PREFIX = Grid(9, 12), 2
SIZE = PREFIX + GRID.size
EXACT: dict[str, dict[str, Any]] = {  # settings with exact outputs
    "auto": {},
    "tiled": {"allow_dense": False, "leaves": 1.0},
    "tree": {"rule": rules.ExactGap(0.0)},
}
EVERY_FORM = pytest.mark.parametrize("form", EXACT)
EVERY_TORCH_FORM = pytest.mark.parametrize("form", ["auto", "tiled", "tree"])


def tokens(batch: int = 2, heads: int = 2, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(3, batch, heads, SIZE, width, generator=generator))


def attend(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    return screened_attention(q, k, v, **{"grid": GRID, "prefix": PREFIX} | settings).output


# Arguments of scaled_dot_product_attention.


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("attn_mask", torch.ones(1, dtype=torch.bool), "pass valid="),
        ("attn_mask", None, "pass valid="),
        ("dropout_p", 0.1, "leave the argument out"),
        ("is_causal", True, "every query sees every token"),
        ("enable_gqa", True, "fewer heads than q without it"),
    ],
)
def test_sdpa_arguments_are_refused_with_a_hint(name: str, value: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=f"takes no {name}: .*{hint}"):
        attend(*tokens(), **{name: value})


def test_positional_masks_and_a_missing_grid_are_explained() -> None:
    q, k, v = tokens()
    with pytest.raises(TypeError, match=r"got 4; name the others.*pass valid="):
        screened_attention(q, k, v, None, grid=GRID)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"no grid; pass grid=\(height, width\)"):
        screened_attention(q, k, v)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'gird'"):
        screened_attention(q, k, v, grid=GRID, gird=1)  # type: ignore[call-arg]


def test_signature_is_preserved() -> None:
    parameters = inspect.signature(screened_attention).parameters
    assert list(parameters)[:5] == ["q", "k", "v", "grid", "prefix"]
    assert not {"attn_mask", "args", "kwargs"} & set(parameters)


def test_key_heads_must_divide_the_query_heads() -> None:
    q, k, v = tokens(heads=4)
    with pytest.raises(ValueError, match="as many key heads or a divisor of that number"):
        attend(q, k[:, :3], v[:, :3])
    with pytest.raises(ValueError, match="as many key heads or a divisor of that number"):
        attend(q[:, :2], k, v)


# Grids.


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((196,), r"Grid got \(196\); did you mean Grid\(14, 14\)\?"),
        ((4, 7, 7), r"Grid got \(4, 7, 7\); did you mean Grid\(7, 7\)\? A grid has two sides"),
        (((9, 12),), r"did you mean Grid\(9, 12\)\?"),
        ((200,), r"Grid got \(200\); pass Grid\(height, width\)"),
        ((), "Grid got nothing"),
    ],
)
def test_grids_without_two_sides_are_refused(sizes: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Grid(*sizes)


def test_grids_copy_and_pickle_and_take_names_and_numpy() -> None:
    grid = Grid(height=np.int64(9), width=np.uint8(12))  # type: ignore[arg-type]
    assert grid == GRID and hash(grid) == hash(GRID) and repr(grid) == "Grid(height=9, width=12)"
    assert copy.deepcopy(grid) == pickle.loads(pickle.dumps(grid)) == GRID
    with pytest.raises(TypeError, match="unexpected keyword"):
        Grid(9, breadth=12)  # type: ignore[call-arg]


@pytest.mark.parametrize("pair", [(9, 12), [9, 12], torch.Size((9, 12)), (np.int64(9), 12)])
def test_a_pair_is_accepted_wherever_a_grid_is(pair: Any) -> None:
    q, k, v = tokens()
    assert torch.equal(attend(q, k, v, grid=pair), attend(q, k, v))
    tiles = {"allow_dense": False, "error": 0.1}
    assert torch.equal(attend(q, k, v, grid=pair, **tiles), attend(q, k, v, **tiles))
    assert torch.equal(
        attend(q, k, v, grid=pair, rule="gamma:0.1"), attend(q, k, v, rule="gamma:0.1")
    )
    scores = q[..., PREFIX:, 0]
    trees = [screen(scores, grid, "gamma:0.1").leaf_index for grid in (pair, GRID)]
    assert torch.equal(*trees)
    keys = [screen_keys(q, k[:, :, PREFIX:], g, "gamma:0.1").leaf_index for g in (pair, GRID)]
    assert torch.equal(*keys)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (108, r"grid is 108; pass Grid\(height, width\), or the pair"),
        (144, r"did you mean Grid\(12, 12\)\?"),
        ((2, 9, 12), r"grid is \(2, 9, 12\); did you mean Grid\(9, 12\)\?"),
        ("9x12", "grid is '9x12'"),
        (None, "grid is None"),
        ((9.0, 12.0), "height is 9.0"),
    ],
)
def test_invalid_grids_are_refused(grid: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        attend(*tokens(), grid=grid)
    with pytest.raises(TypeError, match=message):
        screen(torch.zeros(108), grid, "gamma:0.1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix": 0}, r"k has 110 tokens; .* make 108; pass prefix=2 if the first 2"),
        ({"grid": Grid(10, 12)}, "make 122; pass the grid of the tokens"),
    ],
)
def test_token_count_errors_name_the_numbers(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(*tokens(), **settings)


# Numbers and names.


@pytest.mark.parametrize(
    ("plain", "scalar"),
    [
        ({"error": 0.1}, {"error": np.float64(0.1)}),
        ({"error": 0.5}, {"error": np.float32(0.5), "tau": np.float16(1.0)}),
        ({"leaves": 40}, {"leaves": np.int64(40)}),
        ({"leaves": 0.5}, {"leaves": np.float32(0.5)}),
        ({"prefix": PREFIX, "scale": 0.5}, {"prefix": np.int32(PREFIX), "scale": np.float32(0.5)}),
    ],
)
@pytest.mark.filterwarnings("ignore:screened_attention measured:UserWarning")  # few probes
def test_numpy_scalars_are_numbers(plain: Any, scalar: Any) -> None:
    qkv = tokens()
    results = [
        screened_attention(
            *qkv, **{"grid": GRID, "prefix": PREFIX, "allow_dense": False} | settings
        )
        for settings in (plain, scalar)
    ]
    assert torch.equal(results[0].output, results[1].output)
    assert results[0].stats.setting == results[1].stats.setting


def test_numpy_scalars_in_rules() -> None:
    qkv = tokens()
    for plain, scalar in (
        (rules.Gamma(0.25, 2), rules.Gamma(np.float32(0.25), np.int64(2))),
        (rules.Optimal(0.25), rules.Optimal(np.float64(0.25))),
        (rules.Optimal(leaves=7), rules.Optimal(leaves=np.int64(7))),
        (rules.Optimal(leaves=0.5), rules.Optimal(leaves=np.float32(0.5))),
        (rules.FixedDepth(2), rules.FixedDepth(np.int8(2))),
    ):
        assert str(plain) == str(scalar)
        assert torch.equal(attend(*qkv, rule=plain), attend(*qkv, rule=scalar))
    with pytest.raises(ValueError, match="leaves is 200"):
        attend(*qkv, rule=rules.Optimal(leaves=np.int64(200)))
    assert torch.equal(
        attend(*qkv, rule="gamma:0.1", max_depth=2),
        attend(*qkv, rule="gamma:0.1", max_depth=np.int64(2)),
    )


@pytest.mark.parametrize("name", ["tau", "scale", "error", "leaves", "prefix"])
@pytest.mark.parametrize("value", [np.bool_(True), True, torch.tensor(0.5), "0.5", 1j])
def test_invalid_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} is") as caught:
        attend(*tokens(), allow_dense=False, **{name: value})
    assert ("call .item()" in str(caught.value)) == isinstance(value, Tensor)


@pytest.mark.parametrize("name", ["gamma:0.005", "optimal:0.002", "fixed-depth:2", "global-mean"])
def test_rules_by_name(name: str) -> None:
    qkv = tokens()
    result = screened_attention(*qkv, grid=GRID, prefix=PREFIX, rule=name)
    assert result.stats.setting == name
    assert torch.equal(result.output, attend(*qkv, rule=rules.parse(name)))


@pytest.mark.parametrize(
    ("rule", "kind", "message"),
    [
        ("gama:0.005", ValueError, "rule 'gama:0.005' is unknown"),
        (rules.Gamma, TypeError, "Gamma is a class: pass an instance"),
        (0.005, TypeError, "rule is 0.005; pass one of bmfa.rules"),
    ],
)
def test_invalid_rules_are_refused(rule: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        attend(*tokens(), rule=rule)


# Masks.


@EVERY_FORM
@pytest.mark.parametrize("shape", [(2, GRID.size), (2, 1, 1, GRID.size), (1, 1, 1, GRID.size)])
def test_mask_shapes_of_sdpa(form: str, shape: tuple[int, ...]) -> None:
    q, k, v = (x.double() for x in tokens())
    valid = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3
    flat = valid.reshape(-1, GRID.size)
    mask = torch.cat((flat.new_ones(len(flat), PREFIX), flat), 1)[:, None, None]
    exact = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    exists = mask.transpose(2, 3)
    got = attend(q, k, v, valid=valid, **EXACT[form])
    torch.testing.assert_close(got.where(exists, 0.0), exact.where(exists, 0.0))


@EVERY_TORCH_FORM
def test_non_contiguous_masks(form: str) -> None:
    q, k, v = tokens()
    valid = (torch.rand(GRID.size, 2, generator=torch.Generator().manual_seed(1)) > 0.3).T
    got, want = (attend(q, k, v, valid=x, **EXACT[form]) for x in (valid, valid.contiguous()))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("valid", "kind", "message"),
    [
        (
            torch.ones(2, SIZE, dtype=torch.bool),
            ValueError,
            r"always valid: pass valid\[\.\.\., 2:\]",
        ),
        (torch.ones(2, 1, 1, SIZE, dtype=torch.bool), ValueError, "prefix tokens are always valid"),
        (
            torch.ones(2, 2, 1, GRID.size, dtype=torch.bool),
            ValueError,
            r"shape \(2, 2, 1, 108\)",
        ),
        (torch.zeros(2, GRID.size), TypeError, "valid is torch.float32; pass a torch.bool tensor"),
        (np.ones((2, GRID.size), bool), TypeError, "valid is ndarray"),
        (torch.ones(2, GRID.size, dtype=torch.bool, device="meta"), ValueError, "valid is on meta"),
    ],
)
def test_invalid_masks_are_refused(valid: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        attend(*tokens(), valid=valid)


@pytest.mark.parametrize("form", ["auto", "tiled", "tree"])
def test_masked_calls_refuse_nan_in_valid_tokens(form: str) -> None:
    valid = torch.ones(2, GRID.size, dtype=torch.bool)
    valid[:, 5] = False
    for place, name in enumerate(("queries", "keys")):
        qkv = tokens()
        qkv[place][0, 0, PREFIX + 3, 0] = torch.nan
        with pytest.raises(ValueError, match=f"{name} hold nan"):
            attend(*qkv, valid=valid, **EXACT[form])


# Tensors.


@EVERY_FORM
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_on_a_cpu_against_float64(form: str, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tokens())
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    got = attend(q, k, v, **EXACT[form])
    assert got.dtype == dtype
    # The output is rounded once; what comes before is float32, also for half types.
    slack = torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
    assert bool(((got.double() - exact).abs() <= slack * (1 + exact.abs())).all())


@pytest.mark.parametrize("form", ["auto", "tiled", "tree"])
def test_scores_beyond_the_range_of_float16(form: str) -> None:
    q, k, v = tokens()
    q, k, v = (300 * q).half(), (300 * k).half(), v.half()
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert float((q.double() @ k.double().mT).abs().max()) * 8**-0.5 > torch.finfo(torch.half).max
    torch.testing.assert_close(attend(q, k, v, **EXACT[form]).double(), exact, rtol=1e-2, atol=1e-2)


@EVERY_TORCH_FORM
def test_gradients_of_every_form_are_those_of_dense_attention(form: str) -> None:
    gradients = []
    for function in (scaled_dot_product_attention, lambda *x: attend(*x, **EXACT[form])):
        qkv = [x.double().requires_grad_() for x in tokens()]
        function(*qkv).sin().sum().backward()
        gradients.append([x.grad for x in qkv])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-9)


@EVERY_TORCH_FORM
def test_strides_do_not_change_the_output(form: str) -> None:
    q, k, v = tokens()
    want = attend(q, k, v, **EXACT[form])
    heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    dims_first = [x.mT.contiguous().mT for x in (q, k, v)]
    spread = [torch.stack((x, x), -1)[..., 0] for x in (q, k, v)]
    for other in (heads_last, dims_first, spread):
        torch.testing.assert_close(attend(*other, **EXACT[form]), want, rtol=1e-5, atol=1e-6)
    one = q[:1].expand(2, -1, -1, -1)
    torch.testing.assert_close(attend(one, k, v, **EXACT[form])[:1], want[:1], rtol=1e-5, atol=1e-6)


@EVERY_FORM
def test_values_of_a_different_dimension(form: str) -> None:
    q, k, v = tokens()
    exact = scaled_dot_product_attention(q.double(), k.double(), v[..., :3].double())
    got = attend(q, k, v[..., :3], **EXACT[form])
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            lambda q, k, v: (q[0], k[0], v[0]),
            ValueError,
            r"for one head, q.unsqueeze\(1\)",
        ),
        (lambda q, k, v: (q[0, 0], k, v), ValueError, r"pass \(B, heads, tokens, d\)"),
        (lambda q, k, v: (q.double(), k, v), TypeError, "pass one dtype and device"),
        (lambda q, k, v: (q, k, v.double()), ValueError, "same batch, heads, tokens, dtype"),
        (lambda q, k, v: (q, k.to("meta"), v.to("meta")), TypeError, "k torch.float32 on meta"),
        (lambda q, k, v: (q, k, v.to("meta")), ValueError, "v .* on meta"),
        (lambda q, k, v: (q.long(), k, v), TypeError, r"q has dtype torch.int64.*q.float\(\)"),
        (lambda q, k, v: (q.numpy(), k, v), TypeError, "q is ndarray; pass a torch.Tensor"),
        (
            lambda q, k, v: (q.to_sparse(), k, v),
            TypeError,
            "q is a torch.sparse_coo tensor; pass",
        ),
        (lambda q, k, v: (q[:1], k, v), ValueError, r"q has shape \(1, 2, 110, 8\) and k \(2,"),
        (lambda q, k, v: (q[..., :4], k, v), ValueError, r"q has shape \(2, 2, 110, 4\)"),
    ],
)
@pytest.mark.parametrize("form", ["auto", "tiled", "tree"])
def test_mismatched_tensors_are_refused(
    change: Any, kind: type[Exception], message: str, form: str
) -> None:
    with pytest.raises(kind, match=message):
        attend(*change(*tokens()), **EXACT[form])


def test_nested_tensors_are_refused_with_a_hint() -> None:
    q = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=torch.jagged)
    with pytest.raises(
        TypeError, match="q is a nested tensor; pass a dense one, padded, with valid="
    ):
        screened_attention(q, q, q, grid=GRID)


# Layers.


@pytest.mark.parametrize(
    ("layers", "meant"),
    [
        (np.array([5, 1]), (1, 5)),
        (np.arange(3), (0, 1, 2)),
        ([np.int64(2), 3], (2, 3)),
        (torch.tensor([4]), (4,)),
        ([-1], (11,)),
        ([0, -12, -2], (0, 10)),
        (range(2), (0, 1)),
    ],
)
def test_layers_as_arrays_and_from_the_end(layers: Any, meant: tuple[int, ...]) -> None:
    assert layer_indices(layers, 12) == meant
    assert all(type(index) is int for index in layer_indices(layers, 12))


@pytest.mark.parametrize(
    ("layers", "kind", "message"),
    [
        (3, TypeError, r"layers is 3; pass \[3\] for that layer alone, 'last-3' for the last 3"),
        (np.int64(3), TypeError, r"layers is 3; pass \[3\]"),
        (None, TypeError, "layers is None; pass 'all', 'last-K' or a list"),
        ([12], ValueError, "layers is 12; pass an integer from -12 to 11"),
        ([-13], ValueError, "layers is -13"),
        (np.array([True, False]), TypeError, "layers is True"),
        ([1.0], TypeError, "layers is 1.0"),
        (np.array([]), ValueError, "layers is empty"),
    ],
)
def test_invalid_layers_are_refused(layers: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        layer_indices(layers, 12)


def test_a_patched_model_takes_layers_from_the_end() -> None:
    model = embedded.EmbeddedViT(dim=24, depth=3, num_heads=3).eval()
    patch(model, rule="global-mean", layers=np.array([-1]))
    with bmfa.record(model) as recording, torch.no_grad():
        model(torch.zeros(1, 3, 112, 112))
    assert list(recording.layers) == [2]
