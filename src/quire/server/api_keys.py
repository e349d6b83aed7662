"""API keys: which tenant sends a request, and how much each tenant may use.

Knows keys, limits and clocks. Does not know endpoints. The scheduler decides which tenant's request runs next; this
module refuses the requests that exceed their key's limits.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable
from hashlib import sha256

from quire.config.api_key_file import KEY_FLAG, TenantKey, plain_keys, read_keys
from quire.config.server import ServerConfig
from quire.server.errors import ApiError, invalid
from quire.server.shared_usage import UsageAccount, UsageLedger

Clock = Callable[[], float]


class RateLimit:
    """A token bucket: what is not used accumulates, up to one minute's worth. The level may fall below 0.

    Uses two numbers of an account, from `place` on: the level, and the time of that level; 0 at first.
    """

    def __init__(
        self,
        per_minute: int | None,
        clock: Clock,
        account: UsageAccount | None = None,
        place: int = 0,
    ):
        self.per_minute, self.clock = per_minute, clock
        self.account, self.place = account or UsageAccount(), place
        if not self.account.numbers[place + 1]:
            self.fill()

    def fill(self) -> None:
        self._set(float(self.per_minute or 0))

    @property
    def level(self) -> float:
        if self.per_minute is None:
            return math.inf
        level, updated = self.account.numbers[self.place], self.account.numbers[self.place + 1]
        return min(level + (self.clock() - updated) * self.per_minute / 60, float(self.per_minute))

    def take(self, count: float) -> None:
        if self.per_minute is not None:
            with self.account.locked():
                self._set(self.level - count)

    def _set(self, level: float) -> None:
        numbers = self.account.numbers
        numbers[self.place], numbers[self.place + 1] = level, self.clock()

    def seconds_until(self, level: float) -> float:
        if self.per_minute is None:
            return 0.0
        return max(0.0, (level - self.level) * 60 / self.per_minute)


class Tenant:
    """One key, and what it has used."""

    def __init__(
        self,
        key: TenantKey,
        clock: Clock = time.monotonic,
        account: UsageAccount | None = None,
        plain: int | None = None,
    ):
        """`plain`: the number of the key in --api-key; None: a key of the file."""
        self.key, self.clock, self.plain = key, clock, plain
        self.account = account or UsageAccount()
        self._limit()

    def _limit(self) -> None:
        self.requests = RateLimit(self.key.requests_per_minute, self.clock, self.account, 0)
        self.tokens = RateLimit(self.key.tokens_per_minute, self.clock, self.account, 2)

    @property
    def running(self) -> int:
        return self.account.under_way

    @property
    def name(self) -> str:
        """Empty for a key of --api-key, whose usage is not counted."""
        return self.key.name

    @property
    def id(self) -> str:
        """Identifies the tenant to the engine and the page; unique for each key."""
        return self.key.name if self.plain is None else f"{KEY_FLAG} {self.plain}"

    def update(self, key: TenantKey) -> None:
        """Use the key as read again from the file. Keeps what was used, unless the limits changed."""
        before, self.key = self.key, key
        if (before.requests_per_minute, before.tokens_per_minute) != (key.requests_per_minute, key.tokens_per_minute):  # fmt: skip
            self._limit()
            with self.account.locked():
                self.requests.fill()
                self.tokens.fill()

    def begin(self, completions: int) -> None:
        """Count the completions of a request against this key's limits, before any work is done for it.

        Raises:
            ApiError: 429 with Retry-After, or 400 if waiting would not help; nothing is counted then.
        """
        with self.account.locked():
            self._check(completions)
            self.requests.take(completions)
            self.account.begin(completions)

    def end(self, completions: int) -> None:
        """These completions no longer run."""
        self.account.begin(-completions)

    def _check(self, completions: int) -> None:
        for name in ("max_concurrency", "requests_per_minute"):
            limit = getattr(self.key, name)
            if limit is not None and completions > limit:
                raise invalid(
                    f"this request makes {completions} completions (its prompts times `n`), but the {name} of this key"
                    f" is {limit}: send fewer prompts, or a smaller `n`",
                    "n",
                )
        most = self.key.max_concurrency
        if most is not None and self.running + completions > most:
            raise self._refused(
                f"{self.running} completions of this key are running; its max_concurrency is {most}",
                1.0,
            )
        if self.requests.level < completions:
            raise self._refused(
                f"the limit of this key is {self.key.requests_per_minute} requests per minute",
                self.requests.seconds_until(completions),
            )
        # The length of the answer is not known yet: its tokens are counted at its end, so the level may fall below 0.
        if self.tokens.level <= 0:
            raise self._refused(
                f"the limit of this key is {self.key.tokens_per_minute} tokens per minute",
                self.tokens.seconds_until(1),
            )

    def _refused(self, why: str, wait: float) -> ApiError:
        retry = str(max(1, math.ceil(wait)))
        return ApiError(429, why, headers={"Retry-After": retry, **self.headers()})

    def headers(self) -> dict[str, str]:
        """The x-ratelimit-* headers of the limits that are set."""
        headers: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket.per_minute is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"  # fmt: skip
        return headers


class KeyUse:
    """What one HTTP request takes from its key's max_concurrency; ApiKeyMiddleware returns it at the end."""

    def __init__(self, tenant: Tenant):
        self.tenant, self.completions = tenant, 0

    def begin(self, completions: int) -> None:
        """Raises ApiError: the key's limits refuse these completions."""
        self.tenant.begin(completions)
        self.completions += completions

    def end(self) -> None:
        self.tenant.end(self.completions)
        self.completions = 0


class ApiKeys:
    """All keys of one server process; with a ledger, the processes of a server share their usage."""

    def __init__(
        self, server: ServerConfig, clock: Clock = time.monotonic, ledger: UsageLedger | None = None
    ):
        self.path, self.clock, self.ledger = server.api_key_file, clock, ledger
        plain, self._needed = plain_keys(server.api_key), server.needs_key
        self._plain = [
            Tenant(TenantKey(name="", key=key), clock, plain=index)
            for index, key in enumerate(plain, 1)
        ]
        self._named: dict[str, Tenant] = {}
        self._digests: list[tuple[bytes, Tenant]] = []
        self.reload()

    def __bool__(self) -> bool:
        """Whether requests need a key."""
        return self._needed

    def reload(self) -> None:
        """Read the file again. Running requests continue, also requests of removed keys.

        Raises:
            ConfigError: the file is invalid; the keys stay as they were.
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
                tenant = before.get(key.name) or self._tenant(key)
                tenant.update(key)
                self._named[key.name] = tenant
        everyone = [*self._plain, *self._named.values()]
        self._digests = [(sha256(one.key.key.encode()).digest(), one) for one in everyone]

    def _tenant(self, key: TenantKey) -> Tenant:
        account = None if self.ledger is None else self.ledger.account(key.name)
        return Tenant(key, self.clock, account)

    @property
    def weights(self) -> dict[str, float]:
        return {name: tenant.key.weight for name, tenant in self._named.items()}

    def by_id(self, id: str) -> Tenant | None:
        """The tenant whose `id` this is."""
        return next((tenant for _, tenant in self._digests if tenant.id == id), None)

    def find(self, key: bytes) -> Tenant | None:
        """The tenant of a key; None for an unknown or empty one."""
        if not key:
            return None
        digest = sha256(key).digest()
        # Compare all of them, so that the time does not reveal a near match.
        same = [hmac.compare_digest(digest, known) for known, _ in self._digests]
        return next((tenant for hit, (_, tenant) in zip(same, self._digests, strict=True) if hit), None)  # fmt: skip
