"""Parser plugins: a file with `register(registry)` or with classes for vLLM, or an entry point of the group `quire.parsers`.

Knows how to load them. Does not know the formats that they add.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from quire.errors import ConfigError
from quire.frontend.parsers.format_registry import FormatRegistry
from quire.frontend.parsers.parser_classes import ReasoningParserManager, ToolParserManager

GROUP = "quire.parsers"
REMEDY = (
    "define register(registry) with registry.add_tools(NAME, FORMAT) or registry.add_reasoning(NAME, REASONING), or register"
    " a class with vLLM's ToolParserManager or ReasoningParserManager; docs/tools.md has examples"
)


def registry(files: Iterable[str] = ()) -> FormatRegistry:
    """The registry with the built-in formats and all plugins' formats.

    Raises:
        ConfigError: a plugin does not exist, has no `register`, or fails.
    """
    registry = FormatRegistry()
    for point in entry_points(group=GROUP):
        try:
            point.load()(registry)
        except Exception as error:
            raise ConfigError(f"the plugin {point.value} of {GROUP} failed: {error!r}") from error
    for file in dict.fromkeys(files):
        _from_file(file, registry)
    return registry


def _from_file(file: str, registry: FormatRegistry) -> None:
    path = Path(file).expanduser()
    spec = importlib.util.spec_from_file_location(f"quire_parsers_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"the parser plugin {file!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = _registered()
    try:
        if "vllm" in path.read_text(encoding="utf-8"):
            _let_vllm_mean_quire()
        spec.loader.exec_module(module)
        registered = _registered() - before
        register = getattr(module, "register", None)
        if callable(register):
            register(registry)
        elif not registered:
            raise ConfigError(f"the parser plugin {file!r} registers nothing: {REMEDY}")
        for manager, name, _ in registered:
            _classes_of(registry, manager)[name] = _class(manager, name, module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the parser plugin {file!r} failed: {error!r}") from error


def _let_vllm_mean_quire() -> None:
    """`import vllm` finds Quire from now on. Raises ImportError: vLLM is installed, whose managers Quire cannot see."""
    importlib.import_module("quire.compat.vllm_shim").install_as_vllm()


Manager = type[ToolParserManager] | type[ReasoningParserManager]


def _registered() -> set[tuple[Manager, str, int]]:
    """The classes that programs have registered: manager, name, and what tells two of one name apart."""
    managers: tuple[Manager, ...] = (ToolParserManager, ReasoningParserManager)
    return {
        (manager, name, id(what))
        for manager in managers
        for name, what in (*manager.own.items(), *manager.lazy.items())
    }


def _classes_of(registry: FormatRegistry, manager: Manager) -> dict[str, type]:
    return registry.tool_classes if manager is ToolParserManager else registry.reasoning_classes


def _class(manager: Manager, name: str, module: ModuleType) -> type:
    """A class that the plug-in has registered. One that it registers by the name of a module may be in its own file.

    Raises:
        ImportError, AttributeError: there is no such class. TypeError: it is no parser.
    """
    if name in manager.lazy and name not in manager.own:
        inside = getattr(module, manager.lazy[name][1], None)
        if inside is not None:
            manager.register_module(name, module=inside)
    if issubclass(manager, ToolParserManager):
        return manager.get_tool_parser(name)
    return manager.get_reasoning_parser(name)
