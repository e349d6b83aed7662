"""The first word of a command line, and the report for bugs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import quire
from quire.cli import collect_env
from quire.cli.main import COMMANDS, main


@pytest.mark.parametrize("word", ["-v", "--version", "version"])
def test_the_version(word, capsys):
    assert main([word]) == 0
    assert capsys.readouterr().out == f"{quire.__version__}\n"


def test_without_a_command_help_is_printed(capsys):
    assert main([]) == 2
    said = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == said
    assert all(f"\n  {name} " in said for name in COMMANDS)


def test_an_unknown_command_is_refused(capsys):
    assert main(["serv"]) == 2
    assert "unknown command 'serv'; did you mean serve?" in capsys.readouterr().err
    assert main(["zzzz"]) == 2
    assert "choose from serve, chat, " in capsys.readouterr().err


def test_a_command_of_a_later_version(capsys, monkeypatch):
    monkeypatch.setitem(COMMANDS, "later", ("quire.cli.later", ""))
    assert main(["later"]) == 2
    assert "`quire later` is not part of this version" in capsys.readouterr().err


def test_control_c_is_no_traceback(monkeypatch):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("quire.cli.collect_env"), "main", interrupted)
    assert main(["collect-env"]) == 130


def test_the_module_is_the_command():
    words = [sys.executable, "-m", "quire", "version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.stdout == f"{quire.__version__}\n"


def test_the_report(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret-1")
    monkeypatch.setenv("HF_TOKEN", "secret-2")
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "DEBUG")
    assert main(["collect-env"]) == 0
    said = capsys.readouterr().out
    assert "secret" not in said
    rows = {
        line.split()[0]: line.split()[1:] for line in said.splitlines() if line.startswith("  ")
    }
    assert rows["quire"] == [quire.__version__]
    assert rows["torch"]
    assert rows["VLLM_API_KEY"] == rows["HF_TOKEN"] == ["***"]
    assert rows["QUIRE_LOGGING_LEVEL"] == ["DEBUG"]
    assert rows["memory"][1:3] == ["GiB", "available"]


def test_a_report_of_a_broken_machine(monkeypatch):
    def broken():
        raise OSError("no /proc")

    monkeypatch.setattr(collect_env, "machine", broken)
    assert "OSError: no /proc" in collect_env.report()
    assert "Environment" in collect_env.report()


@pytest.mark.parametrize("word", ["pull", "run", "list", "ps", "ls", "rm", "show", "stop"])
def test_a_command_of_ollama_names_what_to_use(word, capsys):
    assert main([word, "qwen3"]) == 2
    said = capsys.readouterr().err
    assert f"unknown command {word!r}, a command of Ollama: " in said
    assert "choose from" not in said
