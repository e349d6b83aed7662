"""The connection between a server and engines on other machines: messages, keys, and what both sides must agree on.

One TCP port, at the server, carries everything. msgpack, no pickle. Both sides derive their CURVE keys (ZeroMQ, RFC 26) from
the key of the cluster (`config/cluster_key.py`): bytes are encrypted, and a peer without the key is refused before its first
message. Only a loopback address needs no key.

    node -> server    Hello, NodeState, Farewell; outputs of an engine
    server -> node    Welcome, Refusal, Farewell; requests for an engine; beats both ways
"""

from __future__ import annotations

from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import Struct
from zmq.utils import z85

from quire.config.engine import Resolved
from quire.config.parallel import ParallelConfig
from quire.engine.shared_state import EngineState
from quire.version import __version__

BEAT_S = 1.0
GONE_S = 10.0
"""Without a message for so long, the other side is gone."""
MEET_S = 60.0
"""How long both sides wait for the first message of the other."""
MOST_BYTES = 1 << 28


class Hello(Struct, array_like=True, tag="hello"):
    """A node offers its engines."""

    ranks: list[int]
    facts: dict[str, str]


class Welcome(Struct, array_like=True, tag="welcome"):
    """The server takes them; it has so many frontends."""

    frontends: int


class Refusal(Struct, array_like=True, tag="refusal"):
    reason: str


class NodeState(Struct, array_like=True, tag="state"):
    """The state of one engine of a node."""

    rank: int
    state: EngineState


class Farewell(Struct, array_like=True, tag="farewell"):
    """One side ends."""


class LinkBeat(Struct, array_like=True, tag="beat"):
    """One side lives."""


LinkMessage = Hello | Welcome | Refusal | NodeState | Farewell | LinkBeat
_decoder = msgspec.msgpack.Decoder(LinkMessage)


class DataHead(Struct, array_like=True, frozen=True):
    """The first frame of what goes from or to an engine."""

    rank: int
    epoch: int
    """The number of the engine's process at the node."""
    client: int = 0
    """The frontend that gets it."""


_head_decoder = msgspec.msgpack.Decoder(DataHead)


def control(message: LinkMessage) -> list[bytes]:
    """Frames of a message of the link itself: the first one is empty."""
    return [b"", msgspec.msgpack.encode(message)]


def data(head: DataHead, frames: list[Any]) -> list[Any]:
    return [msgspec.msgpack.encode(head), *frames]


def read(frames: list[bytes]) -> LinkMessage | tuple[DataHead, list[bytes]]:
    """Raises msgspec.DecodeError, IndexError: the frames are not of this protocol."""
    if not frames[0]:
        message: LinkMessage = _decoder.decode(frames[1])
        return message
    return _head_decoder.decode(frames[0]), frames[1:]


# -- keys -----------------------------------------------------------------------------------------
LOCAL = "127.0.0.1"


def endpoint(parallel: ParallelConfig) -> str:
    """Where the server listens."""
    address = parallel.data_parallel_address or LOCAL
    shown = f"[{address}]" if ":" in address else address
    return f"tcp://{shown}:{parallel.data_parallel_rpc_port}"


def key_pair(secret: bytes, side: str) -> tuple[bytes, bytes]:
    """(public, secret) of one side, derived from the cluster's secret; in Z85."""
    own = z85.encode(blake2b(secret, digest_size=32, person=f"quire-{side}".encode()).digest())
    return zmq.curve_public(own), own


def secured(socket: zmq.Socket[bytes], secret: bytes, is_server: bool) -> None:
    """Set limits and keys of a socket, before it binds or connects."""
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)  # the requests that the scheduler admits limit the messages
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, 1)
    if not secret:
        return
    server, client = key_pair(secret, "server"), key_pair(secret, "node")
    socket.curve_publickey, socket.curve_secretkey = server if is_server else client
    if is_server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = server[0]


class NodeKeys:
    """Accepts the key of nodes, for pyzmq's authenticator."""

    def __init__(self, secret: bytes):
        self._public = key_pair(secret, "node")[0]

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


# -- what both sides must have in common ------------------------------------------------------------
def facts_of(resolved: Resolved) -> dict[str, str]:
    """What must be equal, so that an answer does not depend on the engine that gives it."""
    config, parallel = resolved.config, resolved.config.parallel
    return {
        "version": __version__,
        "checkpoint": checkpoint_digest(resolved),
        "data_parallel_size": str(parallel.data_parallel_size),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "dtype": resolved.dtype,
        "quantization": str(resolved.quantization),
        "max_model_len": str(resolved.max_model_len),
        "kv_cache_dtype": resolved.kv_dtype,
        "enable_lora": str(config.lora.enable_lora),
    }


def checkpoint_digest(resolved: Resolved) -> str:
    """Of the model's configuration, and of the names and sizes of its files."""
    files = sorted((one.name, one.stat().st_size) for one in Path(resolved.path).iterdir() if one.is_file())  # fmt: skip
    return sha256(repr((sorted(resolved.hf_config.items(), key=str), files)).encode()).hexdigest()[:12]  # fmt: skip


def difference(here: dict[str, str], there: dict[str, str]) -> str:
    """What differs, with both values; "" if nothing does."""
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return "; ".join(
        f"{name} is {here.get(name)} at the server and {there.get(name)} at the node"
        for name in names
    )
