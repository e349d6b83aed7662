"""ProcessClient without a process: how it reacts when the state board says that its engine was replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from test_client import make

from quire.config.scheduler import SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.engine_main import FrontendLink, StopEngine, stop
from quire.engine.engine_state import ROOM, Condition, EngineState, StateBoard
from quire.engine.poison_requests import (
    FORGET_S,
    MAX_DIGESTS,
    Suspects,
    digest_of,
    digest_of_entered,
    short_form,
)
from quire.engine.process_client import ProcessClient
from quire.errors import EngineDelayed, QuireError, ValidationError
from quire.protocol.output import EngineOutput
from quire.protocol.plan import EnteredRow
from quire.protocol.request import Abort, Call, EngineRequest, ToEngine
from quire.protocol.sampling_params import SamplingParams


class Place:
    """A supervisor's folder and board, and the engine's end of the sockets of one epoch."""

    def __init__(self, folder: Path):
        self.folder, self.board = folder, StateBoard()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def publish(self, epoch: int, condition: Condition, **more: Any) -> None:
        self.board.publish(EngineState(epoch, condition, **more))

    def client(self, resume: str = "off") -> ProcessClient:
        resolved = make().resolved
        config = replace(resolved.config, scheduler=SchedulerConfig(resume=resume))
        return ProcessClient(replace(resolved, config=config), self.folder, self.board)

    def heard(self, epoch: int, count: int) -> list[ToEngine]:
        """The first `count` messages sent to the engine of this epoch."""
        socket = self.context.socket(zmq.PULL)
        socket.bind(f"ipc://{self.folder}/{epoch}/down")
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
    made.board.close()


def ask(client: ProcessClient, *ids: str) -> None:
    for id in ids:
        client.submit(EngineRequest(id, [1], SamplingParams(max_tokens=2)))


def test_the_next_engine_gets_waiting_requests_without_aborted_ones(place: Place) -> None:
    """Regression: a request that its client had aborted was sent again, and ran to its end."""
    client = place.client()
    ask(client, "left", "kept")
    client.abort(["left"])
    place.publish(2, "restarting", error="struck down")
    assert client.outputs() == [EngineOutput("left", [], "abort")]
    [again] = place.heard(2, 1)
    assert isinstance(again, EngineRequest)
    assert again.id == "kept"
    # It is sent again only once.
    place.publish(3, "restarting", error="struck down")
    [lost] = client.outputs()
    assert (lost.id, lost.finish) == ("kept", "error")
    client.close()


def test_an_abort_is_sent_to_the_engine_of_its_request(place: Place) -> None:
    client = place.client()
    ask(client, "a")
    client.abort(["a", "unknown"])
    [asked, abort] = place.heard(1, 2)
    assert isinstance(asked, EngineRequest)
    assert abort == Abort(["a", "unknown"])
    client.close()


def test_a_shutdown_is_not_a_failed_call() -> None:
    """Regression: it was reported as an error, and the process continued until it was killed."""
    core: EngineCore = make().core
    core.functions["busy"] = lambda: stop(0, None)
    core.inbox.put(Call(1, "busy", []))
    with pytest.raises(StopEngine):
        core.receive(block=False)


def test_a_request_that_cannot_be_sent_is_refused_and_forgotten(place: Place) -> None:
    """Regression: the client kept it, and sending it again ended the thread that reads outputs."""
    client = place.client()
    for value in (1 << 64, object(), "\ud800"):
        params = SamplingParams(max_tokens=2).settled(extra_args={"a": value})
        with pytest.raises(ValidationError, match="cannot be sent"):
            client.submit(EngineRequest("bad", [1], params))
    assert not client._unfinished
    ask(client, "good")
    place.publish(2, "restarting", error="struck down")
    client._receive(1)
    [again] = place.heard(2, 1)
    assert isinstance(again, EngineRequest)
    assert again.id == "good"
    client.close()


@pytest.mark.parametrize("odd", [[b"\xc1\xc1"], [b"\x05"], [b""], [b"\x91\x91\xa6output", b"x"]])
def test_an_output_that_cannot_be_read_ends_the_requests_and_not_the_client(
    odd: list[bytes], place: Place
) -> None:
    """A node on another machine passes the messages on. The requests hung, and the thread had ended."""
    client = place.client()
    ask(client, "lost")
    up = place.context.socket(zmq.PUSH)
    up.connect(f"ipc://{place.folder}/1/up-0")
    up.send_multipart(odd)
    [lost] = client.outputs()
    assert (lost.id, lost.finish) == ("lost", "error")
    ask(client, "next")
    ended = EngineOutput("next", [7], "length")
    up.send(msgspec.msgpack.encode([ended]))
    assert client.outputs() == [ended]
    assert place.heard(1, 2)[1] == Abort(["lost"])
    client.close()


def test_a_request_that_cannot_be_resubmitted_fails_alone(place: Place) -> None:
    client = place.client()
    ask(client, "spoilt", "good")
    client._unfinished["spoilt"].request.tokens.append(1 << 64)
    place.publish(2, "restarting", error="struck down")
    [failed] = client.outputs()
    assert (failed.id, failed.finish, failed.error_kind) == ("spoilt", "error", "invalid")
    [again] = place.heard(2, 1)
    assert isinstance(again, EngineRequest)
    assert again.id == "good"
    client.close()


class Socket:
    """Returns the messages, then ends the reading thread."""

    def __init__(self, *messages: bytes):
        self.messages = list(messages)

    def recv(self) -> bytes:
        if not self.messages:
            raise StopIteration
        return self.messages.pop(0)


def test_undecodable_messages_are_answered() -> None:
    """Regression: it was logged and dropped; the client waited forever, and /health answered 200."""
    core: EngineCore = make().core
    encode = msgspec.msgpack.encode
    good = EngineRequest("good", [1, 2], SamplingParams(max_tokens=1))
    link = FrontendLink.__new__(FrontendLink)
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


# -- what died with the engine ----------------------------------------------------------------------
SECRET = "OSError: /srv/model: row 3 belongs to 'cmpl-of-another'"


def begun(client: ProcessClient, id: str) -> None:
    client._unfinished[id].has_started = True


def test_clients_get_an_incident_id_instead_of_the_cause(place: Place) -> None:
    """Regression: clients got the exception, with file names of this machine and ids of others' requests."""
    client = place.client()
    ask(client, "mine")
    begun(client, "mine")
    place.publish(2, "restarting", error=SECRET, incident="0badcafe", recorded=True)
    [ended] = client.outputs()
    assert ended.finish == "error"
    assert "0badcafe" in (ended.error or "")
    assert not set(SECRET.split()) & set((ended.error or "").split())
    client.close()


