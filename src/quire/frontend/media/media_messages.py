"""Messages between the frontend and a media process: msgpack frames on its socket.

down   LoadProcessor, once; then a Process or Hear, and the bytes of a file in a frame of their own, which nothing copies
up     Ready; then Processed or Refused for each
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.protocol.tensor_data import TensorData, decode_tensor, encode_tensor

Why = Literal["format", "pixels", "broken", "shape", "memory", "frames", "library", "options", "empty", "seconds", "extra", "bytes"]  # fmt: skip


class LoadProcessor(Struct, array_like=True, tag="load"):
    """Load the checkpoint's processor with the parts for these kinds of media; then limit memory to `memory` bytes more.

    `options`: of the processor; it must know them. `tokenizer`: the folder of the tokenizer.
    `plain`: it may be one that knows no options (`plain_processor.py`).
    """

    folder: str
    memory: int
    kinds: list[str]
    tokenizer: str
    options: dict[str, Any] = {}
    plain: bool = True


class Ready(Struct, array_like=True, tag="ready"):
    """`error`: why the processor cannot be loaded; empty: it is."""

    error: str = ""


class Process(Struct, array_like=True, tag="process"):
    """Decode and process the file in the next frame.

    Attributes:
        max_pixels: of a picture, or of each frame of a video.
        cpu_s: processor time that it may take.
        num_frames: the most that are taken of a video; 0: the file is a picture.
        max_rows: the most rows of the tower for a video.
        options: of the processor (`config/picture_options.py`).
    """

    max_pixels: int
    cpu_s: float
    num_frames: int = 0
    max_rows: int = 0
    options: dict[str, Any] = {}


class Hear(Struct, array_like=True, tag="hear"):
    """Decode and process the sound in the next frame.

    Attributes:
        seconds: the most that it may have.
        most_bytes: of the decoded sound, at its own rate.
        cpu_s: processor time that it may take.
    """

    seconds: float
    most_bytes: int
    cpu_s: float


class Processed(Struct, array_like=True, tag="processed"):
    """What the tower takes, and the text that replaces the placeholder in the prompt. `seconds`: between groups of a video's frames; of a sound: all."""

    width: int
    height: int
    replacement: str
    tensors: dict[str, TensorData]
    seconds: float = 0.0


class Refused(Struct, array_like=True, tag="refused"):
    """`detail`: the options that the processor does not know, a format, or a number of seconds."""

    why: Why
    width: int = 0
    height: int = 0
    detail: str = ""


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_tensor)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    LoadProcessor | Ready | Process | Hear | Processed | Refused, dec_hook=decode_tensor
)


def encode(message: Struct) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | bytearray) -> Any:
    """Raises msgspec.DecodeError, or ValidationError of msgspec: this is no message."""
    return _decoder.decode(data)
