"""Routes of features that are not supported yet: the answer names the feature, so that the path does not look misspelt.

Knows paths and remedies.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import get_route_path  # type: ignore[attr-defined]

from quire.config.vllm_flags import LORA
from quire.server.errors import ApiError

POOLING = "pooling (embedding, classifying, scoring)", "serve a model that generates text"
AUDIO = "audio", "send text"
SCALE_OUT = "rendering servers and scale-out", "send token ids as the prompt of /v1/completions"
DEVICES = "several devices", "start one server for each device"
WEIGHTS = "replacing weights while running", "start the server with the new checkpoint"
MEDIA = "media input", "this server has no such data"
PROFILER = "profiling", "use py-spy on the engine's process"

ROUTES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("/v1/embeddings", "/v2/embed", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling"),
        POOLING,
    ),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), AUDIO),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), LORA),
    "/generative_scoring": POOLING,
    "/v1/realtime": AUDIO,
    "/v1/systemone": ("structured decisions", "ask /v1/chat/completions for structured_outputs"),
    "/v1/chat/completions/batch": ("several conversations in one request", "send one request for each, or use quire run-batch"),
    "/cohere/v2/chat": ("Cohere's protocol", "use /v1/chat/completions"),
    **dict.fromkeys(
        (
            "/inference/v1/generate", "/inference/v1/abort_requests", "/v1/chat/completions/render", "/v1/completions/render",
            "/v1/responses/render", "/v1/messages/render", "/v1/chat/completions/derender", "/v1/completions/derender",
        ),
        SCALE_OUT,
    ),
    **dict.fromkeys(
        ("/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply", "/fault_tolerance/status"), DEVICES,
    ),
    "/kv_event_sources": ("KV events", "watch /metrics"),
    "/tokenizer_info": ("returning the tokenizer's configuration", "read tokenizer_config.json of the checkpoint"),
    **dict.fromkeys(("/start_profile", "/stop_profile"), PROFILER),
}  # fmt: skip
"""Path -> (feature, alternative)."""

DEV_ROUTES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), MEDIA),
    **dict.fromkeys(
        (
            "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update", "/update_weights",
            "/start_draft_weight_update", "/finish_weight_update", "/update_weight_version", "/weight_info", "/weight_checker",
        ),
        WEIGHTS,
    ),
}  # fmt: skip
"""The same, for routes of dev mode."""


def paths(dev_mode: bool) -> list[str]:
    return [*ROUTES, *(DEV_ROUTES if dev_mode else ())]


async def unsupported(request: Request) -> Response:
    """Raises ApiError 501 that names the feature."""
    feature, remedy = (ROUTES | DEV_ROUTES)[get_route_path(request.scope)]
    raise ApiError(501, f"{feature} is not supported yet: {remedy}")
