"""Matrices of floats that programs and clients give: tensors, arrays, and files in base64.

Knows NumPy arrays, anything with PyTorch's methods, and files of two formats, safetensors and NumPy's, with one array. No pickle is
read, so torch.save's format is refused by name. Does not know what a matrix is for.

Shape suffixes: N rows, D features.
"""

from __future__ import annotations

import binascii
import io
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64

MOST_HEADER = 4096
"""Bytes of a file's header, and of what base64 adds to it. A file has one array."""
FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""dtype in safetensors -> name."""
NUMPY_TYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""bfloat16 as its bits: NumPy has no such type."""
PICKLE = re.compile(rb"PK\x03\x04|\x80[\x02-\x05][^\x00]")
"""How a zip archive begins, which torch.save writes, or a pickle. A file of safetensors begins with its header's length in 8
bytes, of which only the first two are not 0.
"""
REMEDY = 'send base64 of safetensors.torch.save({"embeds": tensor}), or of numpy.save\'s file'


class MatrixError(ValueError):
    """What is wrong, without the name of the field."""

    def __init__(self, what: str, value: Any = None):
        super().__init__(what)
        self.value = value


@dataclass(slots=True)
class Matrix:
    """N rows of finite numbers. `array_ND` has the bits of bfloat16 as whole numbers."""

    dtype: str
    array_ND: np.ndarray[Any, Any]


def matrix_of(given: Any) -> Matrix:
    """A PyTorch tensor or a NumPy array [N, D], or [1, N, D]; of float32, float16 or bfloat16.

    Raises:
        MatrixError: it is something else, has no rows, or a number that is not finite.
    """
    if isinstance(given, np.ndarray):
        return checked(str(given.dtype.newbyteorder("=")), given)
    if not all(hasattr(given, name) for name in ("detach", "dtype", "shape")):
        raise MatrixError(f"must be a tensor or a NumPy array, not {type(given).__name__}")
    dtype = str(given.dtype).removeprefix("torch.")
    if dtype not in NUMPY_TYPES:
        raise _wrong_type(dtype)
    try:
        tensor = given.detach().cpu()
        if dtype != "bfloat16":
            return checked(dtype, tensor.numpy())
        bits_ND = np.ascontiguousarray(tensor.float().numpy()).view(np.uint32) >> 16  # exact
        return checked(dtype, bits_ND.astype(np.uint16))
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise MatrixError(f"must be a dense tensor with values ({error})") from None


def matrix_in(text: str, most_rows: int, size: int) -> Matrix:
    """Base64 of a file of safetensors or NumPy with one array. `most_rows`, `size`: the bounds of its shape.

    Raises:
        MatrixError: it is something else, or larger; and as `matrix_of`.
    """
    if PICKLE.match(_decoded(text[:12])):
        raise MatrixError(
            f"is a file of torch.save, which is a pickle and can run code when it is read: Quire reads none; {REMEDY}"
        )
    most = MOST_HEADER + most_rows * size * 4
    if len(text) > most // 3 * 4 + MOST_HEADER:
        raise MatrixError(
            f"has {len(text)} characters of base64; {most_rows} rows with {size} numbers each, the most that this"
            f" model takes, have {most // 3 * 4}"
        )
    data = _decoded(text)
    if data.startswith(b"\x93NUMPY"):
        return _read_numpy(data)
    return _read_safetensors(data)


def _decoded(text: str) -> bytes:
    """Raises MatrixError: it is no base64."""
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MatrixError(f"is not base64; {REMEDY}") from None


def _read_numpy(data: bytes) -> Matrix:
    """Raises MatrixError: as `matrix_in`."""
    form, file = np.lib.format, io.BytesIO(data)
    try:
        if form.read_magic(file) != (1, 0):
            raise MatrixError("has another version of NumPy's format than 1.0")
        shape, by_column, dtype = form.read_array_header_1_0(file, MOST_HEADER)
    except MatrixError:
        raise
    except Exception:  # the header is a Python literal; parsing one fails in many ways
        raise MatrixError(f"has a damaged NumPy header; {REMEDY}") from None
    if dtype.kind != "f" or dtype.itemsize not in (2, 4):
        raise _wrong_type(str(dtype))
    body, rest = file.tell(), len(data) - file.tell()
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != rest:
        raise MatrixError(f"has {rest} bytes after a header of {dtype} {list(shape)}")
    array = np.frombuffer(data, dtype, offset=body).reshape(shape, order="F" if by_column else "C")
    return checked(str(dtype.newbyteorder("=")), array)


def _read_safetensors(data: bytes) -> Matrix:
    """Raises MatrixError: as `matrix_in`."""
    from safetensors import SafetensorError, deserialize

    if len(data) < 8 or int.from_bytes(data[:8], "little") > MOST_HEADER:
        raise MatrixError(f"is neither a file of safetensors nor of NumPy; {REMEDY}")
    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise MatrixError(f"is not a file of safetensors ({str(error)[:200]}); {REMEDY}") from None
    if len(tensors) != 1:
        raise MatrixError(f"is a file with {len(tensors)} tensors; send one file with one for each")
    [(_, tensor)] = tensors
    if (dtype := FORMATS.get(tensor["dtype"])) is None:
        raise _wrong_type(tensor["dtype"])
    array = np.frombuffer(bytes(tensor["data"]), NUMPY_TYPES[dtype])
    return checked(dtype, array.reshape(tensor["shape"]))


def checked(dtype: str, array: np.ndarray[Any, Any]) -> Matrix:
    """The array as a matrix. Raises MatrixError: as `read_embeddings`."""
    if dtype not in NUMPY_TYPES:
        raise _wrong_type(dtype)
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    if array.ndim != 2 or not array.size:
        raise MatrixError(f"has the shape {list(array.shape)}; it must be [tokens, hidden_size]")
    array_ND = np.ascontiguousarray(array, dtype=NUMPY_TYPES[dtype])
    if dtype == "bfloat16":
        is_finite = bool(((array_ND & 0x7F80) != 0x7F80).all())
    else:
        is_finite = bool(np.isfinite(array_ND).all())
    if not is_finite:
        raise MatrixError("has a number that is not finite")
    return Matrix(dtype, array_ND)


def _wrong_type(dtype: str) -> MatrixError:
    return MatrixError(f"has numbers of type {dtype}; convert them to float32, float16 or bfloat16")
