"""What is read as embeddings, and what is refused before memory or time is spent on it."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from quire.errors import ValidationError
from quire.frontend.prompt_embeddings import (
    PromptEmbeddings,
    decode_embeddings,
    fitting,
    read_embeddings,
)

SIZE, MOST = 8, 64
VALUES = torch.linspace(-3, 3, 5 * SIZE).view(5, SIZE)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decoded(data: bytes) -> PromptEmbeddings:
    return fitting(decode_embeddings(coded(data), MOST, SIZE), SIZE, None, False)


def numpy_file(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=array.dtype.hasobject)
    return file.getvalue()


def tensor_of(given: PromptEmbeddings) -> torch.Tensor:
    """As the worker reads it."""
    data = bytearray().join(item.data for item in given.media())
    return torch.frombuffer(data, dtype=getattr(torch, given.dtype)).view(-1, SIZE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_has_the_same_bits(dtype: torch.dtype) -> None:
    tensor = VALUES.to(dtype)
    forms = [
        read_embeddings(tensor),
        read_embeddings(tensor[None]),
        decoded(save({"any name": tensor})),
    ]
    strided = tensor.T.contiguous().T
    forms.append(read_embeddings(strided))
    if dtype != torch.bfloat16:
        array = tensor.numpy()
        big = array.astype(array.dtype.newbyteorder(">"))
        for one in (array, np.asfortranarray(array), big):
            forms += [read_embeddings(one), decoded(numpy_file(one))]
    for form in forms:
        assert torch.equal(tensor_of(form), tensor)
        assert form.media() == forms[0].media()


def test_items_are_in_order_and_their_hashes_are_of_type_and_bytes() -> None:
    long = torch.arange(40.0).repeat_interleave(SIZE).view(40, SIZE)
    items = read_embeddings(long).media()
    assert [(item.start, item.length) for item in items] == [(0, 16), (16, 16), (32, 8)]
    assert len({item.hash for item in items}) == 3
    changed = long.clone()
    changed[17, 3] += 1
    same = [a.hash == b.hash for a, b in zip(items, read_embeddings(changed).media(), strict=True)]
    assert same == [True, False, True]
    # The bits of these two are equal.
    bits = torch.full((1, SIZE), 1.0, dtype=torch.float16)
    other = bits.view(torch.bfloat16)
    assert read_embeddings(bits).media()[0].data == read_embeddings(other).media()[0].data
    assert read_embeddings(bits).media()[0].hash != read_embeddings(other).media()[0].hash


def header(**fields: Any) -> bytes:
    """A file of safetensors with this header and 160 bytes of zeros."""
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + bytes(160)


def entry(dtype: str, shape: list[int], end: int = 160) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


def saved_by_torch(zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save(VALUES, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def npy(text: str, body: bytes = bytes(160)) -> bytes:
    """A file of NumPy with this header."""
    line = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line + body


WITH = "{'descr': '<f4', 'fortran_order': False, 'shape': "
NAN, INF = VALUES.clone(), VALUES.clone()
NAN[2, 3], INF[4, 7] = float("nan"), -float("inf")
FILES: dict[str, tuple[bytes, str]] = {
    "torch.save": (saved_by_torch(True), r"torch\.save.*pickle.*safetensors\.torch\.save"),
    "torch.save of old": (saved_by_torch(False), r"torch\.save.*pickle"),
    "pickle": (pickle.dumps(print), r"torch\.save.*pickle"),
    "pickle 0": (pickle.dumps(print, 0), "neither a file of safetensors nor of NumPy"),
    "npz": (b"PK\x03\x04" + bytes(100), r"torch\.save"),
    "objects": (numpy_file(np.array([[1, None]], object)), "type object"),
    "nothing": (b"", "neither a file"),
    "few bytes": (b"abc", "neither a file"),
    "text": (b"hello hello hello", "neither a file"),
    "a header of 2^63 bytes": (struct.pack("<Q", 1 << 63) + bytes(50), "neither a file"),
    "a header beyond the file": (struct.pack("<Q", 2000) + b"{}", "not a file of safetensors"),
    "a header of nothing": (struct.pack("<Q", 0) + bytes(50), "not a file of safetensors"),
    "no JSON": (struct.pack("<Q", 3) + b"{{{" + bytes(10), "not a file of safetensors"),
    "a huge shape": (header(a=entry("F32", [1 << 40, 1 << 40])), "not a file of safetensors"),
    "an overflow": (header(a=entry("F32", [1 << 62, 4])), "not a file of safetensors"),
    "a negative size": (header(a=entry("F32", [-5, -8])), "not a file of safetensors"),
    "offsets beyond": (header(a=entry("F32", [10, 8], 320)), "not a file of safetensors"),
    "two tensors": (save({"a": VALUES, "b": VALUES + 1}), "2 tensors"),
    "no tensor": (save({}), "0 tensors"),
    "whole numbers": (save({"a": VALUES.to(torch.int32)}), "type I32; convert"),
    "doubles": (save({"a": VALUES.double()}), "type F64; convert"),
    "a vector": (save({"a": VALUES[0]}), r"shape \[8\]"),
    "two prompts": (save({"a": torch.zeros(2, 5, SIZE)}), r"shape \[2, 5, 8\]"),
    "no tokens": (save({"a": VALUES[:0]}), r"shape \[0, 8\]"),
    "no features": (save({"a": torch.zeros(5, 0)}), r"shape \[5, 0\]"),
    "another model": (save({"a": torch.zeros(5, SIZE + 1)}), "has 9 numbers for each token.* has 8"),
    "NaN": (save({"a": NAN}), "not finite"),
    "infinity": (save({"a": INF}), "not finite"),
    "NaN of bfloat16": (save({"a": NAN.bfloat16()}), "not finite"),
    "NaN of float16": (numpy_file(NAN.half().numpy()), "not finite"),
    "another version": (b"\x93NUMPY\x02\x00" + bytes(50), "another version"),
    "code in the header": (npy("__import__('os').system('true')"), "damaged NumPy header"),
    "a huge array": (npy(WITH + f"({1 << 40}, {1 << 40})}}"), "160 bytes after a header"),
    "a negative length": (npy(WITH + "(-5, -8)}"), "160 bytes after a header"),
    "shorter than it says": (npy(WITH + "(50, 8)}"), "160 bytes after a header"),
    "longer than it says": (npy(WITH + "(1, 8)}"), "160 bytes after a header"),
    "deep": (npy("(" * 3000 + ")" * 3000), "damaged NumPy header"),
    "complex": (numpy_file(np.zeros((5, SIZE), np.complex64)), "type complex64"),
    "numpy doubles": (numpy_file(np.zeros((5, SIZE))), "type float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_refused(name: str) -> None:
    data, words = FILES[name]
    tracemalloc.start()
    began = time.monotonic()
    with pytest.raises(ValidationError, match=words) as caught:
        decoded(data)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert memory < 2 << 20
    assert time.monotonic() - began < 1
    assert caught.value.parameter == "prompt_embeds"


def test_text_that_is_too_long_or_no_base64() -> None:
    with pytest.raises(ValidationError, match="characters of base64; 64 rows with 8 numbers"):
        decode_embeddings("A" * 10_000_000, MOST, SIZE)
    for text in ("a b", "é" * 8, "AAA", "AAAA=AAA"):
        with pytest.raises(ValidationError, match="is not base64"):
            decode_embeddings(text, MOST, SIZE)
    with pytest.raises(ValidationError, match="--enable-prompt-embeds"):
        decode_embeddings("AAAA", MOST, 0)


def test_a_pickle_is_named_also_where_it_is_too_long() -> None:
    """torch.save writes all of the table of which a tensor is a part."""
    file = io.BytesIO()
    torch.save(torch.zeros(1000, 1000)[:3], file)
    for data in (file.getvalue(), *(pickle.dumps("x" * 10_000, kind) for kind in (2, 3, 4, 5))):
        with pytest.raises(ValidationError, match=r"torch\.save, which is a pickle"):
            decode_embeddings(coded(data), MOST, SIZE)


@pytest.mark.parametrize("length", [0x80, 0x280, 0x380])
def test_a_header_whose_length_looks_like_a_pickle(length: int) -> None:
    text = json.dumps({"a": entry("F32", [5, 8])}).encode().ljust(length)
    assert decoded(struct.pack("<Q", length) + text + bytes(160)).num_tokens == 5


def test_the_longest_prompt_fits() -> None:
    whole = torch.ones(MOST, SIZE)
    assert decoded(save({"prompt_embeds": whole})).num_tokens == MOST
    assert decoded(numpy_file(whole.numpy())).num_tokens == MOST


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([[1.0]], "must be a tensor or a NumPy array, not list"),
        ("AAAA", "not str"),
        (VALUES.to_sparse(), "dense tensor"),
        (torch.zeros(5, SIZE, device="meta"), "dense tensor"),
        (VALUES.long(), "type int64"),
        (np.zeros((2, SIZE), object), "type object"),
        (NAN, "not finite"),
    ],
)
def test_python_values_that_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        read_embeddings(given)


@pytest.mark.parametrize(("keep_first", "kept"), [(True, slice(0, 2)), (False, slice(3, 5))])
def test_truncation_keeps_one_end(keep_first: bool, kept: slice) -> None:
    assert torch.equal(tensor_of(fitting(VALUES, SIZE, 2, keep_first)), VALUES[kept])
    assert fitting(VALUES, SIZE, 5, keep_first).num_tokens == 5
