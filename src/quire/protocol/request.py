"""Engine protocol, frontend to engine: requests, aborts and calls.

Knows token ids, parameters and names. Does not know text, templates, blocks or devices.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct

from quire.protocol.output import FinishReason
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.sampling_params import SamplingParams

RequestParams = SamplingParams | PoolingParams


EMBEDDINGS = "embeddings:"
"""Begins the kind of an item whose data are the embeddings of its tokens; their dtype follows."""


class MediaItem(Struct, array_like=True, omit_defaults=True, gc=False):
    """One image, sound or video, or a part of a prompt that is embeddings. Its placeholder tokens are in the prompt.

    A request's items are in the order of their tokens, and share none.
    """

    hash: str  # of all that its embeddings depend on
    kind: str
    start: int  # first placeholder token
    length: int  # how many placeholder tokens
    data: bytes = b""


class EngineRequest(Struct, array_like=True, omit_defaults=True, gc=False, tag="request"):
    """One generation, or one prompt whose output is a tensor: `params` says which.

    `params.n` is already 1: `frontend/parallel_sampling.py` makes one request for each output.
    """

    id: str
    tokens: list[int]  # media placeholders already expanded
    params: RequestParams
    arrived: float = 0.0  # seconds, time.time()
    client: int = 0  # which frontend gets the outputs
    priority: int = 0  # a lower number is more important
    adapter: str | None = None
    media: list[MediaItem] = []
    salt: str = ""  # prefix-cache isolation: only equal salts share blocks
    # the owner of the API key: requests of one tenant share its part of the engine
    tenant: str = ""
    # part of a larger request, whose end its frontend counts (engine/rpc.py)
    is_subrequest: bool = False
    engine: int | None = None  # the data parallel rank of the engine that must serve it; None: any
    # data of features by their names, for their gates and hooks (engine/feature.py)
    extras: dict[str, bytes] = {}
    # states that the model's encoder makes of the request's other input; 0: the model has no cross attention
    num_encoder_tokens: int = 0
    # how many of `tokens` are the prompt, if an engine that died made the rest; 0: all
    num_prompt: int = 0
    deaths: int = 0  # how many engines may have died because of it
    # Its length after the step in which an engine died; 0: it did not run then.
    trial_length: int = 0

    @property
    def prompt_length(self) -> int:
        return self.num_prompt or len(self.tokens)


class Abort(Struct, array_like=True, omit_defaults=True, gc=False, tag="abort"):
    """End these requests now. `why`: the finish reason that their users got."""

    ids: list[str]
    why: FinishReason = "abort"


class Call(Struct, array_like=True, omit_defaults=True, gc=False, tag="call"):
    """Call a named function of the engine (`engine/rpc.py`). One `Reply` with the same id answers it."""

    id: int
    name: str
    args: list[Any] = []
    client: int = 0


ToEngine = EngineRequest | Abort | Call


class RequestHead(Struct, array_like=True, gc=False, tag="request"):
    """The fields of an EngineRequest that a reply to it needs. They can be decoded even if the rest cannot."""

    id: str
    tokens: Raw = Raw()
    params: Raw = Raw()
    arrived: Raw = Raw()
    client: int = 0


class CallHead(Struct, array_like=True, gc=False, tag="call"):
    """The same for a Call."""

    id: int
    name: str
    args: Raw = Raw()
    client: int = 0


Head = RequestHead | CallHead
