"""Files that appear whole or not at all."""

import os
import sys
import tempfile
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file so that it appears whole or not at all; `-` is standard output for text."""
    if str(path) == "-" and isinstance(content, str):
        sys.stdout.write(content)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
