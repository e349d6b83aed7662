"""docs/security.md says what the code holds: each limit of its tables is the constant's, the variable's or the option's."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from quire import env
from quire.config.engine import EngineConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<limit>[\d,.]+(?: [KMG]iB)?) \| (?P<names>[^|]+) \| [^|]+ \|$", re.M)  # fmt: skip


def number(text: str) -> float:
    count, _, unit = text.replace(",", "").partition(" ")
    return float(count) * UNITS.get(unit, 1)


def option(name: str) -> Any:
    """The default of a flag; None: it has none of its own."""
    for group in dataclasses.fields(EngineConfig):
        held = getattr(EngineConfig(), group.name)
        if dataclasses.is_dataclass(held) and hasattr(held, name):
            return getattr(held, name)
    raise KeyError(name)


def value(name: str) -> Any:
    """What the code holds under a name of the page."""
    if name.startswith("--"):
        return option(name[2:].replace("-", "_"))
    if name.startswith("QUIRE_"):
        return env.VARIABLES[name.removeprefix("QUIRE_")].default
    module, _, constant = name.rpartition(".")
    return getattr(importlib.import_module(module), constant)


def rows(text: str) -> list[tuple[str, float, list[str]]]:
    found = ROW.finditer(text)
    return [(row["what"], number(row["limit"]), re.findall(r"`([^`]+)`", row["names"])) for row in found]  # fmt: skip


def wrong(text: str) -> list[str]:
    """Rows whose limit is not what the code holds."""
    found = []
    for what, limit, names in rows(text):
        held = [number for name in names if (number := value(name)) is not None]
        if not held or any(float(one) != limit for one in held):
            found.append(f"{what}: the page says {limit:g}, the code {held} ({', '.join(names)})")
    return found


def test_documented_limits_equal_the_codes():
    text = PAGE.read_text(encoding="utf-8")
    assert len(rows(text)) > 30
    assert wrong(text) == []


def test_a_changed_limit_is_detected():
    row = "| tools | 1,000 | `QUIRE_MAX_TOOLS` | 400 |"
    assert "the page says 1000, the code [1024]" in wrong(row)[0]
    assert wrong(row.replace("1,000", "1,024")) == []
    with pytest.raises(AttributeError):
        wrong("| tools | 1 | `quire.server.process.sockets.NOT_THERE` | 400 |")


def test_no_limit_is_missing():
    """Options and variables by their names; constants by those modules that hold requests back."""
    text = PAGE.read_text(encoding="utf-8")
    named = {name for _, _, names in rows(text) for name in names}
    variables = {f"QUIRE_{name}" for name, value in env.VARIABLES.items() if name.startswith("MAX_") and not value.no_effect}  # fmt: skip
    options = {"--max-body-bytes", "--max-completions", "--max-num-queued-reqs", "--max-num-queued-tokens", "--max-answer-entries", "--receive-timeout", "--send-timeout"}  # fmt: skip
    assert (variables | options | constants()) - named == NOT_OF_REQUESTS


PACKAGES = ("server", "protocol", "features/structured")
CONSTANT = re.compile(r"^((?:MAX|MOST)_[A-Z_]+)(?:: \w+)? = \(?\s*[\d(]", re.M)
NOT_OF_REQUESTS = {
    "quire.server.process.accept.MAX_ACCEPTS",  # in one turn of the loop
    "quire.server.request_body.MOST_NAME",  # how an unknown field is compared
    "quire.server.media.MOST_ENTRIES",  # where media are looked for; the routes limit the lists
    "quire.protocol.validators.MAX_BIAS",  # a range, not a size
    "quire.features.structured.grammar.MAX_TOLD",  # a message is cut
    "quire.features.structured.masks.MAX_DEATHS",
    "quire.features.structured.cost.MAX_GROUPS",  # below what MAX_NESTED takes
    # Caches and messages of our own processes:
    "quire.features.structured.check_process.MAX_CACHED",
    "quire.features.structured.check_process.MAX_PROCESSES",
    "quire.features.structured.compiler.MAX_CACHED_ERRORS",
    "quire.protocol.tensor_data.MAX_BYTES",
    "quire.protocol.tensor_data.MAX_DIMENSIONS",
}
"""Constants of these packages that are no limit of what a client may ask for."""


def constants() -> set[str]:
    """Full names of the constants MAX_... and MOST_... where requests are held to limits."""
    found = set()
    for package in PACKAGES:
        folder = ROOT / "src" / "quire" / package
        for file in folder.rglob("*.py"):
            module = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
            found |= {f"{module}.{name}" for name in CONSTANT.findall(file.read_text(encoding="utf-8"))}  # fmt: skip
    return found


def test_the_page_is_linked_from_the_main_pages():
    for page in ("docs/index.md", "README.md", "docs/serving.md", "SECURITY.md"):
        assert "security.md" in (ROOT / page).read_text(encoding="utf-8"), page
