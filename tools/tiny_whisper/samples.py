"""Writes the sample file of the package, and the phrases of the tests: held-out voices, speeds, phrases and noises.

    python -m tools.tiny_whisper.samples OUT.wav FOLDER

OUT.wav: one sentence without noise. FOLDER/held_out.ogg: phrases one after the other; FOLDER/held_out.json: `[first sample, end, text]` of each.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import soundfile

from tools.tiny_whisper.espeak import RATE, Manner, espeak
from tools.tiny_whisper.synthesize import spoken
from tools.tiny_whisper.tokenizer import train
from tools.tiny_whisper.windows import Windows

SAMPLE = "find three red foxes in the forest"
VOICE = Manner("en-us+f3", speed=150)
PHRASES, SEED = 28, 11


def sample() -> np.ndarray:
    """The sentence with half a second of silence around it."""
    samples_N = espeak().say(SAMPLE, VOICE).samples_N
    return np.pad(0.5 * samples_N / np.abs(samples_N).max(), RATE // 2)


def held_out() -> tuple[np.ndarray, list[tuple[int, int, str]]]:
    """(samples_N, spans): half of the phrases with hum and clicks."""
    windows = Windows([], train(), SEED, held_out=True)
    pieces, spans, at = [], [], 0
    for number, one in enumerate(islice(spoken(SEED, held_out=True), PHRASES)):
        clean = np.pad((one.samples_N / 32768).astype(np.float32), RATE // 10)
        samples_N = windows.window([one]).samples_N if number % 2 else clean
        pieces.append(samples_N)
        spans.append((at, at + len(samples_N), one.text))
        at += len(samples_N)
    return np.concatenate(pieces), spans


def main() -> None:
    out, folder = map(Path, sys.argv[1:])
    soundfile.write(out, sample(), RATE, format="WAV", subtype="PCM_16")
    samples_N, spans = held_out()
    soundfile.write(folder / "held_out.ogg", samples_N, RATE, format="OGG", subtype="VORBIS")
    lines = ",\n".join(json.dumps(span) for span in spans)
    (folder / "held_out.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
