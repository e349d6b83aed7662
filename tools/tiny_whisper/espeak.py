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
LIST_END, WORD = 0, 1  # espeak_EVENT_TYPE


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("message", ctypes.c_uint), ("text_position", ctypes.c_int), ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int), ("sample", ctypes.c_int), ("user_data", ctypes.c_void_p), ("id", ctypes.c_int64),
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


class Espeak:
    """The library's one state."""

    def __init__(self) -> None:
        name = find_library("espeak-ng") or "libespeak-ng.so.1"
        self.library: Any = ctypes.CDLL(name)
        self.native_rate = self.library.espeak_Initialize(SYNCHRONOUS, 500, None, 0)
        if self.native_rate <= 0:
            raise RuntimeError("espeak-ng has no data: install espeak-ng-data")
        self.pieces: list[np.ndarray] = []
        self.starts: list[float] = []
        self.callback = _Callback(self._receive)  # the library keeps a pointer to it
        self.library.espeak_SetSynthCallback(self.callback)

    def say(self, text: str, manner: Manner) -> tuple[np.ndarray, list[float]]:
        """(samples_N, the second at which each word begins): float32 at 16,000 samples a second, without silence around.

        Raises:
            ValueError: there is no such voice.
        """
        if self.library.espeak_SetVoiceByName(manner.voice.encode()):
            raise ValueError(f"espeak-ng has no voice {manner.voice!r}")
        for parameter, value in (
            (SPEED, manner.speed), (PITCH, manner.pitch), (INTONATION, manner.intonation), (WORD_GAP, manner.gap),
        ):  # fmt: skip
            self.library.espeak_SetParameter(parameter, value, 0)
        self.pieces, self.starts = [], []
        data = text.encode()
        self.library.espeak_Synth(data, len(data) + 1, 0, BY_CHARACTER, 0, UTF8, None, None)
        spoken_N = np.concatenate(self.pieces).astype(np.float32) / 32768
        samples_N = soxr.resample(spoken_N, self.native_rate, RATE).astype(np.float32)
        first, last = audible(samples_N)
        return samples_N[first:last], [max(0.0, start - first / RATE) for start in self.starts]

    def _receive(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self.pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        at = 0
        while events[at].type != LIST_END:
            if events[at].type == WORD:
                self.starts.append(events[at].audio_position / 1000)
            at += 1
        return 0


@cache
def espeak() -> Espeak:
    return Espeak()


def audible(samples_N: np.ndarray, part: float = 0.01) -> tuple[int, int]:
    """(first, last) between which samples are louder than this part of the loudest."""
    loud = np.flatnonzero(np.abs(samples_N) > part * np.abs(samples_N).max(initial=1e-9))
    return (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (0, 0)
