"""The connection between a server and engines on other machines: messages, keys, and what both sides must agree on.

One TCP port, at the server, carries everything. msgpack, no pickle. Both sides derive their CURVE keys (ZeroMQ, RFC 26) from
the key of the cluster (`config/parallel/cluster_key.py`): bytes are encrypted, and a peer without the key is refused before its first
message.

    node -> server    Hello, NodeState, Farewell; outputs of an engine
    server -> node    Welcome, Refusal, Farewell; requests for an engine; beats both ways
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import zmq
from msgspec import Struct
from zmq.utils import z85

from quire.config.engine import Resolved
from quire.config.parallel.parallel_config import ParallelConfig
from quire.engine.engine_state import EngineState
from quire.engine.node_fingerprint import node_fingerprint

BEAT_S = 1.0
GONE_S = 10.0
"""Without a message for so long, the other side is gone."""
MEET_S = 60.0
"""How long both sides wait for the first message of the other."""
MAX_MESSAGE_BYTES = 1 << 28
MAX_MESSAGES = 256  # messages of one socket that are passed on before another socket's messages


class Hello(Struct, array_like=True, tag="hello"):
    """A node offers its engines."""

    ranks: list[int]
    facts: dict[str, str]


class Welcome(Struct, array_like=True, tag="welcome"):
    """The server accepts the engines; it has `frontends` HTTP processes."""

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
    head = _head_decoder.decode(frames[0])
    if len(frames) < 2:
        raise IndexError("data without a frame")
    return head, frames[1:]


def ready(sockets: Sequence[zmq.Socket[bytes]], milliseconds: int) -> set[zmq.Socket[bytes]]:
    """Which of the sockets have a message, after at most that time."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    return {socket for socket, _ in poller.poll(milliseconds)}


def waiting(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """The messages that have come, up to MAX_MESSAGES."""
    found: list[list[bytes]] = []
    while len(found) < MAX_MESSAGES and socket.poll(0):
        found.append(socket.recv_multipart())
    return found


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
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)  # the requests that the scheduler admits limit the messages
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, 1)
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
    """What must be equal, so that an answer does not depend on the engine that gives it; memory and queues may differ.

    Raises:
        ModelNotFound: the checkpoint has no weights.
    """
    parallel = resolved.config.parallel
    sizes = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    return {
        **node_fingerprint(resolved, ("model", "structured", "lora", "speculation")),
        **{f"--{name.replace('_', '-')}": str(getattr(parallel, name)) for name in sizes},
        "the quantization": str(resolved.quantization),
        "the largest length (max_model_len)": str(resolved.max_model_len),
        "the format of the KV cache": resolved.kv_dtype,
    }
