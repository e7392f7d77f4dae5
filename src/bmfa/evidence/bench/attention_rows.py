"""All methods on the q, k, v of one size: what runs, how long it takes, how far it is off."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from bmfa import timing
from bmfa.attention import dispatch as tiled
from bmfa.attention.result import Screened
from bmfa.evidence.bench import dense_paths, peers
from bmfa.evidence.bench.attention_methods import (
    Call,
    Setting,
    Truth,
    auto_call,
    judge,
    mean_and_worst,
    tiled_call,
)
from bmfa.evidence.bench.qkv import Recorded, Tensors
from bmfa.evidence.bench.self_check import check_dense
from bmfa.records import Row, without_folders

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Pictures are timed together while they make no more tokens than this.
MOST_TOKENS = 65_536
# The certificate takes about as long as dense attention; beyond this it is not timed.
CERTIFIED_TOKENS = {"cuda": 65_536, "cpu": 4_096}
CERTIFIED, AUDITED = "tiles:0.03", 0.05


@dataclass(frozen=True)
class Plan:
    """How everything is timed."""

    methods: tuple[str, ...]
    backend: str
    dtype: str
    device: str
    repeats: int
    peers: tuple[str, ...] = ()
    certificate: bool = True

    @property
    def place(self) -> torch.device:
        """The device."""
        return torch.device(self.device)


class SizeBench:
    """All methods on the q, k, v of one size."""

    def __init__(self, recorded: Recorded, plan: Plan, notes: dict[str, str]) -> None:
        self.recorded, self.plan, self.notes = recorded, plan, notes
        self.pictures, self.heads, self.dim = recorded.shape
        self.batch = max(1, min(self.pictures, MOST_TOKENS // recorded.grid.size))
        self.truth = Truth.of(recorded)
        dtype = DTYPES[plan.dtype]
        self.inputs: dict[int, Tensors] = {}
        for block, (q, k, v) in recorded.blocks.items():
            self.inputs[block] = (q.to(dtype), k.to(dtype), v.to(dtype))
        self.timed = {
            block: tuple(x[: self.batch].contiguous() for x in tokens)
            for block, tokens in self.inputs.items()
        }

    def rows(self) -> list[Row]:
        """Dense paths, tiled attention at every setting, what the certificate adds, peers."""
        paths = self._dense_paths()
        check_dense(list(paths), DTYPES[self.plan.dtype], self.plan.device, [self.dim])
        works: dict[str, Call] = {f"dense-{name}": call for name, call in paths.items()}
        works |= self._tiled()
        works["auto"] = auto_call(self.recorded)
        densities: dict[str, float] = {}
        works |= self._peers(densities)
        times = self._times(works)
        best = min((name for name in works if name.startswith("dense-")), key=lambda n: times[n][0])
        base = times[best][0], self._fastest_eager(times)
        rows = [
            self._row(name, call, times[name], base, densities.get(name))
            for name, call in works.items()
        ]
        dense = next(row for row in rows if row["method"] == best)
        rows.insert(0, {**dense, "method": "dense", "path": best.removeprefix("dense-")})
        if self.certified:
            rows += self._knowledge(base)
        return rows

    @property
    def certified(self) -> bool:
        """Whether the certificate is asked for, and is no matter of minutes."""
        most = CERTIFIED_TOKENS.get(self.plan.place.type, CERTIFIED_TOKENS["cpu"])
        return self.plan.certificate and self.recorded.grid.size <= most

    def _dense_paths(self) -> dict[str, Call]:
        tokens = next(iter(self.timed.values()))
        found: dict[str, Call] = {}
        for name in (dense_paths.DEFAULT, *dense_paths.PATHS):
            reason = dense_paths.refusal(name, *tokens)
            if reason is None:
                found[name] = dense_paths.dense_path(name)
            else:
                self.notes[f"dense-{name} at {self.recorded.grid.size}"] = reason
        return found

    def _tiled(self) -> dict[str, Call]:
        """A call for each setting; of those that ask for the same on a small grid the first."""
        asked: dict[str, str] = {}
        for name in self.plan.methods:
            asked.setdefault(repr(Setting.parse(name).asked(self.recorded.grid)), name)
        return {
            f"tiled-{name}": tiled_call(self.recorded, self.plan.backend, Setting.parse(name))
            for name in asked.values()
        }

    def _peers(self, densities: dict[str, float]) -> dict[str, Call]:
        """Those that run on these tokens; the others are noted."""
        found: dict[str, Call] = {}
        tokens = next(iter(self.timed.values()))
        grid, prefix = self.recorded.grid, self.recorded.prefix
        for name, (call, density) in peers.methods(list(self.plan.peers), grid, prefix).items():
            try:
                call(*tokens)
            except Exception as error:  # another package's kernels raise whatever they stumble over
                words = [without_folders(word) for word in str(error).split()]
                self.notes[f"{name} at {grid.size}"] = " ".join(words)[:200]
                continue
            found[name], densities[name] = call, density
        return found

    def _times(self, works: dict[str, Call]) -> dict[str, tuple[float, float | None]]:
        """Milliseconds, and those without a graph; the mean over blocks of what reads the data."""
        place, repeats = self.plan.place, self.plan.repeats
        sums: dict[str, list[tuple[float, float | None]]] = {name: [] for name in works}
        for index, tokens in enumerate(self.timed.values()):
            some = {n: w for n, w in works.items() if index == 0 or not n.startswith("dense-")}
            if place.type == "cuda":
                for name, call in some.items():
                    sums[name].append(self._milliseconds(name, call, tokens))
            else:
                bound = {name: _bound(call, tokens) for name, call in some.items()}
                for name, each in timing.time_alternating(bound, repeats, place).items():
                    sums[name].append((each, None))
        return {name: _mean(times) for name, times in sums.items()}

    def _milliseconds(
        self, name: str, call: Call, tokens: Sequence[torch.Tensor]
    ) -> tuple[float, float | None]:
        """With and without a CUDA graph; a dense path is chosen before the clock starts."""
        path = name.removeprefix("dense-")
        if path == name:
            return timing.time_call(_bound(call, tokens), self.plan.repeats, self.plan.place)
        plain = _bound(scaled_dot_product_attention, tokens)
        with dense_paths.only(path):
            return timing.time_call(plain, self.plan.repeats, self.plan.place)

    @staticmethod
    def _fastest_eager(times: dict[str, tuple[float, float | None]]) -> float | None:
        """Milliseconds of the dense path that is fastest without a CUDA graph."""
        eager = [
            each[1]
            for name, each in times.items()
            if name.startswith("dense-") and each[1] is not None
        ]
        return min(eager, default=None)

    def _row(
        self,
        name: str,
        call: Call,
        times: tuple[float, float | None],
        base: tuple[float, float | None],
        density: float | None,
    ) -> Row:
        with tiled.as_recorded(self.plan.place.type == "cuda"):  # as the graphs that were timed
            judged = judge(call, self.inputs, self.truth, self.batch, density)
            memory = self._memory(call)
        percent = None if judged.density is None else 100 * judged.density
        e_mean = e_worst = None
        if self.certified and name.startswith("tiled-"):
            e_mean, e_worst = self._mean_error(name.removeprefix("tiled-"))
        return {
            **self._frame(name),
            "density_percent": 100.0 if name.startswith("dense-") else percent,
            "error_l2_percent": judged.error,
            "worst_block_error_percent": judged.worst_block,
            "error_p95_query_percent": judged.p95,
            "e_mean": e_mean,
            "worst_block_e_mean": e_worst,
            "error_queries": len(self.truth.queries),
            "milliseconds": times[0],
            "milliseconds_eager": times[1],
            "speedup": base[0] / times[0],
            "speedup_eager": _ratio(base[1], times[1]),
            **memory,
            "ran": judged.form,
        }

    def _mean_error(self, setting: str) -> tuple[float, float]:
        """E of the queries, which an error target is for: the mean over all, and of the worst block."""
        call = tiled_call(
            self.recorded, self.plan.backend, Setting.parse(setting), certificate=True
        )
        means: dict[int, list[float]] = {block: [] for block in self.inputs}
        for block, tokens in self.inputs.items():
            for start in range(0, self.pictures, self.batch):
                result = call(*(x[start : start + self.batch] for x in tokens))
                assert isinstance(result, Screened) and result.stats.certificate is not None
                found = result.stats.certificate[:, :, self.recorded.prefix :]
                means[block] += found.mean((1, 2)).tolist()
        return mean_and_worst(means.values())

    def _frame(self, method: str) -> Row:
        return {
            "what": "attention",
            "n": self.recorded.grid.size,
            "heads": self.heads,
            "dim": self.dim,
            "dtype": self.plan.dtype,
            "batch": self.batch,
            "pictures": self.pictures,
            "method": method,
        }

    def _memory(self, call: Call) -> Row:
        """Peak with q, k, v and the output, and what is held beside those in per cent of k and v."""
        tokens = next(iter(self.timed.values()))
        peak = timing.peak_bytes(_bound(call, tokens), self.plan.place)
        if peak is None:
            return {"peak_mebibytes": None, "extra_memory_percent": None}
        each = tokens[0].numel() * tokens[0].element_size()
        extra = max(0, peak - each)
        return {
            "peak_mebibytes": (peak + 3 * each) / 2**20,
            "extra_memory_percent": 100 * extra / (2 * each),
        }

    def _knowledge(self, base: tuple[float, float | None]) -> list[Row]:
        """What the certificate and the audit add, timed call by call: both wait for the device."""
        options: dict[str, dict[str, Any]] = {
            "": {},
            "+certificate": {"certificate": True},
            f"+audit:{AUDITED:g}": {"audit": AUDITED},
        }
        setting = Setting.parse(CERTIFIED)
        tokens = next(iter(self.timed.values()))
        works = {
            name: _bound(tiled_call(self.recorded, self.plan.backend, setting, **some), tokens)
            for name, some in options.items()
        }
        times = timing.time_alternating(works, max(1, self.plan.repeats // 2), self.plan.place)
        dense = base[0] if base[1] is None else base[1]
        return [
            {
                **self._frame(f"tiled-{CERTIFIED}{name}"),
                "milliseconds": times[name],
                "added_milliseconds": times[name] - times[""],
                "speedup": dense / times[name],
            }
            for name in list(options)[1:]
        ]


def _bound(call: Call, tokens: Sequence[torch.Tensor]) -> timing.Work:
    """A call to time; a peer that wants an order of its own has its tokens in that order before."""
    if isinstance(call, peers.TileOrdered):
        return call.prepared(*tokens)
    return lambda: call(*tokens)


def _mean(times: Sequence[tuple[float, float | None]]) -> tuple[float, float | None]:
    eager = [one[1] for one in times if one[1] is not None]
    first = sum(one[0] for one in times) / len(times)
    return first, sum(eager) / len(eager) if eager else None


def _ratio(base: float | None, time: float | None) -> float | None:
    return None if base is None or time is None else base / time
