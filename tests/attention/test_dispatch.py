"""The choice between tiles and dense attention, and the reason that a call reports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bmfa import Grid, screened_attention
from bmfa.attention import dispatch
from bmfa.attention.call import Call, budget
from bmfa.attention.kernels.native import library

LONG = Grid(48, 48)
needs_native = pytest.mark.skipif(
    library.unavailable_reason() is not None, reason="needs the native kernels"
)
RECORDS = Path(__file__).parents[2] / "records"


def queries(grid: Grid) -> torch.Tensor:
    return torch.randn(1, 1, grid.size, 8, generator=torch.Generator().manual_seed(0))


def tiles(
    grid: Grid, query_grid: Grid | None = None, error: float | None = None, **leaves: float
) -> Call:
    """A call over tiles."""
    queries = grid.size if query_grid is None else query_grid.size
    target, expand = budget(grid, error, leaves.get("leaves"))
    return Call(grid, queries, query_grid=query_grid, error=target, expand=expand)


def test_expected_share_of_budgets_and_targets() -> None:
    grid = Grid(64, 64)
    assert dispatch.expected_share(tiles(grid, leaves=1.0)) == 1.0
    assert dispatch.expected_share(Call(grid, grid.size, expand=16)) == 16 / 64
    shares = [
        dispatch.expected_share(tiles(grid, error=x)) for x in (0.0, 0.01, 0.05, 0.1, 0.2, 1.0)
    ]
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True) and shares[-1] < 0.001


def rows_of(record: str) -> dict[str, dict[str, Any]]:
    """Rows of `bmfa bench attention` with the fewest tokens of tiles on CUDA, by their method."""
    rows = json.loads((RECORDS / record).read_text())["rows"]
    return {
        row["method"]: row
        for row in rows
        if row["n"] == dispatch.LEAST_TOKENS["cuda"] and row.get("density_percent") is not None
    }


def test_the_constants_are_those_of_the_records() -> None:
    slopes = []
    for record in ("attention-h200.json", "attention-saliency-h200.json"):
        rows = rows_of(record)
        first, last = rows["tiled-tiles:0"], rows["tiled-tiles:0.06"]
        dense = last["milliseconds"] * last["speedup"]
        share = (last["density_percent"] - first["density_percent"]) / 100
        slopes.append((last["milliseconds"] - first["milliseconds"]) / share / dense)
        assert 1 / first["speedup"] <= dispatch.OWN_GRID_COST["cuda"]
    assert sum(slopes) / 2 == pytest.approx(dispatch.EXPANDED_COST["cuda"], abs=0.05)
    assert max(slopes) - min(slopes) < 0.5
    measured = {name: row["density_percent"] / 100 for name, row in rows.items()}
    assert measured["auto"] == pytest.approx(dispatch.DEFAULT_EXPANDED_SHARE, abs=0.001)
    for error in (0.02, 0.05, 0.1):
        share = dispatch.expected_share(tiles(Grid(128, 128), error=error))
        assert share == pytest.approx(measured[f"tiled-error:{error}"], abs=0.04)
        assert share >= measured[f"tiled-error:{error}"]


@needs_native
def test_auto_reports_why_it_is_dense() -> None:
    saves, least = "which saves less than tiles cost", dispatch.LEAST_TOKENS[dispatch.NATIVE]
    for grid, criterion, reason in (
        (Grid(14, 14), {}, f"below {least} tokens, and there are 196"),
        (LONG, {}, None),
        (LONG, {"error": 0.0}, f"error 0 would expand 100% of the tiles, {saves}"),
        (LONG, {"leaves": 1.0}, saves),
        (LONG, {"leaves": 0.1}, None),
    ):
        q = 0.3 * queries(grid)
        result = screened_attention(q, q, q, grid=grid, **criterion)  # type: ignore[arg-type]
        assert result.stats.form == ("tiled" if reason is None else "dense")
        if reason is not None:
            assert reason in result.stats.reason and result.stats.density == 1.0
            exact = scaled_dot_product_attention(q, q, q)
            torch.testing.assert_close(result.output, exact)


def test_tiles_pay_off_earlier_in_a_graph() -> None:
    call, shape = Call(Grid(64, 64), 4096, expand=4), (4, 3, 4096, 64)
    assert dispatch.dense_faster_reason(shape, "cuda", call, in_graph=False) is not None
    assert dispatch.dense_faster_reason(shape, "cuda", call, in_graph=True) is None
    few = dispatch.dense_faster_reason((1, *shape[1:]), "cuda", call, in_graph=True)
    assert few is not None and "which saves less than tiles cost" in few


def test_a_query_grid_needs_as_many_queries_and_keys_as_self_attention() -> None:
    large = Grid(128, 128)
    for grid, query_grid, heads, dense in (
        (Grid(256, 256), large, 3, None),
        (large, Grid(256, 256), 3, None),
        (Grid(256, 256), Grid(96, 96), 12, "below 16384 tokens, and there are 9216"),
        (Grid(96, 96), Grid(256, 256), 12, "below 16384 tokens, and there are 9216"),
        (Grid(128, 129), large, 1, "which saves less than tiles cost"),
    ):
        call, shape = tiles(grid, query_grid), (1, heads, query_grid.size, 64)
        reason = dispatch.dense_faster_reason(shape, "cuda", call, in_graph=False)
        assert reason is None if dense is None else reason is not None and dense in reason
    # Queries and keys count alike, not the square of the queries.
    for leaves, expected in ((0.05, True), (0.5, False)):
        call = tiles(Grid(256, 256), Grid(64, 64), leaves=leaves)
        found = dispatch.dense_faster_reason((1, 3, 4096, 64), "cuda", call, in_graph=False)
        assert (found is None) == expected, found


def test_a_valid_call_does_not_admit_an_invalid_one_that_equals_it() -> None:
    q, grid = queries(Grid(6, 6)), {"grid": Grid(6, 6)}
    for accepted, refused in (
        ({"error": 1.0}, {"error": True}),
        ({"tau": 1.0}, {"tau": True}),
        ({"leaves": 1.0}, {"leaves": True}),
        ({"prefix": 0}, {"prefix": 0.0}),
        ({"allow_dense": True}, {"allow_dense": 1}),
        ({"grid": (6, 6)}, {"grid": (6.0, 6.0)}),
    ):
        screened_attention(q, q, q, **(grid | accepted))  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError)):
            screened_attention(q, q, q, **(grid | refused))  # type: ignore[arg-type]


def test_autocast_sets_the_dtype_of_every_call() -> None:
    q, grid = queries(Grid(6, 6)), Grid(6, 6)
    assert screened_attention(q, q, q, grid=grid).output.dtype == q.dtype
    with torch.autocast("cpu", torch.float16):
        assert screened_attention(q, q, q, grid=grid).output.dtype == torch.float16
        half = q.half()
        for _ in "ab":
            assert screened_attention(half, half, half, grid=grid).output.dtype == torch.float16
    assert screened_attention(q, q, q, grid=grid).output.dtype == q.dtype


@needs_native
def test_auto_is_dense_if_the_target_expands_most_tiles() -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(3, 1, 1, LONG.size, 32)
    result = screened_attention(q, k, v, grid=LONG, error=0.1)
    assert result.stats.form == "dense"
    assert "error 0.1 expands more than 87% of the tiles" in result.stats.reason
    assert result.stats.backend == "native"
    exact = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(result.output, exact)
    constant_queries = q[:, :, :1].expand_as(q).contiguous()
    result = screened_attention(constant_queries, k, v, grid=LONG, error=0.5)
    assert result.stats.form == "tiled"  # the same call with other numbers
    result = screened_attention(q, k, v, grid=LONG, error=0.1, backend="eager")
    assert result.stats.form == "tiled" and result.stats.density > 0.43


@needs_native
def test_exact_attention_is_native_from_the_size_at_which_it_is_faster(monkeypatch):
    for setting in set(library.supported_sets()) & set(library.built_sets()):
        monkeypatch.setenv("BMFA_NATIVE", setting)
        for grid in (Grid(6, 6), LONG):
            q = queries(grid)
            stats = screened_attention(q, q, q, grid=grid, error=0.0).stats
            native = grid.size**2 >= dispatch.LEAST_EXACT_SCORES[setting]
            assert stats.backend == ("native" if native else "dense")
            assert stats.form == "dense" and stats.error is not None and stats.error.estimate == 0


@needs_native
def test_what_the_native_kernels_cannot_run_is_dense_and_says_why() -> None:
    call: dict[str, Any] = {"shape": (1, 3, LONG.size, 64), "dtype": torch.float32}
    call |= {"device": "cpu", "grid": LONG, "in_graph": False}
    assert dispatch.exact_choice(**call, options={}) is None
    for change, reason in (
        ({"requires_grad": True}, "gradients are required"),
        ({"dtype": torch.float64}, "the dtype is torch.float64"),
        ({"shape": (1, 3, LONG.size, 300)}, "a head has 300 channels"),
        ({"device": "mps"}, "the tensors are on mps"),
    ):
        choice = dispatch.exact_choice(**(call | change), options={})
        assert choice is not None and choice.backend == "dense" and reason in choice.reason
        assert choice.reason.startswith("auto: dense, because native cannot")
        exact = dispatch.exact_choice(**(call | change), options={"error": 0.0})
        assert exact is not None and exact.backend == "dense"


def test_without_native_kernels_calls_are_dense_and_say_why(monkeypatch):
    monkeypatch.setenv("BMFA_NATIVE", "off")
    reason = library.unavailable_reason()
    q = queries(LONG)
    stats = screened_attention(q, q, q, grid=LONG).stats
    assert (stats.backend, stats.form) == ("dense", "dense")
    assert stats.reason == f"auto: dense, because native cannot run: {reason}"
    with pytest.raises(ValueError, match="backend='native' cannot run this call"):
        screened_attention(q, q, q, grid=LONG, backend="native")
    small = queries(Grid(6, 6))
    why = screened_attention(small, small, small, grid=Grid(6, 6)).stats.reason
    assert why.startswith("auto: dense attention is as fast below")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dense_calls_compile_once() -> None:
    grid, counters = Grid(14, 14), torch._dynamo.utils.counters["stats"]
    torch.compiler.reset()
    counters.clear()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return screened_attention(q, q, q, grid=grid).output

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q = queries(grid)
    torch.testing.assert_close(compiled(q), attend(q))
    for size in (3, 4, 5):  # other calls do not cause a recompilation
        other = queries(Grid(size, size))
        screened_attention(other, other, other, grid=Grid(size, size))
    compiled(q)
    assert counters["unique_graphs"] == 1
    torch.compiler.reset()
