"""The soak of adapters itself: a short run passes, and it detects the tokens of another adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import soak
import soak_adapters
from server_process import Served


@pytest.mark.slow
def test_a_short_soak_of_adapters(tmp_path: Path):
    soak_adapters.prepare(tmp_path)
    with Served(soak.MODEL, *soak_adapters.FLAGS, env=soak_adapters.ENV) as server:
        run, wrong, words = soak_adapters.soak_adapters(server, tmp_path, 20, 12, 7)
    assert not wrong, words
    for what in soak_adapters.KINDS:
        assert run.did[what] > 0


def test_the_soak_detects_the_tokens_of_another_content(tmp_path: Path):
    expected = {(content, prompt): [number] for number, content in enumerate(("a", "b")) for prompt in soak_adapters.PROMPTS}  # fmt: skip
    run = soak_adapters.AdapterSoak("", tmp_path, expected, 0, 0)
    (name, *_) = run.history

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"choices": [{"token_ids": [1]}]})

    async def ask(*contents: str) -> int:
        run.history[name] = [set(contents)]
        async with httpx.AsyncClient(base_url="http://a", transport=httpx.MockTransport(answer)) as http:  # fmt: skip
            await run.ask(http, name)
        return len(run.wrong)

    assert [asyncio.run(ask(*contents)) for contents in (("b",), ("a", "b"), ("a",), ("",))] == [0, 0, 1, 2]  # fmt: skip
