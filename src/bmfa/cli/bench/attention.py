"""bmfa bench attention."""

from bmfa.cli.bench.shared import Benchmark
from bmfa.cli.output import Output

# Columns by importance: without --wide, those that exceed the width are left out.
COLUMNS = (
    "n threads method density_percent error_l2_percent error_p95_query_percent milliseconds speedup ran "
    "heads dim dtype batch estimated_error_percent target_met_percent milliseconds_eager speedup_eager "
    "peak_mebibytes extra_memory_percent"
)


def attention(
    output: Output,
    bench: Benchmark,
    tokens: list[int] | None = None,
    images: int | None = None,
    threads: list[int] | None = None,
) -> None:
    """Tiled attention against the best dense path.

    Queries, keys and values are those of a model on images, at several numbers of tokens.

    Args:
        tokens (N): Number of tokens, a square; may be repeated (1024, 4096 and 16384, and 196 and
            65536 on a GPU).
        images (N): Number of images (4 on a GPU, else 1).
        threads (N): Number of threads to time with on a CPU; may be repeated.
    """
    from bmfa.evidence.bench import attention as experiment
    from bmfa.evidence.bench import summary
    from bmfa.evidence.bench.inputs import InputSource

    if bench.show_files(output, COLUMNS):
        return
    device = output.torch_device()
    count = images or (4 if device.startswith("cuda") else 1)
    record = experiment.run(
        InputSource(
            bench.model,
            bench.weights,
            bench.data_dir,
            images=count,
            seed=output.seed,
            device=device,
        ),
        tokens=tokens or (),
        methods=bench.method or (),
        dtype=bench.dtype,
        repeats=bench.timings(device),
        threads=threads or (),
        progress=output.progress("sizes"),
    )
    bench.show(output, record, COLUMNS, summary.lines(dict(record.settings)))
