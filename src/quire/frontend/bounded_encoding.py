"""Tokenizes only the part of a long text that can matter: the tokenizer takes up to 300 bytes of memory for each byte of text.

    a text of which the first 1,000 tokens are kept -> its first 65,536 characters; more if these have fewer tokens

Knows texts and counts. Does not know the tokenizer libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TypeVar

T = TypeVar("T", bound=Sized)

FIRST_PART = 1 << 16  # characters: shorter texts are always tokenized whole
CHARACTERS_PER_TOKEN = 6  # nearly all texts have fewer
SPARE_TOKENS = 64  # the last tokens before a cut may differ from the whole text's tokens
GROWTH = 4


def encode_enough(
    encode: Callable[[str], T], text: str, most: int, keep_first: bool = True
) -> tuple[T, bool]:
    """The tokens of a part of the text that has more than `most` tokens, and whether that is the whole text.

    The tokens that are kept equal the whole text's, unless a single word is longer than the part.

    Args:
        most: the tokens that the caller keeps.
        keep_first: whether these are the first ones; else the last ones.
    """
    size = max(FIRST_PART, CHARACTERS_PER_TOKEN * most)
    while size < len(text):
        encoded = encode(text[:size] if keep_first else text[-size:])
        if len(encoded) >= most + SPARE_TOKENS:
            return encoded, False
        size *= GROWTH
    return encode(text), True
