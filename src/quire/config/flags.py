"""The command line, derived from the dataclasses: parses flags and a YAML file into keywords.

Knows how flags are spelt: dashes or underscores, --x=v or --x v, --no-x, JSON by dots (--hf-overrides.a.b 1), short
forms (-tp 2, -O3). Does not know what a value means (`options.py`), old names' meanings (`from_keywords.py`), or how
help looks (`help.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container, Sequence
from typing import Any, NoReturn

from quire.config import from_keywords, help
from quire.config.config_file import read_yaml
from quire.config.engine import EngineConfig
from quire.config.options import BOOLEANS, REPEATED, Option, coerce, options
from quire.config.print_config import as_yaml
from quire.config.unknown_names import LLAMA_CPP, UnknownName, unknown
from quire.config.vllm_flags import OLD, SHORT, VllmFlag
from quire.errors import ConfigError, QuireError
from quire.logging import get_logger

logger = get_logger(__name__)


class FlagParser(argparse.ArgumentParser):
    """argparse for every command, and for programs that add Quire's flags to their own.

    Accepts --max_num_seqs for --max-num-seqs, dotted JSON flags, and --config FILE unless the program has such a flag
    itself. The values of Quire's flags have the types of their fields. An error ends the program with status 2.
    """

    def __init__(self, *args: Any, **keywords: Any):
        keywords.pop("add_json_tip", None)  # of vLLM's class
        super().__init__(*args, **{"allow_abbrev": False, **keywords})
        self.config_file: str | None = None  # of the last command line

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse; an unknown flag's error suggests the nearest known one."""
        space, rest = self.parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("-"):
                self.error(unknown(word.partition("=")[0], "flag"))
            model = getattr(space, "model_tag", None)
            known = f": the model is already {model!r}" if model is not None else ""
            self.error(f"unexpected argument {word!r}{known}")
        return space

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse; the command line takes precedence over the file, and the file over defaults."""
        try:
            line = _CommandLine(self, sys.argv[1:] if args is None else args)
            space = argparse.Namespace() if namespace is None else namespace
            self.config_file = line.file
            if line.file is not None:
                for name, value in self._file_values(line.file, line.destinations).items():
                    setattr(space, name, value)
            space, rest = super().parse_known_args(line.words, space)
            for name, value in line.dotted.items():
                before = getattr(space, name, None)
                setattr(space, name, {**_dict_of(name, before), **value} if before else value)
            for action in self._actions:
                own = getattr(action, "field", None) is None
                if not own and action.dest in line.destinations and hasattr(space, action.dest):
                    setattr(space, action.dest, _typed(action, getattr(space, action.dest)))
        except (QuireError, TypeError) as why:
            self.error(str(why))
        return space, rest

    def _file_values(self, path: str, but: Container[str]) -> dict[str, Any]:
        """What the file sets, by destination, except the names of the command line."""
        values: dict[str, Any] = {}
        for key, (value, where) in read_yaml(path).items():
            flag = f"--{key.lstrip('-').replace('_', '-')}"
            action = spellings(self).get(flag)
            if action is None:
                raise UnknownName(f"{where}: {unknown(key, 'flag')}")
            if flag.startswith("--no-") and isinstance(action, argparse.BooleanOptionalAction):
                value = False if value is True else None
            if value is None or action.dest in but:
                continue
            try:
                values[action.dest] = _typed(action, value)
                if action.dest in OLD and OLD[action.dest].treatment == "E":
                    from_keywords.translate({action.dest: value}, "flag")
            except (QuireError, ValueError, TypeError) as why:
                raise ConfigError(f"{where}: {why}") from None
        return values

    def _get_option_tuples(self, option_string: str) -> Any:
        """Flags that a word may be short for: -n5 is -n 5, but -c is not -cc."""
        tuples: list[Any] = super()._get_option_tuples(option_string)
        return [one for one in tuples if option_string.startswith(one[1])]


PRINT = "--print-config"


def parse(argv: Sequence[str], prog: str = "quire serve") -> EngineConfig:
    """Command line -> EngineConfig. Ends the program on --help and --print-config (status 0) and on an error (status 2)."""
    parser = make_parser(prog)
    if any(word in ("-h", "--help") for word in argv):
        print(help.text(prog), end="")
        parser.exit(0)
    try:
        words = [word for word in argv if word != PRINT]
        config = from_keywords.engine_config(keywords(words, parser), "flag")
    except (QuireError, TypeError, ValueError) as why:
        parser.error(str(why))
    if PRINT in argv:
        print(as_yaml(config), end="")
        parser.exit(0)
    return config


def make_parser(prog: str = "quire serve") -> FlagParser:
    """A parser of every flag: fields, vLLM's names and old names."""
    parser = FlagParser(prog, add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("model_tag", nargs="?")
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser, *, server: bool = True) -> None:
    """Add every flag, with dashes, to any argparse parser; without the server's flags if not `server`."""
    for option in options().values():
        if server or option.section != "server":
            _add(parser, option)
    for row in OLD.values():
        if row.name != "model_tag":
            _add(parser, row)


