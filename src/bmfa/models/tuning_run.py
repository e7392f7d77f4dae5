"""A run of tuning: what it has measured, the file that keeps this, its progress and its time."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bmfa.files import write_atomic

FORMAT = "bmfa tuning 1"
# Seconds between two writes of the file; more is lost only if the process is killed.
SAVE_SECONDS = 20.0


class Run:
    """What was measured, with a file, a progress bar in forward passes, and a clock.

    Args:
        bar: A bar of tqdm.
        file: A file to continue from, which is created if it does not exist; None for none.
        identity: Everything that the measurements depend on.

    Raises:
        ValueError: If the file is damaged or belongs to another run.
        OSError: If it cannot be read.
    """

    def __init__(
        self, bar: Any, file: str | os.PathLike[str] | None, identity: Mapping[str, Any]
    ) -> None:
        self.bar, self.identity = bar, dict(identity)
        self.file = None if file is None else Path(file)
        self.measured: dict[str, Any] = {}
        self.done, self.total, self.later = 0, 0, 0  # forward passes; the last ones of later phases
        self.before, self.saved = 0.0, 0.0  # seconds
        if self.file is not None and self.file.exists():
            self._read(self.file)
        self.start = time.monotonic()

    @property
    def seconds(self) -> float:
        """The time of this run, and of those that it continues."""
        return self.before + time.monotonic() - self.start

    def begin(self, phase: str, expected: Mapping[str, int]) -> None:
        """Begin a phase, with the forward passes that are expected in every phase, in order."""
        names = list(expected)
        self.later = sum(expected[name] for name in names[names.index(phase) + 1 :])
        self.total = self.done + expected[phase] + self.later
        self.bar.total = self.total
        self.bar.set_description(phase)

    def advance(self, passes: int = 1, *, ahead: int = 0) -> None:
        """Count forward passes, with at least some more ahead in this phase."""
        self.done += passes
        self.bar.total = self.total = max(self.total, self.done + ahead + self.later)
        self.bar.update(passes)

    def once(self, key: str, measure: Callable[[], Any], passes: int = 0) -> Any:
        """Return what was measured under a key; if that was before, `passes` need not be made."""
        if key not in self.measured:
            self.measured[key] = measure()
            if self.seconds > self.saved + SAVE_SECONDS:
                self.save()
        elif self.total > self.done + self.later:
            self.bar.total = self.total = max(self.total - passes, self.done + self.later)
        return self.measured[key]

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.file is not None and self.measured:
            data = {"format": FORMAT, "seconds": self.seconds, **self.identity}
            write_atomic(self.file, json.dumps(data | {"measured": self.measured}, indent=1) + "\n")
        self.saved = self.seconds

    def _read(self, file: Path) -> None:
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            self.before, self.measured = float(data["seconds"]), dict(data["measured"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{file} holds no usable measurements ({error!r}); delete it to start afresh, or pass "
                "another file to resume from"
            ) from None
        for name, ours in json.loads(json.dumps(self.identity)).items():
            if data.get(name) != ours:
                raise ValueError(
                    f"{file} belongs to another run: {name} was {data.get(name)} and is {ours}; pass "
                    "what it was made with, or another file to resume from"
                )