def test_requests_running_at_two_crashes_are_not_resubmitted(place: Place) -> None:
    client = place.client()
    for epoch in (2, 3):
        ask(client, "poison")
        begun(client, "poison")
        place.publish(epoch, "restarting", recorded=True, blamed=["poison"])
        assert [(one.id, one.finish) for one in client.outputs()] == [("poison", "error")]
    place.publish(3, "ready")
    with pytest.raises(ValidationError, match="died twice while this request ran"):
        ask(client, "under another name")
    client.submit(EngineRequest("other", [2], SamplingParams(max_tokens=2)))
    assert list(client._unfinished) == ["other"]
    client.close()


def test_requests_finished_between_two_crashes_are_not_suspects(place: Place) -> None:
    """A common prompt that may have run beside the one that killed the engine."""
    client = place.client()
    for epoch in (2, 3):
        ask(client, "hi")
        begun(client, "hi")
        known = digest_of(client._unfinished["hi"].request)
        poison = [known] if epoch == 3 else []
        place.publish(epoch, "restarting", recorded=True, poison=poison, blamed=["hi"])
        assert [(one.id, one.finish) for one in client.outputs()] == [("hi", "error")]
        ask(client, "again")
        client._handle([EngineOutput("again", [1], "length")])
        client.outputs()
    ask(client, "hi")
    client.close()


def test_requests_only_waiting_at_two_crashes_may_be_resubmitted(place: Place) -> None:
    client = place.client()
    ask(client, "waiting")
    place.publish(2, "restarting", recorded=True)
    client._receive(1)
    assert list(client._unfinished) == ["waiting"]
    place.publish(3, "restarting", recorded=True)
    [ended] = client.outputs()
    assert (ended.id, ended.finish) == ("waiting", "error")
    place.publish(3, "ready", recorded=True)
    ask(client, "again")
    client.close()


