"""Ollama's requests as requests of chat and completions. Knows both shapes. Does not know answers."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.server.errors import invalid
from quire.server.ollama.schemas import OllamaBody, OllamaChatRequest, OllamaGenerateRequest
from quire.server.openai.chat import effort_of
from quire.server.schemas import ChatRequest, CompletionRequest

UNLIMITED = 1 << 30
"""Tokens of a completion that has no limit: the model's context ends it before."""


def sampling_fields(body: OllamaBody) -> dict[str, Any]:
    """The common fields of chat and completions."""
    options = body.options
    limit = options.num_predict
    return {
        "model": body.model, "stream": body.stream, "response_format": format_of(body.format),
        "temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p,
        "seed": options.seed, "stop": options.stop, "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty, "frequency_penalty": options.frequency_penalty,
        "max_tokens": None if limit is None or limit < 0 else limit,
    }  # fmt: skip


def format_of(given: Any) -> dict[str, Any] | None:
    """`format`: "json", or a JSON schema. Raises ApiError 400."""
    if given in (None, ""):
        return None
    if given == "json":
        return {"type": "json_object"}
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}
    raise invalid('`format` must be "json" or a JSON schema', "format")


def thinking_fields(think: bool | str | None) -> dict[str, Any]:
    """`think`: on, off, or an effort. Raises ApiError 400."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"chat_template_kwargs": {"enable_thinking": think, "thinking": think}}
    return {"reasoning_effort": effort_of(think, "think")}


def chat_request(body: OllamaChatRequest) -> ChatRequest:
    """Raises ApiError 400 that names the field."""
    messages: list[dict[str, Any]] = []
    ids: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        messages.append(message_of(message, f"messages[{index}]", ids))
    return ChatRequest(messages=messages, tools=body.tools or None, **sampling_fields(body), **thinking_fields(body.think))  # fmt: skip


def message_of(message: dict[str, Any], where: str, ids: dict[str, str]) -> dict[str, Any]:
    """A message of chat. `ids`: the id of each tool's last call, which results need."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, str | None):
        raise invalid(f"`{where}.content` must be a string", f"{where}.content")
    found: dict[str, Any] = {"role": role, "content": with_images(content or "", message.get("images"), where)}  # fmt: skip
    if isinstance(thoughts := message.get("thinking"), str) and thoughts:
        found["reasoning"] = thoughts
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [call_of(call, n, where, ids) for n, call in enumerate(listed(calls, f"{where}.tool_calls"))]  # fmt: skip
    if role == "tool":
        name = message.get("tool_name") or message.get("name")
        found["tool_call_id"] = ids.get(str(name)[:1000]) or next(reversed(ids.values()), "call_0")
    return found


def call_of(call: Any, n: int, where: str, ids: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise invalid(f"`{where}.tool_calls[{n}].function.name` is missing", f"{where}.tool_calls")
    id = ids[name[:1000]] = f"call_{len(ids)}_{n}"
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def with_images(content: str, images: Any, where: str) -> str | list[dict[str, Any]]:
    """Text, or text after pictures in base64."""
    if not images:
        return content
    parts: list[dict[str, Any]] = []
    for n, image in enumerate(listed(images, f"{where}.images")):
        if not isinstance(image, str):
            raise invalid(f"`{where}.images[{n}]` must be base64", f"{where}.images")
        parts.append({"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}})
    return [*parts, {"type": "text", "text": content}]


def listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise invalid(f"`{where}` must be a list", where)
    return value


def generate_as_chat(body: OllamaGenerateRequest) -> ChatRequest:
    """A prompt as a conversation of one message. Raises ApiError 400."""
    if body.template is not None:
        raise invalid("`template` is not supported: use `raw` with the whole prompt, or start the server with --chat-template", "template")  # fmt: skip
    content = with_images(body.prompt, body.images, "prompt")
    system = [{"role": "system", "content": body.system}] if body.system else []
    return ChatRequest(messages=[*system, {"role": "user", "content": content}], **sampling_fields(body), **thinking_fields(body.think))  # fmt: skip


def generate_as_completion(body: OllamaGenerateRequest, prompt: str | list[int]) -> CompletionRequest:  # fmt: skip
    """`raw`: the prompt as it is. A list: token ids."""
    fields = sampling_fields(body)
    fields["max_tokens"] = UNLIMITED if fields["max_tokens"] is None else fields["max_tokens"]
    given: Any = prompt if isinstance(prompt, str) else [prompt]
    return CompletionRequest(prompt=given, **fields)
