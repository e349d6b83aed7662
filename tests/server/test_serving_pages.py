"""docs/serving.md and docs/troubleshooting.md say what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from asgi import ask
from scripted import ScriptedEngine, make_state

from quire import env
from quire.bench import sweep
from quire.bench.serve import cli
from quire.config.options import options
from quire.config.server import ServerConfig
from quire.observe.metric_table import COUNTS, ENGINE_HISTOGRAMS
from quire.server import openapi as routes_document
from quire.server.app import DEV_ROUTES, ROUTES, UI_ROUTES
from quire.server.process import launch, sockets

DOCS = Path(__file__).parents[2] / "docs"
SERVING = (DOCS / "serving.md").read_text(encoding="utf-8")
TROUBLE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
STRUCTURED = (DOCS / "structured.md").read_text(encoding="utf-8")


def test_every_route_is_in_the_table():
    table = SERVING.split("## Routes\n")[1].split("\n## ")[0]
    told = set(re.findall(r"^\| `\w+ (/[^`]*)`", table, re.MULTILINE))
    there = {path.replace(":path", "") for _, path, _ in ROUTES + UI_ROUTES}
    assert told == there | {"/openapi.json", "/docs"}
    assert all(f"`{path}`" in SERVING for _, path, _ in DEV_ROUTES)


def test_forms_with_a_file_are_in_the_document():
    document = routes_document.openapi(ROUTES, keyed=False)
    body = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    assert body["multipart/form-data"]["schema"]["$ref"].endswith("/TranscriptionRequest")
    fields = document["components"]["schemas"]["TranscriptionRequest"]
    assert fields["properties"]["file"]["format"] == "binary"
    assert "language" in fields["properties"]
    assert "/v1/audio/transcriptions" in routes_document.page(document)


def test_every_flag_and_variable_exists():
    flags = {f"--{name.replace('_', '-')}" for name in options()} | {
        "--url",
        "--max-tokens",
        "--lora-path",
    }
    for parser in (cli.parser(), sweep.parser()):
        flags |= parser._option_string_actions.keys()
    for page in (SERVING, TROUBLE):
        named = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page)
        assert {re.sub("^--no-", "--", flag) for flag in named} <= flags
    for name in re.findall(r"QUIRE_(\w+)", SERVING):
        assert name in env.VARIABLES


def test_documented_limits_equal_the_codes():
    server = ServerConfig()
    for number in (
        server.max_completions, server.max_answer_entries, int(server.send_timeout), *(value.default for name, value in env.VARIABLES.items() if name.startswith("MAX_") and name != "MAX_ENGINE_RESTARTS" and not value.no_effect),
        launch.MOST_QUEUED, launch.MOST_QUEUED_TOKENS, int(server.receive_timeout),
    ):  # fmt: skip
        assert f", {number:,} |" in SERVING, number
    assert f"| {sockets.KEEP_ALIVE_S} | closed |" in SERVING
    assert (sockets.HEAD_BYTES, server.max_body_bytes) == (64 << 10, 16 << 20)
    assert f"({server.shutdown_timeout} s)" in SERVING


def test_every_metric_that_is_named_exists():
    text = make_state(ScriptedEngine()).metrics.render().decode()
    text += str([*COUNTS.values(), *ENGINE_HISTOGRAMS.values()])
    for page in (SERVING, TROUBLE):
        for name in re.findall(r"`((?:vllm|quire):\w+)`", page):
            assert name.removesuffix("_total") in text, name


@pytest.mark.parametrize("page", [SERVING, STRUCTURED], ids=["serving", "structured"])
def test_the_examples_of_requests_are_valid(page: str):
    curls = re.findall(
        r"curl -s http://127.0.0.1:8000(\S+) -H \S+ \S+ -d '(.*?)'\n```", page, re.DOTALL
    )
    assert curls
    for path, body in curls:
        state = make_state(ScriptedEngine(), served_model_name="quire-tiny")
        assert ask(None, "POST", path, json.loads(body), state=state).status_code == 200
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert programs
    for text in programs:
        compile(text, "example", "exec")
