"""Word accuracy: 1 - (substitutions + insertions + deletions) / words; and the texts of a network in training.

Shape suffixes: N samples, B windows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from tools.tiny_whisper import tokenizer as vocabulary
from tools.tiny_whisper.spectrogram import spectrograms

LONGEST = 24  # tokens of a text
OF_BATCH = 50


def edits(said: Sequence[str], heard: Sequence[str]) -> int:
    """Levenshtein's distance of two lists of words."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (word != other))
    return row[-1]


@dataclass
class Accuracy:
    """Counts over texts. `wrong`: (said, heard) of texts that differ."""

    words: int = 0
    errors: int = 0
    texts: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def add(self, said: str, heard: str) -> None:
        self.texts, self.words = self.texts + 1, self.words + len(said.split())
        self.errors += edits(said.split(), heard.split())
        if said != heard:
            self.wrong.append((said, heard))

    @property
    def of_words(self) -> float:
        return 1 - self.errors / max(1, self.words)

    @property
    def of_texts(self) -> float:
        return 1 - len(self.wrong) / max(1, self.texts)

    def __str__(self) -> str:
        return f"words {self.of_words:.2%} of {self.words}, whole texts {self.of_texts:.2%} of {self.texts}"


@torch.inference_mode()
def greedy_texts(whisper: Any, tokenizer: Tokenizer, windows: Sequence[np.ndarray]) -> list[str]:
    """What a network of Transformers writes of windows, without timestamps."""
    names = (vocabulary.START, vocabulary.ENGLISH, vocabulary.TRANSCRIBE, vocabulary.NO_TIMES)
    prompt, end = [tokenizer.token_to_id(name) for name in names], tokenizer.token_to_id(vocabulary.END)  # fmt: skip
    first_time, samples = tokenizer.token_to_id(vocabulary.TIMES[0]), vocabulary.SECONDS * 16_000
    found: list[str] = []
    for start in range(0, len(windows), OF_BATCH):
        part = windows[start : start + OF_BATCH]
        mel_BMF = spectrograms(part, samples).to(whisper.dtype)
        states = whisper.model.encoder(mel_BMF)
        tokens_BT = torch.tensor([prompt] * len(part))
        while tokens_BT.shape[1] < LONGEST and not bool((tokens_BT == end).any(1).all()):
            scores = whisper(encoder_outputs=states, decoder_input_ids=tokens_BT).logits[:, -1]
            scores[:, first_time:] = -torch.inf
            tokens_BT = torch.cat([tokens_BT, scores.argmax(-1, keepdim=True)], 1)
        for row in tokens_BT[:, len(prompt) :].tolist():
            kept = row[: row.index(end)] if end in row else row
            found.append(tokenizer.decode(kept).strip())
    return found
