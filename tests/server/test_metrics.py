"""What is counted of HTTP requests, and that clients cannot make it grow."""

from __future__ import annotations

import re

from asgi import ask
from scripted import ScriptedEngine, make_state

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


def test_made_up_paths_make_no_labels():
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
