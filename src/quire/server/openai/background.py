"""A response that no client waits for: a task runs it and stores its events; clients read them, as often as they like.

Knows the task's life. Does not know what an event says.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from quire.errors import EngineDeadError
from quire.server.api_keys import KeyUse
from quire.server.endpoint import RequestContext
from quire.server.errors import ENDS
from quire.server.generation import Generation
from quire.server.middleware import KEY_USE
from quire.server.openai.journal_entry import JournaledEnd, JournalEntry
from quire.server.output_delta import OutputDelta
from quire.server.response_store import EventsAsTheyAre, ResponseStore, StoredEvents, StoredResponse


class EventedAnswer(Protocol):
    """What a background response runs: a `ResponseAnswer`, which stores its own end."""

    context: RequestContext
    source: Generation
    items: Any

    def start(self) -> Any: ...
    def add(self, delta: OutputDelta) -> Any: ...
    def failed(self, error: BaseException) -> bytes: ...
    def object(self, status: str, output: list[Any]) -> dict[str, Any]: ...


class BackgroundAnswer(EventsAsTheyAre):
    """Begins the response, and answers with its object, or with its events."""

    def __init__(self, answer: EventedAnswer, record: StoredResponse):
        self.answer, self.record = answer, record
        self.source = BackgroundEvents(self)
        self.entry: JournalEntry | None = None
        """In the journal; a response of an earlier server has it before it begins."""

    def begin(self) -> None:
        """Start the task. Raises as `ResponseStore.add`."""
        context, record = self.answer.context, self.record
        store = context.state.responses
        if store is None:
            return
        record.events = []
        store.add(record)
        is_new, journal = self.entry is None, context.state.journal
        if is_new and journal is not None:
            self.entry = journal.entry(record)
        self.answer.source.journal = self.entry
        use, held = context.request.scope.get(KEY_USE), None
        if use is not None:  # until the task ends, not the HTTP request
            held = KeyUse(use.tenant)
            held.completions, use.completions = use.completions, 0
        record.task = asyncio.ensure_future(self._run(store, is_new))
        record.task.add_done_callback(partial(self._done, store, held))

    async def _run(self, store: ResponseStore, is_new: bool) -> None:
        answer, record, source = self.answer, self.record, self.answer.source
        try:
            await source.open()
            if is_new:
                self._note_beginning()
            for event in answer.start():
                store.append(record, event)
            self._mark()
            while not source.ended:
                for delta in await source.next():
                    for event in answer.add(delta):
                        store.append(record, event)
                self._mark()
        except ENDS:
            raise
        except JournaledEnd as before:
            for event in before.end.events:
                store.append(record, event)
            store.end(record, before.end.body, msgspec.json.decode(before.end.body)["output"])
        except BaseException as error:
            event = answer.failed(error)
            store.append(record, event)
            if self.entry is not None and not isinstance(error, EngineDeadError):
                self.entry.end([event])  # after the death of the engine, the next server goes on
        self._mark()

    def _note_beginning(self) -> None:
        context, source = self.answer.context, self.answer.source
        if (
            self.entry is not None
            and context.state.journal is not None
            and source.stream is not None
        ):
            context.state.journal.begin(self.entry, self.answer, source.stream)

    def _mark(self) -> None:
        if self.entry is not None:
            self.entry.mark()

    def _done(self, store: ResponseStore, held: KeyUse | None, task: asyncio.Task[None]) -> None:
        """The task has ended; it may have been cancelled before it began."""
        answer, record = self.answer, self.record
        answer.source.close()
        if held is not None:
            held.end()
        if not record.ended:
            made = answer.object("cancelled", list(answer.items.done))
            store.end(record, msgspec.json.encode(made), made["output"])
            if self.entry is not None:
                self.entry.end(())
                self.entry.mark()

    async def response(self, record: StoredResponse) -> Response:
        return Response(record.object(), media_type="application/json")


class BackgroundEvents(StoredEvents):
    """The events of a response that begins when they are first asked for."""

    def __init__(self, answer: BackgroundAnswer):
        super().__init__(answer.record)
        self.answer = answer

    async def open(self) -> None:
        self.answer.begin()
        await super().open()

    async def whole(self) -> StoredResponse:
        self.answer.begin()
        return self.record
