"""How vocabularies spell bytes: the byte-level alphabet and the byte-fallback tokens.

Knows two conventions. Does not know tokenizers.
"""

from __future__ import annotations

import functools


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Character -> byte, for byte-level vocabularies (the GPT-2 table).

    A printable byte is its own character; the other bytes use the characters from U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    table |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return table


def byte_token(token: str | None) -> int | None:
    """The byte of a byte-fallback token such as <0xE2>; None for any other token."""
    if token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None
