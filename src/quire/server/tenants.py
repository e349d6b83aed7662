"""Who asks, by key, and how much each may.

Knows keys, limits and clocks. Does not know endpoints. Which request of whom runs next is the scheduler's
matter; here only those are turned away that are beyond what their key may.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256

from quire.config.keys import Key, read_keys
from quire.config.server import ServerConfig
from quire.server.errors import ApiError

Clock = Callable[[], float]


class Bucket:
    """So many a minute: what was not used is kept, up to a minute's worth. The level may go below 0."""

    def __init__(self, per_minute: int | None, clock: Clock):
        self.per_minute, self.clock = per_minute, clock
        self._level, self._at = float(per_minute or 0), clock()

    @property
    def level(self) -> float:
        if self.per_minute is None:
            return math.inf
        now = self.clock()
        self._level += (now - self._at) * self.per_minute / 60
        self._level, self._at = min(self._level, float(self.per_minute)), now
        return self._level

    def take(self, count: float) -> None:
        self._level = self.level - count if self.per_minute is not None else 0.0

    def seconds_until(self, level: float) -> float:
        if self.per_minute is None:
            return 0.0
        return max(0.0, (level - self.level) * 60 / self.per_minute)


class Tenant:
    """One key and what it has used."""

    def __init__(self, key: Key, clock: Clock = time.monotonic):
        self.key, self.clock = key, clock
        self.running = 0
        self._fill()

    def _fill(self) -> None:
        self.requests = Bucket(self.key.requests_per_minute, self.clock)
        self.tokens = Bucket(self.key.tokens_per_minute, self.clock)

    @property
    def name(self) -> str:
        """ "" for a key that came without a file: nothing is counted for it."""
        return self.key.name

    def update(self, key: Key) -> None:
        """The file was read again. What was used stays used, unless the limits changed."""
        before, self.key = self.key, key
        if (before.requests_per_minute, before.tokens_per_minute) != (key.requests_per_minute, key.tokens_per_minute):  # fmt: skip
            self._fill()

    @contextmanager
    def asking(self, prompt_tokens: int) -> Iterator[None]:
        """One request, from its start to its end.

        Raises:
            ApiError: 429 with Retry-After; nothing was used then.
        """
        most = self.key.max_concurrency
        if most is not None and self.running >= most:
            raise self._refused(f"{most} requests of this key run already (max_concurrency)", 1.0)
        if self.requests.level < 1:
            raise self._refused(
                f"this key may make {self.key.requests_per_minute} requests a minute",
                self.requests.seconds_until(1),
            )
        # What an answer will cost is not known: tokens are paid when they are made, so the level may sink below 0.
        if self.tokens.level <= 0:
            raise self._refused(
                f"this key may use {self.key.tokens_per_minute} tokens a minute",
                self.tokens.seconds_until(1),
            )
        self.requests.take(1)
        self.tokens.take(prompt_tokens)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _refused(self, why: str, wait: float) -> ApiError:
        retry = str(max(1, math.ceil(wait)))
        return ApiError(429, why, headers={"Retry-After": retry, **self.headers()})

    def headers(self) -> dict[str, str]:
        """x-ratelimit-*: of those limits that there are."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket.per_minute is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"  # fmt: skip
        return found


class Tenants:
    """All keys of a server."""

    def __init__(self, server: ServerConfig, clock: Clock = time.monotonic):
        self.path, self.clock = server.api_key_file, clock
        plain = [server.api_key] if isinstance(server.api_key, str) else list(server.api_key or [])
        self._plain = [Tenant(Key(name="", key=key), clock) for key in plain]
        self._named: dict[str, Tenant] = {}
        self._digests: list[tuple[bytes, Tenant]] = []
        self.reload()

    def __bool__(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._plain) or self.path is not None

    def reload(self) -> None:
        """Read the file again. Requests that run go on, also those of keys that are gone.

        Raises:
            ConfigError: the file is wrong; everything stays as it was.
        """
        if self.path is not None:
            before = self._named
            self._named = {}
            keys = []
            try:
                keys = read_keys(self.path)
            except BaseException:
                self._named = before
                raise
            for key in keys:
                tenant = before.get(key.name) or Tenant(key, self.clock)
                tenant.update(key)
                self._named[key.name] = tenant
        everyone = [*self._plain, *self._named.values()]
        self._digests = [(sha256(one.key.key.encode()).digest(), one) for one in everyone]

    @property
    def weights(self) -> dict[str, float]:
        return {name: tenant.key.weight for name, tenant in self._named.items()}

    def find(self, given: bytes) -> Tenant | None:
        """Whose key this is."""
        digest = sha256(given).digest()
        # All are compared, so that the time does not tell which one was close.
        same = [hmac.compare_digest(digest, known) for known, _ in self._digests]
        return next((tenant for hit, (_, tenant) in zip(same, self._digests, strict=True) if hit), None)  # fmt: skip
