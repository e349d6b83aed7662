"""DiskStore returns a block exactly as it was written, or no block."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quire.kvstore import disk, segments
from quire.kvstore.disk import DiskStore
from quire.kvstore.record import PAGE, BadRecord, check_record, record_size
from quire.kvstore.segments import identities, make_room, remove, segments_in

IDENTITY = bytes(range(16))
LENGTH = 5000
LIMIT = 64 << 20


def made(root: Path, identity: bytes = IDENTITY, limit: int = LIMIT) -> DiskStore:
    store = DiskStore(root, lambda: (identity, {"model": "m"}), limit)
    store.open()
    return store


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PROBE_BYTES", 1 << 20)


@pytest.fixture
def page() -> Iterator[memoryview]:
    """Room of one record, aligned as direct reads need it."""
    import mmap

    return memoryview(mmap.mmap(-1, record_size(LENGTH)))


def content(number: int) -> bytes:
    return bytes((number * 7 + i) % 256 for i in range(LENGTH))


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(store: DiskStore, number: int, page: memoryview, group: int = 0) -> bool:
    page[PAGE : PAGE + LENGTH] = content(number)
    return store.write((group, name(number)), LENGTH, page)


def get(store: DiskStore, number: int, page: memoryview, group: int = 0) -> bytes:
    page[:] = bytes(len(page))
    store.read((group, name(number)), LENGTH, page)
    return bytes(page[PAGE : PAGE + LENGTH])


def test_another_store_finds_what_one_has_written(tmp_path: Path, page: memoryview) -> None:
    first = made(tmp_path / "kv")
    assert all(put(first, number, page) for number in range(5))
    assert not put(first, 3, page)  # it is there
    assert get(first, 3, page) == content(3)
    for second in (made(tmp_path / "kv"), first):
        assert [get(second, number, page) for number in range(5)] == [*map(content, range(5))]
        assert (1, name(3)) not in second
        with pytest.raises(BadRecord, match="missing"):
            get(second, 9, page)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o077 for path in files if path.suffix == ".seg"} == {0}


def test_two_stores_write_and_read_at_once(tmp_path: Path, page: memoryview) -> None:
    both = [made(tmp_path / "kv") for _ in range(2)]
    for number in range(20):
        put(both[number % 2], number, page)
        both[1 - number % 2].refresh()
    for store in both:
        assert [get(store, number, page) for number in range(20)] == [*map(content, range(20))]
    assert len(segments_in(both[0].folder)) == 2


def test_every_flipped_byte_of_a_record_is_a_miss(tmp_path: Path, page: memoryview) -> None:
    store = made(tmp_path / "kv")
    put(store, 1, page)
    store.close()
    path = segments_in(store.folder)[0].path
    whole, key = path.read_bytes(), (0, name(1))
    assert len(whole) == record_size(LENGTH)
    place, record = store.index[key], bytearray(whole)
    for offset in range(len(whole)):
        record[offset] ^= 1 << offset % 8
        with pytest.raises(BadRecord):
            check_record(memoryview(record), IDENTITY, name(1), 0, LENGTH)
        record[offset] ^= 1 << offset % 8
    check_record(memoryview(record), IDENTITY, name(1), 0, LENGTH)
    for offset in range(0, len(whole), 499):
        record[offset] ^= 255
        path.write_bytes(record)
        record[offset] ^= 255
        store.index[key] = place
        with pytest.raises(BadRecord):
            get(store, 1, page)
        assert key not in store
    path.write_bytes(whole)
    store.index[key] = place
    assert get(store, 1, page) == content(1)


def test_every_cut_of_a_segment_keeps_the_records_before_it(
    tmp_path: Path, page: memoryview
) -> None:
    store = made(tmp_path / "kv")
    for number in range(3):
        put(store, number, page)
    store.close()
    path = segments_in(store.folder)[0].path
    whole, each = path.read_bytes(), record_size(LENGTH)
    for length in [*range(0, len(whole), 997), each - 1, each, each + 1, 2 * each - 1, 2 * each]:
        path.write_bytes(whole[:length])
        again = made(tmp_path / "kv")
        assert len(again.index) == length // each
        for number in range(length // each):
            assert get(again, number, page) == content(number)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda store, key: store.index.update({key: store.index[0, name(2)]}), "name"),
        (lambda store, key: store.index.update({(1, key[1]): store.index[key]}), "name"),
        (lambda store, key: segments_in(store.folder)[0].path.unlink(), "missing"),
    ],
)
def test_a_stale_index_is_not_believed(
    tmp_path: Path, page: memoryview, spoil: Callable[..., None], reason: str
) -> None:
    store = made(tmp_path / "kv")
    put(store, 1, page)
    put(store, 2, page)
    store.close()
    spoil(store, (0, name(1)))
    group = int((1, name(1)) in store)
    with pytest.raises(BadRecord, match=reason):
        get(store, 1, page, group)
    assert not store.why_off


def test_records_of_another_identity_are_none(tmp_path: Path, page: memoryview) -> None:
    store = made(tmp_path / "kv")
    put(store, 1, page)
    store.close()
    other = made(tmp_path / "kv", bytes(16))
    assert not other.index
    path = segments_in(store.folder)[0].path
    path.rename(other.folder / path.name)
    other.refresh()
    assert not other.index
    assert len(identities(tmp_path / "kv")) == 2


def test_the_limit_holds_over_restarts_and_models(
    tmp_path: Path, page: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "KEEP_FREE", 0)
    limit = 64 * record_size(LENGTH)
    for number in range(12):
        store = made(tmp_path / "kv", bytes([number % 3] * 16), limit)
        for each in range(10):
            assert put(store, number * 100 + each, page)
            found = [one for folder in identities(tmp_path / "kv") for one in segments_in(folder)]
            assert sum(one.num_bytes for one in found) <= limit
        assert get(store, number * 100 + 9, page) == content(number * 100 + 9)
        store.close()
    store.refresh()
    for key in list(store.index):
        assert get(store, int.from_bytes(key[1], "big"), page) == content(
            int.from_bytes(key[1], "big")
        )


def test_the_least_recently_used_goes_first_and_none_that_is_written(
    tmp_path: Path, page: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "KEEP_FREE", 0)
    stores = [made(tmp_path / "kv") for _ in range(3)]
    for number, store in enumerate(stores):
        put(store, number, page)
    paths = [store.index[0, name(n)].path for n, store in enumerate(stores)]
    for age, path in zip((100, 300, 200), paths, strict=True):
        os.utime(path, (time.time() - age,) * 2)
    stores[0].close()
    stores[2].close()
    assert make_room(tmp_path / "kv", 3 * record_size(LENGTH), record_size(LENGTH))
    assert [path.exists() for path in paths] == [True, True, False]
    assert not remove(paths[1])


class Full:
    """A file system that fails from some write on."""

    def __init__(self, after: int, error: int):
        self.left, self.error = after, error

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        if self.left <= 0:
            raise OSError(self.error, os.strerror(self.error))
        size = min(self.left, len(data))
        self.left -= size
        return os.write(fd, data[:size]) if os.lseek(fd, offset, 0) >= 0 else 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("after", [0, PAGE, record_size(LENGTH) + PAGE])
def test_an_error_of_the_disk_turns_the_store_off_with_one_warning(
    tmp_path: Path, page: memoryview, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    error: int, after: int,
) -> None:  # fmt: skip
    store = made(tmp_path / "kv")
    fake = Full(after, error)
    monkeypatch.setattr(segments.os, "pwrite", fake)
    results = [put(store, number, page) for number in range(4)]
    assert results == [n < after // record_size(LENGTH) for n in range(4)]
    assert not store.is_open
    assert not store.index
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1
    monkeypatch.undo()
    again = made(tmp_path / "kv")
    for number in range(4):
        if (0, name(number)) in again:
            assert get(again, number, page) == content(number)


def test_a_folder_that_vanishes_turns_the_store_off(tmp_path: Path, page: memoryview) -> None:
    import shutil

    store = made(tmp_path / "kv")
    put(store, 1, page)
    shutil.rmtree(tmp_path / "kv")
    store.refresh()
    assert not store.is_open
    with pytest.raises(BadRecord):
        get(store, 1, page)


@pytest.mark.parametrize("kind", ["a file", "open to others"])
def test_a_folder_that_cannot_be_used_is_off_and_says_why(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "kv"
    if kind == "a file":
        root.write_text("x")
    else:
        root.mkdir()
        root.chmod(0o777)
    assert not made(root).is_open
    assert ("chmod 700" in caplog.text) == (kind == "open to others")


WRITER = """
import mmap, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from kv_tiers.test_disk import made, put, LENGTH, record_size
store = made(Path(sys.argv[1]))
page = memoryview(mmap.mmap(-1, record_size(LENGTH)))
start = int(sys.argv[3])
print("go", flush=True)
for number in range(start, start + 100000):
    put(store, number, page)
