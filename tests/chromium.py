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
# The page stands in a frame, so that it can be narrower than any window and stays as it is. Chromium
# prints the document when it is loaded, which it is not while the document of the second frame is open.
OUTER = """<!DOCTYPE html><meta charset="utf-8">
<iframe></iframe><iframe hidden></iframe><pre></pre><script>
const args = %s, result = document.querySelector("pre");
const [frame, open] = document.querySelectorAll("iframe");
open.contentDocument.open();
const later = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const drawn = () => new Promise((done) => frame.contentWindow.requestAnimationFrame(done));
const settle = async () => { await drawn(); await drawn(); await later(150); };
Object.assign(frame, { width: args.width, height: args.height, src: args.page });
frame.addEventListener("load", async () => {
  try {
    while (!frame.contentWindow.bmfa?.panels[0].tree) await drawn();
    await settle();
    const page = frame.contentWindow, { bmfa, document } = page;
    const value = await (async () => { %s })();
    result.textContent = JSON.stringify({ value });
  } catch (error) {
    result.textContent = JSON.stringify({ error: `${error}\\n${error.stack}` });
  }
  open.contentDocument.close();
}, { once: true });
</script>"""


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def screenshot(page: Path, shot: Path, *, dark: bool = False) -> list[str]:
    """Write a screenshot of a page, and return the lines that were written to the console."""
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--user-data-dir={folder}/profile", "--window-size=1280,2000", *theme]
        command = [str(find_chromium()), *OPTIONS, *options, f"--screenshot={shot}", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


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
        outer.write_text(OUTER % (text, script), encoding="utf-8")
        command = [str(find_chromium()), *OPTIONS, f"--user-data-dir={folder}/profile"]
        command += [
            "--window-size=1400,2400",
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        ]
        done = subprocess.run(
            [*command, outer.as_uri()], capture_output=True, text=True, timeout=300, check=True
        )
    found = re.search("<pre>(.*?)</pre>", done.stdout, re.S)
    assert found and found[1], "the script did not end"
    answer = json.loads(unescape(found[1]))
    assert "error" not in answer, answer["error"]
    return answer["value"], [line for line in done.stderr.splitlines() if "CONSOLE" in line]
