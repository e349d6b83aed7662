"""Pictures and videos on their way from the frontend to the workers: the bytes of a MediaItem of these kinds.

Knows numbers and bytes. Does not know files, models or tensors of torch.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from quire.protocol.tensor_data import TensorData, decode_tensor, encode_tensor

IMAGE, VIDEO = "image", "video"
"""`MediaItem.kind` of a picture, and of a video."""
KINDS = (IMAGE, VIDEO)
ROWS = "rows"
"""The tensor of an item that the client has encoded: rows_NF, as the tower gives them."""


class Picture(Struct, array_like=True, gc=False):
    """What a worker needs of a picture besides its place in the prompt.

    Attributes:
        runs: (offset from the item's first token, length) of the tokens that take rows of the vision tower, in order.
        grids: (time, height, width) of each run in rows, for models whose rotary positions follow the picture; else none.
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
_decoder = msgspec.msgpack.Decoder(Picture, dec_hook=decode_tensor)


def encode_picture(picture: Picture) -> bytes:
    return _encoder.encode(picture)


def decode_picture(data: bytes) -> Picture:
    """Raises msgspec.DecodeError, or ValidationError of msgspec: the bytes are no picture."""
    return _decoder.decode(data)
