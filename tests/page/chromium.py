"""A headless Chromium, driven over its debugging pipe: JSON messages, each ended by a zero byte."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
FLAGS = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--no-first-run", "--disable-extensions", "--disable-background-networking", "--force-color-profile=srgb"]  # fmt: skip
PLACED = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
ANSWER_S = 60.0  # a busy machine starts a browser slowly


class Chromium:
    """`with Chromium(folder) as browser:`; one tab."""

    def __init__(self, folder: Path, *flags: str):
        if PROGRAM is None:
            raise RuntimeError("there is no Chromium here")
        down, up = os.pipe(), os.pipe()
        # The program wants them as 3 and 4: first out of the way of those numbers.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (down[0], up[1])]
        self.log = (folder / "chromium.log").open("wb")
        words = [PROGRAM, *FLAGS, *flags, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PLACED, *map(str, theirs), *words],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            pass_fds=theirs, start_new_session=True,
        )  # fmt: skip
        for fd in (down[0], up[1], *theirs):
            os.close(fd)
        self._down, self._up, self._left, self._number = down[1], up[0], b"", 0
        self.events: list[dict[str, Any]] = []
        self._session = ""

    def __enter__(self) -> Chromium:
        try:
            targets = self.send("Target.getTargets")["targetInfos"]
            target = next(one for one in targets if one["type"] == "page")["targetId"]
            self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
            for room in ("Page", "Runtime", "Network", "Log"):
                self.send(f"{room}.enable")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._down)
        os.close(self._up)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()

    def send(self, method: str, **params: Any) -> Any:
        """A command and its answer; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._down, data) :]
        end = time.monotonic() + ANSWER_S
        while (answer := self._next(end)).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            if not select.select([self._up], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            if not (more := os.read(self._up, 1 << 16)):
                raise RuntimeError("Chromium has ended")
            self._left += more
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    # -- what a reader does ---------------------------------------------------------------------
    def open(self, url: str) -> None:
        before = self.js("performance.timeOrigin")  # of the old page, which stays for a moment
        self.send("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && performance.timeOrigin !== {before}")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        result = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = 60.0) -> Any:
        """The expression's value once it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.js(expression):
                return value
            time.sleep(0.05)
        raise AssertionError(f"{expression}: not in {seconds:g} s; body: {self.js('document.body.innerText')}")  # fmt: skip

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "", modifiers: int = 0) -> None:
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def enter(self) -> None:
        self.press("Enter", 13, "\r")

    def tab(self) -> None:
        self.press("Tab", 9)

    def sized(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def dark(self, on: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def shot(self) -> bytes:
        """A PNG of the tab."""
        return base64.b64decode(self.send("Page.captureScreenshot")["data"])

    def complaints(self) -> list[str]:
        """Errors of scripts, of the page's policy, and of the network."""
        self.js("0")  # what is on its way comes before the answer
        found = []
        for event in self.events:
            about = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(about["exceptionDetails"])[:800])
                case "Log.entryAdded" if about["entry"]["level"] == "error":
                    found.append(about["entry"]["text"])
        return found

    def asked(self) -> list[str]:
        """URLs of all requests of the page."""
        return [event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]  # fmt: skip
