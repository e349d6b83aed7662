"""POST /v1/chat/completions/batch and POST /inference/v1/generate: what they answer equals what other routes answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from asgi import ask, browser, calling, frames
from scripted import ScriptedEngine, make_state

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.server.state import ServerState

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BATCH, GENERATE = "/v1/chat/completions/batch", "/inference/v1/generate"


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


CONVERSATIONS = [said("Once upon a time"), said("a b c d", "e f g"), said("What is 12 + 7?")]


@pytest.fixture(scope="module")
def state() -> Iterator[ServerState]:
    config = EngineConfig.from_keywords(
        model="quire-tiny", max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_model_len=512
    )
    made = make_state(None)
    made.attach(engine := AsyncEngine(make_client(config), config))
    yield made
    engine.shutdown()


def post(state: ServerState, *requests: tuple[str, Any]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        async with browser(state) as client:
            return [
                await asyncio.wait_for(client.post(path, json=body), 60) for path, body in requests
            ]

    return asyncio.run(main())


# -- batches --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"seed": 5, "temperature": 0.9, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0, "structured_outputs": {"regex": "(yes|no)"}},
        {"temperature": 0, "echo": True, "return_token_ids": True},
        {"temperature": 0, "add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_a_batch_answers_as_single_requests_do(state: ServerState, more: dict[str, Any]):
    more = {**more, "max_tokens": 12}
    singles = post(state, *((CHAT, {"messages": one, **more}) for one in CONVERSATIONS))
    (found,) = post(state, (BATCH, {"messages": CONVERSATIONS, **more}))
    assert found.status_code == 200, found.text
    answers, answer = [one.json() for one in singles], found.json()
    expected = [one["choices"][0] | {"index": at} for at, one in enumerate(answers)]
    assert answer["choices"] == expected
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert "-" not in answer["id"].removeprefix("chatcmpl-")
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(one["usage"][name] for one in answers)


def test_a_batch_splits_reasoning():
    engine = ScriptedEngine("<think>so</think>yes")
    state = make_state(engine, reasoning_parser="qwen3")
    found = ask(engine, "POST", BATCH, {"messages": [said("a"), said("b")]}, state=state)
    assert [one["message"]["content"] for one in found.json()["choices"]] == ["yes", "yes"]
    assert [one["message"]["reasoning"] for one in found.json()["choices"]] == ["so", "so"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": said("a")}, "messages[0]"),
        ({"messages": "a"}, "messages"),
        ({"messages": [said("a"), [{"role": 7}]]}, "messages[0].role"),
        ({"messages": [said("a")] * 1025}, "messages"),
        ({"messages": [said(*"a" * 6000)] * 2}, "messages"),
        ({"messages": [said("a")], "stream": True}, "stream"),
        ({"messages": [said("a")], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [said("a")], "tool_choice": "auto"}, "tool_choice"),
        ({"messages": [said("a")], "use_beam_search": True}, "use_beam_search"),
        ({"messages": [said("a")], "n": 2}, "n"),
        ({"messages": [said("a")], "best_of": 2}, "n"),
        ({"messages": [said("a")], "logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"messages": [said("a")] * 2, "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"messages": [said("a")] * 1000, "logprobs": True, "top_logprobs": 20}, "logprobs"),
    ],
)
def test_a_wrong_batch_is_refused_by_name(body: dict[str, Any], param: str):
    engine = ScriptedEngine()
    state = make_state(engine, max_answer_entries=100_000)
    found = ask(engine, "POST", BATCH, body, state=state)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
    assert engine.asked == []


def test_one_failure_ends_the_whole_batch():
    engine = ScriptedEngine(ValueError("no"))
    found = ask(engine, "POST", BATCH, {"messages": [said("a"), said("b"), said("c")]})
    assert found.status_code == 400
    assert len(engine.closed) == len(engine.asked)


def test_a_client_that_hangs_up_aborts_all_its_conversations():
    async def main() -> None:
        engine = ScriptedEngine()
        engine.gate = asyncio.Event()
        state = make_state(engine)
        async with calling(state, BATCH, {"messages": [said("a")] * 5}) as call:
            while len(engine.asked) < 5:
                await asyncio.sleep(0.01)
            call.hang_up()
            await call.ended()
        assert sorted(engine.aborted) == sorted(one.id for one in engine.asked)
        assert not state.active

    asyncio.run(main())


def test_a_thousand_conversations_do_not_hold_the_loop():
    engine = ScriptedEngine()
    state = make_state(engine)
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - before)

    async def main() -> httpx.Response:
        async with browser(state) as client:
            watching = asyncio.create_task(watch())
            found = await client.post(BATCH, json={"messages": [said("hi")] * 1000})
            watching.cancel()
            return found

    found = asyncio.run(main())
    assert len(found.json()["choices"]) == 1000
    assert longest < 0.5  # 0.03 to 0.06 alone; the machine may be busy


def test_a_batch_counts_against_the_limits_of_its_key(tmp_path: Any):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "a", "key": "k", "max_concurrency": 3}]))
    state = make_state(engine := ScriptedEngine(), api_key_file=str(keys))
    head = {"Authorization": "Bearer k"}
    for count, status in ((3, 200), (4, 400), (3, 200)):
        found = ask(engine, "POST", BATCH, {"messages": [said("a")] * count}, head, state)
        assert found.status_code == status, found.text


# -- tokens in, tokens out ------------------------------------------------------------------------
PROMPT = [5, 60, 70, 80, 90]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 3, "n": 2, "top_k": 40},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0, "stop": ["e"]},
    ],
)
@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_generated_tokens_are_those_of_a_completion(
    state: ServerState, params: dict[str, Any], mode: str
):
    params = {**params, "max_tokens": 16}
    known = {"prompt": PROMPT, "return_token_ids": True, **params}
    body = {"token_ids": PROMPT, "sampling_params": params, "output_mode": mode, "return_token_ids": True}  # fmt: skip
    expected, found = (one.json() for one in post(state, (TEXT, known), (GENERATE, body)))
    assert found["output_mode"] == mode
    assert found["request_id"].startswith("generate-tokens-")
    assert found["prompt_token_ids"] == PROMPT
    assert len(found["choices"]) == params.get("n", 1)
    for one, other in zip(found["choices"], expected["choices"], strict=True):
        for name in ("index", "token_ids", "finish_reason", "stop_reason"):
            assert one[name] == other[name]
        assert one.get("text") == (other["text"] if mode == "text" else None)
    assert found["usage"] == expected["usage"]
    if "prompt_logprobs" in params:
        pairs = zip(found["prompt_logprobs"][1:], expected["choices"][0]["prompt_logprobs"][1:], strict=True)  # fmt: skip
        for here, there in pairs:
            without_text = {
                token: entry | {"decoded_token": None} for token, entry in there.items()
            }
            assert here == (there if mode == "text" else without_text)
    if "logprobs" in params:
        logprobs = expected["choices"][0]["logprobs"]
        rows = found["choices"][0]["logprobs"]["content"]
        assert [row["logprob"] for row in rows] == logprobs["token_logprobs"]
        assert {len(row["top_logprobs"]) for row in rows} == {2}
        if mode == "tokens":
            assert [row["token_id"] for row in rows] == found["choices"][0]["token_ids"]


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_a_stream_has_the_same_tokens(state: ServerState, mode: str):
    body = {
        "token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": 9, "logprobs": 0},
        "output_mode": mode, "return_token_ids": True,
    }  # fmt: skip
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    whole, streamed = post(state, (GENERATE, body), (GENERATE, body | usage))
    *chunks, last, done = frames(streamed.text)
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 9)
    assert [("prompt_token_ids" in chunk) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)  # fmt: skip
    (choice,) = whole.json()["choices"]
    assert [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    rows = [row for chunk in chunks for row in chunk["choices"][0]["logprobs"]["content"]]
    assert rows == choice["logprobs"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    if mode == "text":
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


def test_an_unlimited_request_ends_at_the_context_and_has_no_defaults_of_the_model():
    engine = ScriptedEngine()
    engine.inputs.defaults.sampling["temperature"] = 0.25
    found = ask(
        engine, "POST", GENERATE, {"token_ids": [65, 66], "sampling_params": {"stop": None}}
    )
    assert found.status_code == 200, found.text
    (asked,) = engine.asked
    assert (asked.params.max_tokens, asked.params.temperature) == (None, 1.0)
    assert asked.params.detokenize is False
    assert asked.prompt.tokens == [65, 66]


DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("body", "said_of"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [[1]]}, "token_ids"),
        ({"token_ids": [[1, 2]] * 30_000}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"token_ids": [-1]}, "prompt"),
        ({"token_ids": [0x110000]}, "prompt"),
        ({"token_ids": [1] * 100_000}, "maximum context length"),
        ({"token_ids": [1], "sampling_params": []}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"n": "many"}}, "n"),
        ({"token_ids": [1], "sampling_params": {"n": 10_000}}, "n"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"stop": DEEP}}, "stop"),
        ({"token_ids": [1], "sampling_params": {"extra_args": {"a": "x" * 100_000}}}, "extra_args"),
        ({"token_ids": [1], "sampling_params": {"use_beam_search": True}}, "use_beam_search"),
        ({"token_ids": [1], "sampling_params": {"logits_processors": ["os.system"]}}, "logits_processors"),
        ({"token_ids": [1], "sampling_params": {"checked": True}}, "checked"),
        ({"token_ids": [1], "sampling_params": {"bad_word_ids": [[1]]}}, "bad_word_ids"),
        ({"token_ids": [1], "sampling_params": {"stop": ["a"] * 100}}, "stop"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 10**9}}, "logprobs"),
        ({"token_ids": [1], "output_mode": "voice"}, "output_mode"),
        ({"token_ids": [1], "features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": [1], "content_parts": [{"type": "image_url", "url": "http://10.0.0.1"}]}, "content_parts"),
        ({"token_ids": [1], "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"token_ids": [1], "stream_options": {"include_usage": True}}, "stream_options"),
        ({"token_ids": [1], "request_id": "a b"}, "request_id"),
        ({"token_ids": [1], "cache_salt": "a/b"}, "cache_salt"),
        ({"token_ids": [1], "reasoning_ended": False, "sampling_params": {"structured_outputs": {"regex": "a"}}}, "reasoning_ended"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_by_name(body: dict[str, Any], said_of: str):
    engine = ScriptedEngine()
    found = ask(engine, "POST", GENERATE, body)
    assert found.status_code == 400, found.text
    assert said_of in found.json()["error"]["message"]
    assert engine.asked == []


def test_another_model_is_not_found_and_a_key_is_needed():
    found = ask(ScriptedEngine(), "POST", GENERATE, {"token_ids": [1], "model": "x"})
    assert found.status_code == 404
    state = make_state(engine := ScriptedEngine(), api_key=["k"])
    for path in (GENERATE, BATCH):
        assert ask(engine, "POST", path, {}, state=state).status_code == 401
