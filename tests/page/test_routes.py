"""The page over HTTP: one file without a key and without data; the data needs the key."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from asgi import ask, browser
from scripted import ScriptedEngine, make_state

from quire.config.api_key_file import read_keys
from quire.errors import ConfigError, QuireError
from quire.server.page.document import page_paths
from quire.server.page.feed import LiveFeed, viewer_state
from quire.server.state import ServerState

OTHER = {"n": 2, "id": "b", "tenant": "bob", "state": "decode", "finish": None, "prompt": 7, "hit": 4, "computed": 9,
         "output": 3, "limit": 5, "preemptions": 0, "blocks": 2, "phases": [["queued", 9.0, 0], ["prefill", 8.0, 7]], "ended": -1}  # fmt: skip
MINE = OTHER | {"n": 1, "id": "a", "tenant": ""}
STEPS = [
    {"step": n, "ago": 10.0, "ms": 2.0, "work": [[1, 1, False, 0], [2, 3, False, 2]], "rest": 0}
    for n in (4, 5)
]
LIVE = {
    "stats": {"running": 1}, "blocks": {"count": 4, "each": 1, "runs": [0, 3, 4, 1]}, "steps": STEPS,
    "lives": [MINE, OTHER], "limits": {"rows": 8}, "memory": {"resident": 1, "machine": 2, "block": 3}, "cost_ms": 0.5,
}  # fmt: skip
WORDS = {
    "tenant": "", "prompt": [72, 105], "prompt_left": 0, "output": [33], "output_left": 4,
}  # fmt: skip
KEY = {"Authorization": "Bearer k"}


class Watched(ScriptedEngine):
    """It can be looked at."""

    slow: asyncio.Event | None = None
    owner = ""
    """Tenant of the request whose words are asked for."""

    async def call(self, name: str, *args: Any) -> Any:
        self.called.append((name, *args))
        if self.slow is not None:
            await self.slow.wait()
        return WORDS | {"tenant": self.owner} if name == "live_words" else LIVE


NAMESPACES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML")
FILES = sorted(page_paths())


def test_the_page_loads_no_foreign_resource():
    """No file names another site or makes markup of text, and the policy forbids both."""
    assert {"/", "/ui/page/main.js", "/ui/page/chat.css"} < set(FILES)
    for path in FILES:
        answer = ask(Watched(), "GET", path)
        text = answer.text
        for name in NAMESPACES:
            text = text.replace(name, "")
        assert not re.findall(r"https?://|@import|url\(|innerHTML|insertAdjacent|document\.write|eval\(|\son\w+=[\"']| style=", text), path  # fmt: skip
        sources = re.findall(r"(?:src|href)=\"([^\"]*)", text) + re.findall(
            r"from \"([^\"]*)", text
        )
        assert all(
            source.startswith(("ui/page/", "./", "data:", "#", "docs")) for source in sources
        )
        directives = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} < set(directives)  # fmt: skip
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_files_of_the_page_have_their_types():
    kinds = {".js": "text/javascript", ".css": "text/css", "/": "text/html"}
    for path in FILES:
        answer = ask(Watched(), "GET", path)
        wanted = next(kind for end, kind in kinds.items() if path.endswith(end))
        assert answer.headers["content-type"].split(";")[0] == wanted


@pytest.mark.parametrize("name", ["nosuch.js", "..%2froutes.py", "%2e%2e%2froutes.py", "main.js%00", "MAIN.JS", "index.html"])  # fmt: skip
def test_no_other_file_is_sent(name: str):
    assert ask(Watched(), "GET", f"/ui/page/{name}").status_code == 404


def test_the_page_is_cached_by_etag():
    for path in FILES:
        answer = ask(Watched(), "GET", path)
        again = ask(Watched(), "GET", path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_the_page_needs_no_key_but_its_data_does():
    engine = Watched()
    engine.owner = "--api-key 1"
    state = make_state(engine, api_key="k")
    for path in FILES:
        assert ask(None, "GET", path, state=state).status_code == 200
    assert ask(None, "GET", "/ui/defaults", state=state).status_code == 401
    for path in ("/ui/state", "/ui/words?n=1"):
        assert ask(None, "GET", path, state=state).status_code == 401
        assert ask(None, "GET", path, headers=KEY, state=state).status_code == 200


def test_without_viewers_the_engine_is_not_asked():
    engine = Watched()
    ask(engine, "GET", "/")
    assert engine.called == []


def test_the_page_can_be_disabled():
    for path in ("/", "/ui/state", "/ui/words", "/ui/defaults", "/ui/page/main.js"):
        assert ask(Watched(), "GET", path, disable_ui=True).status_code == 404


def test_many_viewers_share_one_query():
    engine = Watched()

    async def go() -> list[int]:
        async with browser(make_state(engine)) as client:
            answers = await asyncio.gather(*(client.get("/ui/state") for _ in range(5)))
            answers.append(await client.get("/ui/state"))
            return [answer.status_code for answer in answers]

    assert asyncio.run(go()) == [200] * 6
    assert engine.called == [("live",)]


def test_viewing_uses_a_small_share_of_engine_time():
    class Dear(Watched):
        async def call(self, name: str, *args: Any) -> Any:
            await super().call(name)
            return LIVE | {"cost_ms": 100.0}

    now = [0.0]
    feed, engine = LiveFeed(lambda: now[0]), Dear()
    asyncio.run(feed.look(engine))
    assert feed.every == pytest.approx(2.0)
    now[0] = 1.0
    asyncio.run(feed.look(engine))
    assert len(engine.called) == 1
    now[0] = 2.0
    asyncio.run(feed.look(engine))
    assert len(engine.called) == 2


def test_a_disconnected_viewer_does_not_affect_others():
    engine = Watched()

    async def go() -> dict[str, Any]:
        engine.slow = asyncio.Event()
        feed = LiveFeed()
        first = asyncio.ensure_future(feed.look(engine))
        second = asyncio.ensure_future(feed.look(engine))
        await asyncio.sleep(0)
        first.cancel()
        engine.slow.set()
        return await second

    assert asyncio.run(go()) == LIVE
    assert len(engine.called) == 1


def test_a_long_step_is_not_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire.server.page.routes.PATIENCE_S", 0.01)

    class Stuck(Watched):
        async def call(self, name: str, *args: Any) -> Any:
            await asyncio.Event().wait()

    answer = ask(Stuck(), "GET", "/ui/state")
    assert (answer.status_code, answer.json()["busy"]) == (200, True)


def test_an_engine_that_is_replaced_is_waited_for():
    class Replaced(Watched):
        async def call(self, name: str, *args: Any) -> Any:
            raise QuireError("the engine was restarted before 'live'")

    assert ask(Replaced(), "GET", "/ui/state").status_code == 503
    engine = Watched()
    engine.replaced = True
    assert ask(engine, "GET", "/ui/state").status_code == 503
    assert engine.called == []


def test_only_new_steps_are_sent():
    steps = lambda since: [step["step"] for step in viewer_state(LIVE, since, "")["steps"]]  # noqa: E731
    assert [steps(0), steps(4), steps(5)] == [[4, 5], [5], []]
    assert steps(900) == [4, 5]  # that was another engine
    assert LIVE["steps"] is STEPS
    assert len(STEPS) == 2


def test_requests_of_other_keys_show_only_that_they_run():
    mine, other = viewer_state(LIVE, 0, "")["lives"]
    assert mine == MINE
    assert {"id", "n", "state", "phases"} <= set(other)
    assert other["id"] == ""
    assert not {"prompt", "hit", "output", "computed", "limit", "tenant"} & set(other)
    assert other["phases"] == [["queued", 9.0, 0], ["prefill", 8.0, 0]]
    assert viewer_state(LIVE, 0, "bob")["lives"][0]["id"] == ""
    refused = [viewer_state(LIVE, 0, tenant)["steps"][0]["work"][1][3] for tenant in ("", "bob")]
    assert refused == [0, 2]


SHOWN = {"prompt": "Hi", "prompt_left": 0, "output": "!", "output_left": 4}


def words(state: ServerState, key: str | None = None) -> tuple[int, bool]:
    """Status, and whether the words were in the answer."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = ask(None, "GET", "/ui/words?n=1", headers=headers, state=state)
    assert (answer.status_code == 200) == (answer.json() == SHOWN)
    return answer.status_code, b"Hi" in answer.content


