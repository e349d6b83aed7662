"""Sound on its way from the frontend to the workers: the bytes of a MediaItem of the kind SOUND.

Knows numbers and bytes. Does not know files, models or tensors of torch.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from quire.protocol.tensor_data import TensorData, decode_tensor, encode_tensor

SOUND = "sound"
"""`MediaItem.kind` of the input of an encoder; it stands for no token of the prompt."""


class Spectrogram(Struct, array_like=True, gc=False):
    """The log-mel spectrogram of a window of sound: float32 [mel bins, frames]."""

    mel: TensorData


class DecodingRules(Struct, array_like=True, gc=False):
    """Which tokens a transcription may have. Ids are the model's.

    Attributes:
        prefix: for each of the first output tokens, those that are allowed: the language, the task.
        suppressed: never allowed after the prefix. first_suppressed: not as the first token after it.
        timestamps: id of the first timestamp; tokens from it on are timestamps. 0: the output has none.
        no_timestamps: id of the token that says so.
        end: id of the token that ends the text; ids below are text.
        max_first: the first timestamp is at most this many steps; None: any.
        aligned: where in this number of states, those of the sound without padding, each token is: the output says it; 0: it does not.
    """

    prefix: list[list[int]] = []
    suppressed: list[int] = []
    first_suppressed: list[int] = []
    timestamps: int = 0
    no_timestamps: int = 0
    end: int = 0
    max_first: int | None = None
    aligned: int = 0


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_tensor)
_spectrogram = msgspec.msgpack.Decoder(Spectrogram, dec_hook=decode_tensor)
_rules = msgspec.msgpack.Decoder(DecodingRules)


def encode(message: Spectrogram | DecodingRules) -> bytes:
    return _encoder.encode(message)


def decode_spectrogram(data: bytes) -> Spectrogram:
    """Raises msgspec.DecodeError, or ValidationError of msgspec: the bytes are no spectrogram."""
    return _spectrogram.decode(data)


def decode_rules(data: bytes) -> DecodingRules:
    """Raises msgspec.DecodeError, or ValidationError of msgspec: the bytes are no rules."""
    return _rules.decode(data)
