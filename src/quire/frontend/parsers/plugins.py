"""Parser plugins: a file with `register(registry)`, or an entry point of the group `quire.parsers`.

Knows how to load them. Does not know the formats that they add.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from quire.errors import ConfigError
from quire.frontend.parsers.format_registry import FormatRegistry

GROUP = "quire.parsers"
REMEDY = (
    "formats are tables, not classes: define register(registry) with registry.add_tools(NAME, FORMAT) or"
    " registry.add_reasoning(NAME, REASONING); docs/tools.md has an example"
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
    try:
        spec.loader.exec_module(module)
        register = getattr(module, "register", None)
        if not callable(register):
            raise ConfigError(f"the parser plugin {file!r} has no function register(registry): {REMEDY}")  # fmt: skip
        register(registry)
    except ConfigError:
        raise
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise ConfigError(f"the parser plugin {file!r} failed: {error!r}") from error
        raise ConfigError(f"the parser plugin {file!r} is written for vLLM: {REMEDY}") from error
    except Exception as error:
        raise ConfigError(f"the parser plugin {file!r} failed: {error!r}") from error
