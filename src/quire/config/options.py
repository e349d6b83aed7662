"""The fields of the configuration dataclasses as a list of options: name, kind, default, help.

From this list each field becomes a flag and a keyword. Knows the spelling of values (25.6k, auto, JSON). Does not
know the command line (`flags.py`), old names (`from_keywords.py`), or which values fit together (`resolve.py`).
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import json
import re
import types
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from quire.config.engine import EngineConfig
from quire.config.lora import adapters_by_kind, lora_modules
from quire.config.media import media_limits, media_reading
from quire.config.nearest_name import choose_from
from quire.config.number_types import AtLeast1, in_words
from quire.config.picture_options import picture_options
from quire.errors import ConfigError

Kind = Literal["flag", "int", "float", "text", "json", "list", "maybe"]
"""flag: --x and --no-x; maybe: --x or --x VALUE; list: --x A B."""


BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one section."""

    name: str
    section: str
    """Attribute of EngineConfig: model, cache, ..."""
    kind: Kind
    default: Any
    type: Any
    """The field's annotation."""
    choices: tuple[str, ...] = ()
    """The allowed values. Fields whose values plugins can extend, such as backends, have none."""


REPEATED = frozenset({"middleware"})
"""Lists whose flag may be repeated to add items; for other flags the last value is used."""


@functools.cache
def options() -> dict[str, Option]:
    """Every field of every section, by name, in the order of the dataclasses."""
    named: dict[str, Option] = {}
    for section in fields(EngineConfig):
        kind = section_class(section.name)
        hints, defaults = get_type_hints(kind, include_extras=True), kind()
        for name in (one.name for one in fields(kind)):
            members = _members(hints[name])
            choices = next((get_args(one) for one in members if get_origin(one) is Literal), ())
            named[name] = Option(
                name, section.name, _kind(members), getattr(defaults, name), hints[name], choices
            )
    return named


def section_class(name: str) -> Any:
    """model -> ModelConfig"""
    return next(f.default_factory for f in fields(EngineConfig) if f.name == name)


def _members(hint: Any) -> list[Any]:
    """The types of a union, without the limits of numbers."""
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        return [member for one in get_args(hint) for member in _members(one)]
    return [get_args(hint)[0] if get_origin(hint) is Annotated else hint]


def _kind(members: list[Any]) -> Kind:
    if bool in members:
        return "maybe" if str in members else "flag"
    origins = {get_origin(one) for one in members}
    if list in origins or dict in origins:
        return "list" if list in origins else "json"
    return "int" if int in members else "float" if float in members else "text"


@functools.cache
def section_help(section: str) -> tuple[str, dict[str, str]]:
    """A section's title (its docstring), and each field's docstring: the string below the field in the source."""
    kind = section_class(section)
    module = importlib.import_module(kind.__module__)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    body = next(
        n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__
    )
    words: dict[str, str] = {}
    for node, after in itertools.pairwise(body):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            words[node.target.id] = " ".join(str(after.value.value).split())
    return str(kind.__doc__).rstrip("."), words


# Values

_HUMAN = re.compile(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)i?[bB]?")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_int(text: str) -> int:
    """'25.6k' -> 25600, '1K' -> 1024, '2M' -> 2097152: lower-case letters are decimal, capitals binary.

    Raises:
        ValueError: not such a number, or the result is not whole.
    """
    match = _HUMAN.fullmatch(text.strip().replace("_", ""))
    if not match:
        raise ValueError(f"{text!r} is not a whole number (4k, 25.6k and 1K are allowed)")
    number, letter = match.groups()
    if letter in _BINARY and "." in number:
        raise ValueError(
            f"{text!r}: K, M, G and T are powers of 1024 and need a whole number; k, m, g and t are powers of 1000 (25.6k is 25600)"
        )
    factor = _DECIMAL.get(letter) or _BINARY.get(letter) or 1
    whole, _, fraction = number.partition(".")
    value, rest = divmod(int(whole + fraction) * factor, int("1" + "0" * len(fraction)))
    if rest:
        raise ValueError(f"{text!r} is not a whole number")
    return value


def coerce(option: Option, value: Any) -> Any:
    """Convert a value from Python, JSON or YAML to the type of the field.

    Raises:
        ConfigError: impossible, or out of range; the message names the field, the value and what the field accepts.
    """
    if value is None:
        return option.default
    try:
        converted = _coerce(option, value)
    except (ValueError, TypeError) as why:
        raise ConfigError(f"{option.name}={value!r}: {in_words(why)}") from None
    if option.choices and converted not in option.choices:
        raise ConfigError(f"{option.name}={value!r}: {choose_from(value, option.choices)}")
    return converted


def _coerce(option: Option, value: Any) -> Any:
    if callable(value) and not isinstance(value, type):
        if option.name != "hf_overrides":
            raise TypeError("must not be a function")
        return value
    match option.kind:
        case "flag":
            value = BOOLEANS.get(str(value).lower(), value)
        case "int" if isinstance(value, str) and (option.name, value) != ("max_model_len", "auto"):
            value = human_int(value)
        case "list" if option.name == "lora_modules":
            return lora_modules(value)
        case "list":
            value = (
                [value] if isinstance(value, str) or not hasattr(value, "__iter__") else [*value]
            )
            if option.type != list[AtLeast1]:
                return value
        case "json" if option.name == "default_mm_loras":
            return adapters_by_kind(value)
        case "json" if option.name == "limit_mm_per_prompt":
            return media_limits(value)
        case "json" if option.name == "media_io_kwargs":
            return media_reading(value)
        case "json" if option.name == "mm_processor_kwargs":
            return picture_options(value)
        case "json":
            return json_object(value)
        case "maybe" if isinstance(value, bool):
            return value
        case "maybe" | "text":
            return str(value).removeprefix("torch." if option.name == "dtype" else "")
    return msgspec.convert(value, option.type, strict=False)


def json_object(value: Any) -> dict[str, Any]:
    """A dict, from itself, from JSON text, or from an object such as vLLM's StructuredOutputsConfig."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as why:
            raise ValueError(f"must be a JSON object such as '{{\"key\": 1}}' ({why})") from None
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if not isinstance(value, dict) and hasattr(value, "__dict__"):
        value = {key: item for key, item in vars(value).items() if item is not None}
    if not isinstance(value, dict):
        raise TypeError("must be a JSON object (a dict)")
    return value
