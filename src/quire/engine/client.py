"""The door of the middle room: submit, abort, call, outputs. InlineClient and ProcessClient behave alike."""

from __future__ import annotations

from typing import Any, Protocol

from quire.protocol.output import EngineOutput, Ready
from quire.protocol.request import EngineRequest


class EngineClient(Protocol):
    """What a front room may ask. All methods may be called from any thread."""

    ready: Ready

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; everything about it, a refusal too, comes back through `outputs`."""

    def abort(self, ids: list[str]) -> None:
        """End these requests; each still running one answers with finish "abort"."""

    def call(self, name: str, *args: Any) -> Any:
        """A named function of the engine (`engine/admin.py`); blocks for the answer."""

    def outputs(self) -> list[EngineOutput]:
        """Block until something is new. Raises EngineDeadError when nothing will ever be."""

    def close(self) -> None:
        """Stop the engine; `outputs` in another thread then raises EngineDeadError."""
