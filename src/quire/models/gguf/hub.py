"""GGUF models of the hub, as users of llama.cpp and Ollama name them. Knows names only.

owner/repository:Q4_K_M    owner/repository/file.gguf    hf.co/owner/repository:Q4_K_M    owner/repository (the default)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.errors import ModelNotFound
from quire.models.gguf.header import SPLIT
from quire.models.gguf.projector import PROJECTOR

NAME = re.compile(
    r"^(?:hf\.co/|huggingface\.co/)?(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+)|/((?:[\w.-]+/)*[\w.-]+\.gguf))$"
)
PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")
"""Quantizations to take if the name has none, in this order."""


def gguf_name(name: str) -> tuple[str, str] | None:
    """The repository, and the file or quantization in it, if a name is of one of these forms."""
    if (match := NAME.match(name)) is None:
        return None
    return match[1], match[2] or match[3]


def choose(files: Sequence[str], repository: str, selection: str) -> list[str]:
    """The files of a model among a repository's files: a file, or all parts of it.

    Raises:
        ModelNotFound: none fits; the message lists what there is.
    """
    models = [f for f in sorted(files) if f.endswith(".gguf") and PROJECTOR not in f.lower()]
    for each in [selection] if selection else [*PREFERRED, ""]:
        if each.endswith(".gguf"):
            found = [f for f in models if f == each]
        else:
            label = re.compile(rf"(?:^|[-._/]){re.escape(each)}(?=[-./])", re.IGNORECASE)
            found = [f for f in models if label.search(f)]
        if found:
            first, match = found[0], SPLIT.match(found[0])
            return (
                [first]
                if match is None
                else [f for f in models if f.startswith(match[1] + "-") and SPLIT.match(f)]
            )
    some = ", ".join(models[:12]) or "no GGUF files"
    what = f" {selection}" if selection else ""
    raise ModelNotFound(f"{repository} has no GGUF file{what}; it has {some}")


def projector_of(files: Sequence[str]) -> str | None:
    """The vision tower among a repository's files: in 16 bits, if there are several; None: there is none."""
    found = [f for f in sorted(files) if f.endswith(".gguf") and PROJECTOR in f.lower()]
    halves = [f for label in ("bf16", "f16") for f in found if label in f.lower()]
    return next(iter(halves or found), None)
