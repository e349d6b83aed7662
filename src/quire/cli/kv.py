"""`quire kv ls|verify|drop|key`: the folder of kept KV blocks (--kv-disk-dir). Knows its files; loads no model."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.errors import QuireError
from quire.kvstore.disk import DAY_S
from quire.kvstore.key_file import make_key, read_key
from quire.kvstore.record import BadRecord, check_record, mac_key
from quire.kvstore.segments import DESCRIPTION, SegmentFile, heads, identities, remove, segments_in
from quire.startup_timer import table
from quire.worker.memory_plan import size


@dataclass(frozen=True, slots=True)
class KeptModel:
    """The blocks of one identity."""

    folder: Path
    facts: dict[str, str]
    segments: list[SegmentFile]

    @property
    def identity(self) -> bytes:
        return bytes.fromhex(self.folder.name)

    @property
    def num_groups(self) -> int:
        """KV groups of the model; records with this group and later ones are the parts of recurrent states."""
        with suppress(ValueError):
            return max(1, *map(len, json.loads(self.facts.get("ranks", ""))))
        return 1 << 8  # a description without this: all records are blocks, as a group is one byte

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.segments)


def main(argv: Sequence[str]) -> int:
    """0: done. 1: records are damaged, or the folder cannot be used. 2: a usage error."""
    options = parser().parse_args(argv)
    try:
        return int(options.run(options))
    except (OSError, QuireError) as why:
        print(f"quire kv: error: {why}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="quire kv", description="the folder of kept KV blocks (--kv-disk-dir)"
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for name, run, words in (
        ("ls", ls, "list the models whose blocks a folder has"),
        ("verify", verify, "read every block and compare its checksum; status 1: some are damaged"),
        ("drop", drop, "delete blocks"),
    ):
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument("folder", type=Path, help="the folder of --kv-disk-dir")
        command.set_defaults(run=run)
        if name == "verify":
            command.add_argument(
                "--kv-key-file",
                type=Path,
                metavar="FILE",
                help="also compare MACs, with the key that the server has",
            )
        if name == "drop":
            command.add_argument(
                "--identity", help="only of this model: the first digits of its identity in `ls`"
            )
            command.add_argument(
                "--unused-days", type=float, default=0.0, help="only what was not used for so long"
            )
    key = commands.add_parser("key", help="make a key file for --kv-key-file")
    key.add_argument("file", type=Path)
    key.set_defaults(run=make)
    return whole


def kept_models(root: Path) -> list[KeptModel]:
    """Raises OSError: there is no such folder."""
    found = []
    for folder in identities(root):
        facts: dict[str, str] = {}
        with suppress(ValueError):
            facts = dict(json.loads((folder / DESCRIPTION).read_text()))
            bytes.fromhex(folder.name)
            found.append(KeptModel(folder, facts, segments_in(folder)))
    return found


def ls(options: argparse.Namespace) -> int:
    models = kept_models(options.folder)
    if not models:
        print(f"{options.folder} has no kept KV blocks")
        return 0
    for one in models:
        groups = Counter(
            head.group for segment in one.segments for _, head in heads(segment.path, one.identity)
        )
        blocks = sum(count for group, count in groups.items() if group < one.num_groups)
        states = f", {found} recurrent states" if (found := groups[one.num_groups]) else ""
        used = max((segment.used for segment in one.segments), default=0.0)
        rows = [
            ("model", one.facts.get("model", "?")),
            ("formats", f"{one.facts.get('dtype')}, KV cache {one.facts.get('kv_cache_dtype')}, blocks of {one.facts.get('block_size')} tokens"),
            ("blocks", f"{blocks}{states}, {size(one.num_bytes)} in {len(one.segments)} files"),
            ("last used", time.strftime("%Y-%m-%d %H:%M", time.localtime(used)) if used else "never"),
        ]  # fmt: skip
        print(f"{one.folder.name}\n{table(rows)}\n")
    print(f"{size(sum(one.num_bytes for one in models))} in all")
    return 0


def verify(options: argparse.Namespace) -> int:
    right = damaged = 0
    key = mac_key(read_key(options.kv_key_file)) if options.kv_key_file else None
    for one in kept_models(options.folder):
        for segment in one.segments:
            good, end = _verify(segment.path, one.identity, key)
            right += good[0]
            damaged += good[1]
            if end < segment.path.stat().st_size:
                print(f"{segment.path}: what follows byte {end} is no record: an engine writes it now, or died in a write")  # fmt: skip
    print(f"{right} blocks are right, {damaged} are damaged")
    if damaged:
        print("a damaged block is never used: its tokens are computed again")
    return 1 if damaged else 0


def _verify(path: Path, identity: bytes, key: bytes | None) -> tuple[tuple[int, int], int]:
    """(right, damaged) records of a segment, and where the last one ends."""
    right = damaged = end = 0
    with path.open("rb", buffering=0) as file:
        for offset, head in heads(path, identity):
            record = memoryview(bytearray(os.pread(file.fileno(), head.size, offset)))
            end = offset + head.size
            try:
                check_record(record, identity, head.name, head.group, head.length, key)
                right += 1
            except BadRecord as why:
                damaged += 1
                print(f"{path}, byte {offset}: {why}")
    return (right, damaged), end


def drop(options: argparse.Namespace) -> int:
    before = time.time() - options.unused_days * DAY_S
    deleted = in_use = 0
    for one in kept_models(options.folder):
        if options.identity and not one.folder.name.startswith(options.identity):
            continue
        for segment in one.segments:
            if segment.used > before:
                continue
            if remove(segment.path):
                deleted += segment.num_bytes
            else:
                in_use += 1
        if not segments_in(one.folder):
            with suppress(OSError):  # an engine may have begun to use it
                for path in one.folder.iterdir():
                    path.unlink()
                one.folder.rmdir()
    print(f"deleted {size(deleted)}")
    if in_use:
        print(f"{in_use} files are being written by a running engine, and stay; stop it first")
    return 0


def make(options: argparse.Namespace) -> int:
    try:
        make_key(options.file)
    except FileExistsError:
        print(f"quire kv: error: {options.file} is there already; a new key makes all kept blocks useless", file=sys.stderr)  # fmt: skip
        return 1
    print(f"wrote {options.file}; use it with --kv-key-file {options.file}")
    return 0