def _add(parser: argparse.ArgumentParser, field: Option | VllmFlag) -> None:
    names = [f"--{field.name.replace('_', '-')}"]
    names += [SHORT[field.name]] if field.name in SHORT else []
    if field.kind == "flag":
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    elif field.kind == "list":
        how = {"nargs": "*", "action": "extend" if field.name in REPEATED else "store"}
    else:
        how = {"nargs": "?", "const": True} if field.kind == "maybe" else {}
    action: Any = parser.add_argument(*names, dest=field.name, default=argparse.SUPPRESS, **how)
    action.field = field  # a program's own flags have none


def keywords(argv: Sequence[str], parser: FlagParser) -> dict[str, Any]:
    """The keywords of a command line and its config file, under the names that were used.

    Ends the program on --help=TOPIC, and on a mistake in a flag.

    Raises:
        ConfigError: two models, or none where a flag took its place.
    """
    for word in argv:
        if word.startswith("--help="):
            print(help.text(parser.prog, word.partition("=")[2]), end="")
            parser.exit(0)
    values = vars(parser.parse_args(argv))
    return _one_model(values, from_file=parser.config_file is not None)


def _one_model(values: dict[str, Any], *, from_file: bool) -> dict[str, Any]:
    tag = values.pop("model_tag", None)
    if tag is not None and values.get("model", tag) != tag and not from_file:
        raise ConfigError(
            f"two models were given: {tag!r} and --model {values['model']!r}; leave one out"
        )
    if tag is not None:
        values["model"] = tag
    names = values.get("served_model_name")
    if "model" not in values and names and not from_file:
        raise ConfigError(
            f"--served-model-name {' '.join(names)}: the model is missing, because --served-model-name takes every word after it;"
            " write the model first: quire serve MODEL --served-model-name NAME"
        )
    return values


def spellings(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Every flag of the parser, with dashes for underscores."""
    return {
        flag.replace("_", "-"): action for flag, action in parser._option_string_actions.items()
    }


class _CommandLine:
    """Words with each flag spelt as the parser has it; dotted flags and the config file apart."""

    def __init__(self, parser: argparse.ArgumentParser, argv: Sequence[str]):
        self.words: list[str] = []
        self.dotted: dict[str, Any] = {}
        self.destinations: set[str] = set()
        self.file: str | None = None
        self._known = spellings(parser)
        self._spelt = {flag.replace("_", "-"): flag for flag in parser._option_string_actions}
        self._has_commands = parser._subparsers is not None  # a subcommand's parser reads its words
        twice: list[str] = []
        queue = [str(word) for word in argv]
        while queue:
            word = queue.pop(0)
            if word == "--":
                self.words += [word, *queue]
                break
            if not word.startswith("-") or word == "-" or _is_number(word):
                self.words.append(word)
            elif (name := self._flag(word, queue)) in self.destinations - REPEATED:
                twice.append(word.partition("=")[0])
            elif name is not None:
                self.destinations.add(name)
        self.destinations |= self.dotted.keys()
        if twice:
            logger.warning("Found duplicate keys %s: the last value is used", ", ".join(twice))

    def _flag(self, word: str, queue: list[str]) -> str | None:
        """Store one flag; returns its destination if the parser knows it."""
        flag, equals, value = word.partition("=")
        flag, dot, path = flag.partition(".")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag.startswith("-O") and flag[2:].isdigit():
            flag, equals, value = "-O", "=", flag[2:]
        action = self._known.get(flag)
        if action is None:
            if flag == "--config" and not self._has_commands:
                self._config(value if equals else queue.pop(0) if queue else "")
            elif flag[:2] in self._known and flag[1:] in LLAMA_CPP:
                raise UnknownName(unknown(flag, "flag"))  # argparse would read -ngl as -n gl
            else:
                self.words.append(word)
            return None
        if dot:
            if not equals:
                value = queue.pop(0) if queue else "true"
            _put(self.dotted.setdefault(action.dest, {}), path.split("."), value)
            return None
        if equals and isinstance(action, argparse.BooleanOptionalAction):
            self.words.append(self._spelt[_boolean(flag, value)])
        else:
            self.words.append(f"{self._spelt[flag]}{equals}{value}")
        return action.dest

    def _config(self, path: str) -> None:
        if not path:
            raise ConfigError("--config: the file name is missing")
        if self.file is not None:
            raise ConfigError("--config was given twice; put the flags into one file")
        self.file = path


def _typed(action: argparse.Action, value: Any) -> Any:
    """A value in the type of the field; a program's own flags convert it themselves."""
    field = getattr(action, "field", None)
    if isinstance(field, Option):
        return value if value is None else coerce(field, value)
    if field is None and isinstance(value, str) and callable(action.type):
        return action.type(value)
    return value if field is None else loose(value)


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
