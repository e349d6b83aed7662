"""Synthesizes phrases with espeak-ng into files.

    python -m tools.tiny_whisper.synthesize DIR --phrases 40000            to train on
    python -m tools.tiny_whisper.synthesize DIR --phrases 600 --held-out   other voices, speeds and phrases

DIR/NUMBER.npz has 500 phrases: `samples` (int16, 16,000 a second), `lengths`, `texts`, `voices`. The same seed gives the same files.

Shape suffixes: N samples.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.tiny_whisper.espeak import RATE, espeak
from tools.tiny_whisper.sentences import is_held_out, phrase
from tools.tiny_whisper.voices import manner

OF_FILE = 500
LONGEST = 4.8  # seconds


@dataclass(frozen=True)
class Spoken:
    """A phrase, its sound (int16), and the voice that said it."""

    text: str
    samples_N: np.ndarray
    voice: str


def spoken(seed: int, held_out: bool) -> Iterator[Spoken]:
    """Phrases without an end; those that are too long for a window are left out."""
    draw, say = random.Random(seed), espeak().say
    while True:
        text, how = phrase(draw), manner(draw, held_out)
        if is_held_out(text) != held_out:
            continue
        samples_N, _ = say(text, how)
        if 0 < len(samples_N) <= LONGEST * RATE:
            yield Spoken(text, (samples_N * 32767).astype(np.int16), how.voice)


def write(folder: Path, number: int, phrases: list[Spoken]) -> None:
    np.savez(
        folder / f"{number:05d}.npz",
        samples=np.concatenate([one.samples_N for one in phrases]),
        lengths=np.array([len(one.samples_N) for one in phrases]),
        texts=np.array([one.text for one in phrases]),
        voices=np.array([one.voice for one in phrases]),
    )


def read(folder: Path) -> list[Spoken]:
    """All phrases of a folder."""
    found = []
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as data:
            ends = np.cumsum(data["lengths"])
            pieces = np.split(data["samples"], ends[:-1])
            texts, voices = data["texts"].tolist(), data["voices"].tolist()
        found += [Spoken(*one) for one in zip(texts, pieces, voices, strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("folder", type=Path)
    parser.add_argument("--phrases", type=int, required=True)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    drawn = spoken(asked.seed, asked.held_out)
    for number, first in enumerate(range(0, asked.phrases, OF_FILE)):
        count = min(OF_FILE, asked.phrases - first)
        write(asked.folder, number, [next(drawn) for _ in range(count)])


if __name__ == "__main__":
    main()
