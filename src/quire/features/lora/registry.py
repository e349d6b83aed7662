"""LoraRegistry: the adapters of an engine, by name; which of them are in the workers' memory, and in which place.

A name leads to a version: the content of files, named by its digest. Names with equal content share a version, and an in-place
reload gives a name another version, so that KV of an old version is never used for a new one. Workers read files in a thread
of their own (`hook.py`); `poll`, which the engine calls in each turn while something is read, fetches what they report.

    evicted -> loading -> ready -> evicted ...      a version without names and requests is forgotten

Does not know the schedule (`gate.py`), tensors or files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from quire.errors import ValidationError
from quire.features.lora.resolved_names import ResolvedNames
from quire.logging import get_logger

log = get_logger(__name__)

FILE = "lora-adapters"
POLL_S = 0.01
MAX_NAMES = 4096
NO_SLOT = -1
OTHER_FILES = "two ranks of this engine read different files of the adapter: put the same ones on every machine, and load it again"


class CallWorkers(Protocol):
    """Calls a function of every worker by name, between steps; returns one result for each."""

    def __call__(self, name: str, *args: Any) -> list[Any]: ...


@dataclass(eq=False)
class LoraVersion:
    """The content of an adapter's files.

    Attributes:
        slot: its place in the workers' tables; NO_SLOT: none.
        running: how many requests with it have a row.
        waiting: the numbers of the requests with it that have none, in order of arrival.
        used: counts up with each use, over all versions.
    """

    key: str
    path: str
    rank: int
    num_bytes: int
    slot: int = NO_SLOT
    state: Literal["evicted", "loading", "ready"] = "evicted"
    running: int = 0
    waiting: dict[int, str] = field(default_factory=dict)
    used: int = 0
    is_pinned: bool = False
    error: str = ""
    """Why the last load failed, for the requests that wait for it."""

    @property
    def has_requests(self) -> bool:
        return self.running > 0 or bool(self.waiting)


class RegisteredLora(msgspec.Struct):
    """An adapter as its user knows it."""

    name: str
    path: str
    base_model_name: str | None
    version: str
    rank: int = 0
    num_bytes: int = 0
    resolved_for: str | None = None
    """The API key whose request registered it by a resolver; None: it was loaded by its name."""


@dataclass(eq=False)
class _Load:
    """One load by name: for the call of a user."""

    name: str
    path: str
    base_model_name: str | None
    resolved_for: str | None = None
    result: str | ValidationError | None = None


class LoraRegistry:
    """The adapters of an engine.

    Args:
        call: reaches the workers.
        slots: how many versions may be in memory.
        wake: wakes the engine's loop; a thread calls it while workers read files.
        awake: whether the workers have their model; if not, requests wait for it before they wait for an adapter.
    """

    def __init__(
        self,
        call: CallWorkers,
        slots: int,
        wake: Callable[[], None],
        awake: Callable[[], bool] = lambda: True,
    ):
        self._call, self._wake, self._awake = call, wake, awake
        self.names: dict[str, RegisteredLora] = {}
        self.versions: dict[str, LoraVersion] = {}
        self._resolved = ResolvedNames(self._is_used)
        self._free = list(range(slots - 1, -1, -1))
        self._uses = self._tickets = 0
        self._reading: dict[int, _Load | LoraVersion] = {}  # by ticket
        self._calls: dict[object, _Load] = {}  # by call of a user
        self._reports = False
        self._file: Path | None = None

    # -- names ----------------------------------------------------------------------------------
    def load(
        self, call: object, name: str, path: str, load_inplace: bool = False,
        base_model_name: str | None = None, if_absent: bool = False, resolved_for: str | None = None,
    ) -> str | None:  # fmt: skip
        """Register an adapter; returns its version, or None while workers read it: the same `call` asks again.

        Args:
            call: identifies the call.
            load_inplace: replace the adapter of that name; running requests keep the old one.
            if_absent: the same name from the same path may be registered.
            resolved_for: the API key whose request a resolver answers; the name is forgotten when it is unused and others
                need its place.

        Raises:
            ValidationError: it cannot be served, for the reason given; nothing is changed.
        """
        if (load := self._calls.get(call)) is None:
            known = self.names.get(name)
            if known is not None and not load_inplace:
                if if_absent and known.path == path:
                    return known.version
                raise ValidationError(
                    f"The lora adapter '{name}' has already been loaded, from {known.path}. To replace it, set"
                    " 'load_inplace' to True.",
                    parameter="lora_name",
                    value=name,
                )
            if len(self.names) >= MAX_NAMES and known is None:
                raise ValidationError(f"{MAX_NAMES} adapters are registered; unload some first")
            load = self._calls[call] = _Load(name, path, base_model_name, resolved_for)
            self._read(load, path, "")
            self.poll()
        if load.result is None:
            return None
        del self._calls[call]
        if isinstance(load.result, ValidationError):
            raise load.result
        return load.result

    def unload(self, name: str) -> bool:
        """Forget a name; requests with it go on. False: there is none."""
        if (known := self.names.pop(name, None)) is None:
            return False
        self._resolved.remove(name)
        self._save()
        self.forget_unused(known.version)
        return True

    def pin(self, name: str) -> bool:
        """Never evict the adapter of this name, as long as it has one. False: there is none."""
        if (known := self.names.get(name)) is None:
            return False
        self.versions[known.version].is_pinned = True
        return True

    def find(self, name: str) -> dict[str, Any] | None:
        """The card of the adapter that a request names now."""
        self._resolved.use(name)
        return None if (known := self.names.get(name)) is None else self._card(known)

    def cards(self) -> list[dict[str, Any]]:
        """All adapters; "loading": only those that no request may name yet, since their first load is not complete."""
        loading = [
            {"name": load.name, "path": load.path, "version": "", "base_model_name": load.base_model_name,
             "rank": 0, "bytes": 0, "state": "loading", "is_resolved": load.resolved_for is not None}
            for load in self._calls.values() if load.name not in self.names and load.result is None
        ]  # fmt: skip
        return loading + [self._card(known) for known in self.names.values()]

    def _card(self, known: RegisteredLora) -> dict[str, Any]:
        state = "ready" if self.versions[known.version].state == "ready" else "evicted"
        return {
            "name": known.name, "path": known.path, "version": known.version, "base_model_name": known.base_model_name,
            "rank": known.rank, "bytes": known.num_bytes, "state": state, "is_resolved": known.name in self._resolved,
        }  # fmt: skip

    def _is_used(self, name: str) -> bool:
        version = self.versions[self.names[name].version]
        return version.has_requests or version.is_pinned

    def _register(self, load: _Load, version: LoraVersion) -> None:
        old = self.names.get(load.name)
        self.names[load.name] = RegisteredLora(
            load.name, load.path, load.base_model_name, version.key, version.rank, version.num_bytes, load.resolved_for
        )  # fmt: skip
        self._resolved.remove(load.name)
        if load.resolved_for is not None:
            self._make_room(load.resolved_for)
            self._resolved.add(load.name, load.resolved_for)
        self._save()
        if old is not None:
            self.forget_unused(old.version)

    def _make_room(self, key: str) -> None:
        if (oldest := self._resolved.to_forget(key)) is not None:
            self.unload(oldest)

    # -- requests -------------------------------------------------------------------------------
    def use(self, version: LoraVersion) -> None:
        """Note that a request uses it now, for the order of evictions."""
        self._uses += 1
        version.used = self._uses

    def fetch(self, version: LoraVersion, number: int) -> None:
        """Load an evicted version for the waiting request `number`, if a place in memory can be freed for it."""
        if version.state != "evicted" or not self._awake():
            return
        if (slot := self._take_slot(number)) is not None:
            version.slot, version.state = slot, "loading"
            self._read(version, version.path, version.key)

    def failed(self) -> Iterator[LoraVersion]:
        """The versions that could not be loaded for waiting requests."""
        for version in list(self.versions.values()):
            if version.error:
                yield version
                version.error = ""
                self.forget_unused(version.key)

    def evict_all(self) -> None:
        """Free the memory of all versions. No request may run."""
        for version in self.versions.values():
            if version.state == "ready":
                self._evict(version)

    # -- memory ---------------------------------------------------------------------------------
    def _take_slot(self, number: int | None) -> int | None:
        """A free place; else the place of the least recently used version that no request has, or only requests that wait
        and came after `number`. None: there is no such place."""
        if not self._free:
            unused = [
                version
                for version in self.versions.values()
                if version.state == "ready"
                and not (version.running or version.is_pinned)
                and all(number is not None and number < other for other in version.waiting)
            ]
            if not unused:
                return None
            self._evict(min(unused, key=lambda version: (bool(version.waiting), version.used)))
        return self._free.pop()

    def _evict(self, version: LoraVersion) -> None:
        self._call("remove_adapter", version.slot)
        self._free.append(version.slot)
        version.slot, version.state = NO_SLOT, "evicted"

    def forget_unused(self, key: str) -> None:
        """Forget a version that no name and no request leads to."""
        version = self.versions.get(key)
        if version is None or version.has_requests or version.state == "loading":
            return
        if any(known.version == key for known in self.names.values()):
            return
        if version.state == "ready":
            self._evict(version)
        del self.versions[key]

    # -- the workers' threads -------------------------------------------------------------------
    def _read(self, what: _Load | LoraVersion, path: str, key: str) -> None:
        self._tickets += 1
        self._call("read_adapter", self._tickets, path, key)
        self._reading[self._tickets] = what
        self._reports = True
        if len(self._reading) == 1:
            threading.Thread(target=self._tick, name="lora-tick", daemon=True).start()

    def _tick(self) -> None:
        while self._reading:
            time.sleep(POLL_S)
            self._reports = True
            self._wake()

    def poll(self) -> None:
        """Take what the workers have read into use. Called between steps."""
        if not (self._reading and self._reports):
            return
        self._reports = False
        answers = self._call("adapters_read", list(self._reading))
        for ticket, report in merged(answers).items():
            match self._reading.pop(ticket):
                case _Load() as load:
                    self._finish_load(load, ticket, report)
                case version:
                    self._finish_fetch(version, ticket, report)

    def _finish_load(self, load: _Load, ticket: int, report: dict[str, Any]) -> None:
        if (error := report.get("error")) is not None:
            self._call("discard_adapter", ticket)
            load.result = ValidationError(error, parameter="lora_path", value=load.path)
            return
        key = load.result = report["version"]
        version = self.versions.get(key)
        if version is None:
            version = self.versions[key] = LoraVersion(
                key, load.path, report["rank"], report["bytes"]
            )
        version.path = load.path
        slot = self._take_slot(None) if version.state == "evicted" else None
        if slot is None:
            self._call("discard_adapter", ticket)
        else:
            self._place(version, slot, ticket)
        about = f"rank {version.rank}, {version.num_bytes} bytes, version {key}"
        log.info("adapter %s: %s", load.name, about)
        self._register(load, version)

    def _finish_fetch(self, version: LoraVersion, ticket: int, report: dict[str, Any]) -> None:
        if (error := report.get("error")) is None:
            self._place(version, version.slot, ticket)
        else:
            self._call("discard_adapter", ticket)
            self._free.append(version.slot)
            version.slot, version.state, version.error = NO_SLOT, "evicted", error
            log.warning("an adapter could not be loaded again: %s", error)
        self.forget_unused(version.key)

    def _place(self, version: LoraVersion, slot: int, ticket: int) -> None:
        if all(self._call("add_adapter", ticket, slot, version.key)):
            version.slot, version.state = slot, "ready"
            self.use(version)
        else:  # the workers have dropped the model that it was read for
            self._free.append(slot)
            version.slot, version.state = NO_SLOT, "evicted"

    # -- across restarts of the process ---------------------------------------------------------
    def persist(self, path: Path) -> None:
        """Restore the names that an earlier process of the engine wrote to `path`, and write them there from now on.

        They replace the configuration's adapters. Requests load the versions again.
        """
        self._file = path
        if not path.exists():
            return
        stored = msgspec.json.decode(path.read_bytes(), type=list[RegisteredLora])
        self.names = {known.name: known for known in stored}
        for known in stored:
            version = LoraVersion(known.version, known.path, known.rank, known.num_bytes)
            self.versions.setdefault(known.version, version)
            if known.resolved_for is not None:
                self._resolved.add(known.name, known.resolved_for)
        # Those of the configuration may have been replaced or unloaded.
        for key in list(self.versions):
            self.forget_unused(key)
        log.info("restored the adapters of the previous engine process: %s", ", ".join(self.names))

    def _save(self) -> None:
        if self._file is None:
            return
        try:
            new = self._file.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(list(self.names.values())))
            os.replace(new, self._file)
        except OSError as why:
            log.warning("a restarted engine will not know these adapters: %s", why)


def merged(answers: list[Any]) -> dict[int, dict[str, Any]]:
    """The reports that all workers have made, by ticket; one with an error if any worker has one, or read other files.

    Its rank is the largest: each stage of a pipeline has some modules of an adapter.
    """
    first = {int(ticket): report for ticket, report in answers[0].items()} if answers else {}
    for answer in answers[1:]:
        for ticket in list(first):
            if (report := answer.get(ticket)) is None:
                del first[ticket]
            elif "error" in report:
                first[ticket] = report
            elif report["version"] != first[ticket].get("version", report["version"]):
                first[ticket] = {"error": OTHER_FILES}
            elif "error" not in first[ticket]:
                first[ticket]["rank"] = max(report["rank"], first[ticket]["rank"])
    return first


def not_loaded(name: str) -> str:
    """The refusal of a request for an unknown adapter."""
    return f"The model `{name}` does not exist: no LoRA adapter of that name is loaded"
