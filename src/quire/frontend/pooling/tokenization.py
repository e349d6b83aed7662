"""Tokenizes texts and pairs of texts for pooling models; a truncated text keeps its special tokens.

Knows the tokenizer libraries. Does not know the limits of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.frontend.bounded_encoding import FIRST_PART, encode_enough
from quire.frontend.tokenizer import Tokenizer

Text = str | tuple[str, str]


def encode_inputs(
    tokenizer: Tokenizer, texts: Sequence[Text], special: bool, limit: int | None, keep_first: bool
) -> list[tuple[list[int], int]]:
    """For each text or pair its ids, and the place of the first id whose token type is 1 (0: none).

    Args:
        limit: the most ids of one input, special tokens included; None: any number.
        keep_first: truncate the end of a text, not its beginning.
    """
    if tokenizer.is_slow:
        return [_slow(tokenizer.backend, text, special, limit, keep_first) for text in texts]
    backend = tokenizer.backend
    whole = [
        index for index, text in enumerate(texts) if limit is None or size_of(text) <= FIRST_PART
    ]
    batch = backend.encode_batch_fast([texts[index] for index in whole], add_special_tokens=special)
    encoded: dict[int, Any] = dict(zip(whole, batch, strict=True))
    inputs = []
    for number, text in enumerate(texts):
        encoding: Any = encoded.get(number)
        if limit is not None and (encoding is None or len(encoding) > limit):
            encoding = _truncated(backend, text, special, limit, keep_first)
        inputs.append(
            (encoding.ids[:limit], _second(encoding.type_ids) if isinstance(text, tuple) else 0)
        )
    return inputs


def size_of(text: Text) -> int:
    """Characters of a text or a pair."""
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


def _truncated(backend: Any, text: Text, special: bool, limit: int, keep_first: bool) -> Any:
    def encode(part: str) -> Any:
        # Unlike `encode`, this lets other threads run.
        return backend.encode_batch_fast([part], add_special_tokens=False)[0]

    texts = text if isinstance(text, tuple) else (text,)
    parts = [encode_enough(encode, each, limit, keep_first)[0] for each in texts]
    added = backend.num_special_tokens_to_add(len(texts) > 1) if special else 0
    room = max(0, limit - added)
    for part, most in zip(parts, shares([len(part) for part in parts], room), strict=True):
        part.truncate(most, direction="right" if keep_first else "left")
    return backend.post_process(*parts, add_special_tokens=special)


def shares(lengths: Sequence[int], room: int) -> list[int]:
    """How many tokens each text keeps: the longest one loses tokens first, as in Transformers' longest_first."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    short, long = sorted(lengths)
    short = min(short, room // 2)
    long = min(long, room - short)
    return [short, long] if lengths[0] <= lengths[1] else [long, short]


def _slow(
    backend: Any, text: Text, special: bool, limit: int | None, keep_first: bool
) -> tuple[list[int], int]:
    first, second = text if isinstance(text, tuple) else (text, None)
    encoding = backend(first, second, add_special_tokens=special, return_token_type_ids=True)
    ids, types = list(encoding["input_ids"]), list(encoding.get("token_type_ids") or ())
    start = _second(types) if second is not None else 0
    if limit is not None and len(ids) > limit:
        if keep_first:
            return ids[:limit], start if start < limit else 0
        return ids[-limit:], max(0, start - (len(ids) - limit))
    return ids, start


def _second(types: Sequence[int]) -> int:
    return types.index(1) if 1 in types else 0


def cut_text(tokenizer: Tokenizer, text: str, most: int) -> str:
    """The beginning of a text that its first `most` tokens cover."""
    if tokenizer.is_slow:
        ids, _ = encode_enough(lambda part: tokenizer.encode(part, False), text, most)
        return text if len(ids) <= most else tokenizer.decode(ids[:most])
    backend = tokenizer.backend
    tokens, _ = encode_enough(
        lambda part: backend.encode_batch([part], add_special_tokens=False)[0], text, most
    )
    return text if len(tokens) <= most else text[: tokens.token_to_chars(most - 1)[1]]
