"""The name of a block's content: parent block, its tokens, and all else that decides its KV.

hash(block) = H_key(hash(parent block), tokens, media that overlap the block); the first parent is
H_key(element format, salt, adapter). H is blake2b, keyed with a secret drawn when the process starts, so that nobody
can construct a collision or guess from outside what others have cached.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from quire.protocol.request import MediaItem

DIGEST_BYTES = 16


class Hasher:
    """Block hashes under one secret. Two processes that must agree share the secret.

    kept: name of the cached elements. Codes of one format are never taken for those of another.
    """

    def __init__(self, block_size: int, secret: bytes | None = None, kept: str = ""):
        self.block_size = block_size
        self.secret = secret or secrets.token_bytes(32)
        self.kept = kept

    def root(self, salt: str, adapter: str | None) -> bytes:
        """What comes before the first block: requests with other salts or adapters never share."""
        named = "" if adapter is None else "adapter:" + adapter
        return self._digest(f"{self.kept}:{len(salt)}:{salt}{named}".encode())

    def extend(
        self, hashes: list[bytes], root: bytes, tokens: list[int], media: Sequence[MediaItem] = ()
    ) -> None:
        """Append the hashes of the full blocks of `tokens` that `hashes` does not have yet."""
        size = self.block_size
        for index in range(len(hashes), len(tokens) // size):
            start, stop = index * size, (index + 1) * size
            content = (hashes[-1] if hashes else root) + array("q", tokens[start:stop]).tobytes()
            for item in media:
                if item.start < stop and item.start + item.length > start:
                    content += f"|{item.start - start}:{item.hash}".encode()
            hashes.append(self._digest(content))

    def _digest(self, content: bytes) -> bytes:
        return blake2b(content, digest_size=DIGEST_BYTES, key=self.secret).digest()
