"""Messages between the head of an engine, which schedules, and nodes, whose ranks compute: msgpack, one message a frame.

Knows the messages. A node has one connection of its own, and one for each of its ranks. After the first message, a rank's
connection carries the same messages as a local worker's pipe (`messages.py`). No torch here.

    to the head   NodeJoins   back   NodeAccepted, or NodeRefused; then NodeEnds, if the head ends as it should
                  RankJoins          nothing: the messages of a worker follow
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

MAX_BYTES = 1 << 20
"""The largest message."""


class NodeJoins(Struct, array_like=True, tag="node"):
    """A node offers to run its ranks."""

    node: int
    num_ranks: int
    fd: int  # of the memory that its ranks share
    host: str  # its address, for the other ranks
    head: tuple[str, int]  # where it found the head
    facts: dict[str, str]
    paths: dict[str, str]


class RankJoins(Struct, array_like=True, tag="rank"):
    """This connection belongs to a rank."""

    node: int
    index: int  # among the node's ranks


class NodeAccepted(Struct, array_like=True, tag="accepted"):
    first_rank: int


class NodeRefused(Struct, array_like=True, tag="refused"):
    text: str


class NodeEnds(Struct, array_like=True, tag="ends"):
    """The head was stopped: the node has nothing left to do."""


NodeMessage = NodeJoins | RankJoins | NodeAccepted | NodeRefused | NodeEnds

_decoder: msgspec.msgpack.Decoder[NodeMessage] = msgspec.msgpack.Decoder(NodeMessage)


def encode(message: NodeMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> NodeMessage:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(data)
