"""Keys from a file: the tenant of a request, its limits, and its isolation from other tenants."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import browser, calling
from scripted import ScriptedEngine, make_state

from quire.config.api_key_file import TenantKey, read_keys
from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.frontend.prompts import tenant_salt
from quire.server.api_keys import ApiKeys, RateLimit, Tenant
from quire.server.errors import ApiError
from quire.server.shared_usage import UsageLedger, forget
from quire.server.state import ServerState

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAY = {"prompt": "ab"}


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def key_file(folder: Path, *entries: dict[str, Any]) -> str:
    path = folder / "keys.json"
    path.write_text(json.dumps(entries))
    return str(path)


def state_of(folder: Path, *entries: dict[str, Any], clock: Clock | None = None, engine: Any = None, **more: Any) -> ServerState:  # fmt: skip
    state = make_state(
        engine or ScriptedEngine("x", "yz"), api_key_file=key_file(folder, *entries), **more
    )
    state.tenants = ApiKeys(state.config.server, clock or Clock())
    return state


def ask(state: ServerState, key: str, body: Any = None, path: str = TEXT) -> httpx.Response:
    async def go() -> httpx.Response:
        async with browser(state, headers={"Authorization": f"Bearer {key}"}) as client:
            return await client.post(path, json=body or SAY)

    return asyncio.run(go())


A, B = {"name": "a", "key": "ka"}, {"name": "b", "key": "kb", "weight": 3}


def test_requests_carry_their_tenant(tmp_path: Path):
    state = state_of(tmp_path, A, B, api_key="plain")
    for key in ("ka", "kb", "plain"):
        assert ask(state, key).status_code == 200
    assert ask(state, "kc").status_code == 401
    assert [one.tenant for one in state.engine.asked] == ["a", "b", "--api-key 1"]


def test_tenants_share_no_cached_prefixes():
    salts = [tenant_salt("", ""), tenant_salt("s", ""), tenant_salt("", "a"), tenant_salt("s", "a"), tenant_salt("", "b"), tenant_salt("a", "b")]  # fmt: skip
    assert len(set(salts)) == len(salts)
    assert salts[:2] == ["", "s"]


def test_requests_a_minute(tmp_path: Path):
    clock = Clock()
    state = state_of(tmp_path, A | {"requests_per_minute": 2}, B, clock=clock)
    first = ask(state, "ka")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert ask(state, "ka").status_code == 200
    refused = ask(state, "ka")
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.json()["error"]["type"] == "RateLimitError"
    assert ask(state, "kb").status_code == 200  # others are not concerned
    clock.now += 29
    assert ask(state, "ka").status_code == 429
    clock.now += 1.01
    assert ask(state, "ka").status_code == 200
    assert len(state.engine.asked) == 4
    text = state.metrics.render().decode()
    assert 'quire:key_requests_total{key="a",model_name="toy"} 3.0' in text
    assert 'quire:key_rejections_total{key="a",model_name="toy"} 2.0' in text
    assert 'quire:key_tokens_total{key="a",kind="output",model_name="toy"} 9.0' in text


@pytest.mark.parametrize("path", ["/home/me/secret/model", "./secret/model", 'org/"model', "toy"])
def test_metrics_name_keys_and_paths_only_to_a_request_with_a_key(tmp_path: Path, path: str):
    state = state_of(tmp_path, {"name": "team-a", "key": "ka"}, model=path, served_model_name=None)
    state.metrics.model_name = path
    state.metrics.by_adapter("pirate", 1, 1)
    assert ask(state, "ka").status_code == 200
    full = asked_with_key(state, "ka").text
    assert 'quire:key_requests_total{key="team-a"' in full
    assert 'adapter="pirate"' in full
    for key in (None, "wrong", ""):
        answer = asked_with_key(state, key)
        assert answer.status_code == 200
        assert "team-a" not in answer.text
        assert "quire:key_" not in answer.text
        assert "secret" not in answer.text
        assert "model" in answer.text
        assert "pirate" not in answer.text
        assert "lora_requests_info" not in answer.text
        hidden = ("quire:key_", "quire:adapter_", "vllm:lora_requests_info")
        kept = [line for line in full.splitlines() if not any(name in line for name in hidden)]
        assert len(answer.text.splitlines()) == len(kept)  # all the others are there
    alone = make_state(ScriptedEngine("x"), model=path)
    alone.metrics.model_name = path
    alone.metrics.by_key("a", 1, 1)
    shown = asked_with_key(alone, None).text
    assert 'quire:key_requests_total{key="a"' in shown  # where no key is needed, all is shown
    assert path.replace('"', '\\"') in shown


def asked_with_key(state: ServerState, key: str | None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def go() -> httpx.Response:
        async with browser(state, headers=headers) as client:
            return await client.get("/metrics")

    return asyncio.run(go())


def test_refused_requests_are_not_charged(tmp_path: Path):
    state = state_of(tmp_path, A | {"requests_per_minute": 1})
    assert ask(state, "ka", {"prompt": "x", "n": 0}).status_code == 400
    assert ask(state, "ka").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_per_minute_are_charged_as_generated(tmp_path: Path, stream: bool):
    clock = Clock()
    state = state_of(tmp_path, A | {"tokens_per_minute": 6}, clock=clock)
    body = SAY | {"stream": stream}
    assert ask(state, "ka", body).status_code == 200  # 3 of the prompt, 3 of the answer
    refused = ask(state, "ka", body)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "10"
    clock.now += 10.1
    assert ask(state, "ka", body).status_code == 200
    clock.now += 10  # the last answer was on credit
    assert ask(state, "ka", body).status_code == 429


def test_concurrency_is_limited_by_key(tmp_path: Path):
    engine = ScriptedEngine("a", "b")
    state = state_of(tmp_path, A | {"max_concurrency": 1}, engine=engine)
    headers = {"authorization": "Bearer ka"}

    async def go() -> list[int]:
        engine.gate = asyncio.Event()
        async with calling(state, TEXT, SAY | {"stream": True}, headers) as one:
            await one.next()
            async with calling(state, TEXT, SAY, headers) as two:
                found = [(await two.next())["status"]]
            one.hang_up()
            await one.ended()
        engine.gate.set()
        async with calling(state, TEXT, SAY, headers) as three:
            return [*found, (await three.next())["status"]]

    assert asyncio.run(go()) == [429, 200]


def test_in_a_stream_too_a_refusal_is_a_429(tmp_path: Path):
    state = state_of(tmp_path, A | {"requests_per_minute": 1})
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    assert ask(state, "ka", chat, CHAT).status_code == 200
    assert ask(state, "ka", chat, CHAT).status_code == 429
    refused = ask(state, "ka", chat, "/v1/messages")
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_a_file_that_is_read_again(tmp_path: Path):
    path = key_file(tmp_path, A | {"requests_per_minute": 2}, B)
    clock = Clock()
    tenants = ApiKeys(ServerConfig(api_key_file=path), clock)
    assert tenants.weights == {"a": 1.0, "b": 3.0}
    old = tenants.find(b"ka")
    assert old is not None
    old.begin(1)
    key_file(tmp_path, A | {"key": "new", "requests_per_minute": 2}, {"name": "c", "key": "kc"})
    tenants.reload()
    assert tenants.find(b"ka") is None
    assert tenants.find(b"new") is old
    assert old.requests.level == 1  # what was used stays used
    assert (old.running, tenants.weights) == (1, {"a": 1.0, "c": 1.0})
    (tmp_path / "keys.json").write_text("[{")
    with pytest.raises(ConfigError):
        tenants.reload()
    assert tenants.find(b"new") is old


def test_yaml(tmp_path: Path):
    path = tmp_path / "keys.yaml"
    path.write_text(
        "- name: a\n  key: ka\n  weight: 0.5\n- {name: b, key: kb, max_concurrency: 4}\n"
    )
    assert read_keys(str(path)) == [
        TenantKey(name="a", key="ka", weight=0.5),
        TenantKey(name="b", key="kb", max_concurrency=4),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "neither JSON nor YAML"), ("{}", "a list|array"), ("[]", "a list|array"), ("[1]", r"\$\[0\] must be a mapping"), ('[{"name": "a"}]', "`key`"),
     ('[{"name": "a", "key": "secret", "wait": 1}]', "unknown field `wait`"), ('[{"name": "a", "key": "secret", "weight": 0}]', r"\.weight must be a number above 0"),
     ('[{"name": "a", "key": "secret", "max_concurrency": 0}]', r"\.max_concurrency must be a whole number of at least 1"),
     ('[{"name": "a", "key": "secret"}, {"name": "a", "key": "x"}]', "same `name`"),
     ('[{"name": "a", "key": "secret"}, {"name": "b", "key": "secret"}]', "same `key`")],
)  # fmt: skip
def test_key_file_errors_name_the_field_but_no_key(tmp_path: Path, text: str, words: str):
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        read_keys(str(path))
    assert "secret" not in str(error.value)
    assert "secret" not in repr(TenantKey(name="a", key="secret"))


def test_a_token_bucket_holds_at_most_one_minute():
    clock = Clock()
    bucket = RateLimit(60, clock)
    bucket.take(70)
    assert bucket.level == -10
    assert bucket.seconds_until(1) == 11
    clock.now += 1000
    assert bucket.level == 60


def test_no_limits_no_headers():
    assert Tenant(TenantKey(name="a", key="k")).headers() == {}


def test_processes_share_the_limits_of_a_key(tmp_path: Path):
    """Two of them, each with its own connections; the limits are the key's."""
    entry = A | {"requests_per_minute": 3, "tokens_per_minute": 100, "max_concurrency": 2}
    server, clock = ServerConfig(api_key_file=key_file(tmp_path, entry)), Clock()
    (folder := tmp_path / "keys").mkdir()
    both = [ApiKeys(server, clock, UsageLedger(folder, front, 2)) for front in range(2)]
    here, there = (tenants.find(b"ka") for tenants in both)
    assert here is not None
    assert there is not None
    for tenant, tokens in ((here, 40), (there, 50)):
        tenant.begin(1)
        tenant.tokens.take(tokens)
    assert here.running == there.running == 2
    with pytest.raises(ApiError, match="are running"):
        here.begin(1)
    for tenant in (here, there):
        tenant.end(1)
    assert here.headers() == there.headers()
    assert there.headers()["x-ratelimit-remaining-tokens"] == "10"
    there.tokens.take(20)
    with pytest.raises(ApiError, match="tokens per minute"):
        here.begin(1)
    clock.now += 12  # 20 tokens; of requests there was one left
    here.begin(1)
    with pytest.raises(ApiError, match="requests per minute"):
        there.begin(1)
    here.end(1)
    # A process that starts later finds the counts of tokens used.
    assert ApiKeys(server, clock, UsageLedger(folder, 1, 2)).find(b"ka").headers() == here.headers()  # type: ignore[union-attr]
    clock.now += 60
    there.account.begin()
    forget(folder, 0, 2)
    assert here.running == 1
    forget(folder, 1, 2)  # it died with one under way
    assert here.running == 0
