"""The first token of a long prompt after a restart: its blocks from the disk, beside computing them; and the rate of the disk."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.kept.engines import KeptEngine, Model, engine
from benchmarks.kept.llama_slots import LlamaSlots
from quire.kvstore.disk import DiskStore
from quire.kvstore.record import record_size
from quire.kvstore.segments import heads, identities, segments_in

READERS = 4
"""As the engine has."""
PIECE = 4 << 20
WARM = 24
"""Steps, in which the prompts are computed."""


def measure(
    model: Model,
    folder: Path,
    length: int,
    rounds: int,
    more: dict[str, Any],
    slots: LlamaSlots | None = None,
) -> dict[str, Any]:
    """Each round is a new engine, which answers a kept prompt and a new one, in turns first. It writes nothing: the folder is filled
    before. With `slots` it is also a new llama.cpp, which restores the kept prompt from a slot's file."""
    settings = {"max_model_len": length + 16, "max_num_seqs": 2, "kv_disk_dir": str(folder), **more}
    (kept,) = model.prompts("kept", 1, length)
    with engine(model, kv_disk_write="always", **settings) as one:
        one.until_open()
        (expected,), computed, _ = one.run([kept], 2)
        one.until_saved()
        num_bytes = one.count("kv_store_bytes:disk")
    seconds: dict[str, list[float]] = {"from disk": [], "computed": []}
    equal = True
    if slots is not None:
        slot_computed, slot_token = slots.first_token(kept)
        seconds["llama.cpp's slot"] = []
    for number in range(rounds):
        prompts = {"from disk": [kept], "computed": model.prompts(f"fresh {number}", 1, length)}
        with engine(model, kv_disk_write="second-use", **settings) as one:
            one.until_open()
            for name in list(prompts)[:: 1 if number % 2 else -1]:
                tokens, first, _ = one.run(prompts[name], 2)
                seconds[name].append(first)
                equal &= name == "computed" or tokens == [expected]
            loaded = one.count("kv_cached_tokens:disk")
        if slots is not None:
            first, token = slots.first_token(kept)
            seconds["llama.cpp's slot"].append(first)
            equal &= token == slot_token
    own: dict[str, Any] = {} if slots is None else {"llama_computed_s": slot_computed}
    return own | {
        "prompt_tokens": length, "bytes": num_bytes, "loaded_tokens": loaded, "equal_tokens": equal,
        "first_answer_s": computed, "seconds": seconds, "disk": read_rates(folder, rounds),
    }  # fmt: skip


def read_rates(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Bytes per second of the folder's records, read as the engine reads them, with their checks; and of the same files in pieces of
    PIECE bytes by O_DIRECT, without."""
    home = identities(folder)[0]
    files = [one.path for one in segments_in(home)]
    identity = bytes.fromhex(home.name)
    store = DiskStore(folder, lambda: (identity, {}), 1 << 40)
    store.open()
    keys = [
        ((head.group, head.name), head.length)
        for path in files
        for _, head in heads(path, identity)
    ]
    found: dict[str, list[float]] = {"store": [], "O_DIRECT": []}
    for _ in range(rounds):
        found["O_DIRECT"].append(_direct(files))
        found["store"].append(_records(store, keys))
    store.close()
    return found


def _records(store: DiskStore, keys: list[Any]) -> float:
    slots = [memoryview(mmap.mmap(-1, record_size(max(length for _, length in keys)))) for _ in range(READERS)]  # fmt: skip

    def read(number: int) -> int:
        mine = keys[number::READERS]
        for key, length in mine:
            store.read(key, length, slots[number])
        return sum(record_size(length) for _, length in mine)

    return _rate(read)


def _direct(files: list[Path]) -> float:
    pieces = [(path, offset) for path in files for offset in range(0, path.stat().st_size, PIECE)]
    buffers = [memoryview(mmap.mmap(-1, PIECE)) for _ in range(READERS)]
    opened = {path: os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0)) for path in files}

    def read(number: int) -> int:
        return sum(os.preadv(opened[path], [buffers[number]], offset) for path, offset in pieces[number::READERS])  # fmt: skip

    try:
        return _rate(read)
    finally:
        for fd in opened.values():
            os.close(fd)


def _rate(read: Callable[[int], int]) -> float:
    with ThreadPoolExecutor(READERS) as pool:
        began = time.perf_counter()
        total = sum(pool.map(read, range(READERS)))
        return total / (time.perf_counter() - began)


def unused(
    model: Model, folder: Path, rows: int, steps: int, more: dict[str, Any]
) -> dict[str, Any]:
    """Milliseconds of a decode step with a folder that has nothing for it, beside none. The engines take turns step by step; those with
    a folder write as their policy says."""
    common = {"max_model_len": 64 + steps, "max_num_seqs": rows, **model.shorter, **more}
    ways = {
        "off": {},
        "second-use": {"kv_disk_write": "second-use"},
        "auto": {"kv_disk_write": "auto"},
    }
    engines: dict[str, KeptEngine] = {}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for name, way in ways.items():
            place = {"kv_disk_dir": str(folder / name)} if way else {}
            engines[name] = one = KeptEngine(model, {**common, **place, **way})
            if way:
                one.until_open()
            one.begin(model.prompts("unused", rows, 32), steps + WARM)
        names = list(ways)
        for one in engines.values():
            for _ in range(WARM):
                one.client.outputs()
        for number in range(steps):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                began = time.perf_counter()
                engines[name].client.outputs()
                spent[name].append(1000 * (time.perf_counter() - began))
    finally:
        for one in engines.values():
            one.client.close()
    return {"rows": rows, "steps": steps, "ms": spent}
