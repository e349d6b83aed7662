"""Both ends of the sockets between frontends and one process of an engine, in the process's folder.

    down       all frontends -> the engine, which binds it
    up-N       the engine -> frontend N, which binds it

Knows the files. Does not know the messages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    # the number of messages is limited by the requests that the scheduler admits
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


class EngineSockets:
    """The ends of frontend `client`."""

    def __init__(self, context: zmq.Context[Any], folder: Path, client: int):
        self.down, self.up = _socket(context, zmq.PUSH), _socket(context, zmq.PULL)
        folder.mkdir(exist_ok=True)
        self.down.connect(f"ipc://{folder}/down")
        self.up.bind(f"ipc://{folder}/up-{client}")

    def close(self) -> None:
        self.down.close()
        self.up.close()


class FrontendSockets:
    """The ends of the engine, for `frontends` frontends."""

    def __init__(self, context: zmq.Context[Any], folder: Path, frontends: int):
        self.down = _socket(context, zmq.PULL)
        self.up = [_socket(context, zmq.PUSH) for _ in range(frontends)]
        folder.mkdir(exist_ok=True)
        self.down.bind(f"ipc://{folder}/down")
        for number, socket in enumerate(self.up):
            socket.connect(f"ipc://{folder}/up-{number}")

    def close(self) -> None:
        for socket in (self.down, *self.up):
            socket.close()
