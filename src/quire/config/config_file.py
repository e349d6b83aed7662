"""The YAML file of `--config`: its keys, values and lines. Does not know which keys are flags (`flags.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import ConfigError


def read_yaml(path: str) -> dict[str, tuple[Any, str]]:
    """Each key's value, and where it is: "FILE, line N".

    Raises:
        ConfigError: the file is missing, not YAML or not a mapping; names file and line.
    """
    import yaml  # takes 15 ms, and most command lines do not need it

    if not path.endswith((".yaml", ".yml")):
        raise ConfigError(f"--config {path}: the file name must end in .yaml or .yml")
    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as why:
        raise ConfigError(f"--config {path}{_described(why)}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as why:
        raise ConfigError(f"--config {path}: {why}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(
            f"--config {path}: the file must map flags to values, such as `max-num-seqs: 8`"
        )
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in getattr(node, "value", ())}
    return {
        str(key): (value, f"{path}, line {lines.get(str(key), '?')}")
        for key, value in (content or {}).items()
    }


def _described(why: Any) -> str:
    """A YAML error's line and problem, without the surrounding text."""
    mark = why.problem_mark or why.context_mark
    where = f" that begins in line {why.context_mark.line + 1}" if why.context_mark else ""
    message = ", ".join(part for part in (why.context and why.context + where, why.problem) if part)
    return f": {message}" if mark is None else f", line {mark.line + 1}: {message}"
