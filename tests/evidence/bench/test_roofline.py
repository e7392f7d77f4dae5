"""Times of single kernels and their limits, with a timer that counts launches."""

import pytest
import torch

from bmfa import Grid, screened_attention
from bmfa.cli import main
from bmfa.evidence.bench import roofline
from bmfa.evidence.bench.mean_tiles import mean_tile_attention
from bmfa.evidence.bench.roofline import Limits, TimedSequence, kernel_rows, recorded_sequences

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KERNELS = ["pool", "score", "select", "residual", "attention"]
GRID, PREFIX, DIM, EXPAND = Grid(16, 16), 1, 32, 2
LIMITS = Limits(bytes_per_second=1e9, flops_per_second=1e12)


def call():
    shape = (3, 1, 2, PREFIX + GRID.size, DIM)
    q, k, v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE).unbind()
    return lambda: mean_tile_attention(
        q, k, v, grid=GRID, prefix=PREFIX, expand=EXPAND, backend="triton"
    )


def test_a_sequence_is_recorded_and_runs_again():
    work = call()
    with recorded_sequences() as recorded:
        expected = work()
    ((sequence, inputs),) = recorded.calls
    output = inputs[3]
    output.fill_(torch.nan)
    timed = TimedSequence(sequence, inputs)
    assert torch.equal(output, expected)
    assert [launch.kernel for launch in timed.launches()] == [f"mean_{x}_kernel" for x in KERNELS]
    output.fill_(torch.nan)
    timed.run(len(KERNELS) - 1)  # all but the kernel that writes the outputs of spatial tokens
    assert bool(output[:, :, PREFIX:].isnan().all())
    with recorded_sequences() as recorded:
        pass
    work()
    assert not recorded.calls


def test_the_time_of_a_kernel_is_what_it_adds():
    counts = []

    def timer(work):
        counts.append(work.args[0])
        return float(work.args[0] ** 2)  # 1, 4, 9, ...: differences 1, 3, 5, ...

    rows = kernel_rows(call(), LIMITS, timer, {"n": GRID.size, "heads": 2})
    assert counts == [1, 2, 3, 4, 5]
    assert [row["milliseconds"] for row in rows] == [1.0, 3.0, 5.0, 7.0, 9.0]
    for row in rows:
        assert row["what"] == "kernel" and row["n"] == 256 and row["launches"] == 1
        limit = 1e3 * max(row["bytes"] / 1e9, row["flops"] / 1e12)
        assert row["limit_milliseconds"] == pytest.approx(limit)
        assert row["limit_percent"] == pytest.approx(100 * limit / row["milliseconds"])


def test_bytes_and_flops_are_counted_by_hand():
    rows = {row["kernel"]: row for row in kernel_rows(call(), LIMITS, lambda work: 1.0, {})}
    heads, tokens, tiles, groups = 2, 256, 4, 2
    tensor = 4 * heads * (tokens + PREFIX) * DIM  # bytes of q, k, v or o
    pool = rows["mean_pool_kernel"]
    assert pool["flops"] == heads * (2 * tokens * DIM**2 + 4 * PREFIX * tokens * DIM)
    assert 3 * tensor < pool["bytes"] < 4 * tensor
    residual = rows["mean_residual_kernel"]
    assert residual["flops"] == 4 * heads * groups * tokens * DIM
    attention = rows["mean_attention_kernel"]
    keys = tiles + PREFIX + 64 * EXPAND
    assert attention["flops"] == heads * tokens * (4 * keys * DIM + 2 * DIM**2)
    assert 4 * tensor < attention["bytes"] < 5 * tensor


def screened_call(**options):
    """Return tiled attention to four tiles whose keys differ in length, so that losses differ."""
    shape = (3, 1, 2, PREFIX + GRID.size, DIM)
    q, k, v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE).unbind()
    row, column = torch.arange(GRID.size) // 16, torch.arange(GRID.size) % 16
    length = torch.tensor([0.1, 0.4, 1.0, 2.5])[row // 8 * 2 + column // 8]
    k[:, :, PREFIX:] *= length.to(DEVICE).unsqueeze(-1)
    return lambda: screened_attention(
        q, k, v, grid=GRID, prefix=PREFIX, allow_dense=False, backend="triton", **options
    )


def test_every_kernel_of_tiled_attention_has_a_limit():
    screened = screened_call(leaves=100)
    rows = {row["kernel"]: row for row in kernel_rows(screened, LIMITS, lambda work: 1.0, {})}
    assert {"pool_kernel", "represent_kernel", "select_kernel", "attention_kernel"} <= set(rows)
    assert all(row["limit_milliseconds"] is not None for row in rows.values())
    heads, tokens, tiles = 2, 256, 4
    expanded = float(screened().stats.expanded_count.double().mean())
    assert 0 < expanded < tiles
    keys = tiles + PREFIX + 64 * expanded
    flops = heads * tokens * (4 * keys * DIM + 2 * DIM**2)
    assert rows["attention_kernel"]["flops"] == pytest.approx(flops)
    # Scores, mean keys and mean values of the four representatives, besides those of the probes.
    assert rows["represent_kernel"]["flops"] > heads * 6 * tiles * tokens * DIM


def test_every_tile_expanded_is_at_least_dense_attention():
    rows = kernel_rows(screened_call(leaves=1.0), LIMITS, lambda work: 1.0, {})
    assert all(row["limit_milliseconds"] is not None for row in rows)
    dense = 2 * 4 * GRID.size * (PREFIX + GRID.size) * DIM
    assert dense <= sum(row["flops"] for row in rows) < 10 * dense


def test_a_kernel_with_other_arguments_has_no_limit(monkeypatch):
    monkeypatch.setitem(roofline.WORK, "mean_pool_kernel", roofline.levels)
    rows = {row["kernel"]: row for row in kernel_rows(call(), LIMITS, lambda work: 1.0, {})}
    assert rows["mean_pool_kernel"]["limit_percent"] is None


def test_a_kernel_without_an_entry_has_no_limit(monkeypatch):
    monkeypatch.delitem(roofline.WORK, "mean_score_kernel")
    rows = {row["kernel"]: row for row in kernel_rows(call(), LIMITS, lambda work: 1.0, {})}
    row = rows["mean_score_kernel"]
    assert row["milliseconds"] == 0.0
    assert all(
        row[key] is None for key in ("bytes", "flops", "limit_milliseconds", "limit_percent")
    )
    assert rows["mean_pool_kernel"]["limit_percent"] > 0


@pytest.mark.skipif(GPU, reason="a GPU times kernels")
def test_kernels_are_not_timed_on_a_cpu(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "attention", "--device", "cpu", "--tokens", "16", "--kernels"])
    assert "omit --kernels" in capsys.readouterr().err


@pytest.mark.gpu
def test_limits_of_a_gpu_are_plausible():
    limits = Limits.measure(torch.device("cuda"), torch.bfloat16, 3)
    assert 1e11 < limits.bytes_per_second < 1e14 and 1e13 < limits.flops_per_second < 1e16
