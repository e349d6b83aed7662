"""Connectors of vLLM's kv_transfer_config: each becomes a folder of kept blocks, or is refused by name with what to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.compat.vllm_values import KVTransferConfig
from quire.config.flags import parse
from quire.config.from_keywords import engine_config
from quire.config.kv_transfer import REFUSED, tier_fields
from quire.errors import ConfigError, Unsupported

FS = {"secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]}
MAPPED: list[tuple[dict[str, Any], str]] = [
    ({"kv_connector": "SharedStorageConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": "/kv"}}, "/kv"),
    ({"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "/kv"}}, "/kv"),
    ({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": FS}, "/kv"),
    ({"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": {"kv_offload_backend": "disk", "disk_path": "/kv"}}, "/kv"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "folder"), MAPPED)
def test_a_connector_with_a_disk_is_a_folder(given: dict[str, Any], folder: str) -> None:
    assert engine_config({"kv_transfer_config": given}).cache.kv_disk_dir == folder
    assert engine_config({"kv_transfer_config": KVTransferConfig(**given)}).cache.kv_disk_dir == folder  # fmt: skip
    own = engine_config({"kv_transfer_config": given, "kv_disk_dir": "/own"})
    assert own.cache.kv_disk_dir == "/own"


def test_dotted_flags() -> None:
    flag = "--kv-transfer-config"
    config = parse([f"{flag}.kv_connector", "ExampleConnector", f"{flag}.kv_connector_extra_config.shared_storage_path", "/kv"])  # fmt: skip
    assert config.cache.kv_disk_dir == "/kv"


@pytest.mark.parametrize("name", [*REFUSED, "OffloadingConnector", "SimpleCPUOffloadConnector"])
def test_the_others_are_refused_by_name(name: str) -> None:
    with pytest.raises(Unsupported, match=rf"kv_transfer_config \({name}: .*not supported yet: \S"):
        engine_config({"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both"}})


@pytest.mark.parametrize(
    "wrong",
    [{}, {"kv_connector": 3}, {"kv_connector": "Nonsense"}, {"kv_connector": "ExampleConnector", "kv_x": 1}, {"kv_connector": "ExampleConnector", "kv_connector_extra_config": [1]}],
)  # fmt: skip
def test_what_is_no_config_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        tier_fields(wrong)


def test_fields_of_older_versions_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    tier_fields({**MAPPED[0][0], "kv_rank": 0, "kv_parallel_size": 2, "kv_load_failure_policy": "fail"})  # fmt: skip
    assert "kv_rank, kv_parallel_size has no effect" in caplog.text
    assert "kv_load_failure_policy=fail has no effect" in caplog.text


def test_lmcache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_producer"}
    assert tier_fields(given) == {}
    assert "names no disk, and no redis server" in caplog.text
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 256\nlocal_disk: file:///a\nmax_local_disk_size: 7\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    assert tier_fields(given) == {"kv_disk_dir": "/a", "kv_disk_size": 7.0}
    assert "chunk_size has no effect" in caplog.text
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "lm://host:65432")
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "True")
    assert tier_fields(given) == {"kv_disk_dir": "/a", "kv_disk_size": 7.0}
    assert "remote_url (lm) has no effect" in caplog.text
    assert "LMCACHE_LOCAL_CPU has no effect" in caplog.text
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "redis://:secret@host:6379")
    assert tier_fields(given)["kv_remote_url"] == "redis://:secret@host:6379"
    assert "secret" not in caplog.text
    monkeypatch.setenv("LMCACHE_LOCAL_DISK", "/b")
    assert tier_fields(given)["kv_disk_dir"] == "/b"
    file.write_text("[")
    with pytest.raises(ConfigError, match="LMCACHE_CONFIG_FILE"):
        tier_fields(given)


def test_several_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "redis://host")
    three = [nixl, MAPPED[0][0], {"kv_connector": "LMCacheConnectorV1"}]
    all_of = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": three}}
    assert tier_fields(all_of) == {"kv_disk_dir": "/kv", "kv_remote_url": "redis://host"}
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [nixl, MAPPED[0][0]]}}  # fmt: skip
    assert tier_fields(both) == {"kv_disk_dir": "/kv"}
    alone = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [nixl]}}
    with pytest.raises(Unsupported, match="NixlConnector"):
        tier_fields(alone)
