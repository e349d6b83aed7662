"""ServerConfig: the HTTP server's address, keys, limits and response format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Address, keys, limits and the shape of answers."""

    host: str | None = None
    """Where to listen; unset: loopback, or all interfaces when an API key is set or in a container."""
    port: int = 8000
    """TCP port."""
    uds: str | None = None
    """Path of a unix socket to listen on instead of host and port."""
    root_path: str | None = None
    """Path prefix that a proxy in front of the server takes off."""
    api_key: list[str] | str | None = None
    """Keys of which a request must bring one, as `Authorization: Bearer KEY`."""
    api_key_file: str | None = None
    """JSON or YAML list of keys with name, weight and limits; SIGHUP reads it again."""
    ssl_keyfile: str | None = None
    """TLS: the server's private key."""
    ssl_certfile: str | None = None
    """TLS: the server's certificate."""
    ssl_ca_certs: str | None = None
    """TLS: certificates that clients' certificates are checked with."""
    ssl_cert_reqs: int = 0
    """TLS: 0 clients need no certificate, 1 optional, 2 required (the numbers of Python's ssl)."""
    ssl_ciphers: str | None = None
    """TLS: ciphers, in OpenSSL's notation."""
    enable_ssl_refresh: bool = False
    """TLS: read the files again when they change."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names that requests may have in the header Host (`*.a.b`: all below a.b; `*`: any), beside this machine's own; unset: any, but on a loopback address without a key only this machine's."""
    allowed_origins: list[str] = field(default_factory=list)
    """CORS: origins whose scripts may read answers, or `*`; unset: none but the server's own."""
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    """CORS: methods."""
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    """CORS: headers."""
    allow_credentials: bool = False
    """CORS: credentials."""
    middleware: list[str] = field(default_factory=list)
    """ASGI middleware of yours around every request, as package.module.Class or an async function(request, call_next)."""
    api_server_count: int = 1
    """HTTP processes in front of the engine."""
    disable_frontend_multiprocessing: bool = False
    """Engine in the HTTP process (one-core boxes, debugging)."""
    shutdown_timeout: float = 30
    """Seconds that running requests may take to end at SIGTERM."""
    enable_auto_tool_choice: bool = False
    """Let the model decide on tool calls: taken, and always so where their format is known."""
    tool_call_parser: str | None = None
    """Format of the model's tool calls; unset or auto: as its chat template shows; none: they are not read."""
    tool_parser_plugin: str | None = None
    """Python file with a function `register(registry)` that adds formats."""
    tool_strict_level: str = "auto"
    """What holds for calls that a model may make: auto or function: their form, tools' names, strict tools' schemas; parameter: all tools' schemas; strict: as auto, and nothing without strict tools."""
    reasoning_parser: str | None = None
    """Format of the model's thoughts; unset or auto: as its chat template shows; none: they are part of the text."""
    reasoning_parser_plugin: str | None = None
    """As tool_parser_plugin."""
    enable_reasoning_content: bool = False
    """Send thoughts under their older name `reasoning_content` too."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template for requests that do not set them."""
    trust_request_chat_template: bool = False
    """Let a request bring its own chat template."""
    response_role: str = "assistant"
    """Role of the answer's message."""
    return_tokens_as_token_ids: bool = False
    """Write tokens in logprobs as `token_id:N`, so that none is unprintable."""
    enable_prompt_tokens_details: bool = False
    """Put prompt_tokens_details (cached tokens) into usage."""
    enable_force_include_usage: bool = False
    """Send usage in every stream, asked for or not."""
    enable_request_id_headers: bool = False
    """Answer with X-Request-Id."""
    enable_server_load_tracking: bool = False
    """Count running HTTP requests for /load."""
    stream_interval: int = 1
    """Tokens that a stream collects before it tells them, the first one excepted; a request's own may be more."""
    sse_keep_alive_interval: float = 0
    """Seconds of silence in a stream after which a comment is sent; 0: never."""
    uvicorn_log_level: str = "warning"
    """Log level of the HTTP server."""
    disable_uvicorn_access_log: bool = False
    """No line for each HTTP request."""
    disable_access_log_for_endpoints: str | None = None
    """Paths, with commas between, whose requests are not in the access log."""
    disable_ui: bool = False
    """No page at `/`."""
    disable_fastapi_docs: bool = False
    """No /docs and /openapi.json."""
    h11_max_incomplete_event_size: int | None = None
    """The most bytes of an HTTP request's head; unset: 65536."""
    max_body_bytes: int = 16 << 20
    """The largest request body, in bytes."""
    receive_timeout: float = 30
    """Seconds without a byte after which a request that is not complete is given up; 0: never."""
    send_timeout: float = 60
    """Seconds without a byte taken after which a client that does not read its answer is given up; 0: never."""
    max_completions: int = 4096
    """The most completions of one HTTP request: its prompts times n."""

    @property
    def needs_key(self) -> bool:
        """Whether a request must have a key. The choice of address, the key check and the messages all use this."""
        return bool(self.api_key) or self.api_key_file is not None

    max_answer_entries: int = 1 << 21
    """The most tokens and log-probabilities of one answer, about 200 bytes of memory each."""
