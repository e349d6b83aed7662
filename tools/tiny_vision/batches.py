"""Batches of drawn pictures, made by another process while the last one is learnt.

Everything follows from a seed. Knows numpy arrays; the training makes tensors of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from tools.tiny_vision.conversations import Conversations
from tools.tiny_vision.dense import Captions, labels, relations
from tools.tiny_vision.pictures import draw, pixels
from tools.tiny_vision.questions import questions
from tools.tiny_vision.scenes import scene


class Wanted(NamedTuple):
    """`tokenizer`: its file. `image`: the token of a row. `questions`: of a picture; 0: none are arranged. `numbers`: as `scene` has it.
    `room`: tokens of a picture's questions; all pictures take as much, so that little is padding."""

    tokenizer: Path
    image: int
    side: int
    patches: int
    pictures: int
    questions: int
    numbers: float = 0.0
    room: int | None = None


class Arrays(NamedTuple):
    """As `network.Batch`."""

    pixels_BCHW: np.ndarray
    labels_BLN: np.ndarray
    caption_BL: np.ndarray
    relations_BN: np.ndarray
    tokens_BT: np.ndarray
    weights_BT: np.ndarray
    positions_BT: np.ndarray
    mask_BTT: np.ndarray
    rows: int


def batch(wanted: Wanted, seed: int) -> Arrays:
    rng = random.Random(f"pictures {seed}")
    tokenizer = Tokenizer.from_file(str(wanted.tokenizer))
    rows = wanted.patches**2
    captions, conversations = (
        Captions(tokenizer, rows),
        Conversations(tokenizer, rows, wanted.image),
    )
    scenes = [scene(rng, numbers=wanted.numbers) for _ in range(wanted.pictures)]
    head = conversations.head(rng)
    made = [
        conversations.arranged(head, questions(one, rng, wanted.questions), rng, room=wanted.room)
        for one in scenes
        if wanted.questions
    ]
    length = max((len(one.tokens_T) for one in made), default=0)
    if wanted.room is not None:
        length = len(head) + rows + wanted.room

    def padded(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, length - size) for size in array.shape])

    masks = [padded(one.mask_TT) | np.eye(length, dtype=bool) for one in made]
    return Arrays(
        np.stack([pixels(draw(one, rng), wanted.side) for one in scenes]),
        np.stack([labels(one, wanted.patches) for one in scenes]),
        np.stack([captions.caption(one) for one in scenes]),
        np.stack([relations(one) for one in scenes]),
        np.stack([padded(one.tokens_T) for one in made] or [np.zeros(0, int)]),
        np.stack([padded(one.weights_T) for one in made] or [np.zeros(0)]),
        np.stack([padded(one.positions_T) for one in made] or [np.zeros(0, int)]),
        np.stack(masks or [np.zeros((0, 0), bool)]),
        len(head),
    )


def batches(wanted: Wanted, seed: int, ahead: int = 3) -> Iterator[Arrays]:
    """Without end."""
    with ProcessPoolExecutor(1) as process:
        waiting: list[Future[Arrays]] = []
        while True:
            while len(waiting) < ahead:
                waiting.append(process.submit(batch, wanted, seed))
                seed += 1
            yield waiting.pop(0).result()
