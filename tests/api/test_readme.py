"""README.md: its program runs, and its first request is one that the server takes."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from quire.server.schemas import ChatRequest

TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_program_runs(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 10


def test_the_first_curl_command_is_answered():
    body = re.search(r"curl \S*/v1/chat/completions.*?-d '(.*?)'$", TEXT, re.DOTALL | re.MULTILINE)
    assert body is not None
    asked = msgspec.json.decode(body[1], type=ChatRequest)
    assert asked.model == "quire-tiny"
    assert asked.messages
