"""Checkpoints: the parts of a run in one file, from which a killed run continues."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bmfa import __version__
from bmfa.data.images import ImagesLostError
from bmfa.evidence.runner import processes as shards
from bmfa.evidence.runner.processes import Processes
from bmfa.files import write_atomic

FORMAT = "bmfa partial results 2"
# Seconds between two writes. A slow write is followed by a pause of WRITE_PAUSE times its duration,
# so that writing takes at most about 5 % of the time.
WRITE_INTERVAL = 2.0
WRITE_PAUSE = 20.0

Part = dict[str, Any]  # the JSON result of one task
# Returns what is wrong with the part of a task number, or None.
Check = Callable[[int, Part], str | None]

_SECTIONS = ("settings", "digests", "parts")
_log = logging.getLogger(__name__)


class Checkpoint:
    """The parts of a run by task number, in memory and in a file that is replaced atomically.

    Args:
        path: The file, created if missing; None keeps the parts in memory alone.
        experiment: Name of the experiment.
        settings: All that the result depends on. A file made with other settings is refused with
            the first difference.
        check: Validates a part that was read.
        processes: The processes that share the run; the first of them reads and writes the file.

    Raises:
        ValueError: If the file is damaged or belongs to another run.
        OSError: If the file cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        experiment: str,
        settings: Mapping[str, Any],
        check: Check,
        processes: Processes | None = None,
    ) -> None:
        self.processes = processes or Processes()
        self.path = None if path is None else Path(path)
        self.parts: dict[int, Part] = {}
        self._digests: dict[int, str] = {}
        self._last_write, self._pause = float("-inf"), WRITE_INTERVAL
        self.settings: dict[str, Any] = {}
        if self.path is None:
            return
        versions = {"bmfa": __version__, "torch": torch.__version__}
        self.settings = json.loads(json.dumps({"experiment": experiment, **settings, **versions}))
        self.parts = self.processes.from_first(lambda: self._open(check))

    def add(self, parts: Mapping[int, Part]) -> None:
        """Add parts; the file is written at intervals."""
        self.parts |= parts
        if not self._writes:
            return
        self._digests |= {number: part_digest(number, part) for number, part in parts.items()}
        if time.monotonic() - self._last_write >= self._pause:
            self.write()

    def write(self) -> bool:
        """Write all parts now.

        Returns:
            False if the file cannot be written. That is logged and the run continues, because its
            result does not depend on the file.
        """
        if not self._writes:
            return True
        start = time.monotonic()
        try:
            self._write()
        except OSError as error:
            _log.warning("bmfa: partial results are not saved: %s", error)
            return False
        finally:
            self._last_write = time.monotonic()
            self._pause = max(WRITE_INTERVAL, WRITE_PAUSE * (self._last_write - start))
        return True

    @property
    def _writes(self) -> bool:
        return self.path is not None and self.processes.first

    def _open(self, check: Check) -> dict[int, Part]:
        assert self.path is not None
        if self.path.is_dir():
            raise ValueError(
                f"--resume {self.path} is a folder; pass the name of a file, which is created if missing"
            )
        if self.path.exists():
            return self._read(check)
        self._write()  # a file that cannot be written is refused before the work
        return {}

    def _write(self) -> None:
        assert self.path is not None
        content: dict[str, Any] = {"format": FORMAT, "settings": self.settings}
        for name, values in (("digests", self._digests), ("parts", self.parts)):
            content[name] = {str(number): values[number] for number in sorted(self.parts)}
        write_atomic(self.path, json.dumps(content, allow_nan=False))

    def _read(self, check: Check) -> dict[int, Part]:
        content = self._content()
        for name, ours in self.settings.items():
            theirs = content["settings"].get(name)
            if theirs != ours:
                raise ValueError(
                    f"{self.path} belongs to another run: {name} was {_shorten(theirs)} and is "
                    f"{_shorten(ours)}; pass the settings it was made with, or another --resume file"
                )
        parts, digests = content["parts"], content["digests"]
        for number, part in parts.items():
            fault = (
                check(int(number), part) if number.isdecimal() else "its number is not an integer"
            )
            if fault is None and digests.get(number) != part_digest(int(number), part):
                fault = "its values do not match their fingerprint"
            if fault is not None:
                raise self._unusable(f"part {number} is damaged: {fault}")
        self._digests = {int(number): digests[number] for number in parts}
        return {int(number): part for number, part in parts.items()}

    def _content(self) -> dict[str, Any]:
        assert self.path is not None
        try:
            content = json.loads(self.path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._unusable(f"incomplete JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise self._unusable(f"its format is not {FORMAT!r}")
        if not all(isinstance(content.get(name), dict) for name in _SECTIONS):
            raise self._unusable(f"one of {', '.join(_SECTIONS)} is missing")
        return content

    def _unusable(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.path} holds no usable partial results ({reason}); "
            "delete it to start afresh, or pass another --resume file"
        )


@contextmanager
def open_checkpoint(
    path: str | os.PathLike[str] | None,
    experiment: str,
    settings: Callable[[], Mapping[str, Any]],
    check: Check,
) -> Iterator[Checkpoint]:
    """Open the checkpoint of a run; save it if Ctrl-C ends the block, or if its images vanish.

    Args:
        path: The file that the user passed as `--resume`; None for a run without one.
        experiment: Name of the experiment.
        settings: Returns all that the result depends on; called only if there is a file.
        check: Validates a part that was read.

    Raises:
        ImagesLostError: With what is saved and how to continue.
    """
    found = {} if path is None else settings()
    checkpoint = Checkpoint(path, experiment, found, check, shards.current())
    try:
        yield checkpoint
    except KeyboardInterrupt:
        checkpoint.write()  # what was added since the last write
        raise
    except ImagesLostError as error:
        if path is None:
            saved = "nothing of this run is saved (--resume FILE would keep partial results)"
        elif not checkpoint.write():
            saved = f"the last results could not be saved in {path}"
        else:
            count = len(checkpoint.parts)
            batches = "1 batch is" if count == 1 else f"{count} batches are"
            saved = f"{batches} saved in {path}, and --resume {path} continues from there"
        raise ImagesLostError(f"{error}; {saved}") from None


def part_digest(number: int, part: Part) -> str:
    """Return a digest of a part and its number."""
    return digest([str(number), json.dumps(part, sort_keys=True)])


def digest(pieces: Iterable[str | bytes]) -> str:
    """Return a digest of 16 hexadecimal digits; it depends on where one piece ends."""
    total = hashlib.sha256()
    for piece in pieces:
        data = piece.encode("utf-8", "surrogateescape") if isinstance(piece, str) else piece
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """Return a digest of the names, dtypes, shapes and values of a model's state."""

    def pieces() -> Iterable[str | bytes]:
        for name, tensor in model.state_dict().items():
            values = tensor.detach().cpu().contiguous()
            yield f"{name} {values.dtype} {tuple(values.shape)}"
            yield values.flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b""

    return digest(pieces())


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
