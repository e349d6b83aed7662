"""Programs written for vLLM: through the switch, the runner, and the distribution in compat/vllm.

Each in a process of its own, since the name `vllm` is taken for good in the one that asks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quire.compat.vllm_shim import VERSION, vllm_modules
from quire.config.flags import FlagParser, parse
from quire.errors import ModelNotFound, Unsupported
from tools.generated_tables import filled
from tools.list_vllm_names import PAGE, TABLES

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = ROOT / "compat" / "vllm"

PROGRAM = """
import sys
from vllm import LLM, SamplingParams, AsyncLLMEngine, PoolingParams
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind
from vllm.lora.request import LoRARequest
from vllm.multimodal import MultiModalRegistry
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs
import vllm, vllm.version, vllm.utils, quire

import importlib.metadata, importlib.util
version = importlib.metadata.version("vllm")
assert LoRARequest is quire.LoRARequest
print(LLM is quire.LLM, SamplingParams is quire.SamplingParams, vllm.__version__ == version, version)
print(vllm.version.__version__ == version, CompilationConfig(level=3).level, sys.argv[1:])
assert importlib.util.find_spec("vllm") and vllm.__version_tuple__[:3] >= (0, 8, 3)
for broken in ("from vllm import Nonsense", "import vllm.nonsense", "from vllm.config import Nonsense"):
    try:
        exec(broken)
    except ImportError as why:
        print(why)
try:
    MultiModalRegistry()
except NotImplementedError as why:
    print(why)
"""


def run(*words: str, path: tuple[Path, ...] = (), check: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", *path)))},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def agreed(said: str) -> None:
    lines = said.splitlines()
    assert lines[:2] == [f"True True True {VERSION}", "True 3 ['--x']"]
    assert lines[2].startswith("cannot import name 'Nonsense' from 'vllm' (")
    assert lines[3] == "vllm.nonsense: Quire replaces vllm here and has no such module"
    assert lines[4].startswith("cannot import name 'Nonsense' from 'vllm.config' (")
    assert lines[5].startswith("MultiModalRegistry (media input) is not supported yet: send text")
    assert len(lines) == 6


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


def test_a_program_runs_untouched(program):
    agreed(run("-m", "quire.compat", program, "--x"))


def test_one_line_of_a_program_installs_the_shim(tmp_path):
    path = tmp_path / "asks.py"
    path.write_text("import quire; quire.install_as_vllm(); quire.install_as_vllm()\n" + PROGRAM)
    agreed(run(str(path), "--x"))


def test_the_distribution_is_the_package_vllm(program):
    agreed(run(program, "--x", path=(DISTRIBUTION / "src",)))
    agreed(run("-m", "quire.compat", program, "--x", path=(DISTRIBUTION / "src",)))


CHILD = """
import subprocess, sys
import vllm
code = "import vllm; from vllm.v1.sample.logits_processor import LogitsProcessor; print(vllm.__version__)"
print(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout, end="")
"""


def test_processes_that_a_program_starts_find_it_too(tmp_path):
    """The engine's process imports the modules of the program's logits processors."""
    (tmp_path / "starts.py").write_text(CHILD, encoding="utf-8")
    assert run("-m", "quire.compat", str(tmp_path / "starts.py")) == f"{VERSION}\n"


@pytest.mark.parametrize("before", [["-m", "quire.compat"], []], ids=["runner", "package"])
def test_modules_that_people_run(before):
    path = () if before else (DISTRIBUTION / "src",)
    module = "vllm.entrypoints.openai.api_server"
    said = run(*before, "-m", module, "--help=scheduler", path=path)
    assert said.startswith("Scheduling: ")
    assert run(
        *before, "-m", "vllm.entrypoints.cli.main", "serve", "--help=cache", path=path
    ).startswith("KV cache  ")
    assert run(*before, "-m", "vllm", "version", path=path).strip().count(".") == 2


def test_every_name_of_the_table_is_here():
    """In one process: each module is imported by its name, and each of its names is found."""
    code = (
        "import importlib; from quire.compat.vllm_shim import *; install_as_vllm()\n"
        "for module, row in vllm_modules().items():\n"
        "    found = importlib.import_module(module)\n"
        "    for name in row.names: assert name in dir(found) and hasattr(found, name), (module, name)\n"
        "import quire, vllm\n"
        "for name in quire.PUBLIC: assert getattr(vllm, name) is getattr(quire, name)\n"
    )
    run("-W", "ignore", "-c", code)
    modules = vllm_modules()
    for module in modules:
        parent = module.rpartition(".")[0]
        assert not parent or parent in modules, f"{module}: {parent} is in no table"


def test_the_page_lists_every_name():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, TABLES) == page, "run: python -m tools.list_vllm_names"
    row = page.index("| `vllm.")
    assert filled(page[:row] + "| stale" + page[row + 3 :], TABLES) == page


def test_the_distribution_has_the_version_of_the_shim():
    project = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == ("vllm", VERSION)


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


def test_an_installed_vllm_and_the_shim_conflict(tmp_path):
    both = (DISTRIBUTION / "src", real_vllm(tmp_path / "site"))
    said = run("-c", "import vllm", path=both, check=False)
    assert "ImportError: vllm 0.11.0 and Quire's package vllm are both installed" in said


@pytest.fixture
def setup_file():
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("setup_of_as_vllm", DISTRIBUTION / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shim_is_not_built_where_vllm_is_installed(tmp_path, setup_file):
    theirs = real_vllm(tmp_path / "theirs")
    assert setup_file.in_the_way([theirs]) == [theirs / "vllm", theirs / "vllm-0.11.0.dist-info"]
    shutil.rmtree(theirs / "vllm")  # installed for editing: only its description is there
    assert setup_file.in_the_way([theirs]) == [theirs / "vllm-0.11.0.dist-info"]
    ours = tmp_path / "ours"
    (ours / f"vllm-{VERSION}.dist-info").mkdir(parents=True)
    assert setup_file.in_the_way([DISTRIBUTION / "src", ours, tmp_path / "nowhere"]) == []
    assert setup_file.folders()


def test_pip_installs_the_shim(tmp_path, program):
    pytest.importorskip("setuptools", minversion="77")  # as compat/vllm/pyproject.toml
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(DISTRIBUTION, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = "-m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index"
    run(*pip.split(), "--target", str(target), str(source))
    agreed(run(program, "--x", path=(target,)))
    command = target / "bin" / "vllm"
    assert run(str(command), "serve", "--help=load", path=(target,)).startswith(
        "Files of the checkpoint  "
    )


# Parts of the shim that do something


def words_to_config(*words: str):
    from quire.compat.vllm_server import make_arg_parser, server_config

    parser = make_arg_parser(FlagParser())
    parser.add_argument("--of-the-program", default=1)
    return server_config(parser.parse_args(words))


def test_a_program_parses_the_servers_flags():
    words = ["quire-tiny", "--port", "8123", "--max_num_seqs", "4", "--enable-auto-tool-choice"]
    assert words_to_config(*words) == parse(words)
    assert words_to_config("--model", "m", "--of-the-program", "2").model.model == "m"
    with pytest.raises(Unsupported):
        words_to_config("--grpc")


SERVE = """
import asyncio, signal, sys, threading, time, urllib.request
from vllm.entrypoints.openai.api_server import run_server
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils import FlexibleArgumentParser, get_open_port

