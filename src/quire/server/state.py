"""What all handlers of one server share: configuration, the engine once it is there, counts, the phase.

Knows whether the server loads, serves, drains or is dead. Does not know HTTP.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from quire import env
from quire.config.engine import EngineConfig
from quire.errors import EngineDeadError, EngineDelayed
from quire.frontend.parsers.model_formats import ModelFormats
from quire.observe.prometheus import ServerMetrics
from quire.observe.tracing import Tracer
from quire.server.api_keys import ApiKeys
from quire.server.engine_protocol import TextEngine
from quire.server.errors import ApiError, unavailable
from quire.server.openai.beam_search import BeamStream


class ServerPhase(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(slots=True)
class ServerState:
    """One for each app; `app.state.quire`."""

    config: EngineConfig
    metrics: ServerMetrics
    engine: TextEngine | None = None
    phase: ServerPhase = ServerPhase.LOADING
    tenants: ApiKeys | None = None
    hosts: frozenset[str] | None = None
    """Names that the header Host may have (`hosts.py`); None: any."""
    dev_mode: bool = False
    started: float = field(default_factory=time.time)
    active: set[str] = field(default_factory=set)
    """Generations under way, by request id."""
    searches: dict[str, BeamStream] = field(default_factory=dict)
    """Those of them that the engine knows by their steps only."""
    http_requests: int = 0
    """HTTP requests under way (/load)."""
    hurry: bool = False
    """Told twice to stop: nobody is waited for."""
    formats: ModelFormats | None = None
    answering: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "answers"))
    """Makes the parts of large answers, one part of each in turn."""
    """How the model writes thoughts and tool calls; `reading.model_formats` chooses."""
    tracer: Tracer | None = None
    front: int = 0
    """Which of `fronts` HTTP processes this is."""
    fronts: int = 1
    stage: str = "starting"
    """What start-up is at, for those who ask too early."""

    @property
    def model_names(self) -> list[str]:
        names = self.config.model.served_model_name
        if isinstance(names, str):
            return [names]
        return list(names) if names else [self.config.model.model]

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def serving(self) -> TextEngine:
        """The engine.

        Raises:
            ApiError: 503 while it loads or drains, 500 when it is dead.
        """
        if self.phase is ServerPhase.DRAINING:
            raise unavailable("the server is shutting down", 30)
        if self.phase is ServerPhase.DEAD:
            raise ApiError(500, "the engine has stopped; the server's log says why")
        if self.engine is None:
            raise unavailable(f"the model is not ready yet: {self.stage}", 1)
        return self.engine

    async def abort(self, name: str) -> None:
        """End a generation; its client gets what there is."""
        if (search := self.searches.get(name)) is not None:
            search.stop()
        elif self.engine is not None:
            await self.engine.abort(name)

    def healthy(self) -> bool:
        """Whether it answers, or will when it is asked to again (draining counts as well)."""
        if self.engine is None or self.phase is ServerPhase.DEAD:
            return False
        try:
            self.engine.check_health()
        except EngineDeadError:
            self.phase = ServerPhase.DEAD
            return False
        except EngineDelayed:
            return False
        return True

    def unavailable_reason(self) -> str:
        """Why it does not take requests, in a few words; "" if it does."""
        match self.phase:
            case ServerPhase.LOADING:
                return f"loading: {self.stage}"
            case ServerPhase.DRAINING:
                return "shutting down"
            case ServerPhase.DEAD:
                return "the engine has stopped"
            case ServerPhase.READY:
                engine = self.engine
                replaced = engine is not None and not engine.serving()
                return "the engine is being restarted" if replaced else ""

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: 404 for a name that is not served.
        """
        if name is None or name in self.model_names:
            return name or self.model_name
        if env.get("SKIP_MODEL_NAME_VALIDATION"):
            return name
        known = ", ".join(f"`{one}`" for one in self.model_names)
        raise ApiError(
            404, f"The model `{name[:200]}` does not exist; this server has {known}.", param="model"
        )
