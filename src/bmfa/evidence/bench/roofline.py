"""The time of each Triton kernel of a call against its limit: bytes over bandwidth, flops over peak."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from bmfa import timing
from bmfa.records import Row

if TYPE_CHECKING:
    from bmfa.attention.kernels.triton.launch import LaunchSequence

# Sizes at which a copy and a product reach the limits of a large GPU: far above its caches of some
# 50 MB, and 1.1e12 flops.
COPY_BYTES, PRODUCT_SIDE = 2**30, 8192

Timer = Callable[[timing.Work], float]  # a call to its milliseconds
Work = tuple[float, float]  # bytes and flops


@dataclass(frozen=True)
class Limits:
    """What a device can do, measured by one large copy and one large product."""

    bytes_per_second: float
    flops_per_second: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype, repeats: int) -> "Limits":
        """Time a copy (each byte is read and written) and a product of square matrices."""
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_time, _ = timing.time_call(partial(target.copy_, source), repeats, device)
        shape = (PRODUCT_SIDE, PRODUCT_SIDE)
        left, right = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        product = torch.empty_like(left)
        multiply = partial(torch.mm, left, right, out=product)
        product_time, _ = timing.time_call(multiply, repeats, device)
        return cls(2 * COPY_BYTES / copy_time * 1e3, 2 * PRODUCT_SIDE**3 / product_time * 1e3)

    def milliseconds(self, work: Work) -> float:
        """Return the least time in which the bytes and the flops can be done."""
        moved, computed = work
        return 1e3 * max(moved / self.bytes_per_second, computed / self.flops_per_second)

    def describe(self) -> dict[str, float]:
        """Return both limits for the settings of a record."""
        return {
            "gigabytes_per_second": self.bytes_per_second / 1e9,
            "teraflops": self.flops_per_second / 1e12,
        }


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel of a sequence with its tensors and other arguments by name, and its grid."""

    kernel: str
    tensors: dict[str, Tensor]
    arguments: dict[str, Any]
    grid: tuple[int, int, int]

    def bytes_of(self, *names: str) -> float:
        """Return the bytes of some tensors."""
        return float(sum(self.tensors[x].numel() * self.tensors[x].element_size() for x in names))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def batch_heads(self) -> int:
        """Number of heads, batch included; a tensor of a head has it as its first dimension."""
        for name in ("q", "k", "v", "o"):
            if name in self.tensors:
                shape = self.tensors[name].shape
                return shape[0] * shape[1]
        return next(iter(self.tensors.values())).shape[0]

    @property
    def tokens(self) -> int:
        """Number of spatial tokens of a head."""
        return int(self["height"]) * int(self["width"])


def pool(launch: Launch) -> Work:
    """Read the queries once and write their means; there is no product."""
    return launch.bytes_of(*(name for name in launch.tensors if name != "valid")), 0.0


def represent(launch: Launch) -> Work:
    """Read k and v once, write the tangents of a band of groups; in the first band also probe.

    Representatives need scores, mean keys and mean values. Probes need scores and mean values, and their
    product with the covariance of keys and values of every tile, which needs scores at one query.
    """
    dim, tokens, slots = launch["D"], launch.tokens, launch["num_slots"]
    band = launch["num_rows"] / launch["row_capacity"]
    moved = launch.bytes_of("k", "v")
    moved += band * launch.bytes_of("log_mass", "k_tangent", "v_tangent")
    flops = 6 * launch["num_rows"] * tokens * dim
    if launch["PROBING"]:
        moved += launch.bytes_of("probe_lse", "probe_v", "cross", "probe_cross")
        flops += 4 * slots * tokens * dim
        flops += 2 * tokens * dim + 2 * (tokens + slots * launch["num_tiles"]) * dim**2
    return moved, float(launch.batch_heads * flops)


def levels(launch: Launch) -> Work:
    """Read what probes and their groups know of every tile; two products for each level."""
    probes = launch["num_probes"]
    moved = launch.bytes_of("probe_lse", "probe_v", "probe_cross")
    moved += (probes / launch["row_capacity"]) * launch.bytes_of(
        "log_mass", "k_tangent", "v_tangent"
    )
    flops = 4 * probes * launch["LEVELS"] * launch["num_tiles"] * launch["D"]
    return moved, float(launch.batch_heads * flops)


