"""`kv_transfer_config` of vLLM: which of its connectors mean kept blocks here, and what to use in place of the others.

Knows names and their settings. A connector that keeps blocks on a disk becomes the options `kv_disk_dir` and `kv_disk_size`, and
one that keeps them in redis becomes `kv_remote_url`; LMCache's settings come from its environment variables and its file.
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
SERVER = "--kv-remote-url redis://HOST:PORT keeps blocks for engines of several machines"
ALONE = "let each server prefill its own requests"
SWAP = "--preemption-mode swap keeps blocks of preempted requests in host memory"
MEMORY = f"on a CPU, the KV cache is in this memory already, so raise --kv-cache-memory-bytes; {FOLDER}; {SWAP}"
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector", "PyNcclConnector"),
        ("KV blocks that move between servers", ALONE),
    ),
    **dict.fromkeys(
        ("MooncakeStoreConnector", "LMCacheMPConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "HiSparseConnector"),
        ("a store of KV blocks on other machines", SERVER),
    ),
    **dict.fromkeys(
        ("ExampleHiddenStatesConnector", "DecodeBenchConnector"),
        ("a connector for experiments", "leave it out"),
    ),
}  # fmt: skip
"""Connector -> (what it needs, what to do instead)."""
GIB = 1 << 30
USES = "in swap space the least recently used block makes room for the next; --kv-disk-write decides what is written to a folder"
DEFAULTS = (("eviction_policy", "lru"), ("store_threshold", 0), ("offload_prompt_only", True), ("spec_name", "CPUOffloadingSpec"), ("spec_name", "TieringOffloadingSpec"))  # fmt: skip
OLD_FIELDS = ("kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_ip")
FIELDS = (
    "kv_connector", "kv_role", "engine_id", "kv_buffer_device", "kv_port", "kv_connector_extra_config",
    "kv_load_failure_policy", "enable_permute_local_kv", "kv_connector_module_path", *OLD_FIELDS,
)  # fmt: skip
LMCACHE = ("local_disk", "max_local_disk_size", "remote_url")
"""Its settings that mean something here; LMCACHE_REMOTE_URL sets `remote_url`, and so on."""
OF_LMCACHE, ITS_FILE = "LMCACHE_", "LMCACHE_CONFIG_FILE"
REMOTE = ("redis://", "rediss://", "unix://")


def swaps(keywords: Mapping[str, Any]) -> bool:
    """Whether these options ask for swap space, before they are checked."""
    named = {key.replace("-", "_"): value for key, value in keywords.items()}
    mode, space = named.get("preemption_mode"), named.get("swap_space")
    return mode == "swap" or (mode is None and space is not None and str(space) not in ("0", "0.0"))


def with_swap_space(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """`kv_offloading_size` as the size of the swap space, if there is to be one; else as it is: it is refused."""
    if not swaps(keywords):
        return dict(keywords)
    size = None
    found = {}
    for key, value in keywords.items():
        if (name := key.replace("-", "_")) == "kv_offloading_size":
            size = value
        elif name != "kv_offloading_backend":
            found[key] = value
    if size and not found.get("swap_space"):
        found["swap_space"] = size
    return found


def tier_fields(
    config: Mapping[str, Any], name: str = FIELD, swaps: bool = False
) -> dict[str, Any]:
    """The options that mean the same as this kv_transfer_config.

    Args:
        name: of the option, as the user writes it.
        swaps: whether there is swap space, so that blocks in host memory are that.

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
    return _fields_of(connector, extra, name, swaps)


def _fields_of(connector: str, extra: Mapping[str, Any], name: str, swaps: bool) -> dict[str, Any]:
    match connector:
        case "MultiConnector":
            return _first_of(extra.get("connectors") or (), name, swaps)
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
            return _offloading(connector, extra, name, swaps)
    if connector not in REFUSED:
        raise ConfigError(f"{name}: the connector {connector!r} is unknown; {FOLDER}")
    what, remedy = REFUSED[connector]
    raise Unsupported(f"{name} ({connector}: {what})", remedy)


