"""What every client is asked, and how a command of a client runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

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
