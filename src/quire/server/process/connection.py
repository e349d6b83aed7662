"""One HTTP connection: uvicorn's protocol, with limits on what a client may send, leave out or not read.

Every limit applies before any key is checked. The server calls `check` at least once a second for each connection, so
that a request needs no timer. Knows bytes, times and uvicorn. Does not know routes.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Any

from httptools import HttpParserError
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_BYTES = 64 << 10  # default limit of a request's line and headers together
MOST_HEADERS = 256
"""Headers of one request. Each costs about 130 bytes besides its own: without a limit, 64 KiB of head take 8 MiB."""
MOST_PIPELINED = 16
"""Requests that may wait after the running one. Few clients pipeline at all, and each waiting request has a head."""
LINGER_S = 5.0
"""How long to read and drop the rest of a body after its request was answered. Closing a socket with unread bytes
resets it, and the client may lose the answer.
"""

BAD_REQUEST = b"Invalid HTTP request received."


class PipelineFlow(FlowControl):
    """Reads nothing more while requests wait in the pipeline, even if the running one needs its body."""

    def __init__(self, transport: asyncio.Transport, pipeline: deque[Any]):
        super().__init__(transport)
        self.pipeline = pipeline

    def resume_reading(self) -> None:
        if not self.pipeline:
            super().resume_reading()


class LingeringTransport:
    """The transport of a request with an incomplete body: `close` waits for the rest of the body."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, connection: Connection):
        self.write, self.is_closing = connection.transport.write, connection.transport.is_closing
        self.close = connection.linger


class Connection(HttpToolsProtocol):
    """A connection whose client cannot occupy memory or a descriptor for longer than the limits allow."""

    head_bytes = HEAD_BYTES
    receive_timeout = 0.0
    """Seconds for a head, from the opening of the connection or from the head's first byte; 0: no limit."""
    send_timeout = 0.0
    """Seconds in which the client must read some of what was written; 0: no limit."""
    waiting: dict[Connection, None] | None = None
    """Connections without a request, oldest first, shared by a whole server, which may close them to make room."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PipelineFlow(transport, self.pipeline)
        self.cycles: deque[RequestResponseCycle] = deque()
        """Requests without a complete answer; the first one runs."""
        self.keeps_alive = True  # as the newest request asks
        self.head_seen = self.headers_seen = 0
        self.moved = False  # the bytes just received completed something
        self.stuck_bytes = 0  # bytes since something was completed
        self.idle = False  # answered, and no byte received since
        self.deaf = False  # what is received is no longer parsed
        self.unsent, self.unsent_since = 0, 0.0
        self.due = self._due(self.receive_timeout)
        self._wait(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(False)
        self.pipeline.clear()
        for cycle in self.cycles:  # uvicorn notifies only the newest
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    # -- in -------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        if self.idle:
            self.idle, self.due = False, self._due(self.receive_timeout)
        self.moved = False
        super().data_received(data)
        # The parser buffers a header or trailer without end, and httptools counts none of it.
        self.stuck_bytes = 0 if self.moved else self.stuck_bytes + len(data)
        if self.stuck_bytes > self.head_bytes and not self.deaf:
            self.send_400_response(BAD_REQUEST.decode())

    def on_message_begin(self) -> None:
        self.moved = True
        self.head_seen = self.headers_seen = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        self.headers_seen += 1
        if self.headers_seen > MOST_HEADERS:
            raise HttpParserError(f"the request has more than {MOST_HEADERS} headers")
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self.head_seen += size
        if self.head_seen > self.head_bytes:
            raise HttpParserError(
                f"the request line and headers are longer than {self.head_bytes} bytes (--h11-max-incomplete-event-size)"
            )

    def on_headers_complete(self) -> None:
        self.moved = True
        if len(self.pipeline) >= MOST_PIPELINED:
            raise HttpParserError(
                f"more than {MOST_PIPELINED} pipelined requests are waiting on this connection"
            )
        self.due = math.inf
        self._wait(False)
        super().on_headers_complete()
        if self._becomes_websocket():
            return  # uvicorn gives the connection to another protocol when the head is parsed
        cycle = self.cycle
        self.cycles.append(cycle)
        # If the answer is sent before the body is complete, it has `Connection: close`, and the rest is dropped.
        self.keeps_alive, cycle.keep_alive = cycle.keep_alive, False
        cycle.transport = LingeringTransport(self)  # type: ignore[assignment]

    def _becomes_websocket(self) -> bool:
        return bool(self.parser.should_upgrade() and self._should_upgrade())

    def on_body(self, body: bytes) -> None:
        self.moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.moved = True
        if self._becomes_websocket():
            return
        cycle = self.cycle
        cycle.transport = self.transport
        if not cycle.response_started:
            cycle.keep_alive = self.keeps_alive
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not HTTP, or too much of it. Requests before it are answered if possible."""
        self.deaf = True
        running = self.cycles[0] if self.cycles else None
        if running is None or (running.more_body and not running.response_started):
            head = [b"HTTP/1.1 400 Bad Request\r\n"]
            head += [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]  # fmt: skip
            head.append(b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n")
            head.append(b"content-length: %d\r\n\r\n%s" % (len(msg), msg.encode("ascii")))
            self.transport.write(b"".join(head))
            self._abandon()
            self.linger()
        elif running.more_body:
            self.transport.close()  # its body cannot be completed, and its answer has begun
        else:
            self.pipeline.clear()
            while len(self.cycles) > 1:
                self.cycles.pop()
            self.cycle, running.keep_alive = running, False

    def _abandon(self) -> None:
        """Drop the requests: their endpoints see a disconnected client."""
        for cycle in self.cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self.cycles.clear()

    # -- out ------------------------------------------------------------------------------------
    def on_response_complete(self) -> None:
        if self.cycles:
            self.cycles.popleft()
        super().on_response_complete()
        self.flow.resume_reading()  # unless requests wait
        if self.pipeline:
            self.flow.pause_reading()
        if not self.cycles and not self.deaf:
            self.idle = True  # uvicorn's keep-alive timer runs until the next byte
            self._wait(True)

    def linger(self) -> None:
        """Close after the client has read the answer or had time for it."""
        self.deaf = True
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.due = min(self.due, self._due(LINGER_S))
        self._wait(True)
        self.flow.resume_reading()

    def shutdown(self) -> None:
        self.keeps_alive = False
        super().shutdown()

    # -- time -----------------------------------------------------------------------------------
    def check(self, now: float) -> None:
        """Close the connection if a limit has passed: for what it must receive, or for what the client must read."""
        if now >= self.due:
            self.due = math.inf
            self.transport.close()
        if not self.send_timeout:
            return
        # Unsent bytes that stay the same show that the client reads nothing, but only if nothing more is written.
        if not (self.flow.write_paused or not self.cycles or self.transport.is_closing()):
            self.unsent = 0
            return
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self.unsent:
            self.unsent, self.unsent_since = unsent, now
        elif now - self.unsent_since >= self.send_timeout:
            self.transport.abort()

    def _due(self, seconds: float) -> float:
        return self.loop.time() + seconds if seconds else math.inf

    def _wait(self, waits: bool) -> None:
        if self.waiting is not None:
            self.waiting.pop(self, None)
            if waits:
                self.waiting[self] = None
