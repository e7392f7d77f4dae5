"""`bmfa bench attention`: what it records, refuses and shows."""

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bmfa import timing
from bmfa.attention.kernels.native import library
from bmfa.cli import main
from bmfa.evidence.bench import attention as attention_bench
from bmfa.evidence.bench import chapter as bench_tables
from bmfa.evidence.bench import dense, measure, methods, summary, verify
from bmfa.evidence.bench import figures as attention_figures
from bmfa.evidence.bench.inputs import InputSource, RecordedInputs, load_any_size
from bmfa.evidence.page import figures
from bmfa.evidence.page.build import build_page
from bmfa.evidence.page.record_set import RecordSet
from bmfa.grid import Grid
from bmfa.models.embedded import load as load_embedded
from bmfa.records import Record

CPU = torch.device("cpu")
NATIVE = library.unavailable_reason() is None
needs_native = pytest.mark.skipif(not NATIVE, reason="needs the native kernels")


@pytest.fixture(scope="module")
def record() -> Record:
    names = ("tiles:0", "tiles:0.25", "tiles:1", "error:0.1")
    return attention_bench.run(InputSource(), tokens=[100, 256], methods=names, repeats=1)


def row_of(record: Record, n: int, method: str):
    (row,) = (r for r in record.rows if r["n"] == n and r["method"] == method)
    return row


def test_rows_are_dense_paths_and_all_methods_with_errors_that_fall_to_rounding(record):
    settings = record.settings
    assert settings["weights"] == "shipped" and settings["blocks"] == [2, 5]
    assert "passed" in settings["self_check"] and {"sparge", "natten"} <= set(settings["absent"])
    assert Record.from_json(record.to_json()).rows == [dict(row) for row in record.rows]
    for n in (100, 256):
        found = [row["method"] for row in record.rows if row["n"] == n]
        assert found[0] == "dense"
        assert {"dense-default", "auto", "tiled-tiles:0", "tiled-error:0.1"} <= set(found)
        fastest = row_of(record, n, "dense")
        paths = [row_of(record, n, name)["milliseconds"] for name in found if "dense-" in name]
        assert fastest["milliseconds"] == min(paths) and fastest["speedup"] == 1.0
        some = [row_of(record, n, f"tiled-tiles:{share}") for share in ("0", "0.25", "1")]
        none, quarter, every = (row["density_percent"] for row in some)
        # The probes of a few tiles set the threshold, so that a share is met on average only.
        assert none == 0.0 and every == 100.0 and 10.0 < quarter < 50.0
        errors = [row["error_l2_percent"] for row in some]
        assert errors[0] > errors[1] > errors[2]
        assert errors[2] < 100 * 64 * torch.finfo(torch.float32).eps
        assert all(row["error_p95_query_percent"] >= 0 for row in some)
        assert errors[1] == pytest.approx(some[1]["estimated_error_percent"], rel=1.0)


def scaled_call(factors):
    """Return exact attention times the next factor in every call."""
    queue = iter(factors)

    def call(q, k, v):
        exact = scaled_dot_product_attention(q.double(), k.double(), v.double())
        return exact * (1 + next(queue))

    return call


def benchmark(inputs: RecordedInputs) -> attention_bench.SizeBenchmark:
    return attention_bench.SizeBenchmark(
        inputs, attention_bench.Plan((), "float32", CPU, 1), [], {}
    )


