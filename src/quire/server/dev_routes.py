"""Development routes: inspect the engine, empty its cache, abort requests. Only in dev mode.

Knows named functions of the engine and the server's state. Does not know what these functions do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire import env
from quire.api.collective_rpc import IN_PROCESS
from quire.api.media_calls import RESET
from quire.engine import sleep_client
from quire.engine.sleep import checked_level, checked_tags
from quire.errors import ValidationError
from quire.frontend.media.prompt_reader import media_inputs
from quire.server.engine_requests import own_name
from quire.server.errors import ApiError, invalid
from quire.server.request_body import json_response, read
from quire.server.schemas import AbortRequest, RpcRequest
from quire.server.state import state_of
from quire.version import __version__

RPC_TIMEOUT_S = 300.0
SECRET = ("api_key", "hf_token", "ssl_keyfile", "kv_remote_url")


def plain_config(value: Any, name: str = "") -> Any:
    """A configuration as JSON types, with secrets masked."""
    if name in SECRET:
        return None if value is None else "***"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: plain_config(getattr(value, f.name), f.name) for f in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(key): plain_config(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_config(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


async def server_info(request: Request) -> Response:
    """The server's configuration, with secrets masked."""
    config = plain_config(state_of(request).config)
    if request.query_params.get("config_format", "text") == "text":
        config = "\n".join(f"{section}: {fields}" for section, fields in config.items())
    system = {"quire": __version__, "python": sys.version.split()[0], "system": platform.platform()}
    info = {"vllm_config": config, "vllm_env": env.own_variables(), "system_env": system}
    return json_response(info | {"pid": os.getpid(), "torch": "torch" in sys.modules})


async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix cache; `success` is false if running requests use it and may not be preempted."""
    running = request.query_params.get("reset_running_requests", "").lower() in env.TRUE
    done = await state_of(request).serving().call("reset_prefix_cache", running)
    return json_response({"success": bool(done)})


async def reset_mm_cache(request: Request) -> Response:
    """Forget the processed pictures of this HTTP process."""
    if (media := media_inputs(state_of(request).serving().front)) is not None:
        media.cache.clear()
    return json_response({"success": True})


async def reset_encoder_cache(request: Request) -> Response:
    """Forget the pictures that the vision towers of all engines have encoded."""
    engine = state_of(request).serving()
    if media_inputs(engine.front) is not None:
        await engine.call(RESET)
    return json_response({"success": True})


async def collective_rpc(request: Request) -> Response:
    """Call a named function of every worker."""
    state = state_of(request)
    engine = state.serving()
    body = await read(state, request, RpcRequest)
    patience = RPC_TIMEOUT_S if body.timeout is None else body.timeout
    if not 0 < patience <= RPC_TIMEOUT_S:
        raise invalid(f"`timeout` must be above 0 and at most {RPC_TIMEOUT_S:g} s", "timeout")
    if body.method in IN_PROCESS:
        raise invalid(
            f"`{body.method}` takes or returns a Python object, which JSON cannot contain; call LLM.collective_rpc from"
            " a program",
            "method",
        )
    call = engine.call("collective_rpc", body.method, body.args, body.kwargs)
    try:
        results = await asyncio.wait_for(call, patience)
    except TimeoutError as error:
        raise ApiError(408, f"`{body.method}` did not finish within {patience:g} s") from error
    return json_response({"results": [plain_config(result) for result in results]})


async def abort_requests(request: Request) -> Response:
    """Abort these requests, or all if no ids are given, whichever HTTP process they came through."""
    state = state_of(request)
    engine = state.serving()
    # A body without a length (Transfer-Encoding: chunked) is one, too: it must not abort all requests.
    chunked = "transfer-encoding" in request.headers
    empty = request.headers.get("content-length", "0") == "0" and not chunked
    wanted = set(() if empty else (await read(state, request, AbortRequest)).request_ids)
    if state.fronts == 1:
        ids = [name for name in state.active if not wanted or name in wanted]
        for name in ids:
            await state.abort(name)
    else:
        here = [
            one for one in await engine.call("requests") if not wanted or own_name(one) in wanted
        ]
        await engine.call("end", here)
        ids = list({own_name(one) for one in here})
    return json_response({"status": "aborted", "request_ids": sorted(ids)})


@contextmanager
def query_errors() -> Iterator[None]:
    """Name a parameter at fault as one of the query, as vLLM does."""
    try:
        yield
    except ValidationError as error:
        error.parameter = f"query.{error.parameter}"
        raise


async def sleep(request: Request) -> Response:
    """Free memory, and hold requests back until `/wake_up`. `mode`: as for `/pause`."""
    engine = state_of(request).serving()
    asked = request.query_params.get("level", "1")
    with query_errors():
        level = checked_level(int(asked) if asked.isdecimal() else -1)
    with state_of(request).metrics.resting("sleep"), query_errors():
        await sleep_client.sleep(engine.call, level, request.query_params.get("mode", "abort"))
    return json_response({"status": "sleeping", "level": level})


async def release_kv_cache_memory(request: Request) -> Response:
    """Free the KV cache alone, of an engine that is paused or sleeps at level 0, until `/wake_up`."""
    await sleep_client.release(state_of(request).serving().call)
    return json_response({"status": "kv_cache_released"})


async def wake_up(request: Request) -> Response:
    """Restore memory: all of it, or what `tags` name. Requests continue when all is restored."""
    engine = state_of(request).serving()
    tags = request.query_params.getlist("tags")
    with query_errors():
        wanted = list(checked_tags(tags))
    with state_of(request).metrics.resting("wake_up"):
        away = await engine.call("wake_up", wanted)
    return json_response({"status": "sleeping" if away else "awake", "tags": tags or None})


async def is_sleeping(request: Request) -> Response:
    """Whether the engine has freed its memory."""
    asleep = await state_of(request).serving().call("is_sleeping")
    return json_response({"is_sleeping": bool(asleep)})


async def get_world_size(request: Request) -> Response:
    """The number of ranks that run the model; without `include_dp` the ranks of one engine."""
    parallel = state_of(request).config.parallel
    alone = request.query_params.get("include_dp", "true").lower() in env.FALSE
    engines = 1 if alone else parallel.data_parallel_size
    return json_response({"world_size": parallel.world_size * engines})


async def pause(request: Request) -> Response:
    """Hold new requests back. `mode`: abort the running requests, wait for their end, or keep them paused."""
    engine = state_of(request).serving()
    with query_errors():
        await sleep_client.pause(engine.call, request.query_params.get("mode", "abort"))
    if request.query_params.get("clear_cache", "true").lower() in env.TRUE:
        await engine.call("reset_prefix_cache")
    return json_response({"status": "paused"})


async def resume(request: Request) -> Response:
    """Resume after `/pause`."""
    await state_of(request).serving().call("resume")
    return json_response({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    """Whether requests are held back."""
    paused = await state_of(request).serving().call("is_paused")
    return json_response({"is_paused": bool(paused)})
