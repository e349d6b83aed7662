"""Windows of five seconds as the model sees them: phrases at some place, noise, silence where the file has ended; and their tokens.

    <|startoftranscript|><|en|><|transcribe|><|0.34|> TEXT<|1.62|><|2.10|> TEXT<|3.40|><|endoftext|>

A window without speech has the label <|nospeech|> in the place of the language, and no text.

Shape suffixes: N samples, S encoder states.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from tools.tiny_whisper import tokenizer as vocabulary
from tools.tiny_whisper.espeak import RATE
from tools.tiny_whisper.noise import in_a_room
from tools.tiny_whisper.sentences import phrase
from tools.tiny_whisper.synthesize import Spoken

SAMPLES = vocabulary.SECONDS * RATE
IGNORED = -100
MOST_BEFORE = 31  # tokens of earlier text, as the server keeps of a text length of 64
MOST_WORDS = 16
LEAST_PAUSE = RATE // 5
STEP = RATE // 50  # samples of a timestamp, and of an encoder state


def fits(chosen: Sequence[Spoken]) -> bool:
    """Whether these phrases fit into a window with pauses, and their words into the text."""
    samples = sum(len(one.samples_N) + LEAST_PAUSE for one in chosen)
    return samples <= SAMPLES and sum(len(one.text.split()) for one in chosen) <= MOST_WORDS


@dataclass(frozen=True)
class Window:
    """`samples_N`: to the end of the file, so at most SAMPLES. `labels[i]`: what follows `tokens[i]`.

    For the helpers of training: `phonemes_S`: what is heard at each state. `spans`: (place of a word's label, the states in which it is
    said: first, end).
    """

    samples_N: np.ndarray
    text: str
    tokens: list[int]
    labels: list[int]
    phonemes_S: np.ndarray
    spans: list[tuple[int, int, int]]


def phonemes_of(chosen: Sequence[Spoken], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """phonemes_S: the phoneme in the middle of each state."""
    found_S = np.zeros(vocabulary.STATES, np.int64)
    middles_S = np.arange(vocabulary.STATES) * STEP + STEP // 2
    for one, (start, end) in zip(chosen, spans, strict=True):
        inside = (middles_S >= start) & (middles_S < end)
        at = np.searchsorted(one.phonemes_P2[:, 0], middles_S[inside] - start, side="right") - 1
        found_S[inside] = one.phonemes_P2[np.maximum(at, 0), 1]
    return found_S


def word_spans(one: Spoken, start: int, end: int) -> list[tuple[int, int]]:
    """The states in which each word is said."""
    begins = [start + int(at) for at in one.words_W]
    ends = [next((later for later in begins if later > begin), end) for begin in begins]
    return [(a // STEP, max(a // STEP + 1, -(-b // STEP))) for a, b in zip(begins, ends, strict=True)]  # fmt: skip


class Windows:
    """Draws windows from phrases."""

    def __init__(self, phrases: Sequence[Spoken], tokenizer: Tokenizer, seed: int, held_out: bool = False):  # fmt: skip
        self.phrases, self.tokenizer, self.held_out = phrases, tokenizer, held_out
        self.draw = random.Random(seed)
        self.id = {name: tokenizer.token_to_id(name) for name in vocabulary.SPECIAL}
        self.first_time: int = tokenizer.token_to_id(vocabulary.TIMES[0])

    def take(self) -> Window:
        """A window: of twenty, one has no speech, seven have one phrase, and the others as many as fit, of three."""
        draw, kind = self.draw, self.draw.random()
        chosen = [
            draw.choice(self.phrases) for _ in range(0 if kind < 0.05 else 1 if kind < 0.4 else 3)
        ]
        while len(chosen) > 1 and not fits(chosen):
            chosen.pop()
        return self.window(chosen)

    def window(self, chosen: Sequence[Spoken]) -> Window:
        """One with these phrases, with pauses that are drawn."""
        draw = self.draw
        left = SAMPLES - sum(len(one.samples_N) for one in chosen)
        samples_N, spans, at = np.zeros(SAMPLES, np.float32), [], 0
        for number, one in enumerate(chosen):
            least = LEAST_PAUSE if number else 0
            later = LEAST_PAUSE * (len(chosen) - number - 1)
            pause = int(least + (left - least - later) * draw.random() ** 2 * 0.7)
            left, at = left - pause, at + pause
            end = at + len(one.samples_N)
            samples_N[at:end] = one.samples_N / 32768 * draw.uniform(0.6, 1)
            spans.append((at, end))
            at = end
        speech = float(np.mean(np.concatenate([samples_N[a:b] for a, b in spans]) ** 2)) if spans else 0.0  # fmt: skip
        file_end = draw.choice((at, SAMPLES, draw.randint(at, SAMPLES)))
        heard_N = in_a_room(samples_N[: max(file_end, RATE // 10)], speech, draw, self.held_out)
        return self._labelled(heard_N, chosen, spans)

    def _labelled(self, samples_N: np.ndarray, chosen: Sequence[Spoken], spans: Sequence[tuple[int, int]]) -> Window:  # fmt: skip
        draw, id = self.draw, self.id
        timed = draw.random() < 0.35
        task = id[vocabulary.TRANSLATE if draw.random() < 0.1 else vocabulary.TRANSCRIBE]
        text: list[int] = []
        for one, (start, end) in zip(chosen, spans, strict=True):
            words = self.tokenizer.encode(f" {one.text}").ids
            text += [self.time(start), *words, self.time(end)] if timed else words
        if timed and not chosen:
            text = [self.first_time]
        follow = [id[vocabulary.ENGLISH], task, *([] if timed else [id[vocabulary.NO_TIMES]]), *text, id[vocabulary.END]]  # fmt: skip
        labels = list(follow)
        if not chosen:
            labels[0] = id[vocabulary.NO_SPEECH]
        before = self._before()
        tokens = [*before, id[vocabulary.START], *follow[:-1]]
        labels = [IGNORED] * len(before) + labels
        whole = " ".join(one.text for one in chosen)
        words = [place for place, label in enumerate(labels) if 0 <= label < id[vocabulary.END]]
        said = [range_ for one, (start, end) in zip(chosen, spans, strict=True) for range_ in word_spans(one, start, end)]  # fmt: skip
        places = [(place, *range_) for place, range_ in zip(words, said, strict=True)]
        return Window(samples_N, whole, tokens, labels, phonemes_of(chosen, spans), places)

    def time(self, sample: int) -> int:
        """The timestamp token nearest to a sample."""
        return self.first_time + round(sample / STEP)

    def _before(self) -> list[int]:
        """Text of an earlier window, in one window of six."""
        if self.draw.random() > 1 / 6:
            return []
        words = " ".join(phrase(self.draw) for _ in range(self.draw.randint(1, 5)))
        return [
            self.id[vocabulary.PREVIOUS],
            *self.tokenizer.encode(f" {words}").ids[-MOST_BEFORE:],
        ]
