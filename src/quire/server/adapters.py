"""LoRA adapters over HTTP: loading, unloading, and the adapter that a request's `model` names.

Knows the routes' bodies, statuses and rules about paths. Does not know files or the engine's functions
(`frontend/adapters.py`).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire import env
from quire.config.lora import LoraConfig
from quire.errors import ModelNotFound, Unsupported, ValidationError
from quire.frontend.adapters import Adapter, AdapterNotLoaded
from quire.frontend.lora_resolvers import resolve
from quire.logging import get_logger
from quire.models.requested_adapter import HUB_ID
from quire.server.errors import ApiError
from quire.server.middleware import TENANT
from quire.server.request_body import read
from quire.server.schemas import LoadAdapterRequest, SageMakerAdapterRequest, UnloadAdapterRequest
from quire.server.sse import EventStream
from quire.server.state import ServerState, state_of

log = get_logger(__name__)

INVALID, NOT_FOUND = "InvalidUserInput", "LoRAAdapterNotFoundError"
MISSING_FILES = "No adapter found"
"""So begins the engine's error for a path that is not there."""
UNKNOWN = "no LoRA adapter of that name is loaded"
"""A part of the engine's error for a request whose adapter was unloaded before it arrived."""


def wrong_input(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, kind=INVALID)


async def load_adapter(request: Request) -> Response:
    """Load a LoRA adapter; requests name it as their model."""
    body = await read(state_of(request), request, LoadAdapterRequest)
    return await loaded(request, body)


async def unload_adapter(request: Request) -> Response:
    """Unload a LoRA adapter; requests that run with it go on."""
    body = await read(state_of(request), request, UnloadAdapterRequest)
    return await unloaded(request, body.lora_name)


async def add_sagemaker_adapter(request: Request) -> Response:
    """Load a LoRA adapter, as SageMaker sends it."""
    body = await read(state_of(request), request, SageMakerAdapterRequest)
    return await loaded(request, LoadAdapterRequest(lora_name=body.name, lora_path=body.src))


async def remove_sagemaker_adapter(request: Request) -> Response:
    """Unload a LoRA adapter, as SageMaker sends it."""
    return await unloaded(request, request.path_params["name"])


ROUTES: list[tuple[str, str, Callable[[Request], Awaitable[Response | EventStream]]]] = [
    ("POST", "/v1/load_lora_adapter", load_adapter),
    ("POST", "/v1/unload_lora_adapter", unload_adapter),
    ("POST", "/adapters", add_sagemaker_adapter),
    ("DELETE", "/adapters/{name:path}", remove_sagemaker_adapter),
]
"""Only with QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1, since they read files that a client names."""


def runtime_updates() -> bool:
    """Whether clients may load and unload adapters."""
    return bool(env.get("ALLOW_RUNTIME_LORA_UPDATING"))


