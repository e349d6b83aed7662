"""Right answers by kind on held-out scenes, in the training's own network.

Knows questions and greedy tokens. `evaluate.py` measures the published folder through Quire.

Shapes: B pictures (one), T tokens, L rows of a picture, D width of quire-tiny.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import torch
from PIL import Image
from tokenizers import Tokenizer

from tools.tiny_vision.batches import Wanted
from tools.tiny_vision.conversations import END, START, Conversations
from tools.tiny_vision.dense import Captions
from tools.tiny_vision.network import Batch, Sight
from tools.tiny_vision.pictures import draw, pixels
from tools.tiny_vision.questions import KINDS, Question
from tools.tiny_vision.scenes import Scene, scene

LONGEST = 96  # tokens of an answer


class Case(NamedTuple):
    """A held-out picture, with a question of each kind that fits it."""

    scene: Scene
    picture: Image.Image
    questions: list[Question]


def held_out(many: int, seed: int = 1) -> list[Case]:
    rng = random.Random(f"held out {seed}")
    made = []
    for _ in range(many):
        one = scene(rng, held_out=True)
        asked = [ask(one, rng) for ask, _ in KINDS.values()]
        made.append(Case(one, draw(one, rng), [each for each in asked if each is not None]))
    return made


class Accuracy:
    """By kind; `wrong`: (question, answer)."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.right: Counter[str] = Counter()
        self.wrong: list[tuple[Question, str]] = []

    def add(self, question: Question, answer: str) -> None:
        self.asked[question.kind] += 1
        self.right[question.kind] += answer == question.answer
        if answer != question.answer:
            self.wrong.append((question, answer))

    def of(self, kind: str) -> float:
        return self.right[kind] / max(1, self.asked[kind])

    def __str__(self) -> str:
        return ", ".join(f"{kind} {self.of(kind):.1%}" for kind in KINDS)


def accuracy(sight: Sight, wanted: Wanted, cases: list[Case]) -> Accuracy:
    """Greedy decoding gives the right answer exactly if each of the answer's tokens is the likeliest after the answer's tokens before
    it. So one forward pass over the right answer is enough."""
    found = Accuracy()
    tokenizer = Tokenizer.from_file(str(wanted.tokenizer))
    conversations = Conversations(tokenizer, sight.eyes.rows, wanted.image)
    captions = Captions(tokenizer, sight.eyes.rows)
    dtype = next(sight.tower.parameters()).dtype
    for case in cases:
        made = conversations.arranged(conversations.ids(f"{START}user\n"), case.questions, random.Random(1), 0)  # fmt: skip
        tokens, weights, places, mask = (
            torch.from_numpy(one)[None] for one in (made.tokens_T, made.weights_T, made.positions_T, made.mask_TT)
        )  # fmt: skip
        image = torch.from_numpy(pixels(case.picture, sight.eyes.image_size))[None].to(dtype)
        batch = Batch(image, image, image, image, tokens, weights, places, mask, made.rows)
        with torch.inference_mode():
            rows_BLD = sight.projector(sight.tower(image, 0)[1])
            if sight.reading:
                caption = torch.from_numpy(captions.caption(case.scene))[None]
                rows_BLD = sight.corrected(rows_BLD, caption)
            said_T = sight.language.logits(sight.hidden(rows_BLD, batch)[0, :-1]).argmax(-1).numpy()
        for number, question in enumerate(case.questions, 1):
            own = (made.parts_T[1:] == number) & (made.weights_T[1:] > 0)
            found.add(question, tokenizer.decode(said_T[own], skip_special_tokens=False).removesuffix(END))  # fmt: skip
    return found
