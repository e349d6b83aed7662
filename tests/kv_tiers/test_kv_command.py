"""`quire kv`: what it says of a folder with blocks, and `quire doctor` of one that will have some."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path

import pytest
from kv_tiers.test_disk import LENGTH, made, put

from quire.cli import doctor, kv
from quire.kvstore.record import PAGE, record_size
from quire.kvstore.segments import DESCRIPTION, RATE, segments_in

SOURCE = Path(kv.__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store, page = made(tmp_path / "kv"), memoryview(mmap.mmap(-1, record_size(LENGTH)))
    assert all(put(store, number, page) for number in range(3))
    store.close()
    (store.folder / "rate").write_text("1")
    return tmp_path / "kv"


def test_ls_and_drop(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kv.main(["ls", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "3, " in said
    assert bytes(range(16)).hex() in said
    assert kv.main(["drop", str(folder), "--identity", "ff"]) == 0
    assert kv.main(["drop", str(folder), "--unused-days", "2"]) == 0
    assert list(folder.rglob("*.seg"))
    assert kv.main(["drop", str(folder)]) == 0
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert kv.main(["ls", str(folder)]) == 0
    assert "no kept KV blocks" in capsys.readouterr().out
    assert kv.main(["ls", str(folder / "none")]) == 1


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kv.main(["verify", str(folder)]) == 0
    assert "3 blocks are right, 0 are damaged" in capsys.readouterr().out
    path = segments_in(folder / bytes(range(16)).hex())[0].path
    data = bytearray(path.read_bytes())
    data[record_size(LENGTH) + PAGE + 7] ^= 1
    path.write_bytes(data)
    assert kv.main(["verify", str(folder)]) == 1
    assert "2 blocks are right, 1 are damaged" in capsys.readouterr().out


def test_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kv.main(["key", str(tmp_path / "key")]) == 0
    assert kv.main(["key", str(tmp_path / "key")]) == 1
    assert "there already" in capsys.readouterr().err


def test_doctor_says_what_a_token_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--kv-disk-dir", str(tmp_path), "--kv-disk-write", "always", "--port", "0"])
    said = capsys.readouterr().out
    assert re.search(r"one token +2.50 KiB", said)
    assert "on this machine" not in said
    assert "600 TB of writes, kv_disk_write=always" in said
    known = tmp_path / ("0" * 32)
    known.mkdir()
    (known / RATE).write_text("1234.5")
    facts = {"model": str(SOURCE / "embedded" / "quire-tiny"), "dtype": dtype_of(said)}
    (known / DESCRIPTION).write_text(json.dumps(facts))
    doctor.main(["--kv-disk-dir", str(tmp_path), "--port", "0"])
    assert re.search(r"on this machine +the last server computed 1234 prompt tokens per second: 3.0\d MiB", capsys.readouterr().out)  # fmt: skip
    doctor.main(["--kv-remote-url", "redis://host", "--kv-key-file", str(tmp_path / "key"), "--port", "0"])  # fmt: skip
    said = capsys.readouterr().out
    assert "break-even" in said
    assert "disk life" not in said


def dtype_of(said: str) -> str:
    found = re.search(r"dtype +(\w+)", said)
    assert found is not None
    return found[1]
