"""Incremental reader of arguments that are nested elements: `<key>text</key>`, each tag after a prefix -> JSON.

Knows elements, and which types a schema gives them. Does not know the text around the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.frontend.parsers.call_writer import CallWriter
from quire.frontend.parsers.tool_schemas import converted, schema_types
from quire.frontend.parsers.value_reader import (
    MAX_NESTED,
    MAX_WORD,
    MalformedValue,
    escaped,
    quoted,
)

TAG = re.compile(f"<(/?)([^<>\\s/]{{0,{MAX_WORD}}})")
ITEM = "item"
"""The name of each element of a list."""


@dataclass(slots=True)
class ArgumentElement:
    name: str
    schema: Mapping[str, Any]
    text: list[str] = field(default_factory=list)
    children: list[tuple[str, str]] = field(default_factory=list)
    """Names and values, in JSON."""


class ElementArguments:
    """The elements of one call, up to the first end tag that closes none of them, which it does not consume.

    Args:
        prefix: what precedes each tag.
    """

    def __init__(self, writer: CallWriter, prefix: str):
        self.writer, self.prefix = writer, prefix
        self.done = False
        self._open: list[ArgumentElement] = []
        self._names: set[str] = set()
        self._last: tuple[str, list[str]] = ("", [])
        """The last argument and its values: the next element may have the same name."""
        self._unwritten: list[str] = []

    def feed(self, text: str, pos: int) -> int:
        """As ValueReader.feed."""
        while pos < len(text) and not self.done:
            start = text.find(self.prefix, pos)
            stop = start if start >= 0 else len(text) - self._partial_length(text, pos)
            try:
                self._add_text(text[pos:stop])
                self._keep(text[pos:stop])
                pos = stop
                if start < 0:
                    return pos
                begin = start + len(self.prefix)
                tag = TAG.match(text, begin)
                end = begin if tag is None else tag.end()
                if end == len(text):
                    return pos
                if tag is None or not tag[2] or text[end] != ">":
                    raise MalformedValue("a prefix without a tag")
                if self._read_tag(tag[2], is_end=bool(tag[1])):
                    self._keep(text[pos : end + 1])
                    pos = end + 1
            except MalformedValue as error:
                self._write_last()
                error.pos, error.unemitted = pos, "".join(self._unwritten)
                raise
        return pos

    def release(self) -> None:
        """The text ends here: pass on the complete arguments, and what there is of the last one, without an end."""
        self._write_last()
        if self._open:
            comma = ", " if self._names else "{"
            text = escaped("".join(self._unwritten[1:]))
            self.writer.arguments(f'{comma}{quoted(self._open[0].name)}: "{text}')
        elif self._names:
            self.writer.arguments("}")

    def _keep(self, text: str) -> None:
        """Keep the text of an argument until it is complete."""
        if self._open:
            self._unwritten.append(text)
        else:
            self._unwritten.clear()

    def _partial_length(self, text: str, pos: int) -> int:
        """Number of characters at the end that may be the start of the prefix."""
        for length in range(min(len(self.prefix) - 1, len(text) - pos), 0, -1):
            if self.prefix.startswith(text[-length:]):
                return length
        return 0

    def _add_text(self, text: str) -> None:
        if self._open and not self._open[-1].children:
            self._open[-1].text.append(text)
        elif text.strip():
            raise MalformedValue("text between two elements")

    def _read_tag(self, name: str, is_end: bool) -> bool:
        """Returns whether the tag belongs to the arguments."""
        if not is_end:
            self._begin(name)
        elif not self._open:
            self._write_last()
            self.writer.arguments("}" if self._names else "{}")
            self.done = True
            return False
        elif self._open[-1].name == name:
            self._end()
        else:
            raise MalformedValue(f"the end of {name[:40]!r} in {self._open[-1].name[:40]!r}")
        return True

    def _begin(self, name: str) -> None:
        if len(self._open) >= MAX_NESTED:
            raise MalformedValue("nested too deeply")
        parent = self._open[-1] if self._open else None
        if parent is None:
            schema = self.writer.tools.properties(self.writer.name).get(name)
        else:
            if "".join(parent.text).strip():
                raise MalformedValue(f"an element after text in {parent.name[:40]!r}")
            schema = _member(parent.schema, name)
        self._open.append(ArgumentElement(name, schema if isinstance(schema, Mapping) else {}))

    def _end(self) -> None:
        element = self._open.pop()
        value = self._value(element)
        if self._open:
            self._open[-1].children.append((element.name, value))
            return
        if element.name in self._names:
            raise MalformedValue(f"{element.name[:40]!r} occurs twice")
        if element.name != self._last[0]:
            self._write_last()
            self._last = (element.name, [])
        self._last[1].append(value)

    def _value(self, element: ArgumentElement) -> str:
        definitions = self.writer.tools.definitions(self.writer.name)
        types = schema_types(element.schema, definitions)
        if not element.children:
            text = "".join(element.text)
            if not text.strip() and types & {"array", "object"} and "string" not in types:
                return "[]" if "array" in types else "{}"
            return converted(text, types)
        names = {name for name, _ in element.children}
        if "array" in types or (names == {ITEM} and "object" not in types):
            return f"[{', '.join(value for _, value in element.children)}]"
        members: dict[str, list[str]] = {}
        for name, value in element.children:
            members.setdefault(name, []).append(value)
        return f"{{{', '.join(f'{quoted(name)}: {_joined(values)}' for name, values in members.items())}}}"

    def _write_last(self) -> None:
        name, values = self._last
        if not values:
            return
        self.writer.arguments(f"{', ' if self._names else '{'}{quoted(name)}: {_joined(values)}")
        self._names.add(name)
        self._last = ("", [])


def _joined(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


def _member(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of an element in one with this schema."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return schema.get("items")
