"""Keys on a command line are not shown by `ps`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.server.process.command_line import hidden, hide_words

HIDES = """
import sys
from quire.server.process.command_line import hide_words
hide_words(["sk-secret", "hf_x", ""])
print("hidden", flush=True)
sys.stdin.read()
print(*sys.argv[1:])
"""
WORDS = ["serve", "model", "--api-key", "sk-secret", "--api_key=sk-secret", "--hf-token=hf_x", "--seed=sk-secret", "sk-secrets", ""]  # fmt: skip
STARS = ["serve", "model", "--api-key", "*" * 9, "--api_key=*********", "--hf-token=****", "--seed=sk-secret", "sk-secrets", ""]  # fmt: skip


def test_secrets_are_masked_at_equal_length():
    values = {b"sk-secret", b"hf_x"}
    found = [hidden(word.encode(), values).decode() for word in WORDS]
    assert found == STARS
    assert [len(word) for word in found] == [len(word) for word in WORDS]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="only Linux shows it there")
def test_other_users_do_not_see_secrets():
    words = [sys.executable, "-c", HIDES, *WORDS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "hidden\n"
        shown = Path(f"/proc/{child.pid}/cmdline").read_text().split("\0")
        assert shown[3:-1] == STARS
        said, _ = child.communicate("", timeout=200)
    assert said.split() == [word for word in WORDS if word]  # the program itself has them still


def test_a_command_line_without_secrets_is_not_changed():
    before = Path("/proc/self/cmdline").read_bytes() if Path("/proc/self/cmdline").exists() else b""
    hide_words([])
    hide_words(["", "a text that is no word of the command line"])
    if before:
        assert Path("/proc/self/cmdline").read_bytes() == before
