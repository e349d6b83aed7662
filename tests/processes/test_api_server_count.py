"""Several HTTP processes over one engine behave as one server, also after one of them dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from server_process import PATIENCE_S, Served, children, has_torch, let_it_tell, until
from tiny_llama import make_checkpoint

from quire.engine.engine_state import EngineState
from quire.processes.restart_policy import RestartPolicy
from quire.processes.supervisor import SupervisedProcess
from quire.server.process import http_supervisor

TEXT = "/v1/completions"
GREEDY = {"prompt": "Once", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = {"prompt": "a", "n": 2, "max_tokens": 240, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"))
    dev = {"QUIRE_SERVER_DEV_MODE": "1"}
    flags = ["--served-model-name", "tiny", "--api-server-count", "2", "--max-num-seqs", "32", "--shutdown-timeout", "600"]  # fmt: skip
    with Served(path, *flags, env=dev) as found:
        yield found


def process_of(client: httpx.Client) -> int:
    """The process that answers on this connection; it also gets the next request."""
    return client.get("/server_info").json()["pid"]


def fronts(server: Served) -> list[int]:
    """Those that live; one may be gone between being listed and being looked at."""
    found = []
    for child in children(server.process.pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            if not has_torch(child):
                found.append(child)
    return found


@pytest.fixture
def clients(server: Served) -> Iterator[list[httpx.Client]]:
    """One of each process. A connection that a client gave up because it was idle would be followed by one to any process."""
    found: dict[int, httpx.Client] = {}
    kept = httpx.Limits(keepalive_expiry=None)
    while len(found) < 2:
        client = httpx.Client(base_url=server.url, timeout=PATIENCE_S, limits=kept)
        pid = process_of(client)
        if pid in found:
            client.close()
        else:
            found[pid] = client
    yield list(found.values())
    for client in found.values():
        client.close()


def told(client: httpx.Client) -> dict[str, float]:
    """/metrics, without the metrics that the scrape itself changes."""
    lines = client.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    moving = ("vllm:avg_", "process_")
    return {name: float(value) for name, value in pairs if not name.startswith(moving)}


def total(metrics: dict[str, float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)


class Stream(threading.Thread):
    """A long stream; `events` grow, `error` is set if it breaks."""

    def __init__(self, url: str):
        super().__init__()
        self.url, self.events, self.error = url, list[str](), None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url + TEXT, json=LONG, timeout=PATIENCE_S) as answer:
                self.events += (line for line in answer.iter_lines() if line)
        except httpx.HTTPError as error:
            self.error = error


def test_each_process_answers_and_none_has_torch(server: Served, clients: list[httpx.Client]):
    pids = fronts(server)
    assert sorted(map(process_of, clients)) == sorted(pids)
    assert len(children(server.process.pid)) == 3
    assert not any(has_torch(pid) for pid in (server.process.pid, *pids))
    texts = {client.post(TEXT, json=GREEDY).json()["choices"][0]["text"] for client in clients}
    assert len(texts) == 1
    assert server.output.count("Ready. Try:") == 1


def test_both_workers_report_the_same_totals(server: Served, clients: list[httpx.Client]):
    let_it_tell(clients[0])
    before = told(clients[0])
    for count, client in zip((3, 5), clients, strict=True):
        for _ in range(count):
            client.post(TEXT, json=GREEDY)
    client = clients[0]
    until(
        lambda: (
            total(told(client), "vllm:generation_tokens_total")
            == total(before, "vllm:generation_tokens_total") + 8 * 24
        )
    )
    until(lambda: told(clients[0]) == told(clients[1]))
    after = told(clients[1])
    for name, grown in {
        "vllm:e2e_request_latency_seconds_count": 8,
        "vllm:request_generation_tokens_sum": 8 * 24,
        "vllm:request_success_total": 8,
        "vllm:time_to_first_token_seconds_count": 8,
        "http_requests_total": 8,
        "vllm:inter_token_latency_seconds_count": 0,  # whole answers
    }.items():
        assert total(after, name) - total(before, name) == grown, name
    assert total(after, "quire:max_num_seqs") == 32
    assert total(after, "vllm:cache_config_info") == 1
    resident = re.findall(
        r'process_resident_memory_bytes\{process="([^"]+)"\} (\S+)',
        clients[0].get("/metrics").text,
    )
    assert sorted(name for name, _ in resident) == ["engine", "server", "server 0", "server 1"]
    assert all(float(size) > 10e6 for _, size in resident)
    steps = total(after, "quire:engine_steps_total")
    until(lambda: total(told(clients[0]), "vllm:iteration_tokens_total_count") == steps)
    name = "vllm:inter_token_latency_seconds_count"
    old = "vllm:time_per_output_token_seconds_count"
    assert total(after, old) == total(after, name)


def test_one_id_at_both(server: Served, clients: list[httpx.Client]):
    """Ids are the clients' own; the engine hears of both."""
    found = []

    def ask(client: httpx.Client) -> None:
        headers = {"X-Request-Id": "same"}
        found.append(client.post(TEXT, json=GREEDY | {"max_tokens": 200}, headers=headers))

    threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in found] == [200, 200]