def choose(launch: Launch) -> Work:
    """Read the statistics of all probes."""
    return launch.bytes_of("level_stats", "probes"), 0.0


def select(launch: Launch) -> Work:
    """Read the masses of the tiles of a band of groups, write their shares."""
    band = launch.grid[0] / launch["row_capacity"]
    return band * launch.bytes_of("log_mass", "coarse_share"), 0.0


def cross(launch: Launch) -> Work:
    """Multiply the shares of the tiles of a band of groups with the covariances of the tiles."""
    rows, tiles, dim = launch["num_rows"], launch["num_tiles"], launch["D"]
    band = rows / launch["row_capacity"]
    moved = launch.bytes_of("cross") + band * launch.bytes_of("coarse_share", "group_cross")
    return moved, float(2 * launch.batch_heads * rows * tiles * dim**2)


@dataclass(frozen=True)
class ExpandedTiles:
    """The expanded tiles of a band of groups, read by the groups themselves or in items."""

    heads: int  # that are not left to the exact kernel
    own: float  # tiles, over all groups and heads
    others: float
    items: float

    @classmethod
    def of(cls, launch: Launch, rows: int, item_capacity: int) -> "ExpandedTiles":
        """Count the tiles of `rows` groups. A group reads ITEM_TILES of them itself, if its others fit
        into the items; where they do not, the fitting share is taken."""
        counts = launch.tensors["expanded_count"].cpu()
        if launch.arguments.get("SKIP_EXACT") and "exact_heads" in launch.tensors:
            counts = counts[launch.tensors["exact_heads"].cpu() == 0]
        positions = launch["first_row"] + torch.arange(rows)
        counts = counts[:, positions * launch["group_stride"] % launch["num_groups"]].double()
        others = (counts - launch["ITEM_TILES"]).clamp(min=0)
        items = float((others / launch["ITEM_TILES"]).ceil().sum())
        fitting = min(1.0, item_capacity / items) if items else 0.0
        read_by_items = fitting * float(others.sum())
        return cls(len(counts), float(counts.sum()) - read_by_items, read_by_items, fitting * items)


def expand(launch: Launch) -> Work:
    """Read k and v once, if a group has more tiles than it reads itself, and write partial outputs."""
    capacity = launch.grid[0]
    rows = min(launch["row_capacity"], launch["num_groups"] - launch["first_row"])
    tiles = ExpandedTiles.of(launch, rows, capacity)
    if not tiles.others:
        return 0.0, 0.0
    moved = launch.bytes_of("k", "v")
    moved += tiles.items / capacity * launch.bytes_of("item_m", "item_l", "item_acc")
    queries = launch["SIDE"] ** 2 * launch["GROUP_TILES"]
    return moved, 4 * tiles.others * queries * launch["SIDE"] ** 2 * launch["D"]


def attention(launch: Launch) -> Work:
    """Read the queries and tangents of a band of groups and, if any tile is expanded, k and v once."""
    rows, dim, slots = launch.grid[0], launch["D"], launch["SIDE"] ** 2
    capacity = len(launch.tensors["item_m"])
    tiles = ExpandedTiles.of(launch, rows, capacity)
    moved = rows / launch["num_groups"] * launch.bytes_of("q", "o")
    moved += (rows / launch["row_capacity"]) * launch.bytes_of(
        "log_mass", "k_tangent", "v_tangent", "group_cross"
    )
    if tiles.own:
        moved += launch.bytes_of("k", "v")
    moved *= tiles.heads / launch.batch_heads
    moved += tiles.items / capacity * launch.bytes_of("item_m", "item_l", "item_acc")
    coarse, queries = launch["num_tiles"] + launch["prefix"], slots * launch["GROUP_TILES"]
    flops = tiles.heads * rows * queries * (4 * coarse * dim + 2 * dim**2)
    return moved, flops + 4 * tiles.own * slots * queries * dim


