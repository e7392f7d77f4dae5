"""What `bmfa bench attention` times: settings of tiled attention by name, and how far each is off."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor

from bmfa.attention.api import screened_attention
from bmfa.attention.inputs import Backend, Form
from bmfa.attention.result import Screened
from bmfa.attention.tiling import Tiling
from bmfa.checks import check_number
from bmfa.evidence.bench.dense_paths import exact
from bmfa.evidence.bench.qkv import Recorded, Tensors
from bmfa.evidence.bench.self_check import leaves_of
from bmfa.grid import Grid
from bmfa.quantiles import quantile

TILES = (0.0, 0.01, 0.03, 0.06, 0.1, 0.2)
ERRORS = (0.05, 0.1, 0.2)
DEFAULT_METHODS = {
    "cuda": (
        *(f"tiles:{share:g}" for share in TILES),
        *(f"error:{target:g}" for target in ERRORS),
    ),
    "cpu": ("tiles:0", "tiles:0.03", "tiles:0.1", "error:0.1", "error:0.2"),
}
_NAME = re.compile(r"(tiles|leaves|error):([0-9.eE+-]+)")
# All queries are judged below so many tokens, from there on this many, evenly spread.
FEW, SAMPLED = 16_384, 2_048

Call = Callable[[Tensor, Tensor, Tensor], Tensor | Screened]


@dataclass(frozen=True)
class Setting:
    """How much is asked: a share of the tiles expanded, `leaves` or `error` of screened attention."""

    kind: str
    value: float

    @classmethod
    def parse(cls, name: str) -> "Setting":
        """From tiles:0.03, leaves:0.05 or error:0.1."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(
                f"setting {name!r} is unknown; pass tiles:SHARE, leaves:SHARE or error:E"
            )
        try:
            value = float(found[2])
        except ValueError:
            raise ValueError(f"setting {name!r} has no number; pass e.g. {found[1]}:0.1") from None
        high = torch.inf if found[1] == "error" else 1.0
        check_number(name, value, low=0.0, high=high, open_low=found[1] == "leaves")
        return cls(found[1], value)

    def asked(self, grid: Grid) -> dict[str, Any]:
        """Arguments of `screened_attention`."""
        if self.kind != "tiles":
            return {self.kind: self.value}
        tiling = Tiling(grid)
        return {"leaves": leaves_of(tiling, round(self.value * tiling.tiles))}

    def __str__(self) -> str:
        return f"{self.kind}:{self.value:g}"


def tiled_call(recorded: Recorded, backend: Backend, setting: Setting, **options: Any) -> Call:
    """Tiled attention at a setting."""
    return partial(
        screened_attention,
        grid=recorded.grid,
        prefix=recorded.prefix,
        form="tiled",
        backend=backend,
        **setting.asked(recorded.grid),
        **options,
    )


def auto_call(recorded: Recorded, form: Form | None = None) -> Call:
    """Attention as it comes without a word: the default error, or dense where that is faster."""
    return partial(screened_attention, grid=recorded.grid, prefix=recorded.prefix, form=form)


@dataclass(frozen=True, eq=False)
class Truth:
    """Exact outputs of some queries, in float64, for every block."""

    queries: Tensor
    outputs: dict[int, Tensor]  # (pictures, heads, queries, d)

    @classmethod
    def of(cls, recorded: Recorded) -> "Truth":
        """Of all queries, or of an even sample that meets every column of the grid."""
        tokens = recorded.prefix + recorded.grid.size
        device = next(iter(recorded.blocks.values()))[0].device
        step = 1 if recorded.grid.size < FEW else tokens // SAMPLED
        while gcd(step, recorded.grid.width) != 1:
            step -= 1
        queries = torch.arange(0, tokens, step, device=device)
        outputs = {
            block: exact(q[:, :, queries], k, v) for block, (q, k, v) in recorded.blocks.items()
        }
        return cls(queries, outputs)


@dataclass(frozen=True)
class Judged:
    """Errors in per cent, and the share of tiles expanded, where there are tiles."""

    error: float
    worst_block: float
    p95: float
    density: float | None
    form: str | None


def judge(
    call: Call, inputs: dict[int, Tensors], truth: Truth, batch: int, density: float | None = None
) -> Judged:
    """Relative L2 error: the mean over pictures and blocks, that of the worst block, P95 of queries."""
    errors: dict[int, list[float]] = {block: [] for block in inputs}
    queries: list[Tensor] = []
    densities: list[float] = []
    form = None
    for block, tokens in inputs.items():
        for start in range(0, len(tokens[0]), batch):
            some = slice(start, start + batch)
            result = call(*(x[some] for x in tokens))
            if isinstance(result, Screened):
                form = result.stats.form
                densities += [] if result.stats.density is None else [result.stats.density]
            output = result.output if isinstance(result, Screened) else result
            wanted = truth.outputs[block][some]
            apart = output[:, :, truth.queries].double() - wanted
            whole = apart.flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
            errors[block] += whole.tolist()
            queries.append((apart.norm(dim=-1) / wanted.norm(dim=-1)).flatten().cpu())
    if densities:
        density = sum(densities) / len(densities)
    mean, worst = mean_and_worst(errors.values())
    return Judged(
        100 * mean, 100 * worst, 100 * float(quantile(torch.cat(queries), 0.95)), density, form
    )


def mean_and_worst(blocks: Iterable[Sequence[float]]) -> tuple[float, float]:
    """The mean over all pictures of all blocks, and the largest mean of one block."""
    lists = list(blocks)
    whole = [value for block in lists for value in block]
    return sum(whole) / len(whole), max(sum(block) / len(block) for block in lists)
