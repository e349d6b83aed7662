"""ServerConfig: the HTTP server's address, keys, limits and response format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from quire.config.number_types import Amount, AtLeast0, AtLeast1, Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """HTTP server: address, keys, limits and the format of responses."""

    host: str | None = None
    """Address to listen on; unset: loopback, or all interfaces if an API key is set or in a container."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """TCP port."""
    uds: str | None = None
    """Path of a unix socket to listen on instead of host and port."""
    root_path: str | None = None
    """Path prefix of a proxy in front of the server, which may remove it or not: the server answers with and without it."""
    api_key: list[str] | str | None = None
    """API keys: a request must send one of them as `Authorization: Bearer KEY`."""
    api_key_file: str | None = None
    """JSON or YAML list of keys with name, weight and limits; SIGHUP makes the server read it again."""
    ssl_keyfile: str | None = None
    """TLS: file with the server's private key."""
    ssl_certfile: str | None = None
    """TLS: file with the server's certificate."""
    ssl_ca_certs: str | None = None
    """TLS: file with the CA certificates that verify client certificates."""
    ssl_cert_reqs: int = 0
    """TLS: client certificates are 0 not requested, 1 optional, 2 required (the numbers of Python's ssl)."""
    ssl_ciphers: str | None = None
    """TLS: ciphers, in OpenSSL's format."""
    enable_ssl_refresh: bool = False
    """TLS: reload the files when they change."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names that the header Host of a request may have besides this machine's (`*.a.b`: all below a.b; `*`: any); unset: any, but on a loopback address without a key only this machine's."""
    allowed_origins: list[str] = field(default_factory=list)
    """CORS: origins whose scripts may read responses, or `*`; unset: only the server's own."""
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    """CORS: allowed methods."""
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    """CORS: allowed headers."""
    allow_credentials: bool = False
    """CORS: allow credentials."""
    middleware: list[str] = field(default_factory=list)
    """ASGI middleware to run around every request: package.module.Class, or the path of an async function(request, call_next)."""
    headless: bool = False
    """Run only the engines of this machine, for the server at --data-parallel-address; with nnodes only its ranks, for machine 0."""
    api_server_count: AtLeast0 | None = None
    """Number of HTTP processes in front of the engines; unset: 1, or with several engines one for each, if there are cores for them."""
    data_parallel_supervisor_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """Port that answers /health for all servers of data_parallel_multi_port_external_lb; unset: none."""
    disable_frontend_multiprocessing: bool = False
    """Run the engine in the HTTP process (for one-core machines and debugging)."""
    shutdown_timeout: Amount = 30
    """Seconds that running requests may take to finish after SIGTERM."""
    enable_auto_tool_choice: bool = False
    """Let the model decide whether to call a tool (accepted without effect: always on if the model's call format is known)."""
    tool_call_parser: str | None = None
    """Format of the model's tool calls; unset or auto: detected from its chat template; none: tool calls are not parsed."""
    tool_parser_plugin: str | None = None
    """Python file that adds tool call formats: a function `register(registry)`, or classes that it registers with vLLM's ToolParserManager."""
    tool_strict_level: Literal["auto", "strict", "function", "parameter"] = "auto"
    """Constraints on tool calls that the model may make: auto or function: call format, tool names and the schemas of strict tools; parameter: the schemas of all tools; strict: as auto, but none without a strict tool."""
    reasoning_parser: str | None = None
    """Format of the model's reasoning; unset or auto: detected from its chat template; none: reasoning stays in the text. Unset, constrained output begins without reasoning."""
    reasoning_parser_plugin: str | None = None
    """Python file that adds reasoning formats: a function `register(registry)`, or classes that it registers with vLLM's ReasoningParserManager."""
    reasoning_config: dict[str, Any] = field(default_factory=dict)
    """A JSON object with any of reasoning_parser, reasoning_start_str, reasoning_end_str (what is forced when `thinking_token_budget` is spent: a sentence that ends with the end marker)."""
    enable_reasoning_content: bool = False
    """Send reasoning under its old name `reasoning_content` too."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Default variables of the chat template; a request's own take precedence."""
    trust_request_chat_template: bool = False
    """Allow requests to send a chat template."""
    response_role: str = "assistant"
    """Role of the response message."""
    return_tokens_as_token_ids: bool = False
    """Write tokens in logprobs as `token_id:N`, so that every token is printable."""
    enable_prompt_tokens_details: bool = False
    """Include prompt_tokens_details (cached tokens) in usage."""
    enable_force_include_usage: bool = False
    """Send usage in every stream, even if the request does not ask for it."""
    enable_request_id_headers: bool = False
    """Send the header X-Request-Id in responses."""
    enable_server_load_tracking: bool = False
    """Count running HTTP requests for /load."""
    stream_interval: AtLeast1 = 1
    """Tokens per chunk of a stream, after a first chunk of one token; a request may set a larger value."""
    sse_keep_alive_interval: Amount = 0
    """Seconds of silence in a stream after which the server sends a comment line; 0: never."""
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "warning"
    """Log level of the HTTP server; info: log each request (the default of vLLM)."""
    disable_uvicorn_access_log: bool = False
    """Do not log each HTTP request."""
    disable_access_log_for_endpoints: str | None = None
    """Comma-separated paths whose requests are not logged."""
    enable_tokenizer_info_endpoint: bool = False
    """Serve the tokenizer's configuration and chat template at /tokenizer_info."""
    disable_ui: bool = False
    """Do not serve the web page at `/`."""
    disable_fastapi_docs: bool = False
    """Do not serve /docs and /openapi.json."""
    h11_max_incomplete_event_size: int | None = None
    """Maximum bytes of an HTTP request's request line and headers; unset: 65536."""
    max_body_bytes: AtLeast1 = 16 << 20
    """Maximum bytes of a request body."""
    receive_timeout: Amount = 30
    """Seconds without received data after which the server drops an incomplete request; 0: never."""
    send_timeout: Amount = 60
    """Seconds after which the server disconnects a client that reads nothing of its response; 0: never."""
    response_store_size: AtLeast0 = 64 << 20
    """Maximum bytes of memory for responses of /v1/responses that are kept (`store`, `background`); the oldest are forgotten first; 0: none is kept."""
    response_store_time: Amount = 3600
    """Seconds that such a response is kept after its end."""
    journal_dir: str | None = None
    """Folder in which background responses are recorded, so that a restarted server finishes them (docs: resume.md). It holds what users wrote: keep it closed."""
    journal_size: Positive = 1
    """GiB of journal_dir; with more, responses are not recorded any further."""
    max_completions: AtLeast1 = 4096
    """Maximum completions of one HTTP request: its prompts times n."""

    @property
    def needs_key(self) -> bool:
        """Whether a request must have a key. The choice of address, the key check and the messages all use this."""
        return bool(self.api_key) or self.api_key_file is not None

    max_answer_entries: AtLeast1 = 1 << 21
    """Maximum tokens plus log-probabilities of one response, at about 200 bytes of memory each."""