def exact(launch: Launch) -> Work:
    """Dense attention of the heads that are computed exactly."""
    tokens = launch["prefix"] + launch.tokens
    heads = launch.tensors["exact_heads"].double()
    moved = float(heads.mean()) * launch.bytes_of("q", "k", "v", "o")
    return moved, 4 * float(heads.sum()) * tokens**2 * launch["D"]


def mean_tiles_pool(launch: Launch) -> Work:
    """Read q, k and v once, write the means; multiply keys with values, and prefix queries with keys."""
    moved = launch.bytes_of(*launch.tensors)
    dim, prefix = launch["D"], launch["prefix"]
    flops = 2 * launch.tokens * dim * dim + 4 * prefix * launch.tokens * dim
    return moved, launch.batch_heads * flops


def mean_tiles_score(launch: Launch) -> Work:
    """Read the keys and means once, write lse and gap; multiply representatives with all keys."""
    moved = launch.bytes_of("k", "k_mean", "q_mean", "counts", "lse", "gap")
    if launch["first_group"] == 0:  # the launch that adds up the parts of the pooling
        moved += launch.bytes_of("kv_cov_parts", "kv_cov", "prefix_acc")
    keys = launch.tokens + launch["num_tiles"]
    return moved, 2 * launch.batch_heads * launch["num_rows"] * keys * launch["D"]


def mean_tiles_select(launch: Launch) -> Work:
    """Read lse and gap, and write both again; the prefix is the only product."""
    moved = 2 * launch.bytes_of("lse", "gap") + launch.bytes_of("counts", "k_spread")
    return moved, 2 * launch.batch_heads * launch["num_rows"] * launch["prefix"] * launch["D"]


def mean_tiles_residual(launch: Launch) -> Work:
    """Read keys and values once; multiply representatives with keys, and weights with values."""
    moved = launch.bytes_of("k", "v", "v_mean", "q_mean", "residual_parts")
    return moved, 4 * launch.batch_heads * launch["num_rows"] * launch.tokens * launch["D"]


def mean_tiles_attention(launch: Launch) -> Work:
    """Read the queries, means and, if any tile is expanded, keys and values once; write the outputs."""
    slots, first = launch["SIDE"] ** 2, launch["first_group"]
    tiles = min(launch["num_rows"] * launch["GROUP"], launch["num_tiles"] - first * launch["GROUP"])
    rows = launch.tensors["expanded_count"][:, first : first + launch["num_rows"]]
    expanded = float(rows.double().mean())  # tiles of a group
    share = tiles / launch["num_tiles"]  # of the queries
    moved = share * launch.bytes_of("q", "o") + launch.bytes_of("k_mean", "v_mean", "gap")
    moved += launch.bytes_of("residual_parts", "kv_cov")
    if expanded:
        moved += launch.bytes_of("k", "v")
    keys = launch["num_tiles"] + launch["prefix"] + slots * expanded
    flops = 4 * keys * launch["D"] + 2 * launch["D"] ** 2  # of a query
    return moved, launch.batch_heads * tiles * slots * flops


# Bytes and flops of a launch by the name of its kernel. Bytes are those that must be moved at least
# once; flops are those of the products that the result needs.
WORK: dict[str, Callable[[Launch], Work]] = {
    "pool_kernel": pool,
    "represent_kernel": represent,
    "levels_kernel": levels,
    "choose_kernel": choose,
    "select_kernel": select,
    "cross_kernel": cross,
    "expand_kernel": expand,
    "attention_kernel": attention,
    "exact_kernel": exact,
    "mean_pool_kernel": mean_tiles_pool,
    "mean_score_kernel": mean_tiles_score,
    "mean_select_kernel": mean_tiles_select,
    "mean_residual_kernel": mean_tiles_residual,
    "mean_attention_kernel": mean_tiles_attention,
}


@dataclass
class _Sequences:
    """Sequences of launches and the tensors that they were called with."""

    calls: list[tuple["LaunchSequence", tuple[Tensor, ...]]] = field(default_factory=list)