async def loaded(request: Request, body: LoadAdapterRequest) -> Response:
    state = state_of(request)
    engine, name = state.serving(), body.lora_name
    check_right(request)
    if not name or not body.lora_path:
        field = "lora_path" if name else "lora_name"
        raise wrong_input(f"`{field}` is empty: send both `lora_name` and `lora_path`", field)
    if name in state.model_names:
        raise wrong_input(f"`{name}` is a name of the model; choose another `lora_name`", "lora_name")  # fmt: skip
    path = allowed_path(body.lora_path, state.config.lora)
    steps = engine.front.adapters.load(
        name, path, body.base_model_name, load_inplace=body.load_inplace, requested=True
    )
    try:
        await engine.run(steps)
    except ModelNotFound as why:
        raise ApiError(404, str(why), param="lora_path", kind=NOT_FOUND) from why
    except Unsupported as why:
        raise wrong_input(str(why), "lora_path") from why
    except AdapterNotLoaded as why:
        if str(why).startswith(MISSING_FILES):
            raise ApiError(404, str(why), param="lora_path", kind=NOT_FOUND) from why
        raise wrong_input(str(why), why.parameter or "lora_path") from why
    log.info("loaded the LoRA adapter %r from %s", name, path)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unloaded(request: Request, name: str) -> Response:
    state = state_of(request)
    engine = state.serving()
    check_right(request)
    if not name:
        raise wrong_input("`lora_name` is empty: send the name of an adapter", "lora_name")
    if not await engine.run(engine.front.adapters.unload(name)):
        raise ApiError(404, f"the LoRA adapter `{name[:200]}` is not loaded", param="lora_name")
    log.info("unloaded the LoRA adapter %r", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def has_right(request: Request) -> bool:
    """Whether the request's key may change adapters and see their directories; only keys of a key file may not."""
    tenant = request.scope.get(TENANT)
    return tenant is None or not tenant.name or bool(tenant.key.may_load_adapters)


def key_id(request: Request) -> str:
    """Which of the server's keys the request has; "": the server has none."""
    tenant = request.scope.get(TENANT)
    return "" if tenant is None else str(tenant.id)


def check_right(request: Request) -> None:
    """Raises ApiError 403: the request's key, of a key file, may not change adapters, which all keys share."""
    if not has_right(request):
        raise ApiError(
            403,
            "this key may not load or unload adapters; set may_load_adapters: true for it in the key file",
        )


def allowed_path(path: str, config: LoraConfig) -> str:
    """The path, or the directory that it really is if `allowed_lora_paths` is set. `~` is not expanded: it would show homes.

    Raises:
        ApiError: 400: it is outside these directories.
    """
    if "\0" in path or len(path) > 4096:
        raise wrong_input("`lora_path` is not a path", "lora_path")
    is_from_hub = config.allow_lora_from_hub and HUB_ID.fullmatch(path) and not os.path.isdir(path)
    if not config.allowed_lora_paths or is_from_hub:
        return path
    folder = Path(os.path.realpath(path))
    for allowed in config.allowed_lora_paths:
        if folder.is_relative_to(os.path.realpath(os.path.expanduser(allowed))):
            return str(folder)
    raise wrong_input(
        "`lora_path` is outside the directories from which this server loads adapters (--allowed-lora-paths)",
        "lora_path",
    )


async def listed(state: ServerState) -> list[Adapter]:
    """Every adapter that requests may name."""
    if not state.config.lora.enable_lora or state.engine is None:
        return []
    adapters: list[Adapter] = await state.engine.run(state.engine.front.adapters.listed())
    return adapters


async def model_of(
    state: ServerState, request: Request, name: str | None
) -> tuple[str, str | None]:
    """The model's name for the answer to a request with this `model`, and the adapter if it names one.

    Raises:
        ApiError: 404 for a name that is not served; 400 if a resolver has an adapter that cannot be loaded.
    """
    if name is None or name in state.model_names:
        return name or state.model_names[0], None
    engine = state.engine
    if engine is None or not state.config.lora.enable_lora:
        return state.check_model(name), None
    adapters = engine.front.adapters
    if await engine.run(adapters.find(name)) is not None or await resolved(request, name):
        return name, name
    return state.check_model(name, list(adapters.known)), None


async def resolved(request: Request, name: str) -> bool:
    """Whether a resolver has an adapter of this name, which is loaded now. Only for a key that may load adapters."""
    state = state_of(request)
    if not runtime_updates() or state.engine is None or not has_right(request):
        return False
    model = state.config.model.model
    request_found = await resolve(name, list(dict.fromkeys([model, *state.model_names])))
    if request_found is None:
        return False
    steps = state.engine.front.adapters.load(
        name,
        request_found.lora_path,
        request_found.base_model_name,
        if_absent=True,
        resolved_for=key_id(request),
    )
    try:
        await state.engine.run(steps)
    except (ModelNotFound, ValidationError) as why:
        raise ApiError(400, f"the adapter `{name}` was found but not loaded: {why}", param="model") from why  # fmt: skip
    log.info("loaded the LoRA adapter %r, which a resolver found", name)
    return True


def unloaded_meanwhile(error: Exception, adapter: str | None) -> ApiError | None:
    """404 for a request whose adapter was unloaded before the request reached the engine."""
    if adapter is None or UNKNOWN not in str(error):
        return None
    return ApiError(404, f"The model `{adapter}` does not exist: {UNKNOWN}.", param="model")
