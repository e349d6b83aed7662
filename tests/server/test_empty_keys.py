"""An empty key is refused before anything listens: a request without a key would be taken for its owner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asgi import ask
from scripted import ScriptedEngine, make_state

from quire.cli.main import main
from quire.config.api_key_file import read_keys
from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.server.api_keys import ApiKeys
from quire.server.process import launch
from quire.server.process.sockets import LOOPBACK, host_of

EMPTY = {
    "variable": ({"QUIRE_API_KEY": ""}, [], "QUIRE_API_KEY"),
    "older-variable": ({"VLLM_API_KEY": ""}, [], "VLLM_API_KEY"),
    "blank-variable": ({"QUIRE_API_KEY": " \t"}, [], "QUIRE_API_KEY"),
    "flag": ({}, ["--api-key", ""], "--api-key"),
    "flag-equals": ({}, ["--api-key="], "--api-key"),
    "flag-of-two": ({}, ["--api-key", "", "real"], "--api-key"),
    "flag-without-value": ({}, ["--api-key", "--port", "0"], "--api-key"),
    "around": ({}, ["--api-key", "secret "], "--api-key"),
}


@pytest.mark.parametrize("case", EMPTY)
def test_the_server_does_not_start(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    variables, words, named = EMPTY[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "serve", lambda config: 0)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "model", *words])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert named in said
    assert "secret" not in said


def test_a_yaml_file_with_an_empty_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "serve", lambda config: 0)
    file = tmp_path / "serve.yaml"
    file.write_text('model: m\napi-key: ""\n')
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", str(file)])
    assert ended.value.code == 2
    file.write_text("model: m\napi-key: sk-mine\n")
    assert main(["serve", "--config", str(file)]) == 0


@pytest.mark.parametrize("key", ["", " ", "\n", "a\n", "a\x00b"])
def test_empty_keys_are_refused_in_a_programs_own_config(key: str, tmp_path: Path):
    for given in (key, [key], ["real", key]):
        with pytest.raises(ConfigError):
            ApiKeys(ServerConfig(api_key=given))
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([{"name": "a", "key": key}]))
    with pytest.raises(ConfigError, match="key"):
        read_keys(str(path))


def test_a_missing_key_is_nobodys():
    state = make_state(ScriptedEngine(), api_key=["k", "l"])
    for headers in ({}, {"Authorization": "Bearer "}, {"x-api-key": ""}, {"Authorization": ""}):
        assert ask(None, "GET", "/v1/models", headers=headers, state=state).status_code == 401
    assert ApiKeys(ServerConfig(api_key="k")).find(b"") is None


def test_address_and_guard_agree_on_whether_a_key_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("quire.server.process.sockets.in_container", lambda: False)
    file = tmp_path / "keys.json"
    file.write_text('[{"name": "a", "key": "k"}]')
    forms: list[tuple[dict[str, object], bool]] = [
        ({}, False), ({"api_key": []}, False), ({"api_key": "k"}, True), ({"api_key": ["k"]}, True),
        ({"api_key_file": str(file)}, True),
    ]  # fmt: skip
    for given, needed in forms:
        server = ServerConfig(**given)  # type: ignore[arg-type]
        assert server.needs_key == needed
        assert host_of(server) == ("0.0.0.0" if needed else LOOPBACK)
        if server.api_key != []:
            assert bool(ApiKeys(server)) == needed
