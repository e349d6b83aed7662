"""Metrics of HTTP requests; clients cannot add labels."""

from __future__ import annotations

import re

import pytest
from asgi import ask
from scripted import ScriptedEngine, make_state, serve

from quire.errors import ConfigError, QueueFull
from quire.frontend.outputs import RequestMetrics
from quire.observe.prometheus import ServerMetrics
from quire.observe.request_metrics import RequestTimer
from quire.observe.stats_log import StatsLog
from quire.protocol.output import EngineStats

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def test_requests_are_counted_by_route_and_outcome():
    state = make_state(ScriptedEngine("a"))
    ask(None, "POST", CHAT, HI, state=state)
    ask(None, "POST", CHAT, {}, state=state)
    ask(None, "GET", "/v1/models/toy", state=state)
    ask(None, "GET", "/health", state=state)
    text = ask(None, "GET", "/metrics", state=state).text
    counted = dict(re.findall(r"(?m)^http_requests_total\{(.*)\} (\S+)$", text))
    assert counted == {
        f'handler="{CHAT}",method="POST",status="2xx"': "1.0",
        f'handler="{CHAT}",method="POST",status="4xx"': "1.0",
        'handler="/v1/models/{name}",method="GET",status="2xx"': "1.0",
    }
    assert f'http_request_duration_seconds_count{{handler="{CHAT}",method="POST"}} 2.0' in text
    assert "http_request_duration_highr_seconds_count 3.0" in text


def test_unknown_paths_create_no_labels():
    state = make_state(ScriptedEngine("a"))
    for number in range(20):
        ask(None, "GET", f"/made/up/{number}", state=state)
        ask(None, "GET", f"/v1/models/{number}", state=state)
    lines = [line for line in ask(None, "GET", "/metrics", state=state).text.splitlines() if line.startswith("http_requests_total")]  # fmt: skip
    assert len(lines) == 2


def test_rates_have_their_old_names():
    state = make_state(ScriptedEngine("a"))
    snapshots = [EngineStats(prompt_tokens=100, generation_tokens=30)]
    log = StatsLog(lambda: snapshots[-1])
    log.tick(10, write=False)
    state.metrics.rates(log.prompt, log.generation)
    text = state.metrics.render().decode()
    assert 'vllm:avg_prompt_throughput_toks_per_s{engine="0",model_name="toy"} 10.0' in text
    assert 'vllm:avg_generation_throughput_toks_per_s{engine="0",model_name="toy"} 3.0' in text


def test_adapters_of_requests_are_labels():
    metrics = ServerMetrics("toy", process=False)
    labels = {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": ""}
    metrics.attach(lambda: EngineStats(labels=labels), 10, {})
    found = re.search(r"(?m)^vllm:lora_requests_info\{(.*)\} (\S+)$", metrics.render().decode())
    assert found is not None
    assert found[1] == 'max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""'
    assert float(found[2]) > 1e9
    assert "lora_requests_info" not in ServerMetrics("toy", process=False).render().decode()


def test_queue_time_is_a_metric_of_its_own():
    state = make_state(ScriptedEngine())
    timer = RequestTimer(state.metrics, arrived=100.0, first=103.0, last=107.0)
    times = RequestMetrics(queued_ts=50.0, scheduled_ts=52.0, num_preemptions=1)
    timer.end(prompt_tokens=9, cached=4, output_tokens=[5], max_tokens=8, n=1, times=times)
    text = state.metrics.render().decode()
    sums = {
        "request_queue_time_seconds": 2.0,
        "e2e_request_latency_seconds": 7.0,
        "request_inference_time_seconds": 5.0,
        "request_prefill_time_seconds": 1.0,
        "request_decode_time_seconds": 4.0,
        "request_time_per_output_token_seconds": 1.0,
        "request_prefill_kv_computed_tokens": 5.0,
        "request_num_preemptions": 1.0,
    }
    for name, value in sums.items():
        assert f'vllm:{name}_sum{{engine="0",model_name="toy"}} {value}' in text, name


def test_batched_gaps_count_like_single_ones():
    name = "vllm:inter_token_latency_seconds"
    gaps = [0.0, 0.01, 0.010001, 0.03, 0.03, 79.0, 80.0, 81.0]
    texts = []
    for together in (False, True):
        metrics = make_state(ScriptedEngine()).metrics
        if together:
            metrics.observe_all(name, gaps)
        else:
            for gap in gaps:
                metrics.observe(name, gap)
        lines = metrics.render().decode().splitlines()
        texts.append([line for line in lines if line.startswith(f"{name}_") and "_created" not in line])  # fmt: skip
    assert texts[0] == texts[1]
    assert f'{name}_count{{engine="0",model_name="toy"}} 8.0' in texts[0]


def test_gaps_of_a_stream_are_counted_before_its_end():
    state = make_state(ScriptedEngine())
    timer = RequestTimer(state.metrics)
    count = 'vllm:inter_token_latency_seconds_count{engine="0",model_name="toy"}'
    for _ in range(70):
        timer.output()
    assert f"{count} 64.0" in state.metrics.render().decode()
    timer.end(prompt_tokens=1, cached=0, output_tokens=[70], max_tokens=70, n=1)
    assert f"{count} 69.0" in state.metrics.render().decode()


def test_old_names_and_buckets_are_a_choice():
    engine = ScriptedEngine("a")
    state = make_state(engine)
    state.metrics = ServerMetrics("toy", legacy=False, custom={"request_latency": [1, 2.5]})
    state.metrics.attach(engine.stats, 100, {})
    text = state.metrics.render().decode()
    assert "vllm:gpu_cache_usage_perc" not in text
    assert "vllm:time_per_output_token_seconds" not in text
    found = re.findall(r'vllm:e2e_request_latency_seconds_bucket\{.*le="([^"]+)"', text)
    assert found == ["1.0", "2.5", "+Inf"]
    longest = re.findall(r'vllm:request_prompt_tokens_bucket\{.*le="([^"]+)"', text)[-2]
    assert longest == "100.0"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"no_such": [1]}, "no_such"),
        ({"request_latency": [2, 1]}, "increasing"),
        ({"request_latency": []}, "increasing"),
        ({"request_latency": "1"}, "increasing"),
        ({"request_latency": [True]}, "increasing"),
    ],
)
def test_invalid_buckets_are_refused(wanted: dict[str, object], why: str):
    with pytest.raises(ConfigError, match=why):
        ServerMetrics("toy", custom=wanted)


