"""The state that all handlers of a server share: configuration, engine, counts, phase.

Knows whether the server loads, serves, drains or is dead. Does not know HTTP, but where a request finds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from hashlib import sha256

from starlette.requests import Request

from quire import env
from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient
from quire.errors import EngineDeadError, EngineDelayed
from quire.frontend.beam_search import BeamStream
from quire.frontend.media.prompt_reader import media_inputs
from quire.frontend.untrusted_templates import MAX_CONCURRENT_RENDERS, UntrustedTemplateRenderer
from quire.observe.prometheus import ServerMetrics, cache_info
from quire.observe.tracing import Tracer
from quire.protocol.output import StartupStatus
from quire.server.api_keys import ApiKeys
from quire.server.errors import ApiError, unavailable
from quire.server.media_room import MediaRoom
from quire.server.openai.journal_entry import ResponseJournal
from quire.server.plugin_calls import PluginCalls
from quire.server.response_store import ResponseStore
from quire.server.tokenizer_pool import TokenizerPool
from quire.version import __version__

MAX_TEXT_BYTES = 1 << 20  # for which the tokenizer takes 300 MiB of memory
BYTES_PER_TOKEN = 16  # ... or this number of bytes for each token of a longer context

SHOWN_NAMES = 20
"""Names that an error lists."""


class ServerPhase(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass
class ServerState:
    """One for each application: `app.state.quire`."""

    config: EngineConfig
    metrics: ServerMetrics
    engine: AsyncEngine | None = None
    phase: ServerPhase = ServerPhase.LOADING
    tenants: ApiKeys | None = None
    hosts: frozenset[str] | None = None
    """Names that the header Host may have (`host_header.py`); None: any."""
    dev_mode: bool = False
    started: float = field(default_factory=time.time)
    active: set[str] = field(default_factory=set)
    """Request ids of the running generations."""
    searches: dict[str, BeamStream] = field(default_factory=dict)
    """The beam searches among them: the engine knows only their steps."""
    media_room: MediaRoom = field(default_factory=MediaRoom)
    """Bounds the bytes of their embeddings."""
    http_requests: int = 0
    """HTTP requests in progress (/load)."""
    hurry: bool = False
    """Set by the second stop signal: do not wait for running requests."""
    texts: TokenizerPool = field(default_factory=TokenizerPool)
    """Threads for long texts."""
    templates: TokenizerPool = field(default_factory=partial(TokenizerPool, MAX_CONCURRENT_RENDERS))
    """Threads that wait for the processes of `untrusted`."""
    plugin_calls: PluginCalls = field(default_factory=PluginCalls)
    """Runs the code of parser plug-ins."""
    untrusted: UntrustedTemplateRenderer = field(default_factory=UntrustedTemplateRenderer)
    """Renders templates that come with requests."""
    fingerprint: str = ""
    """Changes with everything that may change an answer."""
    created: int = 0
    answering: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "answers"))
    """Encodes the parts of large answers, one part of each in turn."""
    tracer: Tracer | None = None
    front: int = 0
    """Number of this HTTP process among `fronts`."""
    fronts: int = 1
    journal: ResponseJournal | None = None
    """Records background responses; None: they end with this process."""
    startup: Callable[[], StartupStatus] = lambda: StartupStatus("starting")
    """How far the start is, for requests that come too early."""
    model_names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.model_names = self.config.model.served_names

    @cached_property
    def _stored(self) -> ResponseStore:
        server = self.config.server
        return ResponseStore(server.response_store_size, server.response_store_time)

    @property
    def responses(self) -> ResponseStore | None:
        """Keeps responses; None: they are not kept, because another HTTP process may get the next request."""
        kept = self.config.server.response_store_size and self.fronts == 1
        return self._stored if kept else None

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def attach(self, engine: AsyncEngine) -> None:
        """Serve this engine."""
        client, limit = engine.client, engine.inputs.max_model_len
        engine.front.packs_logprobs = True
        engine.in_thread = self.texts.run_sized
        engine.front.prepare()
        if (media := media_inputs(engine.front)) is not None:
            media.observe = self.metrics.media
            media.cache.changed = self.metrics.processed_media.set
            self.metrics.processed_media_max.set(media.cache.most)
        engine.inputs.max_text_bytes = max(MAX_TEXT_BYTES, BYTES_PER_TOKEN * limit)
        self.created, self.fingerprint = int(time.time()), fingerprint(client)
        for number, one in zip(self.config.parallel.ranks, client.engines, strict=True):
            info = cache_info(self.config.cache, one.ready, one.resolved)
            self.metrics.attach(one.stats, limit, info, number)
            rows = self.metrics.rows.labels(self.metrics.model_name, str(number))
            rows.set(one.ready.max_num_seqs)
        self.engine, self.phase = engine, ServerPhase.READY

    def serving(self) -> AsyncEngine:
        """The engine.

        Raises:
            ApiError: 503 while it loads or drains, 500 when it is dead.
        """
        if self.phase is ServerPhase.DRAINING:
            raise unavailable("the server is shutting down", 30)
        if self.phase is ServerPhase.DEAD:
            raise ApiError(500, "the engine has stopped; see the server's log")
        if self.engine is None:
            raise unavailable(f"the model is not ready yet: {self.startup()}", 1)
        return self.engine

    async def abort(self, name: str) -> None:
        """Abort a generation; its client gets the output so far."""
        if (search := self.searches.get(name)) is not None:
            search.stop()
        elif self.engine is not None:
            await self.engine.abort(name)

    def healthy(self) -> bool:
        """Whether it answers requests, drains, or restarts its engine."""
        if self.engine is None or self.phase is ServerPhase.DEAD:
            return False
        try:
            self.engine.check()
        except EngineDeadError:
            self.phase = ServerPhase.DEAD
            return False
        except EngineDelayed:
            return False
        return True

    def unavailable_reason(self) -> str:
        """Why it takes no requests, in a few words; "" if it does."""
        match self.phase:
            case ServerPhase.LOADING:
                return f"loading: {self.startup()}"
            case ServerPhase.DRAINING:
                return "shutting down"
            case ServerPhase.DEAD:
                return "the engine has stopped"
            case ServerPhase.READY:
                if self.engine is None or self.engine.is_ready():
                    return ""
                return f"{self._replaced(self.engine.client)} being restarted"

    def _replaced(self, client: EngineClient) -> str:
        """Which engines are not ready, as the beginning of a sentence."""
        pairs = zip(self.config.parallel.ranks, client.engines, strict=True)
        several = len(client.engines) > 1
        numbers = [str(r) for r, one in pairs if several and one.state().condition != "ready"]
        if not numbers:
            return "the engine is"
        return f"engines {', '.join(numbers)} are" if numbers[1:] else f"engine {numbers[0]} is"

    def check_model(self, name: str | None, adapters: Sequence[str] = ()) -> str:
        """The model name for the answer. `adapters`: further names that are served, for the error.

        Raises:
            ApiError: 404 for a name that is not served.
        """
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        if env.get("SKIP_MODEL_NAME_VALIDATION"):
            return name
        known = ", ".join(f"`{one}`" for one in [*self.model_names, *adapters][:SHOWN_NAMES])
        raise ApiError(
            404, f"The model `{name[:200]}` does not exist; this server has {known}.", param="model"
        )


def state_of(request: Request) -> ServerState:
    """The state of the application that serves a request."""
    state: ServerState = request.app.state.quire
    return state


def fingerprint(client: EngineClient) -> str:
    """Differs for another version, model or implementation of it, dtype or device."""
    ready = client.ready
    what = (__version__, client.resolved.path, ready.dtype, ready.device, ready.model_impl)
    return f"quire-{__version__}-{sha256(repr(what).encode()).hexdigest()[:8]}"
