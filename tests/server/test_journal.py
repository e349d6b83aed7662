"""Journal: background responses that a server left are finished by the next one: the same text, the same events, `==`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import browser
from scripted import make_state

from quire.api.async_engine import AsyncEngine
from quire.config.flags import parse
from quire.config.from_keywords import engine_config
from quire.config.validate import check_options
from quire.engine.build import make_client
from quire.errors import ConfigError
from quire.server import journal as journal_file
from quire.server.app import build_app
from quire.server.journal import BEGIN, END, OUTPUTS, Journal, records
from quire.server.openai.journaled_responses import JournaledResponses

PATH = "/v1/responses"
MODEL = "quire-tiny"
RUNNING = ("queued", "in_progress")
LIMIT = 1 << 30


# -- the file ---------------------------------------------------------------------------------------
def opened(folder: Path, limit: int = LIMIT) -> tuple[Journal, dict[str, tuple[bytes, list[bytes], bytes]]]:  # fmt: skip
    journal = Journal(folder, limit)
    found = {id: (one.begin, one.outputs, one.end) for id, one in journal.open().items()}
    return journal, found


def size_of(path: Path) -> int:
    """0: the journal's thread has just deleted the file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.journal")
    return path


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    journal, _ = opened(tmp_path / "j")
    for id in "abc":
        journal.append(BEGIN, id, f"begin {id}".encode())
    for number in range(4):
        journal.append(OUTPUTS, "a", b"%d" % number)
        journal.append(OUTPUTS, "b", b"%d" % -number)
    journal.append(END, "b", b"end")
    journal.forget("c")
    journal.close()
    return tmp_path / "j"


WHOLE = {"a": (b"begin a", [b"0", b"1", b"2", b"3"], b""), "b": (b"begin b", [b"0", b"-1", b"-2", b"-3"], b"end")}  # fmt: skip


def test_the_next_journal_finds_what_was_recorded(filled: Path) -> None:
    assert filled.stat().st_mode & 0o777 == 0o700
    assert only_file(filled).stat().st_mode & 0o777 == 0o600
    for _ in range(2):  # it is written again at each start
        journal, found = opened(filled)
        assert found == WHOLE
        journal.close()
    journal, _ = opened(filled)
    journal.append(OUTPUTS, "a", b"4")
    journal.close()
    assert opened(filled)[1]["a"][1] == [b"0", b"1", b"2", b"3", b"4"]


def is_prefix(found: dict[str, Any], whole: dict[str, Any]) -> bool:
    return all(
        id in whole and begin == whole[id][0] and outputs == whole[id][1][: len(outputs)] and end in (b"", whole[id][2])
        for id, (begin, outputs, end) in found.items()
        if id != "c"  # what says that it was forgotten may be lost
    )  # fmt: skip


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_has_only_what_is_right(damage: str, filled: Path, tmp_path: Path) -> None:
    data = only_file(filled).read_bytes()
    total = len(list(records(data)))
    for place in range(len(data)):
        found = data[:place] if damage == "cut" else data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]  # fmt: skip
        assert len(list(records(found))) < total
        if place % 7 == 0:
            only_file(filled).write_bytes(found)
            journal, responses = opened(filled)
            journal.close()
            assert is_prefix(responses, WHOLE)


def test_a_gap_ends_a_response(tmp_path: Path) -> None:
    """What follows a lost record would be another text."""
    journal, _ = opened(tmp_path / "j")
    journal.append(BEGIN, "a", b"")
    for number in range(5):
        journal.append(OUTPUTS, "a", b"%d" % number)
    journal.close()
    path = only_file(tmp_path / "j")
    frames = [journal_file.framed(one) for one in records(path.read_bytes())]
    path.write_bytes(b"".join(frames[:3] + frames[4:]))
    assert opened(tmp_path / "j")[1]["a"][1] == [b"0", b"1"]


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path / "j")
    with pytest.raises(ConfigError, match="another server uses it"):
        opened(tmp_path / "j")
    journal.close()
    opened(tmp_path / "j")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="journal_dir"):
        opened(tmp_path / "open")