def test_bytes_of_both_bodies_are_counted():
    state = make_state(ScriptedEngine("abc"))
    body = {"prompt": "x", "max_tokens": 3}
    answer = ask(None, "POST", "/v1/completions", body, state=state)
    assert answer.status_code == 200
    assert state.metrics.value("http_request_size_bytes_sum") == int(
        answer.request.headers["content-length"]
    )
    assert state.metrics.value("http_response_size_bytes_sum") == len(answer.content)
    assert state.metrics.value("quire:http_requests_under_way") == 0


def test_completions_that_were_read_for_calls_are_counted():
    """Hermes' form; one with a call and one without, whole and streamed."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = HI | {"tools": tools, "max_tokens": 99}
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    state = None
    for text, stream in ((call, False), ("no", False), (call, True), ("no", True), ("no", True)):
        engine = ScriptedEngine(text)
        if state is None:
            state = make_state(engine, tool_call_parser="hermes")
        serve(state, engine)
        assert ask(None, "POST", CHAT, body | {"stream": stream}, state=state).status_code == 200
    assert ask(None, "POST", CHAT, HI, state=state).status_code == 200  # it has no tools
    text = state.metrics.render().decode()
    found = re.findall(
        r'vllm:tool_call_parser_invocations_total\{mode="(\w+)",model_name="toy",outcome="(\w+)",'
        r'request_type="chat_completions"\} (\d)',
        text,
    )
    assert sorted(found) == [
        ("non_streaming", "no_tool_call", "1"),
        ("non_streaming", "tool_call", "1"),
        ("streaming", "no_tool_call", "2"),
        ("streaming", "tool_call", "1"),
    ]


def test_refusals_name_the_limit_that_was_reached():
    for words, reason in (
        ("3 requests are already waiting (max_num_queued_reqs)", "max_num_queued_reqs"),
        ("9 prompt tokens are already waiting (max_num_queued_tokens)", "max_num_queued_tokens"),
    ):
        state = make_state(ScriptedEngine(QueueFull(words)))
        assert ask(None, "POST", CHAT, HI, state=state).status_code == 503
        line = f'vllm:admission_rejections_total{{model_name="toy",reason="{reason}"}} 1.0'
        assert line in state.metrics.render().decode()


def test_the_line_says_where_cached_tokens_fell_for_lack_of_a_state() -> None:
    stats = EngineStats(prefix_queries=200, prefix_hits=20, counts={"prefix_kv_hits": 100.0})
    line = StatsLog(lambda: stats).tick(1.0)
    assert line.endswith("hit rate: 10.0% (KV blocks 50.0%, recurrent states 10.0%)")
    stats.prefix_hits = 100
    assert StatsLog(lambda: stats).tick(1.0).endswith("hit rate: 50.0%")


def test_waiting_requests_are_counted_by_reason():
    metrics = ServerMetrics("toy")
    metrics.attach(lambda: EngineStats(waiting=5, deferred=2), 10, {})
    text = metrics.render().decode()
    for reason, count in (("capacity", 3), ("deferred", 2)):
        assert f'waiting_by_reason{{engine="0",model_name="toy",reason="{reason}"}} {count}.0' in text  # fmt: skip
    line = StatsLog(lambda: EngineStats(waiting=5, deferred=2)).tick(1.0)
    assert "Waiting: 5 reqs, Deferred: 2 reqs, CPU KV" in line


def test_sleeping_and_waking_up_are_timed():
    state = make_state(ScriptedEngine("x"))
    state.dev_mode = True
    slept = "vllm:sleep_mode_operation_duration_seconds_count"
    assert ask(None, "POST", "/sleep", state=state).status_code == 200
    assert state.metrics.value(slept) == 1
    assert ask(None, "POST", "/sleep?level=9", state=state).status_code == 400
    assert ask(None, "POST", "/wake_up", state=state).status_code == 200
    assert state.metrics.value(slept) == 2
    assert 'operation="wake_up"' in state.metrics.render().decode()
    assert state.metrics.value("vllm:sleep_mode_operations_in_flight") == 0
