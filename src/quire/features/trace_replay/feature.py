"""TraceReplayFeature: a request may give the tokens of its output (`trace_decode_token_ids`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.engine.feature import Feature
from quire.errors import ValidationError
from quire.protocol.request import RequestParams
from quire.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts


class TraceReplayFeature(Feature):
    """A logits processor in each worker that draws."""

    name = "trace_replay"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.pooling is None

    def request_extra(self, params: RequestParams) -> bytes | None:
        """Raises ValidationError: the request wants scores that a trace cannot have."""
        if isinstance(params, SamplingParams) and params.trace_decode_token_ids is not None:
            mode = self.resolved.config.model.logprobs_mode
            scored = params.logprobs is not None or params.logprob_token_ids is not None
            if scored and not mode.startswith("raw"):
                raise ValidationError(
                    f"trace_decode_token_ids with logprobs needs logprobs_mode=raw_logprobs; the engine has {mode}, which"
                    " would score the trace's tokens",
                    parameter="logprobs",
                )
        return None

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.features.trace_replay.replay import TraceReplay

        if parts.draws:
            parts.processors.append(TraceReplay())