def test_without_a_recording_requests_present_at_two_crashes_are_suspects(place: Place) -> None:
    """Regression: a plan that could not be written was in no recording, and every new engine got its request."""
    client = place.client()
    ask(client, "prefill")
    place.publish(2, "restarting", recorded=False)
    client._receive(1)
    place.publish(3, "restarting", recorded=False)
    [ended] = client.outputs()
    assert (ended.id, ended.finish) == ("prefill", "error")
    with pytest.raises(ValidationError, match="died twice"):
        ask(client, "prefill")
    client.close()


def test_every_frontend_refuses_suspects_of_the_supervisor(place: Place) -> None:
    """Its deaths came from other frontends."""
    client = place.client()
    ask(client, "waiting", "begun")
    begun(client, "begun")
    known = digest_of(client._unfinished["waiting"].request)
    place.publish(2, "restarting", recorded=True, poison=[known])
    assert {one.id: one.finish for one in client.outputs()} == {
        "waiting": "error",
        "begun": "error",
    }
    with pytest.raises(ValidationError, match="died twice"):
        ask(client, "again")
    client.close()


def test_calls_do_not_wait_while_no_engine_is_starting(place: Place) -> None:
    client = place.client()
    ask(client, "waiting", "given up")
    client.abort(["given up"])
    place.publish(1, "delayed", error=SECRET, incident="0badcafe")
    ended = {one.id: one for one in client.outputs()}
    assert (ended["waiting"].finish, ended["waiting"].error_kind) == ("error", "overloaded")
    assert ended["given up"].finish == "abort"
    for use in (lambda: ask(client, "new"), lambda: client.call("stats"), client.check):
        with pytest.raises(EngineDelayed, match="0badcafe"):
            use()
    place.publish(2, "restarting")
    client._receive(1)
    ask(client, "new")
    assert list(client._unfinished) == ["new"]
    client.close()


def test_a_call_ends_when_the_engine_is_delayed(place: Place) -> None:
    client = place.client()
    before = client._receive

    def delayed(wait: int) -> None:
        place.publish(1, "delayed")
        before(wait)

    client._receive = delayed
    with pytest.raises(QuireError):
        client.call("stats")
    client.close()


# -- requests that go on ----------------------------------------------------------------------------
def one_that_ran(client: ProcessClient) -> None:
    client.submit(EngineRequest("a", [1, 2], SamplingParams(max_tokens=9, seed=5)))
    client._handle([EngineOutput("a", [7, 8])])
    client.outputs()


def test_a_request_goes_on_after_the_tokens_that_it_has(place: Place) -> None:
    client = place.client("always")
    one_that_ran(client)
    place.publish(2, "restarting", recorded=True, lost={"a": 5}, blamed=["a"])
    client._receive(1)
    [again] = place.heard(2, 1)
    assert isinstance(again, EngineRequest)
    assert (again.tokens, again.num_prompt, again.params.seed) == ([1, 2, 7, 8], 2, 5)
    assert (again.trial_length, again.deaths) == (6, 1)
    assert digest_of(again) == digest_of(EngineRequest("b", [1, 2], again.params))
    client._handle([EngineOutput("a", [9, 10, 11])])
    [output] = client.outputs()
    assert output.resumed  # these bits may differ, and its user must know
    client.batch_invariant = True
    client._handle([EngineOutput("a", [12], "length")])
    assert not client.outputs()[0].resumed
    assert not client._unfinished
    client.close()


@pytest.mark.parametrize(
    ("resume", "invariant", "goes_on"),
    [("always", False, True), ("exact", True, True), ("exact", False, False), ("off", True, False)],
)
def test_what_resume_means(resume: str, invariant: bool, goes_on: bool, place: Place) -> None:
    client = place.client(resume)
    client.batch_invariant = invariant
    one_that_ran(client)
    place.publish(2, "restarting", recorded=True, lost={"a": 4}, blamed=["a"])
    client._receive(1)
    assert [one.finish for one in client._outputs] == ([] if goes_on else ["error"])
    assert bool(client._unfinished) == goes_on
    client.close()


