"""Inconsistent checkpoints: one clear sentence, early, from `quire serve` and from `quire doctor` (L3)."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import pytest
from tiny_llama import make_checkpoint

from quire.cli.doctor import main
from quire.errors import ConfigError
from quire.models.checkpoint_files import weight_files
from quire.models.hf_config import read_config
from quire.models.safetensors_header import header


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_checkpoint(tmp_path))


def change(folder: Path, **values) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    "lie",
    [
        {"num_hidden_layers": 10**9}, {"num_hidden_layers": 1e9}, {"vocab_size": 10**12}, {"hidden_size": float("inf")},
        {"head_dim": float("nan")}, {"num_attention_heads": -7}, {"num_experts": 10**6},
    ],
)  # fmt: skip
def test_a_size_that_no_model_has_is_refused_at_once(folder: Path, lie: dict, capsys):
    """1e9 layers and 1e12 tokens gave no answer within 25 s."""
    change(folder, **lie)
    began = time.process_time()
    with pytest.raises(ConfigError, match=rf"{next(iter(lie))}=.* is allowed"):
        read_config(str(folder))
    assert main([str(folder)]) != 0
    assert time.process_time() - began < 5
    said = "".join(capsys.readouterr())
    assert next(iter(lie)) in said
    assert "Traceback" not in said


def test_a_nested_text_model_is_checked_too(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"text_config": {**config, "vocab_size": 10**12}, "model_type": "any"})
    )
    with pytest.raises(ConfigError, match="vocab_size"):
        read_config(str(folder))


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    "name", ["config.json", "quant_config.json", "model.safetensors.index.json"]
)
def test_a_file_nested_too_deeply_is_one_sentence(folder: Path, name: str):
    """A RecursionError ended the start with a traceback."""
    (folder / name).write_text(DEEP)
    with pytest.raises(ConfigError, match=name.replace(".", "[.]")):
        read_config(str(folder)) and weight_files(str(folder))


def safetensors(folder: Path, head: str) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(head)) + head.encode() + bytes(64))
    return file


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (GOOD | {"shape": ["a", None]}, "shape of x"),
        (GOOD | {"shape": 4}, "shape of x"),
        (GOOD | {"shape": [2, -2]}, "shape of x"),
        (GOOD | {"shape": [True]}, "shape of x"),
        (GOOD | {"dtype": 7}, "dtype of x"),
        (GOOD | {"data_offsets": [0]}, "data_offsets of x"),
        (GOOD | {"data_offsets": [-8, 16]}, "data_offsets of x"),
        (GOOD | {"data_offsets": [0, 10**9]}, "does not have the 1000000000 bytes at offset 0"),
        (GOOD | {"data_offsets": [10**9, 10**9 + 16]}, "truncated"),
        (GOOD | {"data_offsets": [16, 0]}, "data_offsets of x are 16 and 0, in the wrong order"),
        ([], "is not a complete safetensors file"),
    ],
)
def test_a_lying_header_is_one_sentence(folder: Path, entry, says: str, capsys):
    file = safetensors(folder, json.dumps({"x": entry}))
    with pytest.raises(ConfigError, match=says):
        header(file)
    main([str(folder)])
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("offsets", [[0, 16], [8, 24], [15, 31], [4, 12]])
def test_tensors_that_share_bytes_are_refused(folder: Path, offsets: list[int]):
    shape = [(offsets[1] - offsets[0]) // 4]
    entries = {"x": GOOD, "y": GOOD | {"data_offsets": offsets, "shape": shape}}
    with pytest.raises(
        ConfigError, match=r"the data of [xy] at offset \d+ overlaps the data of [xy]"
    ):
        header(safetensors(folder, json.dumps(entries)))


def test_adjacent_and_empty_tensors_are_read(folder: Path):
    empty = GOOD | {"shape": [0], "data_offsets": [8, 8]}
    entries = {"y": GOOD | {"data_offsets": [16, 32]}, "empty": empty, "x": GOOD}
    assert header(safetensors(folder, json.dumps(entries))) == entries


def test_links_of_the_hubs_cache_are_followed(folder: Path):
    """The hub stores files in blobs/ and links to them from snapshots/<commit>/."""
    cache = folder / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(path for path in sorted(folder.iterdir()) if path.is_file()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert read_config(str(snapshot))
    kind, files = weight_files(str(snapshot))
    assert weight_files(str(snapshot), "hf") == (kind, files)
    assert kind == "safetensors"
    assert all(file.is_symlink() and header(file) for file in files)
    for file in files:
        file.resolve().unlink()  # an unfinished download: a link without its blob
    with pytest.raises(ConfigError, match="no weights"):
        weight_files(str(snapshot))


def test_a_header_nested_too_deeply_is_one_sentence(folder: Path):
    file = safetensors(folder, DEEP)
    with pytest.raises(ConfigError, match="nested too deeply"):
        header(file)


def test_a_good_header_is_read(folder: Path):
    assert header(safetensors(folder, json.dumps({"x": GOOD, "__metadata__": {"a": "b"}}))) == {
        "x": GOOD
    }


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size"])
def test_a_number_that_is_a_text_is_one_sentence(folder: Path, key: str, capsys):
    """L14: int() of it was a ValueError with a traceback."""
    change(folder, **{key: "__import__('os')"})
    with pytest.raises(ConfigError, match=rf"{key}=.* is a number"):
        read_config(str(folder))
    assert main([str(folder)]) != 0
    assert "Traceback" not in "".join(capsys.readouterr())


def test_an_activation_that_nobody_has_is_one_sentence(folder: Path):
    """L14: it was a KeyError from Transformers."""
    from tests.models.test_native import build

    change(folder, hidden_act="__import__")
    with pytest.raises(ConfigError, match="hidden_act='__import__'"):
        build(folder, model_impl="transformers")
