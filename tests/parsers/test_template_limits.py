"""Templates that take too long, over HTTP: each protocol answers 400 in time, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from asgi import browser
from asymptotic import uncollected

from quire.frontend.chat_template import ChatTemplate
from quire.frontend.untrusted_templates import UntrustedTemplateRenderer
from quire.server import prompts
from quire.server.state import ServerState

HI = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# Two lists of themselves, forty deep: Python compares them for years, and asks nobody.
HOSTILE = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
)
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"messages": HI},
}


@pytest.fixture
def trusting(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> Iterator[UntrustedTemplateRenderer]:
    """The server takes templates from requests, and gives none more than a third of a second."""
    monkeypatch.setattr(prompts, "SECONDS", 0.3)
    monkeypatch.setattr("quire.frontend.untrusted_templates.GRACE_S", 0.4)
    server = state.config.server
    object.__setattr__(server, "trust_request_chat_template", True)
    renderer = UntrustedTemplateRenderer(0.3)
    monkeypatch.setattr(state, "untrusted", renderer)
    yield renderer
    object.__setattr__(server, "trust_request_chat_template", False)
    renderer.close()


async def longest_work(until: asyncio.Future[Any]) -> float:
    """Seconds for which the event loop's thread worked at one thing. (A machine that stands still is no work.)"""
    worst, last = 0.0, time.thread_time()
    while not until.done():
        await asyncio.sleep(0.005)
        worst, last = max(worst, time.thread_time() - last), time.thread_time()
    return worst


async def refused(state: ServerState, path: str, body: dict[str, Any]) -> tuple[str, float]:
    async with browser(state) as client:
        asked = asyncio.ensure_future(client.post(path, json=body))
        with uncollected():
            wait = await longest_work(asked)
        answer = asked.result()
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["message"], wait


def test_no_protocol_waits_for_the_checkpoints_template(
    state: ServerState, trusting: UntrustedTemplateRenderer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("quire.frontend.chat_template.PROBE_SECONDS", 0.05)
    template = ChatTemplate(ENDLESS)
    assert template.content_format == "string"
    monkeypatch.setattr(state.engine.front.tokenizer, "template", template)
    for path, body in PATHS.items():
        waits: list[float] = []
        # What a machine that stands still adds, it adds once.
        while min(waits, default=1.0) >= 0.25:
            assert len(waits) < 4, (path, waits)
            says, wait = asyncio.run(refused(state, path, body))
            assert "needs more than 0.3 s" in says
            waits.append(wait)


def test_a_request_template_does_not_delay_others(
    state: ServerState, trusting: UntrustedTemplateRenderer, monkeypatch: pytest.MonkeyPatch
):
    served, render = threading.Event(), trusting.render

    def later(*given: Any) -> str:
        """However long the machine takes over the others: they are served first."""
        assert served.wait(60)
        return render(*given)

    monkeypatch.setattr(trusting, "render", later)

    async def main() -> None:
        async with browser(state) as client:
            slow = [
                asyncio.ensure_future(refused(state, path, {**PATHS[path], "chat_template": HOSTILE}))
                for path in ("/v1/chat/completions", "/tokenize")
            ]  # fmt: skip
            body = {"messages": HI, "max_tokens": 3, "temperature": 0}
            plain = await client.post("/v1/chat/completions", json=body)
            assert plain.status_code == 200
            assert not any(one.done() for one in slow)
            served.set()
            for says, _ in await asyncio.gather(*slow):
                assert "template of this request exceeds its limit of 0.3 s" in says
            trusting.seconds = 60
            own = {"messages": HI, "chat_template": "{{ messages[0].content }}"}
            told = await client.post("/tokenize", json=own)
            assert told.json()["tokens"] == state.engine.tokenizer.encode("hi", False)

    asyncio.run(main())


def test_the_template_of_a_model_does_not_delay_others(
    state: ServerState, trusting: UntrustedTemplateRenderer, monkeypatch: pytest.MonkeyPatch
):
    """A review's finding: five lines in a model's folder held the event loop without end."""
    template = ChatTemplate(HOSTILE)
    template.isolated = trusting
    trusting.prepare()
    monkeypatch.setattr("quire.frontend.chat_template.PROBE_SECONDS", 0.05)
    monkeypatch.setattr(state.engine.front.tokenizer, "template", template)

    async def main() -> None:
        async with browser(state) as client:
            for path, body in PATHS.items():
                slow, answered = asyncio.ensure_future(client.post(path, json=body)), 0
                while not slow.done():
                    assert (await client.get("/health/live")).status_code == 200
                    answered += not slow.done()
                    await asyncio.sleep(0.02)
                answer = slow.result()
                assert answered > 2  # while the template ran
                assert answer.status_code == 400, answer.text
                assert "template of this model exceeds its limit" in answer.text

    asyncio.run(main())
