"""The output of --help: the docstrings of the fields, by section. Independent of terminal width, for golden files."""

from __future__ import annotations

import json
import textwrap
from dataclasses import fields
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.options import Option, options, section_help
from quire.config.vllm_flags import OLD, SHORT, TABLE

WIDTH = 100
GROUPS = {
    "frontend": "server",
    "observabilityconfig": "observe",
    "structuredoutputsconfig": "structured",
}
"""vLLM's names of sections, where they differ."""
FIRST: dict[str, dict[str, str]] = TABLE["first"]
"""The flags of the first screen: heading -> flag and value -> words."""
KINDS = {"int": "N", "float": "X", "text": "TEXT", "json": "JSON", "maybe": "[TEXT]"}


def text(prog: str, topic: str = "") -> str:
    """The flags that most users need; or one section (`cache`, `CacheConfig`); or flags whose name contains `topic`.

    `all`: every flag, and vLLM's and old names with how they are handled.
    """
    if topic == "":
        return _first_screen(prog)
    if topic.lower() == "all":
        own = (_section(section, list(options().values())) for section in sections())
        return "\n".join([_usage(prog), *own, _old(list(OLD))])
    name = topic.lower().lstrip("-").replace("-", "_")
    section = GROUPS.get(name, name.removesuffix("config"))
    if section in sections():
        return _section(section, list(options().values()))
    matching = [option for option in options().values() if topic == SHORT.get(option.name)]
    matching = matching or [option for option in options().values() if name in option.name]
    rows = [row.name for row in OLD.values() if name in row.name]
    if not matching and not rows:
        return f"No section or flag contains {topic!r} in its name. Sections: {', '.join(sections())}.\n"
    parts = [
        _section(section, matching)
        for section in sections()
        if any(o.section == section for o in matching)
    ]
    return "\n".join(parts + ([_old(rows)] if rows else []))


def sections() -> list[str]:
    return [section.name for section in fields(EngineConfig)]


def _usage(prog: str) -> str:
    return (
        f"usage: {prog} [MODEL] [flags]\n\n"
        "MODEL is a local directory, a hub id, or quire-tiny (the embedded model, which is the default).\n"
        "Dashes and underscores mean the same; switches have a --no- form; JSON may be given by parts\n"
        "(--hf-overrides.key value); numbers may be 4k (4,000) or 4K (4,096).\n"
    )


def _first_screen(prog: str) -> str:
    """What a newcomer needs, on one screen."""
    parts = [
        f"usage: {prog} [MODEL] [flags]\n\n"
        f"  {prog} Qwen/Qwen3-0.6B --max-model-len 8192 --port 8000\n\n"
        "MODEL is a local directory, a hub id, or quire-tiny (the embedded model, which is the default).\n"
    ]
    for title, flags in FIRST.items():
        rows = [f"  --{name.replace('_', '-'):<28}{words}" for name, words in flags.items()]
        parts.append("\n".join([title, *rows]) + "\n")
    parts.append(
        "More\n"
        "  --config FILE                 read flags from a YAML file; the command line wins\n"
        "  --print-config                print this command line as such a file, without secrets, and end\n"
        "  --help=all                    every flag, with vLLM's other flags and old names\n"
        "  --help=WORD                   flags with WORD in their name\n"
        f"  --help=SECTION                {', '.join(sections()[:8])},\n"
        f"                                {', '.join(sections()[8:])}\n"
    )
    return "\n".join(parts)


def _section(section: str, shown: list[Option]) -> str:
    title, words = section_help(section)
    lines = [f"{title}  (--help={section})"]
    for option in shown:
        if option.section == section:
            lines += [
                f"  {_spelling(option)}",
                *_wrapped(words.get(option.name, "") + _default(option)),
            ]
    return "\n".join(lines) + "\n"


def _spelling(option: Option) -> str:
    dashed = option.name.replace("_", "-")
    names = ", ".join([f"--{dashed}", *([SHORT[option.name]] if option.name in SHORT else [])])
    if option.kind == "flag":
        return f"{names}, --no-{dashed}"
    if option.kind == "list":
        return f"{names} TEXT ..."
    value = "{" + ",".join(option.choices) + "}" if option.choices else KINDS[option.kind]
    return f"{names} {value}"


def _default(option: Option) -> str:
    value: Any = option.default
    if value is None or value in ([], {}, "") or value is False:
        return ""
    shown = json.dumps(value) if not isinstance(value, str) else value
    return f" [{shown}]"


def _wrapped(words: str, indent: str = " " * 8) -> list[str]:
    return textwrap.wrap(
        words, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _old(names: list[str]) -> str:
    treatments = {
        "A": "accepted",
        "W": "accepted, with a warning",
        "E": "refused, except for the default value",
    }
    lines = ["Other flags of vLLM, and old names"]
    for treatment, title in treatments.items():
        groups: dict[str, list[str]] = {}
        for name in names:
            if OLD[name].treatment == treatment:
                groups.setdefault(OLD[name].say, []).append(f"--{name.replace('_', '-')}")
        if groups:
            lines.append(f"  {title}:")
        for why, flags in groups.items():
            lines += _wrapped(f"{why or 'the same'}: {' '.join(flags)}", " " * 4)
    return "\n".join(lines) + "\n"
