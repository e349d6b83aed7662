"""Speculative decoding over HTTP, on the embedded model: a request's limit, and the metrics in its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from asgi import browser, frames
from scripted import ScriptedEngine, make_state

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.observe.speculation_log import speculation_line
from quire.protocol.output import EngineStats
from quire.server.state import ServerState

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAY = {"messages": [{"role": "user", "content": "Repeat: a b c d e f a b c d e f a b c d e f"}]}
BODIES: dict[str, dict[str, Any]] = {CHAT: SAY, TEXT: {"prompt": "a b c a b c a b c"}, RESPONSES: {"input": "Repeat: a b c d a b c d a b"}}  # fmt: skip
LIMIT = {RESPONSES: "max_output_tokens"}
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
            whole |= {"ignore_eos": True, LIMIT.get(path, "max_tokens"): 24}
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


def counted(state: ServerState) -> list[float]:
    """Draft tokens of the engine so far, and how many of them were right."""
    counts = state.engine.client.call("stats")["counts"]
    return [counts[f"spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted")]


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_reports_its_draft_tokens(state: ServerState, path: str) -> None:
    before = counted(state)
    found = post(state, path).json()
    block = found["metrics"]["speculative_decoding"]
    drafts, accepts = (after - old for after, old in zip(counted(state), before, strict=True))
    assert (drafts, accepts) == (block["num_draft_tokens"], block["num_accepted_draft_tokens"])
    assert set(block) == KEYS | STEPS
    drafted, accepted = block["per_step_num_draft_tokens"], block["per_step_num_accepted_tokens"]
    assert sum(drafted) == block["num_draft_tokens"] > 0
    assert sum(accepted) == block["num_accepted_draft_tokens"]
    assert block["num_spec_tokens"] == 3
    assert block["acceptance_histogram"] == [accepted.count(count) for count in range(4)]
    assert block["mean_acceptance_length"] == 1 + sum(accepted) / block["num_spec_steps"]
    if path == RESPONSES:
        return
    last = frames(post(state, path, stream=True).text)[-2]
    assert last["metrics"] == found["metrics"]
    none = post(state, path, speculative={"k": 0}).json()
    assert none["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert none["choices"] == found["choices"]
    if path == TEXT:
        assert post(state, path, speculative={"k": 10**30}).json()["choices"] == found["choices"]
    assert post(state, path, vllm_xargs={"speculative": {"k": 0}}).json()["metrics"] == none["metrics"]  # fmt: skip


def test_a_stream_has_several_tokens_in_an_event(state: ServerState) -> None:
    """In their order, and the usage counts them; draft tokens that were refused appear nowhere."""
    whole = post(state, TEXT, logprobs=1).json()
    usage = {"stream_options": {"include_usage": True}}
    *events, last, done = frames(post(state, TEXT, logprobs=1, stream=True, **usage).text)
    assert done == "[DONE]"
    assert last["usage"].items() <= whole["usage"].items()
    assert last["usage"]["completion_tokens"] == 24
    parts = [event["choices"][0] for event in events]
    scored = [part["logprobs"] for part in parts if part["logprobs"]]
    assert "".join(part["text"] for part in parts) == whole["choices"][0]["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for one in scored for value in one[name]]
        assert joined == whole["choices"][0]["logprobs"][name]
    assert max(len(one["tokens"]) for one in scored) > 1


def test_a_summary_has_no_steps(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    features = state.engine.front.features

    def with_mode(mode: str) -> Any:
        (feature,) = (each for each in features if each.name == "speculation")
        config = feature.resolved.config
        observe = replace(config.observe, per_request_spec_decode_metrics=mode)
        resolved = replace(feature.resolved, config=replace(config, observe=observe))
        monkeypatch.setattr(feature, "resolved", resolved)
        return post(state, TEXT).json()

    assert set(with_mode("summary")["metrics"]["speculative_decoding"]) == KEYS
    assert "metrics" not in with_mode("none")


def exported(state: ServerState) -> set[str]:
    async def main() -> str:
        async with browser(state) as client:
            return (await client.get("/metrics")).text

    lines = asyncio.run(main()).splitlines()
    return {line.partition(" ")[0] for line in lines if line.startswith("vllm:spec_decode")}


def test_counters_are_exported_only_with_speculation(state: ServerState) -> None:
    post(state, TEXT)
    found = exported(state)
    assert sum("per_pos" in name for name in found) == 3
    assert all(f'position="{at}"' in "".join(found) for at in range(3))
    assert exported(make_state(ScriptedEngine())) == set()


def test_the_log_line_has_the_form_of_vllm() -> None:
    before = EngineStats(counts={"spec_decode_num_drafts": 10.0})
    counts = {"drafts": 20.0, "draft_tokens": 30.0, "accepted_tokens": 15.0}
    now = {f"spec_decode_num_{name}": value for name, value in counts.items()}
    now |= {f"spec_decode_num_accepted_tokens_per_pos:{at}": 10.0 - 5 * at for at in range(2)}
    assert speculation_line(EngineStats(counts=now), before, 5.0) == (
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 3.00 tokens/s, Drafted throughput:"
        " 6.00 tokens/s, Accepted: 15 tokens, Drafted: 30 tokens, Per-position acceptance rate: 1.000, 0.500, Avg Draft"
        " acceptance rate: 50.0%"
    )
    assert speculation_line(before, before, 5.0) == ""
