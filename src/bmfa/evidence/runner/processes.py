"""Work shared between processes, on one machine or several: torchrun starts them, this joins them."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as distributed

# One process may wait for another as long as its batch takes; torchrun ends all where one dies.
PATIENCE = timedelta(days=2)
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """This process among all that share the work."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this one prints and writes."""
        return self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """What every process passes, in the order of their ranks; all must call."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def from_first(self, work: Callable[[], Result]) -> Result:
        """What the first process computes while the others wait; an error of it is every one's."""
        if self.count == 1:
            return work()
        outcome = _outcome(lambda _: work(), None) if self.first else (None, None)
        result, fault = self.exchange(outcome)[0]
        if fault is not None:
            raise fault
        shared: Result = result
        return shared

    def rounds(
        self, tasks: Iterable[Task], work: Callable[[Task], Result]
    ) -> Iterator[list[tuple[Task, Result]]]:
        """Work the tasks off, each by one process; every process gets all results, in order.

        A round is one task for each process. Who works on a task never changes what it is made of,
        so results do not depend on the number of processes. An error of one process is raised in
        all of them, in the same round.
        """
        rest = iter(tasks)
        while some := list(islice(rest, self.count)):
            mine = [_outcome(work, task) for task in some[self.rank : self.rank + 1]]
            outcomes = [outcome for outcomes in self.exchange(mine) for outcome in outcomes]
            for _, fault in outcomes:
                if fault is not None:
                    raise fault
            yield [(task, result) for task, (result, _) in zip(some, outcomes, strict=True)]

    def mine(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """The tasks that `rounds` gives to this process."""
        return islice(tasks, self.rank, None, self.count)


def _outcome(work: Callable[[Task], Result], task: Task) -> tuple[Any, Exception | None]:
    """The result of a task, or the error it ended with."""
    try:
        return work(task), None
    except Exception as error:
        return None, error


def current() -> Processes:
    """The processes that were joined, by `joined` or by the calling program; else this one alone."""
    if distributed.is_available() and distributed.is_initialized():
        return Processes(distributed.get_rank(), distributed.get_world_size())
    return Processes()


def launched() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started several processes."""
    return all(name in os.environ for name in _VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


def own_device(device: str) -> str:
    """The device of this process: `cuda` means another one for each process of a machine."""
    if device != "cuda" or not launched():
        return device
    local, here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= here:
        raise ValueError(
            f"process {local} of this machine finds {here} CUDA devices; "
            f"start at most {here}: torchrun --nproc-per-node {here}"
        )
    return f"cuda:{local}"


@contextmanager
def joined(device: str = "cpu") -> Iterator[Processes]:
    """Join the processes that torchrun started, for as long as the block runs.

    Results travel by gloo; beside CUDA devices nccl is set up as well.
    """
    if not launched() or distributed.is_initialized():
        yield current()
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    nccl = cuda and distributed.is_nccl_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=PATIENCE)
    try:
        yield current()
    finally:
        distributed.destroy_process_group()
