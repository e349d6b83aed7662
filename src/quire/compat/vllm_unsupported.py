"""Public names of vLLM that Quire does not support yet: they can be imported, but raise an error when used.

A program often imports more than it uses, so the import itself must not fail. Knows names and remedies only.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, NoReturn

from quire.config.unsupported import DEVICES, NAMES, refuse

IGNORED = ("CompilationConfig", "StructuredOutputsConfig", "AttentionConfig", "CUDAGraphMode")
"""Classes for settings that Quire ignores with a warning, or supports in part: objects keep their arguments."""


class _Later(type):
    """Makes access to class attributes fail with the same message as creating an object."""

    def __getattr__(cls, name: str) -> NoReturn:
        feature, remedy = NAMES[cls.__name__]
        raise AttributeError(
            f"{cls.__name__}.{name}: {cls.__name__} ({feature}) is not supported yet: {remedy}"
        )

    def __call__(cls, *values: Any, **keywords: Any) -> NoReturn:
        refuse(cls.__name__, NAMES[cls.__name__])


class Settings(SimpleNamespace):
    """Keeps its keyword arguments; the configuration field that gets the object interprets them."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Programs call this after `del llm`. Quire has no process groups here, so it only collects garbage."""
    gc.collect()


def initialize_ray_cluster(*values: Any, **keywords: Any) -> NoReturn:
    """Raises Unsupported: one device serves a model."""
    refuse("initialize_ray_cluster", ("Ray", DEVICES[1]))


def __getattr__(name: str) -> Any:
    """Make a class on first access."""
    if name in NAMES:
        feature, _ = NAMES[name]
        made: Any = _Later(
            name, (), {"__doc__": f"Not supported yet: {feature}.", "__module__": __name__}
        )
    elif name in IGNORED:
        made = type(name, (Settings,), {"__doc__": Settings.__doc__, "__module__": __name__})
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made
    return made
