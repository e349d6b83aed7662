"""Node's clients, where `make clients` could install them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from client_runs import PROMPT, TOKENS

NODE = Path(sys.prefix) / "node"


def test_node_clients(url: str, story: str):
    if shutil.which("node") is None or not (NODE / "node_modules" / "ai").is_dir():
        pytest.skip(f"no clients of Node in {NODE}: make clients installs them if there is npm")
    script = NODE / "clients.mjs"  # Node looks for packages beside the script
    shutil.copy(Path(__file__).with_name("clients.mjs"), script)
    done = subprocess.run(
        ["node", str(script), url, story, PROMPT, str(TOKENS)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.split() == ["openai", "anthropic", "ai"], done.stderr
