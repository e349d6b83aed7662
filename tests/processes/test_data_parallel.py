"""Several engines with the same model: the same tokens as one, in a program and behind a server; and a dead engine."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import PATIENCE_S, Served, children, has_torch, until

from quire import LLM, SamplingParams
from quire.api.metrics import Counter

MODEL = "quire-tiny"
PROMPTS = ["The quick brown fox", "1 2 3 4 5", "def add(a, b):", "Once upon a time"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=24, n=2)


def answers(llm: LLM) -> list[Any]:
    found = llm.generate(PROMPTS, [GREEDY, SAMPLED, GREEDY, SAMPLED], use_tqdm=False)
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs)
        for request in found
        for one in request.outputs
    ]


def generated(llm: LLM) -> dict[str, int]:
    """Tokens by engine."""
    return {
        one.labels["engine"]: one.value
        for one in llm.get_metrics()
        if isinstance(one, Counter) and one.name == "vllm:generation_tokens"
    }


def test_prompts_are_dealt_out_and_the_tokens_are_those_of_one_engine() -> None:
    with LLM(MODEL, max_model_len=256, max_num_seqs=4) as one:
        wanted = answers(one)
    with LLM(MODEL, max_model_len=256, max_num_seqs=4, data_parallel_size=2) as two:
        assert answers(two) == wanted
        counts = generated(two)
        assert counts.keys() == {"0", "1"}
        assert min(counts.values()) > 0
        assert sum(counts.values()) == 24 * 6
        assert two.reset_prefix_cache()
        assert (two.get_world_size(), two.get_world_size(include_dp=False)) == (2, 1)
        two.sleep(level=1)
        two.wake_up()
        assert answers(two) == wanted


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served(MODEL, "-dp", "2", "--max-model-len", "256", "--max-num-seqs", "4") as found:
        yield found


BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


def asked(server: Served, **more: Any) -> httpx.Response:
    headers = {"X-data-parallel-rank": more.pop("rank")} if "rank" in more else {}
    return httpx.post(
        server.url + "/v1/completions", json=BODY | more, headers=headers, timeout=PATIENCE_S
    )


def test_a_header_names_the_engine(server: Served) -> None:
    assert asked(server, rank="0").status_code == 200
    until(lambda: server.metric("vllm:generation_tokens_total", 'engine="0"') == 24)
    assert server.metric("quire:engine_steps_total", 'engine="1"') == 0  # it takes no empty steps
    texts = {asked(server, rank=rank).json()["choices"][0]["text"] for rank in ("0", "1", "any")}
    assert len(texts) == 1
    for engine in ("0", "1"):
        label = f'engine="{engine}"'
        until(lambda label=label: server.metric("vllm:generation_tokens_total", label) >= 24)
        assert server.metric("vllm:e2e_request_latency_seconds_count", label) >= 1
        assert server.metric("quire:max_num_seqs", label) == 4
        assert server.metric("vllm:cache_config_info", label) == 1
    refused = asked(server, rank="2")
    assert refused.status_code == 400
    assert "the engines 0 to 1" in refused.text


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


@pytest.mark.slow
def test_a_dead_engine_disturbs_no_other(server: Served) -> None:
    """Its requests go on in the other; all are answered, and with the same text."""
    engines = [pid for pid in children(server.process.pid) if has_torch(pid)]
    assert len(engines) == 2
    before = {pid: cpu_ticks(pid) for pid in engines}
    assert asked(server, rank="1", max_tokens=200, ignore_eos=True).status_code == 200
    second = max(engines, key=lambda pid: cpu_ticks(pid) - before[pid])
    found: list[httpx.Response] = []

    def ask() -> None:
        found.append(asked(server, max_tokens=800, ignore_eos=True))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    until(lambda: server.metric("vllm:num_requests_running", 'engine="1"') >= 1)
    os.kill(second, signal.SIGKILL)
    told = {"status": "engine 1 is being restarted"}  # with status 503
    until(lambda: (found := server.client.get("/health/ready")).is_error and found.json() == told)
    assert server.client.get("/health").status_code == 200
    assert asked(server).status_code == 200
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [answer.status_code for answer in found] == [200] * 12
    assert len({answer.json()["choices"][0]["text"] for answer in found}) == 1
    until(lambda: server.metric("quire:requests_resumed_total", 'engine="0"') >= 1)
    until(lambda: server.client.get("/health/ready").status_code == 200)
    until(lambda: server.metric("quire:process_restarts_total", 'process="engine"') == 1)
    assert asked(server, rank="1").status_code == 200
    failures = [line for line in server.lines if re.search(r"failure \w+ of ", line)]
    assert [" of engine 1: the engine process was ended by SIGKILL" in line for line in failures] == [True]  # fmt: skip


def test_a_stop_leaves_nothing(server: Served) -> None:
    """The last of this server."""
    family = children(server.process.pid)
    assert server.stop(signal.SIGTERM) == 0
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
