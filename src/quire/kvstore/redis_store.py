"""RedisStore: kept blocks of one identity in a redis server that several engines share.

    quire:<identity>:<group>:<name>        a record (record.py), its first PART bytes
    quire:<identity>:<group>:<name>:<n>    its n-th further part

Knows names, groups and bytes. A record has a MAC, so what others write to the server is no hit. Which names the server has is
not known before it is asked: `find` asks, `in` answers from what it said. A server that is slow, wrong or gone has nothing: it is
left alone, and asked again after some time. One thread calls `open` and `refresh`; all may call the rest.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from quire.kvstore.disk import Identify, Key
from quire.kvstore.record import BadRecord, check_record, record_size, write_head
from quire.kvstore.redis_link import LinkFailure, RedisLink, RefusedCommand, shown
from quire.logging import get_logger

log = get_logger(__name__)

PART = 8 << 20
MOST_KNOWN = 1 << 17
"""Names that are remembered."""
NAMES_AT_ONCE = 256
ASK_S = 0.5
MOVE_S = 1.0
"""Seconds of an exchange with records, besides PATIENCE times what the rate says."""
PATIENCE = 4.0
SLOWEST = 8e6
"""Bytes per second that are expected before anything is measured."""
PROBE_BYTES = 1 << 20
RETRY_S, MOST_RETRY_S = 5.0, 60.0


class RedisStore:
    """See above.

    Args:
        url: redis://, rediss:// or unix://.
        key: of the MACs of records (`record.mac_key`).
        seconds: after its last use, a block is forgotten by the server.
    """

    kind = "redis"

    def __init__(self, url: str, identify: Identify, key: bytes, seconds: int):
        self.link, self.place, self.seconds = RedisLink(url), shown(url), seconds
        self._identify, self._key, self.identity = identify, key, b""
        self.why_off = ""
        self.bytes_written = self.bytes_read = 0
        self.num_bytes = self.limit = 0
        """Memory of the whole server."""
        self.rate = 0.0
        """Bytes per second of reads; 0: not measured."""
        self._is_up, self._failures, self._retry_at = False, 0, 0.0
        self._refuses_until = 0.0
        self._known: OrderedDict[Key, bool] = OrderedDict()
        """Whether the record is right, as far as is known."""
        self._lock = threading.Lock()

    # -- the server -------------------------------------------------------------------------------
    @property
    def is_open(self) -> bool:
        return self._is_up and not self.why_off

    def open(self) -> float:
        """Compute the identity, and look for the server. Returns the bytes per second of reads; 0: it does not answer."""
        self.identity = self._identify()[0]
        self._connect()
        return self.rate

    def refresh(self) -> None:
        """Ask for the server's memory; look again for a server that did not answer."""
        if self.is_open:
            self._measure()
        elif not self.why_off and time.monotonic() >= self._retry_at:
            self._connect()

    def _measure(self) -> None:
        try:
            (found,) = self.link.exchange([("INFO", "memory")], ASK_S)
        except RefusedCommand:
            return  # this user may not ask
        except LinkFailure as why:
            self._failed(why)
            return
        lines = found.splitlines() if isinstance(found, bytes) else ()
        facts = dict(line.split(b":", 1) for line in lines if b":" in line)
        with suppress(ValueError):
            self.num_bytes = int(facts.get(b"used_memory", 0))
            self.limit = int(facts.get(b"maxmemory", 0))

    def _connect(self) -> None:
        name, probe = f"quire:probe:{os.urandom(8).hex()}", os.urandom(PROBE_BYTES)
        try:
            self.link.exchange([("SET", name, probe, "EX", 10)], self._patience(PROBE_BYTES))
            began = time.monotonic()
            (found,) = self.link.exchange([("GETRANGE", name, 0, PROBE_BYTES)], self._patience(PROBE_BYTES), PROBE_BYTES)  # fmt: skip
            self.rate = PROBE_BYTES / max(time.monotonic() - began, 1e-6)
            if found != probe:
                raise LinkFailure("a value came back changed")
            self.link.exchange([("DEL", name)], ASK_S)
        except LinkFailure as why:
            self._failed(why)
            return
        if self._failures:
            log.info("the store of KV blocks at %s answers again", self.place)
        self._is_up = True
        self._measure()

    def _failed(self, why: Exception) -> None:
        """Leave the server alone for a time, which grows until a record was read or written."""
        with self._lock:
            if self._failures and not self._is_up and time.monotonic() < self._retry_at:
                return  # others have failed at the same time
            pause = min(RETRY_S * 2 ** min(self._failures, 10), MOST_RETRY_S)
            self._failures, self._retry_at = self._failures + 1, time.monotonic() + pause
            was_up, self._is_up = self._is_up or self._failures == 1, False
            self._known.clear()
        if was_up:
            log.warning(
                "the store of KV blocks at %s does not work (%s): prompts are computed here; it is tried again in %.0f s",
                self.place, why, pause,
            )  # fmt: skip
        self.link.close()

    def _patience(self, num_bytes: float) -> float:
        return MOVE_S + PATIENCE * num_bytes / (self.rate or SLOWEST)

    def late(self) -> None:
        """Somebody has waited in vain for an answer of this store."""
        self._failed(TimeoutError("it answers too late"))

    def describe(self) -> str:
        return f"shared by {self.place}"

    # -- names ------------------------------------------------------------------------------------
    def __contains__(self, key: Key) -> bool:
        return self._known.get(key, False)

    def find(self, keys: Sequence[Key]) -> None:
        """Ask which of these records the server has, in this order, until it has none of NAMES_AT_ONCE."""
        for start in range(0, len(keys), NAMES_AT_ONCE):
            part = keys[start : start + NAMES_AT_ONCE]
            try:
                found = self._has(part)
            except LinkFailure as why:
                self._failed(why)
                return
            for key, is_there in zip(part, found, strict=True):
                self._remember(key, is_there)
            if not any(found):
                return

    def _has(self, keys: Sequence[Key]) -> list[bool]:
        replies = self.link.exchange([("EXISTS", self._names(key, 1)[0]) for key in keys], ASK_S)
        if not all(reply in (0, 1) for reply in replies):
            raise LinkFailure("EXISTS was not answered by 0 or 1")
        return [reply == 1 for reply in replies]

    def _remember(self, key: Key, is_there: bool) -> None:
        with self._lock:
            if not is_there:
                self._known.pop(key, None)
            elif self._known.setdefault(
                key, True
            ):  # a wrong record stays wrong until it is written again
                self._known.move_to_end(key)
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    def _names(self, key: Key, length: int) -> list[str]:
        first = f"quire:{self.identity.hex()}:{key[0]}:{key[1].hex()}"
        return [first, *(f"{first}:{n}" for n in range(1, -(-length // PART)))]

    # -- records ----------------------------------------------------------------------------------
    def read(self, key: Key, length: int, record: memoryview) -> None:
        """As DiskStore.read. Raises BadRecord."""
        if not self.is_open:
            raise BadRecord("down")
        part = record[: record_size(length)]
        try:
            self._fetch(key, part)
            check_record(part, self.identity, key[1], key[0], length, self._key)
        except BadRecord as why:
            with self._lock:
                self._known.pop(key, None)
                if str(why) not in ("missing", "down"):
                    self._known[key] = False
            raise
        self.bytes_read += len(part)
        self._failures = 0

    def _fetch(self, key: Key, record: memoryview) -> None:
        """Raises BadRecord."""
        began = time.monotonic()
        for number, name in enumerate(self._names(key, len(record))):
            place = record[number * PART : (number + 1) * PART]
            # one byte more than there should be: a longer value is wrong, and need not be sent
            commands = [("GETRANGE", name, 0, len(place)), ("EXPIRE", name, self.seconds)]
            try:
                found = self.link.exchange(commands, self._patience(len(place)), len(place) + 1)[0]
            except RefusedCommand as why:
                log.warning_every(f"read {self.place}", 600.0, "the store of KV blocks at %s: %s", self.place, why)  # fmt: skip
                raise BadRecord("refused") from None
            except LinkFailure as why:
                self._failed(why)
                raise BadRecord("down") from None
            if not isinstance(found, bytes) or len(found) != len(place):
                is_absent = found == b""
                raise BadRecord(("short" if number else "missing") if is_absent else "length")
            place[:] = found
        rate = len(record) / max(time.monotonic() - began, 1e-6)
        self.rate = 0.7 * self.rate + 0.3 * rate if self.rate else rate

    def write(self, key: Key, length: int, record: memoryview) -> bool:
        """As DiskStore.write: False: it is there, or the server does not take it."""
        if not self.is_open or key in self or time.monotonic() < self._refuses_until:
            return False
        part = record[: record_size(length)]
        try:
            if self._known.get(key, True) and self._has([key])[0]:
                self._remember(key, True)
                return False
            write_head(part, self.identity, key[1], key[0], length, self._key)
            names = self._names(key, len(part))
            for number in reversed(range(len(names))):  # the first, which is asked for, comes last
                piece = part[number * PART : (number + 1) * PART]
                self.link.exchange([("SET", names[number], piece, "EX", self.seconds)], self._patience(len(piece)))  # fmt: skip
        except RefusedCommand as why:  # no memory, or a replica that is only read
            self._refuses_until = time.monotonic() + MOST_RETRY_S
            log.warning_every(
                f"write {self.place}", 600.0, "the store of KV blocks at %s takes no blocks now: %s", self.place, why
            )  # fmt: skip
            return False
        except LinkFailure as why:
            self._failed(why)
            return False
        with self._lock:
            self._known[key] = True
        self.bytes_written += len(part)
        self._failures = 0
        return True

    # -- the end ----------------------------------------------------------------------------------
    def turn_off(self, why: Exception) -> None:
        """The store is not used any more; requests are computed as without it."""
        if not self.why_off:
            self.why_off = str(why)
            log.warning("shared KV blocks are off until the next start: %s (%s)", why, self.place)

    def close(self) -> None:
        self.link.close()