def test_errors_are_means_over_images_and_blocks_and_of_single_calls(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    blocks = {block: torch.randn(3, 2, 2, 16, 8, generator=generator).unbind() for block in (1, 4)}
    inputs = RecordedInputs(Grid(4, 4), 0, blocks)
    row = benchmark(inputs).measure("x", scaled_call((0.01, 0.03)), None)  # two images a call
    assert row["smallest_call_error_percent"] == pytest.approx(1.0, rel=1e-4)
    assert row["largest_call_error_percent"] == pytest.approx(3.0, rel=1e-4)
    assert row["density_percent"] is None and "estimated_error_percent" not in row
    monkeypatch.setattr(attention_bench, "BATCH_TOKENS", 16)
    row = benchmark(inputs).measure("x", scaled_call((0.01, 0.03, 0.02, 0.06)), None)
    expected = {"error_l2": 3.0, "worst_block_error": 4.0, "smallest_call_error": 1.0}
    expected |= {"largest_call_error": 6.0}
    for name, value in expected.items():
        assert row[f"{name}_percent"] == pytest.approx(value, rel=1e-4)


def test_what_calls_report_of_their_errors_is_averaged():
    def stats(estimate, met, form="tiled"):
        error = SimpleNamespace(estimate=estimate, met=met, p95=2 * estimate, uncertainty=0.001)
        return SimpleNamespace(form=form, error=error)

    columns = attention_bench.estimate_columns([stats(0.02, True), stats(0.04, False)])
    assert list(columns.values()) == [pytest.approx(x) for x in (3.0, 6.0, 0.1, 50.0)]
    assert attention_bench.estimate_columns([stats(0.02, None)])["target_met_percent"] is None
    assert attention_bench.estimate_columns([stats(0.02, True, form="dense")]) == {}


def test_random_tokens_need_no_model(capsys):
    sizes = ["--tokens", "256", "--method", "error:0.2", "--method", "tiles:0", "--repeats", "1"]
    main(["bench", "attention", "--model", "random", "--images", "2", *sizes, "--json", "-"])
    made = Record.from_json(capsys.readouterr().out)
    assert made.settings["model"] == "random" and made.settings["weights"] == "none"
    assert all(row["keys"] == "random q, k, v" and row["dim"] == 64 for row in made.rows)
    # No model's heads, so nothing is said of where tiles begin to be worth their while.
    assert "break_even_tokens" not in made.settings
    rows = {row["method"]: row for row in made.rows}
    assert rows["tiled-error:0.2"]["images"] == 2
    # Neighbours have nothing in common: means lose half of everything, and a target expands most.
    assert rows["tiled-tiles:0"]["error_l2_percent"] > 40
    assert rows["tiled-error:0.2"]["density_percent"] > 50


def test_dense_paths_are_chosen_before_the_clock_starts(monkeypatch):
    """Times of a device that has CUDA graphs: each call takes as long as its path says."""
    inside: list[str] = []

    @contextmanager
    def preferring(name):
        inside.append(name)
        yield
        inside.pop()

    def time_call(work, repeats, device):
        work()
        return {"cudnn": (1.0, 5.0), "none": (2.0, 3.0)}[(inside or ["none"])[-1]]

    monkeypatch.setattr(dense, "preferring", preferring)
    monkeypatch.setattr(timing, "time_call", time_call)
    calls = {
        "dense-cudnn": dense.dense_path("cudnn"),
        "dense-default": scaled_dot_product_attention,
    }
    bench = benchmark(InputSource("random").record(64, [0]))
    works = list(bench.cases({**calls, "auto": bench.screened}))
    # The path is not chosen again within the call, in the time of the host.
    assert works[0]["dense-cudnn"].func is scaled_dot_product_attention
    times = measure.mean_times(works, 1, torch.device("cuda"))
    assert times["dense-cudnn"] == (1.0, 5.0)
    rows = measure.compared_rows({name: {"method": name} for name in times}, times)
    assert [row["method"] for row in rows] == ["dense", "dense-cudnn", "dense-default", "auto"]
    # Without graphs the fastest dense call is the base, whichever wins with graphs.
    assert [row["speedup"] for row in rows[1:]] == [1.0, 0.5, 0.5] and rows[0]["path"] == "cudnn"
    assert [row["speedup_eager"] for row in rows[1:]] == [0.6, 1.0, 1.0]


def test_recorded_tokens_are_those_of_the_model():
    source = InputSource()
    recorded = source.record(112, [0, 7])
    model = load_embedded()
    loaded, _ = load_any_size("embedded", size=112)
    pixels = loaded.preprocess.batch(source.images)
    seen: list[torch.Tensor] = []
    attention = model.blocks[7].attn
    attention.qkv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        scores = model(pixels)
        q = seen[0].unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)[0]
        assert torch.equal(q, recorded.blocks[7][0])
        torch.testing.assert_close(loaded.model(pixels), scores)
    assert recorded.grid == Grid(14, 14) and recorded.prefix == 1


def test_inputs_are_views_of_one_projection():
    inputs = InputSource().record(64, [0])
    q, k, v = benchmark(inputs).timed[0]
    assert q.stride() == k.stride() == v.stride() and q.stride(2) == 3 * q.shape[1] * q.shape[3]
    assert k.data_ptr() - q.data_ptr() == 4 * q.shape[1] * q.shape[3]
    assert all(map(torch.equal, (q, k, v), inputs.blocks[0]))


def test_sampled_queries_meet_every_column_and_exact_attention_is_attention():
    q = torch.zeros(1, 1, 1 + 128 * 128, 1)
    inputs = RecordedInputs(Grid(128, 128), 1, {0: (q, q, q)})
    queries = attention_bench.sampled_queries(inputs)
    assert len(queries) >= 2048
    assert len(set(((queries[1:] - 1) % 128).tolist())) == 128
    q, k, v = torch.randn(3, 2, 2, 33, 16, dtype=torch.float64).unbind()
    found = dense.exact_attention(q[:, :, :5], k, v)
    torch.testing.assert_close(found, scaled_dot_product_attention(q[:, :, :5], k, v))


