"""Plugins (entry points of installed packages), and the model registry that they extend.

A plugin is a function without arguments in the entry-point group `quire.general_plugins`. Each Quire process runs it
once, before a model is chosen; it registers what it adds. Knows entry points. Does not know what a plugin does.
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
"""vLLM's plugins. They run only when QUIRE_PLUGINS names them, since most use vLLM's internals."""

# a higher layer, so it is imported by name, when a plugin needs it
_MODELS = "quire.models.registry"


class _Once:
    """Whether this process has run its plugins."""

    done = False


def load_plugins(*, again: bool = False) -> list[str]:
    """Run the installed and allowed plugins, and return their names. A second call does nothing.

    QUIRE_PLUGINS (or VLLM_PLUGINS) lists the allowed names, separated by commas. Unset: all of Quire's group; empty:
    none. If a plugin fails, it is logged and skipped, since the server can often work without it.
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
            logger.exception("plugin %s (%s) failed and is ignored", point.name, point.value)
            continue
        logger.info("plugin %s (%s) loaded", point.name, point.value)
        ran.append(point.name)
    for name in sorted((allowed or set()) - installed()):
        logger.warning("plugin %s is named in QUIRE_PLUGINS but not installed", name)
    return ran


def installed() -> set[str]:
    """Names of all installed plugins of every kind, logits processors too (which do not run here)."""
    points = importlib.metadata.entry_points()
    groups = [group for group in points.groups if group.startswith(("quire.", "vllm."))]
    return {point.name for group in groups for point in points.select(group=group)}


def entry_points_to_run(allowed: set[str] | None) -> Iterable[importlib.metadata.EntryPoint]:
    """The entry points to run: Quire's group unless `allowed` excludes them, vLLM's only if `allowed` names them."""
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
        """Serve checkpoints of this architecture with your own model class.

        Args:
            architecture: as in the `architectures` of config.json.
            model: the class, or "module:Class", which is imported when it is needed.

        Raises:
            ConfigError: another process could not import the class.
        """
        if not isinstance(model, str):
            if model.__module__ == "__main__" or "<" in model.__qualname__:
                raise ConfigError(
                    f"{model.__qualname__}: register a class of an importable module as 'module:Class', so that every"
                    " process can import it"
                )
            model = f"{model.__module__}:{model.__qualname__}"
        importlib.import_module(_MODELS).register(architecture, model)

    def get_supported_archs(self) -> list[str]:
        """Architectures with a native or a plugin's model; all others use the Transformers backend."""
        return sorted(importlib.import_module(_MODELS).MODELS)


ModelRegistry = _ModelRegistry()
