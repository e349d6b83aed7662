"""`--reasoning-config`: what ends reasoning when its budget is spent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi import browser
from scripted import make_state

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.config.from_keywords import engine_config
from quire.config.validate import check_options
from quire.engine.build import make_client
from quire.errors import ConfigError

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
THINK = "Count.\n<think>\n"


def texts(reasoning: Any, *bodies: dict[str, Any], **more: Any) -> list[Any]:
    config = EngineConfig.from_keywords(
        model="quire-tiny", max_num_seqs=2, kv_cache_memory_bytes=16 << 20, max_model_len=256,
        reasoning_config=reasoning, **more,
    )  # fmt: skip

    async def main() -> list[Any]:
        async with browser(state) as client:
            return [await asyncio.wait_for(client.post(TEXT, json=body), 60) for body in bodies]

    state = make_state(None)
    state.attach(engine := AsyncEngine(make_client(config), config))
    try:
        return asyncio.run(main())
    finally:
        engine.shutdown()


def asked(budget: int | None, **more: Any) -> dict[str, Any]:
    return {
        "prompt": THINK, "max_tokens": 40, "seed": 1, "ignore_eos": True, "skip_special_tokens": False,
        "thinking_token_budget": budget, "return_token_ids": True, **more,
    }  # fmt: skip


def test_the_configured_sentence_ends_reasoning_after_the_budget():
    end = "\nSo be it.\n</think>"
    plain, same, other = texts({"reasoning_end_str": end}, asked(None), asked(6), asked(-1))
    plain, same, other = (one.json()["choices"][0] for one in (plain, same, other))
    assert end not in plain["text"]
    assert other["token_ids"] == plain["token_ids"]
    assert same["token_ids"][:6] == plain["token_ids"][:6]
    before, _, after = same["text"].partition(end)
    assert plain["text"].startswith(before)
    assert after
    assert "So be it" not in after


def test_without_it_the_models_marker_ends_reasoning():
    (same,) = texts({}, asked(6))
    (twice,) = texts({"reasoning_end_str": "</think>", "reasoning_start_str": "<think>"}, asked(6))
    assert same.json()["choices"][0]["token_ids"] == twice.json()["choices"][0]["token_ids"]
    assert "</think>" in same.json()["choices"][0]["text"]


def test_marks_may_be_given_where_the_format_is_unknown():
    off = {"reasoning_parser": "none"}
    marks = {"reasoning_end_str": "</think>", "reasoning_start_str": "<think>"}
    (found,) = texts(marks, asked(6), **off)
    assert found.json()["choices"][0]["token_ids"] == texts({}, asked(6))[0].json()["choices"][0]["token_ids"]  # fmt: skip
    (refused,) = texts({"reasoning_end_str": "</think>"}, asked(6), **off)
    assert refused.status_code == 400
    assert "thinking_token_budget" in refused.json()["error"]["message"]


def test_a_sentence_without_the_marker_is_refused():
    (found,) = texts({"reasoning_end_str": "Enough."}, asked(6))
    assert found.status_code == 400
    assert "must end with </think>" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"reasoning_stop_str": "a"}, "reasoning_stop_str"),
        ({"reasoning_end_str": 7}, "reasoning_end_str"),
        ({"reasoning_end_str": "x" * 1025}, "reasoning_end_str"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        check_options(EngineConfig.from_keywords(model="quire-tiny", reasoning_config=config))


def test_the_parser_in_it_is_that_of_the_server():
    config = engine_config({"reasoning_config": '{"reasoning_parser": "qwen3"}'}, "flag")
    assert config.server.reasoning_parser == "qwen3"
    config = engine_config({"reasoning_config": {"reasoning_parser": "qwen3"}, "reasoning_parser": "glm45"})  # fmt: skip
    assert config.server.reasoning_parser == "glm45"
