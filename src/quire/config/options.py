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
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from quire.config.engine import EngineConfig
from quire.errors import ConfigError

Kind = Literal["flag", "int", "float", "text", "json", "list", "maybe"]
"""flag: --x and --no-x; maybe: --x or --x VALUE; list: --x A B."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one section."""

    name: str
    section: str
    """Attribute of EngineConfig: model, cache, ..."""
    kind: Kind
    default: Any
    type: str
    choices: tuple[str, ...] = ()
    short: tuple[str, ...] = ()


SHORT = {
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "data_parallel_size": ("-dp",),
    "enable_expert_parallel": ("-ep",),
    "quantization": ("-q",),
    "api_server_count": ("-asc",),
    "gpu_memory_utilization": ("--device-memory-utilization",),
}

CHOICES = {
    "runner": ("auto", "generate", "pooling"),
    "model_impl": ("auto", "quire", "native", "vllm", "transformers"),
    "dtype": ("auto", "half", "float16", "bfloat16", "float", "float32"),
    "tokenizer_mode": ("auto", "hf", "slow", "mistral"),
    "config_format": ("auto", "hf", "mistral"),
    "chat_template_content_format": ("auto", "string", "openai"),
    "tool_strict_level": ("auto", "strict", "function", "parameter"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    "prefix_caching_hash_algo": (
        "blake2b",
        "builtin",
        "sha256",
        "sha256_cbor",
        "xxhash",
        "xxhash_cbor",
    ),
    "scheduling_policy": ("fcfs", "priority"),
    "preemption_mode": ("recompute", "swap"),
    "uvicorn_log_level": ("critical", "error", "warning", "info", "debug", "trace"),
}
"""The allowed values of a field. Backends and formats are not here, because plugins can add some."""

REPEATED = frozenset({"middleware"})
"""Lists whose flag may be repeated to add items; for other flags the last one counts."""

WORDS = {"max_model_len": ("auto",)}
"""Words that a numeric field also accepts."""


@functools.cache
def options() -> dict[str, Option]:
    """Every field of every section, by name, in the order of the dataclasses."""
    found: dict[str, Option] = {}
    for section in fields(EngineConfig):
        for one in fields(section_class(section.name)):
            text = str(one.type)
            found[one.name] = Option(
                one.name,
                section.name,
                _kind(text),
                _default(one),
                text,
                CHOICES.get(one.name, ()),
                SHORT.get(one.name, ()),
            )
    return found


def section_class(name: str) -> Any:
    """model -> ModelConfig"""
    return next(f.default_factory for f in fields(EngineConfig) if f.name == name)


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return one.default


def _kind(text: str) -> Kind:
    """The kind of a field, from the text of its annotation."""
    parts = {part.strip() for part in text.split("|")}
    if "bool" in parts:
        return "maybe" if "str" in parts else "flag"
    for mark, kind in (("list[", "list"), ("dict[", "json")):
        if any(part.startswith(mark) for part in parts):
            return kind  # type: ignore[return-value]
    return "int" if "int" in parts else "float" if "float" in parts else "text"


@functools.cache
def section_help(section: str) -> tuple[str, dict[str, str]]:
    """A section's title, and each field's docstring: the string below the field in the source."""
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
    return kind.__name__, words


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
        ConfigError: impossible; the message names the field and the values that it accepts.
    """
    if value is None:
        return option.default
    try:
        value = _coerce(option, value)
    except (ValueError, TypeError) as why:
        raise ConfigError(f"{option.name}={value!r}: {why}") from None
    if option.choices and value not in option.choices:
        raise ConfigError(f"{option.name}={value!r}: choose from {', '.join(option.choices)}")
    return value


def _coerce(option: Option, value: Any) -> Any:
    if callable(value) and not isinstance(value, type):
        if "Callable" not in option.type:
            raise TypeError("must not be a function")
        return value
    match option.kind:
        case "flag":
            return _flag(value)
        case "int":
            if isinstance(value, str):
                return value if value in WORDS.get(option.name, ()) else human_int(value)
            if isinstance(value, bool) or value != int(value):
                raise TypeError("must be a whole number")
            return int(value)
        case "float":
            return float(value)
        case "json":
            return json_object(value)
        case "list":
            return (
                [value] if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
            )
        case "maybe":
            return value if isinstance(value, (bool, str)) else str(value)
        case _:
            return dtype_name(value) if option.name == "dtype" else str(value)


def _flag(value: Any) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if value in (0, 1):
        return bool(value)
    raise TypeError("must be true or false")


def json_object(value: Any) -> dict[str, Any]:
    """A dict, from itself or from JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as why:
            raise ValueError(f"must be a JSON object such as '{{\"key\": 1}}' ({why})") from None
    if not isinstance(value, dict):
        raise TypeError("must be a JSON object (a dict)")
    return value


def dtype_name(value: Any) -> str:
    """The name of a dtype without its module: 'half' -> 'half', torch.float16 -> 'float16'."""
    return str(value).removeprefix("torch.")
