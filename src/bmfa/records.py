"""Records: the result of an experiment, with its settings and the environment of the run."""

import json
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PureWindowsPath
from typing import Any

Row = dict[str, Any]

# Packages whose versions are written into every record.
VERSIONED_PACKAGES = (
    *("bmfa", "numpy", "torch", "triton"),
    *("matplotlib", "pillow", "pycocotools", "timm", "transformers"),
)

_HUB_NAME = re.compile(r"hf:[\w.-]+/[\w.-]+")
_command: ContextVar[str | None] = ContextVar("command", default=None)


@dataclass(frozen=True)
class Record:
    """The result of one experiment.

    Args:
        experiment: Name of the experiment, such as `"synthetic"`.
        settings: Settings of the run.
        rows: Results, one flat dictionary for each row.
        environment: Versions, device and command of the run; those of this process by default.
    """

    experiment: str
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    environment: Mapping[str, Any] = field(default_factory=lambda: environment())

    def to_json(self) -> str:
        """Return the record as JSON text, with one line for each row."""
        head = asdict(self)
        rows = ",\n    ".join(json.dumps(row, allow_nan=False) for row in head.pop("rows"))
        order = {name: head[name] for name in ("experiment", "settings", "environment")}
        body = json.dumps(order, indent=2, allow_nan=False)
        return f'{body[:-2]},\n  "rows": [\n    {rows}\n  ]\n}}\n'

    @property
    def other_version(self) -> str | None:
        """The version of bmfa that made the record, if it is known and not this one."""
        made = self.environment.get("bmfa")
        return None if made is None or made == _version() else str(made)

    @classmethod
    def from_json(cls, text: str, name: str = "record") -> "Record":
        """Parse a record.

        Args:
            text: JSON text.
            name: Name of the file, for messages.

        Raises:
            ValueError: If the text is not JSON, a key is missing, or its value has another form; the
                message names the file.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{name} is not JSON (line {error.lineno}: {error.msg}); pass a record written by --json"
            ) from None
        given = data if isinstance(data, dict) else {}
        if missing := {"experiment", "settings", "environment", "rows"} - given.keys():
            raise ValueError(
                f"{name} lacks {', '.join(sorted(missing))}; pass a record written by --json"
            )
        rows, frames = data["rows"], (data["settings"], data["environment"])
        flat = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        if not (flat and all(isinstance(one, dict) for one in frames)):
            raise ValueError(
                f"{name} has settings, environment or rows of another form; pass a record written by "
                f"--json of bmfa {_version()}"
            )
        return cls(data["experiment"], data["settings"], data["rows"], data["environment"])


@contextmanager
def made_by_command(arguments: Sequence[str]) -> Iterator[None]:
    """Write the command line into the environment of every record made in this context.

    Args:
        arguments: Words that follow `bmfa` on the command line.
    """
    token = _command.set(shlex.join(("bmfa", *map(without_folders, arguments))))
    try:
        yield
    finally:
        _command.reset(token)


def without_folders(argument: str) -> str:
    """Cut the paths in a word of a command line to the file name; keep names of models on a hub.

    Example:
        >>> without_folders("--weights=/home/me/deit.safetensors")
        '--weights=deit.safetensors'
        >>> without_folders("hf:facebook/deit-tiny-patch16-224")
        'hf:facebook/deit-tiny-patch16-224'
    """
    if argument.startswith("--") and "=" in argument:
        option, _, value = argument.partition("=")
        return f"{option}={without_folders(value)}"
    if _HUB_NAME.fullmatch(argument) or not re.search(r"[/\\]", argument):
        return argument
    prefix = "hf:" if argument.startswith("hf:") else ""
    return prefix + (PureWindowsPath(argument).name or argument)  # splits at both separators


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return the date in UTC, versions, processor, device and, if any, the command of this process."""
    # Imported here so that `bmfa --help` starts quickly.
    import torch

    from bmfa.attention.kernels.native import library

    versions = {}
    for package in VERSIONED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            # A checkout on PYTHONPATH has no metadata of its own.
            versions[package] = _version() if package == "bmfa" else metadata.version(package)
    name = torch.cuda.get_device_name() if device.startswith("cuda") else _processor()
    instructions = library.instruction_set()
    command = _command.get()
    return {
        **({} if command is None else {"command": command}),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "device_name": name,
        "threads": torch.get_num_threads(),
        **({} if instructions is None else {"instruction_set": instructions}),  # of native kernels
    }


def round_digits(value: float, digits: int) -> float:
    """Round to significant digits, so that a file holds the very number that was used."""
    return float(f"{value:.{digits}g}")


def _version() -> str:
    from bmfa import __version__  # the package imports this module

    return __version__


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