def test_a_request_blamed_for_four_deaths_ends_though_it_passed_each_trial(place: Place) -> None:
    client = place.client("always")
    one_that_ran(client)
    for epoch in (2, 3, 4):
        place.publish(epoch, "restarting", recorded=True, lost={"a": 9 * epoch}, blamed=["a"])
        client._receive(1)
        assert list(client._unfinished) == ["a"]
        client._handle([EngineOutput("a", [0] * 9 * epoch)])
        client.outputs()
    place.publish(5, "restarting", recorded=True, lost={"a": 99}, blamed=["a"])
    [ended] = client.outputs()
    assert (ended.id, ended.finish) == ("a", "error")
    client.close()


def test_deaths_that_follow_at_once_leave_nothing_unsent(place: Place) -> None:
    """What the board said of the first one is gone: any request may have run."""
    client = place.client("always")
    ask(client, "a")
    place.publish(2, "restarting", recorded=True, lost={"a": 1}, blamed=["a"])
    place.publish(3, "restarting", recorded=True)
    client._receive(1)
    [again] = place.heard(3, 1)
    assert isinstance(again, EngineRequest)
    assert (again.id, again.trial_length) == ("a", 2)
    client.close()


# -- digests ----------------------------------------------------------------------------------------
def test_equal_requests_have_equal_digests() -> None:
    params = SamplingParams(max_tokens=2, seed=1, prompt_logprobs=1)
    one = EngineRequest("a", [1, 2], params)
    again = EngineRequest("b", [1, 2], SamplingParams(max_tokens=2, seed=9))
    assert digest_of(one) == digest_of(again)
    entered = EnteredRow(0, "c", [1, 2, 77], 2, 0, [], params)
    assert digest_of_entered(entered) == digest_of(one)
    assert digest_of(EngineRequest("a", [1, 3], params)) != digest_of(one)
    other = EngineRequest("a", [1, 2], SamplingParams(max_tokens=3))
    assert digest_of(other) != digest_of(one)


def test_large_parameters_have_a_short_form_with_the_same_digest() -> None:
    ids = list(range(100_000))
    request = EngineRequest("a", [1], SamplingParams(allowed_token_ids=ids, temperature=0.5))
    short = short_form(request.params)
    assert len(msgspec.msgpack.encode(short)) < 1000
    assert (short.allowed_token_ids, short.temperature) == (None, 0.5)
    recorded = msgspec.msgpack.decode(msgspec.msgpack.encode(short), type=SamplingParams)
    assert digest_of(EngineRequest("b", [1], recorded)) == digest_of(request)
    other = EngineRequest("a", [1], SamplingParams(allowed_token_ids=ids[1:], temperature=0.5))
    assert digest_of(other) != digest_of(request)


def test_suspects_are_forgotten_and_bounded() -> None:
    now = 0.0
    suspects = Suspects(lambda: now)
    suspects.ran(["a", "b"])
    suspects.ran(["a", "a"])
    assert suspects.poison() == ["a"]
    now = FORGET_S + 1
    assert suspects.poison() == []
    suspects.ran(map(str, range(3 * MAX_DIGESTS)))
    suspects.ran(map(str, range(3 * MAX_DIGESTS)))
    assert len(suspects.poison()) <= MAX_DIGESTS


# -- the board --------------------------------------------------------------------------------------
def test_another_process_reads_the_state() -> None:
    board = StateBoard()
    reader = StateBoard(os.dup(board.fd))
    assert reader.read() == EngineState(1, "starting")
    state = EngineState(2, "restarting", error="x" * 1000, lost={str(n): n for n in range(1000)})
    board.publish(state)
    assert reader.read() == state
    assert reader.read() is reader.read()
    board._map[40] ^= 1  # a torn write
    board._map[0] += 1
    assert reader.read() == state
    board.publish(EngineState(3, "ready"))
    assert reader.read() == EngineState(3, "ready")
    for one in (board, reader):
        one.close()
        assert one.read() == EngineState(3, "ready")


def test_a_state_too_large_for_the_board_is_shortened() -> None:
    board = StateBoard()
    reader = StateBoard(os.dup(board.fd))
    board.publish(
        EngineState(
            2, "dead", error="e" * ROOM, lost={str(n): n for n in range(ROOM)}, recorded=True
        )
    )
    seen = reader.read()
    assert (seen.epoch, seen.condition, seen.lost, seen.recorded) == (2, "dead", {}, False)
    assert 0 < len(seen.error) < ROOM
    for one in (board, reader):
        one.close()
