"""For programs written for vLLM: `install_as_vllm()` makes `import vllm` mean Quire, where vLLM is not installed.

    import quire; quire.install_as_vllm()
    from vllm import LLM, SamplingParams

or, for a program that shall not be touched: `python -m quire.compat program.py ARGUMENTS`. Only public names are
there; a name that Quire does not have is an ImportError that says so. Nothing happens unless asked for.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ROOT = "quire"
NAMES: dict[str, dict[str, str]] = {
    "vllm": {},  # all public names of quire
    "vllm.sampling_params": {
        "SamplingParams": "quire:SamplingParams",
        "BeamSearchParams": "quire:BeamSearchParams",
        "RequestOutputKind": "quire:RequestOutputKind",
        "StructuredOutputsParams": "quire:StructuredOutputsParams",
        "GuidedDecodingParams": "quire:StructuredOutputsParams",
    },
    "vllm.outputs": {
        "RequestOutput": "quire:RequestOutput",
        "CompletionOutput": "quire:CompletionOutput",
    },
    "vllm.inputs": {
        "TextPrompt": "quire:TextPrompt",
        "TokensPrompt": "quire:TokensPrompt",
        "PromptType": "quire:PromptType",
    },
    "vllm.engine": {},
    "vllm.engine.arg_utils": {
        "EngineArgs": "quire:EngineArgs",
        "AsyncEngineArgs": "quire:AsyncEngineArgs",
    },
    "vllm.engine.async_llm_engine": {"AsyncLLMEngine": "quire:AsyncLLM"},
    "vllm.entrypoints": {},
    "vllm.entrypoints.llm": {"LLM": "quire:LLM"},
    "vllm.entrypoints.openai": {},
    "vllm.entrypoints.openai.api_server": {},
    "vllm.entrypoints.cli": {},
    "vllm.entrypoints.cli.main": {"main": "quire.cli.main:main"},
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.async_llm": {"AsyncLLM": "quire:AsyncLLM"},
    "vllm.model_executor": {},
    "vllm.model_executor.models": {"ModelRegistry": "quire:ModelRegistry"},
    "vllm.logger": {"init_logger": "quire.logging:get_logger"},
    "vllm.version": {"__version__": "quire:__version__"},
    "vllm.utils": {"FlexibleArgumentParser": "argparse:ArgumentParser"},
}
"""Module of vLLM -> its names -> where they are here."""

RUN = {"vllm.entrypoints.openai.api_server": "serve", "vllm.entrypoints.cli.main": ""}
"""Modules that people run with `python -m`: module -> subcommand of quire."""


def install_as_vllm() -> None:
    """Make `import vllm` find Quire, in this process. A second call does nothing.

    Raises:
        ImportError: vLLM itself is installed or imported; two of them under one name would be a riddle.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        raise ImportError("vllm is installed here: uninstall it, or import quire by its own name")
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of NAMES."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name.startswith("vllm."):
            raise ModuleNotFoundError(
                f"{name}: Quire stands in for vllm here and has no such module", name=name
            )
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name, f"{spec.name}, played by Quire")

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class _Module(ModuleType):
    """Looks a name up when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        here = object.__getattribute__(self, "__name__")
        where = NAMES[here].get(name)
        try:
            if where is not None:
                module, _, attribute = where.partition(":")
                value = getattr(importlib.import_module(module), attribute)
            elif (here == "vllm" and not name.startswith("__")) or name in (
                "__version__",
                "__version_tuple__",
            ):
                value = getattr(importlib.import_module(ROOT), name)
            else:
                raise AttributeError(name)
        except AttributeError:
            raise AttributeError(
                f"{here}.{name}: Quire stands in for vllm here and has no such name"
            ) from None
        setattr(self, name, value)
        return value
