"""`quire chat` in a pseudo-terminal, as a user sees it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("readline")


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *command: str, **variables: str):
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            environment = {**os.environ, "TERM": "dumb", "HF_HUB_OFFLINE": "1", **variables}
            os.execve(sys.executable, [sys.executable, *command], environment)
        self.seen = ""

    def wait(self, pattern: str, seconds: float = 120) -> str:
        """Read until the pattern appears; returns what came up to its end."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.S)):
            ready, _, _ = select.select([self.file], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no {pattern!r} in {self.seen!r}")
            self.seen += os.read(self.file, 65536).decode("utf-8", "replace").replace("\r", "")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def interrupt(self, pattern: str, seconds: float = 120) -> str:
        """Press Ctrl-C until the pattern appears.

        A signal between the echo of a key and the `select` of CPython's readline waits for the next key.
        """
        end = time.monotonic() + seconds
        while True:
            self.type("\x03")
            try:
                return self.wait(pattern, min(5.0, end - time.monotonic()))
            except TimeoutError:
                assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"

    def close(self) -> int:
        """Read the rest; returns the exit status."""
        try:
            while os.read(self.file, 65536):
                pass
        except OSError:  # Linux, at the end
            pass
        os.close(self.file)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.slow
def test_a_conversation_with_line_editing_commands_and_interrupts(tmp_path: Path):
    terminal = Terminal(
        "-m", "quire", "chat", "quire-tiny", "--max-tokens", "6", "--max-model-len", "512",
        QUIRE_CACHE_ROOT=str(tmp_path), QUIRE_CPU_ISA="none",
    )  # fmt: skip
    terminal.wait(r"Loading quire-tiny \.\.\.\n")
    terminal.wait(r"Chatting with quire-tiny.*/help.*\n> ")
    terminal.type("/help\n")
    terminal.wait(r"/system.*/set.*\n> ")
    terminal.type("a line that is not sent")
    terminal.wait("not sent")
    terminal.interrupt(r"\(Ctrl-D or /exit leaves\)\n> ")
    terminal.type("Tell me a stOry\x1b[D\x1b[D\x08o\n")
    assert "^[[D" not in terminal.wait(r"\n[^\n]+\n\(cut at 6 tokens\)\n> ")
    terminal.type("/set temperature 0\n")
    terminal.wait(r"temperature=0\.0\n> ")
    terminal.type("\x1b[A\x1b[A\n")  # the line before the command
    terminal.wait(r"Tell me a story[ \x08]*\n[^\n]+\n\(cut at 6 tokens\)\n> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    history = (tmp_path / "chat_history").read_text()
    assert "Tell me a story" in history
    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0
