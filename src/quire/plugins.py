"""Plugins (entry points of installed packages), and the model registry that they extend.

A plugin is a function without arguments in the entry-point group `quire.general_plugins`. Each Quire process runs it
once, before a model is chosen; it registers what it adds. A function in the group `quire.platform_plugins` returns the
path of a device's class, `module:Class`, or None if this machine has no such device. The group `quire.features` names classes
of features (`engine/feature.py`). Knows entry points. Does not know
what a plugin does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any

from quire import env
from quire.errors import ConfigError
from quire.logging import get_logger

logger = get_logger(__name__)

GENERAL, PLATFORM, FEATURES = "general_plugins", "platform_plugins", "features"
"""Groups of entry points, after `quire.` or `vllm.`. vLLM's plugins run only when QUIRE_PLUGINS names them, since most
use vLLM's internals."""

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
    allowed = _allowed()
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


@functools.cache
def platform_plugins() -> dict[str, Any]:
    """The platforms of plugins whose device this machine has: name of the entry point -> class.

    The class has what `platforms/base.py` describes, and a static method `facts()` that returns `PlatformFacts`.
    """
    found: dict[str, Any] = {}
    for point in entry_points_to_run(_allowed(), PLATFORM):
        try:
            if (path := point.load()()) is None:
                continue
            module, _, name = str(path).replace(":", ".").rpartition(".")
            platform = getattr(importlib.import_module(module), name)
            if not callable(getattr(platform, "facts", None)):
                raise ConfigError(f"{path} is not a platform of Quire: it has no method facts()")
        except Exception:
            logger.exception("platform plugin %s failed and is ignored", point.name)
            continue
        found[point.name] = platform
    return found


def plugin_objects(group: str) -> list[tuple[str, Any]]:
    """Names and objects of the entry points of a group that may be loaded. One that cannot be loaded raises what it raises:
    requests might rely on it."""
    return [(point.name, point.load()) for point in entry_points_to_run(_allowed(), group)]


def _allowed() -> set[str] | None:
    """The names in QUIRE_PLUGINS; None: it is unset."""
    text = env.get("PLUGINS")
    return None if text is None else {name.strip() for name in str(text).split(",") if name.strip()}


def installed() -> set[str]:
    """Names of all installed plugins of every kind, logits processors too (which do not run here)."""
    points = importlib.metadata.entry_points()
    groups = [group for group in points.groups if group.startswith(("quire.", "vllm."))]
    return {point.name for group in groups for point in points.select(group=group)}


def entry_points_to_run(
    allowed: set[str] | None, group: str = GENERAL
) -> Iterable[importlib.metadata.EntryPoint]:
    """The entry points to run: Quire's group unless `allowed` excludes them, vLLM's only if `allowed` names them."""
    for owner in ("quire", "vllm"):
        for point in importlib.metadata.entry_points(group=f"{owner}.{group}"):
            if point.name in allowed if allowed is not None else owner == "quire":
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
