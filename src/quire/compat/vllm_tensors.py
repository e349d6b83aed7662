"""vLLM's functions for vectors as bytes: the number formats of /v1/embeddings and /pooling, and a reader of their answers.

Knows the metadata that the server sends beside bytes. Does not know how an answer is fetched.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Endianness = Literal["native", "big", "little"]
EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
ENDIANNESS = ("native", "big", "little")


@dataclass(frozen=True)
class DTypeInfo:
    """A number format, and formats of the same size that torch and NumPy can view as bytes."""

    name: str
    view_name: str
    """Of torch's formats."""
    numpy_view_dtype: Any

    @property
    def torch_dtype(self) -> torch.dtype:
        return _torch_dtype(self.name)

    @property
    def torch_view_dtype(self) -> torch.dtype:
        return _torch_dtype(self.view_name)

    @property
    def nbytes(self) -> int:
        """Bytes of one number."""
        return int(np.dtype(self.numpy_view_dtype).itemsize)


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


EMBED_DTYPES = {
    "float32": DTypeInfo("float32", "float32", np.float32),
    "float16": DTypeInfo("float16", "float16", np.float16),
    "bfloat16": DTypeInfo("bfloat16", "float16", np.float16),
    "fp8_e4m3": DTypeInfo("float8_e4m3fn", "uint8", np.uint8),
    "fp8_e5m2": DTypeInfo("float8_e5m2", "uint8", np.uint8),
}
MM_METADATA_DTYPES = {
    "int32": DTypeInfo("int32", "int32", np.int32),
    "int64": DTypeInfo("int64", "int64", np.int64),
    "uint8": DTypeInfo("uint8", "uint8", np.uint8),
    "bool": DTypeInfo("bool", "uint8", np.uint8),
}


def _format(embed_dtype: str, endianness: str) -> tuple[DTypeInfo, bool]:
    """The number format, and whether the bytes of each number must be reversed on this machine."""
    formats = EMBED_DTYPES | MM_METADATA_DTYPES
    for name, value, known in (
        ("embed_dtype", embed_dtype, tuple(formats)),
        ("endianness", endianness, ENDIANNESS),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: choose from {', '.join(known)}")
    return formats[embed_dtype], endianness not in ("native", sys.byteorder)


def tensor2binary(tensor: Tensor, embed_dtype: str, endianness: str) -> bytes:
    """The numbers of a tensor as bytes. Raises ValueError: an unknown format or byte order."""
    info, reverse = _format(embed_dtype, endianness)
    flat = tensor.to(info.torch_dtype).flatten().contiguous().view(info.torch_view_dtype)
    array = flat.cpu().numpy()
    return (array.byteswap() if reverse else array).tobytes()


def binary2tensor(binary: bytes, shape: Sequence[int], embed_dtype: str, endianness: str) -> Tensor:
    """The inverse of `tensor2binary`. Raises ValueError: an unknown format, or another number of bytes."""
    import torch

    info, reverse = _format(embed_dtype, endianness)
    array = np.frombuffer(binary, info.numpy_view_dtype).reshape(tuple(shape))
    # torch needs memory that can be written to
    return torch.from_numpy(array.byteswap() if reverse else array.copy()).view(info.torch_dtype)


def tensor2base64(x: Tensor) -> str:
    """One tensor as a safetensors file in base64, which the server takes as prompt embeddings.

    vLLM writes torch.save's format. It is a pickle, and Quire reads none.
    """
    from safetensors.torch import save

    return base64.b64encode(save({"prompt_embeds": x.contiguous()})).decode("ascii")


def numpy2base64(array: np.ndarray[Any, Any]) -> str:
    """One array in NumPy's file format, in base64."""
    import io

    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


@dataclass
class MetadataItem:
    """Where one vector is in the bytes of an answer: `start` and `end` in bytes."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: tuple[int, ...]


def build_metadata_items(
    embed_dtype: str, endianness: str, shape: tuple[int, ...], n_request: int
) -> list[MetadataItem]:
    """The items of `n_request` vectors of one shape, for an answer in the format `bytes_only`."""
    size = math.prod(shape) * EMBED_DTYPES[embed_dtype].nbytes
    return [
        MetadataItem(index, embed_dtype, endianness, index * size, (index + 1) * size, shape)
        for index in range(n_request)
    ]


def decode_pooling_output(items: Sequence[MetadataItem], body: bytes) -> list[Tensor]:
    """The vectors of an answer in the format `bytes`, in the order of the inputs."""
    return [
        binary2tensor(body[item.start : item.end], item.shape, item.embed_dtype, item.endianness)
        for item in sorted(items, key=lambda item: item.index)
    ]
