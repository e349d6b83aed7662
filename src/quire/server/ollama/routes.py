"""Ollama's routes: /api/chat, /api/generate, /api/embed, /api/tags, /api/show, /api/ps, /api/version.

Knows which requests they become. One model is served, so routes that pull, copy or delete models are missing.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.pooling.outputs import Floats
from quire.server.adapters import listed
from quire.server.endpoint import RequestContext, route
from quire.server.fill_in_middle import fill_prompt
from quire.server.generation import Generation
from quire.server.limits import completions_of, take_from_key
from quire.server.ollama.answers import (
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    created_at,
    loaded,
)
from quire.server.ollama.requests import (
    chat_request,
    generate_as_chat,
    generate_as_completion,
)
from quire.server.ollama.schemas import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from quire.server.openai.chat import generation_of
from quire.server.openai.chunks import interval
from quire.server.openai.sampling_params import completion_params
from quire.server.pooling.batch import PoolingAnswer
from quire.server.pooling.schemas import EmbeddingsRequest
from quire.server.pooling.vector_routes import input_batch
from quire.server.pooling.vectors import LARGE_NUMBERS
from quire.server.prompts import one_prompt
from quire.server.request_body import json_response
from quire.server.schemas import CompletionRequest
from quire.server.state import ServerState, state_of
from quire.server.streaming_json import json_answer
from quire.server.streaming_json import listed as long_list
from quire.version import __version__

PROTOCOL = "0.9.0"
"""The version of Ollama whose routes these are: clients refuse an older one."""


@route(OllamaChatRequest)
async def chat(context: RequestContext, body: OllamaChatRequest) -> OllamaAnswer | Response:
    """Answer a conversation, in Ollama's protocol."""
    if not body.messages:
        return loaded(context.model, {"message": {"role": "assistant", "content": ""}})
    return OllamaChatAnswer(context, body, await generation_of(context, chat_request(body), "ollama-"))  # fmt: skip


@route(OllamaGenerateRequest)
async def generate(context: RequestContext, body: OllamaGenerateRequest) -> OllamaAnswer | Response:
    """Answer a prompt, in Ollama's protocol; `raw`: continue it; `suffix`: fill the gap before it."""
    if not (body.prompt or body.suffix):
        return loaded(context.model, {"response": ""})
    if body.suffix:
        prompt = fill_prompt(context.engine, body.prompt, body.suffix, "suffix")
    elif body.raw:
        prompt = body.prompt
    else:
        source = await generation_of(context, generate_as_chat(body), "ollama-")
        return OllamaGenerateAnswer(context, body, source)
    source = await completion_of(context, generate_as_completion(body, prompt), "ollama-")
    return OllamaGenerateAnswer(context, body, source)


async def completion_of(context: RequestContext, body: CompletionRequest, kind: str) -> Generation:
    """The generation of one prompt that is continued as it is. Raises ApiError, ValidationError: it is invalid."""
    params = completion_params(body, context.engine.inputs.defaults)
    take_from_key(context.request, completions_of(1, params, context.state))
    prompt = await one_prompt(body.prompt, body, context.engine)
    return Generation(
        context, context.new_id(kind, body), body, [prompt], params, None, None, interval(body, context.state)
    )  # fmt: skip


@route(OllamaEmbedRequest, pooling=True)
async def embed(context: RequestContext, body: OllamaEmbedRequest) -> PoolingAnswer:
    """Vectors of texts, in Ollama's protocol."""
    cut = -1 if body.truncate else None
    asked = EmbeddingsRequest(input=body.input, model=body.model, dimensions=body.dimensions, truncate_prompt_tokens=cut)  # fmt: skip
    batch = await input_batch(context, asked, "embed", "ollama-")

    def respond(arrays: list[Floats]) -> Response:
        large = sum(array.size for array in arrays) >= LARGE_NUMBERS
        vectors = long_list(lambda: (array.reshape(-1).tolist() for array in arrays), large)
        answer = {"model": context.model, "embeddings": vectors, "total_duration": 0, "load_duration": 0,
                  "prompt_eval_count": batch.usage["prompt_tokens"]}  # fmt: skip
        return json_answer(answer, large, context.state.answering)

    return PoolingAnswer(batch, respond)


def details(state: ServerState) -> dict[str, Any]:
    model = state.config.model
    family = type_of(state)
    return {
        "parent_model": "", "format": "safetensors", "family": family, "families": [family],
        "parameter_size": "", "quantization_level": model.quantization or "none",
    }  # fmt: skip


def type_of(state: ServerState) -> str:
    """The model's `model_type`, as families are named."""
    resolved = getattr(state.serving().client, "resolved", None)
    return str(resolved.hf_config.get("model_type", "")) if resolved is not None else ""


def digest(state: ServerState, name: str) -> str:
    return sha256(f"{state.fingerprint} {name}".encode()).hexdigest()


async def cards(request: Request) -> list[dict[str, Any]]:
    """Every name that a request may have as its model."""
    state = state_of(request)
    about = details(state)
    names = [*state.model_names, *(one.name for one in await listed(state))]
    return [
        {"name": name, "model": name, "modified_at": created_at(state.created), "size": 0, "digest": digest(state, name), "details": about}
        for name in names
    ]  # fmt: skip


async def tags(request: Request) -> Response:
    """The names under which the model is served, in Ollama's protocol."""
    return json_response({"models": await cards(request)})


async def running(request: Request) -> Response:
    """The same: the model is loaded."""
    length = state_of(request).serving().inputs.max_model_len
    more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": length}
    return json_response({"models": [card | more for card in await cards(request)]})


@route(OllamaShowRequest, pooling=None)
async def show(context: RequestContext, body: OllamaShowRequest) -> Response:
    """What the model can do, in Ollama's protocol."""
    state, engine = context.state, context.engine
    family, pooling = type_of(state), engine.front.pooling is not None
    info = {"general.architecture": family, f"{family}.context_length": engine.inputs.max_model_len}
    can = ["embedding"] if pooling else ["completion", *extras(engine.front.formats)]
    return json_response({"details": details(state), "model_info": info, "capabilities": can, "modified_at": created_at(state.created)})  # fmt: skip


def extras(formats: Any) -> list[str]:
    found = ["tools"] if formats.tools is not None else []
    return [*found, "thinking"] if formats.reasoning is not None else found


async def version(request: Request) -> Response:
    """The version of Ollama's protocol, and this server's."""
    return json_response({"version": PROTOCOL, "quire": __version__})
