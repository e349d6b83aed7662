"""Speech from the shared library of espeak-ng (Debian: libespeak-ng1, espeak-ng-data), one phrase at a time.

The library is called in this process: starting the program for each phrase takes longer than the speech.
Source: espeak-ng's speak_lib.h, version 1.51.

Shape suffixes: N samples.
"""

from __future__ import annotations

import ctypes
from ctypes.util import find_library
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import soxr

RATE = 16_000
SYNCHRONOUS, UTF8, BY_CHARACTER = 2, 1, 1
SPEED, PITCH, INTONATION, WORD_GAP = 1, 3, 4, 7  # espeak_PARAMETER
LIST_END, WORD, PHONEME = 0, 1, 7  # espeak_EVENT_TYPE
PHONEME_EVENTS = 1  # espeakINITIALIZE_PHONEME_EVENTS


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("message", ctypes.c_uint), ("text_position", ctypes.c_int), ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int), ("sample", ctypes.c_int), ("user_data", ctypes.c_void_p), ("name", ctypes.c_char * 8),
    )  # fmt: skip


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


@dataclass(frozen=True)
class Manner:
    """How a phrase is said. `voice`: ACCENT or ACCENT+VARIANT; `speed`: words a minute; `pitch`, `intonation`: 0 to 99;
    `gap`: between words, in 10 ms."""

    voice: str
    speed: int = 160
    pitch: int = 50
    intonation: int = 50
    gap: int = 0


@dataclass(frozen=True)
class Speech:
    """`samples_N`: float32 at 16,000 a second, without silence around. `words`: the sample at which each word begins; a word that
    espeak-ng joins to another begins with it. `phonemes`: the sample at which each begins, and its name in espeak-ng."""

    samples_N: np.ndarray
    words: list[int]
    phonemes: list[tuple[int, str]]


class Espeak:
    """The library's one state."""

    def __init__(self) -> None:
        name = find_library("espeak-ng") or "libespeak-ng.so.1"
        self.library: Any = ctypes.CDLL(name)
        self.native_rate = self.library.espeak_Initialize(SYNCHRONOUS, 500, None, PHONEME_EVENTS)
        if self.native_rate <= 0:
            raise RuntimeError("espeak-ng has no data: install espeak-ng-data")
        self.pieces: list[np.ndarray] = []
        self.words: dict[int, int] = {}  # place in the text -> milliseconds
        self.phonemes: list[tuple[int, str]] = []  # (milliseconds, name)
        self.callback = _Callback(self._receive)  # the library keeps a pointer to it
        self.library.espeak_SetSynthCallback(self.callback)

    def say(self, text: str, manner: Manner) -> Speech:
        """The sound of a text of words with one space between them.

        Raises:
            ValueError: there is no such voice.
        """
        if self.library.espeak_SetVoiceByName(manner.voice.encode()):
            raise ValueError(f"espeak-ng has no voice {manner.voice!r}")
        for parameter, value in (
            (SPEED, manner.speed), (PITCH, manner.pitch), (INTONATION, manner.intonation), (WORD_GAP, manner.gap),
        ):  # fmt: skip
            self.library.espeak_SetParameter(parameter, value, 0)
        self.pieces, self.words, self.phonemes = [], {}, []
        data = text.encode()
        self.library.espeak_Synth(data, len(data) + 1, 0, BY_CHARACTER, 0, UTF8, None, None)
        spoken_N = np.concatenate(self.pieces).astype(np.float32) / 32768
        samples_N = soxr.resample(spoken_N, self.native_rate, RATE).astype(np.float32)
        first, last = audible(samples_N)

        def sample(milliseconds: int) -> int:
            return max(0, min(milliseconds * RATE // 1000, last) - first)

        starts, at, latest = [], 1, 0  # espeak-ng counts characters from 1
        for word in text.split():
            latest = self.words.get(at, latest)
            starts.append(sample(latest))
            at += len(word) + 1
        phonemes = [(sample(start), name) for start, name in self.phonemes]
        return Speech(samples_N[first:last], starts, phonemes)

    def _receive(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self.pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        at = 0
        while events[at].type != LIST_END:
            event = events[at]
            if event.type == WORD:
                self.words[event.text_position] = event.audio_position
            elif event.type == PHONEME:
                self.phonemes.append((event.audio_position, event.name.decode(errors="replace")))
            at += 1
        return 0


@cache
def espeak() -> Espeak:
    return Espeak()


def audible(samples_N: np.ndarray, part: float = 0.01) -> tuple[int, int]:
    """(first, last) between which samples are louder than this part of the loudest."""
    loud = np.flatnonzero(np.abs(samples_N) > part * np.abs(samples_N).max(initial=1e-9))
    return (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (0, 0)
