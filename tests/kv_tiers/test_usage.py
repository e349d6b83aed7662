"""Every route that has usage says where the cached tokens of a prompt came from."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))

from asgi import browser
from kv_tiers.kept import until
from scripted import make_state

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.features.kv_tiers.gate import KVTierGate
from quire.server.state import ServerState

TEXT = "The quick brown fox jumps over the lazy dog. " * 8
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
    COMPLETIONS: {"prompt": TEXT, "max_tokens": 2},
    RESPONSES: {"input": TEXT, "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerState, KVTierGate]]:
    config = EngineConfig.from_keywords(
        model="quire-tiny", max_num_seqs=2, kv_cache_memory_bytes=16 << 20, max_model_len=512,
        kv_disk_dir=str(tmp_path_factory.mktemp("kv") / "kv"), kv_disk_write="always",
    )  # fmt: skip
    made = make_state(None, enable_prompt_tokens_details=True)
    made.attach(engine := AsyncEngine(client := make_client(config), config))
    gate = next(g for g in client.core.scheduler.gates if isinstance(g, KVTierGate))
    until(lambda: gate.store.is_open, "the store opens")
    yield made, gate
    engine.shutdown()


def usages(state: ServerState, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All that the answer, or its events, say of the cache."""

    async def main() -> Any:
        async with browser(state) as client:
            return await asyncio.wait_for(client.post(path, json=body), 60)

    found = asyncio.run(main())
    assert found.status_code == 200, found.text
    lines = re.findall(r"^data: ({.*})$", found.text, re.M) if body.get("stream") else [found.text]
    answers = [json.loads(line) for line in lines]
    told = [one.get("usage") or one.get("response", {}).get("usage") for one in answers]
    return [one.get("prompt_tokens_details") or one["input_tokens_details"] for one in told if one]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_usage_says_where_cached_tokens_came_from(
    served: tuple[ServerState, KVTierGate], path: str, stream: bool
) -> None:
    (state, gate), body = served, {**BODIES[path], "stream": stream}
    if stream and path != RESPONSES:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    usages(state, path, body)
    until(lambda: not (gate.wants_plan() or gate.transfers.num_writing), "all blocks are saved")
    for source in ("device", "disk", "device"):
        found = usages(state, path, body)
        assert found
        for one in found:
            cached = one["cached_tokens"]
            assert cached >= 64
            assert one["cached_tokens_by_source"] == {source: cached}
        if source == "device":
            asyncio.run(state.serving().call("reset_prefix_cache"))
