"""llama.cpp's /infill, /props and /slots: what its editor plugins ask for.

Knows these routes' shapes. Turns an infill request into a completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.answer import GenerationAnswer
from quire.server.endpoint import RequestContext, route
from quire.server.errors import invalid
from quire.server.fill_in_middle import fill_prompt
from quire.server.llama_cpp.schemas import InfillRequest
from quire.server.ollama.requests import UNLIMITED
from quire.server.ollama.routes import completion_of
from quire.server.output_delta import OutputDelta
from quire.server.request_body import json_response
from quire.server.schemas import CompletionRequest
from quire.server.sse import data
from quire.server.state import state_of
from quire.version import __version__

STOPS = {"length": "limit", "stop": "eos"}


class InfillAnswer(GenerationAnswer):
    def last(self, delta: OutputDelta) -> dict[str, Any]:
        word = delta.stop_reason if isinstance(delta.stop_reason, str) else ""
        return {
            "model": self.context.model,
            "tokens_predicted": sum(self.source.counts[0].output_tokens),
            "tokens_evaluated": self.source.counts[0].prompt_tokens,
            "stop": True,
            "stop_type": "word" if word else STOPS.get(delta.finish_reason or "", "none"),
            "stopping_word": word,
            "truncated": False,
        }

    async def response(self, deltas: Sequence[OutputDelta]) -> Response:
        (delta,) = deltas
        return json_response({"content": delta.text, **self.last(delta)})

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        if delta.text:
            yield data({"content": delta.text, "stop": False})
        if delta.finish_reason is not None:
            yield data({"content": "", **self.last(delta)})

    def end(self) -> Iterator[bytes]:
        return iter(())


def prefix_of(body: InfillRequest) -> str:
    """Other files, then the text before the gap. Raises ApiError 400."""
    files = []
    for index, file in enumerate(body.input_extra):
        name, text = file.get("filename", ""), file.get("text")
        if not isinstance(name, str) or not isinstance(text, str):
            raise invalid(f"`input_extra[{index}]` must have the strings `filename` and `text`", "input_extra")  # fmt: skip
        files.append(f"{name}\n{text}\n")
    return "".join([*files, body.input_prefix, body.prompt])


@route(InfillRequest)
async def infill(context: RequestContext, body: InfillRequest) -> InfillAnswer:
    """Fill the gap between a prefix and a suffix."""
    if not (body.input_prefix or body.input_suffix or body.prompt):
        raise invalid("`input_prefix` and `input_suffix` are empty", "input_prefix")
    prompt = fill_prompt(context.engine, prefix_of(body), body.input_suffix, "input_suffix")
    request = CompletionRequest(
        prompt=prompt, model=body.model, stream=body.stream, seed=body.seed, stop=body.stop,
        max_tokens=UNLIMITED if body.n_predict < 0 else body.n_predict,
        temperature=body.temperature, top_k=body.top_k, top_p=body.top_p, min_p=body.min_p,
        repetition_penalty=body.repeat_penalty, presence_penalty=body.presence_penalty, frequency_penalty=body.frequency_penalty,
    )  # fmt: skip
    return InfillAnswer(context, body, await completion_of(context, request, "infill-"))


async def props(request: Request) -> Response:
    """The model and its defaults, in llama.cpp's names."""
    state = state_of(request)
    inputs = state.serving().inputs
    params = inputs.defaults.params()
    sampling = {
        "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty, "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }  # fmt: skip
    return json_response({
        "default_generation_settings": {"n_ctx": inputs.max_model_len, "params": sampling},
        "total_slots": num_slots(request),
        "model_alias": state.model_name,
        "model_path": state.model_name,
        "build_info": f"quire-{__version__}",
    })  # fmt: skip


async def slots(request: Request) -> Response:
    """One entry for each request that may run at once, without any text."""
    state = state_of(request)
    engine, length = state.serving(), state.serving().inputs.max_model_len
    running = engine.stats().running
    return json_response([{"id": index, "n_ctx": length, "is_processing": index < running} for index in range(num_slots(request))])  # fmt: skip


def num_slots(request: Request) -> int:
    engines = state_of(request).serving().client.engines
    return sum(one.ready.max_num_seqs for one in engines)
