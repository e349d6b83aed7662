"""Writes the table of docs/vllm.md from the names of the shim (src/quire/compat/vllm_names.toml).

python -m tools.list_vllm_names            rewrite the page's table
python -m tools.list_vllm_names --check    exit with 1 if it is not what this would write
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator

from quire import PUBLIC
from quire.compat.vllm_shim import TABLE, vllm_modules
from quire.compat.vllm_unsupported import feature_of
from tools.generated_tables import DOCS, main

PAGE = DOCS / "vllm.md"


def rows() -> Iterator[str]:
    """A row for each module that has names or a command."""
    yield "| module | names | raise an error when used |"
    yield "|---|---|---|"
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    for name, module in vllm_modules().items():
        same = table[name].get("same")
        hidden = vllm_modules()[same].names if same else {}
        works = [n for n in module.names if n not in module.features and n not in hidden]
        later = [n for n in module.features if n not in hidden]
        if module.every == "quire":
            works += [n for n in PUBLIC if feature_of(n) is None]
            later += [n for n in PUBLIC if feature_of(n) is not None]
        said = [f"as `{same}`"] if same else []
        if module.run is not None:
            said.append(f"runs `{' '.join(['quire', *module.run.split()])}`")
        if module.every == "quire.compat.vllm_envs":
            said.append("every variable of [the table](options.md), `is_set`")
        said += [f"`{word}`" for word in works]
        if said or later:
            yield f"| `{name}` | {', '.join(said)} | {_later(later)} |"


def _later(names: list[str]) -> str:
    features: dict[str, list[str]] = {}
    for name in names:
        feature = feature_of(name)
        features.setdefault(feature[0] if feature else "", []).append(f"`{name}`")
    return "; ".join(f"{feature}: {', '.join(words)}" for feature, words in features.items())


TABLES = {"names": rows}


if __name__ == "__main__":
    sys.exit(main(__doc__, {PAGE: TABLES}))
