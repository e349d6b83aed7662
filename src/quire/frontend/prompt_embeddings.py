"""Prompts that are embeddings: reads the arrays that programs and clients give, and checks them.

Knows NumPy arrays, anything with PyTorch's methods, and files of two formats, safetensors and NumPy's. No pickle is read, so
torch.save's format is refused by name. Does not know the model: `InputProcessor` checks the number of tokens and features.

Shape suffixes: N tokens, D features.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from quire.errors import ValidationError
from quire.protocol.request import EMBEDDINGS, MediaItem

TOKENS_OF_AN_ITEM = 16
"""A block of the prefix cache depends on the items that overlap it, so prompts share their equal beginnings."""
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
REMEDY = (
    'send base64 of safetensors.torch.save({"prompt_embeds": tensor}), or of numpy.save\'s file'
)
ENABLE = "prompts as embeddings are off; start the engine with --enable-prompt-embeds (enable_prompt_embeds=True), or send text or token ids"


@dataclass(slots=True)
class PromptEmbeddings:
    """A prompt of N tokens as their embeddings, finite numbers. `array_ND` has the bits of bfloat16 as whole numbers."""

    dtype: str
    array_ND: np.ndarray[Any, Any]

    @property
    def num_tokens(self) -> int:
        return len(self.array_ND)

    def media(self) -> list[MediaItem]:
        """What an engine request carries of it. The hashes depend on dtype and bytes."""
        items = []
        for start in range(0, len(self.array_ND), TOKENS_OF_AN_ITEM):
            part_ND = self.array_ND[start : start + TOKENS_OF_AN_ITEM]
            data, kind = part_ND.tobytes(), EMBEDDINGS + self.dtype
            digest = sha256(f"{kind}:{part_ND.shape}:".encode() + data).hexdigest()
            items.append(MediaItem(digest, kind, start, len(part_ND), data))
        return items


def wrong(what: str, value: Any = None) -> ValidationError:
    return ValidationError(f"prompt_embeds: {what}", parameter="prompt_embeds", value=value)


def read_embeddings(given: Any) -> PromptEmbeddings:
    """A PyTorch tensor or a NumPy array [N, D], or [1, N, D]; of float32, float16 or bfloat16.

    Raises:
        ValidationError: it is something else, has no tokens, or a number that is not finite.
    """
    if isinstance(given, PromptEmbeddings):
        return given
    if isinstance(given, np.ndarray):
        return checked(str(given.dtype.newbyteorder("=")), given)
    if not all(hasattr(given, name) for name in ("detach", "dtype", "shape")):
        raise wrong(f"must be a tensor or a NumPy array, not {type(given).__name__}")
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
        raise wrong(f"must be a dense tensor with values ({error})") from None


def fitting(given: Any, size: int, most: int | None, keep_first: bool) -> PromptEmbeddings:
    """What was given, truncated to the first or last `most` tokens. `size`: features of an embedding; 0: none are taken.

    Raises:
        ValidationError: the engine takes no embeddings, or others; and as `read_embeddings`.
    """
    if not size:
        raise ValidationError(ENABLE, parameter="prompt_embeds")
    read = read_embeddings(given)
    features = read.array_ND.shape[1]
    if features != size:
        raise wrong(
            f"has {features} numbers for each token; an embedding of this model has {size} (hidden_size)",
            features,
        )
    if most is None or read.num_tokens <= most:
        return read
    kept_ND = read.array_ND[:most] if keep_first else read.array_ND[-most:]
    return PromptEmbeddings(read.dtype, kept_ND)


def check_has_tokens(media: Sequence[MediaItem], parameter: str = "prompt_logprobs") -> None:
    """Raises ValidationError: a part of the prompt is embeddings, and `parameter` needs its tokens."""
    if any(item.kind.startswith(EMBEDDINGS) for item in media):
        raise ValidationError(
            f"{parameter}: a prompt of embeddings has no token ids and no text; leave {parameter} out",
            parameter=parameter,
        )


def decode_embeddings(text: str, most_tokens: int, size: int) -> PromptEmbeddings:
    """Base64 of a file of safetensors or NumPy with one array. `most_tokens`, `size`: the bounds of its shape.

    Raises:
        ValidationError: it is something else, or larger; and as `read_embeddings`.
    """
    if not size:
        raise ValidationError(ENABLE, parameter="prompt_embeds")
    if PICKLE.match(_decoded(text[:12])):
        raise wrong(
            f"is a file of torch.save, which is a pickle and can run code when it is read: Quire reads none; {REMEDY}"
        )
    most = MOST_HEADER + most_tokens * size * 4
    if len(text) > most // 3 * 4 + MOST_HEADER:
        raise wrong(
            f"has {len(text)} characters of base64; {most_tokens} tokens with {size} numbers each, the most that this"
            f" model's context takes, have {most // 3 * 4}"
        )
    data = _decoded(text)
    if data.startswith(b"\x93NUMPY"):
        return _read_numpy(data)
    return _read_safetensors(data)


def _decoded(text: str) -> bytes:
    """Raises ValidationError: it is no base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise wrong(f"is not base64; {REMEDY}") from None


