"""Traces: a span for each request, sent to an OpenTelemetry collector. Imported only with --otlp-traces-endpoint.

Knows times, counts and the headers that carry a caller's span. Does not know text. A collector that cannot be reached
causes only log lines: a thread sends spans, and drops them when too many wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from quire import env
from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.observe.request_metrics import RequestLatencies
from quire.protocol.request import RequestParams

SPAN = "llm_request"
PARTS = ("queued", "prefill", "decode")  # fields of RequestLatencies, in the order of time
HTTP_PORT = 4318
CLOSE_MS = 2000

CARRIED: ContextVar[Mapping[str, str] | None] = ContextVar("CARRIED", default=None)
"""traceparent and tracestate headers of the current HTTP request."""

EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


def protocol_of(endpoint: str) -> str:
    """The protocol from the environment (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL), or guessed from the endpoint.

    Raises:
        ConfigError: an unknown protocol.
    """
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if exporter := env.outer(name):
            if exporter not in EXPORTERS:
                raise ConfigError(f"{name}={exporter}: choose from {', '.join(EXPORTERS)}")
            return exporter
    parts = urlsplit(endpoint)
    web = parts.scheme in ("http", "https")
    return "http/protobuf" if web and (parts.path.strip("/") or parts.port == HTTP_PORT) else "grpc"


def exporter_for(endpoint: str) -> Any:
    """
    Raises:
        ConfigError: the packages are not installed.
    """
    protocol = protocol_of(endpoint)
    try:
        found = all(map(find_spec, ("opentelemetry.sdk.trace", EXPORTERS[protocol])))
    except ImportError:  # a parent package is missing
        found = False
    if not found:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint} needs OpenTelemetry's packages for {protocol}: pip install opentelemetry-sdk opentelemetry-exporter-otlp"
        )
    if protocol == "http/protobuf" and not urlsplit(endpoint).path.strip("/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return import_module(EXPORTERS[protocol]).OTLPSpanExporter(endpoint=endpoint)


OF_PARAMS = ("n", "max_tokens", "top_p", "temperature")


@dataclass(slots=True)
class SpanAttributes:
    """A request's data for its span."""

    name: str
    model: str
    params: RequestParams
    prompt_tokens: int
    output_tokens: list[int]
    """Token count of each completion."""


class Tracer:
    """Sends a span for each request.

    Raises:
        ConfigError: the packages are not installed.
    """

    def __init__(self, endpoint: str, detailed: bool = False):
        self.detailed = detailed
        exporter = exporter_for(endpoint)
        resources = import_module("opentelemetry.sdk.resources")
        tracing = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        carried = import_module("opentelemetry.trace.propagation.tracecontext")
        defaults = {} if env.outer("OTEL_SERVICE_NAME") else {"service.name": "quire"}
        # Keep a tracer provider of the program, if there is one: this one does not become the global provider.
        self._provider = tracing.TracerProvider(
            resource=resources.Resource.create(defaults), shutdown_on_exit=False
        )
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire")
        self._carried = carried.TraceContextTextMapPropagator()
        trace = import_module("opentelemetry.trace")
        self._server, self._below = trace.SpanKind.SERVER, trace.set_span_in_context

    def request(self, data: SpanAttributes, latencies: RequestLatencies) -> None:
        """Send the span of a request that has just ended; if `detailed`, with the spans of its parts below it."""
        end = time.time_ns()
        start = end - int(latencies.since_arrival * 1e9)
        span = self._tracer.start_span(
            SPAN,
            context=self._carried.extract(CARRIED.get() or {}),
            kind=self._server,
            start_time=start,
            attributes=attributes(data, latencies),
        )
        for name in PARTS if self.detailed else ():
            if (seconds := getattr(latencies, name)) is not None:
                part = self._tracer.start_span(
                    f"{SPAN}.{name}", context=self._below(span), start_time=start
                )
                start += int(seconds * 1e9)
                part.end(end_time=start)
        span.end(end_time=end)

    def close(self) -> None:
        """Send waiting spans, for at most CLOSE_MS."""
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()


def attributes(span: SpanAttributes, latencies: RequestLatencies) -> dict[str, str | int | float]:
    """Span attributes, under the names that trace dashboards read."""
    params = span.params
    found: dict[str, str | int | float | None] = {
        "gen_ai.request.id": span.name,
        **{f"gen_ai.request.{name}": getattr(params, name, None) for name in OF_PARAMS},
        "gen_ai.response.model": span.model,
        "gen_ai.usage.prompt_tokens": span.prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(span.output_tokens),
        "gen_ai.usage.num_sequences": len(span.output_tokens),
        "gen_ai.latency.time_in_queue": latencies.queued,
        "gen_ai.latency.time_to_first_token": latencies.first_token,
        "gen_ai.latency.e2e": latencies.whole,
        "gen_ai.latency.time_in_model_prefill": latencies.prefill,
        "gen_ai.latency.time_in_model_decode": latencies.decode,
        "gen_ai.latency.time_in_model_inference": latencies.inference,
    }
    return {name: value for name, value in found.items() if value is not None}


def tracer_of(config: EngineConfig) -> Tracer | None:
    """Raises ConfigError: tracing is configured, and its exporter is not installed; or an unknown module."""
    endpoint, modules = config.observe.otlp_traces_endpoint, config.observe.collect_detailed_traces
    named = {name.strip() for word in modules for name in word.split(",")}
    if wrong := sorted(named - {"model", "worker", "all"}):
        raise ConfigError(f"collect_detailed_traces={wrong[0]}: choose from model, worker, all")
    return None if endpoint is None else Tracer(endpoint, bool(named))
