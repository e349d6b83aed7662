"""Streams go on when their engine is killed or stopped: text, tokens and log-probabilities equal an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ENGINE, PATIENCE_S, SOURCE, Served, running, until

MODEL = "quire-tiny"
FLAGS = ("--max-model-len", "512", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "16M")
LENGTH = 200
TEXT: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": LENGTH,
    "ignore_eos": True,
    "logprobs": 2,
}
PERSON = {
    "type": "array",
    "minItems": 12,
    "maxItems": 12,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "greedy": TEXT | {"temperature": 0},
    "seeded": TEXT | {"temperature": 1.3, "seed": 11, "prompt": "The cat"},
    "penalties": TEXT | {"seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "top-k and top-p": TEXT | {"seed": 4, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "prompt": [5, 6, 7]},
    "stop strings": TEXT | {"seed": 5, "min_tokens": 150, "stop": ["the", "and"], "include_stop_str_in_output": True},
    "several outputs": TEXT | {"seed": 6, "n": 3},
    "adapter": TEXT | {"seed": 7, "model": "pirate"},
    "schema": {"prompt": "People: ", "max_tokens": 400, "seed": 8, "structured_outputs": {"json": PERSON}},
}  # fmt: skip
Answer = dict[int, tuple[str, list[int], Any, str | None]]


def stream(server: Served, body: dict[str, Any], heard: threading.Semaphore | None = None) -> tuple[Answer, Any]:  # fmt: skip
    """By index: text, tokens, log-probabilities, finish reason; and the usage."""
    parts: dict[int, list[dict[str, Any]]] = {}
    usage = None
    asked = {"model": MODEL, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}} | body  # fmt: skip
    with httpx.stream("POST", server.url + "/v1/completions", json=asked, timeout=PATIENCE_S) as got:  # fmt: skip
        assert got.status_code == 200, got.read()
        for line in got.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
            if heard is not None and sum(map(len, parts.values())) == 4:
                heard.release()
    answer = {}
    for index, choices in parts.items():
        logprobs = [one["logprobs"] for one in choices if one.get("logprobs")]
        answer[index] = (
            "".join(one["text"] for one in choices), [id for one in choices for id in one.get("token_ids") or []],
            [pair for one in logprobs for pair in zip(one["tokens"], one["token_logprobs"], one["top_logprobs"], strict=True)],
            choices[-1]["finish_reason"],
        )  # fmt: skip
    return answer, usage


def together(server: Served, disturb: Any = None) -> dict[str, tuple[Answer, Any]]:
    """All bodies at once. `disturb` is called when each has begun."""
    found: dict[str, tuple[Answer, Any]] = {}
    heard = threading.Semaphore(0)
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: stream(server, BODIES[name], heard)}))
        for name in BODIES
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    if disturb is not None:
        for _ in BODIES:
            assert heard.acquire(timeout=PATIENCE_S)
        disturb()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    lora = "pirate=quire-tiny-pirate-lora"
    with Served(MODEL, *FLAGS, "--enable-lora", "--lora-modules", lora, env={"QUIRE_HEARTBEAT_TIMEOUT_S": "4"}) as found:  # fmt: skip
        yield found


@pytest.fixture(scope="module")
def undisturbed(server: Served) -> dict[str, tuple[Answer, Any]]:
    return together(server)


@pytest.mark.parametrize("blow", [
    pytest.param(signal.SIGKILL, id="killed"),
    pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),
])  # fmt: skip
def test_streams_go_on_as_if_nothing_had_happened(
    server: Served, undisturbed: dict[str, tuple[Answer, Any]], blow: signal.Signals
) -> None:
    before = server.metric("quire:process_restarts_total", 'process="engine"')

    def disturb() -> None:
        [engine] = running(server.process.pid, ENGINE)
        os.kill(engine, blow)

    found = together(server, disturb)
    assert found.keys() == undisturbed.keys()
    for name, (answer, usage) in found.items():
        wanted, used = undisturbed[name]
        assert answer == wanted, name
        assert "resumed" not in usage
        assert usage["completion_tokens"] == used["completion_tokens"]
    assert server.metric("quire:process_restarts_total", 'process="engine"') == before + 1
    until(lambda: server.metric("quire:requests_resumed_total") >= 1)


@pytest.mark.slow
def test_a_request_that_kills_ends_alone() -> None:
    """Twice the engine dies because of it; then it ends with an error, and all others have the text of an undisturbed run."""
    path = {"PYTHONPATH": f"{SOURCE}:{Path(__file__).parent}"}
    kinds = {name: body for name, body in BODIES.items() if name not in ("adapter", "schema")}
    found: dict[str, Any] = {}
    with Served(MODEL, *FLAGS, "--logits-processors", "killing_processor:Killer", env=path) as server:  # fmt: skip
        wanted = {name: stream(server, body)[0] for name, body in kinds.items()}
        killer = TEXT | {"seed": 99, "model": MODEL, "vllm_xargs": {"kill_at": 20}, "stream": False}

        def kill() -> None:
            answer = httpx.post(server.url + "/v1/completions", json=killer, timeout=2 * PATIENCE_S)
            found["killer"] = answer.status_code, answer.text

        def follow(name: str) -> None:
            found[name] = stream(server, kinds[name])[0]

        threads = [threading.Thread(target=follow, args=(name,)) for name in kinds]
        threads.append(threading.Thread(target=kill))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        assert found.pop("killer")[0] == 500
        assert found == wanted
        assert server.metric("quire:process_restarts_total", 'process="engine"') == 2
        refused = httpx.post(server.url + "/v1/completions", json=killer, timeout=PATIENCE_S)
        assert refused.status_code == 400
        assert "died twice while this request ran" in refused.text
