"""A cached launch starts a compiled kernel directly, and only the kernel that fits its inputs."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from bmfa.attention.kernels.triton import launch


class Compiled:
    """Stands in for triton.compiler.CompiledKernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple[object, ...]] = []

    def run(self, *arguments: object) -> None:
        self.runs.append(arguments)


def test_a_cached_launch_starts_only_what_was_compiled_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, looked_up = Compiled(), []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> object:
            return lambda *a, **options: looked_up.append((grid, a, options)) or compiled

    stream = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    hooks = SimpleNamespace(calls=[])
    runtime = SimpleNamespace(launch_enter_hook=hooks, launch_exit_hook=hooks)
    monkeypatch.setattr(launch, "driver", stream)
    monkeypatch.setattr(launch.triton, "knobs", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(launch, "_DIRECT", True)
    x = torch.zeros(64)
    current = x.get_device()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    cached = launch.CachedLaunch(Kernel(), 5, (3, "constant"), num_warps=4)
    cached(x[1:])  # unaligned: a kernel compiled for it does not fit others
    cached(x)
    assert [entry[2] for entry in looked_up] == [{"num_warps": 4}] * 2 and not compiled.runs
    cached(x)
    assert len(looked_up) == 2
    expected = (5, 1, 1, 7, "function", "metadata", None, None, None, x.data_ptr(), 3, "constant")
    assert compiled.runs == [expected]
    cached(x[1:])
    hooks.calls.append(print)
    cached(x)
    hooks.calls.clear()
    current = 1
    cached(x)
    assert len(looked_up) == 5 and len(compiled.runs) == 1
