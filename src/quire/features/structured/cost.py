"""Cost check: refuses a constraint that is clearly too large, before compiling it.

Knows the syntax of regexes, grammars and schemas, and limits. The estimate is rough and takes no time, so a client gets
the name of the limit at once, and not after 2 s of processor time. The limits of the compile process (`compiler.py`) stop
what the estimate misses. It refuses also what those limits let pass: `start: ("a"){1000000}` compiles in 0.2 s, and its
output fails at the second token.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from quire.features.structured.errors import UnsupportedConstraint

MAX_NESTED = 10_000  # `(a{100}){100}`: llguidance takes 0.03 s for this, and seconds for a million
MAX_LITERAL = 64 << 10  # characters of one required text: 0.06 s
MAX_ALTERNATIVES = 5000  # of a grammar: compile time is quadratic, 0.1 s for this many
MAX_MULTIPLE = 100_000  # llguidance makes one state per remainder: a second for this many
MAX_GROUPS = 1000  # nesting depth

PIECE = re.compile(
    r"\\(?:x\{[^}]*\}|u\{[^}]*\}|[pP]\{[^}]*\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}|\(\?[^:)>=!]{0,64}[:>]?|.",
    re.DOTALL,
)
COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")
IN_GRAMMAR = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|\[(?:\\.|[^\]\\\n])*\]|//[^\n]*|#[^\n]*|\{\s*\d+\s*(?:,\s*\d*\s*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?'
    r"|[()|\n*+?]|[^\s\"/\[()|{~*+?#]+|."
)


@dataclass(slots=True)
class _Part:
    """The cost of a part of an expression."""

    length: int = 0  # minimum number of characters
    nested: int = 1  # the largest product of nested repetition counts
    depth: int = 0  # nesting depth of counts

    def times(self, least: int, most: int) -> None:
        self.length *= least
        if most > 1:
            self.nested, self.depth = self.nested * most, self.depth + 1
        if self.depth > 1 and self.nested > MAX_NESTED:
            raise UnsupportedConstraint(
                f"nested repetitions multiply to {self.nested}; the limit is {MAX_NESTED}: use smaller counts, or one"
                " count"
            )
        if self.length > MAX_LITERAL:
            raise UnsupportedConstraint(
                f"the output would have at least {self.length} characters; the limit is {MAX_LITERAL}"
            )

    def add(self, other: _Part) -> None:
        self.length += other.length
        self._at_most(other)

    def either(self, other: _Part) -> None:
        self.length = max(self.length, other.length)
        self._at_most(other)

    def _at_most(self, other: _Part) -> None:
        self.nested, self.depth = max(self.nested, other.nested), max(self.depth, other.depth)
        self.times(1, 1)


class _Reader:
    """Sums the cost of an expression from its pieces: groups, alternatives and counts."""

    def __init__(self) -> None:
        self.groups: list[tuple[_Part, _Part, _Part]] = []
        self._new()

    def _new(self) -> None:
        # The earlier alternatives, the current one without its last piece, and that piece.
        self.before, self.own, self.last = _Part(), _Part(), _Part()

    def piece(self, length: int, part: _Part | None = None) -> None:
        self.own.add(self.last)
        self.last = part or _Part(length)

    def open(self) -> None:
        if len(self.groups) >= MAX_GROUPS:
            raise UnsupportedConstraint(f"its groups are nested deeper than {MAX_GROUPS} levels")
        self.own.add(self.last)
        self.groups.append((self.before, self.own, self.last))
        self._new()

    def close(self) -> None:
        if self.groups:
            whole = self.whole()
            self.before, self.own, _ = self.groups.pop()
            self.last = whole

    def alternative(self) -> None:
        self.own.add(self.last)
        self.before.either(self.own)
        self.own, self.last = _Part(), _Part()

    def whole(self) -> _Part:
        self.alternative()
        return self.before


def check_regex(text: str) -> None:
    """Raises UnsupportedConstraint."""
    _regex(text)


def _regex(text: str) -> _Part:
    reader = _Reader()
    for piece in PIECE.findall(text):
        if piece.startswith("("):
            reader.open()
        elif piece == ")":
            reader.close()
        elif piece == "|":
            reader.alternative()
        elif piece in ("*", "?"):
            reader.last.times(0, 1)
        elif (count := COUNT.fullmatch(piece)) is not None:
            least = _number(count[1])
            reader.last.times(least, _number(count[3]) if count[3] else least)
        elif piece not in ("+", "^", "$"):
            reader.piece(1)
    return reader.whole()


def check_grammar(text: str) -> None:
    """Check a grammar in EBNF or Lark, rule by rule. Raises UnsupportedConstraint."""
    reader, alternatives = _Reader(), 0
    for piece in IN_GRAMMAR.findall(text):
        first = piece[:1]
        if first == '"':
            check_text(piece)
            reader.piece(len(piece) - 2)
        elif first == "/" and not piece.startswith("//"):
            reader.piece(0, _regex(piece[1:-1]))
        elif piece == "(":
            reader.open()
        elif piece == ")":
            reader.close()
        elif piece == "|":
            alternatives += 1
            reader.alternative()
        elif piece in ("*", "?"):
            reader.last.times(0, 1)
        elif first in "{~" and (counts := re.findall(r"\d+", piece)):
            reader.last.times(_number(counts[0]), _number(counts[-1]))
        elif piece in (":", "::=") or piece.endswith(":"):
            reader = _Reader()
        elif first.isalnum() or first in "_[<@%":
            reader.piece(1 if first == "[" else 0)
    if alternatives > MAX_ALTERNATIVES:
        raise UnsupportedConstraint(
            f"it has {alternatives} alternatives; the limit is {MAX_ALTERNATIVES}"
        )


def check_text(text: str) -> None:
    """Raises UnsupportedConstraint."""
    if len(text) > MAX_LITERAL:
        raise UnsupportedConstraint(
            f"one of its strings has {len(text)} characters; the limit is {MAX_LITERAL}"
        )


def check_schema(schema: Any) -> None:
    """Check all parts of a JSON schema. Raises UnsupportedConstraint."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, str):
            check_text(part)
        elif isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            todo += part.values()
            for name in part:
                check_text(name)
            if isinstance(pattern := part.get("pattern"), str):
                check_regex(pattern)
            if isinstance(patterns := part.get("patternProperties"), dict):
                for pattern in patterns:
                    check_regex(pattern)
            _check_multiple(part)


def _check_multiple(schema: dict[str, Any]) -> None:
    """Check the least common multiple of all `multipleOf` in a schema and its `allOf`. Raises UnsupportedConstraint."""
    parts, found = [schema], Fraction(1)
    while parts:
        part = parts.pop()
        value = part.get("multipleOf")
        if isinstance(value, int | float) and 0 < value < math.inf:
            own = Fraction(str(value))
            found = Fraction(
                math.lcm(found.numerator, own.numerator),
                math.gcd(found.denominator, own.denominator),
            )
            if found.numerator > MAX_MULTIPLE:
                raise UnsupportedConstraint(
                    f"multipleOf: the least common multiple of its numbers is {found.numerator}; the limit is"
                    f" {MAX_MULTIPLE}"
                )
        if isinstance(every := part.get("allOf"), list):
            parts += [one for one in every if isinstance(one, dict)]


def _number(digits: str) -> int:
    """The number, capped at a billion, because Python is slow on thousands of digits."""
    return int(digits) if len(digits) < 10 else 10**9
