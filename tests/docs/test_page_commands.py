"""Every command of every page: requests are sent to a server, flags are parsed, targets and packages exist.

A command that no rule knows fails, so that a new one gets a rule.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import yaml
from server_process import Served

from quire import env
from quire.bench import latency, sweep, throughput
from quire.bench.serve import cli as bench_cli
from quire.cli import completion_client
from quire.cli.main import COMMANDS
from quire.config.flags import parse
from quire.config.options import options
from quire.frontend import lora_resolvers

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "compat/vllm/README.md", *sorted((ROOT / "docs").glob("*.md"))]  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
ADDRESS = "http://127.0.0.1:8000"
OTHERS = {
    "docker",
    "kubectl",
    "promtool",
    "redis-server",
    "kill",
    ".",
    "cd",
    "git",
    "cp",
}  # programs of others; tests/deploy reads their files
PACKAGES = {"openai", "anthropic", "lm-eval"}  # from the package index
OUTER = {"HF_TOKEN", "HF_HUB_OFFLINE", "HF_HOME", "OMP_NUM_THREADS"}  # variables of others


class Command(NamedTuple):
    page: str
    words: list[str]


def blocks(path: Path, language: str) -> list[str]:
    found: list[str] = re.findall(
        rf"^```{language}\n(.*?)^```", path.read_text("utf-8"), re.M | re.S
    )
    return found


def commands() -> Iterator[Command]:
    for path in PAGES:
        for block in blocks(path, "sh"):
            text = ""
            for line in block.splitlines():
                text += line + "\n"
                if line.endswith("\\"):
                    continue
                try:
                    words = shlex.split(text.replace("\\\n", " "), comments=True)
                except ValueError:  # a quote that a later line closes
                    continue
                text = ""
                if words[-1:] == ["&"]:  # in the background
                    words.pop()
                if words:
                    yield Command(path.name, words)
            assert not text, f"{path.name}: {text}"


def split_variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    variables: dict[str, str] = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words[0].partition("=")
        variables[name], words = value, words[1:]
    return variables, words


ALL = list(commands())
REQUESTS = [each for each in ALL if each.words[0] == "curl"]
EMBEDDED = ROOT / "src" / "quire" / "embedded"
SAMPLE = EMBEDDED / "quire-tiny-whisper" / "sample.wav"
PICTURE = EMBEDDED / "quire-tiny" / "sample.png"
SEEN = "A green triangle, a red circle and a black 42."
OF_PICTURE = "$(base64 -w 0 sample.png)"
SAID = "find three red foxes in the forest"


def test_pages_contain_commands():
    assert {"README.md", "quickstart.md", "serving.md", "tuning.md"} <= {one.page for one in ALL}
    assert len(ALL) > 30
    assert len(REQUESTS) > 5


@pytest.mark.parametrize("command", ALL, ids=lambda one: f"{one.page}: {' '.join(one.words)[:60]}")
def test_a_command_names_what_exists(command: Command):
    variables, words = split_variables(command.words)
    for name in variables:
        assert name in OUTER or name.removeprefix("QUIRE_") in env.VARIABLES
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "make":
        check_make(rest)
    elif program in ("quire", "vllm"):
        check_quire(rest)
    elif program == "pip":
        assert rest[0] == "install"
        check_packages([word for word in rest[1:] if not word.startswith(("-", "http"))])
    elif program == "python":
        check_python(rest)
    else:
        assert program == "curl" or program in OTHERS, f"{program}: give it a rule"


def check_make(words: list[str]) -> None:
    for word in words:
        assert "=" in word or re.search(rf"^{re.escape(word)}:", MAKEFILE, re.M), word


def check_quire(words: list[str]) -> None:
    command, rest = words[0], words[1:]
    assert command in COMMANDS
    if any(word.startswith("--help") for word in rest):
        return
    if command in ("serve", "doctor"):
        if "--config" not in rest:
            parse([word for word in rest if word != "--print-config"])
    elif command in ("chat", "complete"):
        completion_client.read(command, rest)
    elif rest[:2] == ["sweep", "serve"]:
        sweep_words = sweep.parser().parse_args(rest[2:])
        check_quire(shlex.split(sweep_words.serve_cmd)[1:])
        check_quire(shlex.split(sweep_words.bench_cmd)[1:])
    elif command == "bench":
        known = set(bench_cli.parser()._option_string_actions) if rest[0] == "serve" else set()
        own = {"throughput": throughput.OWN, "latency": latency.OWN}.get(rest[0], {})
        known |= {f"--{name.replace('_', '-')}" for name in own}
        check_flags(rest[1:], known | flags())
    else:
        check_flags(rest, flags() | {"-i", "-o", "--unused-days"})


def flags() -> set[str]:
    return {f"--{name.replace('_', '-')}" for name in options()}


def check_flags(words: list[str], known: set[str]) -> None:
    for word in words:
        assert not word.startswith("-") or word in known, word


def check_packages(names: list[str]) -> None:
    extras = PROJECT["optional-dependencies"]
    for name in names:
        named = re.search(r"\[([a-z,]+)\]", name)
        assert named is None or set(named[1].split(",")) <= extras.keys()
        if name.startswith("torch"):
            assert name in MAKEFILE
        elif not name.startswith("dist/"):
            base = name.partition("[")[0]
            assert base in PACKAGES or base == PROJECT["name"] or (ROOT / base).exists(), name


def check_python(words: list[str]) -> None:
    assert words[0] in ("-m", "-c") or (ROOT / words[0]).is_file()
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    adapters = ["--enable-lora", "--lora-modules", "pirate=quire-tiny-pirate-lora"]
    flags = ["--api-key", "sk-mine", "--kv-cache-memory-bytes", "64M", *adapters]
    with Served("quire-tiny", *flags, env={"QUIRE_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as found:
        yield found


@pytest.fixture(scope="module")
def pooling_server() -> Iterator[Served]:
    with Served("quire-tiny-embed") as found:
        yield found


@pytest.fixture(scope="module")
def speech_server() -> Iterator[Served]:
    with Served("quire-tiny-whisper") as found:
        yield found


def server_of(command: Command) -> str:
    """The fixture with the model that a request needs."""
    if any("/audio/" in word for word in command.words):
        return "speech_server"
    return "pooling_server" if command.page == "pooling.md" else "server"


@pytest.mark.parametrize("command", REQUESTS, ids=lambda one: f"{one.page}: {one.words[1:]}"[:60])
def test_the_server_answers_a_request(request: pytest.FixtureRequest, command: Command):
    server: Served = request.getfixturevalue(server_of(command))
    words, headers, data = command.words[1:], {"Authorization": "Bearer sk-mine"}, None
    method, url, form = "GET", "", dict[str, str]()
    while words:
        word = words.pop(0)
        if word in ("-H", "--header"):
            name, _, value = words.pop(0).partition(":")
            headers[name] = value.strip()
        elif word in ("-d", "--data"):
            data, method = words.pop(0), "POST"
        elif word == "-F":
            name, _, form[name] = words.pop(0).partition("=")
        elif word == "-X":
            method = words.pop(0)
        elif not word.startswith("-"):
            url = word
    assert url.startswith(ADDRESS), "a page's requests go to the address that make serve prints"
    url = server.url + url.removeprefix(ADDRESS)
    if form:
        assert form.pop("file") in ("@sample.wav", "@speech.wav"), "a copy of the sample"
        files = {"file": SAMPLE.read_bytes()}
        answer = httpx.post(url, headers=headers, data=form, files=files, timeout=120)
        assert SAID in answer.text
    else:
        shows = data is not None and OF_PICTURE in data
        data = data and data.replace(OF_PICTURE, base64.b64encode(PICTURE.read_bytes()).decode())
        answer = httpx.request(method, url, headers=headers, content=data, timeout=120)
        assert SEEN in answer.text or not shows
    assert answer.status_code == 200, answer.text
    assert answer.text


def test_the_programs_of_the_adapter_page_run(capsys: pytest.CaptureFixture[str]):
    resolver, program = blocks(ROOT / "docs" / "lora.md", "python")
    for text in (program, resolver):
        exec(compile(text, "lora.md", "exec", dont_inherit=True), {"__name__": "page"})
    pirate, base, sailor = capsys.readouterr().out.splitlines()[-3:]
    assert pirate == sailor
    assert pirate.startswith("Arr")
    assert base.startswith("I am quire-tiny")
    lora_resolvers.LoRAResolverRegistry.resolvers.pop("shelf")


def test_the_programs_of_the_quickstart_run(
    server: Served, speech_server: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):  # fmt: skip
    names: dict[str, object] = {}
    for file in (SAMPLE, PICTURE):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    first, *others = blocks(ROOT / "docs" / "quickstart.md", "python")
    for block in others:
        url = speech_server.url if "client.audio" in block else server.url
        shared = first.replace(ADDRESS, url).replace('"none"', '"sk-mine"')
        exec(compile(f"{shared}\n{block}", "quickstart.md", "exec", dont_inherit=True), names)
    printed = capsys.readouterr().out
    assert SAID in printed
    assert SEEN in printed
    assert 'get_weather {"city": "Oslo"}' in printed
    assert "The weather in Oslo is rainy with 7 degrees." in printed
    assert "name='Mira Stone' age=34 city='Oslo'" in printed
    assert "7 + 5 = 12" in printed


IN_CLIENTS = {"langchain_openai", "llama_index", "litellm", "pydantic_ai", "instructor", "agents"}
"""Libraries of other blocks of docs/integrations.md, which tests/clients runs."""


@pytest.mark.slow
def test_the_programs_of_the_integrations_run(server: Served, capsys: pytest.CaptureFixture[str]):
    left = set()
    for block in blocks(ROOT / "docs" / "integrations.md", "python"):
        (library, *_) = re.findall(r"^(?:from|import) (\w+)", block, re.M)
        if library not in ("openai", "anthropic"):
            left.add(library)
            continue
        text = block.replace(ADDRESS, server.url).replace('"none"', '"sk-mine"')
        exec(compile(text, library, "exec", dont_inherit=True), {})
        assert len(capsys.readouterr().out.split()) > 10, library
    assert left == IN_CLIENTS


def values(found: object) -> Iterator[str]:
    """Every text in a configuration."""
    if isinstance(found, dict | list):
        for value in found.values() if isinstance(found, dict) else found:
            yield from values(value)
    elif isinstance(found, str):
        yield found


def test_the_configurations_of_the_integrations_lead_to_the_server(server: Served):
    """Their addresses are the server's, and their paths and models are there."""
    page = ROOT / "docs" / "integrations.md"
    found = [*map(yaml.safe_load, blocks(page, "yaml")), *map(json.loads, blocks(page, "json"))]
    assert len(found) == 4
    headers = {"Authorization": "Bearer sk-mine"}
    for one in found:
        texts = list(values(one))
        (address,) = (text for text in texts if text.startswith("http"))
        path = re.sub(r"^http://(127\.0\.0\.1|host\.docker\.internal):8000", "", address)
        assert path == "/v1"
        listed = httpx.get(f"{server.url}{path}/models", headers=headers, timeout=60).json()["data"]
        assert {model["id"] for model in listed} & set(texts) == {"quire-tiny"}
    for variable, path in (("OPENAI_API_BASE", "/v1"), ("ANTHROPIC_BASE_URL", "")):
        assert f"{variable}={ADDRESS}{path} " in page.read_text(encoding="utf-8")


def test_the_configuration_of_the_checklist_is_one(tmp_path: Path):
    """Every key is an option, and has a value that it may have."""
    (text,) = blocks(ROOT / "docs" / "production.md", "yaml")
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: sk-a}\n")
    (tmp_path / "quire.yaml").write_text(text.replace("/etc/quire/keys.yaml", str(keys)).replace("qwen3:4b", "quire-tiny").replace("16384", "2048"))  # fmt: skip
    given = parse(["--config", str(tmp_path / "quire.yaml")])
    assert given.server.api_key_file == str(keys)
    assert given.server.allowed_hosts == ["llm.example.org"] or given.server.allowed_hosts == ("llm.example.org",)  # fmt: skip
