"""Engines of data parallelism that share the experts of a mixture: the tokens of one engine, and a dead engine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from equality.engines import make_checkpoint
from server_process import PATIENCE_S, Served, children, has_torch, until

from quire import LLM, SamplingParams

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
    "num_local_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "max_model_len": 256, "max_num_batched_tokens": 32, "max_num_seqs": 4, "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 4 << 20,
}  # fmt: skip
PROMPTS: list[Any] = [{"prompt_token_ids": [*range(3, 3 + n)]} for n in (40, 7, 90, 3, 20, 1, 64)]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=24, logprobs=3, prompt_logprobs=1)
SHARED: dict[str, Any] = {"enable_expert_parallel": True, "data_parallel_size": 2}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("mixtral", tmp_path_factory.mktemp("mixture"), **SIZES)


def answers(llm: LLM, prompts: list[Any] = PROMPTS) -> list[Any]:
    return [
        (one.token_ids, one.finish_reason, one.logprobs, request.prompt_logprobs)
        for request in llm.generate(prompts, PARAMS, use_tqdm=False)
        for one in request.outputs
    ]


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [
        ("bfloat16", 1),
        pytest.param("float32", 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_and_log_probabilities_are_those_of_one_engine(
    mixture: str, dtype: str, ranks: int
) -> None:
    """Also with one request, beside which the other engine is idle, and after both have dropped their weights."""
    with LLM(mixture, dtype=dtype, **SETTINGS) as one:
        wanted = answers(one)
        [whole] = one.collective_rpc("num_parameters")
    with LLM(mixture, dtype=dtype, tensor_parallel_size=ranks, **SHARED, **SETTINGS) as two:
        assert answers(two) == wanted
        assert answers(two, PROMPTS[:1]) == wanted[:1]
        two.sleep(level=2)
        two.wake_up()
        assert answers(two) == wanted
        experts = 2 * 6 * 3 * 128 * 128
        if ranks == 1:
            assert two.collective_rpc("num_parameters") == [whole - experts // 2] * 2


@pytest.fixture(scope="module")
def server(mixture: str) -> Iterator[Served]:
    flags = ["-dp", "2", "-ep", "--max-model-len", "256", "--max-num-seqs", "4", "--skip-tokenizer-init"]  # fmt: skip
    with Served(mixture, *flags, "--served-model-name", "m") as found:
        yield found


BODY = {
    "model": "m", "prompt": [*range(5, 30)], "max_tokens": 24, "temperature": 0, "return_token_ids": True,
    "ignore_eos": True,
}  # fmt: skip


def asked(server: Served, **more: Any) -> httpx.Response:
    headers = {"X-data-parallel-rank": more.pop("rank")} if "rank" in more else {}
    return httpx.post(
        server.url + "/v1/completions", json=BODY | more, headers=headers, timeout=PATIENCE_S
    )


def tokens(answer: httpx.Response) -> list[int]:
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def engines_of(server: Served) -> list[int]:
    return [pid for pid in children(server.process.pid) if has_torch(pid)]


@pytest.mark.slow
def test_an_idle_engine_answers_without_steps(server: Served) -> None:
    first = tokens(asked(server, rank="0"))
    assert len(first) == 24
    assert server.metric("quire:engine_steps_total", 'engine="1"') == 0
    assert tokens(asked(server, rank="1")) == first


@pytest.mark.slow
def test_aborted_requests_disturb_no_other(server: Served) -> None:
    """Clients that leave in the middle of their streams, beside others in both engines."""
    wanted = tokens(asked(server))
    found: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda rank=rank: found.append(asked(server, rank=rank)))
        for rank in "010101"
    ]
    for thread in threads:
        thread.start()
    for _ in range(4):
        body = BODY | {"stream": True, "max_tokens": 200}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=PATIENCE_S) as stream:  # fmt: skip
            next(stream.iter_lines())
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [tokens(answer) for answer in found] == [wanted] * 6
    until(lambda: server.metric("vllm:num_requests_running") == 0)


@pytest.mark.slow
def test_a_killed_engine(server: Served) -> None:
    """The other waits until it has started again, or its requests end with an error; then both serve."""
    wanted = tokens(asked(server, max_tokens=200))
    found: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: found.append(asked(server, max_tokens=200)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    until(lambda: server.metric("vllm:num_requests_running") > 1 or len(found) == 8)
    os.kill(engines_of(server)[1], signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 8, "a request hangs"
    assert {answer.status_code for answer in found} <= {200, 500}
    assert all(tokens(answer) == wanted for answer in found if answer.status_code == 200)
    until(lambda: server.client.get("/health/ready").status_code == 200)
    assert tokens(asked(server, rank="0", max_tokens=200)) == wanted
    assert tokens(asked(server, rank="1", max_tokens=200)) == wanted


@pytest.mark.slow
def test_a_stop_leaves_nothing(server: Served) -> None:
    """The last of this server."""
    family = children(server.process.pid)
    assert server.stop(signal.SIGTERM) == 0
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
