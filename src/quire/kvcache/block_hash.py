"""Hasher: the hash of a block's content, which covers everything that determines its KV.

hash(block) = H_key(hash(parent block), tokens, media that overlap the block); the first block's parent is
H_key(identity, salt, adapter). H is blake2b or HMAC-SHA-256, keyed with a secret that is drawn at process start,
so that a client cannot construct a collision or guess what other clients have in the cache; or with the key of a file
(kvstore/key_file.py), so that a later process, or another one, gives equal content the same name.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from hmac import digest as hmac
from typing import Literal

from quire.protocol.request import MediaItem

DIGEST_BYTES = 16


class Hasher:
    """Block hashes with one secret. Two processes that must agree share the secret.

    identity: of everything else that determines the content. Blocks of different identities never have equal hashes.
    algorithm: sha256 takes 2.5 times as long for a block of 16 tokens, and gives all of its 32 bytes.
    """

    def __init__(
        self,
        block_size: int,
        secret: bytes | None = None,
        identity: str = "",
        algorithm: Literal["blake2b", "sha256"] = "blake2b",
    ):
        self.block_size = block_size
        self.secret = secret or secrets.token_bytes(32)
        self.identity = identity
        self.algorithm = algorithm

    def root(self, salt: str, adapter: str | None) -> bytes:
        """The parent hash of a first block. Requests with different salts or adapters never share blocks."""
        named = "" if adapter is None else "adapter:" + adapter
        return self._digest(f"{self.identity}:{len(salt)}:{salt}{named}".encode())

    def extend(
        self, hashes: list[bytes], root: bytes, tokens: list[int], media: Sequence[MediaItem] = ()
    ) -> None:
        """Append the hashes of the full blocks of `tokens` that `hashes` lacks. `media`: in the order of their tokens."""
        size = self.block_size
        for index in range(len(hashes), len(tokens) // size):
            start, stop = index * size, (index + 1) * size
            content = (hashes[-1] if hashes else root) + array("q", tokens[start:stop]).tobytes()
            for item in media[bisect_right(media, start, key=_end) :]:
                if item.start >= stop:
                    break
                content += f"|{item.start - start}:{item.hash}".encode()
            hashes.append(self._digest(content))

    def _digest(self, content: bytes) -> bytes:
        if self.algorithm == "sha256":
            return hmac(self.secret, content, "sha256")
        return blake2b(content, digest_size=DIGEST_BYTES, key=self.secret).digest()


def _end(item: MediaItem) -> int:
    return item.start + item.length
