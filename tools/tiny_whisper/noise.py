"""What a room and a microphone add to speech: noise, echo, level. Some hums and clicks are kept for measuring.

Shape suffixes: N samples.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np

from tools.tiny_whisper.espeak import RATE

COLOURS, HUMS = 48, 64
HELD_OUT_HUMS = 16  # the first ones
LONGEST = 6 * RATE


@cache
def coloured(number: int) -> np.ndarray:
    """Noise whose power falls with the frequency, from white (0) to brown; of mean square 1."""
    draw = np.random.default_rng(number)
    spectrum = np.fft.rfft(draw.standard_normal(LONGEST))
    hertz = np.maximum(np.fft.rfftfreq(LONGEST, 1 / RATE), 20)
    return normed(np.fft.irfft(spectrum * hertz ** -(number / COLOURS), LONGEST))


@cache
def hum_and_clicks(number: int) -> np.ndarray:
    """Mains hum with its harmonics, and clicks of a keyboard; of mean square 1."""
    draw = np.random.default_rng(10_000 + number)
    time = np.arange(LONGEST) / RATE
    base = draw.choice((50, 60))
    hum = sum(draw.uniform(0.2, 1) / k * np.sin(2 * np.pi * (base * k * time + draw.uniform())) for k in range(1, 12))  # fmt: skip
    clicks = np.zeros(LONGEST)
    for at in draw.integers(0, LONGEST - 400, 24):
        clicks[at : at + 400] += 6 * draw.standard_normal(400) * np.exp(-np.arange(400) / 60)
    return normed(normed(np.asarray(hum)) + normed(clicks) + 0.5 * draw.standard_normal(LONGEST))


def normed(noise_N: np.ndarray) -> np.ndarray:
    return (noise_N / np.sqrt(np.mean(noise_N**2))).astype(np.float32)


def echo(samples_N: np.ndarray, draw: random.Random) -> np.ndarray:
    """The speech in a small room: its echo falls by 60 dB in 0.1 to 0.4 s."""
    length = int(draw.uniform(0.1, 0.4) * RATE)
    noise = np.random.default_rng(draw.getrandbits(32)).standard_normal(length)
    tail = noise * np.exp(-6.9 * np.arange(length) / length) * draw.uniform(0.02, 0.12)
    tail[0] = 1
    size = 1 << (len(samples_N) + length).bit_length()
    heard = np.fft.irfft(np.fft.rfft(samples_N, size) * np.fft.rfft(tail, size), size)
    return heard[: len(samples_N)].astype(np.float32)


def in_a_room(samples_N: np.ndarray, speech: float, draw: random.Random, held_out: bool) -> np.ndarray:  # fmt: skip
    """Add echo, noise and a level. `speech`: the mean square of the spoken parts; 0: there is no speech.

    Signal to noise: 5 to 40 dB in training, 10 to 30 dB held out.
    """
    kind = draw.random()
    if kind < 0.2 and speech:
        samples_N = echo(samples_N, draw)
    if draw.random() < (0.9 if held_out else 0.85):
        decibel = draw.uniform(10, 30) if held_out else draw.uniform(5, 40)
        if held_out:
            noise = hum_and_clicks(draw.randrange(HELD_OUT_HUMS))
        elif draw.random() < 0.4:
            noise = hum_and_clicks(draw.randrange(HELD_OUT_HUMS, HUMS))
        else:
            noise = coloured(draw.randrange(COLOURS))
        noise_N = np.roll(noise, draw.randrange(LONGEST))[: len(samples_N)]
        level = np.sqrt((speech or draw.uniform(1e-6, 0.02)) * 10 ** (-decibel / 10))
        samples_N = samples_N + np.float32(level) * noise_N
    loudest = np.abs(samples_N).max(initial=1e-9)
    level = 10 ** draw.uniform(-1.5, -0.05) / loudest if speech else 1.0
    return np.clip(samples_N * np.float32(level), -1, 1)
