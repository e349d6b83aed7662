"""Adapters by strangers: what their files, their names and ids of the hub may cost a server that loads them."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from attacked_server import TEXT, AttackedServer, note, together
from conftest import Start

from quire.features.lora.resolved_names import MOST_OF_A_KEY
from quire.models.checkpoint_locator import EMBEDDED

LOAD = "/v1/load_lora_adapter"
PIRATE = Path(EMBEDDED) / "quire-tiny-pirate-lora"
RUNTIME = {"QUIRE_ALLOW_RUNTIME_LORA_UPDATING": "1"}
FLAGS = ("--enable-lora", "--max-lora-rank", "64")
MANY = MOST_OF_A_KEY + 44
SHORT = {"prompt": "x", "max_tokens": 1}
BOMBS = {
    "nested counts": {"(?:(?:(?:a|b){500}){500}){500}": 8},
    "many counts": {f"(?:a{{{990 + number}}}){{1000}}": 8 for number in range(20)},
    "recursion": {"(?R)*": 8},
    "exponential": {"(.+)+!": 8},
}


def written(folder: Path, **fields: Any) -> Path:
    """The embedded adapter with other fields in its configuration."""
    shutil.copytree(PIRATE, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def load(server: AttackedServer, name: str, path: object, **head: str) -> Any:
    body = {"lora_name": name, "lora_path": str(path)}
    return server.client.post(LOAD, json=body, headers=head, timeout=60)


@pytest.mark.attack
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_of_an_adapter_cost_its_load_only(started: Start, tmp_path: Path, field: str):
    server = started(*FLAGS, env=RUNTIME)
    with server.attack(seconds=60) as measured:
        for number, bomb in enumerate(BOMBS.values()):
            answer = load(server, f"x{number}", written(tmp_path / f"{number}", **{field: bomb}))
            assert answer.status_code == 400, answer.text
            assert "pattern" in answer.text
    measured.check(engine_mib=128)


@pytest.mark.attack
def test_unused_tensors_are_not_read(started: Start, tmp_path: Path):
    folder = written(tmp_path / "a")
    with_hole(folder / "adapter_model.safetensors", 6 << 30)
    server = started(*FLAGS, env=RUNTIME)
    with server.attack(seconds=60) as measured:
        begun = time.monotonic()
        assert load(server, "x", folder).status_code == 200
        assert time.monotonic() - begun < 10
    measured.check(engine_mib=256)


def with_hole(file: Path, size: int) -> None:
    """Add a tensor of the base model, which no adapter uses; on the disk it is a hole."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name.endswith("q_proj.lora_A.weight"))
    end = len(data) - 8 - length
    header[name.replace("lora_A", "base_layer")] = {
        "dtype": "F32", "shape": [size // 4096, 1024], "data_offsets": [end, end + size]
    }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text + data[8 + length :])
        out.truncate(8 + len(text) + end + size)


@pytest.mark.attack
def test_names_of_a_resolver_do_not_fill_the_table(started: Start, tmp_path: Path):
    shelf = tmp_path / "shelf"
    for number in range(MANY):
        written(shelf / f"a{number}", base_model_name_or_path="quire-tiny")
    keys = [{"name": "bob", "key": "sk-bob"}, {"name": "alice", "key": "sk-alice", "may_load_adapters": True}]  # fmt: skip
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    env = RUNTIME | {"QUIRE_LORA_RESOLVER_CACHE_DIR": str(shelf)}
    server = started(*FLAGS, "--api-key-file", str(tmp_path / "keys.json"), env=env, key="sk-alice")

    def ask(model: str, key: str) -> int:
        head = {"Authorization": f"Bearer {key}"}
        return server.client.post(TEXT, json=SHORT | {"model": model}, headers=head, timeout=60).status_code  # fmt: skip

    with server.attack(seconds=200) as measured:
        aliases = [*("./" * n + "a0" for n in range(1, 60)), *("a1" + "/" * n for n in range(1, 60))]  # fmt: skip
        for key in ("sk-bob", "sk-alice"):
            assert {ask(name, key) for name in aliases} == {404}
        assert ask("a0", "sk-bob") == 404
        found = together(4, lambda part: [ask(f"a{n}", "sk-alice") for n in range(part, MANY, 4)], 120)  # fmt: skip
        assert found == [[200] * len(range(part, MANY, 4)) for part in range(4)]
        names = [card["id"] for card in server.client.get("/v1/models").json()["data"]]
        note(f"{len(names)} models after {MANY} names")
        assert len(names) == 1 + MOST_OF_A_KEY
        assert ask("a0", "sk-alice") == 200  # it was forgotten
        assert load(server, "mine", PIRATE).status_code == 200
        assert {ask(f"unknown-{number}", "sk-bob") for number in range(200)} == {404}
    measured.check()


class Hub(BaseHTTPRequestHandler):
    """A hub with one large repository; `heard` has the paths and the tokens that it was sent."""

    heard: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.heard.append((self.path, self.headers.get("Authorization")))
        files = [{"rfilename": name, "size": 50 << 30} for name in ("adapter_config.json", "adapter_model.safetensors")]  # fmt: skip
        body = json.dumps({"id": "org/large", "sha": "a" * 40, "siblings": files}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.heard = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


@pytest.mark.attack
@pytest.mark.parametrize("allowed", [False, True])
def test_ids_of_the_hub_download_nothing_large(
    started: Start, hub: ThreadingHTTPServer, tmp_path: Path, allowed: bool
):
    env = RUNTIME | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_secret",
        "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    flags = ("--allow-lora-from-hub",) if allowed else ()
    server = started(*FLAGS, *flags, env=env)
    before = len(Hub.heard)
    with server.attack(seconds=60) as measured:
        for path in ("org/large", "~root", "~/x", "~postgres/x"):
            answer = load(server, "x", path)
            assert answer.status_code == (400 if allowed and path == "org/large" else 404), answer.text  # fmt: skip
            assert "/root" not in answer.text
            assert "postgres" not in answer.text.replace("~postgres/x", "")
    measured.check()
    asked = Hub.heard[before:]
    note(f"the hub was asked for {asked}")
    assert any(path.startswith("/api/models/org/large") for path, _ in asked) == allowed
    assert {token for _, token in asked} <= {None}
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.attack
def test_absurd_values_are_errors_of_the_client(started: Start, tmp_path: Path):
    server = started(*FLAGS, env=RUNTIME)
    with server.attack(seconds=60) as measured:
        answer = load(server, "x", written(tmp_path / "a", lora_alpha=1e30))
        assert answer.status_code == 400
        assert "lora_alpha" in answer.text
        assert server.ask(TEXT, SHORT | {"model": "x"}).status_code == 404
    measured.check()
