"""EngineArgs: the keywords as an object, for programs that build engines from a parsed command line."""

from __future__ import annotations

import argparse
from typing import Any, Self

from quire.config.compat import engine_config
from quire.config.engine import EngineConfig
from quire.config.flags import add_flags
from quire.config.old_names import OLD
from quire.config.options import options


class EngineArgs:
    """`EngineArgs(model=..., max_num_seqs=8)`: every field is an attribute; historic names are understood.

    Raises:
        TypeError, ConfigError, Unsupported: as `quire.config.compat.engine_config`.
    """

    def __init__(self, model: str | None = None, **keywords: Any):
        if model is not None:
            keywords["model"] = model
        self._config = engine_config(keywords)
        for name, option in options().items():
            setattr(self, name, getattr(getattr(self._config, option.section), name))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Put every flag onto a parser of the program's own."""
        add_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From what that parser parsed; names that are not ours are the program's and left alone."""
        known = options()
        return cls(
            **{
                name: value
                for name, value in vars(args).items()
                if (name in known and known[name].section != "server") or name in OLD
            }
        )

    def create_engine_config(self) -> EngineConfig:
        """The configuration, with attributes that were set since taken in."""
        asked = {
            name: getattr(self, name)
            for name, option in options().items()
            if option.section != "server"
        }
        return engine_config(asked)

    def __repr__(self) -> str:
        changed = {
            n: getattr(self, n) for n, o in options().items() if getattr(self, n) != o.default
        }
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in changed.items())})"


class AsyncEngineArgs(EngineArgs):
    """The same, by the name that programs with AsyncLLM use."""
