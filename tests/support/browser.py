"""A headless browser, driven over the pipe of its DevTools protocol; and where to find one."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-dev-shm-usage", "--disable-component-update", "--disable-extensions", "--hide-scrollbars"),
    *("--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows"),
    *("--remote-debugging-pipe", "--force-color-profile=srgb", "about:blank"),
)
_PATIENCE_S = 60.0
_READ, _WRITE = 3, 4  # where the browser reads commands and writes answers


def find_browser() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def needed_browser() -> str:
    """The browser's path. Without one a test is skipped on a machine of a person's, and fails where CI runs."""
    path = find_browser()
    if path is None:
        says = f"the viewer is tested in a browser, one of {', '.join(_NAMES)}: `make browser` installs chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(says)
        pytest.skip(says)
    return path


class Browser:
    """One process, with a profile of its own that is removed in the end."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="browser-")
        to_browser, from_browser = (self._high_pipe() for _ in range(2))
        actions = [
            (os.POSIX_SPAWN_DUP2, to_browser[0], _READ),
            (os.POSIX_SPAWN_DUP2, from_browser[1], _WRITE),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        command = [path, f"--user-data-dir={self._profile.name}", *_FLAGS]
        self._pid = os.posix_spawn(path, command, os.environ, file_actions=actions, setpgroup=0)
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._out, self._in = to_browser[1], from_browser[0]
        self._unread = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    @staticmethod
    def _high_pipe() -> tuple[int, int]:
        """Two ends that lie above the numbers which the browser's take."""
        low = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
        for end in low:
            os.close(end)
        return ends[0], ends[1]

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of one command. Events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._write(json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _write(self, message: bytes) -> None:
        while message:
            message = message[os.write(self._out, message) :]

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer within {_PATIENCE_S} s"
            some = os.read(self._in, 1 << 16)
            assert some, "the browser ended"
            self._unread += some
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def open(self, address: str, **window: Any) -> Tab:
        return Tab(self, address, **window)

    def close(self) -> None:
        for end in (self._out, self._in):
            os.close(end)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        with suppress(OSError):  # a child of the browser may still be writing as it ends
            self._profile.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tab:
    """One page. `faults` are what it logged as errors or warnings, and `requests` the addresses it asked for."""

    def __init__(self, browser: Browser, address: str, *, width: int = 1100, height: int = 760, dark: bool = False):
        self._browser = browser
        self._target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.send("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self.resize(width, height)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._send("Emulation.setEmulatedMedia", features=theme)
        self._send("Page.bringToFront")  # frames of hidden pages wait
        self._send("Page.navigate", url=address)
        self.wait("globalThis.viewer?.state.image")

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of what it promises, as plain data."""
        found = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, patience_s: float = 30.0) -> None:
        deadline = time.monotonic() + patience_s
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"not within {patience_s} s: {condition}; {self.faults}"
            time.sleep(0.02)

    def settle(self, patience_s: float = 30.0) -> None:
        """Until all cells are counted and drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
        self.wait("viewer.state.image.density.finished && !viewer.frameAsked", patience_s)

    def wheel(self, x: float, y: float, delta: float) -> None:
        self._mouse("mouseWheel", x, y, deltaX=0, deltaY=delta)

    def move(self, x: float, y: float) -> None:
        self._mouse("mouseMoved", x, y)

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        self._mouse("mouseMoved", *start)
        self._mouse("mousePressed", *start, button="left", clickCount=1)
        for step in range(1, 5):
            place = (a + (b - a) * step / 4 for a, b in zip(start, stop, strict=True))
            self._mouse("mouseMoved", *place, button="left", buttons=1)
        self._mouse("mouseReleased", *stop, button="left", clickCount=1)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, x, y, button="left", clickCount=1)

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def press(self, key: str, *, shift: bool = False) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self._send("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0, **more)

    def touch(self, kind: str, points: list[tuple[float, float]]) -> None:
        places = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        self._send("Input.dispatchTouchEvent", type=kind, touchPoints=places)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot", format="png")["data"]))

    @property
    def faults(self) -> list[str]:
        self.evaluate("0")  # what was logged before has arrived then
        kinds = {
            "Runtime.exceptionThrown": lambda event: event["exceptionDetails"],
            "Runtime.consoleAPICalled": lambda event: event if event["type"] in ("error", "warning") else None,
            "Log.entryAdded": lambda event: event["entry"] if event["entry"]["level"] in ("error", "warning") else None,
        }
        found = (kinds[event["method"]](event["params"]) for event in self._own_events() if event["method"] in kinds)
        return [str(fault) for fault in found if fault]

    @property
    def requests(self) -> list[str]:
        events = (event for event in self._own_events() if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in events]

    def _own_events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)
