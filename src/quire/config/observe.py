"""ObserveConfig: what is logged and counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config.number_types import Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveConfig:
    """Logs and metrics."""

    log_level: str | None = None
    """DEBUG, INFO, WARNING or ERROR; unset: QUIRE_LOGGING_LEVEL, or INFO."""
    disable_log_stats: bool = False
    """Do not log the statistics line (LLM() sets this)."""
    enable_log_requests: bool = False
    """Log each request's id and parameters."""
    max_log_len: int | None = None
    """Maximum characters or token ids of a prompt in a log line; unset: no limit."""
    log_stats_interval: float = 10.0
    """Seconds between statistics lines."""
    legacy_metrics: bool = True
    """Export metrics under their old names too."""
    custom_histogram_buckets: dict[str, Any] = field(default_factory=dict)
    """Histogram buckets by family, such as request_latency or request_tokens: a list of increasing numbers for each."""
    kv_cache_metrics: bool = False
    """Measure the lifetime, idle time and reuse gaps of KV blocks."""
    kv_cache_metrics_sample: Fraction = 0.01
    """Fraction of the KV blocks that kv_cache_metrics measures."""
    enable_mfu_metrics: bool = False
    """Estimate the floating-point operations of steps and the bytes of weights and KV that they move (estimated_* in /metrics)."""
    otlp_traces_endpoint: str | None = None
    """OpenTelemetry endpoint for spans of requests, such as http://host:4318/v1/traces; needs the extra otlp."""
    collect_detailed_traces: list[str] = field(default_factory=list)
    """Spans of a request's waiting, prefill and decode below its span; any of vLLM's names: model, worker, all."""
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    """Report the draft tokens of a request in its answer; detailed: the draft tokens of each step too."""
    profiler_config: dict[str, Any] = field(default_factory=dict)
    """A JSON object with profiler (torch), torch_profiler_dir (an absolute path) and other keys of vLLM: adds /start_profile and /stop_profile, which record steps of the workers."""
    fail_on_environ_validation: bool = False
    """Refuse to start, instead of warning, if a QUIRE_* or VLLM_* environment variable is unknown."""
