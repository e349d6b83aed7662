"""The background responses of a server in its journal: they begin, and a later server finishes them.

A later server feeds the outputs to a new answer, then sends prompt and tokens to the engine as one request, as after the death of
an engine (`engine/unfinished_request.py`). Knows requests, keys and models; `journal_entry.py` says what is recorded.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request

from quire.api.async_engine import OutputStream
from quire.errors import QuireError
from quire.logging import get_logger
from quire.models.checkpoint_digest import checkpoint_digest
from quire.server.adapters import model_of
from quire.server.api_keys import Tenant
from quire.server.endpoint import RequestContext
from quire.server.journal import Journal, JournaledResponse
from quire.server.middleware import NEW_ID, TENANT
from quire.server.openai.background import BackgroundAnswer
from quire.server.openai.journal_entry import BegunResponse, JournalEntry
from quire.server.openai.responses import answer_of
from quire.server.request_body import SIZE
from quire.server.response_store import StoredResponse
from quire.server.schemas import ResponsesRequest
from quire.server.state import ServerState

log = get_logger(__name__)

PREFIX = "resp_"


class JournaledResponses:
    """All of a server. `open`, then `restore` when the engine is ready."""

    def __init__(self, journal: Journal):
        self.journal, self.model = journal, ""
        self._found: dict[str, JournaledResponse] = {}
        self._entries: dict[str, JournalEntry] = {}
        self._restoring: asyncio.Task[None] | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Blocks. Raises: as `Journal.open`."""

        def on_synced(position: int) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._synced, position)

        self.journal.on_synced = on_synced
        self._found = self.journal.open()

    def _synced(self, position: int) -> None:
        for entry in list(self._entries.values()):
            entry.synced(position)

    def entry(self, record: StoredResponse, before: JournaledResponse | None = None) -> JournalEntry:  # fmt: skip
        """Of a response that begins now, or that began `before`."""
        earlier = ([], b"") if before is None else (before.outputs, before.end)
        entry = self._entries[record.id] = JournalEntry(self.journal, record, *earlier)

        def forget() -> None:
            self._entries.pop(record.id, None)
            self.journal.forget(record.id)

        record.on_forgotten = forget
        return entry

    def begin(self, entry: JournalEntry, answer: Any, stream: OutputStream) -> None:
        """Record the beginning of a response, whose request is settled."""
        source, context = answer.source, answer.context
        try:
            body = msgspec.json.encode(answer.body)
        except TypeError:
            log.warning_every("journal media", 3600.0, "background responses with pictures are not in the journal")  # fmt: skip
            return
        prompt = source.prompts[0]
        entry.begin(
            BegunResponse(
                owner=entry.record.owner, key=key_digest(context.tenant), model=self.model, created=source.created,
                seed=getattr(stream.collector.params, "seed", None), text=prompt.text,
                tokens=list(stream.collector.accepted.tokens), body=body,
            )
        )  # fmt: skip

    # -- the start --------------------------------------------------------------------------------
    def restore(self, state: ServerState, app: Any) -> None:
        """Let responses of an earlier server go on. The engine is ready."""
        self._restoring = asyncio.ensure_future(self._restore(state, app))

    async def _restore(self, state: ServerState, app: Any) -> None:
        resolved = state.serving().client.resolved
        digest = await asyncio.to_thread(checkpoint_digest, resolved.path, resolved.config.load.load_format)  # fmt: skip
        self.model = f"{digest} {resolved.dtype}"
        found, self._found = self._found, {}
        for id, before in found.items():
            try:
                await self._restore_one(state, app, id, before)
            except Exception as why:
                if not isinstance(why, QuireError | msgspec.MsgspecError):
                    log.exception("a response of the journal cannot go on")
                log.warning("the response %s of an earlier server does not go on: %s", id, why)
                self.journal.forget(id)
        if found:
            log.info("%d background responses of an earlier server were found in the journal", len(found))  # fmt: skip

    async def _restore_one(self, state: ServerState, app: Any, id: str, before: JournaledResponse) -> None:  # fmt: skip
        begun = msgspec.msgpack.decode(before.begin, type=BegunResponse)
        if begun.model != self.model:
            raise QuireError("the server has another model now")
        tenant = state.tenants.by_id(begun.owner) if state.tenants is not None else None
        if key_digest(tenant) != begun.key:
            raise QuireError("its API key is not valid any more")
        body = msgspec.json.decode(begun.body, type=ResponsesRequest)
        body.request_id = None  # the id is in the scope
        scope = {
            "type": "http", "method": "POST", "path": "/v1/responses", "query_string": b"", "headers": [], "app": app,
            TENANT: tenant, NEW_ID: id.removeprefix(PREFIX), SIZE: len(begun.body),
        }  # fmt: skip
        request = Request(scope)
        model, adapter = await model_of(state, request, body.model)
        answer = await answer_of(RequestContext(request, state, state.serving(), model, adapter), body, None)  # fmt: skip
        if not isinstance(answer, BackgroundAnswer):
            raise QuireError("responses are not stored here (--response-store-size)")
        self._settle(answer, begun)
        answer.entry = self.entry(answer.record, before)
        answer.begin()

    def _settle(self, answer: BackgroundAnswer, begun: BegunResponse) -> None:
        """The prompt's tokens and the seed of its earlier life: a template may write today's date."""
        source = answer.answer.source
        source.prompts = [replace(source.prompts[0], text=begun.text, tokens=begun.tokens)]
        source.counts[0].prompt_tokens = len(begun.tokens)
        source.params = msgspec.structs.replace(source.params, seed=begun.seed)
        source.created = begun.created

    def close(self) -> None:
        """What ends from now on goes on in the next server."""
        self.journal.close()


def key_digest(tenant: Tenant | None) -> str:
    """Changes with the key; too short to find the key by it."""
    return "" if tenant is None else sha256(b"quire journal" + tenant.key.key.encode()).hexdigest()[:8]  # fmt: skip
