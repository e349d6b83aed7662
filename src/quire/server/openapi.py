"""GET /openapi.json and /docs: the server's API, generated from the request Structs.

Knows routes, Structs and JSON schema. The page loads nothing from other sites. Unsupported fields are left out.
"""

from __future__ import annotations

import html
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.config.unsupported import REQUEST_FIELDS, RESPONSES_FIELDS
from quire.server import schemas
from quire.server.audio.fields import TranscriptionRequest
from quire.server.llama_cpp.schemas import InfillRequest
from quire.server.middleware import OPEN
from quire.server.ollama import schemas as ollama
from quire.server.pooling import schemas as pooling
from quire.server.request_body import json_response
from quire.version import __version__

Row = tuple[str, str, Callable[[Request], Awaitable[Any]]]

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/chat/completions/batch": schemas.BatchChatRequest,
    "/v1/completions": schemas.CompletionRequest,
    "/inference/v1/generate": schemas.GenerateRequest,
    "/v1/responses": schemas.ResponsesRequest,
    "/v1/messages": schemas.MessagesRequest,
    "/v1/messages/count_tokens": schemas.MessagesRequest,
    "/v1/embeddings": pooling.EmbeddingsRequest,
    "/pooling": pooling.PoolingRequest,
    "/classify": pooling.ClassifyRequest,
    **dict.fromkeys(("/v1/embed", "/v2/embed"), pooling.CohereEmbedRequest),
    **dict.fromkeys(("/score", "/v1/score"), pooling.ScoreRequest),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), pooling.RerankRequest),
    "/api/chat": ollama.OllamaChatRequest,
    "/api/generate": ollama.OllamaGenerateRequest,
    "/api/embed": ollama.OllamaEmbedRequest,
    "/api/show": ollama.OllamaShowRequest,
    "/infill": InfillRequest,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
    "/v1/load_lora_adapter": schemas.LoadAdapterRequest,
    "/v1/unload_lora_adapter": schemas.UnloadAdapterRequest,
    "/adapters": schemas.SageMakerAdapterRequest,
    "/collective_rpc": schemas.RpcRequest,
    "/abort_requests": schemas.AbortRequest,
    "/start_profile": schemas.StartProfileRequest,
}
FORMS: dict[str, type[msgspec.Struct]] = dict.fromkeys(
    ("/v1/audio/transcriptions", "/v1/audio/translations"), TranscriptionRequest
)
"""Bodies that are forms with one file."""
FILE = {"type": "string", "format": "binary"}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
STYLE = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code{background:#8882}td{padding:0 1em 0 0;vertical-align:top}"


def components() -> dict[str, Any]:
    """The schemas of all bodies, by name."""
    _, schemas_by_name = msgspec.json.schema_components(
        list(dict.fromkeys([*BODIES.values(), *FORMS.values()])),
        ref_template="#/components/schemas/{name}",
    )
    for title, schema in schemas_by_name.items():
        for name in RESPONSES_FIELDS if title == "ResponsesRequest" else REQUEST_FIELDS:
            schema.get("properties", {}).pop(name, None)
    for form in FORMS.values():
        schema = schemas_by_name[form.__name__]
        schema |= {"properties": {"file": FILE, **schema["properties"]}, "required": ["file"]}
    return {**schemas_by_name, "Error": ERROR}


def first_line(endpoint: Any) -> str:
    words = (endpoint.__doc__ or endpoint.__name__.replace("_", " ")).strip()
    return str(words.splitlines()[0])


def openapi(rows: Iterable[Row], keyed: bool, root: str = "") -> dict[str, Any]:
    """The document. `keyed`: whether the server needs a key. `root`: the path prefix that a proxy removes."""
    paths: dict[str, Any] = {}
    for kinds, path, endpoint in rows:
        entry = paths.setdefault(path.replace(":path", ""), {})
        for kind in kinds.lower().split():
            about: dict[str, Any] = {
                "summary": first_line(endpoint),
                "operationId": kind + path.replace("/", "_").replace("{name", "name").rstrip("}"),
                "responses": {
                    "200": {"description": "the answer"},
                    "default": {
                        "description": "an error",
                        "content": {
                            "application/json": {"schema": {"$ref": "#/components/schemas/Error"}}
                        },
                    },
                },
            }
            if "{name" in path:
                about["parameters"] = [
                    {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                ]
            if (body := BODIES.get(path) or FORMS.get(path)) is not None:
                schema = {"$ref": f"#/components/schemas/{body.__name__}"}
                kind_of_body = "multipart/form-data" if path in FORMS else "application/json"
                about["requestBody"] = {
                    "required": True,
                    "content": {kind_of_body: {"schema": schema}},
                }
            if keyed and path not in OPEN:
                about["security"] = [{"key": []}]
            entry[kind] = about
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": components()},
    }
    if root:
        document["servers"] = [{"url": root}]
    if keyed:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def page(document: dict[str, Any]) -> str:
    """The document as an HTML page."""
    parts = [
        f"<!doctype html><meta charset=utf-8><title>Quire</title><style>{STYLE}</style><h1>Quire {__version__}</h1>"
    ]
    schemas_ = document["components"]["schemas"]
    for path, entry in document["paths"].items():
        for kind, about in entry.items():
            parts.append(
                f"<h3><code>{kind.upper()} {path}</code></h3><p>{html.escape(about['summary'])}</p>"
            )
            if "requestBody" not in about:
                continue
            (content,) = about["requestBody"]["content"].values()
            ref = content["schema"]["$ref"]
            schema = schemas_[ref.rpartition("/")[2]]
            needed = schema.get("required", [])
            rows = [
                f"<tr><td><code>{name}</code><td>{html.escape(kind_of(field))}<td>{'needed' if name in needed else html.escape(json.dumps(field.get('default')))}"
                for name, field in schema["properties"].items()
            ]
            parts.append(
                f"<details><summary>fields</summary><table>{''.join(rows)}</table></details>"
            )
    return "\n".join(parts)


def kind_of(field: dict[str, Any]) -> str:
    """A field's type in a few words."""
    if "anyOf" in field:
        kinds = [kind_of(one) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    kind = str(field.get("type", "anything"))
    return f"list of {kind_of(field['items'])}" if kind == "array" and "items" in field else kind


def routes(rows: list[Row], keyed: bool, root: str = "") -> list[Row]:
    """The routes of the documentation, which is made at the first request."""
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(openapi(rows, keyed, root))
        return made

    async def openapi_json(request: Request) -> Response:
        """This document."""
        return json_response(document())

    async def docs(request: Request) -> Response:
        """This page."""
        return Response(page(document()), media_type="text/html")

    return [("GET", "/openapi.json", openapi_json), ("GET", "/docs", docs), ("GET", "/redoc", docs)]
