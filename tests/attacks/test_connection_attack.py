"""Connections before any key is checked: pipelines, endless heads, bodies that never arrive (H1, L4, L7)."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from attacked_server import TEXT, AttackedServer, note, together
from conftest import Start

KEY = "k-of-the-attacks"
MIB = 1 << 20


@pytest.fixture
def guarded(started: Start) -> AttackedServer:
    return started("--api-key", KEY, key=KEY)


def poured(own: socket.socket, piece: bytes, seconds: float, most: int = 64 * MIB) -> int:
    """Bytes that the server took; this client reads answers meanwhile."""
    end, sent = time.monotonic() + seconds, 0
    own.setblocking(False)
    while time.monotonic() < end and sent < most:
        readable, writable, _ = select.select([own], [own], [], 0.2)
        try:
            if readable and not own.recv(MIB):
                break
            if writable:
                sent += own.send(piece)
        except BlockingIOError:
            continue
        except ConnectionError:
            break
    return sent


def closed_within(own: socket.socket, seconds: float) -> float | None:
    """Seconds until the server closed the connection; None: it did not."""
    begun = time.monotonic()
    while (left := begun + seconds - time.monotonic()) > 0:
        own.settimeout(left)
        try:
            if not own.recv(MIB):
                return time.monotonic() - begun
        except TimeoutError:
            return None
        except ConnectionError:
            return time.monotonic() - begun
    return None


@pytest.mark.attack
@pytest.mark.parametrize("line", [b"GET /x", b"GET /health", b"POST /v1/completions"], ids=["x", "health", "post"])  # fmt: skip
def test_a_pipeline_uses_bounded_memory(guarded: AttackedServer, line: bytes):
    request = line + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    with guarded.attack(seconds=60) as measured:
        with guarded.connection() as own:
            sent = poured(own, request * 4000, 20)
        note(f"{sent / MIB:.1f} MiB sent")
    measured.check(http_mib=100)


@pytest.mark.attack
def test_a_pipeline_with_unread_answers_uses_bounded_memory(guarded: AttackedServer):
    with (
        guarded.attack(seconds=60) as measured,
        contextlib.suppress(OSError),
        guarded.connection(timeout=5) as own,
    ):
        for _ in range(400):
            own.sendall(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
    measured.check(http_mib=100)


@pytest.mark.attack
@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1\r\nX: ", b"GET /", b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;"],
    ids=["value", "path", "name", "chunk"],
)  # fmt: skip
def test_a_head_without_end_is_counted(guarded: AttackedServer, head: bytes):
    def attack(_: int) -> int:
        with guarded.connection() as own:
            own.sendall(head)
            return poured(own, b"a" * 65536, 7, 200 * MIB)

    with guarded.attack(seconds=60) as measured:
        sent = together(20, attack)
        note(f"at most {max(sent) / MIB:.2f} MiB of one head taken")
    measured.check(http_mib=100)
    assert max(sent) < 12 * MIB  # besides what socket buffers take


SLOW = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
    "a lone CRLF": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n",
    "an unread 401": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n" + b" " * 99,
}  # fmt: skip


@pytest.mark.attack
def test_every_idle_connection_is_closed(guarded: AttackedServer):
    """After an answered request, the client sends one byte, or none, and then nothing more."""
    with guarded.attack(seconds=240) as measured:

        def attack(number: int) -> float | None:
            name = list(SLOW)[number]
            with guarded.connection() as own:
                own.sendall(SLOW[name])
                time.sleep(1)
                with contextlib.suppress(OSError):
                    if name in ("a lone CRLF", "an unread 401"):
                        own.sendall(b"\r\n" if name == "a lone CRLF" else b" ")
                return closed_within(own, 140)

        found = dict(zip(SLOW, together(len(SLOW), attack, 200), strict=True))
        note(f"closed after {found}")
        assert all(isinstance(after, float) for after in found.values()), found
    measured.check()


@pytest.mark.attack
def test_a_body_that_drips_has_a_total(started: Start):
    """Each byte comes before the timeout, so that only a limit on the whole body ends it."""
    server = started("--receive-timeout", "2")
    with server.attack(seconds=150) as measured:
        with server.connection() as own:
            own.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{"
            )
            begun = time.monotonic()
            while time.monotonic() - begun < 120:
                try:
                    own.sendall(b" ")
                except OSError:
                    break
                if select.select([own], [], [], 1.0)[0]:
                    break
            took = time.monotonic() - begun
        note(f"ended after {took:.0f} s")
        assert took < 110
    measured.check()


@contextlib.contextmanager
def held(server: AttackedServer, count: int) -> Iterator[int]:
    """Open idle connections; yields how many were opened."""
    with contextlib.ExitStack() as stack:
        made = 0
        for _ in range(count):
            try:
                stack.enter_context(server.connection(timeout=2))
                made += 1
            except OSError:
                break
        yield made


@pytest.mark.attack
def test_a_server_without_descriptors_outlives_its_engine(started: Start):
    few = ("sh", "-c", 'ulimit -n 160; exec "$0" "$@"')
    guarded = started("--api-key", KEY, key=KEY, before=few)
    with held(guarded, 300) as made:
        note(f"{made} connections")
        engine = guarded.engine()
        guarded.signal_engine(9)
        time.sleep(10)
    end = time.monotonic() + 90
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError, AssertionError):
            if guarded.innocent() == guarded.expected:
                break
        time.sleep(1)
    assert guarded.innocent() == guarded.expected
    assert guarded.engine() != engine


def test_a_short_pipeline_is_closed_or_answered(server: AttackedServer):
    with server.attack(seconds=30) as measured:
        with server.connection() as own:
            sent = poured(own, b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4000, 2, 4 * MIB)
        note(f"{sent} bytes taken")
        assert server.ask(TEXT, b"{").status_code == 400
    measured.check(http_mib=100)
