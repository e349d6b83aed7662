"""Wire 1, down: what the front room asks of the engine.

Knows token ids, sampling parameters and names. Does not know text, templates, blocks or devices.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct

from quire.protocol.output import FinishReason
from quire.protocol.sampling_params import SamplingParams


class MediaItem(Struct, array_like=True, omit_defaults=True, gc=False):
    """One picture, sound or video whose placeholder tokens stand in the prompt."""

    hash: str
    kind: str
    start: int  # first placeholder token
    length: int  # how many placeholder tokens
    data: bytes = b""


class EngineRequest(Struct, array_like=True, omit_defaults=True, gc=False, tag="request"):
    """One generation. `params.n` is already 1: the front room fans out (`frontend/parallel_sampling.py`)."""

    id: str
    tokens: list[int]  # media placeholders already expanded
    params: SamplingParams
    arrived: float = 0.0  # seconds, time.time()
    client: int = 0  # which API process is answered
    priority: int = 0  # lower is more important
    adapter: str | None = None
    media: list[MediaItem] = []
    salt: str = ""  # prefix-cache isolation: only equal salts share blocks
    tenant: str = ""  # who asks: requests of one tenant share its part of the engine
    extras: dict[str, Any] = {}  # "transfer", "trace", ...: read by that feature and nobody else
    inner: bool = False  # part of a larger one, whose end its front room counts (engine/rpc.py)


class Abort(Struct, array_like=True, omit_defaults=True, gc=False, tag="abort"):
    """These end here and now. `why`: how their users were told that they ended."""

    ids: list[str]
    why: FinishReason = "abort"


class Call(Struct, array_like=True, omit_defaults=True, gc=False, tag="call"):
    """A named function of the engine (`engine/rpc.py`), answered by one `Reply` of the same id."""

    id: int
    name: str
    args: list[Any] = []
    client: int = 0


ToEngine = EngineRequest | Abort | Call


class RequestHead(Struct, array_like=True, gc=False, tag="request"):
    """What of an EngineRequest is needed to answer it. It can be decoded where the rest cannot."""

    id: str
    tokens: Raw = Raw()
    params: Raw = Raw()
    arrived: Raw = Raw()
    client: int = 0


class CallHead(Struct, array_like=True, gc=False, tag="call"):
    """The same of a Call."""

    id: int
    name: str
    args: Raw = Raw()
    client: int = 0


Head = RequestHead | CallHead
