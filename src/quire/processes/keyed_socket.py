"""TCP connections between machines whose processes have the same key.

Each end proves by HMAC-SHA256 over two fresh random numbers that it has the key; the key itself is never sent. Whatever
else connects is refused. Nothing is encrypted. Knows addresses, deadlines and that proof. Does not know the messages.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from quire.errors import ConfigError, StartupError
from quire.processes.isolated_child import ProcessEnded, receive, send
from quire.processes.port_holder import port_holder

GREETING = b"quire cluster 1 "
NONCE_BYTES = 32
OTHER_KEY = b"other key"
PROOF_S = 5.0  # how long a peer may take to prove its key
AGAIN_S = 0.5  # between two attempts to connect
SILENT_S = 20  # a peer that is silent for so long at TCP's level is gone

_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class KeyRefused(Exception):
    """The peer does not have the key."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at this address only; port 0: any free one.

    Raises:
        ConfigError: the address is taken, or not one of this machine.
    """
    listener = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as why:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {why.strerror or why}{port_holder(port)}; --master-addr on machine 0, and"
            " QUIRE_HOST_IP on each, must be an address of that machine, and no other process may use --master-port"
        ) from None
    return listener


def accept(peer: socket.socket, keys: Sequence[bytes]) -> tuple[Connection, int]:
    """Let a peer prove that it has one of the keys. Returns the connection, and which key.

    Raises:
        KeyRefused: it does not prove that in time. The socket is closed.
    """
    until, own = time.monotonic() + PROOF_S, secrets.token_bytes(NONCE_BYTES)
    try:
        send(peer, GREETING + own, until)
        answer = receive(peer, until, 2 * NONCE_BYTES)
        nonces, proof = own + answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        for number, key in enumerate(keys):
            if hmac.compare_digest(proof, _proof(key, b"client", nonces)):
                send(peer, _proof(key, b"server", nonces), until)
                return _connection(peer), number
        send(peer, OTHER_KEY, until)
        raise KeyRefused("it has another key")
    except ProcessEnded as why:
        raise KeyRefused(f"it did not prove a key: {why}") from None
    finally:
        peer.close()


def connect(host: str, port: int, key: bytes, seconds: float) -> Connection:
    """Connect to a process with the same key; again and again, until one listens.

    Raises:
        StartupError: none listened within `seconds`, or it has another key.
    """
    began, last = time.monotonic(), "no answer"
    until = began + seconds
    while (now := time.monotonic()) < until:
        try:
            peer = socket.create_connection((host, port), timeout=min(PROOF_S, until - now))
        except OSError as why:
            last = why.strerror or str(why)
        else:
            try:
                return prove(peer, key)
            except ProcessEnded as why:
                last = f"no Quire process answers there: {why}"
            except KeyRefused:
                raise StartupError(
                    f"the process at {host}:{port} has another key: QUIRE_CLUSTER_KEY_FILE must name the same key on all"
                    " machines"
                ) from None
        time.sleep(min(AGAIN_S, max(until - time.monotonic(), 0)))
    raise StartupError(
        f"could not connect to {host}:{port} within {time.monotonic() - began:.0f} s: {last}"
    )


def prove(peer: socket.socket, key: bytes) -> Connection:
    """Prove the key to a process that called `accept`. The socket is closed in any case.

    Raises:
        KeyRefused: the process has another key.
        ProcessEnded: it is no such process, or has ended.
    """
    until, own = time.monotonic() + PROOF_S, secrets.token_bytes(NONCE_BYTES)
    try:
        greeting = receive(peer, until, len(GREETING) + NONCE_BYTES)
        if not greeting.startswith(GREETING) or len(greeting) != len(GREETING) + NONCE_BYTES:
            raise ProcessEnded("another protocol")
        nonces = bytes(greeting[len(GREETING) :]) + own
        send(peer, own + _proof(key, b"client", nonces), until)
        answer = receive(peer, until, NONCE_BYTES)
        if not hmac.compare_digest(answer, _proof(key, b"server", nonces)):
            raise KeyRefused
        return _connection(peer)
    finally:
        peer.close()


@contextmanager
def socket_of(connection: Connection) -> Iterator[socket.socket]:
    """The connection's socket, which stays open. Raises OSError: the connection is closed."""
    end = socket.socket(fileno=connection.fileno())
    try:
        yield end
    finally:
        end.detach()


def address_of(connection: Connection, *, peer: bool = False) -> str:
    """This end's address, or the peer's."""
    with socket_of(connection) as end:
        return str((end.getpeername() if peer else end.getsockname())[0])


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, side + nonces, "sha256").digest()


def _connection(peer: socket.socket) -> Connection:
    """The socket as a blocking connection that breaks when the other machine is gone."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", SILENT_S * 1000)):
        if hasattr(socket, name):  # Linux
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return Connection(peer.detach())
