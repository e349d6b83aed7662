"""The page's routes: its files, the engine's state, the text of one request, and the default parameters.

Knows HTTP. The page is public, since it contains no data; its data needs the key like everything else, and scripts of
other sites do not get it.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from quire import env
from quire.errors import EngineDeadError, QuireError
from quire.frontend.media.prompt_reader import media_inputs
from quire.frontend.request_manager import RequestManager
from quire.frontend.transcription.prompt_reader import transcription_inputs
from quire.observe.process_memory import resident_bytes
from quire.server.errors import ApiError, invalid, unavailable
from quire.server.middleware import TENANT
from quire.server.page.document import POLICY, page_files
from quire.server.page.feed import LiveFeed, viewer_state
from quire.server.request_body import json_response
from quire.server.state import state_of

PATIENCE_S = 5.0
SHOWN_DEFAULTS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "seed",
)  # fmt: skip


async def page(request: Request) -> Response:
    """A page to chat with the model, and to see the engine at work."""
    name = request.path_params.get("name")
    file = page_files().get("/" if name is None else f"/ui/page/{name}")
    if file is None:
        raise ApiError(404, "the page has no such file")
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "ETag": file.etag,
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)


async def ui_defaults(request: Request) -> Response:
    """For the page's options: the server's default of each sampling parameter, the length of the context, and the media that the model takes."""
    same_site(request)
    front = state_of(request).serving().front
    inputs = front.inputs
    params = inputs.defaults.params()
    values = {name: getattr(params, name) for name in SHOWN_DEFAULTS}
    longest = inputs.defaults.sampling.get("max_tokens")
    return json_response({
        "sampling": values | {"max_tokens": longest}, "max_model_len": inputs.max_model_len, "takes": takes_of(front),
    })  # fmt: skip


def takes_of(front: RequestManager) -> dict[str, Any]:
    """What the model takes beside text. `media`: kinds of items in messages. `speech`: it writes sound down, and does not chat.
    `seconds`, `mib`: of the longest and the largest sound."""
    seconds, media = float(env.get("MAX_AUDIO_DECODE_DURATION_S")), media_inputs(front)
    kinds = [] if media is None else [kind for kind in media.texts if media.limits[kind]]
    if media is not None and media.model.audio is not None:
        seconds = media.model.audio.most_seconds
    return {
        "media": kinds, "speech": transcription_inputs(front) is not None, "seconds": seconds,
        "mib": int(env.get("MAX_AUDIO_CLIP_FILESIZE_MB")),
    }  # fmt: skip


async def ui_state(request: Request) -> Response:
    """The engine's state for the page: blocks, steps, requests; without any text."""
    same_site(request)
    since = number(request, "since")
    state = state_of(request)
    engine = state.serving()
    if not engine.is_ready():
        raise unavailable("the engine is being restarted", 1)
    which = engine_of(request)
    if (feeds := getattr(request.app.state, "feeds", None)) is None:
        feeds = request.app.state.feeds = {}
    feed = feeds.setdefault(which, LiveFeed(number=which))
    try:
        seen = await asyncio.wait_for(feed.look(engine), PATIENCE_S)
    except TimeoutError:
        return json_response({"busy": True, "every_ms": round(1000 * feed.every)})
    except EngineDeadError:
        raise
    except QuireError as error:
        raise unavailable("the engine is being restarted", 1) from error
    view = viewer_state(seen, since, tenant_of(request))
    view["memory"] = view["memory"] | {"server": resident_bytes([os.getpid()])}
    view["model"] = state.model_name
    view["no_words"] = why_no_words(request)
    view["engines"] = list(state.config.parallel.ranks)
    return json_response(view | {"every_ms": round(1000 * feed.every)})


async def ui_words(request: Request) -> Response:
    """Prompt and output of one request of the same key, when a viewer of the page opens it.

    Without keys, all clients would be one tenant, and could read each other's text.
    """
    same_site(request)
    state = state_of(request)
    if (reason := why_no_words(request)) is not None:
        raise ApiError(403, reason)
    engine = state.serving()
    which = engine_of(request)
    only = {} if which is None else {"engine": which}
    words = await engine.call("live_words", number(request, "n"), **only)
    if words is None or words["tenant"] != tenant_of(request):
        raise ApiError(404, "unknown request, or it has ended")
    return json_response({
        "prompt": engine.decode(words["prompt"]),
        "prompt_left": words["prompt_left"],
        "output": engine.decode(words["output"]),
        "output_left": words["output_left"],
    })  # fmt: skip


def why_no_words(request: Request) -> str | None:
    """Why `ui_words` refuses a viewer, whatever request it asks for; None: it does not."""
    if TENANT in request.scope or state_of(request).dev_mode:
        return None
    return (
        "prompts and outputs are shown only if requests need keys: start the server with QUIRE_API_KEY or"
        " --api-key-file (or with QUIRE_SERVER_DEV_MODE=1, if no other user can reach it)"
    )


def same_site(request: Request) -> None:
    """Refuse scripts of other sites: CORS lets them use the API, but not see other clients' requests.

    Raises:
        ApiError: 403.
    """
    # A browser sends Origin with every GET of a script to another origin, and with none to its own.
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
    ours = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if not ours or site not in ("none", "same-origin"):
        raise ApiError(403, "only this server's page may send this request")


def tenant_of(request: Request) -> str:
    tenant = request.scope.get(TENANT)
    return "" if tenant is None else str(tenant.id)


def engine_of(request: Request) -> int | None:
    """Which of several engines the viewer sees; None: there is one. Raises ApiError: 400."""
    count, which = len(state_of(request).config.parallel.ranks), number(request, "engine")
    if which >= count:
        raise invalid(f"`engine` must be below {count}", "engine")
    return which if count > 1 else None


def number(request: Request, name: str) -> int:
    """A count in the query; 0 if it is absent.

    Raises:
        ApiError: 400.
    """
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise invalid(f"`{name}` must be a number of at least 0", name)
    return int(text)
