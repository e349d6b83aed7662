"""The requests of the golden files: every route, and every error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scripted import ScriptedEngine, make_state

from quire.errors import EngineDeadError, QueueFull, QuireError, ValidationError
from quire.protocol.output import StartupStatus
from quire.server.state import ServerPhase, ServerState

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
SAY = {"prompt": "ab"}


@dataclass(frozen=True)
class Case:
    """One request; `body` a str is sent as it is."""

    path: str
    body: Any = None
    method: str = ""
    script: tuple[Any, ...] = ("Hé", "llo")
    finish: str = "stop"
    headers: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    phase: ServerPhase = ServerPhase.READY
    dev: bool = False
    dead: str | None = None
    replaced: bool = False

    def state(self) -> ServerState:
        engine = ScriptedEngine(*self.script, finish=self.finish)
        engine.dead, engine.replaced, engine.cached = self.dead, self.replaced, 1
        state = make_state(None if self.phase is ServerPhase.LOADING else engine, **self.config)
        state.phase, state.dev_mode = self.phase, self.dev
        state.startup = lambda: StartupStatus("reading weights", 0.425)
        return state

    @property
    def verb(self) -> str:
        return self.method or ("GET" if self.body is None else "POST")


def stream(**more: Any) -> dict[str, Any]:
    return {"stream": True, **more}


USAGE = {"stream_options": {"include_usage": True}}
RUNNING = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
DETAILS = {"enable_prompt_tokens_details": True}

ANSWERS = {
    "models": Case("/v1/models"),
    "models-aliases": Case("/v1/models", config={"served_model_name": ["toy", "org/other"]}),
    "model": Case("/v1/models/toy"),
    "health": Case("/health"),
    "health-loading": Case("/health", phase=ServerPhase.LOADING),
    "health-draining": Case("/health", phase=ServerPhase.DRAINING),
    "health-dead": Case("/health", dead="it fell"),
    "health-replaced": Case("/health", replaced=True),
    "live-loading": Case("/health/live", phase=ServerPhase.LOADING),
    "startup": Case("/health/startup"),
    "startup-loading": Case("/health/startup", phase=ServerPhase.LOADING),
    "ready": Case("/health/ready"),
    "ready-draining": Case("/health/ready", phase=ServerPhase.DRAINING),
    "ready-replaced": Case("/health/ready", replaced=True),
    "ping": Case("/ping"),
    "ping-post": Case("/ping", method="POST"),
    "version": Case("/version"),
    "load": Case("/load"),
    "tokenize": Case("/tokenize", {"prompt": "hé", "return_token_strs": True}),
    "tokenize-plain": Case("/tokenize", {"prompt": "hi", "add_special_tokens": False}),
    "tokenize-chat": Case("/tokenize", HI),
    "detokenize": Case("/detokenize", {"tokens": [104, 233]}),
    "chat": Case(CHAT, HI),
    "chat-n": Case(CHAT, HI | {"n": 2, "temperature": 1}),
    "chat-length": Case(CHAT, HI | {"max_tokens": 5}, finish="length"),
    "chat-logprobs": Case(CHAT, HI | {"logprobs": True, "top_logprobs": 2}, script=("é",)),
    "chat-logprobs-ids": Case(CHAT, HI | {"logprobs": True, "return_tokens_as_token_ids": True}, script=("é",)),
    "chat-details": Case(CHAT, HI, config=DETAILS),
    "chat-token-ids": Case(CHAT, HI | {"return_token_ids": True, "return_prompt_text": True}),
    "chat-echo": Case(CHAT, {"messages": [{"role": "assistant", "content": "Oh "}], "echo": True,
                             "add_generation_prompt": False, "continue_final_message": True}),
    "chat-parts": Case(CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
    "chat-stream": Case(CHAT, HI | stream()),
    "chat-stream-n": Case(CHAT, HI | stream(n=2, temperature=1)),
    "chat-stream-usage": Case(CHAT, HI | stream(**USAGE), config=DETAILS),
    "chat-stream-running-usage": Case(CHAT, HI | stream(**RUNNING)),
    "chat-stream-forced-usage": Case(CHAT, HI | stream(), config={"enable_force_include_usage": True}),
    "chat-stream-logprobs": Case(CHAT, HI | stream(logprobs=True), script=("a", "b")),
    "chat-stream-token-ids": Case(CHAT, HI | stream(return_token_ids=True)),
    "chat-stream-interval": Case(CHAT, HI | stream(stream_interval=3), script=("a", "b", "c", "d")),
    "chat-stream-half-character": Case(CHAT, HI | stream(), script=("a", "", "b")),
    "chat-stream-error": Case(CHAT, HI | stream(), script=("a", QuireError("it broke"))),
    "chat-stream-dead": Case(CHAT, HI | stream(), script=("a", EngineDeadError("it fell"))),
    "text": Case(TEXT, SAY),
    "text-ids": Case(TEXT, {"prompt": [97, 98]}),
    "text-many": Case(TEXT, {"prompt": ["a", "b"], "n": 2, "temperature": 1}),
    "text-logprobs": Case(TEXT, SAY | {"logprobs": 2}, script=("xy",)),
    "text-echo": Case(TEXT, SAY | {"echo": True}),
    "text-echo-only": Case(TEXT, SAY | {"echo": True, "max_tokens": 0, "logprobs": 1}, script=("x",)),
    "text-prompt-logprobs": Case(TEXT, SAY | {"prompt_logprobs": 1}, script=("x",)),
    "text-stream": Case(TEXT, SAY | stream()),
    "text-stream-many": Case(TEXT, {"prompt": ["a", "b"]} | stream(), script=("x",)),
    "text-stream-echo": Case(TEXT, SAY | stream(echo=True, logprobs=1), script=("x", "y")),
    "text-stream-usage": Case(TEXT, SAY | stream(**USAGE)),
    "text-stream-running-usage": Case(TEXT, SAY | stream(**RUNNING)),
    "text-stream-error": Case(TEXT, SAY | stream(), script=("a", QuireError("it broke"))),
    "invocations-chat": Case("/invocations", HI),
    "invocations-text": Case("/invocations", SAY),
    "request-id-header": Case("/version", headers={"X-Request-Id": "mine"}, config={"enable_request_id_headers": True}),
    "key": Case("/version", headers={"Authorization": "bearer k2"}, config={"api_key": ["k1", "k2"]}),
    "load-report": Case(TEXT, SAY, headers={"endpoint-load-metrics-format": "text"}),
    "load-report-json": Case(TEXT, SAY, headers={"endpoint-load-metrics-format": "JSON"}),
    "health-needs-no-key": Case("/health", config={"api_key": "k"}),
    "cors": Case(CHAT, method="OPTIONS", headers={"Origin": "http://x", "Access-Control-Request-Method": "POST"}),
    "cors-allowed": Case(CHAT, method="OPTIONS", headers={"Origin": "http://x", "Access-Control-Request-Method": "POST"}, config={"allowed_origins": ["http://x"]}),
    "text-prompt-text": Case(TEXT, {"prompt": [97, 98], "return_prompt_text": True}),
    "text-stream-prompt-text": Case(TEXT, SAY | stream(return_prompt_text=True)),
    "chat-stream-interval-of-the-server": Case(CHAT, HI | stream(stream_interval=2), script=("a", "b", "c", "d"), config={"stream_interval": 3}),
}  # fmt: skip

SAID = HI | {"max_tokens": 9}
MSG = "/v1/messages"
MESSAGES = {
    "messages": Case(MSG, SAID),
    "messages-system": Case(MSG, SAID | {"system": [{"type": "text", "text": "be"}], "metadata": {"user_id": "u"}}),
    "messages-length": Case(MSG, SAID, finish="length"),
    "messages-goes-on": Case(MSG, {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]}),
    "messages-cached": Case(MSG, SAID, config=DETAILS),
    "messages-stream": Case(MSG, SAID | stream()),
    "messages-stream-error": Case(MSG, SAID | stream(), script=("a", QuireError("it broke"))),
    "messages-key": Case(MSG, SAID, headers={"x-api-key": "k"}, config={"api_key": "k"}),
    "messages-count": Case(f"{MSG}/count_tokens", HI | {"model": "toy"}),
    "messages-count-long": Case(f"{MSG}/count_tokens", {"messages": [{"role": "user", "content": "x" * 100}]}),
    "messages-no-max-tokens": Case(MSG, HI),
    "messages-unknown-model": Case(MSG, SAID | {"model": "other"}),
    "messages-image": Case(MSG, SAID | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    "messages-role": Case(MSG, SAID | {"messages": [{"role": "tool", "content": "x"}]}),
    "messages-tools": Case(MSG, SAID | {"tools": [{"name": "f"}]}),
    "messages-thinking": Case(MSG, SAID | {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
    "messages-format": Case(MSG, SAID | {"output_config": {"format": {"type": "json_schema"}}}),
    "messages-loading": Case(MSG, SAID, phase=ServerPhase.LOADING),
    "messages-queue-full": Case(MSG, SAID, script=(QueueFull("64 requests wait"),)),
    "messages-dies": Case(MSG, SAID, script=(EngineDeadError("it fell"),)),
    "messages-must-call-nothing": Case(MSG, SAID | {"tool_choice": {"type": "any"}}),
    "messages-no-method": Case(MSG),
    "messages-no-key": Case(MSG, SAID, config={"api_key": "k"}),
    "messages-body": Case(MSG, "{", headers={"Content-Type": "application/json"}),
}  # fmt: skip

RSP = "/v1/responses"
RESPONSES = {
    "responses": Case(RSP, {"input": "hi"}),
    "responses-items": Case(RSP, {"instructions": "be", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Oh"}]}, {"role": "developer", "content": "x"}]}),
    "responses-length": Case(RSP, {"input": "hi", "max_output_tokens": 5}, finish="length"),
    "responses-abort": Case(RSP, {"input": "hi"}, finish="abort"),
    "responses-stream": Case(RSP, {"input": "hi"} | stream()),
    "responses-stream-length": Case(RSP, {"input": "hi"} | stream(), script=("a",), finish="length"),
    "responses-stream-error": Case(RSP, {"input": "hi"} | stream(), script=("a", QuireError("it broke"))),
    "responses-get": Case(f"{RSP}/resp_1"),
    "responses-cancel": Case(f"{RSP}/resp_1/cancel", method="POST"),
    "responses-no-input": Case(RSP, {}),
    "responses-empty": Case(RSP, {"input": []}),
    "responses-item": Case(RSP, {"input": [{"type": "function_call_output", "output": "x"}]}),
    "responses-part": Case(RSP, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    "responses-previous": Case(RSP, {"input": "hi", "previous_response_id": "resp_1"}),
    "responses-background": Case(RSP, {"input": "hi", "background": True}),
    "responses-format": Case(RSP, {"input": "hi", "text": {"format": {"type": "json_schema"}}}),
    "responses-tools": Case(RSP, {"input": "hi", "tools": [{"type": "function"}]}),
    "responses-logprobs": Case(RSP, {"input": "hi", "top_logprobs": 2}, script=("é",)),
    "responses-stream-logprobs": Case(RSP, {"input": "hi", "include": ["message.output_text.logprobs"]} | stream(), script=("a", "b")),
    "responses-no-tools": Case(RSP, {"input": "hi", "tools": []}),
    "responses-messages": Case(RSP, {"input": "hi", "enable_response_messages": True}),
    "responses-max": Case(RSP, {"input": "hi", "max_output_tokens": 0}),
}  # fmt: skip

ADMIN = {
    "dev-off": Case("/reset_prefix_cache", method="POST"),
    "reset-prefix-cache": Case("/reset_prefix_cache", method="POST", dev=True),
    "collective-rpc": Case("/collective_rpc", {"method": "m", "args": [1], "kwargs": {"a": 2}}, dev=True),
    "collective-rpc-timeout": Case("/collective_rpc", {"method": "m", "timeout": 0}, dev=True),
    "abort-requests": Case("/abort_requests", {"request_ids": ["x"]}, dev=True),
    "sleep": Case("/sleep", method="POST", dev=True),
    "sleep-level": Case("/sleep?level=3", method="POST", dev=True),
    "sleep-mode": Case("/sleep?level=2&mode=odd", method="POST", dev=True),
    "release": Case("/release_kv_cache_memory", method="POST", dev=True),
    "world-size": Case("/get_world_size", dev=True),
    "wake-up": Case("/wake_up", method="POST", dev=True),
    "wake-up-part": Case("/wake_up?tags=weights", method="POST", dev=True),
    "wake-up-odd": Case("/wake_up?tags=odd", method="POST", dev=True),
    "is-sleeping": Case("/is_sleeping", dev=True),
    "pause": Case("/pause?mode=keep", method="POST", dev=True),
    "pause-mode": Case("/pause?mode=odd", method="POST", dev=True),
    "resume": Case("/resume", method="POST", dev=True),
    "is-paused": Case("/is_paused", dev=True),
}  # fmt: skip


def refused(path: str, base: dict[str, Any], **fields: Any) -> Case:
    return Case(path, base | fields)


REFUSALS = {
    "no-route": Case("/v1/nothing"),
    "no-method": Case(CHAT),
    "later-pooling": Case("/v1/embeddings", {"input": "x"}),
    "audio-of-a-text-model": Case("/v1/audio/transcriptions", method="POST"),
    "later-lora": Case("/v1/load_lora_adapter", {"lora_name": "x"}, config={"root_path": "/api"}),
    "later-get": Case("/kv_event_sources"),
    "later-dev": Case("/update_weights", method="POST", dev=True),
    "later-dev-off": Case("/update_weights", method="POST"),
    "later-no-key": Case("/pooling", {"input": "x"}, config={"api_key": "k"}),
    "no-key": Case("/v1/models", config={"api_key": "k"}),
    "wrong-key": Case("/version", headers={"Authorization": "Bearer x"}, config={"api_key": "k"}),
    "wrong-scheme": Case("/version", headers={"Authorization": "Basic k"}, config={"api_key": "k"}),
    "no-key-no-route": Case("/nothing", config={"api_key": "k"}),
    "no-json": Case(CHAT, "{", headers={"Content-Type": "application/json"}),
    "no-object": Case(CHAT, "[1]", headers={"Content-Type": "application/json"}),
    "no-utf8": Case(CHAT, b'{"a":"\xff"}', headers={"Content-Type": "application/json"}),
    "nested": Case(CHAT, "[" * 100_000, headers={"Content-Type": "application/json"}),
    "media-type": Case(CHAT, "a=b", headers={"Content-Type": "application/x-www-form-urlencoded"}),
    "too-long-a-body": Case(CHAT, HI, config={"max_body_bytes": 10}),
    "unknown-model": refused(CHAT, HI, model="other"),
    "loading": Case(CHAT, HI, phase=ServerPhase.LOADING),
    "draining": Case(CHAT, HI, phase=ServerPhase.DRAINING),
    "dead": Case(CHAT, HI, phase=ServerPhase.DEAD),
    "queue-full": Case(CHAT, HI, script=(QueueFull("64 requests wait"),)),
    "queue-full-stream": Case(CHAT, HI | stream(), script=(QueueFull("64 requests wait"),)),
    "engine-refuses": Case(CHAT, HI, script=(ValidationError("no such token", parameter="logit_bias"),)),
    "engine-fails": Case(CHAT, HI, script=(RuntimeError("secret at /home/me/x.py"),)),
    "engine-dies": Case(CHAT, HI, script=(EngineDeadError("it fell"),)),
    "finish-error": Case(CHAT, HI, finish="error"),
    "messages-missing": Case(CHAT, {}),
    "messages-empty": Case(CHAT, {"messages": []}),
    "messages-type": Case(CHAT, {"messages": "hi"}),
    "messages-role": Case(CHAT, {"messages": [{"content": "x"}]}),
    "messages-content": Case(CHAT, {"messages": [{"role": "user"}]}),
    "messages-part": Case(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    "messages-template": Case(CHAT, {"messages": [{"role": "alien", "content": "x"}]}),
    "chat-template": refused(CHAT, HI, chat_template="{{x}}"),
    "continue-and-generate": refused(CHAT, HI, continue_final_message=True),
    "prompt-missing": Case(TEXT, {}),
    "prompt-empty": Case(TEXT, {"prompt": ""}),
    "prompt-mixed": Case(TEXT, {"prompt": [1, "a"]}),
    "prompt-too-long": Case(TEXT, {"prompt": "x" * 64}),
    "prompt-token": Case(TEXT, {"prompt": [-1]}),
    "prompts-too-many": Case(TEXT, {"prompt": ["a"] * 1025}),
    "invocations-neither": Case("/invocations", {"a": 1}),
    "tokenize-neither": Case("/tokenize", {}),
    "detokenize-range": Case("/detokenize", {"tokens": [1 << 30]}),
    "stream-options": refused(CHAT, HI, stream_options={"include_usage": True}),
    "request-id": Case(CHAT, HI, headers={"X-Request-Id": "a b"}),
    "completions-too-many": Case(TEXT, {"prompt": ["a"] * 100, "n": 100, "temperature": 1}),
    "timeout": Case(CHAT, HI | {"timeout": 0}),
    "beams-and-stop": Case(CHAT, HI | {"use_beam_search": True, "n": 2, "stop": "x"}),
    "beams-streamed": Case(TEXT, SAY | stream(use_beam_search=True)),
}  # fmt: skip

FIELDS: dict[str, Any] = {
    "n": 1000, "n-zero": 0, "temperature": 3, "top_p": 0, "top_k": -2, "min_p": 2,
    "frequency_penalty": 3, "presence_penalty": "x", "repetition_penalty": 0, "seed": "abc",
    "stop": ["a"] * 17, "stop-empty": [""], "stop_token_ids": [1] * 129, "bad_words": ["a"] * 129,
    "logit_bias": {"a": 1}, "allowed_token_ids": [], "min_tokens": -1, "max_tokens": 0,
    "logprob_token_ids": [1] * 129, "cache_salt": "a/b", "request_id": "", "stream_interval": 0,
    "truncate_prompt_tokens": -2, "truncation_side": "up", "prompt_logprobs": -2,
    "structured_outputs": {"json": {}, "regex": "a"}, "guided_regex": 5, "response_format": {"type": "yaml"},
    "repetition_detection": {"max_pattern_size": 3}, "thinking_token_budget": -2,
    "kv_transfer_params": {}, "ec_transfer_params": {}, "watermarking": True, "mm_payload": {},
    "routed_experts_prompt_start": 0, "return_token_offsets": True,
}  # fmt: skip
"""Values that both endpoints refuse. What comes after a dash tells two values of one field apart."""

CHAT_FIELDS: dict[str, Any] = {
    "top_logprobs": 2, "tools": [{"type": "function"}], "tools-empty": [], "tool_choice": "required",
    "functions": [], "function_call": "auto", "media_io_kwargs": {"a": 1}, "mm_processor_kwargs": {"a": 1},
    "max_completion_tokens": 0,
}  # fmt: skip
TEXT_FIELDS: dict[str, Any] = {
    "best_of": 0, "suffix": "x", "prompt_embeds": "x", "logprobs": -2,
}  # fmt: skip

REFUSALS |= {
    f"field-{name}": refused(TEXT, SAY, **{name.partition("-")[0]: value})
    for name, value in (FIELDS | TEXT_FIELDS).items()
}
REFUSALS |= {
    f"chat-field-{name}": refused(CHAT, HI, **{name.partition("-")[0]: value})
    for name, value in CHAT_FIELDS.items()
}
