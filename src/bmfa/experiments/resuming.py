"""Partial results of a run in one file, and how a run that was killed continues from it."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bmfa import __version__
from bmfa.experiments.shards import Processes
from bmfa.files import write_whole

FORMAT = "bmfa partial results 1"
# Seconds between two writes; where a write is slow, so many times what it takes.
INTERVAL = 2.0
LEISURE = 20.0

Part = dict[str, Any]  # what one task gave, as JSON holds it
Check = Callable[[Part], bool]  # whether a part is one of this experiment


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
        fits: Check,
    ) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(f"--resume {path} is a folder; name a file, created where missing")
        made = {"experiment": experiment, **settings, "bmfa": __version__}
        made["torch"] = torch.__version__
        self.settings: dict[str, Any] = json.loads(json.dumps(made))
        self.parts: dict[int, Part] = {}
        if self.path.exists():
            self._read(fits)
        else:
            self.write()  # what cannot be written is known before the work
        self._written, self._pause = float("-inf"), INTERVAL

    def keep(self, parts: Mapping[int, Part]) -> None:
        """Add parts; they are on disk at the latest some seconds later, or after `write`."""
        self.parts |= parts
        if time.monotonic() - self._written >= self._pause:
            self.write()

    def write(self) -> None:
        """Put all parts on disk now."""
        start = time.monotonic()
        head = {"format": FORMAT, "settings": self.settings}
        batches = {str(number): self.parts[number] for number in sorted(self.parts)}
        write_whole(self.path, json.dumps({**head, "parts": batches}, allow_nan=False))
        self._written = time.monotonic()
        self._pause = max(INTERVAL, LEISURE * (self._written - start))

    def _read(self, fits: Check) -> None:
        content = self._content()
        for name, ours in self.settings.items():
            theirs = content["settings"].get(name)
            if theirs != ours:
                raise ValueError(
                    f"{self.path} belongs to another run: {name} was {_short(theirs)} and is "
                    f"{_short(ours)}; pass the settings it was made with, or another --resume file"
                )
        parts = content["parts"]
        if not all(number.isdecimal() and fits(part) for number, part in parts.items()):
            raise self._refusal("a part is damaged")
        self.parts = {int(number): part for number, part in parts.items()}

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._refusal(f"no whole JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise self._refusal(f"it has no format {FORMAT!r}")
        if not all(isinstance(content.get(name), dict) for name in ("settings", "parts")):
            raise self._refusal("settings or parts are missing")
        return content

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.path} holds no partial results ({reason}); "
            "delete it to start afresh, or pass another --resume file"
        )


def open_checkpoint(
    path: str | os.PathLike[str] | None,
    experiment: str,
    settings: Callable[[], Mapping[str, Any]],
    fits: Check,
    processes: Processes,
) -> Checkpoint | None:
    """The checkpoint of a run in its first process; None in the others, and without a path."""
    opened: list[Checkpoint] = []
    if path is not None:
        # An error in the first process ends all of them.
        processes.from_first(lambda: opened.append(Checkpoint(path, experiment, settings(), fits)))
    return opened[0] if opened else None


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
