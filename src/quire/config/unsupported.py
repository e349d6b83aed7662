"""What vLLM has and Quire does not support yet, and what to do instead: every table of it.

Each package refuses its own names, with an error of its own form. Flags are in `vllm_flags.py`, quantization methods
in `quantization.py`, beside those that work.
"""

from __future__ import annotations

from typing import NoReturn

from quire.errors import Unsupported

Feature = tuple[str, str]
"""(name, what to do instead)."""

MEDIA = "media input", "send text"
SCALE_OUT = "rendering servers and scale-out", "send token ids to /inference/v1/generate"
TRANSFER = "KV transfer between servers", "let each server prefill its own requests"
ELASTIC = (
    "another number of engines while the server runs",
    "start it with the --data-parallel-size that it needs",
)
WEIGHTS = (
    "replacing weights while running",
    "sleep at level 2, replace the checkpoint, and call reload_weights on the workers before they wake up",
)
BATCHES = "the API of files and batches", "use quire run-batch, or send the requests one by one"

_WEIGHT_CALLS = (
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update", "update_weights",
    "start_draft_weight_update", "finish_weight_update", "update_weight_version",
)  # fmt: skip

METHODS: dict[str, Feature] = {
    **dict.fromkeys((*_WEIGHT_CALLS, "get_weight_version"), WEIGHTS),
    "scale_elastic_ep": ELASTIC,
}
"""Methods of LLM and AsyncLLM."""

ROUTES: dict[str, Feature] = {
    "/generative_scoring": ("scoring by generation", "ask /v1/completions for logprobs, or /score on a reranker"),
    "/v1/systemone": ("structured decisions", "ask /v1/chat/completions for structured_outputs"),
    "/cohere/v2/chat": ("Cohere's protocol", "use /v1/chat/completions"),
    **dict.fromkeys(
        (
            "/inference/v1/abort_requests", "/v1/chat/completions/render",
            "/v1/completions/render", "/v1/responses/render", "/v1/messages/render", "/v1/chat/completions/derender",
            "/v1/completions/derender",
        ),
        SCALE_OUT,
    ),
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), ELASTIC),
    **dict.fromkeys(("/fault_tolerance/apply", "/fault_tolerance/status"), ("recovery by commands", "dead engines are replaced by themselves; see /health/ready")),
    "/kv_event_sources": ("KV events", "watch /metrics"),
    **dict.fromkeys(("/v1/files", "/v1/files/{path:path}", "/v1/batches", "/v1/batches/{path:path}"), BATCHES),
}  # fmt: skip
"""Paths."""

OPTIONAL_ROUTES: dict[str, str] = {
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters"), "--enable-lora and QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1"),
    "/tokenizer_info": "--enable-tokenizer-info-endpoint",
    **dict.fromkeys(("/start_profile", "/stop_profile"), "--profiler-config"),
}  # fmt: skip
"""Paths of supported routes that are off by default -> what turns them on."""

DEV_ROUTES: dict[str, Feature] = {
    **{f"/{name}": WEIGHTS for name in (*_WEIGHT_CALLS, "weight_info", "weight_checker")},
}
"""Paths of dev mode."""

REQUEST_FIELDS: dict[str, str] = {
    "kv_transfer_params": "KV transfer",
    "ec_transfer_params": "encoder-cache transfer",
    "suffix": "a suffix (fill in the middle)",
    "mm_payload": "media input",
    "watermarking": "watermarking",
    "routed_experts_prompt_start": "returning the experts of a token",
    "return_token_offsets": "returning the offsets of tokens in the text",
    "functions": "the deprecated functions interface",
    "function_call": "the deprecated functions interface",
}
"""Fields of completions and chat completions -> their feature."""

RESPONSES_FIELDS: dict[str, str] = {
    "conversation": "name the response before this one as `previous_response_id`, or send the whole conversation as `input`",
    "prompt": "prompts are not stored; send the text as `input`",
    "kv_transfer_params": "leave it out",
    "previous_input_messages": "send the whole conversation as `input`",
    "enable_response_messages": "leave it out",
}
"""Fields of /v1/responses -> what to do instead."""

RESPONSES_WITHOUT_EFFECT: dict[str, str] = {
    "max_tool_calls": "it limits tools that run on a server, and this server runs none",
    "prompt_cache_key": "the prefix cache finds equal prompts without a key",
    "service_tier": "the server has one tier; use `priority`",
}
"""Fields of /v1/responses that are accepted without effect -> why."""

PROMPT_KEYS: dict[str, str] = {
    "media_io_kwargs": "leave it out",
    "data": "it belongs to IO processor plugins",
}
"""Keys of a prompt dict -> what to do instead."""

PARSERS: dict[str, str] = {
    "hf": "auto uses the checkpoint's response_template",
    "kimi_k3": "",
    "muse_glimmer": "",
}
"""Names of tool and reasoning parsers -> what to use instead, if anything."""

LOAD_FORMATS: dict[str, str] = {
    "tensorizer": "serve the checkpoint that was serialized: safetensors are mapped, so they load without a copy",
    **dict.fromkeys(
        ("instanttensor", "ipc_cache", "modelexpress"),
        "use auto: files are mapped, and a second start finds them in the page cache",
    ),
}
"""Load formats -> what to do instead."""


def refuse(what: str, feature: Feature) -> NoReturn:
    """Raises Unsupported: `what`, which needs this feature."""
    raise Unsupported(f"{what} ({feature[0]})", feature[1])
