"""`bmfa bench attention`: speed, error and memory of tiled attention against dense paths and peers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa import timing
from bmfa.attention.inputs import Backend
from bmfa.attention.kernels.native import library
from bmfa.attention.result import Screened
from bmfa.checks import check_integer
from bmfa.evidence.bench import baselines, dense, peers, summary
from bmfa.evidence.bench.baselines import DEFAULT_BASELINES
from bmfa.evidence.bench.errors import (
    ErrorEstimates,
    ExactOutputs,
    mean_and_worst,
    measure_errors,
    missed_targets_ignored,
)
from bmfa.evidence.bench.graphs import run_as_timed
from bmfa.evidence.bench.inputs import QKV, RANDOM, InputSource, RecordedInputs, as_projection
from bmfa.evidence.bench.roofline import Limits, kernel_rows
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
from bmfa.quantiles import quantile
from bmfa.records import Record, Row, environment, without_folders

TOKENS = {"cuda": (196, 1024, 4096, 16384, 65536), "cpu": (1024, 4096, 16384)}
BLOCKS = (2, 5, 8, 11)
# Images are timed together up to this number of tokens.
BATCH_TOKENS = 65_536
# The certificate takes about as long as dense attention and is not timed beyond these sizes.
CERTIFIED_TOKENS = {"cuda": 65_536, "cpu": 4_096}
CERTIFIED_SETTING, AUDITED_SHARE = "tiles:0.03", 0.05
# Share of the tiles that is expanded where kernels are timed one by one.
KERNEL_SHARE = 0.06
# Timings of each prefix of the launches of a call, each of up to 20 calls in a graph: a call of 65,536
# tokens has some 40 launches.
KERNEL_REPEATS = 3
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
    """The methods, peers, baselines and precision to time, and the number of timings."""

    methods: tuple[str, ...]
    backend: Backend
    dtype: str
    device: torch.device
    repeats: int
    peers: tuple[str, ...] = ()
    certificate: bool = True
    baselines: tuple[str, ...] = ()
    limits: Limits | None = None  # of the device, if kernels are to be timed one by one
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
    baseline: Sequence[str] | None = None,
    certificate: bool = True,
    kernels: bool = False,
    threads: Sequence[int] = (),
    progress: Progress | None = None,
) -> Record:
    """Time tiled attention, dense attention, baselines and peers on the q, k, v of a model.

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
        baseline: Names such as `mean-tiles:0.06`, `topk:0.1` or `monarch:2`; None for a default list.
        certificate: True to time the certificate and the audit as well.
        kernels: True to time each Triton kernel against its limit as well, on CUDA.
        threads: Numbers of threads of torch to time with on a CPU; rows have a column of them if there
            are several.
        progress: Called with the sizes done and their number.

    Returns:
        A record of rows for every number of tokens: the fastest dense path, all dense paths, tiled
        attention, `auto`, baselines and peers. With the backend "native" also exact attention by it, and
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
        certificate,
        tuple(_for_device(DEFAULT_BASELINES, device) if baseline is None else baseline),
        threads=tuple(check_integer("threads", count, low=1) for count in threads),
    )
    if plan.threads and device.type == "cuda":
        raise ValueError(f"threads is {list(threads)}, and the device is CUDA; omit --threads")
    if kernels and (device.type != "cuda" or plan.backend != "triton"):
        raise ValueError(
            f"kernels are timed on CUDA by the backend triton, not on {device.type} by "
            f"{plan.backend}; omit --kernels"
        )
    for name in plan.baselines:
        baselines.parse(name)
    if plan.dtype not in DTYPES:
        raise ValueError(f"dtype is {plan.dtype!r}; pass one of {', '.join(DTYPES)}")
    if kernels:
        plan = replace(plan, limits=Limits.measure(device, DTYPES[plan.dtype], repeats))
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
        **({} if plan.limits is None else {"limits": plan.limits.describe()}),
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
    return replace(plan, methods=shares, peers=(), baselines=(), certificate=False, limits=None)


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
        """Return the rows of dense paths, tiled attention, `auto`, baselines, peers and the certificate.

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
        calls |= self._baseline_calls(described)
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
        if self.plan.limits is not None:
            rows += self._kernel_rows(self.plan.limits)
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
        if self._certified:
            rows += self._certificate_rows(base)
        return rows

    @property
    def _certified(self) -> bool:
        largest = _for_device(CERTIFIED_TOKENS, self.plan.device)
        return self.plan.certificate and self.inputs.grid.size <= largest

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

    def _baseline_calls(self, described: dict[str, Row]) -> dict[str, ScreenedCall]:
        """Return the baselines that run on this grid; the others are noted."""
        found: dict[str, ScreenedCall] = {}
        grid, prefix = self.inputs.grid, self.inputs.prefix
        for name in self.plan.baselines:
            try:
                baseline = baselines.make(name, grid, prefix, self.plan.backend)
            except ValueError as error:
                self.notes[f"{name} at {grid.size}"] = str(error)
                continue
            found[name] = baseline.attention
            described[name] = {"density_percent": _percent(baseline.density), "ran": baseline.ran}
        return found

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
        e_mean = e_worst = None
        if self._certified and name.startswith("tiled-"):
            e_mean, e_worst = self._mean_energy(name.removeprefix("tiled-"))
        return {
            "density_percent": 100.0 if name.startswith("dense-") else _percent(errors.density),
            "error_l2_percent": errors.mean,
            "worst_block_error_percent": errors.worst_block,
            "error_p95_query_percent": errors.p95_query,
            "smallest_call_error_percent": errors.smallest_call,
            "largest_call_error_percent": errors.largest_call,
            **_estimate_columns(errors.estimates),
            "e_mean": e_mean,
            "worst_block_e_mean": e_worst,
            "error_queries": len(self.exact.queries),
            **self._memory(call),
            "ran": errors.form,
        }

    def _mean_energy(self, setting: str) -> tuple[float, float]:
        """Return the mean bound on E over all queries, and that of the worst block.

        E is that of the attention without the first-order correction, which is a distribution.
        """
        call = tiled_call(
            self.inputs, self.plan.backend, TileSetting.parse(setting), certificate=True
        )
        means: dict[int, list[float]] = {block: [] for block in self.blocks}
        for block, tokens in self.blocks.items():
            for start in range(0, self.images, self.batch):
                result = call(*(x[start : start + self.batch] for x in tokens))
                assert isinstance(result, Screened) and result.stats.energy_bound is not None
                spatial = result.stats.energy_bound[:, :, self.inputs.prefix :]  # (B, H, N)
                means[block] += spatial.mean((1, 2)).tolist()
        return mean_and_worst(means.values())

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

    def _kernel_rows(self, limits: Limits) -> list[Row]:
        """Time each kernel of tiled attention and of mean tiles against its limit."""
        plan, grid, prefix = self.plan, self.inputs.grid, self.inputs.prefix
        setting = TileSetting("tiles", KERNEL_SHARE)
        name = f"mean-tiles:{KERNEL_SHARE:g}"
        calls: dict[str, ScreenedCall] = {
            f"tiled-{setting}": tiled_call(self.inputs, plan.backend, setting),
            name: baselines.make(name, grid, prefix, plan.backend).attention,
        }

        def milliseconds(work: timing.Work) -> float:
            return timing.time_call(work, KERNEL_REPEATS, plan.device)[0]

        rows: list[Row] = []
        for method, call in calls.items():
            work = _bind(call, self.first_block)
            rows += kernel_rows(work, limits, milliseconds, self._frame(method))
        return rows

    def _certificate_rows(self, base: Times) -> list[Row]:
        """Time what the certificate and the audit add, without a graph: both wait for the device."""
        options: dict[str, dict[str, Any]] = {
            "": {},
            "+certificate": {"certificate": "scores"},
            "+certificate-boxes": {"certificate": "boxes"},
            f"+audit:{AUDITED_SHARE:g}": {"audit": AUDITED_SHARE},
        }
        setting = TileSetting.parse(CERTIFIED_SETTING)
        works = {
            name: _bind(
                tiled_call(self.inputs, self.plan.backend, setting, **added), self.first_block
            )
            for name, added in options.items()
        }
        times = timing.time_alternating(works, max(1, self.plan.repeats // 2), self.plan.device)
        dense_time = base[0] if base[1] is None else base[1]
        return [
            {
                **self._frame(f"tiled-{CERTIFIED_SETTING}{name}"),
                "milliseconds": times[name],
                "added_milliseconds": times[name] - times[""],
                "speedup": dense_time / times[name],
                **(self._looseness(works[name]) if "certificate" in name else {}),
            }
            for name in list(options)[1:]
        ]

    def _looseness(self, work: timing.Work) -> Row:
        """Return by how much the certificate of the first block exceeds the error of its queries."""
        result = work()
        assert isinstance(result, Screened) and result.stats.certificate is not None
        spatial = self.exact.queries >= self.inputs.prefix
        queries = self.exact.queries[spatial]
        exact = next(iter(self.exact.outputs.values()))[: self.batch, :, spatial]
        errors = (result.output[:, :, queries].double() - exact).norm(dim=-1)
        bounds = result.stats.certificate[:, :, queries]
        ratios = (bounds / errors)[errors > 0]
        relative = (bounds / exact.norm(dim=-1)).flatten()
        if not ratios.numel():
            return {}
        return {
            "certificate_over_error_median": float(quantile(ratios, 0.5)),
            "certificate_over_error_p95": float(quantile(ratios, 0.95)),
            "certificate_percent_median": 100 * float(quantile(relative, 0.5)),
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
