"""Compiled and exported calls, meta and fake tensors, empty tensors, and invalid queries."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from bmfa import Grid, certify, rules, screened_attention
from bmfa.models import embedded, patch
from bmfa.packages import load_package

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

SMALL, LONG, PREFIX = Grid(12, 16), Grid(48, 48), 1
TILED = {"allow_dense": False, "error": 0.1}
CALLS: dict[str, tuple[Grid, dict[str, Any]]] = {
    "dense": (SMALL, {}),
    "tiled": (SMALL, TILED),
    "auto": (LONG, {"error": 0.1}),
    "leaves": (LONG, {"leaves": 0.1}),
    "eager": (SMALL, {**TILED, "backend": "eager"}),
    "optimal": (SMALL, {"rule": rules.Optimal(0.002)}),
    "limited": (SMALL, {"rule": "gamma-h2:0.005", "max_depth": 3}),
    "random": (SMALL, {"rule": rules.RandomQuadrants(0.5, seed=7)}),
    "leaf-budget": (SMALL, {"rule": rules.Optimal(leaves=0.2)}),
}
EVERY_CALL = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tokens(grid: Grid, seed: int = 0, batch: int = 2, size: float = 0.1) -> tuple[Tensor, ...]:
    """Random q, k, v; on LONG, `auto` selects tiles for size 0.1 and dense attention for 1.0."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, 1, PREFIX + grid.size, 16, generator=generator)
    return size * q, k, v


class Attend(nn.Module):
    """A call as a function of q, k and v."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.grid, self.settings = CALLS[name]

    def call(self, *qkv: Tensor, **more: Any) -> Any:
        return screened_attention(
            *qkv, **{"grid": self.grid, "prefix": PREFIX} | self.settings | more
        )

    def forward(self, *qkv: Tensor) -> Tensor:
        return self.call(*qkv).output


def assert_same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Dense attention in a graph is that of torch; elsewhere it may be that of the native kernels."""
    if name == "dense":
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(got, want)


@EVERY_CALL
@pytest.mark.parametrize("dynamic", [None, True])
def test_calls_compile_into_one_graph(name: str, dynamic: bool | None) -> None:
    attend = Attend(name)
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seed, size in ((0, 0.1), (1, 1.0)):  # every input selects its own tiles
        qkv = tokens(attend.grid, seed, size=size)
        assert_same(name, compiled(*qkv), attend(*qkv))
    if dynamic:
        qkv = tokens(attend.grid, batch=3)
        assert_same(name, compiled(*qkv), attend(*qkv))


def test_auto_is_tiled_or_dense_in_the_same_graph() -> None:
    attend = Attend("auto")
    forms = [attend.call(*tokens(LONG, size=size)).stats.form for size in (0.1, 1.0)]
    assert forms == ["tiled", "dense"]  # the two inputs of the test above


@EVERY_CALL
@pytest.mark.parametrize("strict", [False, True])
def test_calls_are_exported(name: str, strict: bool) -> None:
    attend = Attend(name)
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(
        attend, tokens(attend.grid), dynamic_shapes=(({0: batch},) * 3,), strict=strict
    ).module()
    for seed, size, count in ((1, 0.1, 3), (2, 1.0, 1)):
        qkv = tokens(attend.grid, seed, count, size)
        assert_same(name, program(*qkv), attend(*qkv))


@pytest.mark.parametrize("name", ["tiled", "auto", "optimal", "limited", "leaf-budget"])
def test_gradients_of_compiled_calls(name: str) -> None:
    attend = Attend(name)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (attend, compiled):
        qkv = [x.double().requires_grad_() for x in tokens(attend.grid)]
        function(*qkv).sin().sum().backward()
        gradients.append([x.grad for x in qkv])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


