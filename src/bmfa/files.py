"""Atomic file writes: a file appears complete or not at all."""

import os
import sys
import tempfile
from pathlib import Path


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Write a file that appears complete or not at all.

    Args:
        path: File to write; its folder is created if it is missing. `-` is standard output, for text.
            A device or pipe is written to directly.
        content: Text, written as UTF-8, or bytes.

    Raises:
        OSError: If the file cannot be written; the message names it. An older file is unchanged.
    """
    target, data = Path(path), content.encode() if isinstance(content, str) else content
    try:
        if str(path) == "-" and isinstance(content, str):
            sys.stdout.write(content)
            sys.stdout.flush()
        elif target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _replace(target, data)
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"{'standard output' if str(path) == '-' else target} cannot be written ({reason}); "
            "make room there, or pass another file"
        ) from error


def _replace(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
