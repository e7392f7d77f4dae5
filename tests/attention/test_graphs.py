"""Compiled and exported calls, meta and fake tensors, empty tensors, and invalid queries."""

from collections.abc import Iterator
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from bmfa import Grid, certify, rules, screened_attention
from bmfa.models import embedded, patch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
SMALL, LONG, PREFIX = Grid(12, 16), Grid(48, 48), 1
TILED = {"allow_dense": False, "error": 0.1}
CALLS: dict[str, tuple[Grid, dict[str, Any]]] = {
    "dense": (SMALL, {}),
    "tiled": (SMALL, TILED),
    "auto": (LONG, {"error": 0.1}),
    "leaves": (SMALL, {"leaves": 0.4, "allow_dense": False, "backend": "eager"}),
    "query grid": (SMALL, {"query_grid": Grid(9, 7), "leaves": 0.5, "allow_dense": False}),
    "optimal": (SMALL, {"rule": rules.Optimal(0.002)}),
    "limited": (SMALL, {"rule": "gamma-h2:0.005", "max_depth": 3}),
    "random": (SMALL, {"rule": rules.RandomQuadrants(0.5, seed=7)}),
    "leaf-budget": (SMALL, {"rule": rules.Optimal(leaves=0.2)}),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Attend(nn.Module):
    """A call as a function of q, k and v."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.compiler.reset()
        self.name, (self.grid, self.settings) = name, CALLS[name]

    def tokens(self, seed: int = 0, batch: int = 2, size: float = 0.1) -> list[Tensor]:
        """Random q, k, v with one key head; on LONG, `auto` selects tiles for size 0.1 and dense
        attention for 1.0."""
        generator = torch.Generator().manual_seed(seed)
        queries = self.settings.get("query_grid", self.grid)
        heads = 1 if self.grid == LONG else 2
        q, k, v = (
            torch.randn(batch, count, PREFIX + grid.size, 16, generator=generator)
            for count, grid in ((heads, queries), (1, self.grid), (1, self.grid))
        )
        return [size * q, k, v]

    def masked(self, seed: int, filling: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        """A mask of the keys, one of the queries, and q, k, v with a number in missing tokens."""
        valid = torch.rand(2, self.grid.size, generator=torch.Generator().manual_seed(seed)) > 0.3
        exists = torch.cat((valid.new_ones(2, PREFIX), valid), 1)[:, None, :, None]
        q, k, v = self.tokens()
        own = "query_grid" in self.settings
        seen = torch.ones_like(q[..., :1], dtype=torch.bool) if own else exists
        k, v = (x.masked_fill(~exists, filling) for x in (k, v))
        return valid, seen, [q.masked_fill(~seen, filling), k, v]

    def call(self, *qkv: Tensor, **more: Any) -> Any:
        common = {"grid": self.grid, "prefix": PREFIX}
        return screened_attention(*qkv, **common | self.settings | more)

    def forward(self, *qkv: Tensor) -> Tensor:
        return self.call(*qkv).output

    def assert_same(self, got: Tensor, want: Tensor) -> None:
        """Dense attention in a graph is that of torch; elsewhere it may be that of the native
        kernels."""
        if self.name == "dense":
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(got, want), self.name


def test_calls_compile_into_one_graph() -> None:
    """`dynamic` marks every size as one that may change; the batch changes without it, too."""
    for name, dynamic in (*((x, None) for x in CALLS), ("tiled", True), ("optimal", True)):
        attend = Attend(name)
        compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for seed, size in ((0, 0.1), (1, 1.0)):  # every input selects its own tiles
            qkv = attend.tokens(seed, size=size)
            attend.assert_same(compiled(*qkv), attend(*qkv))
        if dynamic:
            qkv = attend.tokens(batch=3)
            attend.assert_same(compiled(*qkv), attend(*qkv))


def test_calls_are_exported() -> None:
    batch = torch.export.Dim("batch", min=1, max=16)
    for name, strict in (*((x, False) for x in CALLS), ("tiled", True), ("optimal", True)):
        attend = Attend(name)
        shapes, example = (({0: batch},) * 3,), tuple(attend.tokens())
        exported = torch.export.export(attend, example, dynamic_shapes=shapes, strict=strict)
        program = exported.module()
        for seed, size, count in ((1, 0.1, 3), (2, 1.0, 1)):
            qkv = attend.tokens(seed, count, size)
            attend.assert_same(program(*qkv), attend(*qkv))


def test_gradients_of_compiled_calls() -> None:
    for name in ("tiled", "auto", "query grid", "optimal"):
        attend = Attend(name)
        gradients = []
        for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            qkv = [x.double().requires_grad_() for x in attend.tokens()]
            function(*qkv).sin().sum().backward()
            gradients.append([x.grad for x in qkv])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


def test_the_operator_passes_opcheck() -> None:
    attend = Attend("tiled")
    seen: list[tuple[Any, ...]] = []

    def keep(graph: Any, inputs: Any) -> Any:
        seen.extend(n.args for n in graph.graph.nodes if "screened_attention" in str(n.target))
        return graph

    torch.compile(attend, fullgraph=True, backend=keep)(*attend.tokens())
    (arguments,) = seen
    qkv = [x.double().requires_grad_() for x in attend.tokens(batch=1)]
    torch.library.opcheck(
        torch.ops.bmfa.screened_attention.default,
        (*qkv, None, *arguments[4:]),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_masked_calls_compile() -> None:
    for attend in map(Attend, ("dense", "tiled", "query grid", "optimal")):
        valid, seen, qkv = attend.masked(3, 0.0)
        compiled = torch.compile(
            lambda *x: attend.call(*x[:3], valid=x[3]).output, fullgraph=True, backend="aot_eager"
        )
        got, want = compiled(*qkv, valid), attend.call(*qkv, valid=valid).output
        attend.assert_same(got.where(seen, 0.0), want.where(seen, 0.0))


def test_results_of_compiled_calls() -> None:
    """`auto` is tiled or dense in the same graph."""
    for name, size, form in (
        ("tiled", 0.1, "tiled"),
        ("optimal", 0.1, "tree"),
        ("auto", 0.1, "tiled"),
        ("auto", 1.0, "dense"),
    ):
        attend = Attend(name)
        qkv = attend.tokens(size=size)
        got = torch.compile(lambda *qkv: attend.call(*qkv), backend="eager")(*qkv)
        want = attend.call(*qkv)
        assert want.stats.form == form and got.stats.error == want.stats.error
        assert got.stats.density == want.stats.density
        assert (got.stats.error is None) == (name == "optimal")
        if form != "dense":
            assert torch.equal(got.tree.leaf_index, want.tree.leaf_index)
            assert got.stats.leaf_ratio == want.stats.leaf_ratio


def test_compiled_tiles_still_refuse_nan() -> None:
    attend = Attend("tiled")
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v = attend.tokens()
    q[0, 0, 3, 0] = torch.nan
    with pytest.raises(ValueError, match="queries hold nan"):
        compiled(q, k, v)


def test_meta_and_fake_tensors_have_output_shapes() -> None:
    for attend in map(Attend, CALLS):
        q, k, v = attend.tokens()
        shape = attend(q, k, v).shape
        output = attend(q.to("meta"), k.to("meta"), v[..., :8].to("meta"))
        assert output.is_meta and output.dtype == torch.float32
        assert output.shape == (*shape[:3], 8)
        half = [x.half() for x in (q, k, v)]
        with FakeTensorMode() as mode:
            fake = attend(*map(mode.from_tensor, half))
        assert fake.shape == shape and fake.dtype == torch.float16
        assert fake.device.type == "cpu"
    # They do not affect later calls.
    bad = torch.full((1, 1, 36, 8), torch.nan)
    assert screened_attention(*[bad.to("meta")] * 3, grid=(6, 6)).output.is_meta
    with pytest.raises(ValueError, match="queries hold nan"):
        screened_attention(bad, bad, bad, grid=(6, 6))


def test_empty_inputs_give_empty_outputs() -> None:
    for attend in map(Attend, CALLS):
        own = "query_grid" in attend.settings
        queries = attend.tokens()[0].shape[2]
        for batch, heads, count in ((0, 2, queries), (2, 0, queries), (2, 2, 0)):
            q = torch.zeros(batch, heads, count, 16, requires_grad=True)
            k = torch.zeros(batch, heads, PREFIX + attend.grid.size, 16, requires_grad=True)
            v = torch.zeros(batch, heads, PREFIX + attend.grid.size, 8, requires_grad=True)
            valid = torch.ones(batch, attend.grid.size, dtype=torch.bool)
            if count == 0 and "rule" not in attend.settings:
                with pytest.raises(ValueError, match=r"q has 0"):
                    attend.call(q, k, v)
                continue
            for mask in (None, valid):
                result = attend.call(q, k, v, valid=mask)
                assert result.output.shape == (batch, heads, count, 8)
                assert own or result.tree.shape == (batch, heads, count)
                result.output.sum().backward()
                assert q.grad is not None and q.grad.shape == q.shape


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_calls_are_refused() -> None:
    for attend in map(Attend, CALLS):
        with pytest.raises(RuntimeError, match=r"torch\.compile or torch\.export"):
            torch.jit.trace(attend, tuple(attend.tokens()))


def test_invalid_queries_may_hold_any_value() -> None:
    for attend in map(Attend, CALLS):
        want = None
        for filling in (1.0, torch.nan, torch.inf):
            valid, seen, qkv = attend.masked(4, filling)
            got = attend.call(*qkv, valid=valid)
            output = got.output.where(seen, 0.0)
            want = output if want is None else want
            assert torch.equal(output, want) and bool(got.output.isfinite().all())
            assert all(bool(bound.isfinite().all()) for bound in certify(*qkv, got))
    attend = Attend("dense")
    valid, seen, _ = attend.masked(4, 0.0)
    clean, dirty = ([x.double() for x in attend.masked(4, x)[2]] for x in (0.0, torch.nan))
    k, v = (x.expand(-1, 2, -1, -1) for x in clean[1:])
    exact = scaled_dot_product_attention(clean[0], k, v, attn_mask=seen.mT).where(seen, 0.0)
    for settings in ({"rule": rules.ExactGap(0.0)}, {"allow_dense": False, "error": 0.0}, {}):
        got = attend.call(*dirty, valid=valid, **settings).output
        torch.testing.assert_close(got.where(seen, 0.0), exact)


@pytest.mark.skipif(
    which("g++") is None and which("clang++") is None, reason="needs a C++ compiler"
)
@torch.no_grad()
def test_inductor_compiles_optimal_trees() -> None:
    for rule in ("optimal:0.002", "optimal-error:0.05"):
        attend = Attend("optimal")
        attend.settings = {"rule": rule}
        qkv = attend.tokens()
        assert torch.equal(torch.compile(attend, fullgraph=True)(*qkv), attend(*qkv))


@torch.no_grad()
def test_patched_models_on_meta_and_without_images() -> None:
    for settings in (TILED, {"rule": "optimal:0.002"}):
        model = embedded.EmbeddedViT(dim=24, depth=2, num_heads=3).eval()
        patch(model, layers="all", **settings)
        classes = model(torch.randn(2, 3, 112, 112)).shape[1]
        assert model(torch.randn(0, 3, 112, 112)).shape == (0, classes)
        output = model.to("meta")(torch.empty(2, 3, 112, 112, device="meta"))
        assert output.is_meta and output.shape == (2, classes)