def test_the_operator_passes_opcheck() -> None:
    attend = Attend("tiled")
    seen: list[tuple[Any, ...]] = []

    def keep(graph: Any, inputs: Any) -> Any:
        seen.extend(n.args for n in graph.graph.nodes if "screened_attention" in str(n.target))
        return graph

    torch.compile(attend, fullgraph=True, backend=keep)(*tokens(SMALL))
    (arguments,) = seen
    qkv = [x.double().requires_grad_() for x in tokens(SMALL, batch=1)]
    torch.library.opcheck(
        torch.ops.bmfa.screened_attention.default, (*qkv, None, *arguments[4:]),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


@EVERY_CALL
def test_masked_calls_compile(name: str) -> None:
    attend = Attend(name)
    valid = torch.rand(2, attend.grid.size, generator=torch.Generator().manual_seed(3)) > 0.3
    compiled = torch.compile(
        lambda *x: attend.call(*x[:3], valid=x[3]).output, fullgraph=True, backend="aot_eager"
    )
    qkv = tokens(attend.grid)
    got, want = compiled(*qkv, valid), attend.call(*qkv, valid=valid).output
    exists = torch.cat((valid.new_ones(2, PREFIX), valid), 1)[:, None, :, None]
    assert_same(name, got.where(exists, 0.0), want.where(exists, 0.0))


@pytest.mark.parametrize("name", ["tiled", "optimal"])
def test_trees_of_compiled_calls(name: str) -> None:
    attend = Attend(name)
    compiled = torch.compile(lambda *qkv: attend.call(*qkv), backend="eager")
    qkv = tokens(attend.grid)
    got, want = compiled(*qkv), attend.call(*qkv)
    assert torch.equal(got.tree.leaf_index, want.tree.leaf_index)
    assert got.stats.leaf_ratio == want.stats.leaf_ratio
    assert got.stats.density == want.stats.density
    assert got.stats.error == want.stats.error
    assert (got.stats.error is None) == (name == "optimal")


@pytest.mark.parametrize("size", [0.1, 1.0])
def test_the_error_of_compiled_calls_that_may_be_dense(size: float) -> None:
    attend = Attend("auto")
    qkv = tokens(LONG, size=size)
    got = torch.compile(lambda *qkv: attend.call(*qkv), backend="eager")(*qkv).stats.error
    want = attend.call(*qkv).stats.error
    assert got == want and got is not None and got.met and (got.estimate == 0) == (size == 1.0)


def test_compiled_tiles_still_refuse_nan() -> None:
    attend = Attend("tiled")
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v = tokens(SMALL)
    q[0, 0, 3, 0] = torch.nan
    with pytest.raises(ValueError, match="queries hold nan"):
        compiled(q, k, v)


@pytest.mark.skipif(
    which("g++") is None and which("clang++") is None, reason="needs a C++ compiler"
)
@pytest.mark.parametrize("rule", ["optimal:0.002", "optimal-error:0.05"])
def test_inductor_compiles_optimal(rule: str) -> None:
    def attend(*qkv: Tensor) -> Tensor:
        return screened_attention(*qkv, grid=SMALL, prefix=PREFIX, rule=rule).output

    qkv = tokens(SMALL)
    assert torch.equal(torch.compile(attend, fullgraph=True)(*qkv), attend(*qkv))


@EVERY_CALL
def test_meta_and_fake_tensors_have_output_shapes(name: str) -> None:
    attend = Attend(name)
    real = attend.call(*tokens(attend.grid))
    qkv = [
        x[..., :8].to("meta") if i == 2 else x.to("meta") for i, x in enumerate(tokens(attend.grid))
    ]
    result = attend.call(*qkv)
    assert result.output.is_meta and result.output.dtype == torch.float32
    assert result.output.shape == (*real.output.shape[:3], 8)
    with FakeTensorMode() as mode:
        fake = attend(*(mode.from_tensor(x.half()) for x in tokens(attend.grid)))
    assert fake.shape == real.output.shape and fake.dtype == torch.float16
    assert fake.device.type == "cpu"


def test_calls_on_meta_do_not_affect_later_calls() -> None:
    grid = Grid(6, 6)
    q = torch.randn(1, 1, 36, 8, device="meta")
    assert screened_attention(q, q, q, grid=grid).output.is_meta
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(1, 1, 36, 8))
        screened_attention(fake, fake, fake, grid=grid)
    bad = torch.full((1, 1, 36, 8), torch.nan)
    with pytest.raises(ValueError, match="queries hold nan"):
        screened_attention(bad, bad, bad, grid=grid)


@EVERY_CALL
@pytest.mark.parametrize("empty", ["batch", "heads", "queries"])
def test_empty_inputs_give_empty_outputs(name: str, empty: str) -> None:
    attend = Attend(name)
    shapes = {"batch": (0, 2, 1.0), "heads": (2, 0, 1.0), "queries": (2, 2, 0.0)}
    batch, heads, queries = shapes[empty]
    count = int(queries * (PREFIX + attend.grid.size))
    q = torch.zeros(batch, heads, count, 16, requires_grad=True)
    k = torch.zeros(batch, heads, PREFIX + attend.grid.size, 16, requires_grad=True)
    v = torch.zeros(batch, heads, PREFIX + attend.grid.size, 8, requires_grad=True)
    valid = torch.ones(batch, attend.grid.size, dtype=torch.bool)
    if empty == "queries" and "rule" not in attend.settings:
        with pytest.raises(ValueError, match=r"and q has 0; pass query_grid="):
            attend.call(q, k, v)
        return
    for mask in (None, valid):
        result = attend.call(q, k, v, valid=mask)
        assert result.output.shape == (batch, heads, count, 8)
        assert result.tree.shape == (batch, heads, count)
        result.output.sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape


@EVERY_CALL
def test_a_traced_call_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.compile or torch\.export"):
        torch.jit.trace(Attend(name), tokens(CALLS[name][0]))


