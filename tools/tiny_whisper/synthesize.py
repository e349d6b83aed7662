"""Synthesizes phrases with espeak-ng into files.

    python -m tools.tiny_whisper.synthesize DIR --phrases 40000            to train on
    python -m tools.tiny_whisper.synthesize DIR --phrases 600 --held-out   other voices, speeds and phrases

DIR/NUMBER.npz has 500 phrases. The same seed gives the same files.

Shape suffixes: N samples, W words, P phonemes.
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
PHONEMES = (
    "_ _: n s t f I k r @ z l d aI E v w b 0 oU D i: eI a p i u: m T V aU @2 h O@ I2 o@ j g i@ @L 3 S N t# dZ 3: O2 e@ tS A@ O: aI2 I#"
    " U t2 ; aI@ a# r- A: IR w#"
).split()
"""espeak-ng's names of what is heard in these words and accents. The first is silence, and every name that is not here."""


@dataclass(frozen=True)
class Spoken:
    """A phrase, its sound (int16), and the voice that said it.

    `words_W`: for each word the index of its first sample. `phonemes_P2`: for each phoneme the index of its first sample, and
    its number in PHONEMES.
    """

    text: str
    samples_N: np.ndarray
    voice: str
    words_W: np.ndarray
    phonemes_P2: np.ndarray


def spoken(seed: int, held_out: bool) -> Iterator[Spoken]:
    """Phrases without an end; those that are too long for a window are left out."""
    draw, say = random.Random(seed), espeak().say
    while True:
        text, how = phrase(draw), manner(draw, held_out)
        if is_held_out(text) != held_out:
            continue
        said = say(text, how)
        if not 0 < len(said.samples_N) <= LONGEST * RATE:
            continue
        heard = [
            (at, PHONEMES.index(name) if name in PHONEMES else 0) for at, name in said.phonemes
        ]
        yield Spoken(
            text, (said.samples_N * 32767).astype(np.int16), how.voice, np.array(said.words), np.array(heard)
        )  # fmt: skip


def write(folder: Path, number: int, phrases: list[Spoken]) -> None:
    np.savez(
        folder / f"{number:05d}.npz",
        samples=np.concatenate([one.samples_N for one in phrases]),
        lengths=np.array([len(one.samples_N) for one in phrases]),
        texts=np.array([one.text for one in phrases]),
        voices=np.array([one.voice for one in phrases]),
        words=np.concatenate([one.words_W for one in phrases]),
        phonemes=np.concatenate([one.phonemes_P2 for one in phrases]),
        counts=np.array([(len(one.words_W), len(one.phonemes_P2)) for one in phrases]),
    )


def read(folder: Path) -> list[Spoken]:
    """All phrases of a folder."""
    found = []
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as data:
            samples = np.split(data["samples"], np.cumsum(data["lengths"])[:-1])
            ends = np.cumsum(data["counts"], 0)[:-1]
            words, phonemes = np.split(data["words"], ends[:, 0]), np.split(data["phonemes"], ends[:, 1])  # fmt: skip
            columns = data["texts"].tolist(), samples, data["voices"].tolist(), words, phonemes
        found += [Spoken(*one) for one in zip(*columns, strict=True)]
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