def test_its_bytes_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(journal_file, "SYNC_S", 0.001)
    synced: list[int] = []
    journal = Journal(tmp_path / "j", 10_000, synced.append)
    journal.open()
    for round in range(40):
        journal.append(BEGIN, f"r{round}", bytes(500))
        for _ in range(4):
            position = journal.append(OUTPUTS, f"r{round}", bytes(100))
        end = time.monotonic() + 10
        while (not synced or synced[-1] < position) and time.monotonic() < end:
            time.sleep(0.001)
        if round >= 2:
            journal.forget(f"r{round - 2}")
        assert sum(map(size_of, (tmp_path / "j").glob("*.journal"))) < 12_000
    assert journal.append(OUTPUTS, "r39", b"x")  # there is room again and again
    assert not journal.append(OUTPUTS, "r39", bytes(20_000))
    assert not journal.append(OUTPUTS, "r39", b"x")  # there would be a gap
    journal.close()
    assert set(opened(tmp_path / "j")[1]) == {"r38", "r39"}


def test_a_full_disk_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    synced: list[int] = []
    journal = Journal(tmp_path / "j", LIMIT, synced.append)
    journal.open()

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "write", full)
        journal.append(BEGIN, "a", b"")
        end = time.monotonic() + 10
        while not journal.why_off and time.monotonic() < end:
            time.sleep(0.01)
    assert not journal.append(OUTPUTS, "a", b"")
    assert synced == [1 << 62]
    assert caplog.text.count("the journal is off") == 1
    journal.close()


def test_options() -> None:
    with pytest.raises(ConfigError, match="one HTTP process"):
        check_options(parse(["m", "--journal-dir", "/j", "--api-server-count", "2"]))


# -- responses --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    one = make_client(engine_config({"model": MODEL, "kv_cache_memory_bytes": 16 << 20, "dtype": "float32"}))  # fmt: skip
    served = AsyncEngine(one)
    yield served
    served.shutdown()


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"input": "Once upon a time", "max_output_tokens": 40, "temperature": 0},
    "drawn": {"input": "The cat", "max_output_tokens": 60, "temperature": 1.3},
    "logprobs": {"input": "The dog", "max_output_tokens": 20, "top_logprobs": 2, "temperature": 0.7},
    "stop string": {"input": "A", "max_output_tokens": 60, "temperature": 0.8, "stop": ["e"]},
    "penalties": {"input": "The dog", "max_output_tokens": 30, "temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "schema": {"input": "A number", "max_output_tokens": 30, "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 3}}}},
}  # fmt: skip