def test_nothing_is_timed_on_red_tests(monkeypatch, capsys):
    right = verify.screened_attention
    for factor in (1.01, torch.nan):

        def broken(*args, factor=factor, **options):
            screened = right(*args, **options)
            screened.output = factor * screened.output
            return screened

        monkeypatch.setattr(verify, "screened_attention", broken)
        with pytest.raises(SystemExit) as stop:
            main(["bench", "attention", "--tokens", "16"])
        told = capsys.readouterr()
        assert stop.value.code == 2 and told.out == "" and told.err.count("\n") == 1
        assert f"backend {methods.default_backend(CPU)} is off by" in told.err
        assert "red tests" in told.err
    monkeypatch.undo()
    for backend in {"eager", methods.default_backend(CPU)}:
        for dtype in (torch.float32, torch.float16):
            verify.check_backend(backend, dtype, "cpu", 32)


@needs_native
def test_native_kernels_are_timed_beside_sdpa_and_eager_on_several_threads():
    before = torch.get_num_threads()
    record = attention_bench.run(
        InputSource("random"),
        tokens=[64, 256],
        methods=["tiles:0", "error:0.03"],
        threads=[1, 2],
        repeats=1,
    )
    assert torch.get_num_threads() == before
    assert record.settings["backend"] == "native" and record.settings["threads"] == [1, 2]
    for n, threads in ((64, 1), (64, 2), (256, 1), (256, 2)):
        rows = [r for r in record.rows if (r["n"], r["threads"]) == (n, threads)]
        by_method = {row["method"]: row for row in rows}
        assert set(by_method) == {
            *("dense", "dense-default", "tiled-tiles:0", "tiled-error:0.03", "exact"),
            *("eager-tiles:0", "eager-error:0.03", "auto"),
        }
        exact, tiles = by_method["exact"], by_method["tiled-tiles:0"]
        assert exact["ran"] == "dense" and exact["error_l2_percent"] < 1e-3
        eager = by_method["eager-tiles:0"]
        assert tiles["error_l2_percent"] == pytest.approx(eager["error_l2_percent"], rel=1e-3)
        ratio = by_method["dense"]["milliseconds"] / tiles["milliseconds"]
        assert tiles["speedup"] == pytest.approx(ratio)
    assert "1 and 2 threads, native kernels " in bench_tables.markdown(record)
    rows = [{k: v for k, v in row.items() if k != "keys"} for row in record.rows]
    assert {row["threads"] for row in summary.own_rows(rows)} == {2}
    keys = {"exact_from_tokens", "tiles_from_tokens", "expanded_cost"}
    assert set(summary.native_costs(rows)) == keys


def test_one_number_of_threads_has_no_column_and_torch_runs_without_native_kernels(monkeypatch):
    monkeypatch.setattr(methods.library, "unavailable_reason", lambda: "off")
    record = attention_bench.run(
        InputSource("random"), tokens=[16], methods=["tiles:0"], threads=[1], repeats=1
    )
    assert record.settings["backend"] == "eager" and record.settings["threads"] == [1]
    found = [row["method"] for row in record.rows]
    assert found == ["dense", "dense-default", "tiled-tiles:0", "auto"]
    assert not any("threads" in row for row in record.rows)


def native_rows(n: int, threads: int, **milliseconds: float):
    """Rows of a benchmark with native kernels; the names of methods have _ in place of - and :."""
    names = {
        "tiles_0": "tiled-tiles:0",
        "tiles_half": "tiled-tiles:0.5",
        "error": "tiled-error:0.03",
    }
    density = {"tiles_0": 0.0, "tiles_half": 50.0}
    return [
        {"what": "attention", "n": n, "threads": threads, "method": names.get(name, name),
         "milliseconds": time, "density_percent": density.get(name)}
        for name, time in milliseconds.items()
    ]  # fmt: skip


def test_the_constants_of_the_native_kernels_are_read_off_the_worst_number_of_threads():
    rows = [
        *native_rows(64, 1, dense=1.0, exact=2.0, error=3.0),
        *native_rows(256, 1, dense=3.0, exact=2.0, error=3.0),
        *native_rows(256, 2, dense=1.0, exact=2.0, error=1.0),
        *native_rows(1024, 1, dense=9.0, exact=4.0, error=3.0, tiles_0=1.0, tiles_half=3.0),
        *native_rows(1024, 2, dense=5.0, exact=2.0, error=1.0, tiles_0=0.5, tiles_half=2.0),
    ]
    costs = summary.native_costs(rows)
    assert costs == {"exact_from_tokens": 1024, "tiles_from_tokens": 1024, "expanded_cost": 1.5}
    assert "from 1024 tokens" in summary.lines({"break_even_error_percent": 1.0, **costs})[-1]
    assert summary.native_costs(native_rows(64, 1, dense=1.0)) == {}