port = get_open_port()
args = make_arg_parser(FlexibleArgumentParser()).parse_args(
    ["--model", "quire-tiny", "--port", str(port), "--host", "127.0.0.1", "--max-model-len", "64"]
)
validate_parsed_serve_args(args)

def ask():
    for _ in range(600):
        time.sleep(0.1)
        try:
            status = urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready").status
            print("ready", status)
            break
        except OSError:
            pass
    signal.raise_signal(signal.SIGTERM)

threading.Thread(target=ask).start()
asyncio.run(run_server(args))
print("ended")
"""


@pytest.mark.slow
def test_a_program_runs_the_server(tmp_path):
    (tmp_path / "serve.py").write_text(SERVE)
    said = run("-m", "quire.compat", str(tmp_path / "serve.py"))
    assert "ready 200\nended\n" in said


def test_requests_have_pydantics_methods():
    from quire.compat.vllm_server import ChatBody

    body = ChatBody(messages=[{"role": "user", "content": "a"}], top_k=3)
    assert body.model_dump(exclude_none=True) == {"messages": body.messages, "top_k": 3}
    assert body.model_dump()["temperature"] is None
    assert ChatBody.model_validate(json.loads(body.model_dump_json())) == body


def test_the_platform_has_vllms_names(monkeypatch):
    from quire.compat.vllm_platform import CpuArchEnum, DeviceCapability, PlatformInfo
    from quire.platforms import detect

    cpu = PlatformInfo()
    assert (cpu.device_type, cpu.is_cpu(), cpu.is_cuda_alike()) == ("cpu", True, False)
    assert cpu.get_device_capability() is None
    assert not cpu.has_device_capability(80)
    assert isinstance(cpu.get_cpu_architecture(), CpuArchEnum)
    card = detect.CudaDevice("Card", 80 * detect.GIB, (9, 0))
    monkeypatch.setattr("quire.compat.vllm_platform.facts", lambda: detect._cuda_facts(card))
    monkeypatch.setattr("quire.compat.vllm_platform.cuda_device", lambda: card)
    gpu = PlatformInfo()
    assert (gpu.is_cuda(), gpu.get_device_name(), gpu.device_count()) == (True, "Card", 1)
    assert gpu.get_device_capability() == DeviceCapability(9, 0)
    assert gpu.has_device_capability(89)
    assert not gpu.has_device_capability((10, 0))


def test_variables_are_read_when_they_are_used(monkeypatch):
    from quire.compat import vllm_envs

    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "7")
    assert vllm_envs.VLLM_MAX_N_SEQUENCES == 7
    monkeypatch.setenv("VLLM_RPC_TIMEOUT", "9")
    assert vllm_envs.VLLM_RPC_TIMEOUT == "9"
    assert vllm_envs.is_set("VLLM_RPC_TIMEOUT")
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_NONSENSE", "PATH"):
        with pytest.raises(AttributeError):
            getattr(vllm_envs, name)


def test_tokenizers_and_templates(tmp_path):
    from quire.compat import vllm_chat

    tokenizer = vllm_chat.get_tokenizer("quire-tiny")
    assert tokenizer.decode(tokenizer("Once upon a time").input_ids) == "Once upon a time"
    assert vllm_chat.cached_get_tokenizer("quire-tiny") is vllm_chat.cached_get_tokenizer(
        "quire-tiny"
    )
    assert vllm_chat.resolve_chat_template(tokenizer, None, None) == tokenizer.chat_template
    chat = [{"role": "user", "content": "Hi"}]
    assert vllm_chat.apply_hf_chat_template(tokenizer, chat, "{{ messages[0].content }}!") == "Hi!"
    (tmp_path / "own.jinja").write_text("{{ 1 }}")
    assert vllm_chat.load_chat_template(tmp_path / "own.jinja") == "{{ 1 }}"
    assert vllm_chat.load_chat_template("x", is_literal=True) == "x"
    assert vllm_chat.make_tool_call_id("kimi_k2", "f", 2) == "functions.f:2"
    with pytest.raises(ModelNotFound):
        vllm_chat.get_tokenizer("./nowhere")
