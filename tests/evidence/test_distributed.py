"""Several processes: the work of each is its own, and the result that of one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch
from PIL import Image

from bmfa.cli import main
from bmfa.data.classification import EmbeddedImages
from bmfa.evidence.runner import processes as shards
from bmfa.evidence.runner.processes import Processes

METHODS = "--method random-quadrants:0.5 --method optimal:0.01 --method tome:8 --repeats 0"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def launch(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command under torchrun; a free port is chosen."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(processes), "-m", "bmfa", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ),
    )


def alone(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    main([*arguments, "--json", "-"])
    record: dict[str, object] = json.loads(capsys.readouterr().out)
    return record


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Nine images that do not fill the last batch, and one that cannot be read."""
    for index, image in enumerate(EmbeddedImages(9)):
        place = tmp_path / "val" / str(image.label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.pixels).save(place / f"{index}.png")
    (place / "torn.png").write_bytes(b"\x89PNG\r\n")
    return tmp_path / "val"


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_evaluate_gives_the_rows_of_one_process(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path, processes: int
) -> None:
    arguments = f"evaluate --data-dir {data} --batch-size 2 {METHODS}".split()
    expected = alone(capsys, *arguments)
    done = launch(processes, *arguments, "--json", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["rows"] == expected["rows"]
    assert record["rows"][0]["images"] == 9 and record["settings"]["skipped"] == 1
    assert record["settings"]["processes"] == processes
    # One process prints.
    assert done.stdout.count("optimal:0.01") == 1 and done.stdout.count("torn.png") == 1


@pytest.mark.slow
def test_closed_loop_continues_in_more_processes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = f"closed-loop --data-dir {data} --batch-size 2 --layers last-1 --method".split()
    arguments += ["random-quadrants:0.5"]
    expected = alone(capsys, *arguments)
    file = tmp_path / "parts.json"
    alone(capsys, *arguments, "--resume", str(file))
    content = json.loads(file.read_text())
    assert len(content["parts"]) == 5
    for number in ("1", "4"):
        del content["parts"][number]
    file.write_text(json.dumps(content))
    done = launch(2, *arguments, "--resume", str(file), "--json", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == expected["rows"]
    assert len(json.loads(file.read_text())["parts"]) == 5


@pytest.mark.slow
def test_probe_gives_the_rows_of_one_process(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["probe", "--limit", "300", "--workers", "1", "--method", "random-quadrants:0.5"]
    expected = alone(capsys, *arguments)
    done = launch(2, *arguments, "--json", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == expected["rows"]
    assert done.stdout.count("random-quadrants:0.5") == 1


@pytest.mark.slow
def test_an_error_is_told_once_and_ends_all(tmp_path: Path) -> None:
    (tmp_path / "parts.json").write_text("torn")
    resume = ["--resume", f"{tmp_path}/parts.json"]
    done = launch(2, "evaluate", "--limit", "2", "--method", "full", *resume)
    assert done.returncode != 0
    assert done.stderr.count("holds no usable partial results") == 1


def test_an_error_of_one_process_is_raised_in_all() -> None:
    slots: list[object] = [None, None]
    barrier, seen = Barrier(2), ["", ""]

    class Simulated(Processes):
        def exchange(self, value: object) -> list[object]:
            slots[self.rank] = value
            barrier.wait(10)
            found = list(slots)
            barrier.wait(10)
            return found

    def work(task: int) -> int:
        if task == 3:
            raise ValueError("task 3 failed")
        return task

    def run(rank: int) -> None:
        try:
            list(Simulated(rank, 2).rounds(range(6), work))
        except ValueError as error:
            seen[rank] = str(error)

    threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == ["task 3 failed"] * 2


def simulated(count: int, work: "list[list[list[tuple[int, int]]]]") -> None:
    """Ranks as threads that exchange what they pass."""
    slots: list[object] = [None] * count
    barrier = Barrier(count)

    class Simulated(Processes):
        def exchange(self, value: object) -> list[object]:
            slots[self.rank] = value
            barrier.wait(10)
            found = list(slots)
            barrier.wait(10)
            return found

    def run(rank: int) -> None:
        processes = Simulated(rank, count)
        mine = processes.mine(range(7))

        def square(task: int) -> int:
            assert next(mine) == task  # what is read ahead is what is worked on
            return task * task

        work[rank] = list(processes.rounds(range(7), square))

    threads = [Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_every_task_is_done_once_and_results_are_in_order(count: int) -> None:
    results: list[list[list[tuple[int, int]]]] = [[] for _ in range(count)]
    simulated(count, results)
    for rounds in results:
        assert [pair for some in rounds for pair in some] == [(n, n * n) for n in range(7)]
        assert len(rounds) == -(-7 // count)


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not shards.launched() and shards.own_device("cuda") == "cuda"
    with shards.joined() as processes:
        assert processes == Processes(0, 1) and processes.first
        assert processes.exchange("x") == ["x"] and processes.from_first(lambda: 3) == 3


def test_a_machine_with_too_few_devices_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in {**settings, "LOCAL_RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="finds 4 CUDA devices; start at most 4"):
        shards.own_device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert shards.own_device("cuda") == "cuda:3" and shards.own_device("cpu") == "cpu"


def test_sums_do_not_depend_on_threads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "")
    monkeypatch.delenv("MKL_CBWR")
    with pytest.raises(SystemExit):
        main(["evaluate", "--limit", "0"])
    assert "count is 0" in capsys.readouterr().err
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"  # torchrun gives each process one thread


def test_other_commands_run_in_the_first_process_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    main(["synthetic", "--placement", "corner", "--method", "gamma:0.005"])
    assert capsys.readouterr() == ("", "")
