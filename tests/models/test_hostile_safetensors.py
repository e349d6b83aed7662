"""Damaged and hostile safetensors files: one error that names the file, and no memory, time or crash before it."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ConfigError, ModelNotFound
from quire.models.checkpoint_files import in_memory, stored_tensors, tensors

NUMBER = 1000
LIES: list[Any] = [
    0, -1, 1, 7, 2**31, 2**63, 2**64 - 1, 10**30, 1.5, 1e300, True, None, "", "F32", "F4", "X", [], [0], [1, 2], {}, "\ud800"
]  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(0)
    sizes = {
        "model.embed_tokens.weight": (16, 8),
        "model.norm.weight": (8,),
        "a.b": (3, 4, 5),
        "empty": (0, 3),
    }
    found = {name: torch.randn(*size, generator=draw) for name, size in sizes.items()}
    save_file({**found, "bytes": torch.arange(9).byte()}, tmp_path / "model.safetensors", {"format": "pt"})  # fmt: skip
    return tmp_path


def split(whole: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def joined(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def flipped(whole: bytes, draw: random.Random) -> bytes:
    """Some bytes of the first 400 are others."""
    found = bytearray(whole)
    for _ in range(draw.randint(1, 8)):
        found[draw.randrange(400)] = draw.randrange(256)
    return bytes(found)


def cut(whole: bytes, draw: random.Random) -> bytes:
    return whole[: draw.randrange(len(whole))]


def longer_header(whole: bytes, draw: random.Random) -> bytes:
    length = draw.choice(
        [0, 1, 2**16, 2**40, 2**63, 2**64 - 1, len(whole), len(whole) - 8, draw.randrange(1000)]
    )
    return struct.pack("<Q", length) + whole[8:]


def lying(whole: bytes, draw: random.Random) -> bytes:
    """A value of the header's JSON is another."""
    header, data = split(whole)
    for _ in range(draw.randint(1, 3)):
        entry = header[draw.choice(list(header))]
        if not isinstance(entry, dict) or not entry:
            continue
        key = draw.choice(list(entry))
        inner = entry[key]
        if isinstance(inner, list) and inner and draw.random() < 0.7:
            inner[draw.randrange(len(inner))] = draw.choice(LIES)
        elif draw.random() < 0.2:
            del entry[key]
        else:
            entry[key] = draw.choice(LIES)
    if draw.random() < 0.2:
        header[draw.choice(["more", "\ud800", "__metadata__"])] = draw.choice(LIES)
    return joined(header, data)


def nested(whole: bytes, draw: random.Random) -> bytes:
    text = draw.choice([b"[", b'{"a":', b'{"a":[']) * draw.choice([10, 5000])
    return struct.pack("<Q", len(text)) + text + whole[-400:]


@pytest.mark.parametrize("change", [flipped, cut, longer_header, lying, nested])
def test_no_mutated_header_crashes(
    change: Callable[[bytes, random.Random], bytes], written: Path
) -> None:
    """It is read or refused with the file's name, within a few megabytes."""
    file, draw = written / "model.safetensors", random.Random(change.__name__)
    whole = file.read_bytes()
    messages: list[bytes] = []
    tracemalloc.start()
    for _ in range(NUMBER // 5):
        file.unlink()  # a file that is cut and written again is flushed to the disk
        file.write_bytes(change(whole, draw))
        try:
            assert in_memory(stored_tensors(str(written)), 2) <= 4 * len(whole)
            for _, tensor in tensors(str(written)):
                assert tensor.nbytes <= len(whole)
        except (ConfigError, ModelNotFound) as error:
            messages.append(str(error).encode())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(messages) > NUMBER // 20
    assert all(str(file).encode() in message for message in messages)
    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("name", "key", "value", "match"),
    [
        ("a.b", "shape", [3, 4, 2**40], r"a\.b, F32 \[3, 4, 1099511627776\], does not have the 240 bytes at offset \d+"),
        ("a.b", "dtype", "F64", r"a\.b, F64 \[3, 4, 5\], does not have the 240 bytes"),
        ("a.b", "dtype", "Q4", r"the dtype of a\.b is 'Q4'"),
        ("a.b", "data_offsets", [2**50, 2**50 + 240], r"model\.safetensors is truncated"),
        ("a.b", "data_offsets", [8, 248], r"the data of .* at offset \d+ overlaps the data of"),
    ],
)  # fmt: skip
def test_a_lie_is_named(name: str, key: str, value: Any, match: str, written: Path) -> None:
    file = written / "model.safetensors"
    header, data = split(file.read_bytes())
    header[name][key] = value
    file.write_bytes(joined(header, data))
    with pytest.raises(ConfigError, match=match):
        stored_tensors(str(written))
