"""A key's limits count work: completions, and requests that only tokenize. They are asked before the work begins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import browser, calling
from scripted import ScriptedEngine
from test_tenants import CHAT, TEXT, A, Clock, ask, state_of

CLAUDE = "/v1/messages"
TOKENIZE, DETOKENIZE, COUNT = "/tokenize", "/detokenize", "/v1/messages/count_tokens"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: HI, CLAUDE: HI, COUNT: HI, TEXT: {"prompt": "ab"}, "/v1/responses": {"input": "hi"},
    "/invocations": {"prompt": "ab"}, TOKENIZE: {"prompt": "ab"}, DETOKENIZE: {"tokens": [97, 98]},
}  # fmt: skip


class Working(ScriptedEngine):
    """Counts its work on texts."""

    def __init__(self, *script: str):
        super().__init__(*(script or ("x",)))
        self.worked = 0

    def encode(self, text: str, special: bool = True) -> list[int]:
        self.worked += 1
        return super().encode(text, special)

    def decode(self, tokens: list[int], *, skip_special: bool = False) -> str:
        self.worked += 1
        return super().decode(tokens, skip_special=skip_special)

    def render(self, messages: list[dict[str, Any]], options: Any) -> str:
        self.worked += 1
        return super().render(messages, options)


def told(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "max_concurrency"])
def test_refused_requests_are_neither_rendered_nor_tokenized(tmp_path: Path, path: str, limit: str):
    engine = Working()
    state = state_of(tmp_path, A | {limit: 1}, engine=engine)
    assert state.tenants is not None
    tenant = state.tenants.find(b"ka")
    assert tenant is not None
    tenant.begin(1)
    tenant.tokens.take(1)
    answer = ask(state, "ka", BODIES[path], path)
    assert answer.status_code == 429
    assert "retry-after" in answer.headers
    assert engine.worked == 0
    assert 'quire:key_rejections_total{key="a",model_name="toy"} 1.0' in state.metrics.render().decode()  # fmt: skip
    tenant.end(1)
    assert tenant.running == 0


@pytest.mark.parametrize(
    ("path", "body", "completions"),
    [
        (TEXT, {"prompt": ["a"] * 8, "n": 4}, 32),
        (TEXT, {"prompt": [[97], [98]], "n": 2, "best_of": 5, "temperature": 1}, 10),
        (TEXT, {"prompt": ["a"] * 3, "n": 2, "use_beam_search": True}, 6),
        (CHAT, HI | {"n": 5}, 5),
    ],
)
def test_a_request_counts_its_prompts_times_n(
    tmp_path: Path, path: str, body: dict[str, Any], completions: int
):
    for limit in ("requests_per_minute", "max_concurrency"):
        engine = Working()
        few = state_of(tmp_path, A | {limit: completions - 1}, engine=engine)
        refused = ask(few, "ka", body, path)
        assert refused.status_code == 400  # no wait would help
        assert f"{completions} completions" in told(refused)
        assert limit in told(refused)
        assert engine.worked == 0
        assert engine.asked == []
    enough = state_of(tmp_path, A | {"requests_per_minute": completions + 1}, clock=Clock())
    assert enough.tenants is not None
    tenant = enough.tenants.find(b"ka")
    assert tenant is not None
    tenant.begin(2)
    assert ask(enough, "ka", body, path).status_code == 429
    tenant.requests.take(-1)
    if "use_beam_search" not in body:  # the scripted engine knows no beams
        answer = ask(enough, "ka", body, path)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE, COUNT])
def test_requests_that_only_tokenize_are_limited(tmp_path: Path, path: str):
    state = state_of(tmp_path, A | {"requests_per_minute": 2}, clock=Clock())
    found = [ask(state, "ka", BODIES[path], path).status_code for _ in range(3)]
    assert found == [200, 200, 429]


def test_a_concurrency_slot_is_freed_for_every_kind_of_end(tmp_path: Path):
    engine = Working("a", "b")
    state = state_of(tmp_path, A | {"max_concurrency": 4}, engine=engine)
    assert state.tenants is not None
    tenant = state.tenants.find(b"ka")
    assert tenant is not None
    headers = {"authorization": "Bearer ka"}

    async def go() -> None:
        engine.gate = asyncio.Event()
        body = {"prompt": ["a", "b"], "n": 2, "stream": True}
        async with calling(state, TEXT, body, headers) as one:
            await one.next()
            assert tenant.running == 4
            async with browser(state, headers=headers) as client:
                assert (await client.post(TOKENIZE, json={"prompt": "a"})).status_code == 429
            one.hang_up()
            await one.ended()
        assert tenant.running == 0
        engine.gate.set()

    asyncio.run(go())
    assert ask(state, "ka", {"prompt": "a" * 100}).status_code == 400  # longer than the context
    assert ask(state, "ka", {"messages": [{"role": "alien", "content": ""}]}, CHAT).status_code == 400  # fmt: skip
    assert ask(state, "ka").status_code == 200
    assert tenant.running == 0


def test_a_key_without_limits_counts_and_refuses_nothing(tmp_path: Path):
    state = state_of(tmp_path, A, api_key="plain")
    for key in ("ka", "plain"):
        for path, body in BODIES.items():
            assert ask(state, key, body, path).status_code == 200, path
        assert ask(state, key, {"prompt": ["a"] * 64, "n": 4}).status_code == 200
