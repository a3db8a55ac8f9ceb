"""A headless Chromium that loads one page, spoken to in the DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = ("chromium-headless-shell", "chromium")
WIDTH, HEIGHT = 1160, 1180
# A browser that starts beside other work takes long; one that hangs ends the test.
LIMIT_S = 120.0
# A picture of a page that is loaded again meanwhile never comes, so it is asked for again.
PICTURE_S = 20.0
# The browser reads messages from descriptor 3 and writes to 4.
_START = 'exec "$@" 3<&"$0" 4>&"$OUTPUT"'
_FLAGS = (
    *("--headless", "--no-sandbox", "--no-proxy-server", "--hide-scrollbars", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"),
    f"--window-size={WIDTH},{HEIGHT}",
)


def program() -> str | None:
    return next((name for name in PROGRAMS if shutil.which(name)), None)


class BrowserError(Exception):
    """The browser refused a command."""


class UnansweredError(BrowserError):
    """A command was not answered in its time."""


class Browser:
    """One thread calls it. Events are noted while a command, or take_events(), waits."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._unread = b""
        self._number = 0
        self._session = ""
        self.load_count = 0
        self.requested: list[str] = []  # URLs
        # Lines of the console: breaches of the page's policy, failed loads and all else.
        self.complaints: list[str] = []
        page = self._call("Target.createTarget", url="about:blank", width=WIDTH, height=HEIGHT)
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Returns once it is loaded. What the browser loads later, it does of its own accord."""
        before = self.load_count
        self._call("Page.navigate", url=url)
        end_s = time.monotonic() + LIMIT_S
        while self.load_count == before:
            self.take_events(until_s=end_s)
            assert time.monotonic() < end_s, self.complaints

    def take_events(self, *, until_s: float = 0.0) -> None:
        """Those that there are; waits for one until then."""
        while message := self._receive(until_s):
            self._note(message)
            until_s = 0.0

    def evaluate(self, expression: str) -> Any:
        """The value of the expression in a page that is whole: it may just be replaced by its
        next load, of which a part is there."""
        whole = f"document.readyState === 'complete' ? {expression} : null"
        end_s = time.monotonic() + LIMIT_S
        while True:
            with suppress(BrowserError):  # there is no page between one and the next
                answer = self._call("Runtime.evaluate", expression=whole, returnByValue=True)
                assert "exceptionDetails" not in answer, answer
                if (value := answer["result"]["value"]) is not None:
                    return value
            assert time.monotonic() < end_s, self.complaints

    def picture(self) -> bytes:
        """A PNG of the whole page."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {**size, "scale": 1}
            self._send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
            try:
                answer = self._answer("Page.captureScreenshot", PICTURE_S)
            except UnansweredError:
                assert time.monotonic() < end_s, self.complaints
                continue
            return base64.b64decode(answer["data"])

    def close(self) -> None:
        with suppress(BrowserError, OSError):
            self._call("Browser.close")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._send(method, **parameters)
        return self._answer(method, LIMIT_S)

    def _send(self, method: str, **parameters: Any) -> None:
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")

    def _answer(self, method: str, limit_s: float) -> dict[str, Any]:
        """To the last command."""
        end_s = time.monotonic() + limit_s
        while True:
            message = self._receive(end_s)
            if message is None:
                raise UnansweredError(f"{method} is not answered")
            if message.get("id") != self._number:
                self._note(message)
                continue
            if "error" in message:
                raise BrowserError(f"{method}: {message['error']}")
            result: dict[str, Any] = message["result"]
            return result

    def _receive(self, until_s: float) -> dict[str, Any] | None:
        """The next message. None: there is none by then."""
        while b"\0" not in self._unread:
            left_s = max(until_s - time.monotonic(), 0.0)
            if not select.select([self._from], [], [], left_s)[0]:
                return None
            received = os.read(self._from, 1 << 16)
            if not received:
                raise BrowserError("the browser has ended")
            self._unread += received
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self.load_count += 1
            case "Network.requestWillBeSent":
                self.requested.append(told["request"]["url"])
            case "Network.loadingFailed":
                self.complaints.append(f"not loaded: {told['errorText']}")
            case "Log.entryAdded":
                self.complaints.append(told["entry"]["text"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    name = program()
    assert name is not None
    to_browser, from_browser = _pipe(), _pipe()
    process = subprocess.Popen(
        ["bash", "-c", _START, str(to_browser[0]), name, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(to_browser[0], from_browser[1]),
        env={**os.environ, "OUTPUT": str(from_browser[1])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        made = Browser(to_browser[1], from_browser[0])
        yield made
        made.close()
        process.wait(LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])


def _pipe() -> tuple[int, int]:
    """With numbers above those that the browser takes: the shell copies one after the other."""
    ends = os.pipe()
    above = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return above[0], above[1]
