"""Messages between the frontend and a sound process: msgpack frames on its socket.

down   BeginSound, once; then a Decode with the bytes of a file, or a Transform with samples
up     SoundReady; then Decoded, Transformed or SoundRefused for each
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.protocol.tensor_data import TensorData, decode_tensor, encode_tensor

Why = Literal["format", "broken", "empty", "seconds", "extra", "memory", "bytes"]


class BeginSound(Struct, array_like=True, tag="begin"):
    """Limit memory to `memory` bytes more."""

    memory: int


class SoundReady(Struct, array_like=True, tag="ready"):
    """`error`: why the process cannot work; empty: it can."""

    error: str = ""


class Decode(Struct, array_like=True, tag="decode"):
    """Decode a file to samples of one channel, `rate` a second.

    `seconds`, `most_bytes`: the most that it may decode. `window`: samples between two cuts at quiet places, at most; 0: no cuts.
    `cpu_s`: processor time that it may take.
    """

    data: bytes
    rate: int
    seconds: float
    most_bytes: int
    window: int
    cpu_s: float


class Decoded(Struct, array_like=True, tag="decoded"):
    """`samples`: float32. `cuts`: the first sample of each window. `rate`, `channels`: of the file."""

    samples: TensorData
    cuts: list[int]
    rate: int
    channels: int


class Transform(Struct, array_like=True, tag="transform"):
    """Make the log-mel spectrogram of float32 samples; what is missing to `frames` frames is silence."""

    samples: TensorData
    mels: int
    frames: int
    cpu_s: float


class Transformed(Struct, array_like=True, tag="transformed"):
    """float32 [mels, frames]."""

    mel: TensorData


class SoundRefused(Struct, array_like=True, tag="refused"):
    """`detail`: a format, or a number of seconds."""

    why: Why
    detail: str = ""


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_tensor)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    BeginSound | SoundReady | Decode | Decoded | Transform | Transformed | SoundRefused,
    dec_hook=decode_tensor,
)


def encode(message: Struct) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | bytearray) -> Any:
    """Raises msgspec.DecodeError, or ValidationError of msgspec: this is no message."""
    return _decoder.decode(data)
