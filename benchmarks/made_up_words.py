"""A tokenizer of made-up words, for checkpoints with random weights.

A word is one to three syllables of a consonant and a vowel, as in the random prompts of `quire.bench.serve.datasets`. Every token but
the last one, the end token, is ASCII text: whatever a random model answers, each of its tokens is text at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
SPACE, NEWLINE = "Ġ", "Ċ"  # in the alphabet of byte-level tokenizers
END = "<|endoftext|>"


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write tokenizer.json and tokenizer_config.json with `vocab` tokens, more than 96, if they are not there."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    done = folder / "tokenizer_config.json"  # written last
    if done.exists():
        return
    tokens = [*map(chr, range(0x21, 0x7F)), SPACE, NEWLINE]
    merges = list(islice(_merges(), vocab - len(tokens) - 1))
    tokens += [left + right for left, right in merges]
    words = {token: number for number, token in enumerate([*tokens, END])}
    tokenizer = Tokenizer(models.BPE(words, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    done.write_text(json.dumps(config), encoding="utf-8")


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs, first ones first; each makes one token."""
    yield from product(CONSONANTS, VOWELS)
    syllables = ["".join(pair) for pair in product(CONSONANTS, VOWELS)]
    words = [SPACE]
    for _ in range(3):
        yield from product(words, syllables)
        words = [word + syllable for word, syllable in product(words, syllables)]