def _read_numpy(data: bytes) -> PromptEmbeddings:
    """Raises ValidationError: as `decode_embeddings`."""
    form, file = np.lib.format, io.BytesIO(data)
    try:
        if form.read_magic(file) != (1, 0):
            raise wrong("has another version of NumPy's format than 1.0")
        shape, by_column, dtype = form.read_array_header_1_0(file, MOST_HEADER)
    except ValidationError:
        raise
    except Exception:  # the header is a Python literal; parsing one fails in many ways
        raise wrong(f"has a damaged NumPy header; {REMEDY}") from None
    if dtype.kind != "f" or dtype.itemsize not in (2, 4):
        raise _wrong_type(str(dtype))
    body, rest = file.tell(), len(data) - file.tell()
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != rest:
        raise wrong(f"has {rest} bytes after a header of {dtype} {list(shape)}")
    array = np.frombuffer(data, dtype, offset=body).reshape(shape, order="F" if by_column else "C")
    return checked(str(dtype.newbyteorder("=")), array)


def _read_safetensors(data: bytes) -> PromptEmbeddings:
    """Raises ValidationError: as `decode_embeddings`."""
    from safetensors import SafetensorError, deserialize

    if len(data) < 8 or int.from_bytes(data[:8], "little") > MOST_HEADER:
        raise wrong(f"is neither a file of safetensors nor of NumPy; {REMEDY}")
    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise wrong(f"is not a file of safetensors ({str(error)[:200]}); {REMEDY}") from None
    if len(tensors) != 1:
        raise wrong(
            f"is a file with {len(tensors)} tensors; send one file for each prompt, with one"
        )
    [(_, tensor)] = tensors
    if (dtype := FORMATS.get(tensor["dtype"])) is None:
        raise _wrong_type(tensor["dtype"])
    array = np.frombuffer(bytes(tensor["data"]), NUMPY_TYPES[dtype])
    return checked(dtype, array.reshape(tensor["shape"]))


def checked(dtype: str, array: np.ndarray[Any, Any]) -> PromptEmbeddings:
    """The array as a prompt. Raises ValidationError: as `read_embeddings`."""
    if dtype not in NUMPY_TYPES:
        raise _wrong_type(dtype)
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    if array.ndim != 2 or not array.size:
        raise wrong(f"has the shape {list(array.shape)}; it must be [tokens, hidden_size]")
    array_ND = np.ascontiguousarray(array, dtype=NUMPY_TYPES[dtype])
    if dtype == "bfloat16":
        is_finite = bool(((array_ND & 0x7F80) != 0x7F80).all())
    else:
        is_finite = bool(np.isfinite(array_ND).all())
    if not is_finite:
        raise wrong("has a number that is not finite")
    return PromptEmbeddings(dtype, array_ND)


def _wrong_type(dtype: str) -> ValidationError:
    return wrong(f"has numbers of type {dtype}; convert them to float32, float16 or bfloat16")
