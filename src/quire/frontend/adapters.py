"""The names of LoRA adapters: what requests may name, loading and unloading by name, and finding an adapter's files.

Knows the engine's functions `load_lora`, `unload_lora`, `list_loras`, `find_lora` and `pin_lora` (`features/lora`), paths, and the
numbers of LoRARequests. The engine decides which weights a name means when a request arrives, so several frontends
agree. Does not know files, ranks or weights.

Methods that wait are generators: they yield calls that may block, and get what these return or raise. `run_now` makes
the calls in the caller's thread; `api/async_engine.py` makes them in other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, TypeVar

import msgspec

from quire.config.lora import check_name
from quire.engine.client import EngineClient
from quire.errors import ValidationError
from quire.models.checkpoint_locator import find_adapter
from quire.models.requested_adapter import find_requested_adapter
from quire.protocol.lora_request import LoRARequest
from quire.protocol.validators import wrong

T = TypeVar("T")
Steps = Generator[Callable[[], Any], Any, T]

OFF = "LoRA is off: start the engine with enable_lora=True (--enable-lora)"


class Adapter(msgspec.Struct, frozen=True):
    """One adapter that the engine has: a row of `list_loras`."""

    name: str
    path: str
    base_model_name: str | None = None
    rank: int = 0
    bytes: int = 0
    state: str = "ready"
    """loading, ready, or evicted: its next request loads it again."""
    is_resolved: bool = False
    """A resolver found it: the engine forgets its name when it is unused and others need its place."""


class AdapterNotLoaded(ValidationError):
    """An adapter could not be loaded; the message says why."""


class AdapterNames:
    """One per frontend."""

    def __init__(self, client: EngineClient):
        self.client, self.config = client, client.resolved.config.lora
        self.known: dict[str, Adapter] = {}
        """As the engine told them last, without those that it may forget by itself."""
        self._ids: dict[int, str] = {}
        """`lora_int_id` -> name."""
        self._folders: dict[str, str] = {}

    # -- names ----------------------------------------------------------------------------------
    def listed(self) -> Steps[list[Adapter]]:
        """Every adapter that requests may name."""
        if not self.config.enable_lora:
            return []
        rows = yield partial(self.client.call, "list_loras")
        adapters = [msgspec.convert(row, Adapter) for row in rows]
        usable = [one for one in adapters if one.state != "loading"]
        self.known = {one.name: one for one in usable if not one.is_resolved}
        return usable

    def find(self, name: str) -> Steps[Adapter | None]:
        """The adapter of this name; asks the engine, for this name only, if it is not known here."""
        if name in self.known or not self.config.enable_lora:
            return self.known.get(name)
        if (row := (yield partial(self.client.call, "find_lora", name))) is None:
            return None
        adapter = msgspec.convert(row, Adapter)
        if not adapter.is_resolved:
            self.known[name] = adapter
        return adapter

    def name_for(self, lora_request: LoRARequest | str | None) -> Steps[str | None]:
        """The name for the engine: of a loaded adapter, or of a LoRARequest, which is loaded if necessary.

        Raises:
            ValidationError: LoRA is off, there is no such adapter, or it cannot be loaded.
        """
        if lora_request is None:
            return None
        if not self.config.enable_lora:
            raise ValidationError(f"lora_request: {OFF}", parameter="lora_request")
        if isinstance(lora_request, LoRARequest):
            return (yield from self._loaded(lora_request))
        if not isinstance(lora_request, str):
            raise wrong(
                "lora_request", lora_request, "a LoRARequest, or the name of a loaded adapter"
            )
        if (yield from self.find(lora_request)) is None:
            raise ValidationError(
                f"lora_request: no adapter is called {lora_request[:200]!r}; {self._names()}",
                parameter="lora_request",
                value=lora_request,
            )
        return lora_request

    def _loaded(self, request: LoRARequest) -> Steps[str]:
        folder = yield from self._folder(request.lora_path, request.load_inplace)
        name = request.lora_name
        there = yield from self.find(name)
        if there is not None and there.path != folder and not request.load_inplace:
            name = f"{name}#{request.lora_int_id}"  # another adapter has the name
            there = yield from self.find(name)
        self._ids[request.lora_int_id] = name
        if there is None or there.path != folder or request.load_inplace:
            yield from self.load(
                name, folder, request.base_model_name, load_inplace=request.load_inplace, if_absent=True
            )  # fmt: skip
        return name

    def _names(self) -> str:
        shown = ", ".join(map(repr, list(self.known)[:20]))
        return f"this engine has {shown}" if shown else "this engine has none"

    # -- loading --------------------------------------------------------------------------------
    def load(
        self, name: str, path: str, base_model_name: str | None = None, *, load_inplace: bool = False,
        if_absent: bool = False, resolved_for: str | None = None, requested: bool = False,
    ) -> Steps[None]:  # fmt: skip
        """Load an adapter, and return when requests can use it.

        Args:
            load_inplace: read it again if it is loaded.
            if_absent: do nothing if it is loaded from this path.
            resolved_for: the API key whose request named it; only for what a resolver found.
            requested: a client names the path, so less is looked up (`models/requested_adapter.py`).

        Raises:
            ModelNotFound: there are no files.
            Unsupported: the path is a URL, or what a client would have downloaded is too large.
            AdapterNotLoaded: LoRA is off, the name is in use, or the files cannot be served.
        """
        try:
            check_name(name)
        except ValueError as why:
            raise AdapterNotLoaded(f"lora_name: {why}", parameter="lora_name") from None
        if not self.config.enable_lora:
            raise AdapterNotLoaded(OFF)
        if requested:
            options = self.client.resolved.config.load, self.config.allow_lora_from_hub
            folder = yield partial(find_requested_adapter, path, *options)
        else:
            folder = yield from self._folder(path, afresh=load_inplace)
        wanted = name, folder, load_inplace, base_model_name, if_absent, resolved_for
        try:
            yield partial(self.client.call, "load_lora", *wanted)
        except ValidationError as why:
            raise AdapterNotLoaded(str(why), parameter=why.parameter) from why
        self.known.pop(name, None)
        yield from self.find(name)

    def unload(self, name: str) -> Steps[bool]:
        """Forget a name; requests that run with it go on. False: there is no such name."""
        self.known.pop(name, None)  # at once: the next request with this name asks the engine
        if not self.config.enable_lora:
            return False
        return bool((yield partial(self.client.call, "unload_lora", name)))

    def _folder(self, path: str, afresh: bool = False) -> Steps[str]:
        """The directory of a path; `afresh`: the hub may have a newer revision."""
        if (known := self._folders.get(path)) is not None and not afresh:
            return known
        config = self.client.resolved.config
        folder: str = yield partial(find_adapter, path, config.load, config.model.hf_token)
        if len(self._folders) < 1024:
            self._folders[path] = folder
        return folder

    # -- numbers --------------------------------------------------------------------------------
    def ids(self) -> Steps[set[int]]:
        """The `lora_int_id` of every adapter; one that has none gets the next free number."""
        names = {one.name for one in (yield from self.listed())}
        for name in names - set(self._ids.values()):
            self._ids[max(self._ids, default=0) + 1] = name
        self._ids = {id: name for id, name in self._ids.items() if name in names}
        return set(self._ids)

    def unload_id(self, id: int) -> Steps[bool]:
        """False: no adapter has this number."""
        yield from self.ids()
        name = self._ids.pop(id, None)
        return False if name is None else (yield from self.unload(name))

    def pin(self, id: int) -> Steps[bool]:
        """Keep an adapter in memory. False: no adapter has this number."""
        yield from self.ids()
        if (name := self._ids.get(id)) is None:
            return False
        return bool((yield partial(self.client.call, "pin_lora", name)))


def run_now(steps: Steps[T]) -> T:
    """Make the calls in this thread."""
    try:
        wanted = next(steps)
        while True:
            try:
                result = wanted()
            except Exception as error:
                wanted = steps.throw(error)
            else:
                wanted = steps.send(result)
    except StopIteration as done:
        found: T = done.value
        return found


def names_for(adapters: AdapterNames, lora_requests: Iterable[Any]) -> list[str | None]:
    """`AdapterNames.name_for` each; one object is looked up once."""
    names: dict[int, str | None] = {}
    requests = list(lora_requests)
    for one in requests:
        if id(one) not in names:
            names[id(one)] = run_now(adapters.name_for(one))
    return [names[id(one)] for one in requests]
