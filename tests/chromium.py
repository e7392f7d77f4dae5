"""The Chromium of the system: it opens a page in a frame and runs a script on it."""

import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    # The script may read the frame; the console goes to standard error.
    *("--allow-file-access-from-files", "--enable-logging=stderr", "--v=0", "--dump-dom"),
)
OUTER = Path(__file__).with_name("chromium.html").read_text("utf-8")


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _open(page: str, *options: str, dark: bool, timeout: float) -> subprocess.CompletedProcess[str]:
    """Open an address in a new profile; the output has the document, then the console."""
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory() as profile:
        command = [str(find_chromium()), *OPTIONS, f"--user-data-dir={profile}", *theme, *options]
        return subprocess.run(
            [*command, page], capture_output=True, text=True, timeout=timeout, check=True
        )


def _console(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def screenshot(page: Path, shot: Path, *, dark: bool = False) -> list[str]:
    """Write a screenshot of a page, and return the lines that were written to the console."""
    options = ("--window-size=1280,2000", f"--screenshot={shot}")
    return _console(_open(page.as_uri(), *options, dark=dark, timeout=60))


def run(
    page: Path,
    script: str,
    *,
    address: str = "",
    width: int = 1280,
    height: int = 900,
    dark: bool = False,
    **args: Any,
) -> tuple[Any, list[str]]:
    """Open a page and run the body of an asynchronous function on it.

    The script sees `page`, the window of the page; its `document` and `bmfa`; `args`; and `settle()`,
    which waits until the page is drawn.

    Returns:
        What the script returns, and the lines that were written to the console.
    """
    given = {"width": width, "height": height, "page": page.as_uri() + address, **args}
    text = json.dumps(given).replace("<", "\\u003c")
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder, "outer.html")
        outer.write_text(OUTER.replace("ARGUMENTS", text).replace("SCRIPT", script), "utf-8")
        done = _open(outer.as_uri(), "--window-size=1400,2400", dark=dark, timeout=300)
    found = re.search("<pre>(.*?)</pre>", done.stdout, re.S)
    assert found and found[1], "the script did not end"
    answer = json.loads(unescape(found[1]))
    assert "error" not in answer, answer["error"]
    return answer["value"], _console(done)