"""


@pytest.mark.attack
def test_a_process_killed_in_its_writes_leaves_only_right_records(
    tmp_path: Path, page: memoryview
) -> None:
    tests, found = str(Path(__file__).parents[1]), 0
    for trial in range(8):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "kv"), tests, str(trial * 10**6)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"go\n"
            time.sleep(0.02 + 0.013 * trial)
            writer.send_signal(signal.SIGKILL)
        store = made(tmp_path / "kv")
        for key in list(store.index):
            number = int.from_bytes(key[1], "big")
            assert get(store, number, page) == content(number)
        assert len(store.index) > found
        found = len(store.index)


@pytest.mark.attack
@pytest.mark.skipif(os.geteuid() != 0, reason="a small tmpfs needs root")
def test_a_full_file_system(tmp_path: Path, page: memoryview) -> None:
    root = tmp_path / "small"
    root.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m,mode=700", "none", str(root)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        store = made(root)
        assert all(put(store, number, page) for number in range(3))
        with suppress(OSError), (root / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(bytes(4096)) == 4096:
                pass
        written = [put(store, number, page) for number in range(3, 9)]
        assert not any(written)
        assert "No space" in store.why_off
        (root / "ballast").unlink()
        again = made(root)
        for key in list(again.index):
            number = int.from_bytes(key[1], "big")
            assert get(again, number, page) == content(number)
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)
