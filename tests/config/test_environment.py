"""The table of environment variables: known names, the fields that they set, and warnings about unknown names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire import env
from quire.cli.main import main
from quire.config.flags import parse
from quire.config.from_keywords import engine_config
from quire.config.options import options
from quire.errors import ConfigError

# Written by hand from what deployments set, not from the table.
PROMISED = """
ATTENTION_BACKEND USE_V1 WORKER_MULTIPROC_METHOD PP_LAYER_PARTITION LOGGING_LEVEL MEDIA_LOADING_THREAD_COUNT
MEDIA_URL_ALLOW_REDIRECTS MAX_N_SEQUENCES HOST_IP API_KEY SERVER_DEV_MODE ALLOW_RUNTIME_LORA_UPDATING CPU_KVCACHE_SPACE
CPU_OMP_THREADS_BIND CPU_NUM_OF_RESERVED_CPU CONFIGURE_LOGGING LOGGING_CONFIG_PATH LOGGING_PREFIX LOGGING_STREAM
LOGGING_COLOR LOG_STATS_INTERVAL ENGINE_READY_TIMEOUT_S EXECUTE_MODEL_TIMEOUT_SECONDS KEEP_ALIVE_ON_ENGINE_DEATH
ENABLE_V1_MULTIPROCESSING PLUGINS CACHE_ROOT SKIP_MODEL_NAME_VALIDATION ALLOW_LONG_MAX_MODEL_LEN
"""
WITHOUT_MEANING = (
    "BATCH_INVARIANT NO_USAGE_STATS DO_NOT_TRACK XGRAMMAR_CACHE_MB ALLOW_INSECURE_SERIALIZATION"
)
TEXT = {bool: "1", int: "7", float: "2.5", str: "text"}


@pytest.mark.parametrize("name", PROMISED.split())
def test_a_variable_has_both_prefixes(name, monkeypatch):
    row = env.VARIABLES[name]
    assert env.get(name) == row.default
    monkeypatch.setenv(f"VLLM_{name}", TEXT[row.kind])
    assert env.get(name) == row.kind(TEXT[row.kind])
    monkeypatch.setenv(f"QUIRE_{name}", {bool: "0", int: "8"}.get(row.kind, "3"))
    assert env.get(name) == (False if row.kind is bool else row.kind(8 if row.kind is int else "3"))
    assert len(row.help) > 8


def test_every_promised_variable_is_known(warnings):
    names = [f"{p}_{n}" for n in (PROMISED + WITHOUT_MEANING).split() for p in ("QUIRE", "VLLM")]
    assert env.unknown(dict.fromkeys(names, "1")) == []


@pytest.mark.parametrize(
    "name", ["VLLM_MAX_N_SEQUENCES", "QUIRE_SERVER_DEV_MODE", "VLLM_LOG_STATS_INTERVAL"]
)
def test_invalid_values_are_reported_at_start(name, monkeypatch, capsys):
    monkeypatch.setenv(name, "perhaps")
    bare = name.partition("_")[2]
    with pytest.raises(ValueError, match=f"QUIRE_{bare} .* is 'perhaps': it must be "):
        engine_config({})
    with pytest.raises(SystemExit) as ended:
        parse([])
    assert ended.value.code == 2
    assert bare in capsys.readouterr().err


def test_variables_set_their_config_fields(monkeypatch):
    rows = {row.field: row.name for row in env.VARIABLES.values() if row.field}
    assert set(rows) <= set(options())
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    config = parse([])
    assert config.server.api_key == ["secret"]
    assert config.cache.kv_cache_memory_bytes == 3 << 29
    assert config.parallel.attention_backend == "XFORMERS"
    config = parse(["--api-key", "other", "--kv-cache-memory-bytes", "1K"])
    assert config.server.api_key == ["other"]
    assert config.cache.kv_cache_memory_bytes == 1024
    assert engine_config({"model": "m"}).server.api_key is None  # LLM(...) has no server


def test_no_kv_space_means_unset(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    assert parse([]).cache.kv_cache_memory_bytes is None


def test_unknown_variables_are_reported(monkeypatch, warnings):
    monkeypatch.setenv("VLLM_LOGING_LEVEL", "DEBUG")
    monkeypatch.setenv("QUIRE_ZZZ", "1")
    monkeypatch.setenv("VLLM_SERVICE_HOST", "10.0.0.1")  # Kubernetes writes these
    monkeypatch.setenv("VLLM_PORT_8000_TCP_ADDR", "10.0.0.1")
    engine_config({})
    assert warnings == [
        "unknown environment variables: QUIRE_ZZZ, VLLM_LOGING_LEVEL (did you mean VLLM_LOGGING_LEVEL?)"
    ]
    with pytest.raises(ConfigError, match="did you mean VLLM_LOGGING_LEVEL"):
        engine_config({"fail_on_environ_validation": True})
    with pytest.raises(SystemExit):
        parse(["--fail-on-environ-validation"])


def test_keys_are_not_shown(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("QUIRE_CHECK", "1")
    assert env.own_variables() == {"VLLM_API_KEY": "***", "QUIRE_CHECK": "1"}


@pytest.mark.parametrize(
    ("name", "value", "argv"),
    [("QUIRE_LOGGING_LEVEL", "LOUD", []), ("QUIRE_CONFIGURE_LOGGING", "x", []), (None, "", ["--log-level", "loud"])],
    ids=["level", "switch", "flag"],
)  # fmt: skip
def test_a_wrong_log_level_ends_the_command(name, value, argv, monkeypatch, capsys):
    if name:
        monkeypatch.setenv(name, value)
    assert main(["serve", *argv]) == 2
    said = capsys.readouterr().err
    assert "quire serve: error: " in said
    assert "LOUD" in said or "QUIRE_CONFIGURE_LOGGING" in said


def test_every_variable_is_read_or_warns():
    """Generated from the table: a variable has a reader, or a reason why it has none."""
    files = [f for f in Path(env.__file__).parent.rglob("*.py") if f.name != "env.py"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for name, row in env.VARIABLES.items():
        is_read = bool(row.field) or f'"{name}"' in text
        assert is_read == (not row.no_effect), name


@pytest.mark.parametrize("name", [row.name for row in env.VARIABLES.values() if row.no_effect])
def test_a_variable_without_effect_warns(name, monkeypatch, warnings):
    row = env.VARIABLES[name]
    if row.default is not None:
        default = int(row.default) if row.kind is bool else row.default
        monkeypatch.setenv(f"VLLM_{name}", str(default))
    engine_config({})
    assert not warnings
    value = {bool: "0" if row.default else "1", int: "5"}.get(row.kind, "text")
    monkeypatch.setenv(f"VLLM_{name}", value)
    engine_config({})
    assert warnings == [f"VLLM_{name}={value} has no effect: {row.no_effect}"]


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_torchs_threads_sleep_soon_unless_the_user_says_otherwise(name, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert env.for_a_child()["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.setenv(name, "ACTIVE")
    assert {
        key: value
        for key, value in env.for_a_child().items()
        if "MP_" in key and key != "OMP_NUM_THREADS"
    } == {name: "ACTIVE"}
    env.limit_spins()
    assert os.environ.get("GOMP_SPINCOUNT") == ("ACTIVE" if name == "GOMP_SPINCOUNT" else None)