@contextmanager
def recorded_sequences() -> Iterator[_Sequences]:
    """Record the launch sequences that run inside the `with` block."""
    from bmfa.attention.kernels.triton.launch import LaunchSequence

    found = _Sequences()
    run = LaunchSequence.__call__

    def record(sequence: LaunchSequence, *inputs: Tensor) -> None:
        found.calls.append((sequence, inputs))
        run(sequence, *inputs)

    with mock.patch.object(LaunchSequence, "__call__", record):
        yield found


class TimedSequence:
    """The launches of a sequence on fixed tensors, which can be timed one by one."""

    def __init__(self, sequence: "LaunchSequence", inputs: Sequence[Tensor]) -> None:
        memory = inputs[0].new_empty((sequence.workspace.bytes,), dtype=torch.uint8)
        self.sequence = sequence
        self.tensors = [*inputs, *sequence.workspace.views(memory)]
        self.run(len(sequence.steps))

    def run(self, count: int) -> None:
        """Launch the first kernels."""
        for launch, indices in self.sequence.steps[:count]:
            launch(*(self.tensors[index] for index in indices))

    def launches(self) -> list[Launch]:
        """Describe every launch."""
        found = []
        for launch, indices in self.sequence.steps:
            names = launch.kernel.arg_names
            tensors = {self.sequence.names[index]: self.tensors[index] for index in indices}
            rest = [name for name in names if name not in tensors]
            arguments = dict(zip(rest, launch.rest, strict=False))
            found.append(Launch(launch.kernel.__name__, tensors, arguments, launch.grid))
        return found

    def milliseconds(self, timer: Timer) -> list[float]:
        """Return the time of each launch: that of all launches up to it, less those before it.

        A launch cannot be repeated alone, because it may overwrite what it reads.
        """
        ends = [0.0]
        for count in range(1, len(self.sequence.steps) + 1):
            ends.append(timer(partial(self.run, count)))
        return [max(0.0, after - before) for before, after in pairwise(ends)]


def kernel_rows(call: timing.Work, limits: Limits, timer: Timer, frame: Row) -> list[Row]:
    """Return a row for each Triton kernel that a call launches through a launch sequence.

    Args:
        call: The call.
        limits: Limits of the device.
        timer: Returns the milliseconds of a call.
        frame: Keys that all rows share.

    Returns:
        Rows with kernel, launches, milliseconds of all its launches, bytes, flops,
        limit_milliseconds and limit_percent; None where a kernel is not in `WORK`.
    """
    call()  # compiles
    with recorded_sequences() as recorded:
        call()
    totals: dict[str, dict[str, Any]] = {}
    for sequence, inputs in recorded.calls:
        timed = TimedSequence(sequence, inputs)
        times = timed.milliseconds(timer)
        for launch, milliseconds in zip(timed.launches(), times, strict=True):
            start = {"launches": 0, "milliseconds": 0.0, "bytes": 0.0, "flops": 0.0}
            total = totals.setdefault(launch.kernel, start)
            total["launches"] += 1
            total["milliseconds"] += milliseconds
            moved, flops = _work_of(launch)
            total["bytes"] += moved
            total["flops"] += flops
    return [_row(name, total, limits, frame) for name, total in totals.items()]


def _work_of(launch: Launch) -> Work:
    """Return bytes and flops; NaN for a kernel without an entry, or whose arguments are others."""
    try:
        return WORK[launch.kernel](launch)
    except KeyError:
        return math.nan, math.nan


def _row(name: str, total: dict[str, Any], limits: Limits, frame: Row) -> Row:
    row: dict[str, Any] = {**frame, "what": "kernel", "kernel": name, **total}
    known = not math.isnan(total["bytes"])
    limit = limits.milliseconds((total["bytes"], total["flops"])) if known else None
    percent = None
    if limit is not None and total["milliseconds"] > 0:
        percent = 100 * limit / total["milliseconds"]
    work = {key: total[key] if known else None for key in ("bytes", "flops")}
    return {**row, **work, "limit_milliseconds": limit, "limit_percent": percent}
