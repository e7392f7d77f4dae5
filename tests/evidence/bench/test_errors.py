"""Errors of outputs, of single calls, and what calls say of their own errors."""

from types import SimpleNamespace

import pytest
import torch

from bmfa.attention.result import Screened, Stats
from bmfa.evidence.bench.errors import ErrorEstimates, ExactOutputs, measure_errors
from bmfa.evidence.bench.inputs import RecordedInputs
from bmfa.grid import Grid

GRID = Grid(4, 4)


def recorded():
    generator = torch.Generator().manual_seed(0)
    blocks = {block: torch.randn(3, 2, 2, 16, 8, generator=generator).unbind() for block in (1, 4)}
    return RecordedInputs(GRID, 0, blocks)


def scaled_call(factors):
    """Return exact attention times the next factor in every call."""
    queue = iter(factors)

    def call(q, k, v):
        exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
        return exact * (1 + next(queue))

    return call


def test_errors_of_calls_of_one_image():
    inputs = recorded()
    exact = ExactOutputs.of(inputs)
    errors = measure_errors(scaled_call((0.01, 0.03, 0.02, 0.06)), inputs.blocks, exact, batch=1)
    assert errors.mean == pytest.approx(3.0) and errors.worst_block == pytest.approx(4.0)
    assert errors.smallest_call == pytest.approx(1.0)
    assert errors.largest_call == pytest.approx(6.0)
    assert errors.estimates is None and errors.density is None


def test_calls_of_all_images():
    inputs = recorded()
    errors = measure_errors(
        scaled_call((0.01, 0.03)), inputs.blocks, ExactOutputs.of(inputs), batch=2
    )
    assert errors.smallest_call == pytest.approx(1.0)
    assert errors.largest_call == pytest.approx(3.0)


def report(estimate, met):
    return SimpleNamespace(estimate=estimate, p95=2 * estimate, uncertainty=0.001, met=met)


def test_reports_are_averaged():
    found = ErrorEstimates.of([report(0.02, True), report(0.04, False)])
    assert found == ErrorEstimates(
        *(pytest.approx(x) for x in (3.0, 6.0, 0.1)), met=pytest.approx(50.0)
    )
    assert ErrorEstimates.of([report(0.02, None)]).met is None
    assert ErrorEstimates.of([]) is None


def test_dense_calls_report_nothing():
    inputs = recorded()

    def call(q, k, v):
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return Screened(output, Stats("dense", "dense", "", ""), lambda: None)

    errors = measure_errors(call, inputs.blocks, ExactOutputs.of(inputs), batch=2)
    assert errors.estimates is None and errors.form == "dense" and errors.density == 1.0
