"""A real Chromium for tests and timings, spoken to over its DevTools pipe: nothing is needed but the browser itself."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

__all__ = ["CHROMIUM", "Browser"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
PATIENCE = 60.0  # seconds for any answer; slow machines share their cores


class Browser:
    """One page in a headless browser, and what it complained about."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--no-first-run", "--disable-extensions", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        # The browser reads descriptor 3 and writes 4; out of their way first, so that neither lands on the other.
        high_in, high_out = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out))
        self._process = os.posix_spawn(
            CHROMIUM,
            [CHROMIUM, *flags, "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, high_in, 3),
                (os.POSIX_SPAWN_DUP2, high_out, 4),
            ],
        )
        for end in (theirs_in, theirs_out, high_in, high_out):
            os.close(end)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[str] = []
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions, blocked or failed requests."""
        self.requests: list[str] = []
        """Every address the page asked for."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(AssertionError):
            self.call("Browser.close")
        until = time.monotonic() + 10
        while os.waitpid(self._process, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(self._process, signal.SIGKILL)
            time.sleep(0.05)
        os.close(self._in)
        os.close(self._out)

    # ---------------------------------------------------------------- the protocol

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def wait_for(self, event: str) -> None:
        """Wait until the page has said so."""
        while event not in self._events:
            self._note(self._receive())
        self._events.remove(event)

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(until - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([a.get("value", a.get("description")) for a in parameters["args"]]))
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    # ---------------------------------------------------------------- what a reader does

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """A window of that size and taste."""
        scale = 2 if phone else 1
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        taste = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[taste])

    def open(self, page: Path) -> float:
        """Open a file; returns the milliseconds until it had loaded and its first frame was drawn."""
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")
        # Two frames on, everything near the window has been drawn.
        return float(self.run(f"{FRAMES}.then(() => performance.now())"))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait for the next frames."""
        self.run(f"{FRAMES}.then(() => 0)")

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into view."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        self.settle()
        x, y = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return x, y

    def click(self, selector: str) -> None:
        """Press and release the mouse on it."""
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def hover(self, selector: str) -> None:
        """Move the mouse to its middle."""
        x, y = self.place(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def press(self, key: str) -> None:
        """A key, on whatever has the focus."""
        codes = {"Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9}
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def screenshot(self, path: Path) -> None:
        """What is in the window, as PNG."""
        picture = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))
