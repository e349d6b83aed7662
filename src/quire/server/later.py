"""Routes that clients know and whose feature comes later: each says so, instead of looking misspelt.

Knows paths and remedies.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import get_route_path  # type: ignore[attr-defined]

from quire.server.errors import ApiError

POOLING = "embedding, classifying and scoring", "serve a model that generates text"
AUDIO = "audio", "send text"
LORA = "LoRA", "serve a checkpoint with the adapter merged into it"

ROUTES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("/v1/embeddings", "/v2/embed", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling"),
        POOLING,
    ),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), AUDIO),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), LORA),
}  # fmt: skip
"""Path -> (feature, what to do until then)."""


async def later(request: Request) -> Response:
    """Raises ApiError 501 that names the feature."""
    feature, remedy = ROUTES[get_route_path(request.scope)]
    raise ApiError(501, f"{feature} is not supported yet: {remedy}")
