"""Names of pictures and sound in the engine: requests of other salts, so of other tenants, share nothing that is computed from them.

Knows digests. Does not know how pictures are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from quire.protocol.media import KINDS
from quire.protocol.request import MediaItem
from quire.protocol.sound import SOUND

KEPT_BY_WORKERS = (*KINDS, SOUND)


def salted(media: Sequence[MediaItem], salt: str) -> list[MediaItem]:
    """The items of a request with this salt; the hashes of pictures and sound depend on it, because workers keep rows by hash."""
    return [
        msgspec.structs.replace(item, hash=_salted(item.hash, salt))
        if item.kind in KEPT_BY_WORKERS
        else item
        for item in media
    ]


def _salted(digest: str, salt: str) -> str:
    return blake2b(f"{digest}:{salt}".encode(), digest_size=20).hexdigest()
