"""`kv_transfer_config` of vLLM: which of its connectors mean a folder of kept blocks here, and what to use in place of the others.

Knows names and their settings. A connector that keeps blocks on a disk becomes the options `kv_disk_dir` and `kv_disk_size`;
LMCache's settings also come from its environment variables and its file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire import env
from quire.errors import ConfigError, Unsupported
from quire.logging import get_logger

log = get_logger(__name__)

FIELD = "kv_transfer_config"
FOLDER = "--kv-disk-dir FOLDER keeps blocks on a disk, also for other engines of this machine"
ALONE = "let each server prefill its own requests"
MEMORY = f"the KV cache is in this memory already, so raise --kv-cache-memory-bytes; or {FOLDER}"
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector", "PyNcclConnector"),
        ("KV blocks that move between servers", ALONE),
    ),
    **dict.fromkeys(
        ("MooncakeStoreConnector", "LMCacheMPConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "HiSparseConnector"),
        ("a store of KV blocks on other machines", FOLDER),
    ),
    **dict.fromkeys(
        ("ExampleHiddenStatesConnector", "DecodeBenchConnector"),
        ("a connector for experiments", "leave it out"),
    ),
}  # fmt: skip
"""Connector -> (what it needs, what to do instead)."""
OLD_FIELDS = ("kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_ip")
FIELDS = (
    "kv_connector", "kv_role", "engine_id", "kv_buffer_device", "kv_port", "kv_connector_extra_config",
    "kv_load_failure_policy", "enable_permute_local_kv", "kv_connector_module_path", *OLD_FIELDS,
)  # fmt: skip
LMCACHE = {"local_disk": "LMCACHE_LOCAL_DISK", "max_local_disk_size": "LMCACHE_MAX_LOCAL_DISK_SIZE"}


def tier_fields(config: Mapping[str, Any], name: str = FIELD) -> dict[str, Any]:
    """The options that mean the same as this kv_transfer_config. `name`: of the option, as the user writes it.

    Raises:
        ConfigError: it is not what vLLM takes.
        Unsupported: a connector that Quire has nothing for.
    """
    config = {key.replace("-", "_"): value for key, value in config.items()}
    if unknown := sorted(config.keys() - set(FIELDS)):
        raise ConfigError(f"{name}: {unknown[0]} is unknown; it has {', '.join(FIELDS[:8])}")
    if old := [key for key in OLD_FIELDS if key in config]:
        log.warning("%s: %s has no effect: vLLM has removed it, too", name, ", ".join(old))
    if config.get("kv_load_failure_policy") == "fail":
        log.warning("%s: kv_load_failure_policy=fail has no effect: blocks that cannot be loaded are computed", name)  # fmt: skip
    connector, extra = config.get("kv_connector"), config.get("kv_connector_extra_config") or {}
    if not isinstance(connector, str) or not isinstance(extra, Mapping):
        raise ConfigError(f"{name}: kv_connector must be the name of a connector, and kv_connector_extra_config an object")  # fmt: skip
    if config.get("kv_connector_module_path"):
        raise Unsupported(f"{name} (the connector class of another package)", FOLDER)
    return _fields_of(connector, extra, name)


def _fields_of(connector: str, extra: Mapping[str, Any], name: str) -> dict[str, Any]:
    match connector:
        case "MultiConnector":
            return _first_of(extra.get("connectors") or (), name)
        case "LMCacheConnectorV1" | "LMCacheConnector":
            return _lmcache(name)
        case "SharedStorageConnector" | "ExampleConnector":
            return {
                "kv_disk_dir": str(
                    extra.get("shared_storage_path") or f"{env.get('CACHE_ROOT')}/kv"
                )
            }
        case "SimpleCPUOffloadConnector" if extra.get("disk_path"):
            return {"kv_disk_dir": str(extra["disk_path"])}
        case "OffloadingConnector" | "SimpleCPUOffloadConnector":
            for tier in extra.get("secondary_tiers") or ():
                if isinstance(tier, Mapping) and tier.get("root_dir"):
                    return {"kv_disk_dir": str(tier["root_dir"])}
            raise Unsupported(f"{name} ({connector}: KV blocks in host memory)", MEMORY)
    if connector not in REFUSED:
        raise ConfigError(f"{name}: the connector {connector!r} is unknown; {FOLDER}")
    what, remedy = REFUSED[connector]
    raise Unsupported(f"{name} ({connector}: {what})", remedy)


def _first_of(connectors: Sequence[Any], name: str) -> dict[str, Any]:
    """Of a MultiConnector: the first that Quire has something for; the others are named."""
    found: dict[str, Any] = {}
    why: Unsupported | None = None
    for one in connectors:
        try:
            found = found or tier_fields(one if isinstance(one, Mapping) else {}, name)
        except Unsupported as error:
            why = why or error
    if not found and why is not None:
        raise why
    if why is not None:
        log.warning("%s", why)
    return found


def _lmcache(name: str) -> dict[str, Any]:
    """LMCache's disk. Without one, nothing is kept outside the KV cache."""
    settings: dict[str, Any] = {}
    if file := env.outer("LMCACHE_CONFIG_FILE"):
        import yaml

        try:
            settings = dict(yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {})
        except (OSError, ValueError, TypeError, yaml.YAMLError) as why:
            raise ConfigError(f"LMCACHE_CONFIG_FILE {file}: {why}") from None
    settings |= {key: value for key, own in LMCACHE.items() if (value := env.outer(own))}
    if others := sorted(settings.keys() - set(LMCACHE)):
        log.warning("LMCACHE_CONFIG_FILE: %s has no effect", ", ".join(others))
    folder = str(settings.get("local_disk") or "").removeprefix("file://")
    if not folder or folder.lower() in ("true", "false", "none"):
        log.warning("%s (LMCacheConnectorV1) has no effect: it names no disk; %s", name, FOLDER)
        return {}
    try:
        size = float(settings.get("max_local_disk_size") or 0)
    except (TypeError, ValueError):
        raise ConfigError("max_local_disk_size of LMCache must be a number of GiB") from None
    return {"kv_disk_dir": folder, **({"kv_disk_size": size} if size > 0 else {})}