def _offloading(connector: str, extra: Mapping[str, Any], name: str, swaps: bool) -> dict[str, Any]:
    """Host memory is swap space, if that is asked for, and a tier with a folder is that folder; what has no meaning here is named."""
    found: dict[str, Any] = {}
    tiers = extra.get("secondary_tiers") or ()
    folders = [one["root_dir"] for one in tiers if isinstance(one, Mapping) and one.get("root_dir")]
    if folders:
        found["kv_disk_dir"] = str(folders[0])
    num_bytes = extra.get("cpu_bytes_to_use")
    if num_bytes is not None and (isinstance(num_bytes, bool) or not isinstance(num_bytes, int | float) or num_bytes <= 0):  # fmt: skip
        raise ConfigError(f"{name}: cpu_bytes_to_use must be a number of bytes above 0")
    if swaps and num_bytes:
        found["swap_space"] = num_bytes / GIB
    if not (found or swaps):
        raise Unsupported(f"{name} ({connector}: KV blocks in host memory)", MEMORY)
    used = {"secondary_tiers", *(("cpu_bytes_to_use",) if swaps else ())}
    if others := sorted(key for key in extra.keys() - used if (key, extra[key]) not in DEFAULTS):
        log.warning("%s (%s): %s has no effect: %s", name, connector, ", ".join(others), USES)
    return found


def _first_of(connectors: Sequence[Any], name: str, swaps: bool) -> dict[str, Any]:
    """Of a MultiConnector: all that Quire has something for, the first of each kind; the others are named."""
    found: dict[str, Any] = {}
    why: Unsupported | None = None
    for one in connectors:
        try:
            found = tier_fields(one if isinstance(one, Mapping) else {}, name, swaps) | found
        except Unsupported as error:
            why = why or error
    if not found and why is not None:
        raise why
    if why is not None:
        log.warning("%s", why)
    return found


def _lmcache(name: str) -> dict[str, Any]:
    """LMCache's disk and server. Without one of them, nothing is kept outside the KV cache."""
    settings = _lmcache_settings()
    found: dict[str, Any] = {}
    folder = str(settings.get("local_disk") or "").removeprefix("file://")
    if folder and folder.lower() not in ("true", "false", "none"):
        try:
            size = float(settings.get("max_local_disk_size") or 0)
        except (TypeError, ValueError):
            raise ConfigError("max_local_disk_size of LMCache must be a number of GiB") from None
        found = {"kv_disk_dir": folder, **({"kv_disk_size": size} if size > 0 else {})}
    if url := str(settings.get("remote_url") or ""):
        if url.startswith(REMOTE):
            found["kv_remote_url"] = url
        else:
            kind = url.partition("://")[0][:20]
            log.warning("%s: LMCache's remote_url (%s) has no effect: Quire's shared store is redis; %s", name, kind, SERVER)  # fmt: skip
    if not found:
        log.warning("%s (LMCacheConnectorV1) has no effect: it names no disk, and no redis server; %s; %s", name, FOLDER, SERVER)  # fmt: skip
    return found


def _lmcache_settings() -> dict[str, Any]:
    """Of its file and its variables, which come first; what has no meaning here is named in a warning."""
    settings: dict[str, Any] = {}
    if file := env.outer(ITS_FILE):
        import yaml

        try:
            settings = dict(yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {})
        except (OSError, ValueError, TypeError, yaml.YAMLError) as why:
            raise ConfigError(f"{ITS_FILE} {file}: {why}") from None
    if others := sorted(map(str, settings.keys() - set(LMCACHE))):
        log.warning("%s: %s has no effect", ITS_FILE, ", ".join(others))
    given = {name.removeprefix(OF_LMCACHE).lower(): name for name in env.outer_names(OF_LMCACHE)}
    given.pop("config_file", None)
    if others := [name for key, name in given.items() if key not in LMCACHE]:
        log.warning("%s has no effect", ", ".join(others))
    return settings | {key: env.outer(name) for key, name in given.items() if key in LMCACHE}
