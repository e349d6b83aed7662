"""Constraints for arguments in Python or Gemma syntax: a tool's schema -> parts of a structural tag.

Knows both syntaxes and the simple part of JSON Schema: types, enumerations, items, properties. For any other keyword
it returns None, and the caller uses another format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

JSON = dict[str, Any]

IGNORED_KEYWORDS = frozenset(("description", "title", "default", "examples", "deprecated", "$schema", "strict"))  # fmt: skip
KEYWORDS = {
    "string": {"enum", "const"}, "integer": {"enum", "const"}, "number": {"enum", "const"},
    "boolean": {"enum", "const"}, "null": set(), "array": {"items"},
    "object": {"properties", "required", "additionalProperties"},
}  # fmt: skip
MAX_OPTIONAL = 24  # leading optional properties: each may come first, so each is an alternative
MAX_NESTED = 32  # nesting of values and of anyOf
INTEGER = r"-?(0|[1-9][0-9]*)"
NUMBER = INTEGER + r"(\.[0-9]+)?([eE][+\-]?[0-9]+)?"


@dataclass(frozen=True, slots=True)
class LiteralDialect:
    words: Mapping[Any, str]
    """Spelling of true, false and null."""
    equals: str
    """Between an argument's name and its value."""
    key: tuple[str, str]
    """Before and after an object key, the separator from the value included."""
    comma: str
    quote: str = ""
    """Delimiter of strings without escapes; empty: Python's quotes and escapes."""


PYTHON = LiteralDialect({True: "True", False: "False", None: "None"}, "=", ('"', '": '), ", ")
DIALECTS = {
    "python": PYTHON,
    "gemma": LiteralDialect({True: "true", False: "false", None: "null"}, ":", ("", ":"), ",", '<|"|>'),
    "functiongemma": LiteralDialect({True: "true", False: "false", None: "null"}, ":", ("", ":"), ",", "<escape>"),
}  # fmt: skip
QUOTED = r""""([^"\\\n]|\\["'\\nrt])*"|'([^'\\\n]|\\["'\\nrt])*'"""
ANY_PYTHON = (
    "start: value\n"
    'value: TEXT | NUMBER | "True" | "False" | "None" | list | dict\n'
    'list: "[" (value (", " value)*)? "]"\n'
    'dict: "{" (pair (", " pair)*)? "}"\n'
    'pair: TEXT ": " value\n'
    f"TEXT: /{QUOTED}/\n"
    f"NUMBER: /{NUMBER}/\n"
)
NAME = "[A-Za-z_][A-Za-z0-9_]{0,63}"


def arguments(dialect: str, schema: Mapping[str, Any]) -> list[JSON] | None:
    """The parts between the brackets of a call; None: the schema cannot be expressed."""
    if schema.get("type", "object") != "object" or "properties" not in schema:
        return any_arguments(dialect) if set(schema) <= {"type", *IGNORED_KEYWORDS} else None
    return _Writer(DIALECTS[dialect]).members({"type": "object", **schema}, top=True)


def any_arguments(dialect: str) -> list[JSON] | None:
    if dialect != "python":
        return None
    argument = _sequence(
        [{"type": "regex", "pattern": NAME + "="}, {"type": "grammar", "grammar": ANY_PYTHON}]
    )
    return [_optional(_sequence([argument, _star(_sequence([_text(", "), argument]))]))]


