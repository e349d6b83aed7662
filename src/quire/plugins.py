"""Plugins: functions that installed packages offer by an entry point, and the registry of models they add to.

A plugin is a function without arguments, named in the group `quire.general_plugins`; it runs once in every process
of ours, before a model is chosen, and registers what it brings. Knows entry points. Does not know what a plugin does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any

from quire import env
from quire.errors import ConfigError
from quire.logging import get_logger

logger = get_logger(__name__)

GROUP = "quire.general_plugins"
FOREIGN_GROUP = "vllm.general_plugins"
"""Plugins of vLLM: run only when QUIRE_PLUGINS names them, since most reach into vLLM's insides."""

_MODELS = "quire.models.registry"  # above this room: found by name, when a plugin asks for it


class _Once:
    """Whether this process ran its plugins."""

    done = False


def load_plugins(*, again: bool = False) -> list[str]:
    """Run the plugins that are installed and allowed; their names. A second call does nothing.

    QUIRE_PLUGINS (or VLLM_PLUGINS) is a list of allowed names with commas between; unset: all of our own
    group; empty: none. A plugin that fails is logged and passed over, since the server may well do without it.
    """
    if _Once.done and not again:
        return []
    _Once.done = True
    text = env.get("PLUGINS")
    allowed = (
        None if text is None else {name.strip() for name in str(text).split(",") if name.strip()}
    )
    ran = []
    for point in entry_points_to_run(allowed):
        try:
            point.load()()
        except Exception:
            logger.exception("plugin %s (%s) failed and is passed over", point.name, point.value)
            continue
        logger.info("plugin %s (%s) loaded", point.name, point.value)
        ran.append(point.name)
    for name in sorted((allowed or set()) - installed()):
        logger.warning("plugin %s is named in QUIRE_PLUGINS and not installed", name)
    return ran


def installed() -> set[str]:
    """Names of all plugins that there are, of every kind (logits processors are not run here)."""
    points = importlib.metadata.entry_points()
    groups = [group for group in points.groups if group.startswith(("quire.", "vllm."))]
    return {point.name for group in groups for point in points.select(group=group)}


def entry_points_to_run(allowed: set[str] | None) -> Iterable[importlib.metadata.EntryPoint]:
    """Entry points to run: ours unless not allowed, vLLM's only if allowed by name."""
    for point in importlib.metadata.entry_points(group=GROUP):
        if allowed is None or point.name in allowed:
            yield point
    if allowed:
        for point in importlib.metadata.entry_points(group=FOREIGN_GROUP):
            if point.name in allowed:
                yield point


class _ModelRegistry:
    """`ModelRegistry.register_model("MyForCausalLM", "my_package.module:MyModel")`."""

    def register_model(self, architecture: str, model: str | type | Callable[..., Any]) -> None:
        """Serve checkpoints of this architecture with a class of yours.

        Args:
            architecture: as in the `architectures` of config.json.
            model: "module:Class", imported when it is needed, or the class.

        Raises:
            ConfigError: a class that another process could not import.
        """
        if not isinstance(model, str):
            if model.__module__ == "__main__" or "<" in model.__qualname__:
                raise ConfigError(
                    f"{model.__qualname__}: register a class of an importable module, as 'module:Class', so that"
                    " every process can find it"
                )
            model = f"{model.__module__}:{model.__qualname__}"
        importlib.import_module(_MODELS).register(architecture, model)

    def get_supported_archs(self) -> list[str]:
        """Architectures with a model of ours or of a plugin; others run by the code of Transformers."""
        return sorted(importlib.import_module(_MODELS).MODELS)


ModelRegistry = _ModelRegistry()
