"""A real server on a tiny random model: its processes, its answers, its end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import (
    PATIENCE_S,
    SOURCE,
    Served,
    children,
    has_torch,
    left,
    let_it_tell,
    until,
)
from tiny_llama import make_checkpoint

from quire.config.server import ServerConfig
from quire.server.process import sockets

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"prompt": "Once", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = 8000  # tokens: many seconds of work, for what has to happen in the middle of it; no test waits for the last one


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), length=8192)


@pytest.fixture(scope="module")
def server(checkpoint: str) -> Iterator[Served]:
    dev = {"QUIRE_SERVER_DEV_MODE": "1", "QUIRE_HEARTBEAT_TIMEOUT_S": "7"}
    flags = ["--max-num-queued-reqs", "40", "--kv-cache-memory-bytes", "20M"]
    with Served(checkpoint, "--served-model-name", "tiny", *flags, env=dev) as found:
        yield found


def streamed(server: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, [DONE] left out but required."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_the_printed_command_works(server: Served):
    body = json.loads(server.curl[server.curl.index("-d") + 1])
    url = next(word for word in server.curl if word.startswith("http"))
    answer = httpx.post(url, json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_the_http_process_never_loads_torch(server: Served):
    engine = server.client.get("/server_info").json()
    assert engine["pid"] == server.process.pid
    assert engine["torch"] is False
    assert not has_torch(server.process.pid)
    assert any(has_torch(child) for child in children(server.process.pid))  # the check can fail


def test_a_stream_equals_the_whole_answer(server: Served):
    whole = server.post(TEXT, **GREEDY)["choices"][0]
    parts = streamed(server, TEXT, GREEDY)
    assert text_of(parts) == whole["text"]
    assert parts[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"


def test_concurrent_streams_equal_single_streams(server: Served):
    prompts = [f"{'x' * number} tale" for number in range(8)]
    alone = [server.post(TEXT, **GREEDY | {"prompt": one})["choices"][0]["text"] for one in prompts]
    together: dict[int, str] = {}

    def run(at: int) -> None:
        together[at] = text_of(streamed(server, TEXT, GREEDY | {"prompt": prompts[at]}))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [together.get(at) for at in range(len(prompts))] == alone


def test_a_stop_string_ends_the_text_and_never_shows(server: Served):
    whole = server.post(TEXT, **GREEDY)["choices"][0]["text"]
    counted = "vllm:request_success_total", 'finished_reason="stop"'
    before = server.metric(*counted)
    for start in range(2, 12, 3):
        stop = whole[start : start + 3]
        cut = whole[: whole.index(stop)]
        # So many that the engine is still at it when the front room has found the string.
        body = GREEDY | {"stop": [stop], "max_tokens": LONG}
        found = server.post(TEXT, **body)["choices"][0]
        assert (found["text"], found["finish_reason"], found["stop_reason"]) == (cut, "stop", stop)
        assert text_of(streamed(server, TEXT, body)) == cut
    until(lambda: server.metric(*counted) - before == 8)


def test_repetition_detection_ends_a_request(server: Served):
    asked = {"max_pattern_size": 1, "min_count": 3}
    again = {"logit_bias": {"97": 100}, "max_tokens": LONG, "ignore_eos": True}
    found = server.post(TEXT, **again, prompt="a", repetition_detection=asked)
    assert found["choices"][0]["finish_reason"] == "repetition"
    assert found["usage"]["completion_tokens"] == 3


def test_beams_are_the_likeliest_examined(server: Served):
    """One beam is greedy; of several the best is at least as likely, and a chat streams what it answers whole."""
    counted = ("vllm:request_success_total", "vllm:e2e_request_latency_seconds_count")
    let_it_tell(server.client)
    before = [server.metric(name) for name in counted]
    search = {"use_beam_search": True, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
    greedy = server.post(TEXT, **GREEDY | {"max_tokens": 6, "logprobs": 0})
    one = server.post(TEXT, **search, prompt="Once")
    assert one["choices"][0]["text"] == greedy["choices"][0]["text"]
    four = server.post(TEXT, **search, prompt=["Once", "And"], n=4)
    assert four["usage"]["completion_tokens"] == 2 * 4 * 6
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in four["choices"]]
    assert sums == sorted(sums[:4], reverse=True) + sorted(sums[4:], reverse=True)
    assert sums[0] >= sum(greedy["choices"][0]["logprobs"]["token_logprobs"])
    assert len({choice["text"] for choice in four["choices"][:4]}) == 4
    # A search is no more requests than what is drawn, however many steps it has.
    after = [before[0] + 1 + 1 + 2 * 4, before[1] + 1 + 1 + 2]
    until(lambda: [server.metric(name) for name in counted] == after)

    chat = {"messages": [{"role": "user", "content": "a"}], "n": 2, "use_beam_search": True, "max_tokens": 4}  # fmt: skip
    whole = server.post(CHAT, **chat)["choices"]
    parts = ["", ""]
    for event in streamed(server, CHAT, chat):
        for choice in event["choices"]:
            parts[choice["index"]] += choice["delta"].get("content") or ""
    assert parts == [choice["message"]["content"] for choice in whole]
    assert {choice["finish_reason"] for choice in whole} <= {"length", "stop"}
    until(lambda: server.client.get("/load").json() == {"server_load": 0})


@pytest.mark.slow
def test_a_beam_search_ends_when_its_client_disconnects(server: Served):
    long = {"max_tokens": LONG, "ignore_eos": True}
    body = {"prompt": ["a"] * 8, "use_beam_search": True, "n": 4, **long}
    counted = ("vllm:request_success_total", 'finished_reason="abort"')
    let_it_tell(server.client)
    aborted = server.metric(*counted)
    answer = server.client.post(TEXT, json=body | {"timeout": 0.3})
    assert answer.status_code == 408
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    found: list[Any] = []
    ended = threading.Thread(target=lambda: found.append(server.post(TEXT, **body)))
    before = server.metric("vllm:generation_tokens_total")
    ended.start()
    # all 8 searches have begun by then, on a busy machine too
    until(lambda: server.metric("vllm:generation_tokens_total") > before + 2000)
    server.post("/abort_requests")
    ended.join(PATIENCE_S)
    assert {choice["finish_reason"] for choice in found[0]["choices"]} == {"abort"}
    until(lambda: server.metric(*counted) == aborted + 2 * 8 * 4)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_the_request(server: Served, stream: bool):
    body = {"prompt": ["a"] * 20, "max_tokens": LONG, "ignore_eos": True, "stream": stream}
    before = server.metric("vllm:generation_tokens_total")
    client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_S)
    client.request("POST", TEXT, json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        with client.getresponse() as answer:
            assert answer.readline()
    else:
        until(lambda: server.metric("vllm:num_requests_running") == 20)
    client.close()
    until(lambda: server.client.get("/load").json() == {"server_load": 0})
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:generation_tokens_total") - before < 20 * LONG
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_requests_beyond_the_limit_get_retry_after(server: Served):
    answer = server.client.post(TEXT, json={"prompt": ["a"] * 400, "max_tokens": 2})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.post(TEXT, **GREEDY)["choices"][0]["text"]


def test_a_request_without_a_possible_token_fails_alone(server: Served):
    """Its first token may be "a", its second may only be "b", which is not allowed."""
    (only,) = server.post("/tokenize", prompt="a", add_special_tokens=False)["tokens"]
    asked = {"structured_outputs": {"regex": "ab"}, "allowed_token_ids": [only]}
    why = "structured_outputs and allowed_token_ids together exclude them all"
    whole = server.client.post(TEXT, json=GREEDY | asked)
    assert whole.status_code == 400
    assert why in whole.json()["error"]["message"]
    with server.client.stream("POST", TEXT, json=GREEDY | asked | {"stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    if answer.status_code == 200:  # the first token went out before the second step
        assert json.loads(events.pop(0))["choices"][0]["text"] == "a"
        assert events.pop() == "[DONE]"
    (error,) = events
    assert json.loads(error)["error"]["code"] == 400
    assert why in json.loads(error)["error"]["message"]


def test_named_functions_of_the_engine(server: Served):
    assert server.post("/reset_prefix_cache") == {"success": True}
    assert server.post("/reset_prefix_cache?reset_running_requests=true") == {"success": True}
    facts = server.post("/collective_rpc", method="info")["results"]
    assert facts[0]["num_blocks"] > 0
    unknown = server.client.post("/collective_rpc", json={"method": "no_such"})
    assert unknown.status_code == 400
    assert "'no_such'; it has" in unknown.json()["error"]["message"]
    assert " info," in unknown.json()["error"]["message"]
    failed = {"method": "wake_up_worker", "args": [["no part"], "one too many"]}
    refused = server.client.post("/collective_rpc", json=failed)
    assert refused.status_code == 400
    assert "'wake_up_worker': too many positional arguments" in refused.json()["error"]["message"]
    failed = {"method": "wake_up_worker", "args": [5]}
    assert server.client.post("/collective_rpc", json=failed).status_code == 500


@pytest.mark.slow
def test_the_cli_completion_equals_the_servers(server: Served, checkpoint: str):
    flags = ["--max-tokens", "16", "--temperature", "0", "-q", "Once"]
    said = {}
    for name, place in (("there", ["--url", server.url]), ("here", [checkpoint, "--dtype", "float32", "--kv-cache-memory-bytes", "4M"])):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "quire", "complete", *place, *flags],
            env={**os.environ, "PYTHONPATH": SOURCE}, capture_output=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout.decode().removesuffix("\n")
    expected = server.post(TEXT, prompt="Once", max_tokens=16, temperature=0)["choices"][0]["text"]
    assert said == {"there": expected, "here": expected}


@pytest.mark.parametrize(
    "blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_killed_or_hanging_engine_restarts(server: Served, blow: signal.Signals):
    """While 32 streams run: each goes on in the next process and ends in full."""
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    begun, ends = threading.Barrier(33), dict[int, str]()
    before = server.metric("quire:process_restarts_total")

    def run(at: int) -> None:
        with httpx.stream("POST", server.url + TEXT, json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            begun.wait(PATIENCE_S)
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert rest[-1] == "[DONE]"
        ends[at] = rest[-2]

    threads = [threading.Thread(target=run, args=(at,)) for at in range(32)]
    for thread in threads:
        thread.start()
    engines = [child for child in children(server.process.pid) if has_torch(child)]
    assert len(engines) == 1, server.output[-4000:]
    begun.wait(PATIENCE_S)
    os.kill(engines[0], blow)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(ends) == 32
    assert all('"finish_reason":"length"' in end for end in ends.values())
    assert server.metric(
        "quire:requests_resumed_total"
    )  # of the new process: some were in the middle
    assert server.client.get("/health").status_code == 200
    until(lambda: server.client.get("/health/ready").status_code == 200)
    assert server.post(TEXT, **GREEDY)["choices"][0]["text"]
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    until(lambda: server.metric("quire:process_restarts_total") == before + 1)


@pytest.mark.usefixtures("sighup_ends")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGHUP]
)
def test_on_shutdown_running_requests_finish_and_new_ones_are_refused(
    checkpoint: str, number: signal.Signals
):
    """SIGHUP comes from a terminal that closes, to the engine's process too."""
    flags = ["--shutdown-timeout", "600", "--api-key", "k", "--kv-cache-memory-bytes", "20M"]
    with Served(checkpoint, *flags) as server:
        server.client.headers["Authorization"] = "Bearer k"
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        held = body | {"max_tokens": LONG, "n": 8}  # as long as this runs the server does
        with (
            server.client.stream("POST", TEXT, json=held) as last,
            server.client.stream("POST", TEXT, json=body) as answer,
        ):
            running = last.iter_lines()  # kept: httpx closes the connection of a collected iterator
            next(running)
            lines = answer.iter_lines()
            next(lines)
            for engine in children(server.process.pid) if number is signal.SIGHUP else ():
                os.kill(engine, number)
            server.process.send_signal(number)
            server.until("shutting down")
            with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as new:
                late = new.post(TEXT, json=GREEDY, headers={"Authorization": "Bearer k"})
                assert late.status_code == 503
                assert late.headers["retry-after"]
                assert (
                    httpx.get(f"{server.url}/health/ready", timeout=PATIENCE_S).status_code == 503
                )
            events = [line for line in lines if line]
            engines = children(server.process.pid)
            assert engines
        assert events[-1] == "data: [DONE]"
        end = json.loads(events[-2].removeprefix("data: "))
        assert end["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert not [child for child in engines if Path(f"/proc/{child}").exists()]


def test_a_model_that_cannot_be_loaded_is_one_report(checkpoint: str, tmp_path: Path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(checkpoint) / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    server = Served(str(tmp_path))
    assert server.wait() == 1
    errors = [line for line in server.lines if "quire serve: error:" in line]
    assert len(errors) == 1
    assert errors[0] == server.lines[-1]
    assert "model.safetensors" in errors[0]
    why = errors[0].partition("error: ")[2].strip()
    assert [line for line in server.lines if why in line] == errors


def check_end(server: Served, end: Callable[[], None], code: int) -> None:
    """In the middle of an answer it ends with this exit status, leaves no process and frees its port."""
    body = {"prompt": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", TEXT, json=body) as answer:
        lines = answer.iter_lines()  # kept: httpx closes the connection of a collected iterator
        next(lines)
        family = children(server.process.pid)
        assert family
        end()
        assert server.process.wait(PATIENCE_S) == code
    assert not left(family)
    host, port = server.url.removeprefix("http://").split(":")
    sockets.bind(ServerConfig(host=host, port=int(port))).close()


@pytest.mark.slow
def test_a_second_sigterm_ends_a_server_at_once(checkpoint: str):
    def end() -> None:
        server.process.terminate()
        server.until("shutting down")
        late = httpx.post(server.url + TEXT, json=GREEDY, timeout=PATIENCE_S)
        assert late.status_code == 503
        server.process.terminate()
        server.until("second signal")

    with Served(checkpoint, "--shutdown-timeout", "600") as server:
        check_end(server, end, 0)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["full", "closed", "not read"])
def test_a_server_works_with_unwritable_stdout(checkpoint: str, tmp_path: Path, where: str):
    """Standard output and error are a full disk, a closed pipe, or a pipe that is not read."""
    reading, writing = os.pipe()
    output = os.open("/dev/full", os.O_WRONLY) if where == "full" else os.dup(writing)
    os.close(writing)
    place = str(tmp_path / "socket")  # nothing tells the port that it would choose
    words = [sys.executable, "-m", "quire", "serve", checkpoint, "--uds", place,
             "--kv-cache-memory-bytes", "4M", "--dtype", "float32", "--enable-log-requests"]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": SOURCE}
    process = subprocess.Popen(words, stdout=output, stderr=output, env=env)
    os.close(output)
    if where == "closed":
        os.close(reading)
    transport = httpx.HTTPTransport(uds=place)
    client = httpx.Client(transport=transport, base_url="http://quire", timeout=PATIENCE_S)
    try:
        until(lambda: process.poll() is not None or is_ready(client, place))
        assert process.poll() is None
        for _ in range(70 if where == "not read" else 10):  # lines of a kilobyte: a pipe takes 64
            body = {"prompt": "x" * 1000, "max_tokens": 1}
            assert client.post(TEXT, json=body).status_code == 200
        process.terminate()
        assert process.wait(PATIENCE_S) in (0, 120)  # 120: Python could not flush
    finally:
        client.close()
        process.kill()
        process.wait()
        if where != "closed":
            os.close(reading)


def is_ready(client: httpx.Client, place: str) -> bool:
    with socket.socket(
        socket.AF_UNIX
    ) as probe:  # httpx leaves such a socket open if nothing listens
        if probe.connect_ex(place):
            return False
    return client.get("/health/ready").status_code == 200


def test_a_killed_server_leaves_no_process(server: Served):
    """The last of this server."""
    check_end(server, server.process.kill, -signal.SIGKILL)
