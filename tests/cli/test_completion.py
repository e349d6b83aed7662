"""Completion scripts: in bash they are run, in the other shells too where these are installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from quire.cli.completion import INSTALL, SCRIPTS
from quire.cli.main import COMMANDS, main

ASK = """
COMP_WORDS=({words}); COMP_CWORD={at}; COMPREPLY=(); _quire
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(*words: str) -> list[str]:
    script = SCRIPTS["bash"]() + ASK.format(words=" ".join(f"'{word}'" for word in words), at=len(words) - 1)  # fmt: skip
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_commands_flags_choices_and_models():
    assert completed("quire", "se") == ["serve"]
    assert set(completed("quire", "")) == set(COMMANDS)
    assert "--max-model-len" in completed("quire", "serve", "--max-m")
    assert completed("quire", "chat", "--por") == []  # of the server
    assert completed("quire", "serve", "--dtype", "bf") == ["bfloat16"]
    assert "qwen3:0.6b" in completed("quire", "serve", "qwen3:0")
    assert set(completed("quire", "completion", "")) == set(SCRIPTS)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_of_a_shell_parses(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    subprocess.run([shell, "-n", "/dev/stdin"], input=script, text=True, check=True, timeout=60)


def test_another_shell_is_refused_with_the_commands_that_install(capsys: pytest.CaptureFixture[str]):  # fmt: skip
    for words in ([], ["tcsh"], ["bash", "zsh"]):
        assert main(["completion", *words]) == 2
        said = capsys.readouterr().err
        assert all(command in said for command in INSTALL.values())
