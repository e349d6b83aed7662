"""Incremental value reader: a value in a model's syntax -> JSON.

Knows three dialects: JSON, Python literals, and Gemma's (bare keys, strings between markers). The output always has the
spacing of Python's json.dumps, so equal values are equal texts. Reads each character once. Does not know calls.

In Python, models also write numbers with leading zeros, and quotes within quotes: a quote ends a string only before
one of `,)]}:`, and the last string of a call only where the call can end. A set becomes a list.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

MAX_NESTED = 128
MAX_WORD = 256  # characters of a number, a name, a key without quotes


class MalformedValue(Exception):
    """The text is not a valid value or call. The message gives the reason, `pos` the position."""

    pos = 0
    unemitted = ""
    """Text consumed before `pos` and not emitted."""


@dataclass(frozen=True)
class ValueDialect:
    quotes: tuple[str, ...] = ('"',)
    escapes: str = "json"
    """json, python, or none."""
    words: Mapping[str, str] | None = None
    bare_words: bool = False
    """Allows keys and words without quotes."""
    tuples: bool = False
    trailing_comma: bool = False
    """Allows trailing comma of a list or an object."""


class ScalarTypes(Protocol):
    """Types of the members of an object."""

    def may_be_text(self, key: str) -> bool: ...

    def converted(self, key: str, scalar: str) -> str:
        """The scalar, in JSON, as JSON of the member's type."""


JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
PYTHON_WORDS = {**JSON_WORDS, "True": "true", "False": "false", "None": "null"}
DIALECTS = {
    "json": ValueDialect(words=JSON_WORDS),
    "python": ValueDialect(('"', "'"), "python", PYTHON_WORDS, tuples=True, trailing_comma=True),
    "gemma": ValueDialect(
        ('<|"|>', '"'), "none", PYTHON_WORDS, bare_words=True, trailing_comma=True
    ),
    "functiongemma": ValueDialect(
        ("<escape>", '"'), "none", PYTHON_WORDS, bare_words=True, trailing_comma=True
    ),
}

SPACE = re.compile(r"[ \t\r\n]+")
WORD = re.compile(r"[A-Za-z0-9_+\-.]+")
BARE_KEY = re.compile(r"[^\s:{}\[\](),\"'<>]+")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
RUNS = {quote: re.compile(f"[^{quote}\\\\\\x00-\\x1f]+") for quote in "\"'"}
MAX_SPACE = 16  # characters between a quote and what shows that it ends a string
AFTER_QUOTE = re.compile(f"\\s{{0,{MAX_SPACE}}}")
AFTER_STRING = frozenset(",)]}:")
AFTER_CALL = re.compile(f"\\)[ \\t]{{0,{MAX_SPACE}}}")
AFTER_LAST = frozenset(",]<\r\n")
"""What may come after a call whose last argument is a string."""
HEX = re.compile(r"[0-9A-Fa-f]+")
JSON_ESCAPES = frozenset('"\\/bfnrt')
PYTHON_ESCAPES = {
    "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v", "0": "\0", "\n": "",
}  # fmt: skip


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """The text escaped as inside a JSON string."""
    return quoted(text)[1:-1]


