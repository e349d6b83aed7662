"""An engine process that dies is replaced by one that has the same adapters."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from equality.engines import Engine, make_checkpoint
from lora.adapters import run, write

from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.errors import QuireError
from quire.protocol.sampling_params import SamplingParams


@pytest.mark.slow
def test_a_replaced_engine_has_the_same_adapters(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    config = EngineConfig.from_keywords(
        model=path, dtype="float32", max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=8 << 20,
        enable_lora=True, max_loras=2, max_lora_rank=8, skip_tokenizer_init=True,
        lora_modules=[{"name": "b", "path": write(tmp_path / "b", 2, 2), "base_model_name": None}],
    )  # fmt: skip
    client = make_client(config, process=True)
    try:
        client.call("load_lora", "a", write(tmp_path / "a", 4, 1))
        client.call("load_lora", "b", write(tmp_path / "c", 4, 3), True)
        one, names = Engine(client), ["a", "b", None]  # type: ignore[arg-type]
        prompts, params = (
            [[5, 6, 7, 8]] * 3,
            SamplingParams(temperature=0.0, max_tokens=6, logprobs=1),
        )
        before = run(one, prompts, names, params)
        versions = {card["name"]: card["version"] for card in client.call("list_loras")}
        epoch = client.epoch
        os.kill(client.wait_ready().pid, signal.SIGKILL)
        while client.epoch == epoch or client.state().condition != "ready":
            with suppress(QuireError):  # the engine is replaced meanwhile
                client.call("stats")
            time.sleep(0.1)
        cards = client.call("list_loras")
        assert {card["name"]: card["version"] for card in cards} == versions
        assert {card["state"] for card in cards} == {"evicted"}
        assert run(one, prompts, names, params) == before
    finally:
        client.close()
