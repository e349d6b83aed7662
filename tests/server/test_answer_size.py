"""Answers are bounded by a sum before any work: nothing reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest
from asgi import ask
from scripted import ScriptedEngine

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOO_MANY: dict[str, tuple[str, dict[str, Any], int, str]] = {
    # what is asked, the sum, and the field that weighs most; a letter is a token, and BOS one more
    "prompt logprobs": (TEXT, {"prompt": ["a" * 49] * 4, "prompt_logprobs": 3, "max_tokens": 1}, 4 * 50 * 5 + 4, "prompt_logprobs"),
    "echo": (TEXT, {"prompt": ["a" * 49] * 4, "logprobs": 3, "echo": True, "max_tokens": 1}, 4 * 50 * 5 + 4 * 5, "prompt_logprobs"),
    "prompt logprobs of each choice": (TEXT, {"prompt": "a" * 19, "n": 20, "prompt_logprobs": 3, "max_tokens": 1}, 20 * 20 * 5 + 20, "prompt_logprobs"),
    "an echo in each choice": (TEXT, {"prompt": "a" * 29, "n": 40, "echo": True, "max_tokens": 1}, 40 * 30 + 40, "n"),
    "ids in each choice": (TEXT, {"prompt": "a" * 29, "n": 40, "return_token_ids": True, "max_tokens": 1}, 40 * 30 + 40, "n"),
    "logprobs": (TEXT, {"prompt": ["a"] * 4, "n": 10, "logprobs": 3, "max_tokens": 10}, 4 * 10 * 10 * 5, "logprobs"),
    "best of": (TEXT, {"prompt": ["a"] * 4, "best_of": 10, "logprobs": 3, "max_tokens": 10}, 4 * 10 * 10 * 5, "logprobs"),
    "all logprobs": (TEXT, {"prompt": "a", "logprobs": -1, "max_tokens": 1}, 2 + 0x110000 - 1, "logprobs"),
    "tokens": (TEXT, {"prompt": ["a"] * 4, "n": 20, "max_tokens": 50}, 4 * 20 * 50, "max_tokens"),
    "streamed": (TEXT, {"prompt": ["a"] * 4, "n": 20, "max_tokens": 50, "stream": True}, 4 * 20 * 50, "max_tokens"),
    "named tokens": (TEXT, {"prompt": "a", "n": 20, "max_tokens": 50, "logprob_token_ids": [1, 2, 3]}, 20 * 50 * 5, "logprobs"),
    "chat": (CHAT, {"messages": MESSAGES, "n": 20}, 20 * (64 - 7), "max_tokens"),
    "chat logprobs": (CHAT, {"messages": MESSAGES, "n": 5, "logprobs": True, "top_logprobs": 5, "max_tokens": 50}, 5 * 50 * 7, "logprobs"),
    "responses": ("/v1/responses", {"input": "hi", "top_logprobs": 20, "max_output_tokens": 50}, 50 * 22, "logprobs"),
    "beams": (TEXT, {"prompt": ["a" * 29] * 4, "use_beam_search": True, "n": 10, "max_tokens": 5}, 4 * 10 * 30 + 4 * 10 * 5, "n"),
    "beams' logprobs": (TEXT, {"prompt": "a", "use_beam_search": True, "n": 10, "max_tokens": 5, "logprobs": 1}, 10 * 2 + 10 * 5 * 22, "logprobs"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "total", "field"), TOO_MANY.values(), ids=TOO_MANY.keys())
def test_too_large_an_answer_is_refused_with_its_sum(path: str, body: dict[str, Any], total: int, field: str):  # fmt: skip
    engine = ScriptedEngine()
    answer = ask(engine, "POST", path, body, max_answer_entries=1000)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert f"could have {total} " in error["message"]
    assert "--max-answer-entries" in error["message"]
    assert error["param"] == field
    assert not engine.asked


@pytest.mark.parametrize(("path", "body", "total", "field"), TOO_MANY.values(), ids=TOO_MANY.keys())
def test_an_answer_at_the_limit_is_computed(
    path: str, body: dict[str, Any], total: int, field: str
):
    if body.get("use_beam_search") or body.get("best_of") or body.get("logprobs") == -1:
        pytest.skip("the scripted engine cannot")
    assert ask(ScriptedEngine(), "POST", path, body, max_answer_entries=total).status_code == 200


def test_messages_have_one_answer_that_is_never_too_large():
    body = {"messages": MESSAGES, "max_tokens": 1 << 30}
    assert ask(ScriptedEngine(), "POST", "/v1/messages", body, max_answer_entries=1).status_code == 200  # fmt: skip


def test_one_completion_is_never_too_large():
    """Whatever the context: a chat without `max_tokens` may fill it."""
    body = {"messages": MESSAGES}
    assert ask(ScriptedEngine(), "POST", CHAT, body, max_answer_entries=1).status_code == 200
