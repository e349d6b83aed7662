"""What every client is asked, a server for clients, and how a command of a client runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROMPT = "Tell me a story about a dog."
TOKENS = 12


def need(module: str) -> None:
    """Skip the test unless the module is installed. Does not import it: locust replaces parts of the interpreter."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: make clients installs it")


def command(*words: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *words],
        capture_output=True, text=True, timeout=900, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@contextmanager
def serve(log: Path, model: str, *flags: str) -> Iterator[str]:
    """Start a server; yields its address, without /v1."""
    words = [model, "--host", "127.0.0.1", "--port", "0", *flags]
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", *words], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield _address(server, log)
    finally:
        server.terminate()
        server.wait(30)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(1200):
        text = log.read_text()
        found = [word for word in text.split() if word.startswith("http://127.0.0.1:")]
        if found:
            try:
                urllib.request.urlopen(found[0].rstrip("/,.") + "/health/ready").read()
                return found[0].rstrip("/,.")
            except OSError:
                pass
        assert server.poll() is None, text
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")
