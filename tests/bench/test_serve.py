"""The load generator against servers that send exact bytes at exact times."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import shutil
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Wire, event, whole

from quire.bench.serve import cli, datasets, metrics
from quire.bench.serve import run as serve
from quire.bench.serve.arrivals import Arrivals, most_at_once, run
from quire.bench.serve.endpoints import KINDS, BenchPrompt, RequestRecord, SseReader, ask
from quire.bench.serve.http_client import HttpFailed, HttpTarget
from quire.errors import ConfigError


def go(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 60))


def bench(reply: Any, *words: str) -> tuple[int, Wire]:
    """`quire bench serve` in this process, against a scripted server."""

    async def both() -> tuple[int, Wire]:
        async with Wire(reply) as wire:
            given = cli.parser().parse_args(
                cli.dashed(["--base-url", wire.url, "--disable_tqdm", *words])
            )
            return await serve.ServePlan(given).run(), wire

    return go(both)


# The HTTP client


def test_connections_are_reused_and_replaced_when_closed():
    def reply(method: str, path: str, body: Any) -> Any:
        return [*whole({"path": path}), *([b""] if path == "/last" else [])]  # hangs up after it

    async def work() -> None:
        async with Wire(reply) as wire, HttpTarget(f"{wire.url}/base") as server:
            for _ in range(3):
                assert await server.json("GET", "/a") == {"path": "/base/a"}
            assert wire.connections == 1
            await asyncio.gather(*(server.json("POST", "/b", {}) for _ in range(4)))
            assert wire.connections == 4
        async with Wire(reply) as wire, HttpTarget(wire.url) as server:
            await server.json("GET", "/last")
            await server.json("GET", "/last")  # the first connection is gone by now, or about to be
            assert wire.connections == 2

    go(work)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([b""], "closed"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b""], "closed"),
        ([b"SSH-2.0-OpenSSH\r\n"], "not an HTTP response"),
        ([b"HTTP/1.1 200 OK\r\n", 60.0], "no response within"),
    ],
)
def test_half_an_answer_is_an_error(sent: list[bytes | float], said: str):
    async def work() -> None:
        async with Wire(lambda *_: sent) as wire, HttpTarget(wire.url) as server:
            with pytest.raises(HttpFailed, match=said):
                await server.ask("GET", "/", timeout=0.3 if "within" in said else 30)

    go(work)


def test_a_body_without_a_length_ends_with_the_connection():
    async def work() -> None:
        sent = [b"HTTP/1.1 200 OK\r\n\r\nall", b" of it", b""]
        async with Wire(lambda *_: sent) as wire, HttpTarget(wire.url) as server:
            assert (await server.ask("GET", "/")).body == b"all of it"

    go(work)


def test_errors_name_the_server():
    with pytest.raises(ConfigError, match="an address such as"):
        HttpTarget("localhost:8000")

    async def work() -> None:
        async with HttpTarget("http://127.0.0.1:1") as server:
            with pytest.raises(HttpFailed, match=r"127\.0\.0\.1:1: "):
                await server.ask("GET", "/")

    go(work)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls_verifies_the_certificate_unless_insecure(tmp_path: Path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run([*words.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def work() -> None:
        async with Wire(lambda *_: whole({"a": 1}), tls=context) as wire:
            async with HttpTarget(wire.url, insecure=True) as server:
                assert await server.json("GET", "/") == {"a": 1}
            async with HttpTarget(wire.url) as server:
                with pytest.raises(HttpFailed, match="certificate"):
                    await server.ask("GET", "/")

    go(work)


# One request


def record_of(kind: str, *events: Any, cuts: int = 0) -> RequestRecord:
    """What a stream of events says, one event a second, each cut at random places."""
    done = RequestRecord(5, start=100.0)
    stream = SseReader(KINDS[kind], done)
    draw = random.Random(cuts)
    for second, one in enumerate(events):
        data = b": comment\r\n\r\n" + event(one).replace(b"\n", b"\r\n" if cuts % 2 else b"\n")
        places = sorted(draw.randrange(len(data)) for _ in range(cuts))
        for start, end in zip([0, *places], [*places, len(data)], strict=True):
            stream.add(data[start:end], 101.0 + second)
    stream.end()
    return done


@pytest.mark.parametrize("cuts", range(5))
def test_streams_parse_the_same_for_any_chunking(cuts: int):
    def text(kind: str, value: str | None) -> dict[str, Any]:
        if kind == "openai":
            return {"choices": [{"text": value}]}
        return {"choices": [{"delta": {"content": value}}]}

    used = {"prompt_tokens": 9, "completion_tokens": 4}
    whole_text = [
        record_of("openai", text("openai", "é"), text("openai", "b"), text("openai", ""), {"choices": [], "usage": used}, cuts=cuts),
        record_of("openai-chat", {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, {"choices": [{"delta": {"reasoning": "é"}}]},
              text("openai-chat", "b"), {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": used}, cuts=cuts),
        record_of("openai-responses", {"type": "response.created"}, {"type": "response.output_text.delta", "delta": "é"},
              {"type": "response.output_text.delta", "delta": "b"},
              {"type": "response.completed", "response": {"usage": {"input_tokens": 9, "output_tokens": 4}}}, cuts=cuts),
    ]  # fmt: skip
    for at, done in zip((1.0, 2.0, 2.0), whole_text, strict=True):
        assert (done.text, done.error) == ("éb", "")
        assert (done.prompt_tokens, done.output_tokens) == (9, 4)
        assert (done.ttft, done.latency, done.itls) == (at, at + 2 if at > 1 else 3.0, [1.0])
        assert done.tpot == pytest.approx((done.latency - at) / 3)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([{"choices": [{"text": "a"}]}, {"error": {"message": "the engine died"}}], "engine died"),
        ([], "without output"),
        ([{"choices": "x"}], "an invalid event"),
    ],
)
def test_a_stream_that_fails_is_not_an_answer(events: list[Any], said: str):
    assert said in record_of("openai", *events).error


def test_tokens_without_text_are_counted_and_timed():
    used = {"completion_tokens": 2}
    done = record_of(
        "openai", {"choices": [{"text": ""}]}, {"choices": [{"text": ""}], "usage": used}
    )
    assert (done.output_tokens, done.ttft, done.latency, done.error) == (2, 1.0, 2.0, "")
    assert record_of("openai", {"choices": [{"text": "a"}]}).output_tokens == 1  # nobody counts


def test_refusals_contain_the_reason():
    async def work() -> RequestRecord:
        refusal = whole({"error": {"message": "too long"}}, "400 Bad Request")
        async with Wire(lambda *_: refusal) as wire, HttpTarget(wire.url) as server:
            kind = KINDS["openai"]
            return await ask(server, kind, kind.path, BenchPrompt("a", 1, 1), {}, ignore_eos=False, clock=time.perf_counter)  # fmt: skip

    assert go(work).error == "400: too long"


# When requests are sent


def test_arrivals_have_the_requested_rate_and_burstiness():
    assert Arrivals().times(3, 0) == [0, 0, 0]
    gaps = {}
    for burstiness in (0.2, 1.0, 50.0):
        times = Arrivals(rate=10, burstiness=burstiness).times(400, 1)
        assert times[-1] == pytest.approx(39.9)
        between = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(between) / len(between)
        gaps[burstiness] = sum((gap / mean - 1) ** 2 for gap in between) / len(between)
    # The variance of a gamma distribution over its mean squared is 1 / shape.
    assert gaps[1.0] == pytest.approx(1.0, rel=0.3)
    assert gaps[0.2] == pytest.approx(5.0, rel=0.4)
    assert gaps[50.0] == pytest.approx(0.02, rel=0.3)


def test_a_ramp_covers_its_first_to_last_rate():
    straight = Arrivals(ramp="linear", first=1, last=9)
    assert [straight.rate_at(at, 5) for at in range(5)] == [1, 3, 5, 7, 9]
    curved = Arrivals(ramp="exponential", first=1, last=16)
    assert [round(curved.rate_at(at, 5), 9) for at in range(5)] == [1, 2, 4, 8, 16]
    times = Arrivals(ramp="linear", first=1, last=100, burstiness=1000).times(100, 0)
    assert times[10] - times[9] > 5 * (times[99] - times[98])


@pytest.mark.parametrize(
    "arrivals",
    [Arrivals(rate=0), Arrivals(burstiness=0), Arrivals(most=0), Arrivals(ramp="linear"),
     Arrivals(rate=1, ramp="linear", first=1, last=2), Arrivals(ramp="exponential", last=2)],
)  # fmt: skip
def test_arrivals_that_cannot_be_are_refused(arrivals: Arrivals):
    with pytest.raises(ConfigError, match="--"):
        arrivals.check()


def test_no_more_at_once_than_allowed_and_their_time_does_not_run():
    async def work() -> None:
        now = most = 0

        async def one(number: int) -> tuple[float, float]:
            nonlocal now, most
            now, start = now + 1, time.perf_counter()
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1
            return start, time.perf_counter()

        spans, seconds = await run(one, 9, Arrivals(most=3), 0)
        assert most == most_at_once(spans) == 3
        assert seconds >= 0.03

    go(work)
    assert most_at_once([(0, 1), (1, 2)]) == 1


# What the times mean


def test_figures_of_a_case_worked_by_hand():
    done = [
        RequestRecord(10, start=0.0, latency=1.0, ttft=0.2, itls=[0.4, 0.4], output_tokens=3),
        RequestRecord(20, start=0.5, latency=2.0, ttft=0.4, itls=[1.6], output_tokens=2),
        RequestRecord(30, start=0.5, latency=0.1, ttft=0.1, itls=[], output_tokens=1),
        RequestRecord(99, error="refused"),
    ]
    told = metrics.MetricOptions(("ttft",), (50, 99), {"ttft": 200, "e2el": 1000})
    found = metrics.figures(done, 2.5, told)
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (60, 6)
    assert found["request_throughput"] == pytest.approx(3 / 2.5)
    assert found["output_throughput"] == pytest.approx(6 / 2.5)
    assert found["total_token_throughput"] == pytest.approx(66 / 2.5)
    assert found["request_goodput"] == pytest.approx(2 / 2.5)
    assert found["mean_ttft_ms"] == pytest.approx(700 / 3)
    assert found["median_ttft_ms"] == pytest.approx(200)
    assert found["p99_ttft_ms"] == pytest.approx(396)  # between 200 and 400
    assert found["mean_tpot_ms"] == pytest.approx((400 + 1600) / 2)
    assert found["mean_itl_ms"] == pytest.approx(800)
    assert found["std_e2el_ms"] == pytest.approx(math.sqrt(sum((x - 3100 / 3) ** 2 for x in (1000, 2000, 100)) / 3))  # fmt: skip
    assert found["max_concurrent_requests"] == 3
    assert found["max_output_tokens_per_s"] == pytest.approx(
        4
    )  # 0.2, 0.6, 0.6 and 0.9; then 1.0 and 2.5
    text = metrics.printout(found, told, 3, 2.0)
    assert "Mean TTFT (ms):                          233.33" in text
    assert "Maximum request concurrency:             3" in text
    assert "Request goodput (req/s):                 0.80" in text
    assert metrics.failures(done) == "failed 1 times: refused"
    cost = metrics.costs(
        found, 3.6
    )  # 0.001 a second: 2.4 tokens made a second, 26.4 with the prompts
    assert cost["cost_per_million_output_tokens"] == pytest.approx(1000 / 2.4)
    assert cost["cost_per_million_tokens"] == pytest.approx(1000 / 26.4)
    assert "Cost per million output tokens:          416.67" in metrics.printout(found | cost, told, 3, 2.0)  # fmt: skip
    assert metrics.costs({"output_throughput": 0.0, "total_token_throughput": 0.0}, 1)["cost_per_million_tokens"] is None  # fmt: skip


def test_without_answers_figures_are_missing_instead_of_zero():
    found = metrics.figures([RequestRecord(1, error="x")], 1.0, metrics.MetricOptions())
    assert found["mean_ttft_ms"] is None
    assert "Mean TTFT (ms):                          - " in metrics.printout(found, metrics.MetricOptions(), None, math.inf)  # fmt: skip


# Prompts


def prompts(**wanted: Any) -> list[BenchPrompt]:
    return asyncio.run(
        datasets.make(datasets.DatasetOptions(**wanted), datasets.LocalCutter.load("quire-tiny"))
    )


def test_random_prompts_have_their_lengths_and_differ():
    cut = datasets.LocalCutter.load("quire-tiny")
    asked = {"dataset": "random", "count": 20, "seed": 3, "input_len": 40, "output_len": 10, "range_ratio": 0.5}  # fmt: skip
    found = prompts(**asked)
    assert found == prompts(**asked)
    assert len({prompt.text for prompt in found}) == 20
    for prompt in found:
        assert 20 <= prompt.length <= 60
        assert 5 <= prompt.output <= 15
        assert abs(len(cut.tokenizer.encode(prompt.text)) - prompt.length) <= 2
    shared = prompts(**asked | {"prefix_len": 30})
    start = shared[0].text[:40]
    assert all(prompt.text.startswith(start) for prompt in shared)


def test_repeated_prefixes_have_the_requested_count():
    found = prompts(dataset="prefix_repetition", count=12, seed=0, prefix_len=30, prefixes=3, suffix_len=5, output_len=4)  # fmt: skip
    assert len({prompt.text[:40] for prompt in found}) == 3
    assert len({prompt.text for prompt in found}) == 12


def test_files_of_prompts(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "a b"}\n\n{"prompt": "c", "output_tokens": 3}\n')
    given = {"dataset": "custom", "count": 3, "seed": 0, "path": lines, "output_len": 9, "shuffle": False}  # fmt: skip
    assert [(p.text, p.output) for p in prompts(**given)] == [("a b", 9), ("c", 3), ("a b", 9)]
    talks = tmp_path / "b.json"
    talks.write_text(json.dumps([{"conversations": [{"value": "hi"}, {"value": "hello you"}]}, {}]))
    (one,) = prompts(dataset="sharegpt", count=1, seed=0, path=talks)
    assert one.text == "hi"
    assert 1 < one.output < 8
    lines.write_text('{"prompt": "a"}\n[]\n')
    for wrong in (
        given,
        given | {"path": None},
        given | {"dataset": "sharegpt"},
        given | {"dataset": "hf"},
    ):
        with pytest.raises(ConfigError, match=r"--dataset|line 2|ShareGPT"):
            prompts(**wrong)


# The whole command
