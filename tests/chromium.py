"""Chromium through its debugging pipe: open pages, evaluate scripts, press, drag, type and photograph.

Messages of the Chrome DevTools protocol are JSON that ends with a zero byte, read by the browser from
descriptor 3 and written to descriptor 4, so that neither a port nor a package is needed.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Seconds after which a browser that does not answer is an error; it normally takes milliseconds.
PATIENCE = 60.0
KEY_CODES = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Escape": 27,
    "Tab": 9,
}


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A headless Chromium that this process started; use `open_browser`."""

    def __init__(self, process: subprocess.Popen, to_browser: int, from_browser: int) -> None:
        self.process, self.to_browser, self.from_browser = process, to_browser, from_browser
        self.buffer = b""
        self.next_id = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive before it are stored."""
        self.next_id += 1
        message: dict[str, Any] = {"id": self.next_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.to_browser, data) :]
        while (answer := self.read()).get("id") != self.next_id:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def read(self) -> dict[str, Any]:
        """Return the next message of the browser."""
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.from_browser], [], [], deadline - time.monotonic())
            data = os.read(self.from_browser, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("Chromium ended or does not answer")
            self.buffer += data
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def open(self, address: str, *, width: int = 1280, height: int = 900, **media: Any) -> "Page":
        """Open a page; `dark=True`, `touch=True` and `scale=2` emulate a device."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        page.prepare(width, height, **media)
        page.navigate(address)
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **params)

    def prepare(
        self, width: int, height: int, *, dark: bool = False, touch: bool = False, scale: float = 1
    ) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=touch,
        )
        if touch:
            self.send("Emulation.setTouchEmulationEnabled", enabled=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def navigate(self, address: str) -> None:
        self.send("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Evaluate an expression, wait for it if it is a promise, and return its value."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of JavaScript with arguments that JSON can hold."""
        return self.evaluate(f"({function})(...{json.dumps(arguments)})")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                raise RuntimeError(f"never true: {condition}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until two frames are drawn."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def problems(self) -> list[str]:
        """Return errors and warnings of the console, exceptions, and requests other than of files."""
        self.evaluate("1")
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(str(params["entry"]))
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    found.append(f"request to {url}")
        return found

    def mouse(self, kind: str, x: float, y: float, *, pressed: bool = False) -> None:
        """Move, press or release the left button: `Moved`, `Pressed` or `Released`."""
        held = {"Pressed": 1, "Released": 0}.get(kind, int(pressed))
        self.send(
            "Input.dispatchMouseEvent",
            type=f"mouse{kind}",
            x=x,
            y=y,
            button="left" if kind != "Moved" or pressed else "none",
            buttons=held,
            clickCount=1,
        )

    def click(self, x: float, y: float) -> None:
        self.mouse("Moved", x, y)
        self.mouse("Pressed", x, y)
        self.mouse("Released", x, y)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float], steps: int = 8) -> None:
        """Press the left button, move in small steps, release."""
        self.mouse("Moved", *start)
        self.mouse("Pressed", *start)
        for step in range(1, steps + 1):
            x, y = (a + (b - a) * step / steps for a, b in zip(start, end, strict=True))
            self.mouse("Moved", x, y, pressed=True)
        self.mouse("Released", *end)
        self.settle()

    def touch(self, *path: tuple[float, float]) -> None:
        """Touch the first point, move over the others, lift the finger."""
        points = [{"x": x, "y": y} for x, y in path]
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=points[:1])
        for point in points[1:]:
            self.send("Input.dispatchTouchEvent", type="touchMove", touchPoints=[point])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def key(self, name: str) -> None:
        """Press and release a key: a character, or a name such as `ArrowLeft`."""
        text = {"text": name} if len(name) == 1 else {}
        code = KEY_CODES.get(name) or ord(name.upper())
        self.send(
            "Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=code, **text
        )
        self.send("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)
        self.settle()

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Return left, top, width and height of the first element, scrolled into view."""
        rectangle = self.call(
            """(selector) => {
              const element = document.querySelector(selector);
              element.scrollIntoView({ block: "center", behavior: "instant" });
              const { left, top, width, height } = element.getBoundingClientRect();
              return [left, top, width, height];
            }""",
            selector,
        )
        return tuple(rectangle)

    def photograph(self, path: str | Path, *, whole: bool = True) -> None:
        """Write a PNG of the page."""
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self.browser.send("Target.closeTarget", targetId=self.target)


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a headless Chromium of its own profile, and end it with the block."""
    program = find_chromium()
    assert program is not None
    inbound, to_browser = os.pipe()
    from_browser, outbound = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update"),
            *("--disable-default-apps", "--mute-audio", "--disable-dev-shm-usage"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}"),
        )

        def connect() -> None:
            # Copies first, so that neither pipe is overwritten before it is moved.
            reading, writing = os.dup(inbound), os.dup(outbound)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        process = subprocess.Popen(
            [program, *options, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=connect,
            close_fds=False,
        )
        os.close(inbound)
        os.close(outbound)
        try:
            yield Browser(process, to_browser, from_browser)
        finally:
            with contextlib.suppress(OSError):
                message = json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0"
                os.write(to_browser, message)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(to_browser)
            os.close(from_browser)
