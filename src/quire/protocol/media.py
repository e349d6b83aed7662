"""Pictures on their way from the frontend to the workers: processed pixels, and where their rows go in the prompt.

Knows numbers and bytes. Does not know files, models or tensors of torch. `EngineRequest.media` names the same items for the
hashes of blocks; this is the data of the feature "media" in `EngineRequest.extras`.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from quire.protocol.tensor_data import TensorData, decode_tensor, encode_tensor

NAME = "media"


class Picture(Struct, array_like=True, gc=False):
    """One picture of a prompt, as its model's processor gives it.

    Attributes:
        digest: of the file and of all that determines the pixels. `keyed` adds the salt.
        start: the first of its tokens in the prompt.
        length: how many tokens of the prompt it has, marks and text between its tiles included.
        runs: (offset from start, length) of the tokens that take rows of the vision tower, in order.
        grid: (time, height, width) in rows, for models whose rotary positions follow the picture; else zeros.
        tensors: what the tower takes, by name.
    """

    digest: str
    start: int
    length: int
    runs: list[tuple[int, int]]
    grid: tuple[int, int, int]
    tensors: dict[str, TensorData]

    @property
    def num_rows(self) -> int:
        return sum(length for _, length in self.runs)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_tensor)
_decoder = msgspec.msgpack.Decoder(list[Picture], dec_hook=decode_tensor)


def encode_pictures(pictures: list[Picture]) -> bytes:
    return _encoder.encode(pictures)


def decode_pictures(data: bytes) -> list[Picture]:
    """Raises msgspec.DecodeError, or ValidationError of msgspec: the bytes are no pictures."""
    return _decoder.decode(data)
