"""`quire kv`: what it says of a folder with blocks, and `quire doctor` of one that will have some."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from kv_tiers.test_disk import LENGTH, made, put

from quire.cli import doctor, kv
from quire.kvstore.record import PAGE, record_size
from quire.kvstore.segments import segments_in


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
    assert "one token   2.50 KiB" in said
    assert "600 TB of writes, kv_disk_write=always" in said
