"""`bmfa bench attention`: speed, error and memory of tiled attention against dense paths and peers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa import timing
from bmfa.attention.inputs import Backend
from bmfa.attention.kernels.native import library
from bmfa.checks import check_integer
from bmfa.evidence.bench import dense, peers, summary
from bmfa.evidence.bench.errors import (
    ErrorEstimates,
    ExactOutputs,
    measure_errors,
    missed_targets_ignored,
)
from bmfa.evidence.bench.graphs import run_as_timed
from bmfa.evidence.bench.inputs import QKV, RANDOM, InputSource, RecordedInputs, as_projection
from bmfa.evidence.bench.settings import (
    DEFAULT_METHODS,
    DTYPES,
    EXACT,
    ScreenedCall,
    TileSetting,
    auto_call,
    exact_call,
    tiled_call,
)
from bmfa.evidence.bench.verify import check_backend, check_dense
from bmfa.evidence.runner import Progress
from bmfa.records import Record, Row, environment, without_folders

TOKENS = {"cuda": (196, 1024, 4096, 16384, 65536), "cpu": (1024, 4096, 16384)}
BLOCKS = (2, 5, 8, 11)
# Images are timed together up to this number of tokens.
BATCH_TOKENS = 65_536
INTERRUPTED = "interrupted by the keyboard or SIGINT; later sizes are absent, too"
TIMING = {
    "cuda": "median; calls in a CUDA graph (milliseconds), and one by one (milliseconds_eager); dense "
    "paths are chosen before the clock starts, speedup_eager is against the fastest one by one",
    "cpu": "median of calls that take turns",
}
ERROR = (
    "relative L2 of the output against float64 attention on the float32 q, k, v, mean over images "
    "and blocks, and of the worst block; error_queries of each head are compared"
)

Times = tuple[float, float | None]  # milliseconds in a CUDA graph (on a CPU: of a call), and eager
Value = TypeVar("Value")


@dataclass(frozen=True)
class Plan:
    """The methods, peers and precision to time, and the number of timings."""

    methods: tuple[str, ...]
    backend: Backend
    dtype: str
    device: torch.device
    repeats: int
    peers: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()  # numbers of threads to time with; empty for that of torch


def run(
    source: InputSource,
    *,
    tokens: Sequence[int] = (),
    sizes: Sequence[int] = (),
    blocks: Sequence[int] | None = None,
    methods: Sequence[str] = (),
    head_dim: int | None = None,
    dtype: str | None = None,
    backend: Backend | None = None,
    repeats: int = 5,
    peer: Sequence[str] = (),
    threads: Sequence[int] = (),
    progress: Progress | None = None,
) -> Record:
    """Time tiled attention, dense attention and peers on the q, k, v of a model.

    Everything that is timed is first compared with float64 attention on small grids. An interrupted
    run returns the sizes that are complete.

    Args:
        source: Model and images.
        tokens: Numbers of tokens, each a square; a default for the device without any.
        sizes: Sides of the images in pixels, instead of `tokens`.
        blocks: Blocks of the model; some of its depth by default.
        methods: Settings such as `tiles:0.03`, `leaves:0.05` or `error:0.1`.
        head_dim: A further head dimension to time, on random weights of the same model.
        dtype: `"bfloat16"` (default on CUDA), `"float16"` or `"float32"`.
        backend: `"triton"` (default on CUDA), `"native"` (default on a CPU that runs it) or `"eager"`.
        repeats: Timings of which the median counts.
        peer: Packages that must be timed; those installed are timed anyway.
        threads: Numbers of threads of torch to time with on a CPU; rows have a column of them if there
            are several.
        progress: Called with the sizes done and their number.

    Returns:
        A record of rows for every number of tokens: the fastest dense path, all dense paths, tiled
        attention, `auto` and peers. With the backend "native" also exact attention by it, and
        the methods by the backend "eager".

    Raises:
        ValueError: If an argument is out of range, a peer is missing, or the verification fails.

    Example:
        >>> record = run(InputSource.open("random"), tokens=[16], methods=["tiles:1"], repeats=1)
        >>> record.rows[0]["method"], record.rows[0]["n"]
        ('dense', 16)
    """
    check_integer("repeats", repeats, low=1)
    device = torch.device(source.device)
    present, absent = peers.available(tuple(peer))
    plan = Plan(
        tuple(str(TileSetting.parse(m)) for m in methods or _for_device(DEFAULT_METHODS, device)),
        backend or default_backend(device),
        dtype or ("bfloat16" if device.type == "cuda" else "float32"),
        device,
        repeats,
        tuple(present),
        threads=tuple(check_integer("threads", count, low=1) for count in threads),
    )
    if plan.threads and device.type == "cuda":
        raise ValueError(f"threads is {list(threads)}, and the device is CUDA; omit --threads")
    if plan.dtype not in DTYPES:
        raise ValueError(f"dtype is {plan.dtype!r}; pass one of {', '.join(DTYPES)}")
    pixels = _sizes_in_pixels(source, tokens, sizes)
    chosen = _check_blocks(source, blocks)
    notes: dict[str, str] = {}
    rows: list[Row] = []
    verified: set[int] = set()  # head dimensions
    with torch.inference_mode(), missed_targets_ignored():
        for index, size in enumerate(pixels):
            try:
                own = SizeBenchmark(source.record(size, chosen), plan, notes).rows(verified)
                if head_dim is not None:
                    inputs = source.with_head_dim(head_dim).record(size, chosen)
                    benchmark = SizeBenchmark(inputs, _plan_of_other_heads(plan), notes)
                    own = [*own, *_with_own_errors(benchmark.rows(verified), own)]
            except KeyboardInterrupt:
                if not rows:
                    raise
                notes[f"{size} pixels"] = INTERRUPTED
                break
            rows += own
            if progress is not None:
                progress(index + 1, len(pixels))
    if source.model == RANDOM:
        rows = [{**row, "keys": "random q, k, v"} for row in rows]
    settings = {
        **source.describe(),
        "sizes": pixels,
        "blocks": list(chosen),
        "head_dim": head_dim,
        "backend": plan.backend,
        "repeats": repeats,
        **({"threads": list(plan.threads)} if plan.threads else {}),
        "seed": source.seed,
        "timing": _for_device(TIMING, device),
        "error": ERROR,
        "self_check": "passed: tiled attention and dense paths against float64 on small grids",
        "absent": {**absent, **notes},
        **summary.summarize(rows),
    }
    return Record("bench", settings, rows, environment(source.device))


def default_backend(device: torch.device) -> Backend:
    """Return the fastest backend of tiled attention that runs on a device."""
    if device.type == "cuda":
        return "triton"
    return "eager" if library.unavailable_reason() else "native"


def _for_device(values: Mapping[str, Value], device: torch.device) -> Value:
    return values.get(device.type, values["cpu"])


def _sizes_in_pixels(source: InputSource, tokens: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return sides of images in pixels, from `sizes` or from square numbers of tokens."""
    patch = source.patch_size
    if sizes and tokens:
        raise ValueError("both --size and --tokens are given; pass one of them")
    for size in sizes:
        check_integer("size", size, low=patch)
        if size % patch:
            raise ValueError(
                f"size is {size}; pass a multiple of the model's {patch} pixel patches"
            )
    pixels = list(sizes)
    for count in () if sizes else tokens or _for_device(TOKENS, torch.device(source.device)):
        side = round(check_integer("tokens", count, low=1) ** 0.5)
        if side * side != count:
            raise ValueError(f"tokens is {count}; pass a square number, as {side * side}")
        pixels.append(side * patch)
    return pixels


