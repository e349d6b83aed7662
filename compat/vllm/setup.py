"""Refuses to be built where vLLM is installed, so that `pip install` cannot put these files over its own."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from setuptools import setup

OURS = "quire.compat.vllm_shim"
"""Stands in our `vllm/__init__.py`, and in no other."""


def in_the_way(folders: Iterable[str | Path]) -> list[Path]:
    """What of vLLM lies in these folders of installed packages."""
    found: list[Path] = []
    for folder in map(Path, folders):
        package = folder / "vllm" / "__init__.py"
        if package.is_file() and OURS not in package.read_text(encoding="utf-8", errors="replace"):
            found.append(package.parent)
        found += sorted(folder.glob("vllm-*.dist-info"))  # also where it is installed for editing
    return found


def folders() -> list[str]:
    """Where pip installs to. A build in isolation hides them from imports, but not from the eye."""
    return sorted(
        {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    )


if __name__ == "__main__":
    if there := in_the_way(folders()):
        sys.exit(
            "quire-as-vllm: vLLM is installed here ("
            + ", ".join(map(str, there))
            + "), and this package would be"
            " written over it. Uninstall vllm first, or leave both as they are and run your program with"
            " `python -m quire.compat program.py`."
        )
    setup()
