"""ObserveConfig: what is logged and counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveConfig:
    """Logs and metrics."""

    log_level: str | None = None
    """DEBUG, INFO, WARNING or ERROR; unset: QUIRE_LOGGING_LEVEL, or INFO."""
    disable_log_stats: bool = False
    """No statistics line every ten seconds (LLM() sets it)."""
    enable_log_requests: bool = False
    """Log each request's id and parameters."""
    max_log_len: int | None = None
    """The most characters or token ids of a prompt in a log line; unset: all."""
    log_stats_interval: float = 10.0
    """Seconds between statistics lines."""
    legacy_metrics: bool = True
    """Tell metrics under their old names too."""
    custom_histogram_buckets: dict[str, Any] = field(default_factory=dict)
    """Buckets of histograms by family, as request_latency or request_tokens: a list of increasing numbers each."""
    kv_cache_metrics: bool = False
    """Count how long blocks of KV live, lie idle, and come back into use."""
    kv_cache_metrics_sample: float = 0.01
    """The share of blocks that this watches."""
    enable_mfu_metrics: bool = False
    """Count the floating-point operations and the bytes of weights and KV that steps take by the sums (estimated_* in /metrics)."""
    otlp_traces_endpoint: str | None = None
    """Where spans of requests are sent (OpenTelemetry), as http://host:4318/v1/traces; needs quire[otlp]."""
    fail_on_environ_validation: bool = False
    """An unknown QUIRE_* or VLLM_* environment variable is an error instead of a warning."""