def _check_blocks(source: InputSource, blocks: Sequence[int] | None) -> tuple[int, ...]:
    depth = source.depth
    if blocks is None:
        return tuple(block for block in BLOCKS if block < depth) or (depth - 1,)
    return tuple(sorted({check_integer("blocks", b, low=0, high=depth - 1) for b in blocks}))


def _plan_of_other_heads(plan: Plan) -> Plan:
    """Time shares of tiles alone: random keys have hardly any structure for an error target."""
    shares = tuple(name for name in plan.methods if name.startswith("tiles:"))
    return replace(plan, methods=shares, peers=())


def _with_own_errors(rows: Sequence[Row], own: Sequence[Row]) -> list[Row]:
    """Add the errors on the model's own heads to the rows of other heads."""
    errors = {
        row["method"]: row.get("error_l2_percent") for row in own if row["what"] == "attention"
    }
    return [
        {**row, "keys": "random weights", "own_error_percent": errors.get(row["method"])}
        for row in rows
    ]


class SizeBenchmark:
    """All methods on q, k, v of one number of tokens."""

    def __init__(self, inputs: RecordedInputs, plan: Plan, notes: dict[str, str]) -> None:
        self.inputs, self.plan, self.notes = inputs, plan, notes
        self.images, self.heads, self.dim = inputs.shape
        self.batch = max(1, min(self.images, BATCH_TOKENS // inputs.grid.size))
        self.exact = ExactOutputs.of(inputs)
        dtype = DTYPES[plan.dtype]
        self.blocks: dict[int, QKV] = {}
        for block, (q, k, v) in inputs.blocks.items():
            self.blocks[block] = as_projection(q.to(dtype), k.to(dtype), v.to(dtype))
        self.timed = {
            block: tuple(x[: self.batch] for x in tokens) for block, tokens in self.blocks.items()
        }

    @cached_property
    def first_block(self) -> tuple[Tensor, ...]:
        """q, k, v of the first block, (batch, heads, prefix + N, d)."""
        return next(iter(self.timed.values()))

    def rows(self, verified: set[int]) -> list[Row]:
        """Return the rows of dense paths, tiled attention, `auto` and peers.

        Args:
            verified: Head dimensions for which the backend was compared with float64 before.
        """
        dtype = DTYPES[self.plan.dtype]
        if self.dim not in verified:
            check_backend(self.plan.backend, dtype, str(self.plan.device), [self.dim])
            verified.add(self.dim)
        paths = self._dense_paths()
        check_dense(list(paths), dtype, str(self.plan.device), [self.dim])
        calls: dict[str, ScreenedCall] = {f"dense-{name}": call for name, call in paths.items()}
        calls |= self._tiled_calls()
        calls["auto"] = auto_call(self.inputs)
        described: dict[str, Row] = {}
        calls |= self._peer_calls(described)
        measured = {
            name: {**self._measure(name, call), **described.get(name, {})}
            for name, call in calls.items()
        }
        rows: list[Row] = []
        for count in self.plan.threads or (torch.get_num_threads(),):
            with timing.threads(count):
                timed = self._timed_rows(calls, measured)
            several = len(self.plan.threads) > 1
            rows += [{**row, "threads": count} if several else row for row in timed]
        return rows

    def _timed_rows(self, calls: dict[str, ScreenedCall], measured: Mapping[str, Row]) -> list[Row]:
        """Time all calls, and add the times to what was measured of them."""
        times = self._time_all(calls)
        best = min((name for name in calls if name.startswith("dense-")), key=lambda n: times[n][0])
        base = times[best][0], fastest_eager_dense(times)
        rows = [
            {
                **self._frame(name),
                **measured[name],
                "milliseconds": times[name][0],
                "milliseconds_eager": times[name][1],
                "speedup": base[0] / times[name][0],
                "speedup_eager": _ratio(base[1], times[name][1]),
            }
            for name in calls
        ]
        fastest = next(row for row in rows if row["method"] == best)
        rows.insert(0, {**fastest, "method": "dense", "path": best.removeprefix("dense-")})
        return rows

    def _dense_paths(self) -> dict[str, ScreenedCall]:
        found: dict[str, ScreenedCall] = {}
        choices = dense.PATHS if self.plan.device.type == "cuda" else ()
        for name in (dense.DEFAULT, *choices):  # a CPU offers no choice
            reason = dense.unsupported_reason(name, *self.first_block)
            if reason is None:
                found[name] = dense.dense_path(name)
            else:
                self.notes[f"dense-{name} at {self.inputs.grid.size}"] = reason
        return found

    def _tiled_calls(self) -> dict[str, ScreenedCall]:
        """Return a call for each setting; of equal ones, as on a small grid, only the first.

        Beside the native kernels, exact attention by them, and the same settings by torch operations.
        """
        distinct: dict[str, TileSetting] = {}
        for setting in map(TileSetting.parse, self.plan.methods):
            distinct.setdefault(repr(setting.arguments(self.inputs.grid)), setting)
        settings, backend = distinct.values(), self.plan.backend
        calls = {f"tiled-{one}": tiled_call(self.inputs, backend, one) for one in settings}
        if backend == "native":
            calls[EXACT] = exact_call(self.inputs)
            calls |= {f"eager-{one}": tiled_call(self.inputs, "eager", one) for one in settings}
        return calls

    def _peer_calls(self, described: dict[str, Row]) -> dict[str, ScreenedCall]:
        """Return the peers that run on these inputs; the others are noted."""
        found: dict[str, ScreenedCall] = {}
        grid, prefix = self.inputs.grid, self.inputs.prefix
        for name, (call, density) in peers.calls(self.plan.peers, grid, prefix).items():
            try:
                call(*self.first_block)
            except Exception as error:  # kernels of other packages raise errors of any type
                words = [without_folders(word) for word in str(error).split()]
                self.notes[f"{name} at {grid.size}"] = " ".join(words)[:200]
                continue
            found[name], described[name] = call, {"density_percent": 100 * density}
        return found

    def _time_all(self, calls: dict[str, ScreenedCall]) -> dict[str, Times]:
        """Return the mean over blocks; dense paths, whose time depends on shapes alone, take one."""
        samples: dict[str, list[Times]] = {name: [] for name in calls}
        for index, tokens in enumerate(self.timed.values()):
            timed = {n: c for n, c in calls.items() if index == 0 or not n.startswith("dense-")}
            if self.plan.device.type == "cuda":
                for name, call in timed.items():
                    samples[name].append(self.time_call(name, call, tokens))
            else:
                works = {name: _bind(call, tokens) for name, call in timed.items()}
                medians = timing.time_alternating(works, self.plan.repeats, self.plan.device)
                for name, milliseconds in medians.items():
                    samples[name].append((milliseconds, None))
        return {name: _mean(times) for name, times in samples.items()}

    def time_call(self, name: str, call: ScreenedCall, tokens: Sequence[Tensor]) -> Times:
        """Time a call with and without a CUDA graph; a dense path is chosen before the clock starts."""
        path = name.removeprefix("dense-")
        if path == name:
            return timing.time_call(_bind(call, tokens), self.plan.repeats, self.plan.device)
        work = _bind(scaled_dot_product_attention, tokens)
        with dense.only(path):
            return timing.time_call(work, self.plan.repeats, self.plan.device)

    def _measure(self, name: str, call: ScreenedCall) -> Row:
        """Return everything about a call but its time."""
        device = self.plan.device
        errors = measure_errors(
            call,
            self.blocks,
            self.exact,
            self.batch,
            run=lambda work: run_as_timed(work, device).result,
        )
        return {
            "density_percent": 100.0 if name.startswith("dense-") else _percent(errors.density),
            "error_l2_percent": errors.mean,
            "worst_block_error_percent": errors.worst_block,
            "error_p95_query_percent": errors.p95_query,
            "smallest_call_error_percent": errors.smallest_call,
            "largest_call_error_percent": errors.largest_call,
            **_estimate_columns(errors.estimates),
            "error_queries": len(self.exact.queries),
            **self._memory(call),
            "ran": errors.form,
        }

    def _frame(self, method: str) -> Row:
        return {
            "what": "attention",
            "n": self.inputs.grid.size,
            "heads": self.heads,
            "dim": self.dim,
            "dtype": self.plan.dtype,
            "batch": self.batch,
            "images": self.images,
            "method": method,
        }

    def _memory(self, call: ScreenedCall) -> Row:
        """Return the peak with q, k, v and output, and what is held besides in percent of k and v."""
        tokens = self.first_block
        peak = run_as_timed(_bind(call, tokens), self.plan.device).peak_bytes
        if peak is None:
            return {"peak_mebibytes": None, "extra_memory_percent": None}
        tensor_bytes = tokens[0].numel() * tokens[0].element_size()
        extra = max(0, peak - tensor_bytes)
        return {
            "peak_mebibytes": (peak + 3 * tensor_bytes) / 2**20,
            "extra_memory_percent": 100 * extra / (2 * tensor_bytes),
        }


def fastest_eager_dense(times: Mapping[str, Times]) -> float | None:
    """Return the milliseconds of the dense path that is fastest without a CUDA graph."""
    eager = [time[1] for name, time in times.items() if name.startswith("dense-")]
    return min((time for time in eager if time is not None), default=None)


def _bind(call: ScreenedCall, tokens: Sequence[Tensor]) -> timing.Work:
    """Bind inputs to a call; a peer with a token order of its own gets them in that order."""
    if isinstance(call, peers.TileOrdered):
        return call.bind(*tokens)
    return lambda: call(*tokens)


def _mean(times: Sequence[Times]) -> Times:
    eager = [time[1] for time in times if time[1] is not None]
    first = sum(time[0] for time in times) / len(times)
    return first, sum(eager) / len(eager) if eager else None


def _estimate_columns(estimates: ErrorEstimates | None) -> Row:
    if estimates is None:
        return {}
    return {
        "estimated_error_percent": estimates.estimate,
        "estimated_p95_percent": estimates.p95,
        "estimate_uncertainty_percent": estimates.uncertainty,
        "target_met_percent": estimates.met,
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _ratio(base: float | None, time: float | None) -> float | None:
    return None if base is None or time is None else base / time
