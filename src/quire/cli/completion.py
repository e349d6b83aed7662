"""`quire completion SHELL`: a script that completes commands, flags and models in bash, zsh or fish.

Knows the names of commands, flags and models. The script contains them: pressing Tab starts no Python.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quire.cli.main import COMMANDS
from quire.config.options import Option, options
from quire.config.short_names import short_names

WITH_SERVER_FLAGS = ("serve", "doctor")
WITH_ENGINE_FLAGS = ("chat", "complete", "run-batch")
EMBEDDED = ("quire-tiny", "quire-tiny-embed", "quire-tiny-whisper")
INSTALL = {
    "bash": "quire completion bash > ~/.local/share/bash-completion/completions/quire",
    "zsh": 'quire completion zsh > "${fpath[1]}/_quire"',
    "fish": "quire completion fish > ~/.config/fish/completions/quire.fish",
}
"""Shell -> the command that installs its script."""


def main(argv: Sequence[str]) -> int:
    """Print a script; 2: no such shell."""
    shell = argv[0] if len(argv) == 1 else ""
    if shell not in SCRIPTS:
        lines = "\n".join(f"  {command}" for command in INSTALL.values())
        print(f"usage: quire completion {'|'.join(SCRIPTS)}\n\nInstall it once:\n{lines}", file=sys.stderr)  # fmt: skip
        return 2
    print(SCRIPTS[shell](), end="")
    return 0


def flags_of(command: str) -> list[str]:
    """The flags that a command takes, as they are typed."""
    if command not in (*WITH_SERVER_FLAGS, *WITH_ENGINE_FLAGS):
        return ["--help"]
    mine = [one for one in options().values() if command in WITH_SERVER_FLAGS or one.section != "server"]  # fmt: skip
    return sorted([*(flag(one) for one in mine), *(f"--no-{flag(one)[2:]}" for one in mine if one.kind == "flag"), "--help"])  # fmt: skip


def flag(option: Option) -> str:
    return f"--{option.name.replace('_', '-')}"


def models() -> list[str]:
    return [*EMBEDDED, *short_names()]


def bash() -> str:
    cases = "\n".join(f'    {name}) flags="{" ".join(flags_of(name))}" ;;' for name in COMMANDS)
    choices = "\n".join(
        f'    {flag(one)}) COMPREPLY=($(compgen -W "{" ".join(one.choices)}" -- "$cur")); return ;;'
        for one in options().values()
        if one.choices
    )
    return f"""\
# bash completion of quire; made by `quire completion bash`
_quire() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD - 1]}}" flags=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)}" -- "$cur")); return
  fi
  case "$prev" in
{choices}
  esac
  case "${{COMP_WORDS[1]}}" in
    completion) COMPREPLY=($(compgen -W "{" ".join(SCRIPTS)}" -- "$cur")); return ;;
{cases}
  esac
  if [[ "$cur" == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$cur"))
  elif [ "$COMP_CWORD" -eq 2 ]; then
    COMPREPLY=($(compgen -W "{" ".join(models())}" -- "$cur") $(compgen -f -- "$cur"))
  else
    COMPREPLY=($(compgen -f -- "$cur"))
  fi
}}
COMP_WORDBREAKS="${{COMP_WORDBREAKS//:}}"
complete -o filenames -F _quire quire
"""


def zsh() -> str:
    commands = " ".join(f"'{name}:{quoted(words)}'" for name, (_, words) in COMMANDS.items())
    cases = "\n".join(f"    {name}) flags=({' '.join(flags_of(name))}) ;;" for name in COMMANDS)
    return f"""\
#compdef quire
# zsh completion of quire; made by `quire completion zsh`
_quire() {{
  local -a commands flags models
  commands=({commands})
  models=({" ".join(f"'{name}'" for name in models())})
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  case "$words[2]" in
    completion) compadd {" ".join(SCRIPTS)}; return ;;
{cases}
  esac
  if [[ "$words[CURRENT]" == -* ]]; then compadd -- $flags
  else
    (( CURRENT == 3 )) && compadd -- $models
    _files
  fi
}}
compdef _quire quire
"""


def fish() -> str:
    lines = ["# fish completion of quire; made by `quire completion fish`"]
    for name, (_, words) in COMMANDS.items():
        lines.append(f"complete -c quire -n __fish_use_subcommand -a {name} -d '{quoted(words)}'")
        for one in flags_of(name):
            lines.append(f"complete -c quire -n '__fish_seen_subcommand_from {name}' -l {one[2:]}")
    lines.append(f"complete -c quire -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(SCRIPTS)}'")  # fmt: skip
    for name in (*WITH_SERVER_FLAGS, "chat", "complete"):
        lines.append(f"complete -c quire -n '__fish_seen_subcommand_from {name}' -a '{' '.join(models())}'")  # fmt: skip
    return "\n".join(lines) + "\n"


def quoted(words: str) -> str:
    """For single quotes of zsh and fish, and for zsh's colons."""
    return words.replace("'", "").replace(":", "")


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
