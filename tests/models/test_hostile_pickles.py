"""Weights in torch's own format and in numpy's: damaged, compressed and misleading files are refused with a sentence."""

from __future__ import annotations

import json
import random
import resource
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.models.checkpoint_files import tensors
from quire.models.pickled_weights import pickled


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(64.0), "b": torch.ones(3, 4, dtype=torch.bfloat16)}, file)
    return file


def test_damaged_files_are_refused(weights: Path) -> None:
    """L5: a changed byte was a UnicodeDecodeError with a traceback."""
    whole, draw, refused = weights.read_bytes(), random.Random(5), 0
    for number in range(150):
        data = bytearray(whole[: draw.randrange(1, len(whole))] if number % 8 == 0 else whole)
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(min(len(data), 600))] = draw.randrange(256)
        weights.write_bytes(data)
        with suppress(ConfigError):  # a byte of a tensor may change
            list(pickled(weights))
            continue
        refused += 1
    assert refused > 40


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """L4: 600 KB became 600 MiB."""
    plain, packed = tmp_path / "plain.bin", tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(50 << 20, dtype=torch.uint8)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to:
        for entry in source.infolist():
            to.writestr(entry.filename, source.read(entry))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match="is compressed; convert it to safetensors"):
        list(pickled(packed))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10


def copied(folder: Path, weights: Path) -> Path:
    """The numpy copy that the first load makes."""
    names = [name for name, _ in tensors(str(folder), "npcache")]
    assert names == ["a", "b"]
    return folder / "np" / "index.json"


@pytest.mark.parametrize("name", ["/etc/outside.npy", "../outside.npy", "7.npy", "sub/0.npy"])
def test_a_numpy_copy_names_no_file_outside_its_folder(weights: Path, name: str) -> None:
    """L3."""
    index = copied(weights.parent, weights)
    np.save(weights.parent / "outside.npy", np.ones(3))
    (index.parent / "7.npy").symlink_to(weights.parent / "outside.npy")
    index.write_text(json.dumps({"a": [name, "float32"]}))
    with pytest.raises(ConfigError, match=r"np/index\.json.*delete the folder"):
        list(tensors(str(weights.parent), "npcache"))


@pytest.mark.parametrize(
    "text",
    ["", "[", "[]", "7", '{"a": 1}', '{"a": [1, 2]}', '{"a": ["0.npy"]}', '{"a": ["9.npy", "float32"]}',
     '{"a": ["\\u0000.npy", "float32"]}', "[" * 100_000],
)  # fmt: skip
def test_a_damaged_index_of_numpy_files_is_one_sentence(weights: Path, text: str) -> None:
    index = copied(weights.parent, weights)
    index.write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json|\.npy"):
        list(tensors(str(weights.parent), "npcache"))


def test_a_damaged_numpy_file_is_one_sentence(weights: Path) -> None:
    index = copied(weights.parent, weights)
    file = index.parent / "0.npy"
    whole = file.read_bytes()
    objects = index.parent / "objects.npy"
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    header = whole.replace(b"(64,)", b"(9999999999,)").replace(b"   \n", b"\n", 1)
    for data in (b"", whole[:40], whole[:-9], b"x" * 90, header, objects.read_bytes()):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=r"0\.npy"):
            list(tensors(str(weights.parent), "npcache"))


@pytest.mark.parametrize("what", ["the folder", "a file", "the index"])
def test_links_of_a_model_are_not_written_through(weights: Path, what: str, tmp_path: Path) -> None:
    folder, elsewhere = weights.parent / "np", tmp_path / "elsewhere"
    elsewhere.mkdir()
    precious = elsewhere / "0.npy"
    precious.write_text("mine")
    if what == "the folder":
        folder.symlink_to(elsewhere)
        with pytest.raises(ConfigError, match="np is a link"):
            copied(weights.parent, weights)
    else:
        folder.mkdir()
        (folder / ("0.npy" if what == "a file" else "index.json.part")).symlink_to(precious)
        assert copied(weights.parent, weights).is_file()
    assert precious.read_text() == "mine"
