"""Pictures, videos and sound in prompts, on their way from the frontend to the workers: the bytes of a MediaItem of these kinds.

Knows numbers and bytes. Does not know files, models or tensors of torch.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from quire.protocol.tensor_data import TensorData, decode_tensor, encode_tensor

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
"""`MediaItem.kind` of a picture, a video, and of sound in a prompt."""
KINDS = (IMAGE, VIDEO, AUDIO)
ROWS = "given_rows"
"""The tensor of an item that the client has encoded: rows_NF, as the tower gives them. (Idefics3 has a tensor `rows` of its own.)"""


class TowerInput(Struct, array_like=True, gc=False):
    """What a worker needs of an item besides its place in the prompt.

    Attributes:
        runs: (offset from the item's first token, length) of the tokens that take rows of the tower, in order.
        grids: (time, height, width) of each run in rows, for models whose rotary positions follow the picture; else none. Sound has none.
        tensors: what the tower takes, by name.
        interval: positions from one time of a grid to the next.
    """

    runs: list[tuple[int, int]]
    grids: list[tuple[int, int, int]]
    tensors: dict[str, TensorData]
    interval: float = 1.0

    @property
    def num_rows(self) -> int:
        return sum(length for _, length in self.runs)


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_tensor)
_decoder = msgspec.msgpack.Decoder(TowerInput, dec_hook=decode_tensor)


def encode_input(item: TowerInput) -> bytes:
    return _encoder.encode(item)


def decode_input(data: bytes) -> TowerInput:
    """Raises msgspec.DecodeError, or ValidationError of msgspec: the bytes are no item."""
    return _decoder.decode(data)
