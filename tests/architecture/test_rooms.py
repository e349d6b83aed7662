"""The packages that must load without torch do so: each is imported in turn, in one fresh interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from source_rules import SOURCE, source_files

# More than source_rules.NEVER_TORCH: these may import torch in a function, but not when they load.
TORCH_FREE = re.compile(
    r"quire/(protocol|config|kvcache|kvstore|scheduler|engine|server|observe|frontend|api|cli|compat)/"
    r"|quire/executor/(__init__|base|inline|process)\.py|quire/models/(hf_config|registry|__init__)\.py"
    r"|quire/platforms/detect\.py|quire/worker/(build|memory_plan)\.py"
    r"|quire/(__init__|env|errors|logging|plugins|forward_context)\.py"
)
HEAVY = ("torch", "transformers", "tensorflow", "pandas")
LOAD_EACH = """
import importlib, sys
heavy = sys.argv[1].split(",")
for name in sys.argv[2:]:
    importlib.import_module(name)
    found = [package for package in heavy if package in sys.modules]
    if found:
        sys.exit(f"{name} loads {', '.join(found)}")
"""


def load_each(modules: list[str], path: Path = SOURCE) -> str:
    """The error of importing the modules in turn; "" if there is none."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD_EACH, ",".join(HEAVY), *modules],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stderr.strip() if done.returncode else ""


def torch_free_modules() -> list[str]:
    paths = [file.path for file in source_files() if TORCH_FREE.match(file.path)]
    return [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]


def test_torch_free_rooms_load_without_torch():
    assert not load_each(torch_free_modules())


def test_the_check_sees_torch(tmp_path):
    (tmp_path / "torch.py").write_text("")  # the real one takes seconds
    (tmp_path / "innocent.py").write_text("import torch")
    assert load_each(["json"], tmp_path) == ""
    assert load_each(["json", "innocent"], tmp_path) == "innocent loads torch"


def test_the_list_is_not_empty():
    modules = torch_free_modules()
    assert {"quire.scheduler.scheduler", "quire.engine.core", "quire.server"} <= set(modules)
