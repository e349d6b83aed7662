"""Programs written for vLLM: through the switch, the runner, and the distribution in compat/vllm.

Each in a process of its own, since the name `vllm` is taken for good in the one that asks.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.compat.vllm_shim import NAMES, RUN

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = ROOT / "compat" / "vllm"

PROGRAM = """
import sys
from vllm import LLM, SamplingParams, AsyncLLMEngine, PoolingParams
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind
from vllm.lora.request import LoRARequest
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs
import vllm, vllm.version, vllm.utils, quire

print(LLM is quire.LLM, SamplingParams is quire.SamplingParams, vllm.__version__ == quire.__version__)
print(vllm.version.__version__ == quire.__version__, CompilationConfig(level=3).level, sys.argv[1:])
for broken in ("from vllm import Nonsense", "import vllm.nonsense", "from vllm.config import Nonsense"):
    try:
        exec(broken)
    except ImportError as why:
        print(why)
try:
    LoRARequest("a", 1, "/p")
except NotImplementedError as why:
    print(why)
"""


def run(*words: str, path: tuple[Path, ...] = (), check: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", *path)))},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def agreed(said: str) -> None:
    lines = said.splitlines()
    assert lines[:2] == ["True True True", "True 3 ['--x']"]
    assert lines[2].startswith("cannot import name 'Nonsense' from 'vllm' (")
    assert lines[3] == "vllm.nonsense: Quire replaces vllm here and has no such module"
    assert lines[4].startswith("cannot import name 'Nonsense' from 'vllm.config' (")
    assert lines[5].startswith("LoRARequest (LoRA) is not supported yet: serve a checkpoint with")
    assert len(lines) == 6


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


def test_a_program_runs_untouched(program):
    agreed(run("-m", "quire.compat", program, "--x"))


def test_a_program_asks_for_it_in_one_line(tmp_path):
    path = tmp_path / "asks.py"
    path.write_text("import quire; quire.install_as_vllm(); quire.install_as_vllm()\n" + PROGRAM)
    agreed(run(str(path), "--x"))


def test_the_distribution_is_the_package_vllm(program):
    agreed(run(program, "--x", path=(DISTRIBUTION / "src",)))
    agreed(run("-m", "quire.compat", program, "--x", path=(DISTRIBUTION / "src",)))


@pytest.mark.parametrize("before", [["-m", "quire.compat"], []], ids=["runner", "package"])
def test_modules_that_people_run(before):
    path = () if before else (DISTRIBUTION / "src",)
    module = "vllm.entrypoints.openai.api_server"
    said = run(*before, "-m", module, "--help=scheduler", path=path)
    assert said.startswith("SchedulerConfig")
    assert run(
        *before, "-m", "vllm.entrypoints.cli.main", "serve", "--help=cache", path=path
    ).startswith("CacheConfig")
    assert run(*before, "-m", "vllm", "version", path=path).strip().count(".") == 2


def test_every_name_of_the_table_is_here():
    """In one process: each module is imported by its name, and each of its names is found."""
    code = (
        "import importlib; from quire.compat.vllm_shim import *; install_as_vllm()\n"
        "for module, names in NAMES.items():\n"
        "    found = importlib.import_module(module)\n"
        "    for name in names: getattr(found, name)\n"
        "import quire, vllm\n"
        "for name in quire.__all__: assert getattr(vllm, name) is getattr(quire, name)\n"
    )
    run("-W", "ignore", "-c", code)
    for module in (*NAMES, *RUN):
        parent = module.rpartition(".")[0]
        assert not parent or parent in NAMES, f"{module}: {parent} is in no table"


# Where vLLM itself is


def real_vllm(folder: Path) -> Path:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("__version__ = 'theirs'\n")
    (folder / "vllm-0.11.0.dist-info").mkdir()
    (folder / "vllm-0.11.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.11.0\n"
    )
    return folder


def test_we_do_not_hide_vllm(tmp_path, program):
    said = run("-m", "quire.compat", program, path=(real_vllm(tmp_path / "site"),), check=False)
    assert "ImportError: vllm is installed: uninstall it, or import quire instead of vllm" in said


def test_two_of_them_are_a_riddle(tmp_path):
    both = (DISTRIBUTION / "src", real_vllm(tmp_path / "site"))
    said = run("-c", "import vllm", path=both, check=False)
    assert "ImportError: vllm 0.11.0 and quire-as-vllm are both installed" in said


@pytest.fixture
def setup_file():
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("setup_of_as_vllm", DISTRIBUTION / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_not_built_over_vllm(tmp_path, setup_file):
    theirs = real_vllm(tmp_path / "theirs")
    assert setup_file.in_the_way([theirs]) == [theirs / "vllm", theirs / "vllm-0.11.0.dist-info"]
    shutil.rmtree(theirs / "vllm")  # installed for editing: only its description is there
    assert setup_file.in_the_way([theirs]) == [theirs / "vllm-0.11.0.dist-info"]
    assert setup_file.in_the_way([DISTRIBUTION / "src", tmp_path / "nowhere"]) == []
    assert setup_file.folders()


def test_pip_installs_it(tmp_path, program):
    pytest.importorskip("setuptools", minversion="77")  # as compat/vllm/pyproject.toml
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(DISTRIBUTION, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = "-m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index"
    run(*pip.split(), "--target", str(target), str(source))
    agreed(run(program, "--x", path=(target,)))
    command = target / "bin" / "vllm"
    assert run(str(command), "serve", "--help=load", path=(target,)).startswith("LoadConfig")