def test_without_keys_no_text_is_sent():
    engine = Watched()
    state = make_state(engine)
    assert words(state) == (403, False)
    assert engine.called == []
    state.dev_mode = True
    assert words(state) == (200, True)


def test_text_is_sent_only_to_its_own_key(tmp_path: Path):
    """Each key is a tenant of its own, also a key of --api-key."""
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": "a", "key": "ka"}, {"name": "b", "key": "kb"}]))
    engine = Watched("x")
    state = make_state(engine, api_key=["k1", "k2"], api_key_file=str(file))
    keys = ("k1", "k2", "ka", "kb")
    for key in keys:
        headers = {"Authorization": f"Bearer {key}"}
        assert ask(None, "POST", "/v1/completions", {"prompt": "Hi"}, headers, state).status_code == 200  # fmt: skip
    owners = [asked.tenant for asked in engine.asked]
    assert len(set(owners) - {""}) == len(keys)
    for engine.owner in owners:
        found = [words(state, key) for key in keys]
        assert found == [(200, True) if owner == engine.owner else (404, False) for owner in owners]
    assert words(state) == (401, False)
    for key in keys:
        assert b"Hi" not in ask(None, "GET", "/ui/state", headers={"Authorization": f"Bearer {key}"}, state=state).content  # fmt: skip

    class Gone(Watched):
        async def call(self, name: str, *args: Any) -> Any:
            return None

    assert words(make_state(Gone(), api_key="k"), "k") == (404, False)


def test_key_names_of_a_file_are_not_plain_keys(tmp_path: Path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": "--api-key 1", "key": "k"}]))
    with pytest.raises(ConfigError, match="must not begin"):
        read_keys(str(file))


@pytest.mark.parametrize("path", ["/ui/state?since=-1", "/ui/state?since=x", "/ui/words?n=²", "/ui/words?n=" + "9" * 40])  # fmt: skip
def test_a_number_is_a_number(path: str):
    answer = ask(Watched(), "GET", path, headers=KEY, api_key="k")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("since", "n")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://server"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_scripts_of_other_sites_cannot_read_the_data(headers: dict[str, str], status: int):
    state = make_state(Watched())
    state.dev_mode = True
    for path in ("/ui/state", "/ui/words?n=1"):
        answer = ask(None, "GET", path, headers=headers, state=state)
        assert answer.status_code == status
        assert (b"lives" in answer.content or b"prompt" in answer.content) == (status == 200)


def test_state_is_plain_json():
    found = json.loads(ask(Watched(), "GET", "/ui/state").content)
    assert found["model"] == "toy"
    assert found["every_ms"] == 250
    assert found["memory"]["server"] > 0
