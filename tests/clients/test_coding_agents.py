"""Coding agents in the terminal, where `make clients` could install them. Their prompts are long: the server takes 60,000 tokens.

quire-tiny is trained on contexts of 2,048 tokens, so only the way of an answer is tested, not its words.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_runs import serve

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.prefix) / "node/node_modules/.bin"
LONG = ("--max-model-len", "60000", "--hf-overrides", '{"max_position_embeddings": 65536}')
MOST_TOKENS = 64


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server, without /v1."""
    with serve(tmp_path_factory.mktemp("server") / "log", "quire-tiny", *LONG) as found:
        yield found


def run(program: str, *words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:  # fmt: skip
    if not (PROGRAMS / program).exists():
        pytest.skip(f"{program} is not in {PROGRAMS}: make clients installs it if there is npm")
    environment = {**os.environ, "HOME": str(folder), **variables}
    return subprocess.run(
        [PROGRAMS / program, *words], cwd=folder, env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=240,
    )  # fmt: skip


def test_continue(long_context: str, tmp_path: Path):
    """With the configuration of docs/integrations.md."""
    page = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(# ~/\.continue/config\.yaml\n.*?)```", page, re.S)
    config = tmp_path / "config.yaml"
    config.write_text(block.replace("http://127.0.0.1:8000", long_context), encoding="utf-8")
    done = run("cn", "-p", "Say hello.", "--config", str(config), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_claude_code(long_context: str, tmp_path: Path):
    """Claude Code prints an error message if the answer has more tokens than Claude Code asked for."""
    done = run(
        "claude", "-p", "Say hello.", folder=tmp_path,
        ANTHROPIC_BASE_URL=long_context, ANTHROPIC_AUTH_TOKEN="none", ANTHROPIC_MODEL="quire-tiny",
        ANTHROPIC_SMALL_FAST_MODEL="quire-tiny", CLAUDE_CODE_MAX_OUTPUT_TOKENS=str(MOST_TOKENS),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", IS_SANDBOX="1",
    )  # fmt: skip
    told = f"exceeded the {MOST_TOKENS} output token maximum"
    assert (done.returncode == 0 and done.stdout.strip()) or told in done.stdout, (
        done.stdout + done.stderr
    )
