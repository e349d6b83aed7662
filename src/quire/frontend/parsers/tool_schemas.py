"""A request's tools, as far as parsing calls needs them: names and parameter types.

Knows the tool definitions of chat requests. Does not check schemas. Does not know the text around calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.frontend.parsers.value_reader import (
    MalformedValue,
    complete_value,
    finite,
    python_number,
    quoted,
)

TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
    "object": dict, "null": type(None),
}  # fmt: skip
OTHER_NAMES = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean",
    "list": "array", "dict": "object",
}  # fmt: skip
WORDS = {"True": "true", "False": "false", "None": "null"}
MAX_BRANCHES = 64


def function(tool: Any) -> Mapping[str, Any]:
    """A tool's function, from the nested or the flat form; {} for anything else."""
    if not isinstance(tool, Mapping):
        return {}
    inner = tool.get("function", tool)
    return inner if isinstance(inner, Mapping) else {}


class ToolSchemas:
    """Parameter schemas of the tools that may be called, by name."""

    def __init__(self, tools: Iterable[Any] = ()):
        self.parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            definition = function(tool)
            if isinstance(name := definition.get("name"), str):
                schema = definition.get("parameters")
                self.parameters[name] = schema if isinstance(schema, Mapping) else {}

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def properties(self, name: str) -> Mapping[str, Any]:
        properties = self.parameters.get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def required(self, name: str) -> list[str]:
        names = self.parameters.get(name, {}).get("required")
        return [key for key in names if isinstance(key, str)] if isinstance(names, list) else []

    def definitions(self, name: str) -> Any:
        return self.parameters.get(name, {}).get("$defs")

    def types(self, name: str, key: str) -> frozenset[str]:
        """JSON types that a parameter may have; empty if the schema names none."""
        return schema_types(self.properties(name).get(key), self.definitions(name))

    def is_text(self, name: str, key: str) -> bool:
        """Whether a parameter can only be a string; its text is then used verbatim."""
        return self.types(name, key) == {"string"}

    def value(self, name: str, key: str, text: str) -> str:
        """Convert a parameter's text to JSON of its schema's type; if that fails, to a JSON string."""
        return converted(text, self.types(name, key))

    def lacks(self, name: str, key: str) -> bool:
        """Whether the tool names its parameters, and this one is not among them."""
        properties = self.properties(name)
        return bool(properties) and key not in properties

    def unwrapped(self, name: str, text: str) -> str | None:
        """The arguments that a wrapper's text holds, as JSON; None: it does not hold known parameters only."""
        _, value = _read(text.strip())
        if isinstance(value, str):
            _, value = _read(value)
        if not isinstance(value, dict) or not value.keys() <= self.properties(name).keys():
            return None
        return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ArgumentTypes:
    """The parameter types of one tool, for arguments that have types of their own."""

    tools: ToolSchemas
    name: str

    def may_be_text(self, key: str) -> bool:
        """Whether a string needs no conversion."""
        types = self.tools.types(self.name, key)
        return not types or "string" in types

    def converted(self, key: str, scalar: str) -> str:
        """A scalar in JSON, as JSON of the schema's type if that is possible."""
        types, value = self.tools.types(self.name, key), json.loads(scalar)
        if not types or any(_is(value, kind) for kind in types):
            return scalar
        text = self.tools.value(self.name, key, value if isinstance(value, str) else scalar)
        return scalar if text.startswith('"') and "string" not in types else text


def schema_types(schema: Any, definitions: Any) -> frozenset[str]:
    """JSON types that a value of a schema may have; empty if the schema names none. `definitions`: the tool's `$defs`."""
    types: set[str] = set()
    todo: list[Any] = [schema]
    for _ in range(MAX_BRANCHES):
        if not todo:
            break
        part = todo.pop()
        if not isinstance(part, Mapping):
            continue
        kind = part.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        names = (OTHER_NAMES.get(name, name) for name in kinds if isinstance(name, str))
        types |= {name for name in names if name in TYPES}
        values = part.get("enum", [part["const"]] if "const" in part else ())
        if kind is None and isinstance(values, list):
            types |= {type_of(value) for value in values}
        for branch in ("anyOf", "oneOf", "allOf"):
            if isinstance(part.get(branch), list):
                todo += part[branch]
        reference = str(part.get("$ref", ""))
        if reference.startswith("#/$defs/") and isinstance(definitions, Mapping):
            todo.append(definitions.get(reference.removeprefix("#/$defs/")))
    return frozenset(types)


def converted(text: str, types: frozenset[str]) -> str:
    """Convert a value's text to JSON of one of the types; if that fails, to a JSON string."""
    if types == {"string"}:
        return quoted(text)
    read, value = _read(text.strip())
    if isinstance(value, str) and types and "string" not in types:
        read, value = _read(value.strip())
    if read is None and types & {"integer", "number"}:
        read = python_number(text.strip())  # 007
        value = None if read is None else json.loads(read)
    if read is None or (types and not any(_is(value, kind) for kind in types)):
        return quoted(text)
    if isinstance(value, float) and value.is_integer() and types & {"integer", "number"}:
        return str(int(value))
    return read


def type_of(value: Any) -> str:
    return next((kind for kind in TYPES if _is(value, kind)), "string")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[kind])


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _read(text: str) -> tuple[str | None, Any]:
    """The text as JSON and as a Python value; (None, None) if it is neither JSON nor a Python list or dictionary."""
    text = WORDS.get(text, text)
    try:
        value = json.loads(text, parse_constant=_no_constant)
        if isinstance(value, float) and math.isinf(value):
            text = finite(text)
            return text, float(text)
        if not isinstance(value, list | dict):
            return text, value
        return json.dumps(value, ensure_ascii=False, allow_nan=False), value
    except (ValueError, RecursionError):
        pass
    try:
        read = complete_value(text, "python", "[{(")
        return read, json.loads(read)
    except (MalformedValue, ValueError, RecursionError):
        return None, None
