"""Refuses to be built where vLLM is installed, so that `pip install` cannot replace it."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from setuptools import setup

OURS = "quire.compat.vllm_shim"
"""Text in our `vllm/__init__.py`, and in no other."""


def in_the_way(folders: Iterable[str | Path]) -> list[Path]:
    """Files of vLLM in these folders of installed packages."""
    found: list[Path] = []
    for folder in map(Path, folders):
        package = folder / "vllm" / "__init__.py"
        if package.is_file() and OURS not in package.read_text(encoding="utf-8", errors="replace"):
            found.append(package.parent)
        found += sorted(  # also of an editable install
            path for path in folder.glob("vllm-*.dist-info") if "+quire" not in path.name
        )
    return found


def folders() -> list[str]:
    """Where pip installs to. A build in isolation hides them from imports, but their files are there."""
    return sorted(
        {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    )


if __name__ == "__main__":
    if there := in_the_way(folders()):
        sys.exit(
            f"vLLM is installed here ({', '.join(map(str, there))}), and this package would replace it. Uninstall vllm"
            " first, or leave it and run your program with `python -m quire.compat program.py`."
        )
    setup()