class ValueReader:
    """Reads one value. `feed` it text; `out` collects JSON; `done` once it is complete.

    `first_chars`: the characters that the value may begin with; "": any. `types`: converts the scalars of an object.
    """

    def __init__(self, dialect: str, first_chars: str = "", types: ScalarTypes | None = None):
        self.dialect, self.is_python = DIALECTS[dialect], dialect == "python"
        self.first_chars, self.types = first_chars, types
        self.out: list[str] = []
        self.done = False
        self._expected = "value"
        self._closers: list[str] = []
        """For each open bracket: the character that closes it, and what to write for it (the same, if it is one)."""
        self._comma = False
        self._quote = ""
        self._withheld: int | None = None
        """Index in `out` of what may still change: a member to convert, or the start of a set or dictionary."""
        self._undecided = False
        """The innermost bracket opens a set or a dictionary."""
        self._member = ""

    def take(self) -> str:
        """The JSON since the last `take`."""
        stop = len(self.out) if self._withheld is None else self._withheld
        new = "".join(self.out[:stop])
        del self.out[:stop]
        self._withheld = None if self._withheld is None else 0
        return new

    def _is_member(self) -> bool:
        return self.types is not None and self._closers == ["}"]

    def feed(self, text: str, pos: int) -> int:
        """Read text[at:]; returns where it stopped: at the end of the value, or where it needs more text.

        Raises:
            MalformedValue: not a value; its `pos` is the position of the error.
        """
        steps = {
            "value": self._value, "key": self._key, "colon": self._colon, "after": self._after,
            "string": self._string, "word": self._in_word, "word key": self._in_word, "bare": self._bare_key,
        }  # fmt: skip
        end = len(text)
        while pos < end and not self.done:
            between = self._expected in ("value", "key", "colon", "after")
            if between and (space := SPACE.match(text, pos)) is not None:
                pos = space.end()
                continue
            try:
                reached = steps[self._expected](text, pos)
            except MalformedValue as error:
                error.pos = pos
                self.release()
                raise
            if reached < 0:
                return pos
            pos = reached
        return pos

    def release(self) -> None:
        """Withhold nothing: the text ends here."""
        self._withheld = None

    # -- each method reads from `pos` and returns the new position; -1: it needs more text -------------
    def _value(self, text: str, pos: int) -> int:
        char = text[pos]
        if self.first_chars and not self._closers and char not in self.first_chars:
            raise MalformedValue(f"{char!r} where {self.first_chars!r} was expected")
        if self._closers and self._closers[-1] != "}" and char == self._closers[-1][0]:
            return self._close(pos)
        if char in "{[" or (char == "(" and self.dialect.tuples):
            if len(self._closers) >= MAX_NESTED:
                raise MalformedValue("nested too deeply")
            self._separate()
            self._undecided = char == "{" and self.is_python
            if self._undecided:
                self._withheld = len(self.out)
            self.out.append("{" if char == "{" else "[")
            self._closers.append({"{": "}", "[": "]", "(": ")]"}[char])
            self._expected = "key" if char == "{" else "value"
            return pos + 1
        if self.types is not None and self._is_member():
            text_ = text.startswith(self.dialect.quotes, pos) and self.types.may_be_text(
                self._member
            )
            self._withheld = None if text_ else len(self.out)
        return self._string_or_word(text, pos)

    def _string_or_word(self, text: str, pos: int) -> int:
        for quote in self.dialect.quotes:
            if text.startswith(quote, pos):
                self._separate()
                self.out.append('"')
                self._quote, self._string_is_key = quote, self._expected == "key"
                self._expected = "string"
                return pos + len(quote)
            if len(text) - pos < len(quote) and quote.startswith(text[pos:]):
                return -1
        if (self._expected == "value" or self.is_python) and WORD.match(text, pos):
            self._separate()
            if self._expected == "key" and self._withheld is None:
                self._withheld = len(self.out)
            self._expected = "word" if self._expected == "value" else "word key"
            return pos
        raise MalformedValue(f"{text[pos]!r} where a {self._expected} was expected")

    _string_is_key = False

    def _separate(self) -> None:
        if self._comma:
            self.out.append(", ")
            self._comma = False

    def _close(self, pos: int) -> int:
        if self._comma and not self.dialect.trailing_comma:
            raise MalformedValue("trailing comma")
        self._comma = self._undecided = False
        self._withheld = None
        self.out.append(self._closers.pop()[-1])
        self._expected = "after"
        self.done = not self._closers
        return pos + 1

    def _scalar_ended(self) -> None:
        self._expected = "after"
        self.done = not self._closers
        if self._withheld is not None and self.types is not None:
            scalar = "".join(self.out[self._withheld :])
            self.out[self._withheld :] = [self.types.converted(self._member, scalar)]
            self._withheld = None

    def _key(self, text: str, pos: int) -> int:
        if text[pos] == "}":
            return self._close(pos)
        if self._is_member():
            self._separate()
            self._withheld = len(self.out)
        if self.dialect.bare_words and BARE_KEY.match(text, pos):
            self._separate()
            self._expected = "bare"
            return pos
        return self._string_or_word(text, pos)

    def _bare_key(self, text: str, pos: int) -> int:
        key = BARE_KEY.match(text, pos)
        word = "" if key is None else key[0]
        if pos + len(word) == len(text) and len(word) <= MAX_WORD:
            return -1
        if len(word) > MAX_WORD:
            raise MalformedValue("the key is too long")
        self.out.append(quoted(word))
        self._expected = "colon"
        return pos + len(word)

    def _colon(self, text: str, pos: int) -> int:
        if self._undecided and text[pos] in ",}" and self._withheld is not None:
            self.out[self._withheld] = "["
            self._closers[-1], self._undecided, self._withheld = "}]", False, None
            return self._after(text, pos)
        if text[pos] != ":":
            raise MalformedValue(f"{text[pos]!r} where ':' was expected")
        if self._is_member():
            self._member = json.loads("".join(self.out[self._withheld :]))
        elif not self._string_is_key and self.is_python:
            self.out[-1] = quoted(self.out[-1])
        self._undecided, self._withheld = False, None
        self.out.append(": ")
        self._expected = "value"
        return pos + 1

    def _after(self, text: str, pos: int) -> int:
        char = text[pos]
        if char == self._closers[-1][0]:
            return self._close(pos)
        if char != ",":
            raise MalformedValue(f"{char!r} where ',' or {self._closers[-1][0]!r} was expected")
        self._comma = True
        self._expected = "key" if self._closers[-1] == "}" else "value"
        return pos + 1

    def _in_word(self, text: str, pos: int) -> int:
        """A number or a word; waits for its end, because only the complete word shows whether it is valid."""
        found = WORD.match(text, pos)
        word = "" if found is None else found[0]
        if pos + len(word) == len(text) and len(word) <= MAX_WORD:
            return -1
        known = (self.dialect.words or {}).get(word)
        if known is None and len(word) <= MAX_WORD:
            bare = quoted(word) if self.dialect.bare_words else None
            other = python_number(word) if self.is_python else bare
            known = finite(word) if NUMBER.fullmatch(word) else other
        if known is None:
            raise MalformedValue(f"{word[:40]!r} is not a value")
        self.out.append(known)
        if self._expected == "word key":
            self._expected, self._string_is_key = "colon", False
        else:
            self._scalar_ended()
        return pos + len(word)

    def _string(self, text: str, pos: int) -> int:
        quote = self._quote
        if self.dialect.escapes == "none":
            return self._marked_string(text, pos, quote)
        if (run := RUNS[quote].match(text, pos)) is not None:
            self.out.append(escaped(run[0]))
            return run.end()
        char = text[pos]
        if char == quote:
            return self._end_of_string(text, pos)
        if char == "\\":
            return self._escape(text, pos)
        self.out.append(escaped(char))  # a raw control character, such as a line break: escape it
        return pos + 1

    def _end_of_string(self, text: str, pos: int) -> int:
        """A quote. In Python it belongs to the string unless the string can end here."""
        space = AFTER_QUOTE.match(text, pos + 1)
        after = pos + 1 if space is None else space.end()
        if self.is_python and after - pos <= MAX_SPACE:
            if after == len(text):
                return -1
            is_last = not self._closers and text[after] == ")"
            called = AFTER_CALL.match(text, after) if is_last else None
            if called is not None and called.end() == len(text):
                return -1
            follows = called is None or text[called.end()] in AFTER_LAST
            if text[after] not in AFTER_STRING or not follows:
                self.out.append(escaped(text[pos]))
                return pos + 1
        self._string_ended()
        return pos + 1

    def _marked_string(self, text: str, pos: int, quote: str) -> int:
        end = text.find(quote, pos)
        stop = end if end >= 0 else len(text)
        if end < 0:
            for length in range(min(len(quote) - 1, stop - pos), 0, -1):
                if quote.startswith(text[stop - length :]):
                    stop -= length
                    break
        self.out.append(escaped(text[pos:stop]))
        if end >= 0:
            self._string_ended()
            return end + len(quote)
        return stop if stop > pos else -1

    def _string_ended(self) -> None:
        self.out.append('"')
        if self._string_is_key:
            self._expected = "colon"
        else:
            self._scalar_ended()

    def _escape(self, text: str, pos: int) -> int:
        if pos + 1 >= len(text):
            return -1
        char, json_ = text[pos + 1], self.dialect.escapes == "json"
        if char in "uxU" and not (json_ and char != "u"):
            size = {"u": 4, "x": 2, "U": 8}[char]
            digits = text[pos + 2 : pos + 2 + size]
            if digits and HEX.fullmatch(digits) is None:
                raise MalformedValue(f"\\{char} needs {size} hexadecimal digits")
            if len(digits) < size:
                return -1
            value = int(digits, 16)
            if value > 0x10FFFF:
                raise MalformedValue(f"invalid character {digits}")
            self.out.append(f"\\u{digits}" if char == "u" else json.dumps(chr(value))[1:-1])
            return pos + 2 + size
        if json_:
            if char not in JSON_ESCAPES:
                raise MalformedValue(f"\\{char} is not a JSON escape")
            self.out.append("\\" + char)
        else:
            self.out.append(escaped(PYTHON_ESCAPES.get(char, "\\" + char)))
        return pos + 2


def finite(number: str) -> str:
    """A JSON number; one that no double holds (1e400) becomes the largest double of its sign, since JSON has no infinity."""
    if number.lstrip("-").isdigit() or not math.isinf(value := float(number)):
        return number
    return repr(math.copysign(sys.float_info.max, value))


def python_number(word: str) -> str | None:
    """A number as JSON, also with leading zeros, underscores or in hexadecimal; None: it is none."""
    for convert in (int, lambda digits: int(digits, 0), float):
        try:
            value = convert(word)
            infinite = isinstance(value, float) and math.isinf(value) and word[-1].isdigit()
            return finite(word.replace("_", "")) if infinite else json.dumps(value, allow_nan=False)
        except ValueError:
            continue
    return None


def complete_value(text: str, dialect: str = "json", first_chars: str = "") -> str:
    """Convert a complete value to JSON.

    Raises:
        MalformedValue: the text is not exactly one value.
    """
    reader = ValueReader(dialect, first_chars)
    end = reader.feed(text + " ", 0)  # the space ends a number
    if not reader.done or text[end:].strip():
        raise MalformedValue("more than one value")
    return reader.take()
