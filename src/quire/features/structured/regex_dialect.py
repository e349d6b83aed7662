r"""Translates patterns of JSON schemas from ECMA-262 regexes to Rust's, which llguidance reads.

Knows where the dialects differ in meaning; llguidance refuses what differs only in syntax. Each rewrite matches the
same texts or fewer, never more:

    .  \S           exclude every line break and space that ECMA's exclude
    [^...]          does not match NUL. In a JSON string, llguidance (1.9) reads a class of all control characters as
                    one that also contains the quote and the backslash; without NUL it does not
    [\x00-...]      begins at \x01, for the same reason
    [ & ~ in a class, \< \>     are characters, not operators
"""

from __future__ import annotations

import re

from quire.features.structured.errors import UnsupportedConstraint

SPACES = r"\s\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
NUL = re.compile(r"\\x00|\\u0000|\\u\{0+\}|\\x\{0+\}|\\0|\x00")
PIECE = re.compile(r"\\(?:x\{[^}]*\}|u\{[^}]*\}|[pP]\{[^}]*\}|x..|u....|.)|.", re.DOTALL)


def to_rust_regex(pattern: str) -> str:
    """Translate a pattern for llguidance.

    Raises:
        UnsupportedConstraint: a class is empty, is not closed, or has two hyphens in a row, which the dialects read differently.
    """
    out: list[str] = []
    pieces = PIECE.findall(pattern)
    index = 0
    while index < len(pieces):
        piece = pieces[index]
        if piece == "[":
            end = _class_end(pieces, index)
            out.append(_class(pieces[index + 1 : end]))
            index = end
        elif piece == ".":
            out.append(r"[^\x00\n\r\x{2028}\x{2029}]")
        elif piece == r"\S":
            out.append(rf"[^\x00{SPACES}]")
        elif piece in (r"\<", r"\>"):
            out.append(piece[1])
        else:
            out.append(piece)
        index += 1
    return "".join(out)


def _class_end(pieces: list[str], start: int) -> int:
    for index in range(start + 1, len(pieces)):
        if pieces[index] == "]":
            return index
    raise UnsupportedConstraint(f"pattern: a class is not closed: {''.join(pieces)!r}")


def _class(inside: list[str]) -> str:
    negated = bool(inside) and inside[0] == "^"
    made: list[str] = []
    for index, piece in enumerate(inside[1:] if negated else inside):
        if piece == "-" and index and made[-1] == "-":
            raise UnsupportedConstraint(
                "pattern: write \\- for each of two adjacent hyphens in a class"
            )
        made.append(f"\\{piece}" if piece in "[&~" else piece)
    if negated:
        return f"[^\\x00{''.join(made)}]"
    if not made:
        raise UnsupportedConstraint("pattern: the class [] matches nothing")
    for index in range(len(made) - 2):
        if (
            NUL.fullmatch(made[index])
            and made[index + 1] == "-"
            and not NUL.fullmatch(made[index + 2])
        ):
            made[index] = r"\x01"
    return f"[{''.join(made)}]"
