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


SWAP: dict[str, Any] = {"preemption_mode": "swap"}


def test_host_memory_is_swap_space_if_that_is_asked_for() -> None:
    host = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 3 << 30}}  # fmt: skip
    with pytest.raises(Unsupported, match=r"raise --kv-cache-memory-bytes; --kv-disk-dir .*--preemption-mode swap"):  # fmt: skip
        engine_config({"kv_transfer_config": host})
    assert engine_config({"kv_transfer_config": host, **SWAP}).cache.swap_space == 3
    assert engine_config({"kv_transfer_config": host, "swap_space": 2}).cache.swap_space == 2
    both = {**host, "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30, **FS}}
    found = engine_config({"kv_transfer_config": both, **SWAP}).cache
    assert (found.swap_space, found.kv_disk_dir) == (1, "/kv")
    assert engine_config({"kv_transfer_config": both}).cache.swap_space == 0
    with pytest.raises(Unsupported, match=r"kv_offloading_size .*preemption_mode=swap"):
        engine_config({"kv_offloading_size": 2})
    assert engine_config({"kv_offloading_size": 2, "kv_offloading_backend": "native", **SWAP}).cache.swap_space == 2  # fmt: skip
    flags = ["--kv-offloading-size", "2", "--preemption-mode", "swap"]
    assert parse(flags).cache.swap_space == 2


def test_settings_of_host_memory_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    extra = {"cpu_bytes_to_use": 1 << 30, "eviction_policy": "arc", "store_threshold": 2, "offload_prompt_only": True}  # fmt: skip
    given = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    assert tier_fields(given, swaps=True) == {"swap_space": 1}
    assert "eviction_policy, store_threshold has no effect" in caplog.text
    with pytest.raises(ConfigError, match="cpu_bytes_to_use must be a number of bytes above 0"):
        tier_fields({**given, "kv_connector_extra_config": {"cpu_bytes_to_use": "1"}}, swaps=True)
