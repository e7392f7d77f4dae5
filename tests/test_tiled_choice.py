"""When tiles are taken for faster than dense attention, and what a call then says."""

import pytest
import torch

from bmfa import Grid, screened_attention, tiled
from bmfa.tiled import Question
from bmfa.tiling import Tiling

LONG = Grid(48, 48)


def queries(grid: Grid, heads: int = 1) -> torch.Tensor:
    return torch.randn(1, heads, grid.size, 8, generator=torch.Generator().manual_seed(0))


def test_a_budget_is_known_and_a_target_is_guessed() -> None:
    tiling = Tiling(Grid(64, 64))
    assert Question.of(tiling, None, 1.0).share(tiling.tiles) == 1.0
    assert Question(None, 16).share(tiling.tiles) == 16 / 64
    shares = [Question(error, None).share(tiling.tiles) for error in (0.0, 0.01, 0.05, 0.1, 0.2)]
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True)
    # What 64x64 tokens of four blocks of DeiT-Tiny expand: records/attention-h200.json.
    for share, measured in zip(shares[2:], (0.30, 0.16, 0.05), strict=True):
        assert share == pytest.approx(measured, abs=0.07)


@pytest.mark.parametrize(
    ("grid", "asked", "reason"),
    [
        (Grid(14, 14), {}, "dense attention is as fast below 2048 tokens, and there are 196"),
        (LONG, {}, None),
        (LONG, {"error": 0.05}, None),
        (
            LONG,
            {"error": 0.0},
            "error 0 would expand 100% of the tiles, which saves less than tiles cost",
        ),
        (LONG, {"leaves": 1.0}, "which saves less than tiles cost"),
        (LONG, {"leaves": 0.1}, None),
    ],
)
def test_auto_says_why_it_is_dense(grid: Grid, asked: dict[str, float], reason: str | None) -> None:
    q = queries(grid)
    result = screened_attention(q, q, q, grid=grid, **asked)
    assert result.stats.form == ("tiled" if reason is None else "dense")
    if reason is not None:
        assert reason in result.stats.why and result.stats.density == 1.0
        exact = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        torch.testing.assert_close(result.output, exact)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_calls_of_several_sizes_choose_alike() -> None:
    compiled = torch.compile(
        lambda q: screened_attention(q, q, q, grid=LONG, error=0.0).output, backend="eager"
    )
    for batch in (1, 2, 3):  # from the second on the size is a symbol
        q = queries(LONG).expand(batch, -1, -1, -1).contiguous()
        exact = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        torch.testing.assert_close(compiled(q), exact)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_may_take_tiles_where_single_calls_are_dense() -> None:
    grid = Grid(64, 64)
    q = torch.randn(4, 3, grid.size, 64, device="cuda", dtype=torch.bfloat16)
    tiling, question = Tiling(grid), Question(0.1, None)
    assert tiled.slower_than_dense(q, tiling, question) is not None
    with tiled.as_recorded():
        assert tiled.slower_than_dense(q, tiling, question) is None
    assert tiled.slower_than_dense(q, tiling, question) is not None
    with tiled.as_recorded():
        few = tiled.slower_than_dense(q[:1], tiling, question)
    assert few is not None and "which saves less than tiles cost" in few
