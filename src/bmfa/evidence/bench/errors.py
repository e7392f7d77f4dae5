"""Errors of attention outputs against exact attention in float64."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from statistics import fmean

import torch
from torch import Tensor

from bmfa.attention.result import ErrorEstimate, Screened
from bmfa.evidence.bench.dense import exact_attention
from bmfa.evidence.bench.inputs import QKV, RecordedInputs
from bmfa.evidence.bench.settings import ScreenedCall
from bmfa.quantiles import quantile

# All queries are compared below so many tokens; from there on an even sample of about 2,048.
ALL_QUERIES_TOKENS, SAMPLED_QUERIES = 16_384, 2_048


@dataclass(frozen=True, eq=False)
class ExactOutputs:
    """Exact outputs of some queries in every block of the model."""

    queries: Tensor  # (Q,) indices of tokens
    outputs: dict[int, Tensor]  # (images, heads, Q, d) float64 by block

    @classmethod
    def of(cls, inputs: RecordedInputs) -> "ExactOutputs":
        """Compute all queries, or an even sample that has queries in every column of the grid."""
        tokens = inputs.prefix + inputs.grid.size
        device = next(iter(inputs.blocks.values()))[0].device
        step = 1 if inputs.grid.size < ALL_QUERIES_TOKENS else tokens // SAMPLED_QUERIES
        while gcd(step, inputs.grid.width) != 1:
            step -= 1
        queries = torch.arange(0, tokens, step, device=device)
        outputs = {
            block: exact_attention(q[:, :, queries], k, v)
            for block, (q, k, v) in inputs.blocks.items()
        }
        return cls(queries, outputs)


@dataclass(frozen=True)
class OutputErrors:
    """Relative L2 errors in percent, and the share of tiles expanded if there are tiles."""

    mean: float  # over images and blocks
    worst_block: float
    p95_query: float
    smallest_call: float  # over calls, each of a batch of images in one block
    largest_call: float
    density: float | None
    form: str | None
    estimates: "ErrorEstimates | None"


@dataclass(frozen=True)
class ErrorEstimates:
    """What the calls say of their own errors: `stats.error`, means over calls."""

    estimate: float  # in percent, as are the next two
    p95: float
    uncertainty: float
    met: float | None  # share of the calls that met their target, in percent

    @classmethod
    def of(cls, reports: Sequence[ErrorEstimate]) -> "ErrorEstimates | None":
        """Return the means of what calls report; None if they report nothing."""
        if not reports:
            return None
        met = [report.met for report in reports if report.met is not None]
        return cls(
            100 * fmean(report.estimate for report in reports),
            100 * fmean(report.p95 for report in reports),
            100 * fmean(report.uncertainty for report in reports),
            100 * fmean(met) if met else None,
        )


@contextmanager
def missed_targets_ignored() -> Iterator[None]:
    """Silence the warning about a missed target: the rows of a benchmark say which were missed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "screened_attention measured", UserWarning)
        yield


def measure_errors(
    call: ScreenedCall,
    blocks: Mapping[int, QKV],
    exact: ExactOutputs,
    batch: int,
    run: Callable[[Callable[[], Tensor | Screened]], Tensor | Screened] = lambda work: work(),
) -> OutputErrors:
    """Compare the outputs of a call with exact attention.

    Args:
        call: Attention of q, k, v.
        blocks: q, k, v, each (images, heads, prefix + N, d), by block.
        exact: Exact outputs of the same blocks.
        batch: Images in a call.
        run: Runs a call, for example in a CUDA graph.
    """
    errors: dict[int, list[float]] = {block: [] for block in blocks}
    query_errors: list[Tensor] = []
    call_errors: list[float] = []
    densities: list[float] = []
    reports: list[ErrorEstimate] = []
    form = None
    for block, tokens in blocks.items():
        for start in range(0, len(tokens[0]), batch):
            images = slice(start, start + batch)
            q, k, v = (x[images] for x in tokens)
            result = run(lambda: call(q, k, v))  # noqa: B023
            if isinstance(result, Screened):
                form = result.stats.form
                densities += [] if result.stats.density is None else [result.stats.density]
                report = None if form == "dense" else result.stats.error
                reports += [] if report is None else [report]
            output = result.output if isinstance(result, Screened) else result
            expected = exact.outputs[block][images]
            difference = output[:, :, exact.queries].double() - expected
            relative = difference.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
            errors[block] += relative.tolist()
            call_errors.append(float(difference.norm() / expected.norm()))
            query_errors.append((difference.norm(dim=-1) / expected.norm(dim=-1)).flatten().cpu())
    mean, worst = mean_and_worst(errors.values())
    p95 = float(quantile(torch.cat(query_errors), 0.95))
    density = sum(densities) / len(densities) if densities else None
    return OutputErrors(
        mean=100 * mean,
        worst_block=100 * worst,
        p95_query=100 * p95,
        smallest_call=100 * min(call_errors),
        largest_call=100 * max(call_errors),
        density=density,
        form=form,
        estimates=ErrorEstimates.of(reports),
    )


def mean_and_worst(blocks: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return the mean over all images of all blocks, and the largest mean of one block."""
    values = list(blocks)
    flat = [value for block in values for value in block]
    return sum(flat) / len(flat), max(sum(block) / len(block) for block in values)
