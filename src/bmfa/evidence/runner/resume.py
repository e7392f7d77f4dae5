"""Partial results of a run in one file, and how a run that was killed continues from it."""

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
from bmfa.data.pictures import PicturesLostError
from bmfa.evidence.runner.processes import Processes
from bmfa.files import write_atomic

FORMAT = "bmfa partial results 2"
# Seconds between two writes; where a write is slow, so many times what it takes.
INTERVAL = 2.0
LEISURE = 20.0

Part = dict[str, Any]  # what one task gave, as JSON holds it
# What is wrong with a part, given the number of its task; None for a part of this experiment.
Check = Callable[[int, Part], str | None]

_SECTIONS = ("settings", "digests", "parts")
_log = logging.getLogger(__name__)


class Checkpoint:
    """The parts of a run by the number of their task, in a file that is the old or the new one.

    `settings` is all that the result depends on: a file made with others is refused, with the first
    that differs. The file is read when this is made, and written by `keep` at intervals.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        experiment: str,
        settings: Mapping[str, Any],
        check: Check,
    ) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(f"--resume {path} is a folder; name a file, created where missing")
        made = {"experiment": experiment, **settings, "bmfa": __version__}
        made["torch"] = torch.__version__
        self.settings: dict[str, Any] = json.loads(json.dumps(made))
        self.parts: dict[int, Part] = {}
        self._digests: dict[int, str] = {}
        if self.path.exists():
            self._read(check)
        else:
            self._write()  # a file that cannot be written is refused before the work
        self._written, self._pause = float("-inf"), INTERVAL

    def keep(self, parts: Mapping[int, Part]) -> None:
        """Add parts; they are on disk at the latest some seconds later, or after `write`."""
        self.parts |= parts
        self._digests |= {number: part_digest(number, part) for number, part in parts.items()}
        if time.monotonic() - self._written >= self._pause:
            self.write()

    def write(self) -> bool:
        """Put all parts on disk now.

        Returns:
            False if the file cannot be written, which is logged: the run goes on without it, since
            its result does not depend on the file.
        """
        start = time.monotonic()
        try:
            self._write()
        except OSError as error:
            _log.warning("bmfa: partial results are not saved: %s", error)
            return False
        finally:
            self._written = time.monotonic()
            self._pause = max(INTERVAL, LEISURE * (self._written - start))
        return True

    def _write(self) -> None:
        content: dict[str, Any] = {"format": FORMAT, "settings": self.settings}
        for name, values in (("digests", self._digests), ("parts", self.parts)):
            content[name] = {str(number): values[number] for number in sorted(self.parts)}
        write_atomic(self.path, json.dumps(content, allow_nan=False))

    def _read(self, check: Check) -> None:
        content = self._content()
        for name, ours in self.settings.items():
            theirs = content["settings"].get(name)
            if theirs != ours:
                raise ValueError(
                    f"{self.path} belongs to another run: {name} was {_short(theirs)} and is "
                    f"{_short(ours)}; pass the settings it was made with, or another --resume file"
                )
        parts, digests = content["parts"], content["digests"]
        for number, part in parts.items():
            fault = check(int(number), part) if number.isdecimal() else "its number is none"
            if fault is None and digests.get(number) != part_digest(int(number), part):
                fault = "its values do not match their fingerprint"
            if fault is not None:
                raise self._refusal(f"part {number} is damaged: {fault}")
        self.parts = {int(number): part for number, part in parts.items()}
        self._digests = {int(number): digests[number] for number in parts}

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._refusal(f"no whole JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise self._refusal(f"it has no format {FORMAT!r}")
        if not all(isinstance(content.get(name), dict) for name in _SECTIONS):
            raise self._refusal(f"one of {', '.join(_SECTIONS)} is missing")
        return content

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.path} holds no usable partial results ({reason}); "
            "delete it to start afresh, or pass another --resume file"
        )


def open_checkpoint(
    path: str | os.PathLike[str] | None,
    experiment: str,
    settings: Callable[[], Mapping[str, Any]],
    check: Check,
    processes: Processes,
) -> Checkpoint | None:
    """The checkpoint of a run in its first process; None in the others, and without a path."""
    opened: list[Checkpoint] = []
    if path is not None:
        # An error in the first process ends all of them.
        processes.from_first(lambda: opened.append(Checkpoint(path, experiment, settings(), check)))
    return opened[0] if opened else None


@contextmanager
def lost_pictures_explained(
    resume: str | os.PathLike[str] | None, checkpoint: Checkpoint | None
) -> Iterator[None]:
    """Save the parts where the pictures vanish inside the block, and add to the error how to go on.

    Args:
        resume: the file of partial results that the user named, None without one.
        checkpoint: what is written there by this process; None in all processes but the first.

    Raises:
        PicturesLostError: with what is saved and the way to continue.
    """
    try:
        yield
    except PicturesLostError as error:
        if resume is None:
            rest = "nothing of this run is saved (--resume FILE would keep partial results)"
        elif checkpoint is not None and not checkpoint.write():
            rest = f"the last results could not be saved in {resume}"
        else:
            count = None if checkpoint is None else len(checkpoint.parts)
            saved = (
                "1 batch is" if count == 1 else f"{'all' if count is None else count} batches are"
            )
            rest = f"{saved} saved in {resume}, and --resume {resume} continues from there"
        raise PicturesLostError(f"{error}; {rest}") from None


def part_digest(number: int, part: Part) -> str:
    """The fingerprint of a part, which tells it from every other and from a changed one."""
    return digest([str(number), json.dumps(part, sort_keys=True)])


def digest(pieces: Iterable[str | bytes]) -> str:
    """A short fingerprint of some content."""
    total = hashlib.sha256()
    for piece in pieces:
        data = piece.encode("utf-8", "surrogateescape") if isinstance(piece, str) else piece
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """A fingerprint of a model's weights."""

    def pieces() -> Iterable[str | bytes]:
        for name, tensor in model.state_dict().items():
            plain = tensor.detach().cpu().contiguous()
            yield f"{name} {plain.dtype} {tuple(plain.shape)}"
            yield plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""

    return digest(pieces())


def _short(value: Any) -> str:
    """A setting in few words."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
