"""Whole runs of `quire bench serve` against a scripted server."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from scripted_server import END, STREAM, chunk, event, model, whole
from test_serve import bench

from quire.bench.serve import metrics, run, timeline
from quire.bench.serve.endpoints import RequestRecord
from quire.bench.serve.http_client import HttpFailed


def test_a_run_sends_its_requests_and_saves_the_result(tmp_path, capsys):
    status, wire = bench(
        model, "--num_prompts", "6", "--random-input-len=4", "--max-concurrency", "2", "--save-result", "--save-detailed",
        "--result-dir", str(tmp_path), "--metadata", "commit=abc", "--header", "X-A=b", "--api-key", "k", "--ignore-eos",
        "--top-p", "0.5", "--extra-body", '{"priority": 3}', "--goodput", "ttft:60000", "--num-warmups", "1",
    )  # fmt: skip
    assert status == 0
    posts = [body for _, path, body in wire.asked if path == "/v1/completions"]
    assert len(posts) == 7
    assert wire.most <= 2
    assert posts[0].pop("prompt") == posts[1].pop("prompt")  # the warm-up is the first prompt
    assert posts[0] == posts[1] == {
        "model": "m/toy", "max_tokens": 128, "temperature": 0.0, "top_p": 0.5, "priority": 3, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert wire.headers[-1]["authorization"] == "bearer k"
    assert wire.headers[-1]["x-a"] == "b"
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("openai-infqps-concurrency2-toy-")
    kept = json.loads(path.read_text())
    assert (kept["completed"], kept["total_input_tokens"], kept["total_output_tokens"]) == (
        6,
        42,
        18,
    )
    assert (kept["commit"], kept["request_rate"], kept["model_id"]) == ("abc", "inf", "m/toy")
    assert kept["request_goodput"] == kept["request_throughput"]
    assert kept["generated_texts"] == ["one two three"] * 6
    # Three tokens, of which each comes 5 ms after the one before; it may be read later than that.
    assert all(len(gaps) == 2 and min(gaps) > 0 for gaps in kept["itls"])
    assert 5 <= kept["mean_ttft_ms"] <= kept["mean_e2el_ms"] - 10
    # What CI jobs read.
    for name in ("ttft", "tpot", "itl", "e2el"):
        for of in ("mean", "median", "std", "p99"):
            assert kept[f"{of}_{name}_ms"] > 0 or of == "std"
    for name in ("duration", "request_throughput", "output_throughput", "total_token_throughput"):
        assert kept[name] > 0
    printed = capsys.readouterr().out
    for words in ("Successful requests:                     6", "P99 ITL (ms):", "Total generated tokens:                  18"):  # fmt: skip
        assert words in printed
    assert "E2EL" not in printed


def test_a_timeline_has_a_bar_a_request(tmp_path, capsys):
    """A bar begins where its request was sent, and is as long as the request took; the gaps give its colours."""
    status, _ = bench(
        model, "--num-prompts", "3", "--random-input-len", "4", "--plot-timeline", "--result-dir", str(tmp_path),
        "--result-filename", "r.json", "--disable-tqdm",
    )  # fmt: skip
    assert status == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.timeline.html"]
    done = [
        RequestRecord(1, start=10.0, latency=0.1, ttft=0.06, itls=[0.01, 0.02, 0.01]),
        RequestRecord(1, start=10.1, latency=0.4, ttft=0.1, itls=[0.06, 0.04, 0.2]),
        RequestRecord(1, start=10.2, error="<no>"),
    ]
    drawn = timeline.page(done, "a & b", (25.0, 50.0))
    found = re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" .*?<title>(\w+):', drawn)
    assert [(float(x) - timeline.LEFT, float(wide), kind) for x, _, wide, kind in found] == [
        (0, 120, "first"), (120, 80, "fine"),
        (200, 200, "first"), (400, 120, "late"), (520, 80, "slow"), (600, 400, "late"),
        (400, 2, "failed"),
    ]  # fmt: skip
    assert len({y for _, y, _, _ in found}) == 3
    assert "a &amp; b" in drawn


def test_a_server_without_a_profiler_is_reported():
    with pytest.raises(HttpFailed, match="/start_profile with 404"):
        bench(model, "--num-prompts", "1", "--profile", "--disable-tqdm")


def test_failures_are_counted_and_reported(capsys):
    number = iter(range(100))

    def flaky(method: str, path: str, body: Any) -> Any:
        if path != "/v1/completions":
            return model(method, path, body)
        match next(number) % 3:
            case 0:
                return model(method, path, body)
            case 1:
                return whole({"error": {"message": "full"}}, "503 Service Unavailable")
        return [STREAM, chunk(event({"choices": [{"text": "a"}]})), b""]

    status, _ = bench(flaky, "--num-prompts", "9", "--random-input-len", "4", "--max-concurrency", "1")  # fmt: skip
    told = capsys.readouterr()
    assert status == 0
    assert "Failed requests:                         6" in told.out
    assert "failed 3 times: 503: full" in told.err
    assert "failed 3 times: the connection was closed" in told.err


def test_without_answers_the_exit_status_is_1(capsys):
    def refuse(method: str, path: str, body: Any) -> Any:
        return model(method, "/v1/models" if path == "/v1/models" else "/", body)

    status, _ = bench(refuse, "--num-prompts", "2", "--random-input-len", "4")
    assert status == 1
    assert "no such path" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--backend", "grpc"], ["--goodput", "itl:3"], ["--request-rate", "0"], ["--metadata", "x"], ["--metric-percentiles", "a"],
     ["--percentile-metrics", "ttfb"], ["--random-range-ratio", "1"], ["--dataset-nam", "random"], ["--extra-body", "[]"]],
)  # fmt: skip
def test_mistakes_end_with_status_2(words: list[str], capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_without_a_server_the_exit_status_is_1(capsys):
    assert run.main(["--port", "1", "--ready-check-timeout-sec", "0.1"]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert re.match(
        r"waiting for http://127.0.0.1:1, at most 0.1 s \(--ready-check-timeout-sec\)", first
    )
    assert "127.0.0.1:1" in last


def test_a_server_that_needs_a_key_is_not_waited_for():
    with pytest.raises(HttpFailed, match="--api-key or OPENAI_API_KEY"):
        bench(lambda *_: whole({"error": {"message": "no key"}}, "401 Unauthorized"))


def test_a_chat_ends_with_its_text():
    def chat(method: str, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return model(method, path, body)
        assert body["messages"] == [{"role": "user", "content": body["messages"][0]["content"]}]
        said = [{"role": "assistant", "content": ""}, {"content": "Hi"}]
        return [STREAM, *(chunk(event({"choices": [{"delta": one}]})) for one in said), END]

    status, wire = bench(chat, "--backend", "openai-chat", "--num-prompts", "1", "--random-input-len", "3")  # fmt: skip
    assert status == 0
    assert wire.asked[-1][1] == "/v1/chat/completions"


@pytest.mark.slow
def test_a_refused_connection_is_given_up_soon_unless_a_wait_is_given(monkeypatch, capsys):
    monkeypatch.setattr(run, "REFUSED_S", 0.1)
    began = time.monotonic()
    assert run.main(["--port", "1"]) == 1
    assert time.monotonic() - began < 30
    assert "wait longer with --ready-check-timeout-sec" in capsys.readouterr().err
    assert run.main(["--port", "1", "--ready-check-timeout-sec", "1.5"]) == 1
    assert "at most 1.5 s" in capsys.readouterr().err


def test_a_peak_below_the_mean_is_not_printed():
    assert metrics._peak({"max_output_tokens_per_s": 640.0, "output_throughput": 2057.8}) is None
    assert metrics._peak({"max_output_tokens_per_s": 640.0, "output_throughput": 600.0}) == 640.0
