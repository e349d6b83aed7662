"""The command line, derived from the dataclasses: parses flags and a YAML file into keywords.

Knows how flags are spelt: dashes or underscores, --x=v or --x v, --no-x, JSON by dots (--hf-overrides.a.b 1), short
forms (-tp 2, -O3). Does not know what a value means (`options.py`), old names' meanings (`from_keywords.py`), or how
help looks (`help.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NoReturn

from quire.config import from_keywords, help
from quire.config.engine import EngineConfig
from quire.config.options import BOOLEANS, REPEATED, Kind, coerce, options
from quire.config.vllm_flags import OLD, SHORT
from quire.errors import ConfigError, QuireError
from quire.logging import get_logger

logger = get_logger(__name__)


class FlagParser(argparse.ArgumentParser):
    """argparse with normalised words. An error ends the program with status 2, as usual."""

    def __init__(self, prog: str):
        super().__init__(
            prog=prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(argv: Sequence[str], prog: str = "quire serve") -> EngineConfig:
    """Command line -> EngineConfig. Ends the program on --help (status 0) and on an error (status 2)."""
    parser = make_parser(prog)
    _help(argv, prog, parser)
    try:
        return from_keywords.engine_config(keywords(argv, parser), "flag")
    except (QuireError, TypeError, ValueError) as why:
        parser.error(str(why))


def make_parser(prog: str = "quire serve", *, positional: bool = True) -> FlagParser:
    """A parser of every flag: fields, vLLM's names and old names."""
    parser = FlagParser(prog)
    if positional:
        parser.add_argument("model_tag", nargs="?")
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser, *, server: bool = True) -> None:
    """Add every flag, with dashes, to any argparse parser; without the server's flags if not `server`."""
    for option in options().values():
        if server or option.section != "server":
            _add(parser, option.name, option.kind, option.short)
    for row in OLD.values():
        if row.name != "model_tag":
            short = (SHORT[row.name],) if row.name in SHORT else ()
            _add(parser, row.name, {"value": "text"}.get(row.kind, row.kind), short)
    if server:
        parser.add_argument("--config")


def _add(
    parser: argparse.ArgumentParser, name: str, kind: Kind | str, short: Sequence[str]
) -> None:
    names = [f"--{name.replace('_', '-')}", *short]
    if kind == "flag":
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    elif kind == "list":
        how = {"nargs": "*", "action": "extend" if name in REPEATED else "store"}
    else:
        how = {"nargs": "?", "const": True} if kind == "maybe" else {}
    parser.add_argument(*names, dest=name, default=argparse.SUPPRESS, **how)


def keywords(argv: Sequence[str], parser: FlagParser) -> dict[str, Any]:
    """The keywords of a command line and its config file (the command line wins), under the names that were used.

    Raises:
        ConfigError: an unreadable file, invalid JSON, or two models.
        UnknownName: a flag that no table has.
    """
    words, dotted = normalise(argv, parser)
    space, rest = parser.parse_known_args(words)
    for word in rest:
        if word.startswith("-"):
            raise from_keywords.UnknownName(from_keywords.unknown(word.partition("=")[0], "flag"))
        raise ConfigError(
            f"unexpected argument {word!r}: the model is already {getattr(space, 'model_tag', None)!r}"
        )
    given = vars(space)
    for name, value in dotted.items():
        given[name] = (
            _dict_of(name, given.get(name)) | value if isinstance(given.get(name), str) else value
        )
    for name in given.keys() & OLD.keys():
        given[name] = loose(given[name])
    file = given.pop("config", None)
    return _one_model({**(read_yaml(file, given) if file else {}), **given}, from_file=bool(file))


def _one_model(asked: dict[str, Any], *, from_file: bool) -> dict[str, Any]:
    tag = asked.pop("model_tag", None)
    if tag is not None and asked.get("model", tag) != tag and not from_file:
        raise ConfigError(
            f"two models were given: {tag!r} and --model {asked['model']!r}; leave one out"
        )
    if tag is not None:
        asked["model"] = tag
    names = asked.get("served_model_name")
    if "model" not in asked and names and not from_file:
        raise ConfigError(
            f"--served-model-name {' '.join(names)}: the model is missing, because --served-model-name takes every word after it;"
            " write the model first: quire serve MODEL --served-model-name NAME"
        )
    return asked


# Normalisation


