"""`--print-config`: the configuration as a file that `--config` reads. Knows YAML and which values are secrets."""

from __future__ import annotations

import json
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.options import options

SECRETS = frozenset({"api_key", "hf_token", "kv_remote_url"})


def as_yaml(config: EngineConfig) -> str:
    """Every value that is not the default, one on a line; JSON is YAML. Secrets and functions are comments."""
    lines = ["# quire serve --config FILE.yaml"]
    for name, option in options().items():
        value = getattr(getattr(config, option.section), name)
        if value == option.default:
            continue
        key = name.replace("_", "-")
        if name in SECRETS:
            lines.append(f"# {key}: given, and not printed")
        elif (text := _written(value)) is None:
            lines.append(f"# {key}: {type(value).__name__}, which a file cannot hold")
        else:
            lines.append(f"{key}: {text}")
    return "\n".join(lines) + "\n"


def _written(value: Any) -> str | None:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return None
