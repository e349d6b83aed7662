"""The help is the dataclasses' own words. A golden file makes each change of it a decision that is seen.

After a change that is meant:
    python -m quire --help > tests/config/golden/quire.txt
    python -m quire serve --help > tests/config/golden/serve.txt
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from quire.cli import main as cli
from quire.config import help
from quire.config.flags import parse
from quire.config.options import options
from quire.config.vllm_flags import OLD

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(("name", "argv"), [("quire", ["--help"]), ("serve", ["serve", "--help"])])
def test_the_help_is_as_agreed(name, argv, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")  # the same at any width of the terminal
    with contextlib.suppress(SystemExit):
        cli.main(argv)
    agreed = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert capsys.readouterr().out == agreed, f"if that is meant: see {Path(__file__).name}"


def test_every_field_is_in_the_help_with_a_sentence():
    shown = help.text("quire serve", "all").splitlines()
    for name in options():
        flag = f"--{name.replace('_', '-')}"
        at = next(
            n
            for n, line in enumerate(shown)
            if line.startswith("  --") and flag in line.split(" {")[0].replace(",", " ").split()
        )
        assert len(shown[at + 1].strip()) > 8, flag
    assert max(map(len, shown)) <= 160


@pytest.mark.parametrize("topic", help.sections())
def test_help_of_one_section(topic):
    text = help.text("quire serve", topic)
    names = [name for name, option in options().items() if option.section == topic]
    for name in names:
        assert f"--{name.replace('_', '-')}" in text
    assert text.count("\n  --") == len(names)


def test_the_first_screen_has_a_dozen_flags_of_the_tables():
    flags = [flag.split()[0] for group in help.FIRST.values() for flag in group]
    assert len(flags) == 12
    assert set(flags) <= set(options())
    lines = help.text("quire serve").splitlines()
    assert len(lines) < 32
    assert max(map(len, lines)) <= 110


def test_sections_under_the_names_of_vllm():
    for name, ours in help.GROUPS.items():
        assert help.text("quire serve", name.capitalize()) == help.text("quire serve", ours)


@pytest.mark.parametrize("command", ["chat", "complete", "run-batch", "doctor"])
def test_help_of_a_topic_of_another_command(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help=cache"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == help.text(f"quire {command}", "cache")


def test_help_of_a_short_name():
    assert help.text("quire serve", "-tp").count("\n  --") == 1
    assert "--tensor-parallel-size, -tp" in help.text("quire serve", "-tp")


def test_help_of_one_option():
    text = help.text("quire serve", "--max-num")
    assert "--max-num-seqs" in text
    assert "--max-num-batched-tokens" in text
    assert "--max-num-partial-prefills" in text  # an old name
    assert "--dtype" not in text
    assert help.text("quire serve", "CacheConfig") == help.text("quire serve", "cache")
    assert help.text("quire serve", "zzz").startswith(
        "No section or flag contains 'zzz' in its name"
    )


def test_help_of_all_has_every_old_name():
    text = " ".join(help.text("quire serve", "all").split())
    for name in OLD:
        assert f"--{name.replace('_', '-')}" in text


def test_help_exits_at_any_position(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["some/model", "--bogus", "--help=scheduler"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(
        "Scheduling: requests and tokens per step  (--help=scheduler)"
    )
