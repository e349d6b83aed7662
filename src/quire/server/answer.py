"""GenerationAnswer: what the answers of all generating routes share.

Knows deltas, and the order in which an answer is made. Does not know its shape: a subclass encodes deltas as frames of a
stream (`add`, `end`, `failed`) and all of them as one JSON body (`whole`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from quire.server.endpoint import RequestContext
from quire.server.generation import Generation
from quire.server.openai import logprobs as shapes
from quire.server.output_delta import OutputDelta
from quire.server.sse import EventEncoder
from quire.server.streaming_json import json_answer


class GenerationAnswer(EventEncoder[OutputDelta]):
    """The answer to a generation, streamed or in one piece. `name` names a token in log-probabilities."""

    def __init__(self, context: RequestContext, body: Any, source: Generation):
        self.context, self.body, self.source = context, body, source
        server = context.state.config.server
        as_ids = getattr(body, "return_tokens_as_token_ids", None)
        as_ids = server.return_tokens_as_token_ids if as_ids is None else as_ids
        self.name = shapes.naming(as_ids, context.engine.token_text)
        self.details = server.enable_prompt_tokens_details
        """Whether to count the tokens of a prompt that were cached."""

    def usage(self) -> dict[str, Any]:
        return self.source.usage(self.details)

    def whole(self, deltas: Sequence[OutputDelta], large: bool) -> dict[str, Any]:
        """The body of an answer in one piece. `large`: its lists are encoded while they are sent."""
        raise NotImplementedError

    def headers(self) -> dict[str, str]:
        return {}

    async def response(self, deltas: Sequence[OutputDelta]) -> Response:
        large = self.source.is_large(deltas)
        body, headers = self.whole(deltas, large), self.headers()
        return json_answer(body, large, self.context.state.answering, headers)