def normalise(
    argv: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], dict[str, Any]]:
    """Spell each flag in one way and separate the dotted ones: (words for argparse, JSON by field)."""
    known = parser._option_string_actions
    words: list[str] = []
    dotted: dict[str, Any] = {}
    seen: set[str] = set()
    twice: list[str] = []
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        if not word.startswith("-") or _is_number(word) or word == "--":
            words.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag, dot, path = flag.partition(".")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag.startswith("-O") and flag[2:].isdigit():
            flag, equals, value = "-O", "=", flag[2:]
        action = known.get(flag)
        if dot and action is not None:
            if not equals:
                value = queue.pop(0) if queue else "true"
            _put(dotted.setdefault(action.dest, {}), path.split("."), value)
            continue
        if action is not None:
            twice += [flag] if action.dest in seen - REPEATED else []
            seen.add(action.dest)
        if equals and isinstance(action, argparse.BooleanOptionalAction):
            words.append(_boolean(flag, value))
        else:
            words.append(f"{flag}={value}" if equals else flag)
    if "--config" in twice:
        raise ConfigError("--config was given twice; put the flags into one file")
    if twice:
        logger.warning("Found duplicate keys %s: the last value is used", ", ".join(twice))
    return words, dotted


def _boolean(flag: str, value: str) -> str:
    """--x=false -> --no-x"""
    name = flag.removeprefix("--").removeprefix("no-")
    opposite = f"--{name}" if flag.startswith("--no-") else f"--no-{name}"
    if value.lower() not in BOOLEANS:
        raise ConfigError(f"{flag}={value}: {flag} is a switch; write {flag} or {opposite}")
    return flag if BOOLEANS[value.lower()] else opposite


def _put(tree: dict[str, Any], path: list[str], text: str) -> None:
    """--x.a.b v: {"a": {"b": v}}; --x.a+ v,w appends to a list."""
    for key in path[:-1]:
        branch = tree.setdefault(key, {})
        if not isinstance(branch, dict):
            raise ConfigError(
                f"{'.'.join(path)}: {key} already has a value, so it cannot have sub-keys"
            )
        tree = branch
    if path[-1].endswith("+"):
        tree.setdefault(path[-1][:-1], []).extend(loose(part) for part in text.split(","))
    else:
        tree[path[-1]] = loose(text)


def _dict_of(name: str, text: Any) -> dict[str, Any]:
    value = loose(text)
    if not isinstance(value, dict):
        raise ConfigError(
            f"--{name.replace('_', '-')} {text}: not a JSON object, although other flags set keys of it"
        )
    return value


def loose(text: Any) -> Any:
    """The parsed value if the text is JSON, otherwise the text."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


# Files and help


def read_yaml(path: str, but: Container[str] = ()) -> dict[str, Any]:
    """Keywords of a --config file: flat keys are flags, with dashes or underscores.

    Args:
        but: names whose values are not checked here, because the command line overrides them.

    Raises:
        ConfigError: the file is missing, not YAML or not a mapping, a key is no flag, or its flag refuses a value;
            names file and line.
    """
    import yaml  # takes 15 ms, and most command lines do not need it

    if not path.endswith((".yaml", ".yml")):
        raise ConfigError(f"--config {path}: the file name must end in .yaml or .yml")
    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as why:
        raise ConfigError(f"--config {path}{_in_words(why)}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as why:
        raise ConfigError(f"--config {path}: {why}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path}: the file must map flags to values, such as `max-num-seqs: 8`"
        )
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in getattr(node, "value", ())}
    asked: dict[str, Any] = {}
    for key, value in content.items():
        where = f"{path}, line {lines.get(str(key), '?')}"
        name = str(key).lstrip("-").replace("-", "_")
        positive = name.removeprefix("no_")
        if name not in options() and name not in OLD and positive in options() and value is True:
            name, value = positive, False
        if name not in options() and name not in OLD:
            raise from_keywords.UnknownName(f"{where}: {from_keywords.unknown(str(key), 'flag')}")
        if name not in but:
            _check_value(where, name, value)
        asked[name] = value
    return asked


def _in_words(why: Any) -> str:
    """A YAML error's line and problem, without the surrounding text."""
    mark = why.problem_mark or why.context_mark
    at = f" that begins in line {why.context_mark.line + 1}" if why.context_mark else ""
    says = ", ".join(part for part in (why.context and why.context + at, why.problem) if part)
    return f": {says}" if mark is None else f", line {mark.line + 1}: {says}"


def _check_value(where: str, name: str, value: Any) -> None:
    """Raises ConfigError: the flag refuses the value, or the feature is not supported."""
    try:
        if (option := options().get(name)) is not None:
            coerce(option, value)
        elif OLD[name].treatment == "E":
            from_keywords.translate({name: value}, "flag")
    except QuireError as why:
        raise ConfigError(f"{where}: {why}") from None


def _help(argv: Sequence[str], prog: str, parser: FlagParser) -> None:
    for word in argv:
        if word in ("-h", "--help") or word.startswith("--help="):
            print(help.text(prog, word.partition("=")[2]), end="")
            parser.exit(0)