def rows_of_power(power: float, factor: float, error: float, method: str):
    return [
        {"what": "attention", "n": n, "method": method, "batch": 4, "error_l2_percent": error,
         "milliseconds": 4 * factor * n**power, "speedup": 2.0}
        for n in (4096, 16384, 65536)
    ]  # fmt: skip


def test_exponents_and_break_even_come_from_the_rows():
    rows = rows_of_power(1.5, 1e-5, 9.5, "tiled-tiles:0")
    rows += rows_of_power(1.5, 3e-5, 5.5, "tiled-tiles:0.1")
    times = summary.times_at_error(rows, 7.5)
    assert summary.exponent(times) == pytest.approx(1.5)
    # Halfway between the errors, halfway between the logarithms of the times, for one image.
    assert times[4096] == pytest.approx(math.sqrt(3) * 1e-5 * 4096**1.5)
    assert summary.time_at_error(rows[:1], 7.5) is None
    assert summary.time_at_error(rows[:1], 9.9) == pytest.approx(1e-5 * 4096**1.5)
    assert summary.break_even(rows) == 4096
    rows[1]["speedup"] = rows[4]["speedup"] = 0.9
    assert summary.break_even(rows) == 65536
    assert summary.break_even(rows, error=5.0) is None


REFUSALS = (
    (["--tokens", "200"], ["tokens is 200", "196"]),
    (["--tokens", "16", "--method", "tiles:2"], ["tiles:2", "[0, 1]"]),
    (["--tokens", "16", "--method", "gamma:0.1"], ["'gamma:0.1'", "pass tiles:SHARE"]),
    (["--tokens", "16", "--method", "error:1.2.3"], ["'error:1.2.3'", "pass e.g. error:0.1"]),
    (["--tokens", "16", "--method", "tiles"], ["'tiles'", "pass e.g. tiles:0.1"]),
    (["--tokens", "16", "--method", "leaves:0"], ["leaves:0", "pass"]),
    (["--tokens", "16", "--dtype", "int8"], ["'int8'", "bfloat16"]),
    (["--tokens", "16", "--threads", "0"], ["threads is 0"]),
    (["--model", "timm:abacus", "--tokens", "16"], ["'abacus'"]),
    (["--model", "random", "--data-dir", "photos"], ["no weights and no images"]),
    (["--records", "/nowhere.json"], ["nowhere.json"]),
)


def test_bad_input_is_one_line(capsys):
    for arguments, words in REFUSALS:
        with pytest.raises(SystemExit) as stop:
            main(["bench", "attention", *arguments])
        told = capsys.readouterr().err
        assert stop.value.code == 2 and told.count("\n") == 1, told
        assert all(word in told for word in words), told


def test_tables_and_figures_are_made_from_the_record(record, tmp_path, capsys):
    words = bench_tables.markdown(record)
    assert "dense is the fastest path of the same run (default" in words
    density = row_of(record, 256, "tiled-tiles:0.25")["density_percent"]
    assert f"| `tiled-tiles:0.25` | {density:.1f} |" in words
    assert figures.ALL["attention-time"].drawable(record)
    assert not figures.ALL["attention-error"].drawable(record)
    longer = [{**row, "n": 16 * row["n"]} for row in record.rows]
    both = Record("bench", record.settings, [*record.rows, *longer], record.environment)
    for name in ("attention-time", "attention-error"):
        for narrow in (False, True):
            assert "<svg" in figures.ALL[name](both, narrow=narrow)
    page = build_page([both])
    assert 'id="figure-attention-time"' in page and "Speed and error: attention" in page
    file = tmp_path / "record.json"
    file.write_text(record.to_json())
    main(["bench", "attention", "--records", str(file), "--markdown", "--figures", str(tmp_path)])
    assert capsys.readouterr().out.strip() == words
    assert (tmp_path / "attention-time.png").read_bytes().startswith(b"\x89PNG")


def test_a_random_timm_model(capsys):
    pytest.importorskip("timm")
    model = "timm:vit_tiny_patch16_224"
    sizes = ["--tokens", "25", "--method", "tiles:0.5", "--repeats", "1"]
    main(["bench", "attention", "--model", model, *sizes, "--json", "-"])
    made = json.loads(capsys.readouterr().out)
    assert made["settings"]["weights"] == "random" and made["rows"][0]["n"] == 25
    assert {row["dim"] for row in made["rows"]} == {64}


def test_a_figure_shows_one_machine(record: Record) -> None:
    elsewhere = replace(
        record,
        rows=[{**row, "milliseconds": 1e6} for row in record.rows[:3]],
        environment={**record.environment, "device_name": "another machine"},
    )
    alone = attention_figures.attention_rows(RecordSet(record))
    assert attention_figures.attention_rows(RecordSet([elsewhere, record])) == alone
