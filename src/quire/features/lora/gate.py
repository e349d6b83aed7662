"""LoraGate: a request waits until its adapter is in memory, and until the step has room for one adapter more.

Knows waiting and running requests, and the registry. Does not know tensors. Others pass a request that waits here. When
PATIENCE requests with other adapters have passed one that waits for room in the step, one of the running adapters gets no
further requests until its last one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from quire.errors import ValidationError
from quire.features.lora.registry import LoraRegistry, LoraVersion, not_loaded
from quire.protocol.request import EngineRequest
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

NAME = "lora"
PATIENCE = 16


class LoraGate(Gate):
    """Plug it into the scheduler.

    Args:
        max_loras: the most different adapters of running requests.
        kinds: of media; a request that has such items and names no adapter gets the adapter with the name of the kind.
    """

    name = NAME
    order = 20

    def __init__(self, registry: LoraRegistry, max_loras: int, kinds: Collection[str] = ()):
        self.registry, self.max_loras, self.kinds = registry, max_loras, frozenset(kinds)
        self.active: set[LoraVersion] = set()
        self._deferred: set[int] = set()  # numbers of requests that wait for room in the step
        self._passed = 0  # how many requests passed the first of them
        self._draining: LoraVersion | None = None
        self._drained_from = 0  # requests from this number on wait until it has drained

    def receive(self, received: EngineRequest, number: int) -> EngineRequest:
        """Replace the adapter's name, or the one that its media need, by its version of now."""
        if (name := received.adapter or self._of_media(received)) is None:
            return received
        if (known := self.registry.names.get(name)) is None:
            raise ValidationError(
                not_loaded(name) if received.adapter else
                f"the prompt has {name}, for which the LoRA adapter {name!r} is used, and that is not loaded: the operator must load it"
                f" (/v1/load_lora_adapter)",
                parameter="model",
            )  # fmt: skip
        self.registry.versions[known.version].waiting[number] = received.id
        return msgspec.structs.replace(received, adapter=known.version)

    def _of_media(self, received: EngineRequest) -> str | None:
        """The adapter of the only kind of its media that has one."""
        found = self.kinds.intersection(item.kind for item in received.media)
        return next(iter(found)) if len(found) == 1 else None

    def ready(self, request: Request) -> bool:
        if (version := self._version(request)) is None:
            return True
        if version.state != "ready":
            self.registry.fetch(version, request.number)
            if version.state == "evicted":
                self._deferred.add(request.number)
            return False
        if version not in self.active and len(self.active) >= self.max_loras:
            self._deferred.add(request.number)
            return False
        return not self._waits_for_drain(request, version)

    def is_blocking(self, request: Request) -> bool:
        if (version := self._version(request)) is None:
            return False
        full = version not in self.active and len(self.active) >= self.max_loras
        return version.state != "ready" or full or self._waits_for_drain(request, version)

    def labels(self) -> dict[str, Callable[[], str]]:
        """The labels of the metric `vllm:lora_requests_info`: functions that return their texts."""
        return {
            "max_lora": lambda: str(self.max_loras),
            "running_lora_adapters": lambda: self._names(self.active),
            "waiting_lora_adapters": lambda: self._names(
                [version for version in self.registry.versions.values() if version.waiting]
            ),
        }

    def _names(self, versions: Collection[LoraVersion]) -> str:
        if not versions:
            return ""
        keys = {version.key for version in versions}
        known = self.registry.names.values()
        return ",".join(sorted(each.name for each in known if each.version in keys))

    def _waits_for_drain(self, request: Request, version: LoraVersion) -> bool:
        return version is self._draining and request.number >= self._drained_from

    def enter(self, request: Request) -> None:
        if (version := self._version(request)) is None:
            return
        self._forget_waiting(request, version)
        version.running += 1
        self.active.add(version)
        self.registry.use(version)
        if (
            self._deferred
            and self._draining is None
            and request.number > (first := min(self._deferred))
        ):
            self._passed += 1
            if self._passed >= PATIENCE:
                self._draining = min(self.active, key=lambda each: (each.running, each.slot))
                self._drained_from = first

    def leave(self, request: Request) -> None:
        if (version := self._version(request)) is None:
            return
        version.running -= 1
        self.registry.use(version)
        if not version.running:
            self.active.discard(version)
            if version is self._draining:
                self._draining, self._passed = None, 0
        if request.finish is None:  # preempted
            version.waiting[request.number] = request.id
        else:
            self.registry.forget_unused(version.key)

    def on_waiting_ended(self, request: Request) -> None:
        if (version := self._version(request)) is not None:
            self._forget_waiting(request, version)
            self.registry.forget_unused(version.key)

    def _forget_waiting(self, request: Request, version: LoraVersion) -> None:
        version.waiting.pop(request.number, None)
        self._deferred.discard(request.number)
        if not self._deferred:
            self._draining, self._passed = None, 0

    def _version(self, request: Request) -> LoraVersion | None:
        return None if request.adapter is None else self.registry.versions[request.adapter]
