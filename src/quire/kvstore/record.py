"""The format of a kept KV block in a file: one page of header, then the block's bytes, padded to whole pages.

    header   magic, identity, name, group, length, checksum of the bytes; then a checksum of all these, then a MAC or zeros
    bytes    of every rank in turn: each layer of the block's KV group, its keys, values and scales

A record is valid only where it was meant: the header has the identity of the engine that wrote it (weights, formats,
arithmetic), so that a file that was copied to another folder is no hit. CRC-32 finds rot and torn writes, not malice: whoever
can write the records would choose what the model remembers. With a key that is not kept beside the records, a MAC
(HMAC-SHA-256, RFC 2104) covers header and bytes, and only a holder of the key makes valid ones.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from hmac import digest as hmac
from zlib import crc32

PAGE = 4096
MAGIC = b"QUIREKV1"
IDENTITY_BYTES = 16
MOST_NAME = 32
_HEAD = struct.Struct(f"<8s{IDENTITY_BYTES}s{MOST_NAME}sBxHIQ")
_CRC = struct.Struct("<I")
USED = _HEAD.size + _CRC.size
MAC_BYTES = 32
_END = USED + MAC_BYTES
NO_MAC = bytes(MAC_BYTES)

Buffer = bytes | bytearray | memoryview


class BadRecord(Exception):
    """A record is not what it must be; the text says what is wrong, in one word for metrics."""


@dataclass(frozen=True, slots=True)
class RecordHead:
    """One header. `size`: bytes of the whole record in its file."""

    name: bytes
    group: int
    length: int
    checksum: int

    @property
    def size(self) -> int:
        return record_size(self.length)


def record_size(length: int) -> int:
    """Bytes in a file of a record with `length` bytes of a block."""
    return PAGE + padded(length)


def padded(length: int) -> int:
    return -(-length // PAGE) * PAGE


def mac_key(key: bytes) -> bytes:
    """The key of MACs that belongs to a key of block names (key_file.py)."""
    return blake2b(key=key, person=b"quire kv mac").digest()


def write_head(
    record: memoryview, identity: bytes, name: bytes, group: int, length: int, key: bytes = b""
) -> None:
    """Fill the first page of a record whose bytes are in place, and clear its padding. `key`: of its MAC; empty: it has none."""
    checksum = crc32(record[PAGE : PAGE + length])
    fields = MAGIC, identity, name.ljust(MOST_NAME, b"\0"), len(name), group, checksum, length
    head = _HEAD.pack(*fields)
    record[:PAGE] = (head + _CRC.pack(crc32(head))).ljust(PAGE, b"\0")
    record[PAGE + length : record_size(length)] = bytes(padded(length) - length)
    if key:
        record[USED:_END] = hmac(key, record[: PAGE + length], "sha256")


def read_head(page: Buffer, identity: bytes) -> RecordHead:
    """Raises BadRecord: it is no header, or of another identity."""
    if len(page) < PAGE or bytes(page[_END:PAGE]).strip(b"\0"):
        raise BadRecord("short" if len(page) < PAGE else "header")
    head = bytes(page[: _HEAD.size])
    magic, own, name, name_length, group, checksum, length = _HEAD.unpack(head)
    if magic != MAGIC or _CRC.unpack_from(page, _HEAD.size)[0] != crc32(head):
        raise BadRecord("header")
    if own != identity or name_length > MOST_NAME:
        raise BadRecord("identity")
    return RecordHead(name[:name_length], group, length, checksum)


def check_record(
    record: memoryview,
    identity: bytes,
    name: bytes,
    group: int,
    length: int,
    key: bytes | None = b"",
) -> None:
    """`key`: of MACs; empty: the record must have none; None: its MAC is not checked. May clear the MAC in `record`.

    Raises:
        BadRecord: this is not the whole record of that block.
    """
    if len(record) < record_size(length):
        raise BadRecord("short")
    head = read_head(record[:PAGE], identity)
    if (head.name, head.group) != (name, group):
        raise BadRecord("name")
    if head.length != length:
        raise BadRecord("length")
    end = PAGE + length
    if key is not None:
        found, record[USED:_END] = bytes(record[USED:_END]), NO_MAC
        if not compare_digest(found, hmac(key, record[:end], "sha256") if key else NO_MAC):
            raise BadRecord("mac")
    is_right = bool(key) or crc32(record[PAGE:end]) == head.checksum  # a MAC covers the bytes, too
    if not is_right or bytes(record[end : record_size(length)]).strip(b"\0"):
        raise BadRecord("checksum")
