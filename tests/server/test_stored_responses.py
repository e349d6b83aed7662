"""Responses that the server keeps: fetched, followed from any event, cancelled, deleted, continued; each by its owner alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import browser
from scripted import ScriptedEngine, make_state
from test_tenants import A, B, state_of

from quire.server.errors import ApiError
from quire.server.response_store import OVERHEAD, ResponseStore, StoredResponse

PATH = "/v1/responses"


class Gated(ScriptedEngine):
    """Says the first text of its script, and the rest when the test opens the gate."""

    def __init__(self, *script: str):
        super().__init__(*script)
        self.gate = asyncio.Event()


def run(test: Callable[[httpx.AsyncClient, Any], Any], engine: ScriptedEngine | None = None, **config: Any) -> Any:  # fmt: skip
    async def go() -> Any:
        state = make_state(engine or ScriptedEngine("Hel", "lo"), **config)
        async with browser(state) as client:
            return await test(client, state)

    return asyncio.run(go())


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def made(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"input": "hi"} | body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def ended(client: httpx.AsyncClient, id: str) -> dict[str, Any]:
    for _ in range(500):
        found = (await client.get(f"{PATH}/{id}")).json()
        if found["status"] not in ("queued", "in_progress"):
            return dict(found)
        await asyncio.sleep(0.005)
    raise AssertionError("it has no end")


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_a_background_response_runs_while_nobody_listens() -> None:
    async def test(client: httpx.AsyncClient, state: Any) -> None:
        first = await made(client, background=True)
        assert (first["status"], first["background"], first["store"]) == ("queued", True, True)
        last = await ended(client, first["id"])
        assert (last["status"], text_of(last)) == ("completed", "Hello")
        assert last["usage"]["output_tokens"] == 5

    run(test)


def test_events_are_the_same_from_every_place_and_as_often_as_they_are_read() -> None:
    async def test(client: httpx.AsyncClient, state: Any) -> None:
        plain = events((await client.post(PATH, json={"input": "hi", "stream": True})).text)
        whole = events((await client.post(PATH, json={"input": "hi", "stream": True, "background": True})).text)  # fmt: skip
        assert [one["type"] for one in whole] == [one["type"] for one in plain]
        assert [one["sequence_number"] for one in whole] == list(range(len(whole)))
        id = whole[0]["response"]["id"]
        for after in range(-1, len(whole)):
            found = await client.get(f"{PATH}/{id}?stream=true&starting_after={after}")
            assert events(found.text) == whole[after + 1 :]

    run(test)


def test_a_client_that_comes_back_gets_the_rest_as_it_comes() -> None:
    async def test(client: httpx.AsyncClient, state: Any) -> None:
        engine = state.engine
        id = (await made(client, background=True))["id"]
        await asyncio.sleep(0.05)
        followers = [
            asyncio.ensure_future(client.get(f"{PATH}/{id}?stream=true&starting_after={after}"))
            for after in (-1, 1, 3)
        ]
        await asyncio.sleep(0.05)
        engine.gate.set()
        all_of_them, second, fourth = [events((await one).text) for one in followers]
        assert all_of_them[-1]["type"] == "response.completed"
        assert (second, fourth) == (all_of_them[2:], all_of_them[4:])

    run(test, Gated("Hel", "l", "o"))


def test_cancel_ends_the_engines_work_and_tells_followers() -> None:
    async def test(client: httpx.AsyncClient, state: Any) -> None:
        engine = state.engine
        id = (await made(client, background=True))["id"]
        follower = asyncio.ensure_future(client.get(f"{PATH}/{id}?stream=true"))
        await asyncio.sleep(0.05)
        found = (await client.post(f"{PATH}/{id}/cancel")).json()
        assert found["status"] == "cancelled"
        assert engine.aborted
        await follower
        assert (await client.get(f"{PATH}/{id}")).json() == found
        assert (await client.post(f"{PATH}/{id}/cancel")).json() == found
        assert not state.active

    run(test, Gated("Hel", "l", "o"))


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_delete_forgets_and_ends(seconds: float) -> None:
    """Also before the task has begun."""

    async def test(client: httpx.AsyncClient, state: Any) -> None:
        id = (await made(client, background=True))["id"]
        await asyncio.sleep(seconds)
        assert (await client.delete(f"{PATH}/{id}")).json() == {"id": id, "object": "response", "deleted": True}  # fmt: skip
        assert (await client.get(f"{PATH}/{id}")).status_code == 404
        assert (await client.delete(f"{PATH}/{id}")).status_code == 404
        assert state.engine.aborted or not seconds
        assert state.responses.size == 0
        assert not state.active

    run(test, Gated("Hel", "l", "o"))


def test_a_failure_is_an_event_and_a_status() -> None:
    async def test(client: httpx.AsyncClient, state: Any) -> None:
        id = (await made(client, background=True))["id"]
        last = await ended(client, id)
        assert last["status"] == "failed"
        found = events((await client.get(f"{PATH}/{id}?stream=true")).text)
        assert found[-1]["type"] == "response.failed"

    run(test, ScriptedEngine("a", RuntimeError("secret")))


def test_a_response_is_continued_with_its_whole_conversation() -> None:
    async def test(client: httpx.AsyncClient, state: Any) -> None:
        first = await made(client, instructions="be brief")
        second = await made(client, input="and?", previous_response_id=first["id"])
        third = await made(client, input=[{"role": "user", "content": "more"}], previous_response_id=second["id"], stream=False)  # fmt: skip
        assert second["previous_response_id"] == first["id"]
        seen = state.engine.rendered[-1]
        told = [(one["role"], one["content"]) for one in seen]
        assert told == [
            ("user", "hi"), ("assistant", "Hello"), ("user", "and?"), ("assistant", "Hello"), ("user", "more"),
        ]  # fmt: skip
        assert (await client.get(f"{PATH}/{third['id']}")).json() == third

    class Noting(ScriptedEngine):
        rendered: list[Any] = []  # noqa: RUF012

        def render(self, messages: Any, options: Any) -> str:
            self.rendered.append(messages)
            return super().render(messages, options)

    run(test, Noting("Hel", "lo"))


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"background": True, "store": False}, 400, "background"),
        ({"previous_response_id": "resp_none"}, 404, "response_id"),
        ({"previous_response_id": "x" * 100_000}, 404, "response_id"),
        ({"previous_response_id": 7}, 400, None),
    ],
)
def test_what_cannot_be_done_is_refused(
    body: dict[str, Any], status: int, field: str | None
) -> None:
    async def test(client: httpx.AsyncClient, state: Any) -> None:
        found = await client.post(PATH, json={"input": "hi"} | body)
        assert found.status_code == status
        assert len(found.text) < 1000
        if field:
            assert found.json()["error"]["param"] == field

    run(test)


def test_several_http_processes_keep_nothing_and_say_what_to_do() -> None:
    """The next request may reach another process: what needs a kept response is refused, the rest is answered."""

    async def test(client: httpx.AsyncClient, state: Any) -> None:
        state.fronts = 2
        plain = await made(client)
        assert plain["store"] is False
        refused = [
            await client.post(PATH, json={"input": "hi", "background": True}),
            await client.post(PATH, json={"input": "hi", "previous_response_id": plain["id"]}),
            await client.get(f"{PATH}/{plain['id']}"),
            await client.delete(f"{PATH}/{plain['id']}"),
            await client.post(f"{PATH}/{plain['id']}/cancel"),
        ]
        assert [one.status_code for one in refused] == [400, 400, 404, 404, 404]
        assert all("--api-server-count 1" in one.json()["error"]["message"] for one in refused)

    run(test)


@pytest.mark.attack
@pytest.mark.parametrize(
    "after", ["9" * 5000, "-2", "1.5", "NaN", "١", "0x1", "", "1e9", "-1&starting_after=z"]
)
def test_odd_places_are_refused(after: str) -> None:
    async def test(client: httpx.AsyncClient, state: Any) -> None:
        id = (await made(client, background=True))["id"]
        await ended(client, id)
        found = await client.get(f"{PATH}/{id}?stream=true&starting_after={after}")
        assert found.status_code == 400
        assert len(found.text) < 1000
        far = await client.get(f"{PATH}/{id}?stream=true&starting_after={10**14}")
        assert (far.status_code, far.text) == (200, "")

    run(test)


@pytest.mark.attack
def test_a_key_finds_only_its_own(tmp_path: Path) -> None:
    """Also if both choose one id: neither learns that the other has it."""

    async def go() -> None:
        state = state_of(tmp_path, A, B, engine=ScriptedEngine("Hel", "lo"))
        async with browser(state) as client:
            keys = [
                {"Authorization": f"Bearer {key}", "X-Request-Id": "same"} for key in ("ka", "kb")
            ]
            for key in keys:
                answer = await client.post(
                    PATH, json={"input": "hi", "background": True}, headers=key
                )
                assert answer.status_code == 200, answer.text
            alone = await client.post(PATH, json={"input": "hi"}, headers=keys[0] | {"X-Request-Id": "one"})  # fmt: skip
            id = alone.json()["id"]
            for method, path in (
                ("GET", id),
                ("DELETE", id),
                ("POST", f"{id}/cancel"),
                ("GET", f"{id}?stream=true"),
            ):
                theirs = await client.request(method, f"{PATH}/{path}", headers=keys[1])
                unknown = await client.request(
                    method, f"{PATH}/{path.replace('one', 'two')}", headers=keys[1]
                )
                assert theirs.status_code == unknown.status_code == 404
                assert theirs.text.replace("one", "two") == unknown.text
            stolen = await client.post(PATH, json={"input": "hi", "previous_response_id": id}, headers=keys[1])  # fmt: skip
            assert stolen.status_code == 404
            assert (await client.get(f"{PATH}/{id}", headers=keys[0])).status_code == 200
            await ended_with(client, keys[0])
            assert state.tenants is not None
            tenant = state.tenants.find(b"ka")
            assert tenant is not None
            assert tenant.running == 0

    async def ended_with(client: httpx.AsyncClient, key: dict[str, str]) -> None:
        client.headers["Authorization"] = key["Authorization"]
        await ended(client, "resp_same")

    asyncio.run(go())


# -- the store --------------------------------------------------------------------------------------
def record(id: str, owner: str = "") -> StoredResponse:
    return StoredResponse(id, owner, lambda: b"{}", items=[], events=[])


def test_the_store_is_bounded_in_bytes_and_time() -> None:
    now = [0.0]
    store = ResponseStore(20 * OVERHEAD, 60, lambda: now[0])
    for number in range(100):
        one = record(str(number))
        store.add(one)
        store.append(one, b"x" * 100)
        store.end(one, b"y" * 1000, [])
        assert store.size <= store.limit
    assert store.get("", "99").body
    with pytest.raises(ApiError):
        store.get("", "0")
    now[0] = 61
    with pytest.raises(ApiError):
        store.get("", "99")
    store.add(record("new"))
    assert store.size < 2 * OVERHEAD + 100


def test_a_response_that_is_too_long_keeps_no_events() -> None:
    store = ResponseStore(10 * OVERHEAD, 60)
    one, other = record("long"), record("short")
    store.add(one)
    store.add(other)
    for _ in range(1000):
        store.append(one, b"x" * 100)
        assert store.size <= store.limit
    assert one.events is None
    assert other.events == []
    store.end(one, b"{}", [])
    assert store.get("", "long").body == b"{}"


def test_a_running_id_is_not_taken_twice() -> None:
    store = ResponseStore(1 << 20, 60)
    store.add(record("a", "one"))
    store.add(record("a", "two"))
    with pytest.raises(ApiError, match="is running"):
        store.add(record("a", "one"))
