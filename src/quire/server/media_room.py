"""MediaRoom: bounds the bytes that the running requests of a server bring for their prompts beside text and tokens.

Each completion of a request is a message to the engine with all of its bytes, and the engine keeps them until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.server.errors import invalid, unavailable

MOST_BYTES = 1 << 30


class MediaRoom:
    """One for each server; used in its event loop only."""

    def __init__(self, most: int = MOST_BYTES):
        self.most, self.taken = most, 0

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Count `size` bytes for as long as the request runs.

        Raises:
            ApiError: 400: more than the limit; 503: other requests have them now.
        """
        if size > self.most:
            raise invalid(
                f"the prompts of all completions have {size >> 20} MiB of embeddings and pictures; the limit is {self.most >> 20} MiB:"
                " lower `n`, or send fewer prompts"
            )
        if self.taken + size > self.most:
            raise unavailable(
                f"running requests have {self.taken >> 20} MiB of embeddings and pictures; the limit is {self.most >> 20} MiB: try again later"
            )
        self.taken += size
        try:
            yield
        finally:
            self.taken -= size
