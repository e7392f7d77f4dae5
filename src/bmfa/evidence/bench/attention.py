"""`bmfa bench attention`: speed, error and memory of tiled attention against dense paths and peers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa import timing
from bmfa.attention.api import screened_attention
from bmfa.attention.call import Backend
from bmfa.attention.result import Screened, Stats
from bmfa.checks import check_integer
from bmfa.evidence.bench import dense, measure, peers, summary
from bmfa.evidence.bench.inputs import QKV, RANDOM, InputSource, RecordedInputs, as_projection
from bmfa.evidence.bench.methods import (
    ScreenedCall,
    arguments,
    default_backend,
    dtype_name,
    for_device,
    missed_targets_ignored,
    parse,
)
from bmfa.evidence.bench.verify import check_backend
from bmfa.evidence.metrics import mean_percent, relative_errors
from bmfa.evidence.runner import Progress
from bmfa.evidence.runner.loop import DTYPES
from bmfa.quantiles import quantile
from bmfa.records import Record, Row, environment, without_folders

TOKENS = {"cuda": (196, 1024, 4096, 16384, 65536), "cpu": (1024, 4096, 16384)}
DEFAULT_METHODS = {
    "cuda": (
        *("tiles:0", "tiles:0.01", "tiles:0.03", "tiles:0.06", "tiles:0.1", "tiles:0.2"),
        *("error:0.02", "error:0.05", "error:0.1"),
    ),
    "cpu": ("tiles:0", "tiles:0.1", "error:0.03", "error:0.05", "error:0.1"),
}
BLOCKS = (2, 5, 8, 11)
# Images are timed together up to this number of tokens.
BATCH_TOKENS = 65_536
# All queries are compared below so many tokens; from there on an even sample of about 2,048.
ALL_QUERIES_TOKENS, SAMPLED_QUERIES = 16_384, 2_048
ERROR = (
    "relative L2 of the output against float64 attention on the float32 q, k, v, mean over images "
    "and blocks, and of the worst block; error_queries of each head are compared"
)


def run(
    source: InputSource,
    *,
    tokens: Sequence[int] = (),
    methods: Sequence[str] = (),
    dtype: str | None = None,
    repeats: int = 5,
    threads: Sequence[int] = (),
    progress: Progress | None = None,
) -> Record:
    """Time tiled attention, dense attention and peers on the q, k, v of a model.

    Everything that is timed is first compared with float64 attention on small grids. An interrupted
    run returns the sizes that are complete.

    Args:
        source: Model and images.
        tokens: Numbers of tokens, each a square; a default for the device without any.
        methods: Names such as `tiles:0.03`, `leaves:0.05` or `error:0.1`; a default for the device
            without any.
        dtype: `"bfloat16"` (default on CUDA), `"float16"` or `"float32"`.
        repeats: Timings of which the median counts.
        threads: Numbers of threads of torch to time with on a CPU; rows have a column of them if there
            are several.
        progress: Called with the sizes done and their number.

    Returns:
        A record of rows for every number of tokens: the fastest dense path, all dense paths, tiled
        attention, `auto` and peers. With the backend "native" also exact attention by it, and the
        methods by the backend "eager".

    Raises:
        ValueError: If an argument is out of range, or the verification fails.

    Example:
        >>> record = run(InputSource("random"), tokens=[16], methods=["tiles:1"], repeats=1)
        >>> record.rows[0]["method"], record.rows[0]["n"]
        ('dense', 16)
    """
    device = torch.device(source.device)
    if threads and device.type == "cuda":
        raise ValueError(f"threads is {list(threads)}, and the device is CUDA; omit --threads")
    names = tuple(methods) or for_device(DEFAULT_METHODS, device)
    for name, value in (("repeats", repeats), *(("threads", count) for count in threads)):
        check_integer(name, value, low=1)
    for name in names:
        parse(name)
    plan = Plan(names, dtype_name(dtype, device), device, repeats, tuple(threads))
    sizes = _sizes_in_pixels(source, tokens or for_device(TOKENS, device))
    blocks = tuple(block for block in BLOCKS if block < source.depth) or (source.depth - 1,)
    present, notes = peers.available()

    def measure_size(size: int) -> list[Row]:
        return SizeBenchmark(source.record(size, blocks), plan, present, notes).rows()

    with torch.inference_mode(), missed_targets_ignored():
        rows, interrupted = measure.each_size(sizes, measure_size, progress)
    if source.model == RANDOM:
        rows = [{**row, "keys": "random q, k, v"} for row in rows]
    settings = {
        **source.describe(),
        "sizes": sizes,
        "blocks": list(blocks),
        "backend": plan.backend,
        "repeats": repeats,
        **({"threads": list(plan.threads)} if plan.threads else {}),
        "seed": source.seed,
        "timing": for_device(measure.TIMING, plan.device),
        "error": ERROR,
        "self_check": "passed: tiled attention and dense paths against float64 on small grids",
        "absent": {**notes, **interrupted},
        **summary.summarize(rows),
    }
    return Record("bench", settings, rows, environment(source.device))


def _sizes_in_pixels(source: InputSource, tokens: Sequence[int]) -> list[int]:
    """Return the sides of images in pixels from square numbers of tokens."""
    sizes = []
    for count in tokens:
        side = round(check_integer("tokens", count, low=1) ** 0.5)
        if side * side != count:
            raise ValueError(f"tokens is {count}; pass a square number, as {side * side}")
        sizes.append(side * source.patch_size)
    return sizes


@dataclass(frozen=True)
class Plan:
    """What is timed, in which precision, and how often."""

    methods: tuple[str, ...]
    dtype: str
    device: torch.device
    repeats: int
    threads: tuple[int, ...] = ()  # numbers of threads to time with; empty for that of torch

    @property
    def backend(self) -> Backend:
        """The fastest backend of tiled attention on the device."""
        return default_backend(self.device)


class SizeBenchmark:
    """All calls on q, k, v of one number of tokens."""

    def __init__(
        self, inputs: RecordedInputs, plan: Plan, present: Sequence[str], notes: dict[str, str]
    ) -> None:
        self.inputs, self.plan, self.present, self.notes = inputs, plan, present, notes
        self.images, self.heads, self.dim = inputs.shape
        self.batch = max(1, min(self.images, BATCH_TOKENS // inputs.grid.size))
        self.queries = sampled_queries(inputs)
        self.blocks: list[tuple[QKV, Tensor]] = []  # with exact outputs of the sampled queries
        for q, k, v in inputs.blocks.values():
            exact = dense.exact_attention(q[:, :, self.queries], k, v)
            rounded = (x.to(DTYPES[plan.dtype]) for x in (q, k, v))
            self.blocks.append((as_projection(*rounded), exact))
        self.timed = [tuple(x[: self.batch] for x in qkv) for qkv, _ in self.blocks]
        self.screened = partial(screened_attention, grid=inputs.grid, prefix=inputs.prefix)

    def rows(self) -> list[Row]:
        """Return the rows of dense paths, tiled attention, `auto` and peers."""
        dtype, device = DTYPES[self.plan.dtype], str(self.plan.device)
        check_backend(self.plan.backend, dtype, device, self.dim)
        densities: dict[str, float] = {}
        calls = self._dense_calls() | self._tiled_calls()
        calls |= {"auto": self.screened, **self._peer_calls(densities)}
        measured = {
            name: {**self.measure(name, call, densities.get(name)), **self._memory(call)}
            for name, call in calls.items()
        }
        rows: list[Row] = []
        for count in self.plan.threads or (torch.get_num_threads(),):
            with timing.threads(count):
                times = measure.mean_times(self.cases(calls), self.plan.repeats, self.plan.device)
            several = {"threads": count} if len(self.plan.threads) > 1 else {}
            rows += [{**row, **several} for row in measure.compared_rows(measured, times)]
        return rows

    def _dense_calls(self) -> dict[str, ScreenedCall]:
        found = dict[str, ScreenedCall]()
        for path in (dense.DEFAULT, *(dense.PATHS if self.plan.device.type == "cuda" else ())):
            reason = dense.unsupported_reason(path, *self.timed[0])
            if reason is None:
                found[f"dense-{path}"] = dense.dense_path(path)
            else:
                self.notes[f"dense-{path} at {self.inputs.grid.size}"] = reason
        return found

    def _tiled_calls(self) -> dict[str, ScreenedCall]:
        """Return a call for each method; of equal ones, as on a small grid, only the first.

        Beside the native kernels, exact attention by them, and the same methods by torch operations.
        """
        distinct: dict[str, tuple[str, dict[str, Any]]] = {}
        for name in self.plan.methods:
            options = arguments(name, self.inputs.grid)
            distinct.setdefault(repr(options), (name, options))

        def tiled(prefix: str, backend: Backend) -> dict[str, ScreenedCall]:
            call = partial(self.screened, allow_dense=False, backend=backend)
            return {f"{prefix}-{name}": partial(call, **o) for name, o in distinct.values()}

        calls = tiled("tiled", self.plan.backend)
        if self.plan.backend == "native":
            calls |= {summary.EXACT: partial(self.screened, error=0.0), **tiled("eager", "eager")}
        return calls

    def _peer_calls(self, densities: dict[str, float]) -> dict[str, ScreenedCall]:
        """Return the peers that run on these inputs; the others are noted."""
        found: dict[str, ScreenedCall] = {}
        grid, prefix = self.inputs.grid, self.inputs.prefix
        for name, (call, density) in peers.calls(self.present, grid, prefix).items():
            try:
                call(*self.timed[0])
            except Exception as error:  # kernels of other packages raise errors of any type
                words = [without_folders(word) for word in str(error).split()]
                self.notes[f"{name} at {grid.size}"] = " ".join(words)[:200]
                continue
            found[name], densities[name] = call, density
        return found

    def cases(self, calls: Mapping[str, ScreenedCall]) -> Iterator[dict[str, timing.Work]]:
        """Yield the calls on each block; dense paths, whose time depends on shapes alone, on one.

        The path of a dense call is chosen before its clock starts.
        """
        for index, tokens in enumerate(self.timed):
            yield {
                name: _bind(scaled_dot_product_attention if measure.path_of(name) else call, tokens)
                for name, call in calls.items()
                if not index or not measure.path_of(name)
            }

    def measure(self, name: str, call: ScreenedCall, density: float | None) -> Row:
        """Return everything about a call but its time and its memory."""
        by_block: list[list[float]] = []
        by_call: list[float] = []
        by_query: list[Tensor] = []
        stats: list[Stats] = []
        for tokens, exact in self.blocks:
            by_block.append([])
            for start in range(0, self.images, self.batch):
                images = slice(start, start + self.batch)
                work = partial(call, *(x[images] for x in tokens))
                result, _ = measure.run_as_timed(work, self.plan.device)
                if isinstance(result, Screened):
                    stats.append(result.stats)
                    result = result.output
                output, expected = result[:, :, self.queries].double(), exact[images]
                by_block[-1] += relative_errors(output, expected).tolist()
                by_call.append(float((output - expected).norm() / expected.norm()))
                distances = (output - expected).norm(dim=-1) / expected.norm(dim=-1)
                by_query.append(distances.flatten().cpu())
        shares = [1.0] if measure.path_of(name) else [one.density for one in stats] or [density]
        return {
            "what": "attention",
            "n": self.inputs.grid.size,
            "heads": self.heads,
            "dim": self.dim,
            "dtype": self.plan.dtype,
            "batch": self.batch,
            "images": self.images,
            "method": name,
            "density_percent": mean_percent(shares),
            "error_l2_percent": 100 * fmean(error for errors in by_block for error in errors),
            "worst_block_error_percent": 100 * max(map(fmean, by_block)),
            "error_p95_query_percent": 100 * float(quantile(torch.cat(by_query), 0.95)),
            "smallest_call_error_percent": 100 * min(by_call),
            "largest_call_error_percent": 100 * max(by_call),
            **estimate_columns(stats),
            "error_queries": len(self.queries),
            "ran": stats[-1].form if stats else None,
        }

    def _memory(self, call: ScreenedCall) -> Row:
        """Return the peak with q, k, v and output, and what is held besides in percent of k and v."""
        tokens = self.timed[0]
        _, peak = measure.run_as_timed(_bind(call, tokens), self.plan.device)
        if peak is None:
            return {"peak_mebibytes": None, "extra_memory_percent": None}
        tensor_bytes = tokens[0].numel() * tokens[0].element_size()
        return {
            "peak_mebibytes": (peak + 3 * tensor_bytes) / 2**20,
            "extra_memory_percent": 100 * max(0, peak - tensor_bytes) / (2 * tensor_bytes),
        }


def sampled_queries(inputs: RecordedInputs) -> Tensor:
    """Return the indices of all queries, or of an even sample in every column of the grid."""
    tokens = inputs.prefix + inputs.grid.size
    step = 1 if inputs.grid.size < ALL_QUERIES_TOKENS else tokens // SAMPLED_QUERIES
    while gcd(step, inputs.grid.width) != 1:
        step -= 1
    q, _, _ = next(iter(inputs.blocks.values()))
    return torch.arange(0, tokens, step, device=q.device)


def estimate_columns(stats: Sequence[Stats]) -> Row:
    """Return what tiled calls say of their own errors, as means in percent; nothing for other calls."""
    reports = [one.error for one in stats if one.form != "dense" and one.error is not None]
    columns = (
        ("estimated_error_percent", "estimate"),
        ("estimated_p95_percent", "p95"),
        ("estimate_uncertainty_percent", "uncertainty"),
        ("target_met_percent", "met"),
    )
    return {
        c: mean_percent(getattr(one, name) for one in reports) for c, name in columns if reports
    }


def _bind(call: ScreenedCall, tokens: Sequence[Tensor]) -> Callable[[], Tensor | Screened]:
    """Bind q, k, v to a call; a peer with a token order of its own gets them in that order."""
    return call.bind(*tokens) if isinstance(call, peers.TileOrdered) else partial(call, *tokens)
