"""TensorData: a tensor in a message, as its bytes; and how messages with tensors become frames.

Knows dtypes, shapes and bytes. No torch here. Between processes a tensor is [dtype, shape, bytes]. Over ZMQ a large one
is [dtype, shape, number], and its bytes are the frame of that number after the message: they are not copied into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

ITEMSIZE = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip
MAX_BYTES = 1 << 30
MAX_DIMENSIONS = 8
OWN_FRAME_BYTES = 1 << 14  # from this size on, a tensor has a frame of its own

_T = TypeVar("_T")


class TensorData:
    """A dense tensor in row-major order; `data` has its bytes in the machine's byte order.

    Raises:
        ValueError: the dtype is unknown, the shape does not fit the number of bytes, or they are too many.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], data: bytes | memoryview):
        self.dtype, self.shape, self.data = dtype, tuple(shape), memoryview(data).cast("B")
        if dtype not in ITEMSIZE:
            raise ValueError(f"a tensor has dtype {dtype!r}; known are {', '.join(ITEMSIZE)}")
        if len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise ValueError(f"a tensor has the shape {self.shape}")
        if self.data.nbytes != math.prod(self.shape) * ITEMSIZE[dtype]:
            raise ValueError(f"a {dtype} tensor {self.shape} has {self.data.nbytes} bytes")
        if self.data.nbytes > MAX_BYTES:
            raise ValueError(f"a tensor has {self.data.nbytes} bytes; the limit is {MAX_BYTES}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return (self.dtype, self.shape, self.data) == (other.dtype, other.shape, other.data)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorData({self.dtype}, {self.shape})"


def encode_tensor(value: Any) -> Any:
    """For msgspec's `enc_hook`: a tensor within its message. Raises TypeError: the value is no tensor."""
    if not isinstance(value, TensorData):
        raise TypeError(f"a {type(value).__name__} cannot be sent to another process")
    return value.dtype, value.shape, value.data


def decode_tensor(kind: type, value: Any, frames: Sequence[bytes] = ()) -> Any:
    """For msgspec's `dec_hook`. Raises ValueError: the value is no tensor."""
    if kind is not TensorData:
        raise NotImplementedError(f"no value of type {kind.__name__} is expected")
    try:
        dtype, shape, data = value
        return TensorData(dtype, shape, frames[data] if isinstance(data, int) else data)
    except (TypeError, IndexError) as error:
        raise ValueError(f"not a tensor: {error}") from None


class FrameEncoder:
    """Encodes a message as frames: the message, then the bytes of its large tensors. For one thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode)
        self._frames: list[bytes | memoryview] = []

    def encode(self, message: Any) -> list[bytes | memoryview]:
        self._frames = [b""]
        self._frames[0] = self._encoder.encode(message)
        return self._frames

    def _encode(self, value: Any) -> Any:
        dtype, shape, data = encode_tensor(value)
        if data.nbytes < OWN_FRAME_BYTES:
            return dtype, shape, data
        self._frames.append(data)
        return dtype, shape, len(self._frames) - 1


class FrameDecoder(Generic[_T]):
    """Decodes the frames of a message. For one thread at a time."""

    def __init__(self, type: Any):
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(
            type, dec_hook=self._decode
        )
        self._frames: Sequence[bytes] = ()

    def decode(self, frames: Sequence[bytes]) -> _T:
        """Raises msgspec.DecodeError, or ValidationError of msgspec: the frames are not such a message."""
        self._frames = frames
        return self._decoder.decode(frames[0])

    def _decode(self, kind: type, value: Any) -> Any:
        return decode_tensor(kind, value, self._frames)
