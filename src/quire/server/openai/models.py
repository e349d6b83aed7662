"""GET /v1/models: the names under which the model is served.

Knows model cards. Does not know the model.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.async_engine import AsyncEngine
from quire.frontend.adapters import Adapter
from quire.server.adapters import has_right, listed
from quire.server.request_body import json_response
from quire.server.state import state_of

OWNER = "vllm"  # part of vLLM's surface: programs recognize a vLLM server by it (docs/serving.md)


def shown_path(path: str, request: Request) -> str:
    """A path, or only its last part for a key that may not load adapters: it need not know the server's directories."""
    is_local = path.startswith(("/", "./", "../", "~"))
    return PurePath(path).name if is_local and not has_right(request) else path


def adapter_card(adapter: Adapter, request: Request, engine: AsyncEngine) -> dict[str, Any]:
    """The card of a LoRA adapter: its directory, and the name of the model that it belongs to."""
    state = state_of(request)
    base = adapter.base_model_name
    parent = base if base in state.model_names else state.model_name
    facts = {"root": shown_path(adapter.path, request), "parent": parent, "max_model_len": None}
    return card(adapter.name, request, engine) | facts


def card(name: str, request: Request, engine: AsyncEngine) -> dict[str, Any]:
    """The card of one name."""
    state = state_of(request)
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": state.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": OWNER,
        "root": shown_path(state.config.model.model, request),
        "parent": None,
        "max_model_len": engine.inputs.max_model_len,
        "permission": [permission],
    }


async def models(request: Request) -> Response:
    """Every name under which the model is served."""
    state = state_of(request)
    engine = state.serving()
    cards = [card(name, request, engine) for name in state.model_names]
    cards += [adapter_card(one, request, engine) for one in await listed(state)]
    return json_response({"object": "list", "data": cards})


async def model(request: Request) -> Response:
    """The card of one name, which may contain slashes."""
    state = state_of(request)
    engine = state.serving()
    name = request.path_params["name"]
    adapters = await listed(state) if name not in state.model_names else []
    for adapter in adapters:
        if adapter.name == name:
            return json_response(adapter_card(adapter, request, engine))
    state.check_model(name, [one.name for one in adapters])
    return json_response(card(name, request, engine))
