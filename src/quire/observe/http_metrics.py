"""Metrics of HTTP requests, under the names that dashboards know.

Knows paths, statuses and times. Does not know engines.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

UNCOUNTED = frozenset(
    ("/metrics", "/health", "/health/live", "/health/ready", "/health/startup", "/load", "/ping", "/version", "/server_info")
)  # fmt: skip
COARSE = (0.1, 0.5, 1)
FINE = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60,
)  # fmt: skip
UNKNOWN = "none"
UNDER_WAY = "quire:http_requests_under_way"


Labelled = tuple[Counter, Histogram, Summary, Summary]


class HttpMetrics:
    """`handler` is a route's template, not the path, so that clients cannot create labels."""

    def __init__(self, registry: CollectorRegistry):
        self._labelled: dict[tuple[str, str, int], Labelled] = {}
        """A cache: finding labels costs more than counting."""
        self.requests = Counter(
            "http_requests",
            "HTTP requests by status class.",
            ["handler", "method", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds from the first byte of a request to the last byte of its response.",
            ["handler", "method"],
            buckets=COARSE,
            registry=registry,
        )
        self.fine = Histogram(
            "http_request_duration_highr_seconds",
            "The same with finer buckets, for all routes together.",
            buckets=FINE,
            registry=registry,
        )
        self.asked_bytes = Summary(
            "http_request_size_bytes",
            "Bytes of request bodies, by Content-Length.",
            ["handler"],
            registry=registry,
        )
        self.told_bytes = Summary(
            "http_response_size_bytes", "Bytes of response bodies.", ["handler"], registry=registry
        )
        self.under_way = Gauge(
            UNDER_WAY, "HTTP requests in progress.", registry=registry, multiprocess_mode="livesum"
        )

    def answered(
        self, handler: str, method: str, status: int, seconds: float, read: int = 0, sent: int = 0
    ) -> None:
        """Count a finished request; `read` and `sent`: bytes of the request's and the response's body."""
        if handler in UNCOUNTED:
            return
        kind = (handler, method, status // 100)
        if (labelled := self._labelled.get(kind)) is None:
            labelled = self._labelled[kind] = self._with_labels(*kind)
        requests, spent, request_bytes, response_bytes = labelled
        requests.inc()
        spent.observe(seconds)
        self.fine.observe(seconds)
        request_bytes.observe(read)
        response_bytes.observe(sent)

    def _with_labels(self, handler: str, method: str, digit: int) -> Labelled:
        return (
            self.requests.labels(handler, method, f"{digit}xx"),
            self.seconds.labels(handler, method),
            self.asked_bytes.labels(handler),
            self.told_bytes.labels(handler),
        )
