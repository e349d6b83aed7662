"""The vLLM shim: makes `import vllm` mean Quire, if vLLM is not installed.

    import quire; quire.install_as_vllm()
    from vllm import LLM, SamplingParams

To run a program without changing it: `python -m quire.compat program.py ARGUMENTS`, or install the distribution in
`compat/vllm/`, whose package and command `vllm` use this file. It provides public names only; for a name that Quire
does not have, it raises an ImportError that says so. Importing this file changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from quire import env

STANDS_IN = "quire.compat.vllm_shim"
"""Text that identifies Quire's own package `vllm`, in its __init__.py."""

VERSION = "0.32.0+quire"
"""vLLM's version whose API Quire offers; the local part says that this is not vLLM."""
VERSION_TUPLE = (0, 32, 0, "quire")
TABLE = Path(__file__).with_name("vllm_names.toml")
UNSUPPORTED = "quire.compat.vllm_unsupported"


@dataclass(frozen=True, slots=True)
class VllmModule:
    """One module of vLLM, as the shim makes it."""

    names: dict[str, str]
    """Name -> "module:attribute" of Quire."""
    features: dict[str, str]
    """Names that only raise an error -> the feature that Quire lacks."""
    every: str | None
    """A module of Quire: this module has all its names."""
    run: str | None
    """The command that `python -m` of this module runs."""


@cache
def vllm_modules() -> dict[str, VllmModule]:
    """The table of names, read from `vllm_names.toml`."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: _module_of(table, name) for name in table}


def _module_of(table: dict[str, dict[str, Any]], name: str) -> VllmModule:
    row = dict(table[name])
    every, run, same, later = (row.pop(key, None) for key in ("every", "run", "same", "later"))
    other = _module_of(table, same) if same else VllmModule({}, {}, None, None)
    names, features = dict(other.names), dict(other.features)
    for feature, words in (later or {}).items():
        features |= dict.fromkeys(words.split(), feature)
    names |= {word: f"{UNSUPPORTED}:{word}" for word in features}
    for place, words in row.items():
        for word in words.split():
            theirs, _, ours = word.partition("=")
            names[theirs] = f"{place}:{ours or theirs}"
    return VllmModule(names, features, every, run)


def install_as_vllm() -> None:
    """Make `import vllm` find Quire, in this process and those that it starts. A second call does nothing.

    Raises:
        ImportError: vLLM itself is installed or imported.
    """
    if _installed():
        return
    spec = importlib.util.find_spec("vllm") if "vllm" not in sys.modules else None
    if "vllm" in sys.modules or (spec is not None and not _is_ours(spec.origin)):
        raise ImportError("vllm is installed: uninstall it, or import quire instead of vllm")
    sys.meta_path.insert(0, _Finder())
    paths = [str(TABLE.with_name("package")), env.outer("PYTHONPATH") or ""]
    env.set_outer("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def stand_in() -> None:
    """Replace Quire's own package `vllm` by this file's modules; the package calls this when it is imported.

    Raises:
        ImportError: vLLM is installed too, so the two packages' files are mixed.
    """
    found = (one.version for one in importlib.metadata.distributions(name="vllm"))
    if version := next((one for one in found if one != VERSION), None):
        raise ImportError(
            f"vllm {version} and Quire's package vllm are both installed: uninstall both, then install the one you want"
        )
    if not _installed():
        sys.meta_path.insert(0, _Finder())
    finder = next(finder for finder in sys.meta_path if isinstance(finder, _Finder))
    spec = finder.find_spec("vllm", None)
    if spec is None:
        raise ImportError("vllm is missing from the table of names")
    sys.modules["vllm"] = importlib.util.module_from_spec(spec)
    finder.exec_module(sys.modules["vllm"])


def _installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _is_ours(origin: str | None) -> bool:
    try:
        return origin is not None and STANDS_IN in Path(origin).read_text(encoding="utf-8")
    except OSError:
        return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Makes the modules of the table, and the metadata of a distribution `vllm`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in vllm_modules():
            return importlib.machinery.ModuleSpec(name, self, is_package=self.is_package(name))
        if name.startswith("vllm."):
            raise ModuleNotFoundError(
                f"{name}: Quire replaces vllm here and has no such module", name=name
            )
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterable[importlib.metadata.Distribution]:
        """For `importlib.metadata.version("vllm")`, where no distribution of this name is installed."""
        if context.name in (None, "vllm"):
            yield _Metadata()

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name, f"{spec.name}, provided by Quire")

    def exec_module(self, module: ModuleType) -> None:
        """Names are resolved on access; `__file__` appears in the error "cannot import name"."""
        module.__file__ = __file__

    def is_package(self, name: str) -> bool:
        """A module for `python -m` must not be a package, or Python looks for its __main__."""
        return vllm_modules()[name].run is None

    def get_source(self, name: str) -> str:
        """The program for `python -m vllm.entrypoints.openai.api_server`; empty for other modules."""
        run = vllm_modules()[name].run
        if run is None:
            return ""
        return f"import sys\nfrom quire.cli.main import main\nsys.exit(main({run.split()} + sys.argv[1:]))"

    def get_code(self, name: str) -> CodeType:
        return compile(self.get_source(name), f"<{name}, provided by Quire>", "exec")


class _Metadata(importlib.metadata.Distribution):
    """The metadata of a distribution that has no files."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\nSummary: Quire's names of vLLM\n"

    def locate_file(self, path: Any) -> Any:
        return Path(path)


class _Module(ModuleType):
    """Resolves its names on access."""

    def __getattr__(self, name: str) -> Any:
        here = object.__getattribute__(self, "__name__")
        row = vllm_modules()[here]
        where = row.names.get(name)
        if where is None and row.every is not None and not name.startswith("__"):
            where = f"{row.every}:{name}"
        try:
            if where is None:
                raise AttributeError(name)
            module, _, attribute = where.partition(":")
            value = getattr(importlib.import_module(module), attribute)
        except AttributeError:
            raise AttributeError(
                f"{here}.{name}: Quire replaces vllm here and has no such name"
            ) from None
        if name in row.names:
            setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        row = vllm_modules()[object.__getattribute__(self, "__name__")]
        more = dir(importlib.import_module(row.every)) if row.every is not None else []
        return sorted({*super().__dir__(), *row.names, *more})
