"""A server and a browser for the tests of the page, and the doubles of the rooms whose work the page shows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

for room in ("engine", "server", "processes", "sound"):
    sys.path.append(str(Path(__file__).parents[1] / room))

from chromium import Chromium  # noqa: E402
from server_process import Served  # noqa: E402
from tiny_llama import make_checkpoint  # noqa: E402

FLAGS = ["--served-model-name", "tiny", "other", "--api-key", "k", "--override-generation-config", '{"temperature": 0}']  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tier = ["--kv-disk-dir", str(tmp_path_factory.mktemp("kv") / "kv")]
    model = make_checkpoint(tmp_path_factory.mktemp("model"), length=2048)
    with Served(model, *FLAGS, *tier) as found:
        found.client.headers["Authorization"] = "Bearer k"
        yield found


@pytest.fixture(scope="module")
def browser(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    folder = tmp_path_factory.mktemp("browser")
    try:
        found = Chromium(folder).__enter__()
    except (OSError, RuntimeError, TimeoutError) as error:  # no shared memory, a sandbox, ...
        log = (folder / "chromium.log").read_text(errors="replace")
        pytest.skip(f"Chromium does not start here: {error}; {log[-500:]}")
    with closing(found):
        found.sized(1300, 850)
        found.open(server.url + "/")
        yield found