@pytest.mark.parametrize(
    ("still", "on", "flag", "state"),
    [
        ("/pause?mode=wait", "/resume", "is_paused", "awake"),
        ("/sleep?level=1", "/wake_up", "is_sleeping", "weights_offloaded"),
        ("/sleep?level=2&mode=keep", "/wake_up", "is_sleeping", "discard_all"),
    ],
)
def test_pause_and_sleep_apply_to_all_workers(
    server: Served, clients: list[httpx.Client], still: str, on: str, flag: str, state: str
):
    """A pause through any worker stops the requests of all workers."""
    one, other = clients
    text = one.post(TEXT, json=GREEDY).json()["choices"][0]["text"]
    answer = one.post(still)
    assert answer.status_code == 200, answer.text
    assert other.get(f"/{flag}").json() == {flag: True}
    found: list[httpx.Response] = []

    def ask() -> None:
        found.append(httpx.post(server.url + TEXT, json=GREEDY, timeout=PATIENCE_S))

    late = [threading.Thread(target=ask) for _ in range(8)]
    for thread in late:
        thread.start()
    until(lambda: server.metric("vllm:num_requests_waiting") == 8)
    name = f'vllm:engine_sleep_state{{engine="0",model_name="tiny",sleep_state="{state}"}}'
    until(lambda: told(other)[name] == 1)
    assert not found
    assert other.post(on).status_code == 200
    for thread in late:
        thread.join(PATIENCE_S)
    assert [one.json()["choices"][0]["text"] for one in found] == [text] * 8
    assert one.get(f"/{flag}").json() == {flag: False}


def test_any_worker_can_abort_requests(server: Served, clients: list[httpx.Client]):
    asked = {"prompt": "a", "max_tokens": 240, "ignore_eos": True, "n": 2}
    clients[0].post("/pause", params={"mode": "keep"})  # so that none ends by itself
    found: dict[str, httpx.Response] = {}

    def ask(number: int) -> None:
        headers = {"X-Request-Id": str(number)}
        found[str(number)] = clients[number].post(TEXT, json=asked, headers=headers)

    threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    until(lambda: server.metric("vllm:num_requests_waiting") == 4)
    for wanted, ended in ([["cmpl-1"], ["cmpl-1"]], [[], ["cmpl-0"]]):
        body = {"request_ids": wanted}
        answer = server.client.post("/abort_requests", json=body)
        assert answer.json() == {"status": "aborted", "request_ids": ended}
    for thread in threads:
        thread.join(PATIENCE_S)
    clients[0].post("/resume")
    for answer in found.values():
        assert [one["finish_reason"] for one in answer.json()["choices"]] == ["abort"] * 2


def test_load_is_of_all(server: Served, clients: list[httpx.Client]):
    clients[0].post("/pause", params={"mode": "keep"})  # so that none ends by itself
    streams = [Stream(server.url) for _ in range(8)]
    until(lambda: clients[0].get("/load").json() == {"server_load": 8})
    clients[0].post("/resume")
    for stream in streams:
        stream.join(PATIENCE_S)
    until(lambda: clients[1].get("/load").json() == {"server_load": 0})


def in_the_middle(server: Served, client: httpx.Client, count: int) -> list[Stream]:
    """Streams that have begun, and stand still."""
    while True:
        streams = [Stream(server.url) for _ in range(count)]
        until(lambda asked=streams: all(stream.events for stream in asked))
        client.post("/pause", params={"mode": "keep"})
        if client.get("/load").json() == {"server_load": count}:
            return streams
        client.post("/resume")  # some had ended before they were told to stand still
        for stream in streams:
            stream.join(PATIENCE_S)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_is_replaced(
    server: Served, clients: list[httpx.Client], blow: signal.Signals
):
    """Its streams break, the others go on; what it had asked for is not worked for, what it had counted stays."""
    old = fronts(server)
    [survivor] = [client for client in clients if process_of(client) != old[0]]
    streams = in_the_middle(server, survivor, 16)
    let_it_tell(server.client)
    before = {name: server.metric(name) for name in ("http_requests_total", "vllm:request_success_total", "quire:process_restarts_total")}  # fmt: skip
    server.client.close()  # it may go to either, and must not wait for the one that is struck
    os.kill(old[0], blow)
    survivor.post("/resume")
    for stream in streams:
        stream.join(PATIENCE_S)
    broken = [stream for stream in streams if stream.error is not None]
    whole = [stream for stream in streams if stream.events[-1:] == ["data: [DONE]"]]
    assert len(broken) + len(whole) == 16
    assert 0 < len(whole) < 16
    until(lambda: len(set(fronts(server)) - {old[0]}) == 2)
    server.client = httpx.Client(base_url=server.url, timeout=PATIENCE_S)
    until(lambda: server.client.get("/health/ready").status_code == 200)
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    # Those that broke were ended in the engine, and were never counted as answered. The one more is /resume.
    grown = {"vllm:request_success_total": 32, "http_requests_total": len(whole) + 1, "quire:process_restarts_total": 1}  # fmt: skip
    until(lambda: all(server.metric(name) == before[name] + grown[name] for name in grown))
    for _ in range(8):
        answer = httpx.post(server.url + TEXT, json=GREEDY, timeout=PATIENCE_S)
        assert answer.status_code == 200
    until(lambda: server.client.get("/load").json() == {"server_load": 0})


