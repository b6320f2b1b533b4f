"""A real browser without a window, driven through the pipe that Chromium offers for that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Page:
    """One tab. ``console``: what the page's scripts complained about."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest, self._number = read, write, b"", 0
        self.console: list[str] = []
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        told = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.run(script):
            assert time.monotonic() < deadline, (
                f"{script} did not become true; the page shows: {self.run('document.body.innerText')}"
            )
            time.sleep(0.05)

    def picture(self) -> bytes:
        import base64

        return base64.b64decode(self._call("Page.captureScreenshot")["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            told = self._receive()
            if told.get("id") == self._number:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result
            if told.get("method") == "Runtime.exceptionThrown":
                self.console.append(json.dumps(told["params"]["exceptionDetails"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._read, 65536)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told


@contextmanager
def browser(path: str) -> Iterator[Page]:
    to_browser, from_browser = os.pipe(), os.pipe()

    def place_pipes() -> None:  # where Chromium looks for them
        ours = os.dup(to_browser[0]), os.dup(from_browser[1])
        os.dup2(ours[0], 3)
        os.dup2(ours[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [path, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            preexec_fn=place_pipes,
            close_fds=False,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Page(from_browser[0], to_browser[1])
        finally:
            os.killpg(process.pid, 9)
            process.wait()
            for end in (*to_browser, *from_browser):
                os.close(end)
