"""GenerationAnswer: what the answers of all generating routes share.

Knows deltas, and the order in which an answer is made. Does not know its shape: a subclass encodes deltas as frames of a
stream (`add`, `end`, `failed`) and all of them as one JSON body (`whole`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from quire.frontend.logprobs import Logprob
from quire.server.endpoint import RequestContext
from quire.server.generation import Generation
from quire.server.output_delta import OutputDelta
from quire.server.sse import EventEncoder
from quire.server.streaming_json import json_answer


class GenerationAnswer(EventEncoder[OutputDelta]):
    """The answer to a generation, streamed or in one piece."""

    def __init__(self, context: RequestContext, body: Any, source: Generation):
        self.context, self.body, self.source = context, body, source
        server = context.state.config.server
        as_ids = getattr(body, "return_tokens_as_token_ids", None)
        self.as_ids = server.return_tokens_as_token_ids if as_ids is None else as_ids
        self.details = server.enable_prompt_tokens_details
        """Whether to count the tokens of a prompt that were cached."""

    def name(self, token: int, entry: Logprob) -> str:
        """The name of a token in log-probabilities; `token_id:N` if the request asks for printable names."""
        if self.as_ids:
            return f"token_id:{token}"
        named = entry.decoded_token
        return self.context.engine.token_text(token) if named is None else named

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
