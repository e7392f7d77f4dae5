"""An interrupted benchmark keeps the sizes that are complete."""

import pytest

from bmfa.evidence.bench import attention as attention_bench
from bmfa.evidence.bench import model as model_bench
from bmfa.evidence.bench.inputs import InputSource


def interrupt_call(monkeypatch, owner, name, number):
    """Raise KeyboardInterrupt in the call of this number, from 1."""
    original, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


def bench_attention():
    return attention_bench.run(
        InputSource.open("random"), tokens=[16, 64], methods=["tiles:1"], repeats=1
    )


def bench_model():
    settings = model_bench.Settings(methods=("tiles:1",), repeats=1)
    return model_bench.run(settings, [32, 64])


@pytest.mark.parametrize(
    ("bench", "owner", "second"),
    [
        (bench_attention, attention_bench.SizeBenchmark, "128 pixels"),
        (bench_model, model_bench._SizeBenchmark, "64 pixels"),
    ],
)
def test_complete_sizes_are_kept(monkeypatch, bench, owner, second):
    with monkeypatch.context() as patch:
        interrupt_call(patch, owner, "rows", 2)
        record = bench()
    assert {row["n"] for row in record.rows} == {16}
    assert "interrupted" in record.settings["absent"][second]
    with monkeypatch.context() as patch:
        interrupt_call(patch, owner, "rows", 1)
        with pytest.raises(KeyboardInterrupt):
            bench()
