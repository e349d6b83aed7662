"""WS /v1/realtime: the text of sound in pieces is the text of the same windows as files; errors, limits, lost connections."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import whisper_checkpoint as whisper
from sound_server import SoundServer, wav
from whisper_checkpoint import END

from quire.config.server import ServerConfig
from quire.server.audio import realtime
from quire.server.process import sockets

websockets = pytest.importorskip("websockets.sync.client")
InvalidStatus = pytest.importorskip("websockets.exceptions").InvalidStatus
RATE = 16_000
ONE, TWO = whisper.sound(1.3, 11), whisper.sound(1.1, 12)


@pytest.fixture(scope="module")
def server(whisper_path: str) -> Iterator[SoundServer]:
    made = SoundServer(whisper_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(server: SoundServer) -> Iterator[str]:
    """The URL of the application, which a thread serves on a real socket."""
    config = ServerConfig(host="127.0.0.1", port=0)
    listener = sockets.bind(config)
    http = sockets.http_server(server.app, config)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listener])))
    listener.listen()
    thread.start()
    yield f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/realtime"
    http.should_exit = True
    thread.join(60)
    listener.close()


class Live:
    """A client of a session."""

    def __init__(self, address: str, **options: Any):
        self.opened = websockets.connect(
            address, max_size=None, proxy=None, open_timeout=60, **options
        )
        self.socket = self.opened.__enter__()
        self.created = self.next()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.__exit__(None, None, None)

    def next(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.socket.recv(timeout=120))
        return found

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def begin(self, **more: Any) -> None:
        self.send("session.update", model="toy", **more)

    def append(self, samples: np.ndarray) -> None:
        data = as_pcm(samples).tobytes()
        self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    def commit(self, final: bool) -> None:
        self.send("input_audio_buffer.commit", final=final)

    def until_done(self) -> tuple[str, dict[str, Any]]:
        """(text of the deltas, the last event)"""
        text = ""
        while (event := self.next())["type"] == "transcription.delta":
            text += event["delta"]
        return text, event


def as_pcm(samples: np.ndarray) -> np.ndarray:
    return np.round(samples * 32767).astype("<i2")


def file(samples: np.ndarray) -> bytes:
    return wav((as_pcm(samples) / 32768).astype(np.float32))


def test_a_file_in_pieces_has_its_text(server: SoundServer, address: str) -> None:
    with Live(address) as live:
        assert live.created["type"] == "session.created"
        assert live.created["id"].startswith("sess-")
        live.begin(language="en")
        for start in range(0, len(ONE), 3001):
            live.append(ONE[start : start + 3001])
        live.commit(True)
        text, done = live.until_done()
        assert done["type"] == "transcription.done"
        assert done["text"] == text
        assert done["usage"]["completion_tokens"] > 5
        assert done["usage"]["total_tokens"] == sum(done["usage"][k] for k in ("prompt_tokens", "completion_tokens"))  # fmt: skip
        # another transcription in the same session
        live.append(TWO)
        live.commit(True)
        other, _ = live.until_done()
    expected = [server.json(file(one), language="en", temperature_increment_on_fallback=0)["text"] for one in (ONE, TWO)]  # fmt: skip
    assert [text.strip(), other.strip()] == expected
    assert expected[0]


def test_each_commit_writes_down_what_has_come(server: SoundServer, address: str) -> None:
    with Live(address) as live:
        live.begin(language="en")
        live.append(ONE)
        live.commit(False)
        first = ""
        while not first.strip():
            first += live.next()["delta"]
        live.append(TWO)
        live.commit(True)
        text, done = live.until_done()
    one = server.json(file(ONE), language="en", temperature_increment_on_fallback=0)["text"]
    carried = server.engine.tokenizer.encode(" " + one, False)  # type: ignore[union-attr]
    assert done["text"].startswith(one)
    assert done["text"] == first + text
    assert len(done["text"]) > len(one)
    assert all(token < END for token in carried)


def test_full_windows_are_written_down_without_a_commit(address: str) -> None:
    long = whisper.sound(5.3, 7)
    with Live(address) as live:
        live.begin(language="en")
        live.commit(False)
        live.append(long)
        assert live.next()["type"] == "transcription.delta"
        live.commit(True)
        _, done = live.until_done()
        assert len(done["text"]) > 20


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ("{", "invalid_json"), ("[]", "invalid_event"), ('{"type": 3}', "invalid_event"), ('{"type": "x"}', "unknown_event"),
        ('{"type": "input_audio_buffer.append", "audio": "AAAA"}', "model_not_validated"),
        ('{"type": "input_audio_buffer.commit"}', "model_not_validated"),
        ('{"type": "session.update"}', "invalid_event"), ('{"type": "session.update", "model": "other"}', "model_not_found"),
        ('{"type": "session.update", "model": "toy", "language": "xx"}', "invalid_event"),
    ],
)  # fmt: skip
def test_wrong_events_have_an_error_and_no_other_effect(
    address: str, event: str, code: str
) -> None:
    with Live(address) as live:
        live.socket.send(event)
        found = live.next()
        assert (found["type"], found["code"]) == ("error", code)
        assert found["error"]
        live.begin()
        live.append(ONE)
        live.commit(True)
        assert live.until_done()[1]["type"] == "transcription.done"


@pytest.mark.parametrize("audio", [None, 7, "", "?", "AAA", "AAAA" + "A"])
def test_wrong_sound(address: str, audio: Any) -> None:
    with Live(address) as live:
        live.begin()
        live.send("input_audio_buffer.append", audio=audio)
        assert live.next()["code"] == "invalid_audio"
        live.send("input_audio_buffer.commit", final="yes")
        assert live.next()["code"] == "invalid_event"


def test_the_queue_of_sound_is_bounded(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime, "MOST_PENDING_S", 3)
    with Live(address) as live:
        live.begin()
        live.append(np.zeros(3 * RATE))
        live.append(np.zeros(1))
        found = live.next()
        assert found["code"] == "invalid_audio"
        assert "3.0 s of sound wait already" in found["error"]


def test_a_window_that_cannot_be_written_down(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error, and the next transcription of the session is as before."""

    async def broken(*_: Any) -> None:
        raise RuntimeError("a secret of the server")

    with Live(address) as live:
        live.begin(language="en")
        with monkeypatch.context() as patch:
            patch.setattr(realtime.Transcription, "open", broken)
            live.append(ONE)
            live.commit(True)
            found = live.next()
        assert (found["type"], found["code"]) == ("error", "processing_error")
        assert "secret" not in found["error"]
        live.append(TWO)
        live.commit(True)
        text, done = live.until_done()
        assert done["text"] == text != ""


def test_commits_without_sound(address: str) -> None:
    with Live(address) as live:
        live.begin()
        live.commit(True)
        assert live.until_done()[1]["text"] == ""


def test_a_lost_connection_ends_its_request(server: SoundServer, address: str) -> None:
    live = Live(address)
    live.begin(language="en")
    live.append(whisper.sound(20, 3))
    live.commit(True)
    assert live.next()["type"] == "transcription.delta"
    live.socket.socket.close()
    until = time.monotonic() + 60
    while server.state.active or server.engine.front.live:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert server.state.media_room.taken == 0


def test_pages_of_other_sites_are_refused(address: str) -> None:
    host = address.removeprefix("ws://").partition("/")[0]
    with Live(address, origin=f"http://{host}") as live:
        assert live.created
    with pytest.raises(
        websockets.InvalidStatus if hasattr(websockets, "InvalidStatus") else Exception
    ):
        Live(address, origin="http://evil.example")


def test_without_a_socket(server: SoundServer) -> None:
    async def get(http: Any) -> Any:
        return await http.get("/v1/realtime")

    found = server.run(get)
    assert found.status_code == 400
    assert "needs a WebSocket" in found.json()["error"]["message"]
