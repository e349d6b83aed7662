"""Speculative decoding over HTTP, on the embedded model: a request's limit, and the metrics in its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from asgi import browser, frames
from scripted import make_state

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.server.state import ServerState

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAY = {"messages": [{"role": "user", "content": "Repeat: a b c d e f a b c d e f a b c d e f"}]}
BODIES: dict[str, dict[str, Any]] = {CHAT: SAY, TEXT: {"prompt": "a b c a b c a b c"}, RESPONSES: {"input": "hi"}}  # fmt: skip
KEYS = {
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
    "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens",
}  # fmt: skip
STEPS = {"per_step_num_draft_tokens", "per_step_num_accepted_tokens"}


@pytest.fixture(scope="module")
def state() -> Iterator[ServerState]:
    config = EngineConfig.from_keywords(
        model="quire-tiny", max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_model_len=512,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "adaptive": False},
        per_request_spec_decode_metrics="detailed",
    )  # fmt: skip
    client = make_client(config)
    made = make_state(None, per_request_spec_decode_metrics="detailed")
    made.attach(engine := AsyncEngine(client, config))
    yield made
    engine.shutdown()


def post(state: ServerState, path: str, **body: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with browser(state) as client:
            whole = {"temperature": 0, **BODIES[path], **body}
            if path != RESPONSES:
                whole |= {"max_tokens": 24, "ignore_eos": True}
            return await asyncio.wait_for(client.post(path, json=whole), 60)

    return asyncio.run(main())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("given", "named"),
    [({"k": -1}, "speculative.k"), ({"k": "a"}, "speculative.k"), ({"n": 1}, "speculative.n")],
)
def test_a_wrong_limit_is_named(
    state: ServerState, path: str, given: dict[str, Any], named: str
) -> None:
    answer = post(state, path, speculative=given)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_answer_reports_its_draft_tokens(state: ServerState, path: str) -> None:
    found = post(state, path).json()
    block = found["metrics"]["speculative_decoding"]
    assert set(block) == KEYS | STEPS
    drafted, accepted = block["per_step_num_draft_tokens"], block["per_step_num_accepted_tokens"]
    assert sum(drafted) == block["num_draft_tokens"] > 0
    assert sum(accepted) == block["num_accepted_draft_tokens"]
    assert block["num_spec_tokens"] == 3
    assert block["acceptance_histogram"] == [accepted.count(count) for count in range(4)]
    assert block["mean_acceptance_length"] == 1 + sum(accepted) / block["num_spec_steps"]
    last = frames(post(state, path, stream=True).text)[-2]
    assert last["metrics"] == found["metrics"]
    none = post(state, path, speculative={"k": 0}).json()
    assert none["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert none["choices"] == found["choices"]
    assert post(state, path, vllm_xargs={"speculative": {"k": 0}}).json()["metrics"] == none["metrics"]  # fmt: skip


def test_a_summary_has_no_steps(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_mode(mode: str) -> Any:
        config = make_state(None, per_request_spec_decode_metrics=mode).config
        monkeypatch.setattr(state, "config", config)
        return post(state, TEXT).json()

    assert set(with_mode("summary")["metrics"]["speculative_decoding"]) == KEYS
    assert "metrics" not in with_mode("none")
