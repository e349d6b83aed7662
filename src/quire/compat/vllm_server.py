"""vLLM's functions that start a server in a program, and the request bodies that a server takes."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec

from quire.api.async_llm import AsyncLLM
from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs, default_values, given_by
from quire.config.flags import add_flags
from quire.config.from_keywords import engine_config
from quire.errors import Unsupported
from quire.server import schemas
from quire.server.process.launch import serve_in_loop


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of `quire serve` to a program's parser, with their defaults."""
    parser.add_argument("model_tag", nargs="?")
    add_flags(parser)
    parser.set_defaults(**default_values(server=True))
    return parser


def server_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration of a server, from the result of `make_arg_parser(...).parse_args()`.

    Raises:
        ConfigError, Unsupported: as `quire.config.from_keywords.engine_config`.
    """
    model = {"model": args.model_tag} if getattr(args, "model_tag", None) else {}
    return engine_config({**given_by(args, server=True), **model}, "flag")


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Raises ConfigError, Unsupported: as `server_config`."""
    server_config(args)


async def run_server(args: argparse.Namespace, **uvicorn_kwargs: Any) -> None:
    """Serve until a stop signal, in the running event loop.

    Raises:
        ConfigError: the options are invalid.
        Unsupported: options of uvicorn.
        SystemExit: the server could not start, or its engine died.
    """
    if uvicorn_kwargs:
        raise Unsupported(
            f"run_server({', '.join(uvicorn_kwargs)}=...)", "use the flags of quire serve"
        )
    if code := await serve_in_loop(server_config(args)):
        raise SystemExit(code)


@asynccontextmanager
async def build_async_engine_client(
    args: argparse.Namespace, **ignored: Any
) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM for the engine's flags, shut down at the end."""
    engine_args = EngineArgs.from_cli_args(args)
    async with build_async_engine_client_from_engine_args(engine_args) as engine:
        yield engine


@asynccontextmanager
async def build_async_engine_client_from_engine_args(
    engine_args: EngineArgs, **ignored: Any
) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM, shut down at the end."""
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        yield engine
    finally:
        engine.shutdown()


class _Body(msgspec.Struct):
    """Methods of pydantic that programs call on requests."""

    def model_dump(self, **how: Any) -> dict[str, Any]:
        """The fields as a dict; `exclude_none`, `exclude_unset` or `exclude_defaults`: without those at their default."""
        if any(how.get(f"exclude_{what}") for what in ("none", "unset", "defaults")):
            return dict(msgspec.to_builtins(self))
        return msgspec.structs.asdict(self)

    def model_dump_json(self, **how: Any) -> str:
        return msgspec.json.encode(self.model_dump(**how)).decode()

    @classmethod
    def model_validate(cls, fields: Any) -> Self:
        """Raises msgspec.ValidationError: a field has the wrong type."""
        return msgspec.convert(fields, cls)


class ChatBody(schemas.ChatRequest, _Body, kw_only=True, omit_defaults=True):
    """The body of /v1/chat/completions."""


class CompletionBody(schemas.CompletionRequest, _Body, kw_only=True, omit_defaults=True):
    """The body of /v1/completions."""


class ResponsesBody(schemas.ResponsesRequest, _Body, kw_only=True, omit_defaults=True):
    """The body of /v1/responses."""
