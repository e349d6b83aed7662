"""A feature that gives a model with cross attention the states of its encoder. No torch at import.

A request says the encoder's input in `extra_args={"source": [token, ...]}`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.engine.feature import Feature
from quire.errors import ValidationError
from quire.protocol.request import RequestParams

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts

NAME = "source"


class CrossFeature(Feature):
    name = NAME

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.architecture == "CrossDemoForCausalLM"

    def request_extra(self, params: RequestParams) -> bytes | None:
        source = (getattr(params, "extra_args", None) or {}).get(NAME)
        if not isinstance(source, list) or not source:
            raise ValidationError("source: must be a list of tokens", parameter="extra_args")
        return array("i", source).tobytes()

    def num_encoder_tokens(self, extra: bytes) -> int:
        return len(array("i", extra))

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from cross_hook import SourceHook

        hook = SourceHook(NAME, parts.models)
        parts.hooks.append(hook)
        parts.functions["encoded"] = lambda: hook.num_encoded