@dataclass(slots=True)
class _Writer:
    dialect: LiteralDialect
    depth: int = 0

    def value(self, schema: Any) -> JSON | None:
        """One value; None: the schema cannot be expressed."""
        if not isinstance(schema, Mapping) or self.depth >= MAX_NESTED:
            return None
        self.depth += 1
        constraint = self._value(schema)
        self.depth -= 1
        return constraint

    def _value(self, schema: Mapping[str, Any]) -> JSON | None:
        said = set(schema) - IGNORED_KEYWORDS
        if said == {"anyOf"} and isinstance(schema["anyOf"], list):
            return _either(self.value(one) for one in schema["anyOf"])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return _either(self.value({**schema, "type": kind}) for kind in kinds)
        if kinds is None and said and said <= {"enum", "const"}:
            return self._listed(schema)
        if (
            not isinstance(kinds, str)
            or kinds not in KEYWORDS
            or not said <= {"type", *KEYWORDS[kinds]}
        ):
            return None
        if {"enum", "const"} & said:
            return self._listed(schema)
        return self._of(kinds, schema)

    def _of(self, kind: str, schema: Mapping[str, Any]) -> JSON | None:
        dialect = self.dialect
        if kind == "string":
            if not dialect.quote:
                return {"type": "regex", "pattern": QUOTED}
            return {"type": "tag", "begin": dialect.quote, "content": {"type": "any_text"}, "end": dialect.quote}  # fmt: skip
        if kind in ("integer", "number"):
            return {"type": "regex", "pattern": INTEGER if kind == "integer" else NUMBER}
        if kind == "boolean":
            return {"type": "or", "elements": [_text(dialect.words[True]), _text(dialect.words[False])]}  # fmt: skip
        if kind == "null":
            return _text(dialect.words[None])
        if ("items" if kind == "array" else "properties") not in schema:
            return self._any(kind)
        constraint = self._list(schema) if kind == "array" else self.members(schema)
        if constraint is None:
            return None
        begin, end = "[]" if kind == "array" else "{}"
        return _sequence([_text(begin), *constraint, _text(end)])

    def _any(self, kind: str) -> JSON | None:
        if self.dialect is not PYTHON:
            return None
        start = "start: list" if kind == "array" else "start: dict"
        return {"type": "grammar", "grammar": ANY_PYTHON.replace("start: value", start)}

    def _list(self, schema: Mapping[str, Any]) -> list[JSON] | None:
        item = self.value(schema["items"])
        if item is None:
            return None
        more = _star(_sequence([_text(self.dialect.comma), item]))
        return [_optional(_sequence([item, more]))]

    def members(self, schema: Mapping[str, Any], top: bool = False) -> list[JSON] | None:
        """The properties in the schema's order; `top`: as arguments of the call."""
        properties, required = schema.get("properties"), schema.get("required", [])
        if (
            not set(schema) <= {"type", *KEYWORDS["object"], *IGNORED_KEYWORDS}
            or not isinstance(properties, Mapping)
            or not isinstance(required, list)
            or not all(isinstance(key, str) and key in properties for key in required)
        ):
            return None
        before, after = ("", self.dialect.equals) if top else self.dialect.key
        parts = []
        for key, one in properties.items():
            value = self.value(one)
            if value is None or not key.isidentifier():
                return None
            parts.append((_sequence([_text(f"{before}{key}{after}"), value]), key in required))
        return self._separated(parts)

    def _separated(self, parts: list[tuple[JSON, bool]]) -> list[JSON] | None:
        """All required parts and any optional ones. One alternative per possible first part, which has no comma."""
        leading = next((index for index, (_, must) in enumerate(parts) if must), len(parts))
        if leading > MAX_OPTIONAL:
            return None
        comma, firsts = _text(self.dialect.comma), []
        more = [_sequence([comma, part]) for part, _ in parts]
        rest = [one if must else _optional(one) for one, (_, must) in zip(more, parts, strict=True)]
        for index, (part, _) in enumerate(parts[: leading + 1]):
            firsts.append(_sequence([part, *rest[index + 1 :]]))
        if not firsts:
            return []
        whole = firsts[0] if len(firsts) == 1 else {"type": "or", "elements": firsts}
        return [whole if leading < len(parts) else _optional(whole)]

    def _listed(self, schema: Mapping[str, Any]) -> JSON | None:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or not values:
            return None
        return _either(self._literal(value) for value in values)

    def _literal(self, value: Any) -> JSON | None:
        if isinstance(value, bool) or value is None:
            return _text(self.dialect.words[value])
        if isinstance(value, int):
            return _text(str(value))
        if not isinstance(value, str):
            return None
        quote = self.dialect.quote
        if not quote:
            return _text(repr(value))
        return None if quote in value else _text(f"{quote}{value}{quote}")


# -- parts ----------------------------------------------------------------------------------------
def _text(text: str) -> JSON:
    return {"type": "const_string", "value": text}


def _sequence(parts: list[JSON]) -> JSON:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _optional(part: JSON) -> JSON:
    return {"type": "optional", "content": part}


def _star(part: JSON) -> JSON:
    return {"type": "star", "content": part}


def _either(parts: Iterator[JSON | None]) -> JSON | None:
    choices = list(parts)
    if not choices or None in choices:
        return None
    return {"type": "or", "elements": choices}
