"""Work shared between the processes of torchrun, on one machine or several."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as distributed

# A process waits for the slowest batch of the others; torchrun ends all if one of them dies.
TIMEOUT = timedelta(days=2)
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """The rank of this process and the number of processes that share the work."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """True if this process prints and writes."""
        return self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank; a collective call."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def from_first(self, work: Callable[[], Result]) -> Result:
        """Return what the first process computes; an error of it is raised in every process."""
        if self.count == 1:
            return work()
        outcome = _try(lambda _: work(), None) if self.first else (None, None)
        result, error = self.exchange(outcome)[0]
        if error is not None:
            raise error
        shared: Result = result
        return shared

    def rounds(
        self, tasks: Iterable[Task], work: Callable[[Task], Result]
    ) -> Iterator[list[tuple[Task, Result]]]:
        """Do all tasks, one for each process in every round, and yield the results of a round.

        Every process receives all results in order. A task does not depend on the process that does
        it, so the results are the same for any number of processes. An error of one process is
        raised in all of them, in the same round.
        """
        remaining = iter(tasks)
        while current_round := list(islice(remaining, self.count)):
            mine = [_try(work, task) for task in current_round[self.rank : self.rank + 1]]
            outcomes = [outcome for outcomes in self.exchange(mine) for outcome in outcomes]
            for _, error in outcomes:
                if error is not None:
                    raise error
            yield [
                (task, result) for task, (result, _) in zip(current_round, outcomes, strict=True)
            ]

    def mine(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Return the tasks that `rounds` assigns to this process."""
        return islice(tasks, self.rank, None, self.count)


def _try(work: Callable[[Task], Result], task: Task) -> tuple[Any, Exception | None]:
    """Return the result of a task, or the error it raised."""
    try:
        return work(task), None
    except Exception as error:
        return None, error


def current() -> Processes:
    """Return the processes of the default group, or this one alone if there is no group."""
    if distributed.is_available() and distributed.is_initialized():
        return Processes(distributed.get_rank(), distributed.get_world_size())
    return Processes()


def launched() -> bool:
    """Return True if torchrun, or a launcher that sets its variables, started several processes."""
    return all(name in os.environ for name in _VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


def cores_per_process() -> int:
    """Return the cores of this machine divided by the processes that torchrun started on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def own_device(device: str) -> str:
    """Return the device of this process: `cuda` becomes `cuda:LOCAL_RANK` under torchrun.

    Raises:
        ValueError: If this machine has fewer CUDA devices than processes.
    """
    if device != "cuda" or not launched():
        return device
    local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= devices:
        raise ValueError(
            f"process {local} of this machine finds {devices} CUDA devices; "
            f"start at most {devices}: torchrun --nproc-per-node {devices}"
        )
    return f"cuda:{local}"


@contextmanager
def joined(device: str = "cpu") -> Iterator[Processes]:
    """Join the process group of torchrun inside the block; gloo carries the results."""
    if not launched() or distributed.is_initialized():
        yield current()
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    nccl = cuda and distributed.is_nccl_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=TIMEOUT)
    try:
        yield current()
    finally:
        distributed.destroy_process_group()