@asynccontextmanager
async def server(folder: Path, engine: AsyncEngine) -> Any:
    """A server of this engine, which "dies" at the end: what it has recorded is all that is left."""
    state = make_state(None, model=MODEL)
    state.attach(engine)
    state.journal = JournaledResponses(Journal(folder, LIMIT))
    await asyncio.to_thread(state.journal.open, asyncio.get_running_loop())
    async with browser(state) as one:
        state.journal.restore(state, build_app(state))
        await state.journal._restoring
        yield one, state
        state.journal.close()
        tasks = [one.task for one in state.responses._found.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ended(one: httpx.AsyncClient, id: str) -> dict[str, Any]:
    for _ in range(4000):
        found = (await one.get(f"{PATH}/{id}")).json()
        if found.get("status") not in RUNNING:
            return dict(found)
        await asyncio.sleep(0.005)
    raise AssertionError("it has no end")


async def events(one: httpx.AsyncClient, id: str) -> list[Any]:
    text = (await one.get(f"{PATH}/{id}?stream=true")).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def same(found: Any) -> Any:
    """Without what depends on time, and on the cache of the engine."""
    if isinstance(found, dict):
        return {
            k: same(v) for k, v in found.items() if k not in ("metrics", "input_tokens_details")
        }
    return [same(one) for one in found] if isinstance(found, list) else found


def text_of(heard: list[Any]) -> str:
    return "".join(event["delta"] for event in heard if "delta" in event)


@pytest.mark.slow
def test_the_next_server_finishes_them_equal(engine: AsyncEngine, tmp_path: Path) -> None:
    """The first server is cut off at any byte of its journal."""

    async def go() -> None:
        ids, whole, heard = {}, {}, {}
        async with server(tmp_path / "j", engine) as (one, _):
            for kind, body in BODIES.items():
                ids[kind] = (await one.post(PATH, json=body | {"background": True})).json()["id"]
            for kind, id in ids.items():
                whole[kind], heard[kind] = await ended(one, id), await events(one, id)
                assert whole[kind]["status"] in ("completed", "incomplete"), whole
        data, rng = only_file(tmp_path / "j").read_bytes(), random.Random(5)
        resumed = 0
        for cut in [*(rng.randrange(len(data)) for _ in range(2)), len(data)]:
            folder = tmp_path / f"cut {cut}"
            folder.mkdir(mode=0o700)
            (folder / "1.journal").write_bytes(data[:cut])
            kept = [record.id for record in records(data[:cut])]
            async with server(folder, engine) as (one, state):
                for kind, id in ids.items():
                    if id not in kept:
                        assert (await one.get(f"{PATH}/{id}")).status_code == 404
                        continue
                    assert same(await ended(one, id)) == same(whole[kind])
                    again, recorded = await events(one, id), kept.count(id) - 1
                    resumed += recorded > 2
                    assert text_of(again) == text_of(heard[kind])
                    # what was recorded has the same borders; the rest may come in other pieces
                    assert same(again[: recorded + 2]) == same(heard[kind][: recorded + 2])
                assert not state.active
        assert resumed > len(BODIES)

    asyncio.run(go())


def test_what_was_cancelled_deleted_or_of_another_model_does_not_go_on(engine: AsyncEngine, tmp_path: Path) -> None:  # fmt: skip
    async def go() -> None:
        long = {"input": "hi", "background": True, "max_output_tokens": 1000, "ignore_eos": True}  # fmt: skip
        async with server(tmp_path / "j", engine) as (one, _):
            ids = [(await one.post(PATH, json=long)).json()["id"] for _ in range(3)]
            await asyncio.sleep(0.2)
            gone = (await one.post(f"{PATH}/{ids[0]}/cancel")).json()
            assert gone["status"] == "cancelled"
            heard = await events(one, ids[0])
            await one.delete(f"{PATH}/{ids[1]}")
        async with server(tmp_path / "j", engine) as (one, state):
            assert await ended(one, ids[0]) == gone
            assert await events(one, ids[0]) == heard
            assert (await one.get(f"{PATH}/{ids[1]}")).status_code == 404
            assert (await one.get(f"{PATH}/{ids[2]}")).json()["status"] in RUNNING
            follow = (await one.post(PATH, json={"input": "more", "previous_response_id": ids[0]})).json()  # fmt: skip
            assert follow["status"] == "completed", follow
            state.journal.journal.forget(ids[0])
        async with server(tmp_path / "j", engine) as (one, _):
            assert (await one.get(f"{PATH}/{ids[0]}")).status_code == 404
            assert (await one.get(f"{PATH}/{ids[2]}")).json()["status"] in RUNNING
        found = Journal(tmp_path / "j", LIMIT)
        responses = found.open()
        begun = responses[ids[2]].begin
        assert b"float32" in begun
        found.forget(ids[2])
        found.append(BEGIN, ids[2], begun.replace(b"float32", b"float64"))
        found.close()
        async with server(tmp_path / "j", engine) as (one, _):
            assert (await one.get(f"{PATH}/{ids[2]}")).status_code == 404

    asyncio.run(go())


def test_clients_get_events_when_they_are_on_disk(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with server(tmp_path / "j", engine) as (one, _):
            sync, stuck = os.fsync, [True]

            def fsync(fd: int) -> None:
                while stuck[0]:
                    time.sleep(0.01)
                sync(fd)

            monkeypatch.setattr(os, "fsync", fsync)
            id = (await one.post(PATH, json=BODIES["greedy"] | {"background": True})).json()["id"]
            assert (await ended(one, id))["status"] in ("completed", "incomplete")
            follower = asyncio.ensure_future(events(one, id))
            await asyncio.sleep(0.2)
            assert not follower.done()
            stuck[0] = False
            assert (await follower)[-1]["type"] in ("response.completed", "response.incomplete")

    asyncio.run(go())
