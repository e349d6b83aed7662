"""Lines of logs: as text, as JSON, not in a program's way, and not too often."""

from __future__ import annotations

import json
import logging
import os

import pytest

from quire.errors import ConfigError
from quire.logging import JsonLines, Lines, configure, get_logger


def record(text: str, level: int = logging.WARNING) -> logging.LogRecord:
    made = logging.LogRecord("quire.a", level, "/x/a.py", 7, text, (), None)
    made.created, made.msecs = 0.0, 5
    return made


def test_each_line_of_a_text_has_the_prefix():
    lines = Lines("engine", prefix="P ").format(record("one\ntwo")).splitlines()
    head = f"WARNING engine[{os.getpid()}] a.py:7: "
    assert lines[0].startswith("P ")
    assert ".005 " in lines[0]
    assert lines[0].partition(head)[2] == "one"
    assert lines[1:] == ["P | two"]  # a table or a traceback stays readable
    colored = Lines("engine", color=True)
    assert colored.format(record("x")).startswith("\033[33m")
    assert not colored.format(record("x", logging.INFO)).startswith("\033")


def test_json_lines():
    line = json.loads(JsonLines("server").format(record('say "ü"\n')))
    assert line == {
        "time": 0.0, "level": "WARNING", "logger": "quire.a", "process": "server", "pid": os.getpid(), "message": 'say "ü"\n',
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "first"), [("text", "1"), ("json", "{")])
def test_log_lines_go_to_the_configured_stream(kind, first, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "stdout")
    monkeypatch.setenv("QUIRE_LOGGING_FORMAT", kind)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "warning")
    configure("test")
    get_logger("quire.a").info("unheard")
    get_logger("quire.a").warning("heard")
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("\n") == 1
    assert "heard" in said.out
    assert (said.out[0] == "{") == (first == "{")
    configure("test", "DEBUG")
    get_logger("quire.a").debug("now")
    assert capsys.readouterr().out.count("now") == 1  # one handler, not two


def test_a_programs_own_logging_setup_is_kept(monkeypatch):
    ours = logging.getLogger("quire")
    kept = logging.NullHandler()
    ours.handlers[:] = [kept]
    configure(force=False)
    assert ours.handlers == [kept]
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    configure()
    assert ours.handlers == [kept]


def test_a_logging_config_file_is_applied(tmp_path, monkeypatch):
    file = tmp_path / "logging.json"
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(file))
    with pytest.raises(ConfigError, match=r"QUIRE_LOGGING_CONFIG_PATH=.*logging\.json"):
        configure()
    file.write_text(
        '{"version": 1, "disable_existing_loggers": false, "loggers": {"quire": {"level": "ERROR"}}}'
    )
    configure()
    assert logging.getLogger("quire").level == logging.ERROR


def test_an_unknown_log_level_is_refused():
    with pytest.raises(ConfigError, match="log level LOUD: choose from DEBUG, INFO"):
        configure(level="loud")


def test_not_too_often(warnings):
    logger = get_logger("quire.test_not_too_often")
    for _ in range(3):
        logger.warning_once("once %d", 1)
        logger.warning_every("key", 1000, "rarely")
        logger.warning_every("always", 0, "always")
    assert warnings == ["once 1", "rarely", "always", "always", "always"]


FORGED = "cmpl-x\n01-01 00:00:00.000 INFO server[1] generation.py:9: Received request admin\x1b[31m\r\x9b2J\u2028\u202e\ud800\x85"


def test_a_client_forges_no_line_and_commands_no_terminal():
    text = Lines("server").format(record(f"Received request {FORGED}"))
    first, *others = text.split("\n")
    head = f"WARNING server[{os.getpid()}] a.py:7: "
    assert text.splitlines() == [first, *others]  # nothing else ends a line
    assert first.endswith(f"{head}Received request cmpl-x")
    assert [line[:2] for line in others] == ["| "]
    assert "\\x1b[31m\\x0d\\x9b2J\\u2028\\u202e\\ud800\\x85" in others[0]
    assert all(char.isprintable() for char in text.replace("\n", ""))
    text.encode()
    line = JsonLines("server").format(record(f"Received request {FORGED}"))
    assert line.isprintable()
    assert "\\x1b" in json.loads(line)["message"]


def test_an_exception_forges_none_either():
    made = record("a request failed")
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    text = Lines("server").format(made)
    assert all(char.isprintable() for char in text.replace("\n", ""))
    assert all(line.startswith("| ") for line in text.split("\n")[1:])


def test_a_logger_remembers_a_bounded_number_of_keys():
    logger = get_logger("quire.bounded")
    logger.logger.disabled = True
    for at in range(5000):
        logger.warning_every(f"field {at}", 60, "x")
    assert len(logger._last) <= 1024
    assert "field 4999" in logger._last