@EVERY_CALL
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_invalid_queries_may_hold_any_value(name: str, bad: float) -> None:
    attend = Attend(name)
    grid = attend.grid
    valid = torch.rand(2, grid.size, generator=torch.Generator().manual_seed(4)) > 0.2
    clean = tokens(grid)
    exists = torch.cat((valid.new_ones(2, PREFIX), valid), 1)[:, None, :, None]
    corrupted = [x.masked_fill(~exists, bad) for x in clean]
    got, want = (attend.call(*x, valid=valid) for x in (corrupted, clean))
    assert torch.equal(got.output.where(exists, 0.0), want.output.where(exists, 0.0))
    assert bool(got.output.isfinite().all())
    for bound in certify(*corrupted, got):
        assert bool(bound.isfinite().all())


def test_invalid_queries_do_not_change_exact_outputs() -> None:
    q, k, v = (x.double() for x in tokens(SMALL))
    valid = torch.rand(2, SMALL.size, generator=torch.Generator().manual_seed(4)) > 0.2
    mask = torch.cat((valid.new_ones(2, PREFIX), valid), 1)[:, None, None]
    exact = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    exists = mask.transpose(2, 3)
    q, k, v = (x.masked_fill(~exists, torch.nan) for x in (q, k, v))
    for settings in ({"rule": rules.ExactGap(0.0)}, {"allow_dense": False, "error": 0.0}, {}):
        result = screened_attention(q, k, v, grid=SMALL, prefix=PREFIX, valid=valid, **settings)
        torch.testing.assert_close(result.output.where(exists, 0.0), exact.where(exists, 0.0))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install 'bmfa[triton]'")
def test_certified_triton_tiles_compile() -> None:
    grid, device = Grid(16, 16), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    qkv = [x.to(device) for x in torch.randn(3, 1, 2, grid.size, 32)]

    def attend(*qkv: Tensor) -> Any:
        return screened_attention(*qkv, grid=grid, leaves=0.5, allow_dense=False, backend="triton")

    with torch.no_grad():
        compiled, plain = torch.compile(attend, backend="eager")(*qkv), attend(*qkv)
    assert torch.equal(compiled.tree.leaf_index, plain.tree.leaf_index)
    assert compiled.stats.error == plain.stats.error
    for ours, theirs in zip(certify(*qkv, compiled), certify(*qkv, plain), strict=True):
        assert torch.equal(ours, theirs)


# Models: q, k and v come from a network, and the grid from its patches.


def timm_model(size: int) -> nn.Module:
    if find_spec("timm") is None:
        pytest.skip("needs timm: pip install 'bmfa[models]'")
    torch.manual_seed(0)
    options = {"patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    model: nn.Module = load_package("timm").create_model(
        "vit_tiny_patch16_224", img_size=size, **options
    )
    return model.eval()


def embedded_model(depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return embedded.EmbeddedViT(dim=24, depth=depth, num_heads=3).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any]]] = {
    "timm-tiled": (lambda: timm_model(32), 32, TILED),
    "timm-auto": (lambda: timm_model(192), 192, {"error": 0.1}),  # 48x48 tokens
    "timm-optimal": (lambda: timm_model(32), 32, {"rule": "optimal:0.002"}),
    "embedded-tiled": (embedded_model, 112, TILED),
    "embedded-optimal": (embedded_model, 112, {"rule": "optimal:0.002"}),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def patched(name: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    """A patched model, and images for it."""
    make, size, settings = MODELS[name]

    def images(batch: int = 2, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, 3, size, size, generator=generator)

    return patch(make(), layers="all", **settings), images


@EVERY_MODEL
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_patched_models_compile_into_one_graph(name: str, dynamic: bool | None) -> None:
    model, images = patched(name)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seed in (0, 1):
        torch.testing.assert_close(compiled(images(seed=seed)), model(images(seed=seed)))


@EVERY_MODEL
@torch.no_grad()
def test_patched_models_are_exported(name: str) -> None:
    model, images = patched(name)
    shapes = ({0: torch.export.Dim("batch", min=1, max=16)},)
    program = torch.export.export(model, (images(),), dynamic_shapes=shapes).module()
    torch.testing.assert_close(program(images(3, seed=1)), model(images(3, seed=1)))


@EVERY_MODEL
@torch.no_grad()
def test_patched_models_on_meta_and_without_images(name: str) -> None:
    model, images = patched(name)
    classes = model(images()).shape[1]
    assert model(images(0)).shape == (0, classes)
    output = model.to("meta")(images().to("meta"))
    assert output.is_meta and output.shape == (2, classes)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["timm-tiled", "embedded-optimal"])
def test_traced_models_are_refused(name: str) -> None:
    model, images = patched(name)
    with pytest.raises(RuntimeError, match=r"torch\.compile or torch\.export"):
        torch.jit.trace(model, images())


@pytest.mark.skipif(
    which("g++") is None and which("clang++") is None, reason="needs a C++ compiler"
)
@torch.no_grad()
def test_inductor_compiles_a_model_with_optimal_trees() -> None:
    images = patched("embedded-optimal")[1]
    model = patch(embedded_model(depth=1), layers="all", rule="optimal:0.002")
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True)(images()), model(images()), rtol=1e-4, atol=1e-5
    )
