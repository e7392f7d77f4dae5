"""The parts of a run: divided between processes, saved to a file, and added up.

A part is the JSON result of some images. It does not depend on the process that computes it, so a run
gives the same numbers in any number of processes, and after any interruption.
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as distributed
from torch import nn

from bmfa import __version__
from bmfa.data.images import ImagesLostError
from bmfa.evidence.runner import Progress

FORMAT = "bmfa partial results 3"
# A process waits for the slowest part of the others; torchrun ends all if one of them dies.
TIMEOUT = timedelta(days=2)

# Numbers, lists and dictionaries of them; `skipped` has the reasons why images could not be read.
Part = dict[str, Any]
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


def add(parts: Sequence[Any]) -> Any:
    """Add parts: numbers exactly, in any order and grouping; lists end to end; dictionaries by key.

    Example:
        >>> add([{"sum": 0.5, "names": ["a"]}, {"sum": 0.25, "names": ["b"], "more": 1}])
        {'sum': 0.75, 'names': ['a', 'b'], 'more': 1}
    """
    if isinstance(parts[0], dict):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: add([part[key] for part in parts if key in part]) for key in keys}
    if isinstance(parts[0], list):
        return [one for part in parts for one in part]
    return sum(parts) if all(isinstance(part, int) for part in parts) else math.fsum(parts)


def compute_parts(
    sizes: Sequence[int],
    compute: Callable[[Sequence[int]], Iterator[Part]],
    *,
    resume: str | os.PathLike[str] | None = None,
    identity: Callable[[], Mapping[str, Any]] = dict,
    progress: Progress | None = None,
) -> Iterator[Part]:
    """Yield all parts of a run in order, in every process.

    Parts of the file are not computed again, unless images could not be read.

    Args:
        sizes: The number of images in each part.
        compute: Yields the parts of some numbers, in their order.
        resume: The file of `--resume`, created if missing; None for a run without one.
        identity: Returns all that the parts depend on; called if there is a file.
        progress: Called with the images done and their number.

    Raises:
        ValueError: If the file is damaged or belongs to another run.
        OSError: If the file cannot be created.
        ImagesLostError: With what is saved and how to continue.
    """
    file = None if resume is None else PartFile(resume, identity())
    saved = from_first(file.read) if file is not None else {}
    done = {n: part for n, part in saved.items() if n < len(sizes) and not part["skipped"]}
    left = [number for number in range(len(sizes)) if number not in done]
    reached = 0
    try:
        with closing(compute(left[rank() :: count()])) as mine:  # type: ignore[type-var]
            for start in range(0, len(left) + 1, count()):  # once more for what was saved
                numbers = left[start : start + count()]
                found: list[Any] = gather(lambda: next(mine, None)) if numbers else []
                for number, part in zip(numbers, found, strict=False):
                    done[number] = part
                    if file is not None and rank() == 0:
                        file.append(number, part)
                if progress is not None and numbers:
                    progress(sum(sizes[number] for number in done), sum(sizes))
                while reached in done:
                    yield done[reached]
                    reached += 1
    except ImagesLostError as error:
        state = "nothing of this run is saved (--resume FILE would keep partial results)"
        if file is not None:
            batches = "1 batch is" if len(done) == 1 else f"{len(done)} batches are"
            state = f"{batches} saved in {resume}, and --resume {resume} continues from there"
        raise ImagesLostError(f"{error}; {state}") from None


class PartFile:
    """A file of one line for each part, after a first line for the run.

    A line is written when its part is done. A process that is killed while it writes leaves a torn
    last line, which is not read.

    Args:
        path: The file, created if missing.
        identity: All that the parts depend on.

    Raises:
        ValueError: If the path is that of a folder.
    """

    def __init__(self, path: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        self.path, self.open = Path(path), True
        versions = {"bmfa": __version__, "torch": torch.__version__}
        self.header = json.loads(json.dumps({"format": FORMAT, **identity, **versions}))
        if self.path.is_dir():
            raise ValueError(
                f"--resume {path} is a folder; pass the name of a file, which is created if missing"
            )

    def read(self) -> dict[int, Part]:
        """Return the parts of the file by number, and prepare it for more.

        Raises:
            ValueError: If the file is damaged or belongs to another run.
            OSError: If it cannot be read or created.
        """
        if not self.path.exists():
            self.path.write_text(json.dumps(self.header) + "\n", "utf-8")
            return {}
        whole, newline, torn = self.path.read_bytes().rpartition(b"\n")
        try:
            header, *lines = [json.loads(line) for line in (whole + newline).splitlines()]
        except (ValueError, RecursionError) as error:
            raise self._unusable(f"a line is not JSON: {error}") from None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise self._unusable(f"its format is not {FORMAT!r}")
        for name, ours in self.header.items():
            if header.get(name) != ours:
                raise ValueError(
                    f"{self.path} belongs to another run: {name} was "
                    f"{json.dumps(header.get(name))[:60]} and is {json.dumps(ours)[:60]}; pass the "
                    "settings it was made with, or another --resume file"
                )
        parts: dict[int, Part] = {}
        for line in lines:
            if not isinstance(line, list) or line[2:] != [digest(line[:2])]:
                raise self._unusable(f"part {line[:1]} does not match its fingerprint")
            parts[line[0]] = line[1]
        if torn:
            os.truncate(self.path, len(whole) + 1)
        return parts

    def append(self, number: int, part: Part) -> None:
        """Write a part; a disk that is full ends the writing, not the run."""
        if not self.open:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([number, part, digest([number, part])]) + "\n")
        except OSError as error:
            _log.warning("bmfa: partial results are not saved in %s: %s", self.path, error)
            self.open = False

    def _unusable(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.path} holds no usable partial results ({reason}); "
            "delete it to start afresh, or pass another --resume file"
        )


def digest(value: Any) -> str:
    """Return a digest of a JSON value, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """Return a digest of the names, dtypes, shapes and values of a model's state."""
    total = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous()
        total.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        total.update(values.flatten().view(torch.uint8).numpy() if values.numel() else b"")
    return total.hexdigest()[:16]


def rank() -> int:
    """Return the rank of this process; the first one prints and writes."""
    return distributed.get_rank() if _is_joined() else 0


def count() -> int:
    """Return the number of processes that share the run."""
    return distributed.get_world_size() if _is_joined() else 1


def _is_joined() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def gather(work: Callable[[], Result]) -> list[Result]:
    """Work in every process and return all results by rank; an error of one is raised in all."""
    if count() == 1:
        return [work()]
    try:
        outcome: tuple[Any, Exception | None] = work(), None
    except Exception as error:
        outcome = None, error
    outcomes: list[Any] = [None] * count()
    distributed.all_gather_object(outcomes, outcome)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [result for result, _ in outcomes]


def from_first(work: Callable[[], Result]) -> Result:
    """Return in every process what the first one computes."""
    results: list[Any] = gather(lambda: work() if rank() == 0 else None)
    first: Result = results[0]
    return first


def launched() -> bool:
    """Return True if torchrun, or a launcher that sets its variables, started several processes."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1


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
def joined(device: str = "cpu") -> Iterator[None]:
    """Join the process group of torchrun inside the block; gloo carries the results."""
    if not launched() or _is_joined():
        yield
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield
    finally:
        distributed.destroy_process_group()
