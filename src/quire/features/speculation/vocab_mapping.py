"""Joins two vocabularies by the texts of their tokens.

Knows how vocabularies spell bytes (`models/bytes_in_tokens.py`). Does not know models.

A draft model reads, in place of a token of the target that it lacks, its longest token that ends with the same bytes; it
proposes only tokens that the target has (Timor et al., arXiv 2502.05202, token-level intersection).

Shape suffixes: V tokens of the target, W of the draft model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.models.bytes_in_tokens import byte_alphabet, byte_token

SPACE = "\u2581"


def vocab_mapping(
    target: Mapping[str, int], own: Mapping[str, int], num_target: int, num_own: int
) -> tuple[np.ndarray, np.ndarray]:
    """(own_ids_V, target_ids_W), int64: the draft model's token for each of the target's, and the target's for each of its, or -1.

    Args:
        target, own: the ids of both tokenizers' texts.
        num_target, num_own: logits of both models.
    """
    bytes_of_target, bytes_of_own = (_bytes_of(ids) for ids in (target, own))
    found = {text: id for id, text in bytes_of_own.items() if id < num_own}
    own_ids_V, target_ids_W = np.zeros(num_target, np.int64), np.full(num_own, -1)
    for id, text in bytes_of_target.items():
        if id >= num_target:
            continue
        ends = (text[start:] for start in range(len(text)))
        end = next((end for end in ends if end in found), b"")
        own_ids_V[id] = found.get(end, 0)
        if end == text and text:
            target_ids_W[found[text]] = id
    return own_ids_V, target_ids_W


def _bytes_of(ids: Mapping[str, int]) -> dict[int, bytes]:
    """By id, for vocabularies of pieces (SentencePiece) and of byte characters."""
    alphabet = byte_alphabet()
    has_pieces = any(text.startswith(SPACE) or byte_token(text) is not None for text in ids)
    texts: dict[int, bytes] = {}
    for text, id in ids.items():
        if has_pieces:
            byte = byte_token(text)
            texts[id] = text.replace(SPACE, " ").encode() if byte is None else bytes([byte])
        elif all(character in alphabet for character in text):
            texts[id] = bytes(alphabet[character] for character in text)
        else:
            texts[id] = text.encode()
    return texts