@pytest.mark.slow
def test_a_worker_that_dies_during_a_sleep_call_blocks_no_other(
    server: Served, clients: list[httpx.Client]
):
    """Regression: new requests waited until the next /wake_up."""
    struck, other = process_of(clients[0]), clients[1]
    [engine] = [pid for pid in children(server.process.pid) if has_torch(pid)]
    failed: list[httpx.HTTPError] = []

    def wait() -> None:
        try:
            clients[0].post("/sleep")
        except httpx.HTTPError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    os.kill(engine, signal.SIGSTOP)  # so that it answers when no client listens any more
    waiting.start()
    until(lambda: other.get("/load").json() == {"server_load": 1})
    time.sleep(0.2)  # on its way
    os.kill(struck, signal.SIGKILL)
    waiting.join(PATIENCE_S)
    with suppress(ProcessLookupError):  # it stood still for so long that it was replaced
        os.kill(engine, signal.SIGCONT)
    assert failed
    until(lambda: struck not in fronts(server) and len(fronts(server)) == 2)
    until(lambda: other.get("/health/ready").status_code == 200)  # were it stopped for long
    assert other.get("/is_paused").json() == {"is_paused": False}
    assert other.post(TEXT, json=GREEDY).status_code == 200
    server.client.close()  # it may be of the one that is gone
    server.client = httpx.Client(base_url=server.url, timeout=PATIENCE_S)
    until(lambda: server.client.get("/health/ready").status_code == 200)


def test_on_shutdown_all_workers_finish_their_requests(server: Served):
    """The last of this server."""
    streams = [Stream(server.url) for _ in range(6)]
    until(lambda: all(stream.events for stream in streams))
    family = children(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        stream.join(PATIENCE_S)
    assert {stream.events[-1] for stream in streams} == {"data: [DONE]"}
    for stream in streams:
        choices = [choice for event in stream.events[:-1] for choice in json.loads(event[6:])["choices"]]  # fmt: skip
        assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["length"] * 2
    assert server.wait() == 0
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
@pytest.mark.parametrize("was_stopped", [True, False])
def test_a_suspension_of_the_supervisor_is_not_a_hang_of_workers(
    was_stopped: bool, monkeypatch: pytest.MonkeyPatch
):
    """A paused container: the children's silence is as long as the keeper's own."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    long_ago = time.monotonic() - 100
    process = object.__new__(SupervisedProcess)
    polled = long_ago if was_stopped else time.monotonic()
    process.__dict__.update(
        heard=long_ago, polled=polled, process=Mock(poll=Mock(return_value=None), wait=Mock(side_effect=[subprocess.TimeoutExpired("", 0), 0])),
        status=Mock(broken=True, poll=Mock(return_value=[])),
    )  # fmt: skip
    child = http_supervisor.HttpWorkerSlot(0, None, Mock(), process, is_open=True)
    keeper = object.__new__(http_supervisor.HttpSupervisor)
    keeper.__dict__.update(
        children=[child], policy=RestartPolicy(heartbeat=8),
        stop_at=None, logs=[], engine_died_at=None, config=Mock(),
        client=Mock(state=Mock(return_value=EngineState(1, "starting"))),
    )  # fmt: skip
    assert keeper._turn() is None
    assert process.process.kill.called is not was_stopped


@pytest.mark.slow
def test_killing_the_parent_ends_all_workers(tmp_path: Path):
    server = Served(make_checkpoint(tmp_path), "--api-server-count", "2")
    try:
        until(lambda: len(children(server.process.pid)) == 3)
        family = children(server.process.pid)
    finally:
        server.process.kill()
        server.wait()
    until(lambda: not [pid for pid in family if Path(f"/proc/{pid}").exists()])


@pytest.mark.slow
def test_a_worker_that_dies_too_often_stays_dead_and_the_last_ends_the_server(tmp_path: Path):
    limit = {"QUIRE_MAX_ENGINE_RESTARTS": "0"}
    with Served(make_checkpoint(tmp_path), "--api-server-count", "2", env=limit) as server:
        first, second = fronts(server)
        os.kill(first, signal.SIGKILL)
        server.until("it is not restarted")
        for _ in range(12):  # none of these waits in the queue of the dead one
            assert httpx.get(server.url + "/health/ready", timeout=PATIENCE_S).status_code == 200
        family = children(server.process.pid)
        os.kill(second, signal.SIGKILL)
        assert server.wait() == 1
        assert "no HTTP process is left" in server.output
        assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
