"""ProcessClient without a process: what it does when its engine is replaced, told by the state file alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from test_client import make

from quire.engine.core import EngineCore
from quire.engine.host import Condition, State
from quire.engine.process import Link, Stop, stop
from quire.engine.remote import ProcessClient
from quire.errors import ValidationError
from quire.protocol.output import EngineOutput
from quire.protocol.params import SamplingParams
from quire.protocol.request import Abort, Call, EngineRequest, ToEngine


class Place:
    """A host's folder, and the engine's end of the sockets of one generation."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.numbers = itertools.count(1)

    def publish(self, generation: int, condition: Condition, error: str = "") -> None:
        new = self.folder / f"new-{next(self.numbers)}"
        new.write_bytes(msgspec.msgpack.encode(State(generation, condition, error=error)))
        new.replace(self.folder / "state")

    def heard(self, generation: int, count: int) -> list[ToEngine]:
        """The first so many messages that an engine of this generation is sent."""
        socket = self.context.socket(zmq.PULL)
        socket.bind(f"ipc://{self.folder}/{generation}/down")
        try:
            return [msgspec.msgpack.decode(socket.recv(), type=ToEngine) for _ in range(count)]
        finally:
            socket.close(linger=0)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    made.publish(1, "ready")
    yield made
    made.context.destroy(linger=0)


def ask(client: ProcessClient, *ids: str) -> None:
    for id in ids:
        client.submit(EngineRequest(id, [1], SamplingParams(max_tokens=2)))


def test_the_next_engine_gets_what_waits_and_not_what_was_given_up(place: Place) -> None:
    """(Nobody read it, and it ran to its end.)"""
    client = ProcessClient(make().resolved, place.folder)
    ask(client, "left", "kept")
    client.abort(["left"])
    place.publish(2, "restarting", error="struck down")
    assert client.outputs() == [EngineOutput("left", [], "abort")]
    [again] = place.heard(2, 1)
    assert isinstance(again, EngineRequest)
    assert again.id == "kept"
    # It is sent once more, and no further.
    place.publish(3, "restarting", error="struck down")
    [lost] = client.outputs()
    assert (lost.id, lost.finish) == ("kept", "error")
    client.close()


def test_an_abort_goes_to_the_engine_that_has_the_request(place: Place) -> None:
    client = ProcessClient(make().resolved, place.folder)
    ask(client, "a")
    client.abort(["a", "unknown"])
    [asked, abort] = place.heard(1, 2)
    assert isinstance(asked, EngineRequest)
    assert abort == Abort(["a", "unknown"])
    client.close()


def test_being_told_to_stop_is_no_failure_of_a_function() -> None:
    """(It counted as one, and the process went on until it was killed.)"""
    core: EngineCore = make().core
    core.functions["busy"] = lambda: stop(0, None)
    core.inbox.put(Call(1, "busy", []))
    with pytest.raises(Stop):
        core.receive(block=False)


def test_a_request_that_cannot_be_sent_is_refused_and_forgotten(place: Place) -> None:
    """(It was kept for ever, and sending it again ended the thread that reads outputs.)"""
    client = ProcessClient(make().resolved, place.folder)
    for value in (1 << 64, object(), "\ud800"):
        params = SamplingParams(max_tokens=2).settled(extra_args={"a": value})
        with pytest.raises(ValidationError, match="cannot be sent"):
            client.submit(EngineRequest("bad", [1], params))
    assert not client._mine
    ask(client, "good")
    place.publish(2, "restarting", error="struck down")
    client._receive(1)
    [again] = place.heard(2, 1)
    assert isinstance(again, EngineRequest)
    assert again.id == "good"
    client.close()


def test_a_request_that_cannot_be_sent_again_fails_alone(place: Place) -> None:
    client = ProcessClient(make().resolved, place.folder)
    ask(client, "spoilt", "good")
    client._mine["spoilt"].request.tokens.append(1 << 64)
    place.publish(2, "restarting", error="struck down")
    [failed] = client.outputs()
    assert (failed.id, failed.finish, failed.error_kind) == ("spoilt", "error", "invalid")
    [again] = place.heard(2, 1)
    assert isinstance(again, EngineRequest)
    assert again.id == "good"
    client.close()


class Socket:
    """Gives messages, then ends the reading thread."""

    def __init__(self, *messages: bytes):
        self.messages = list(messages)

    def recv(self) -> bytes:
        if not self.messages:
            raise StopIteration
        return self.messages.pop(0)


def test_what_the_engine_cannot_decode_is_answered() -> None:
    """(It was logged and dropped: the client waited for ever, and /health said 200.)"""
    core: EngineCore = make().core
    encode = msgspec.msgpack.encode
    good = EngineRequest("good", [1, 2], SamplingParams(max_tokens=1))
    link = Link.__new__(Link)
    link.down = Socket(
        encode(["request", "wrong", [1], {"top_p": 5}, 0.0, 3]),
        b"\x95\xa7request\xa4deep\x91\x01" + b"\x91" * 5000 + b"\x01" + encode(0.0),
        encode(["call", 7, "stats", {"no": "list"}, 2]),
        encode(["abort", 5]),
        b"\xc1 no message at all",
        encode(good),
    )
    with pytest.raises(StopIteration):
        link.read_into(core)
    found = core.receive(block=False)
    assert [(type(one).__name__, one.id, one.client) for one in found] == [
        ("EngineOutput", "wrong", 3), ("Reply", 7, 2),
    ]  # fmt: skip
    assert {one.finish for one in found if isinstance(one, EngineOutput)} == {"error"}
    assert all("could not decode" in (one.error or "") for one in found)
    assert list(core.scheduler.requests) == ["good"]
