"""Reads WAV files: PCM of 8 to 32 bits, floats, A-law and mu-law.

Knows the RIFF format (Microsoft, Multimedia Programming Interface 1.0; WAVE_FORMAT_EXTENSIBLE). Reads bytes that strangers sent:
every length is checked against what is there. Headers of streams, whose lengths are 0 or 0xFFFFFFFF, mean the rest of the file.

Shape suffixes: N samples of all channels, C channels.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
MOST_CHUNKS = 1000
MOST_CHANNELS = 64
UNKNOWN = (0, 0xFFFFFFFF)
STEP = 1 << 18  # frames that are converted at once


class NotWav(Exception):
    """The file is damaged, or of a kind that is not read."""


class WavFile(NamedTuple):
    """`data`: of whole frames."""

    rate: int
    channels: int
    format: int
    bits: int
    data: memoryview

    @property
    def num_frames(self) -> int:
        return len(self.data) // (self.channels * self.bits // 8)

    def blocks(self) -> Iterator[np.ndarray]:
        """float32 [frames, C] of some frames each, between -1 and 1."""
        size = STEP * self.channels * self.bits // 8
        for start in range(0, len(self.data), size):
            samples_N = as_floats(self.data[start : start + size], self.format, self.bits)
            yield samples_N.reshape(-1, self.channels)


def is_wav(data: bytes | memoryview) -> bool:
    return bytes(data[:4]) == b"RIFF" and bytes(data[8:12]) == b"WAVE"


def read_wav(data: bytes) -> WavFile:
    """Raises NotWav."""
    view, offset, described = memoryview(data), 12, None
    for _ in range(MOST_CHUNKS):
        if offset + 8 > len(view):
            raise NotWav
        name, size = bytes(view[offset : offset + 4]), struct.unpack_from("<I", view, offset + 4)[0]
        body = view[offset + 8 : offset + 8 + size]
        if name == b"fmt ":
            described = _described(body)
        elif name == b"data":
            if described is None:
                raise NotWav
            if size in UNKNOWN:
                body = view[offset + 8 :]
            rate, channels, kind, bits = described
            frame = channels * bits // 8
            return WavFile(rate, channels, kind, bits, body[: len(body) // frame * frame])
        offset += 8 + size + size % 2
    raise NotWav


def _described(body: memoryview) -> tuple[int, int, int, int]:
    """(rate, channels, format, bits) of a fmt chunk."""
    if len(body) < 16:
        raise NotWav
    kind, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", body)
    if kind == EXTENSIBLE and len(body) >= 26:
        (kind,) = struct.unpack_from("<H", body, 24)
    allowed = {PCM: (8, 16, 24, 32), FLOAT: (32, 64), A_LAW: (8,), MU_LAW: (8,)}.get(kind, ())
    if bits not in allowed or not 0 < channels <= MOST_CHANNELS or not rate:
        raise NotWav
    if frame != channels * bits // 8:
        raise NotWav
    return rate, channels, kind, bits


def as_floats(data: memoryview, kind: int, bits: int) -> np.ndarray:
    """samples_N, float32."""
    if kind == FLOAT:
        floats_N = np.frombuffer(data, f"<f{bits // 8}").astype(np.float32)
        finite_N: np.ndarray = np.nan_to_num(floats_N, copy=False, posinf=1.0, neginf=-1.0)
        return finite_N.clip(-1, 1)
    if kind in (A_LAW, MU_LAW):
        table = a_law() if kind == A_LAW else mu_law()
        return table[np.frombuffer(data, np.uint8)]
    if bits == 8:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if bits == 24:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        integers_N, bits = wide.view("<i4")[:, 0], 32
    else:
        integers_N = np.frombuffer(data, f"<i{bits // 8}")
    scaled_N: np.ndarray = (integers_N / 2 ** (bits - 1)).astype(np.float32)
    return scaled_N


def mu_law() -> np.ndarray:
    """The value of each code (ITU-T G.711)."""
    codes = ~np.arange(256).astype(np.uint8)
    sign, exponent, mantissa = codes & 0x80, (codes >> 4) & 7, codes & 15
    size = ((mantissa.astype(np.int32) << 3) + 132 << exponent) - 132
    return (np.where(sign, -size, size) / 32768).astype(np.float32)


def a_law() -> np.ndarray:
    """The value of each code (ITU-T G.711)."""
    codes = np.arange(256).astype(np.uint8) ^ 0x55
    sign, exponent, mantissa = codes & 0x80, (codes >> 4) & 7, (codes & 15).astype(np.int32)
    size = (mantissa << 4) + 8
    size = np.where(exponent > 0, size + 256 << np.maximum(exponent, 1) - 1, size)
    return (np.where(sign, size, -size) / 32768).astype(np.float32)


def write_wav(samples_N: np.ndarray, rate: int) -> bytes:
    """A file of one channel and floats, which keeps every sample."""
    data = np.ascontiguousarray(samples_N, "<f4").tobytes()
    head = struct.pack("<4sIHHIIHH", b"fmt ", 16, FLOAT, 1, rate, 4 * rate, 4, 32)
    body = b"WAVE" + head + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body
