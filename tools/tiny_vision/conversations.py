"""Pictures with questions as arrays: prompts as the chat template writes them, several conversations about one picture beside each other.

A picture's rows are computed once, and each conversation sees them and itself. Knows the template's text and quire-tiny's tokens.

Shapes: T tokens.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from tools.tiny_model import chat
from tools.tiny_model.corpus import SYSTEMS, samples
from tools.tiny_vision.questions import Question

START, END = "<|im_start|>", "<|im_end|>"
EARLIER = ("honest", "repeat", "count", "sort")
FOLLOW_UPS = 0.3  # share of the questions that are a later turn of the conversation before


class Arranged(NamedTuple):
    """`parts_T`: of each token the number of its question, from 1. `mask_TT`: what a token sees. `rows`: where the picture's rows begin."""

    tokens_T: np.ndarray
    parts_T: np.ndarray
    weights_T: np.ndarray
    positions_T: np.ndarray
    mask_TT: np.ndarray
    rows: int


class Conversations:
    """`rows`: of a picture; `image`: the token that stands for one."""

    def __init__(self, tokenizer: Tokenizer, rows: int, image: int) -> None:
        self.tokenizer, self.rows, self.image = tokenizer, rows, image

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def head(self, rng: random.Random) -> list[int]:
        """The tokens before a picture; some have a system prompt, or an earlier turn without a picture."""
        before = f"{START}system\n{rng.choice(SYSTEMS)}{END}\n" if rng.random() < 0.1 else ""
        if rng.random() < 0.1:
            earlier = next(samples(rng.randrange(1 << 30), False, rng.choice(EARLIER), plain=True))
            answer = {"role": "assistant", "content": earlier.answer}
            before += chat.render([*earlier.messages, answer])
        return self.ids(f"{before}{START}user\n")

    def asked(self, text: str, again: bool = False) -> list[int]:
        """A question up to its answer: after the picture, or as a later turn."""
        return self.ids(f"\n{START}user\n{text}{END}\n{START}assistant\n" if again else f"\n{text}{END}\n{START}assistant\n")  # fmt: skip

    def arranged(
        self, head: list[int], questions: list[Question], rng: random.Random, follow_ups: float = FOLLOW_UPS,
        room: int | None = None,
    ) -> Arranged:  # fmt: skip
        """`head`: the tokens before the picture. `room`: for the tokens of the questions and answers; one that does not fit is left out."""
        tokens = head + [self.image] * self.rows
        start = len(tokens)
        parents, ends = (
            [-1],
            [start],
        )  # of each part: the part before it in its conversation, and its last position
        weights, positions, parts = [0.0] * start, list(range(start)), [0] * start
        for one in questions:
            number = len(parents)
            parent = number - 1 if number > 1 and rng.random() < follow_ups else 0
            given, answer = self.asked(one.text, again=parent > 0), self.ids(one.answer + END)
            if room is not None and len(tokens) - start + len(given) + len(answer) > room:
                continue
            tokens += given + answer
            # Long answers are mostly form: their tokens count less, and short answers are learnt as soon.
            weights += [0.0] * len(given) + [len(answer) ** -0.5] * len(answer)
            positions += range(ends[parent], ends[parent] + len(given) + len(answer))
            parts += [number] * (len(given) + len(answer))
            parents.append(parent)
            ends.append(positions[-1] + 1)
        sees = np.zeros((len(parents), len(parents)), bool)
        for part in range(len(parents)):
            at = part
            while at >= 0:
                sees[part, at] = True
                at = parents[at]
        numbers = np.array(parts)
        mask = sees[numbers[:, None], numbers[None]] & np.tri(len(tokens), dtype=bool)
        return Arranged(np.array(tokens), numbers, np.array(weights, np.float32), np.array(positions), mask, len(head))  # fmt: skip
