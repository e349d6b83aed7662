"""Incremental readers of one tool call: a JSON object with name and arguments, or a Python call expression.

They pass what they read to a CallSink (the parser) at once, and read each character once. Knows the syntax of a call.
Does not know the text around it.
"""

from __future__ import annotations

import json
import re
from typing import Protocol

from quire.frontend.parsers.value_reader import (
    MAX_WORD,
    SPACE,
    MalformedValue,
    ScalarTypes,
    ValueReader,
    complete_value,
    quoted,
)

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters", "args")
KNOWN = frozenset((*NAMES, *ARGUMENTS, "type", "id", "tool_call_id", "description"))
IDENTIFIER = re.compile(r"[A-Za-z0-9_.\-]+")


class CallSink(Protocol):
    known_only: bool

    def begin(self, name: str) -> None:
        """Raises MalformedValue: not a valid tool name."""

    def types(self) -> ScalarTypes | None:
        """The types that apply to the arguments."""

    def arguments(self, text: str) -> None: ...


class CallObject:
    """`{"name": ..., "arguments": {...}}`, keys in any order; also `parameters`."""

    def __init__(self, sink: CallSink):
        self.sink = sink
        self.done = False
        self._expected = "open"
        self._key = ""
        self._seen_keys: set[str] = set()
        self._reader: ValueReader | None = None
        self._early_arguments: list[str] = []
        self._has_name = False
        self._first_char = ""

    def feed(self, text: str, pos: int) -> int:
        """As ValueReader.feed."""
        end = len(text)
        while pos < end and not self.done:
            if self._reader is not None:
                try:
                    reached = self._reader.feed(text, pos)
                except MalformedValue:
                    self._read_on(self._reader)  # forward what precedes the error
                    raise
                try:
                    self._read_on(self._reader)
                except MalformedValue as error:
                    error.pos = reached
                    raise
                if reached == pos:
                    return pos
                pos = reached
            elif (space := SPACE.match(text, pos)) is not None:
                pos = space.end()
            else:
                try:
                    pos = self._mark(text[pos], pos)
                except MalformedValue as error:
                    error.pos = pos
                    error.unemitted = quoted(self._key) if self._expected == "colon" else ""
                    raise
        return pos

    def release(self) -> None:
        """The text ends here: pass on what was withheld."""
        if self._reader is not None:
            self._reader.release()
            self._read_on(self._reader)

    def _mark(self, char: str, pos: int) -> int:
        expected = self._expected
        if expected == "open" and char == "{":
            self._expected = "key or end"
        elif char == "}" and expected in ("key or end", "after"):
            self._finish()
        elif expected == "after" and char == ",":
            self._expected = "key"
        elif expected in ("key", "key or end") and char == '"':
            self._expected = "key"
            self._reader = ValueReader("json", '"')
            return pos
        elif expected == "colon" and char == ":":
            self._expected = "value"
        elif expected == "value":
            group = self._group()
            first = {"name": '"', "arguments": '{"n'}.get(group, "")
            types = self.sink.types() if group == "arguments" and self._has_name else None
            self._reader = ValueReader("json", first, types)
            return pos
        else:
            raise MalformedValue(f"{char!r} where {expected} was expected")
        return pos + 1

    def _group(self) -> str:
        return "name" if self._key in NAMES else "arguments" if self._key in ARGUMENTS else ""

    def _read_on(self, reader: ValueReader) -> None:
        if self._expected == "key":
            if reader.done:
                self._key = json.loads(reader.take())
                self._reader, self._expected = None, "colon"
                group = self._group() or self._key
                if group in self._seen_keys:
                    raise MalformedValue(f"{self._key[:40]!r} occurs twice")
                if self.sink.known_only and self._key not in KNOWN:
                    raise MalformedValue(f"{self._key[:40]!r} is not a key of a call")
                self._seen_keys.add(group)
            return
        group = self._group()
        if group == "arguments":
            self._read_arguments(reader)
        if reader.done:
            if group == "name":
                self._begin(json.loads(reader.take()))
            self._reader, self._expected = None, "after"

    def _begin(self, name: str) -> None:
        self.sink.begin(name)
        self._has_name = True
        if self._early_arguments:
            self.sink.arguments("".join(self._early_arguments))
            self._early_arguments.clear()

    def _read_arguments(self, reader: ValueReader) -> None:
        if not self._first_char and reader.out:
            self._first_char = reader.out[0][0]
        if self._first_char != "{" and not reader.done:
            return  # arguments as a JSON string: wait for its end
        text = reader.take()
        if not text:
            return
        if self._first_char == '"':
            text = complete_value(json.loads(text), first_chars="{")
        elif self._first_char == "n":
            text = "{}"
        if self._has_name:
            self.sink.arguments(text)
        else:
            self._early_arguments.append(text)

    def _finish(self) -> None:
        if not self._has_name:
            raise MalformedValue("a call without a name")
        if "arguments" not in self._seen_keys:
            self.sink.arguments("{}")
        self.done = True


class PythonCall:
    """`name(key=value, ...)`."""

    def __init__(self, sink: CallSink):
        self.sink = sink
        self.done = False
        self._expected = "name"
        self._word = ""
        self._is_first = True
        self._reader: ValueReader | None = None

    def feed(self, text: str, pos: int) -> int:
        """As ValueReader.feed."""
        end = len(text)
        while pos < end and not self.done:
            if self._reader is not None:
                try:
                    reached = self._reader.feed(text, pos)
                finally:
                    if new := self._reader.take():
                        self.sink.arguments(new)
                if self._reader.done:
                    self._reader, self._expected = None, "after"
                elif reached == pos:
                    return pos
                pos = reached
                continue
            try:
                reached = self._step(text, pos)
            except MalformedValue as error:
                error.pos, error.unemitted = pos, self._word if self._expected == "=" else ""
                raise
            if reached < 0:
                return pos
            pos = reached
        return pos

    def release(self) -> None:
        """As CallObject.release."""
        if self._reader is not None:
            self._reader.release()
            if text := self._reader.take():
                self.sink.arguments(text)

    def _step(self, text: str, pos: int) -> int:
        """Returns the new position; -1: it needs more text."""
        if self._expected in ("name", "key", "key or end") and (
            identifier := IDENTIFIER.match(text, pos)
        ):
            word = identifier[0]
            if len(word) > MAX_WORD:
                raise MalformedValue("the name is too long")
            if identifier.end() == len(text):
                return -1
            self._word = word
            self._expected = "(" if self._expected == "name" else "="
            return identifier.end()
        if (space := SPACE.match(text, pos)) is not None:
            return space.end()
        return self._mark(text[pos], pos)

    def _mark(self, char: str, pos: int) -> int:
        expected, word = self._expected, self._word
        if char == "(" and expected == "(":
            if word[0].isdigit():
                raise MalformedValue(f"{word[:40]!r} is not a name")
            self.sink.begin(word)
            self.sink.arguments("{")
            self._expected = "key or end"
        elif char == "=" and expected == "=":
            self.sink.arguments(("" if self._is_first else ", ") + quoted(word) + ": ")
            self._is_first = False
            self._reader = ValueReader("python")
        elif char == "," and expected == "after":
            self._expected = "key or end"
        elif char == ")" and expected in ("after", "key or end"):
            self.sink.arguments("}")
            self.done = True
        else:
            raise MalformedValue(f"{char!r} in a call, where {expected} was expected")
        return pos + 1
