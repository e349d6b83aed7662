"""Facts that LLM reports about itself and its engine; its start and its end."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import page_model_engine
import pytest
import torch
from test_llm import GREEDY, model, plain

from quire.api.llm import LLM
from quire.api.metrics import Counter, Gauge, Histogram
from quire.config.engine_args import EngineArgs
from quire.errors import EngineDeadError, QuireError, Unsupported, ValidationError

# -- about the engine -------------------------------------------------------------------------------


def test_metrics_are_objects(llm: LLM):
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    by_name = {metric.name: metric for metric in llm.get_metrics()}
    tokens = by_name["vllm:generation_tokens"]
    assert isinstance(tokens, Counter)
    assert tokens.value == 12
    assert isinstance(by_name["vllm:num_requests_running"], Gauge)
    latency = by_name["vllm:e2e_request_latency_seconds"]
    assert isinstance(latency, Histogram)
    assert latency.count == 2
    assert latency.buckets["+Inf"] == 2
    assert by_name["vllm:request_generation_tokens"].sum == 12


def test_calls_to_the_engine(llm: LLM):
    llm.generate([[1] * 30], GREEDY, use_tqdm=False)
    (again,) = llm.generate([[1] * 30], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens > 0
    assert llm.reset_prefix_cache() is True
    (fresh,) = llm.generate([[1] * 30], GREEDY, use_tqdm=False)
    assert fresh.num_cached_tokens == 0
    assert llm.collective_rpc("name", args=(1,), kwargs={"k": 2}) == [
        ["collective_rpc", "name", [1], {"k": 2}]
    ]
    assert llm.apply_model(lambda found: found is model(llm)) == [True]
    found = llm.collective_rpc(
        lambda worker, a, b: (worker.model, a, b), args=(1,), kwargs={"b": 2}
    )
    assert found == [(model(llm), 1, 2)]
    with pytest.raises(QuireError, match="no function 'nonsense'"):
        llm.client.call("nonsense")


def test_names_that_programs_read(llm: LLM, folder: Path):
    config = llm.llm_engine.model_config
    assert (config.model, config.tokenizer, config.max_logprobs) == (str(folder), str(folder), 20)
    assert config.max_model_len == llm.client.ready.max_model_len
    assert config.get_vocab_size() == llm.client.ready.vocab_size
    assert isinstance(config.dtype, torch.dtype)
    assert not hasattr(config, "nonsense")
    parts = llm.llm_engine.vllm_config
    assert parts.cache_config.num_gpu_blocks == llm.client.ready.num_blocks
    assert parts.scheduler_config.max_num_seqs == llm.client.resolved.max_num_seqs
    assert parts.parallel_config.world_size == 1
    llm.enqueue(["a", "b"], GREEDY)
    assert llm.llm_engine.get_num_unfinished_requests() == 2
    llm.wait_for_completion(use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.tokenizer is llm.get_tokenizer()
    assert llm.supported_tasks == ("generate",)
    assert llm.get_world_size() == 1
    assert "assistant" in (llm.chat_template or "")


def test_without_a_tokenizer(make: Callable[..., LLM]):
    llm = make(skip_tokenizer_init=True)
    (output,) = llm.generate([[4, 5]], GREEDY, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", plain(llm, [4, 5], 6))
    with pytest.raises(ValidationError, match="prompt_token_ids"):
        llm.generate("text", GREEDY)
    for call in (llm.get_tokenizer, lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(ValidationError, match="skip_tokenizer_init"):
            call()


def test_another_tokenizer(make: Callable[..., LLM], tmp_path: Path):
    page_model_engine.save_byte_level(tmp_path, chat_template="other")
    assert make(tokenizer=str(tmp_path)).chat_template == "other"


def test_the_order_by_priority(make: Callable[..., LLM]):
    llm = make(scheduling_policy="priority")
    ended: list[str] = []
    finished = llm.watch.finished
    llm.watch.finished = lambda out, params: (ended.append(out.request_id), finished(out, params))[
        1
    ]  # type: ignore
    llm.generate([[n] for n in range(1, 9)], GREEDY, priority=list(range(8, 0, -1)), use_tqdm=False)
    assert set(ended[:4]) == {"4", "5", "6", "7"}  # four rows: the most important go first
    with pytest.raises(ValidationError, match="priority"):
        llm.generate("x", GREEDY, priority="high")  # type: ignore[arg-type]


def test_statistics_are_logged_if_enabled(
    make: Callable[..., LLM], caplog: pytest.LogCaptureFixture
):
    llm = make(disable_log_stats=False, log_stats_interval=0.0)
    with caplog.at_level(logging.INFO):
        llm.generate("a", GREEDY, use_tqdm=False)
    assert "Avg generation throughput" in caplog.text


def test_requests_are_logged_if_enabled(make: Callable[..., LLM], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        make().generate("quiet", GREEDY, use_tqdm=False)
        assert "Received request" not in caplog.text
        make(enable_log_requests=True, max_log_len=3).generate("loud", GREEDY, use_tqdm=False)
    assert "Received request 0: prompt: 'lou', prompt_token_ids: [" in caplog.text


def test_the_engine_ends_with_the_object(folder: Path):
    client = page_model_engine.make(folder)
    executor: Any = client.core.executor
    llm = LLM.from_client(client)
    llm.generate("a", GREEDY, use_tqdm=False)
    assert not executor.closed
    del llm
    gc.collect()
    assert executor.closed
    with LLM.from_client(page_model_engine.make(folder)) as other:
        executor = other.client.core.executor  # type: ignore[attr-defined]
    assert executor.closed
    with pytest.raises(EngineDeadError, match="shut down"):
        other.generate("a", GREEDY, use_tqdm=False)


def test_engine_args_are_accepted(monkeypatch: pytest.MonkeyPatch, folder: Path):
    seen = []

    def start_engine(config: Any) -> Any:
        seen.append(config)
        return page_model_engine.make(folder), None

    monkeypatch.setattr("quire.api.llm.start_engine", start_engine)
    with LLM.from_engine_args(EngineArgs(model=str(folder), max_num_seqs=3)):
        pass
    with LLM(str(folder), max_num_seqs=3):
        pass
    assert [config.scheduler.max_num_seqs for config in seen] == [3, 3]
    assert [config.observe.disable_log_stats for config in seen] == [False, True]


def test_importing_costs_no_torch():
    code = "import sys, quire.api.llm, quire.api.async_llm, quire.api.llm_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


@pytest.mark.parametrize("call", [lambda llm: llm.collective_rpc(print), lambda llm: llm.apply_model(print),
                                  lambda llm: llm.collective_rpc("get_model")])  # fmt: skip
def test_functions_cannot_be_sent_to_another_process(
    llm: LLM, call: Callable[[LLM], Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(llm.client, "resolved", replace(llm.client.resolved, executor="mp"))
    with pytest.raises(Unsupported, match=r"worker in another process .* cannot be sent"):
        call(llm)
