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
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from quire.compat.vllm_unsupported import IGNORED
from quire.config import unsupported

ROOT = "quire"
STANDS_IN = "quire.compat.vllm_shim"
"""Text that identifies Quire's own package `vllm`, in its __init__.py."""

LATER = "quire.compat.vllm_unsupported:"
PARSER = "quire.config.engine_args:ProgramParser"
NAMES: dict[str, dict[str, str]] = {
    "vllm": {},  # all public names of quire
    "vllm.sampling_params": {
        "SamplingParams": "quire:SamplingParams",
        "BeamSearchParams": "quire:BeamSearchParams",
        "RepetitionDetectionParams": "quire.protocol.sampling_params:RepetitionDetectionParams",
        "RequestOutputKind": "quire:RequestOutputKind",
        "StructuredOutputsParams": "quire:StructuredOutputsParams",
        "GuidedDecodingParams": "quire:StructuredOutputsParams",
    },
    "vllm.pooling_params": {"PoolingParams": "quire:PoolingParams"},
    "vllm.outputs": {
        name: f"quire:{name}"
        for name in (
            "RequestOutput",
            "CompletionOutput",
            *(name for name in unsupported.NAMES if name.endswith("Output")),
        )
    },
    "vllm.beam_search": {
        "BeamSearchOutput": "quire:BeamSearchOutput",
        "BeamSearchSequence": "quire:BeamSearchSequence",
    },
    "vllm.logprobs": {"Logprob": "quire:Logprob"},
    "vllm.sequence": {"Logprob": "quire:Logprob"},
    "vllm.inputs": {
        "TextPrompt": "quire:TextPrompt",
        "TokensPrompt": "quire:TokensPrompt",
        "EmbedsPrompt": "quire:EmbedsPrompt",
        "PromptType": "quire:PromptType",
    },
    "vllm.engine": {},
    "vllm.engine.arg_utils": {
        "EngineArgs": "quire:EngineArgs",
        "AsyncEngineArgs": "quire:AsyncEngineArgs",
    },
    "vllm.engine.llm_engine": {"LLMEngine": "quire:LLMEngine"},
    "vllm.engine.async_llm_engine": {"AsyncLLMEngine": "quire:AsyncLLM"},
    "vllm.entrypoints": {},
    "vllm.entrypoints.llm": {"LLM": "quire:LLM"},
    "vllm.entrypoints.openai": {},
    "vllm.entrypoints.openai.api_server": {},
    "vllm.entrypoints.openai.run_batch": {},
    "vllm.entrypoints.cli": {},
    "vllm.entrypoints.cli.main": {"main": "quire.cli.main:main"},
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.async_llm": {"AsyncLLM": "quire:AsyncLLM"},
    "vllm.v1.engine.llm_engine": {"LLMEngine": "quire:LLMEngine"},
    "vllm.v1.engine.exceptions": {"EngineDeadError": "quire.errors:EngineDeadError"},
    "vllm.v1.sample": {},
    "vllm.v1.sample.logits_processor": {
        name: f"quire.worker.sampling.vllm_processors:{name}"
        for name in (
            "LogitsProcessor",
            "AdapterLogitsProcessor",
            "BatchUpdate",
            "MoveDirectionality",
        )
    },
    "vllm.v1.sample.logits_processor.interface": {
        name: f"quire.worker.sampling.vllm_processors:{name}"
        for name in ("LogitsProcessor", "BatchUpdate", "MoveDirectionality")
    },
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": f"{LATER}LoRARequest"},
    "vllm.config": {
        name: f"{LATER}{name}"
        for name in (
            *IGNORED,
            "KVTransferConfig",
            "KVEventsConfig",
            "PoolerConfig",
            "SpeculativeConfig",
            "VllmConfig",
        )
    },
    "vllm.distributed": {"cleanup_dist_env_and_memory": f"{LATER}cleanup_dist_env_and_memory"},
    "vllm.model_executor": {},
    "vllm.model_executor.models": {"ModelRegistry": "quire:ModelRegistry"},
    "vllm.logger": {"init_logger": "quire.logging:get_logger"},
    "vllm.version": {
        "__version__": "quire:__version__",
        "__version_tuple__": "quire:__version_tuple__",
    },
    "vllm.utils": {"FlexibleArgumentParser": PARSER},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": PARSER},
}
"""vLLM module -> its names -> where Quire has them."""

RUN = {
    "vllm.entrypoints.openai.api_server": "serve",
    "vllm.entrypoints.openai.run_batch": "run-batch",
    "vllm.entrypoints.cli.main": "",
    "vllm.__main__": "",
}
"""Modules that users run with `python -m`: module -> subcommand of quire."""


def install_as_vllm() -> None:
    """Make `import vllm` find Quire, in this process. A second call does nothing.

    Raises:
        ImportError: vLLM itself is installed or imported.
    """
    if _installed():
        return
    spec = importlib.util.find_spec("vllm") if "vllm" not in sys.modules else None
    if "vllm" in sys.modules or (spec is not None and not _is_ours(spec.origin)):
        raise ImportError("vllm is installed: uninstall it, or import quire instead of vllm")
    sys.meta_path.insert(0, _Finder())


def stand_in() -> None:
    """Replace Quire's own package `vllm` by this file's modules; the package calls this when it is imported.

    Raises:
        ImportError: vLLM is installed too, so the two packages' files are mixed.
    """
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version:
        raise ImportError(
            f"vllm {version} and quire-as-vllm are both installed: uninstall both, then install the one you want"
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
    """Makes the modules in NAMES."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in NAMES or name in RUN:
            # A module for `python -m` must not be a package, or Python looks for its __main__.
            return importlib.machinery.ModuleSpec(name, self, is_package=name not in RUN)
        if name.startswith("vllm."):
            raise ModuleNotFoundError(
                f"{name}: Quire replaces vllm here and has no such module", name=name
            )
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name, f"{spec.name}, provided by Quire")

    def exec_module(self, module: ModuleType) -> None:
        """Names are resolved on access; `__file__` appears in the error "cannot import name"."""
        module.__file__ = __file__

    def is_package(self, name: str) -> bool:
        return name not in RUN

    def get_source(self, name: str) -> str:
        """The program for `python -m vllm.entrypoints.openai.api_server`; empty for other modules."""
        if name not in RUN:
            return ""
        words = [RUN[name]] if RUN[name] else []
        return (
            f"import sys\nfrom quire.cli.main import main\nsys.exit(main({words} + sys.argv[1:]))"
        )

    def get_code(self, name: str) -> CodeType:
        return compile(self.get_source(name), f"<{name}, provided by Quire>", "exec")


class _Module(ModuleType):
    """Resolves its names on access."""

    def __getattr__(self, name: str) -> Any:
        here = object.__getattribute__(self, "__name__")
        where = NAMES.get(here, {}).get(name)
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
                f"{here}.{name}: Quire replaces vllm here and has no such name"
            ) from None
        setattr(self, name, value)
        return value
