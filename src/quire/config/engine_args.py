"""EngineArgs: the engine's keywords as an object, for programs that parse their own command line."""

from __future__ import annotations

import argparse
from typing import Any, Self

from quire.config.engine import EngineConfig
from quire.config.flags import add_flags, loose
from quire.config.from_keywords import engine_config
from quire.config.options import Option, options
from quire.config.vllm_flags import OLD


class EngineArgs:
    """`EngineArgs(model=..., max_num_seqs=8)`: every field is an attribute; vLLM's and old names are accepted.

    Raises:
        TypeError, ConfigError, Unsupported: as `quire.config.from_keywords.engine_config`.
    """

    def __init__(self, model: str | None = None, **keywords: Any):
        if model is not None:
            keywords["model"] = model
        self._config = engine_config(keywords)
        for name, option in options().items():
            setattr(self, name, getattr(getattr(self._config, option.section), name))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add every engine flag to the program's own parser (not the server's, such as --host and --port)."""
        add_flags(parser, server=False)
        parser.set_defaults(**default_values(server=False))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Create from the result of that parser; names that are not Quire's belong to the program and are ignored."""
        return cls(**given_by(args, server=False))

    def create_engine_config(self) -> EngineConfig:
        """The configuration, with the current values of the attributes."""
        keywords = {
            name: getattr(self, name) for name, option in options().items() if _engines(option)
        }
        return engine_config(keywords)

    def __repr__(self) -> str:
        changed = {
            n: getattr(self, n) for n, o in options().items() if getattr(self, n) != o.default
        }
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in changed.items())})"


def default_values(*, server: bool) -> dict[str, Any]:
    """The defaults of the flags in a program's parser, with the server's flags only if `server`."""
    rows = {name: row.default for name, row in OLD.items() if name != "model_tag"}
    return rows | {name: o.default for name, o in options().items() if server or _engines(o)}


def given_by(args: argparse.Namespace, *, server: bool) -> dict[str, Any]:
    """The keywords that a program's command line changed, with the server's keywords only if `server`."""
    defaults = default_values(server=server)
    return {
        name: loose(value) if name in OLD else value
        for name, value in vars(args).items()
        if name == "model_tag" or (name in defaults and value != defaults[name])
    }


def _engines(option: Option) -> bool:
    return option.section != "server"


class AsyncEngineArgs(EngineArgs):
    """The same class under the name that programs with AsyncLLM use."""
