"""A request's tools, as far as parsing calls needs them: names and parameter types.

Knows the tool definitions of chat requests. Does not check schemas. Does not know the text around calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from quire.frontend.parsers.value_reader import quoted

TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
    "object": dict, "null": type(None),
}  # fmt: skip
PYTHON = {"True": "true", "False": "false", "None": "null"}
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
            found = function(tool)
            if isinstance(name := found.get("name"), str):
                schema = found.get("parameters")
                self.parameters[name] = schema if isinstance(schema, Mapping) else {}

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def types(self, name: str, key: str) -> frozenset[str]:
        """JSON types that a parameter may have; empty if the schema names none."""
        properties = self.parameters.get(name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        found: set[str] = set()
        todo = [schema]
        for _ in range(MAX_BRANCHES):
            if not todo:
                break
            one = todo.pop()
            if not isinstance(one, Mapping):
                continue
            kind = one.get("type")
            kinds = kind if isinstance(kind, list) else [kind]
            found |= {one for one in kinds if isinstance(one, str) and one in TYPES}
            values = one.get("enum", [one["const"]] if "const" in one else ())
            if kind is None and isinstance(values, list):
                found |= {type_of(value) for value in values}
            for branch in ("anyOf", "oneOf"):
                if isinstance(one.get(branch), list):
                    todo += one[branch]
        return frozenset(found)

    def is_text(self, name: str, key: str) -> bool:
        """Whether a parameter can only be a string; its text is then used verbatim."""
        return self.types(name, key) == {"string"}

    def value(self, name: str, key: str, text: str) -> str:
        """Convert a parameter's text to JSON of its schema's type; if that fails, to a JSON string."""
        types, bare = self.types(name, key), text.strip()
        if types == {"string"}:
            return quoted(text)
        read, value = _read(bare)
        if read is None or (types and not any(_is(value, kind) for kind in types)):
            return quoted(text)
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
    """The text as JSON and as a Python value; (None, None) if it is not JSON."""
    text = PYTHON.get(text, text)
    try:
        value = json.loads(text, parse_constant=_no_constant)
        return (json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else text), value  # fmt: skip
    except (ValueError, RecursionError):
        return None, None
