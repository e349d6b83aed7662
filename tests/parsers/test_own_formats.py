"""Formats from outside: by file and by entry point, through a whole server; and plugins that are none."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from asgi import ask
from call_writers import TOOLS
from scripted import ScriptedEngine

from quire.errors import ConfigError
from quire.frontend.parsers.plugins import registry

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
SAID = '(((hm)))Ok. <<{"name": "f", "arguments": {"count": 1}}>>'
PLUGIN = """
from quire.frontend.parsers.formats import json_calls
from quire.frontend.parsers.format_table import ReasoningFormat


def register(registry):
    registry.add_tools("mine", json_calls("<<", ">>"))
    registry.add_reasoning("mine", ReasoningFormat(("(((",), (")))",)))
"""
MINE = {"tool_call_parser": "mine", "reasoning_parser": "mine"}


def answered(**config: Any) -> dict[str, Any]:
    found = ask(ScriptedEngine(SAID), "POST", CHAT, BODY, **config)
    assert found.status_code == 200, found.text
    (choice,) = found.json()["choices"]
    return dict(choice["message"])


def check(message: dict[str, Any]) -> None:
    (call,) = message["tool_calls"]
    assert (message["reasoning"], message["content"]) == ("hm", "Ok.")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"count": 1})  # fmt: skip


@pytest.mark.parametrize("flag", ["tool_parser_plugin", "reasoning_parser_plugin"])
def test_a_file(flag: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    with caplog.at_level(logging.INFO, "quire"):
        check(answered(**MINE, **{flag: str(file)}))
    lines = [record.getMessage() for record in caplog.records]
    assert "format of tool calls: mine (tool_call_parser='mine')" in lines
    assert "format of thoughts: mine (reasoning_parser='mine')" in lines


def test_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_formats.py").write_text(PLUGIN)
    about = tmp_path / "my_formats-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-formats\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[quire.parsers]\nmine = my_formats:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    check(answered(**MINE))
    (tmp_path / "my_formats.py").write_text("def register(registry):\n    registry.nothing()\n")
    del sys.modules["my_formats"]
    with pytest.raises(
        ConfigError, match=r"the plugin my_formats:register of quire\.parsers failed"
    ):
        registry()
    del sys.modules["my_formats"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "registers nothing"),
        ("1 / 0", "ZeroDivisionError"),
        ("class P: pass", "register a class with vLLM's ToolParserManager"),
        ("def register(r): r.add()", "AttributeError"),
        ("import no_such_module", "no_such_module"),
    ],
)
def test_invalid_plugins_are_refused(text: str, says: str, tmp_path: Path):
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.py.*" + says):
        registry([str(file)])


def test_a_missing_plugin_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="not a Python file"):
        registry([str(tmp_path / "missing.py")])
