"""Spans at a collector: a stub that keeps what OpenTelemetry's own exporter sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from asgi import ask
from scripted import ScriptedEngine, make_state

from quire.errors import ConfigError
from quire.observe import tracing
from quire.observe.request_metrics import RequestLatencies
from quire.observe.tracing import SpanAttributes, Tracer, protocol_of, tracer_of
from quire.protocol.sampling_params import SamplingParams

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 5,
    "temperature": 0.5,
    "n": 2,
}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans over HTTP."""

    def __init__(self) -> None:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        pytest.importorskip("opentelemetry.sdk.trace")
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        kept = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    data = gzip.decompress(data)
                for group in service.ExportTraceServiceRequest.FromString(data).resource_spans:
                    kept.resources.append(
                        {one.key: one.value.string_value for one in group.resource.attributes}
                    )
                    for scope in group.scope_spans:
                        kept.spans += scope.spans
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def values(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_each_request_is_a_span_below_its_callers(collector: Collector):
    engine = ScriptedEngine("Hel", "lo")
    state = make_state(engine, otlp_traces_endpoint=collector.url)
    state.tracer = tracer_of(state.config)
    assert state.tracer is not None
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    for given in (headers, {}):
        assert ask(engine, "POST", CHAT, BODY, state=state, headers=given).status_code == 200
    state.tracer.close()
    below, alone = collector.spans
    assert below.name == alone.name == "llm_request"
    assert (below.trace_id.hex(), below.parent_span_id.hex()) == (TRACE, PARENT)
    assert not alone.parent_span_id
    assert alone.trace_id != below.trace_id
    assert collector.resources[0]["service.name"] == "quire"
    said = values(below)
    assert said["gen_ai.request.id"] == "chatcmpl-mine"
    assert said["gen_ai.request.n"] == said["gen_ai.usage.num_sequences"] == 2
    assert said["gen_ai.request.max_tokens"] == 5
    assert said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.request.top_p"] == 1.0
    assert said["gen_ai.response.model"] == "toy"
    assert said["gen_ai.usage.prompt_tokens"] == len(engine.asked[0].prompt.tokens)
    assert said["gen_ai.usage.completion_tokens"] == 2 * len("Hello")
    lasted = (below.end_time_unix_nano - below.start_time_unix_nano) / 1e9
    latency = {
        name.rpartition(".")[2]: value for name, value in said.items() if ".latency." in name
    }
    assert 0 <= latency["e2e"] <= lasted + 1e-6
    assert latency["time_in_queue"] == 0
    assert latency["time_in_model_inference"] == latency["e2e"]


def test_detailed_traces_have_the_parts_of_a_request(collector: Collector):
    state = make_state(ScriptedEngine(), otlp_traces_endpoint=collector.url, collect_detailed_traces=["all"])  # fmt: skip
    tracer = tracer_of(state.config)
    assert tracer is not None
    times = RequestLatencies(1.0, 0.9, 0.25, 0.65, first_token=0.4, prefill=0.25, decode=0.5)
    tracer.request(SpanAttributes("r", "toy", SamplingParams(), 3, [2]), times)
    tracer.close()
    found = {span.name: span for span in collector.spans}
    whole = found.pop("llm_request")
    assert list(found) == ["llm_request.queued", "llm_request.prefill", "llm_request.decode"]
    at = whole.start_time_unix_nano
    for span, seconds in zip(found.values(), (0.25, 0.25, 0.5), strict=True):
        assert (span.parent_span_id, span.start_time_unix_nano) == (whole.span_id, at)
        at = span.end_time_unix_nano
        assert at - span.start_time_unix_nano == pytest.approx(seconds * 1e9)
    with pytest.raises(ConfigError, match="collect_detailed_traces=engine"):
        tracer_of(make_state(None, collect_detailed_traces=["engine"]).config)


def test_an_unreachable_collector_delays_no_request(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracing, "CLOSE_MS", 50)
    engine = ScriptedEngine("Hi")
    state = make_state(engine)
    state.tracer = Tracer("http://127.0.0.1:1/v1/traces")
    assert ask(engine, "POST", CHAT, BODY, state=state).status_code == 200


def test_protocols(monkeypatch: pytest.MonkeyPatch):
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    assert protocol_of("http://c:4318") == protocol_of("https://c/v1/traces") == "http/protobuf"
    assert protocol_of("http://c:4317") == protocol_of("grpc://c:4317") == "grpc"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert protocol_of("http://c:4317") == "http/protobuf"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    with pytest.raises(ConfigError, match="smoke"):
        protocol_of("http://c:4317")


def test_tracing_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk"):
        Tracer("http://c:4318")
