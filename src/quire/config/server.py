"""The HTTP server: where it listens and whom it answers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Address, keys and limits."""

    host: str | None = None
    """Where to listen; unset: loopback, or all interfaces when an API key is set or in a container."""
    port: int = 8000
    """TCP port."""
    api_key: list[str] | str | None = None
    """Keys that a request must bring one of, as `Authorization: Bearer KEY`."""
    api_server_count: int = 1
    """HTTP processes in front of the engine."""
    disable_frontend_multiprocessing: bool = False
    """Engine in the HTTP process (one-core boxes, debugging)."""
    shutdown_timeout: float = 0
    """Seconds that running requests may take to end at SIGTERM."""
    enable_auto_tool_choice: bool = False
    """Let the model decide on tool calls."""
    tool_call_parser: str | None = None
    """Which parser reads the model's tool calls."""
    uvicorn_log_level: str = "warning"
    """Log level of the HTTP server."""
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    """CORS origins."""
    max_body_bytes: int = 16 << 20
    """The largest request body."""
