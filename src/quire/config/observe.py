"""What is logged and counted."""

from __future__ import annotations

from dataclasses import dataclass


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
    fail_on_environ_validation: bool = False
    """An unknown QUIRE_* or VLLM_* environment variable is an error instead of a warning."""
