"""Methods of vLLM's API that Quire does not support yet: each raises Unsupported with an alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from quire.config.unsupported import METHODS, refuse


class UnsupportedMethods:
    """Base class of `LLM` and `AsyncLLM`."""

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def method(*args: Any, **keywords: Any) -> NoReturn:
            refuse(f"{type(self).__name__}.{name}", METHODS[name])

        return method
