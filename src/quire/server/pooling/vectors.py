"""Vectors in answers: JSON numbers, base64, or bytes, in five number formats and two byte orders.

Knows arrays, bytes and JSON. Does not know models or routes.
"""

from __future__ import annotations

import json
import sys
from binascii import b2a_base64
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from quire.frontend.pooling.outputs import Floats
from quire.protocol.tensor_data import ITEMSIZE
from quire.protocol.validators import wrong
from quire.server.errors import invalid
from quire.server.pooling.batch import PoolingBatch
from quire.server.streaming_json import LongList, PartsAnswer, json_answer, listed

FORMATS = ("float", "base64", "bytes", "bytes_only")
DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
ENDIANNESS = ("native", "big", "little")
LARGE_NUMBERS = 1 << 14
"""Numbers from which on an answer is encoded in parts."""
BYTES_PER_ENTRY = 140  # of the header `metadata`, about
MOST_HEADER = 32 << 10
"""Bytes of the header `metadata`: proxies and clients refuse longer ones."""


@dataclass(frozen=True, slots=True)
class VectorEncoding:
    """How a request wants its vectors.

    Raises:
        ValidationError: an unknown name.
    """

    form: str = "float"
    dtype: str = "float32"
    endianness: str = "native"

    def __post_init__(self) -> None:
        names = ("encoding_format", "embed_dtype", "endianness")
        choices = zip(names, (self.form, self.dtype, self.endianness), (FORMATS, DTYPES, ENDIANNESS), strict=True)  # fmt: skip
        for name, value, known in choices:
            if value not in known:
                raise wrong(name, value, f"one of {', '.join(known)}")

    def check_count(self, count: int) -> None:
        """Raises ApiError: the header that describes the vectors would be too long."""
        if self.form == "bytes" and count * BYTES_PER_ENTRY > MOST_HEADER:
            raise invalid(
                f"`encoding_format` bytes describes each of {count} vectors in a header, which would be too long; use"
                " bytes_only, or send fewer inputs",
                "encoding_format",
            )

    def encoded(self, array: Floats) -> bytes:
        """The numbers as bytes, rounded to the nearest of the dtype."""
        order = {"big": ">", "little": "<", "native": "<" if sys.byteorder == "little" else ">"}[self.endianness]  # fmt: skip
        match self.dtype:
            case "float32":
                return array.astype(f"{order}f4").tobytes()
            case "float16":
                with np.errstate(over="ignore"):
                    return array.astype(f"{order}f2").tobytes()
            case "bfloat16":
                return bfloat16_bits(array).astype(f"{order}u2").tobytes()
        return fp8_bits(array, *FP8[self.dtype]).tobytes()

    def value(self, array: Floats, large: bool) -> Any:
        """A vector, or rows of vectors, as a value of a JSON answer."""
        if self.form == "base64":
            return b2a_base64(self.encoded(array), newline=False).decode()
        if large and array.ndim > 1:
            return LongList(lambda: (row.tolist() for row in array))
        return array.tolist()


def bfloat16_bits(array: Floats) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


FP8 = {"fp8_e4m3": (4, 3, 0x7E), "fp8_e5m2": (5, 2, 0x7C)}
"""Bits of the exponent and of the mantissa, and the code of a number that is too large (448, the largest; infinity)."""


@cache
def _fp8_values(exponent: int, mantissa: int, most: int) -> NDArray[np.float64]:
    """The values of the codes from 0 to `most` - 1, and what follows the largest, increasing."""
    codes = np.arange(most + 1)
    powers, parts = codes >> mantissa, codes & ((1 << mantissa) - 1)
    normal = (1 + parts / (1 << mantissa)) * 2.0 ** (powers - (1 << (exponent - 1)) + 1)
    small = parts / (1 << mantissa) * 2.0 ** (2 - (1 << (exponent - 1)))
    return np.where(powers == 0, small, normal)


def fp8_bits(array: Floats, exponent: int, mantissa: int, most: int) -> NDArray[np.uint8]:
    """Round to nearest, ties to even, as torch does."""
    values = _fp8_values(exponent, mantissa, most)
    middles = (values[1:] + values[:-1]) / 2
    size = np.abs(array).astype(np.float64)
    codes = np.searchsorted(middles, size)
    tied = (codes < len(middles)) & (middles[np.minimum(codes, len(middles) - 1)] == size)
    codes = codes + (tied & (codes % 2 == 1))
    codes = np.where(np.isnan(array), 0x7F, codes)
    return (codes | np.where(np.signbit(array), 0x80, 0)).astype(np.uint8)


def vectors_answer(
    batch: PoolingBatch, arrays: Sequence[Floats], encoding: VectorEncoding, kind: tuple[str, str]
) -> Response:
    """The answer of a route that returns arrays. `kind`: the object of an item, and its field."""
    name, field = kind
    large = sum(array.size for array in arrays) >= LARGE_NUMBERS
    head, usage, pool = batch.head(), batch.usage, batch.context.state.answering
    if encoding.form.startswith("bytes"):
        return _bytes_answer(head, arrays, encoding, usage, pool)

    def items() -> Iterator[dict[str, Any]]:
        for index, array in enumerate(arrays):
            yield {"index": index, "object": name, field: encoding.value(array, large)}

    return json_answer({**head, "data": listed(items, large), "usage": usage}, large, pool)


def _bytes_answer(
    head: dict[str, Any], arrays: Sequence[Floats], encoding: VectorEncoding, usage: dict[str, Any],
    pool: Executor,
) -> Response:  # fmt: skip
    headers, start, entries = {}, 0, []
    if encoding.form == "bytes":
        itemsize = ITEMSIZE.get(encoding.dtype, 1)
        for index, array in enumerate(arrays):
            end = start + array.size * itemsize
            entries.append({
                "index": index, "embed_dtype": encoding.dtype, "endianness": encoding.endianness, "start": start,
                "end": end, "shape": list(array.shape),
            })  # fmt: skip
            start = end
        metadata = {**head, "data": entries, "usage": usage}
        del metadata["object"]
        headers["metadata"] = json.dumps(metadata)  # in ASCII
    parts = (encoding.encoded(array) for array in arrays)
    return PartsAnswer(parts, pool, "application/octet-stream", headers)
