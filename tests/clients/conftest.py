"""A server of quire-tiny for real clients, and what its answers must be. Run by `make clients`."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_runs import PROMPT, TOKENS, serve

SILENT = {
    "HF_HUB_OFFLINE": "1", "OTEL_SDK_DISABLED": "true", "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false", "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_KEY": "key", "ANTHROPIC_API_KEY": "key", "OPENAI_AGENTS_DISABLE_TRACING": "1",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def silent() -> Iterator[None]:
    """For these tests only: `make test` reads this file too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SILENT.items():
            patch.setenv(name, value)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # the clients' own


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server, without /v1."""
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--max-model-len", "1024", "--max-num-seqs", "16", "--enable-auto-tool-choice")
    with serve(log, "quire-tiny", *flags) as found:
        yield found


@pytest.fixture(scope="session")
def v1(url: str) -> str:
    return f"{url}/v1"


@pytest.fixture(scope="session")
def ask(url: str) -> Callable[[str, dict[str, Any]], Any]:
    """POST of a JSON body without any client; the answer's JSON."""

    def post(path: str, body: dict[str, Any]) -> Any:
        data = json.dumps({"model": "quire-tiny", "temperature": 0, **body}).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))

    return post


@pytest.fixture(scope="session")
def story(ask: Callable[..., Any]) -> str:
    """The answer to PROMPT: every client must get the same."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
    text: str = ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert text.strip()
    return text


@pytest.fixture(scope="session")
def completion(ask: Callable[..., Any]) -> str:
    """The continuation of PROMPT."""
    text: str = ask("/v1/completions", {"prompt": PROMPT, "max_tokens": TOKENS})["choices"][0][
        "text"
    ]
    return text
