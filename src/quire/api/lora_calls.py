"""`add_lora`, `remove_lora`, `list_loras` and `pin_lora`, of the synchronous engines and of AsyncLLM."""

from __future__ import annotations

from typing import Any

from quire.errors import ValidationError
from quire.frontend.adapters import AdapterNames, Steps, run_now
from quire.frontend.request_manager import RequestManager
from quire.protocol.lora_request import LoRARequest
from quire.protocol.validators import wrong


def added(adapters: AdapterNames, request: Any) -> Steps[bool]:
    """Load the adapter of a request. True: it was not loaded before, or is read again."""
    if not isinstance(request, LoRARequest):
        raise wrong("lora_request", request, "a LoRARequest")
    before = {(one.name, one.path) for one in (yield from adapters.listed())}
    name = yield from adapters.name_for(request)
    after = {(one.name, one.path) for one in (yield from adapters.listed())}
    if name not in {one for one, _ in after}:
        raise ValidationError(f"the adapter {name!r} was unloaded meanwhile; load it again")
    return request.load_inplace or before != after


class LoraCalls:
    """Base class of `LLM` and `LLMEngine`."""

    front: RequestManager

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. False: it is loaded already.

        Raises:
            ValidationError: it cannot be loaded. ModelNotFound: there are no files.
        """
        return run_now(added(self.front.adapters, lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; requests that run with it go on. False: there is none with this number."""
        return run_now(self.front.adapters.unload_id(lora_id))

    def list_loras(self) -> set[int]:
        """The `lora_int_id` of every adapter; those that no LoRARequest named have numbers too."""
        return run_now(self.front.adapters.ids())

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory. False: there is none with this number."""
        return run_now(self.front.adapters.pin(lora_id))
