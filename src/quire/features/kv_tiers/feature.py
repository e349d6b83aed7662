"""KVTiersFeature: KV blocks are kept outside the KV cache, by their names, and loaded for later requests.

A folder (`kvstore/disk.py`) or a server (`kvstore/redis_store.py`) keeps them. Knows the configuration and which parts there are; `gate.py` says how they work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire import env
from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature
from quire.engine.kv_identity import digest_of, kv_facts
from quire.errors import QuireError
from quire.features.kv_tiers.copies import NAME, RankBlocks, part_bytes
from quire.features.kv_tiers.gate import KVTierGate
from quire.features.kv_tiers.lookups import LookupGate
from quire.features.kv_tiers.pending import HOST
from quire.features.kv_tiers.rates import FEWEST_TOKENS, TierRates
from quire.features.kv_tiers.swap import SwapSpace
from quire.features.kv_tiers.tier_counts import LOOKUP_WAIT, TierCounts
from quire.features.kv_tiers.transfers import Transfers
from quire.features.kv_tiers.weights_digest import weights_digest
from quire.kvstore.disk import REFRESH_S, DiskStore, Identify, Key
from quire.kvstore.host_pool import HostPool
from quire.kvstore.key_file import make_folder, read_key
from quire.kvstore.record import mac_key, record_size
from quire.kvstore.redis_store import RedisStore
from quire.kvstore.segments import RATE
from quire.kvstore.staging import MOST_RANKS, Staging
from quire.kvstore.store_list import BlockStore, StoreList
from quire.logging import get_logger
from quire.parallel.layout import RankLayout
from quire.worker.memory_plan import GIB, MemoryLine, size

if TYPE_CHECKING:
    from quire.engine.core import EngineCore
    from quire.worker.build import WorkerParts

log = get_logger(__name__)

STAGING_BYTES = 128 << 20
MOST_PARTS = 1 << 15
PART_BYTES = 128 << 10
"""Of a recurrent state, in one record; more if a block has more, since all slots have one size."""
FEWEST_SLOTS = 4
FLUSH_S = 5.0
SWAP_SPACE = 4
"""GiB, if preemption_mode=swap names none; as in vLLM."""


class KVTiersFeature(Feature):
    """On if there is a folder, a server or swap space for blocks, and blocks are shared."""

    name = NAME
    order = 80

    def __init__(self, resolved: Resolved):
        super().__init__(resolved)
        self.gate: KVTierGate | None = None
        self.lookups: LookupGate | None = None
        self.disk: DiskStore | None = None
        self.core: EngineCore | None = None
        self.weights = ""
        self.rates, self.has_ended = TierRates(), threading.Event()

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return (_keeps(resolved) or swap_bytes(resolved) > 0) and resolved.prefix_caching

    def memory(self, layout: RankLayout, stage: int) -> Sequence[MemoryLine]:
        lines = [("buffers of kept KV blocks", STAGING_BYTES, "")]
        if swapped := swap_bytes(self.resolved):
            lines.append(("KV blocks of preempted requests", swapped, "swap_space"))
        return [
            MemoryLine(name, num_bytes // layout.size, lower=lower, where="host")
            for name, num_bytes, lower in lines
        ]

    # -- the worker -------------------------------------------------------------------------------
    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.features.kv_tiers.hook import KVTierHook

        hook = KVTierHook(parts.models, parts.states)
        parts.hooks.append(hook)
        parts.functions |= {"kv_tier_blocks": hook.describe, "kv_tier_attach": hook.attach}

    # -- the engine -------------------------------------------------------------------------------
    def plug_into_engine(self, engine: EngineParts) -> None:
        core = engine.core
        ranks = msgspec.convert(core.executor.call("kv_tier_blocks"), list[RankBlocks])
        swapped = swap_bytes(self.resolved) if any(sum(one.group_bytes) for one in ranks) else 0
        if refusal := self._refusal(engine, ranks):
            log.warning("no KV blocks are kept: %s", refusal)
            return
        keeps_states = engine.checkpoints is not None and _keeps(self.resolved)
        staging, group_bytes, part_sizes = attach_staging(core, ranks, swapped, keeps_states)
        facts = kv_facts(self.resolved, engine.info) | {
            "attention of layers": ",".join(
                sorted({name for one in ranks for name in one.backends})
            ),
            "ranks": str([one.group_bytes for one in ranks]),
        }
        if part_sizes:
            facts["states"] = digest_of({str(rank): one.states for rank, one in enumerate(ranks)})
            facts["parts of states"] = str(part_sizes)
        cache = self.resolved.config.cache
        stores = self._stores(partial(self._identify, facts))
        kinds = [one.kind for one in stores]
        tiers = ([HOST] if swapped else []) + kinds
        counts = TierCounts(core.counts, tiers, kinds, self.resolved.config.observe)
        transfers = Transfers(StoreList(stores, core.counts), staging, engine.wake)
        self.gate, self.core = KVTierGate(
            core.scheduler, transfers, group_bytes, self.rates,
            policy=cache.kv_disk_write,
            may_save=self._takes_first_use,
            exact=engine.info.model_impl == "native" and all(one.exact for one in ranks),
            counts=counts,
            swap=SwapSpace(HostPool(staging.kept), core.scheduler.kv.pool.by_hash, core.counts, staging.slot_bytes),
            checkpoints=engine.checkpoints, part_bytes=part_sizes,
            boundary=self.resolved.checkpoint_boundary // self.resolved.block_size,
        ), core  # fmt: skip
        engine.gates.append(self.gate)
        engine.counters += counts.names
        engine.histograms |= counts.histograms
        core.scheduler.kv.pool.listeners.append(self.gate)
        core.observers.add(self.rates)
        for store in stores:
            if isinstance(store, RedisStore):
                self.lookups = LookupGate(
                    core.scheduler.kv,
                    store,
                    self.gate.states,
                    group_bytes,
                    self._is_on_disk,
                    engine.wake,
                    partial(counts.observe, LOOKUP_WAIT),
                )
                engine.gates.append(self.lookups)
            threading.Thread(target=self._open, args=(store, transfers), name="kv-open", daemon=True).start()  # fmt: skip

    def _stores(self, identify: Identify) -> list[BlockStore]:
        """What keeps blocks, the nearest first."""
        cache, stores = self.resolved.config.cache, list[BlockStore]()
        key = mac_key(read_key(Path(cache.kv_key_file).expanduser())) if cache.kv_key_file else b""
        if cache.kv_disk_dir:
            root = Path(cache.kv_disk_dir).expanduser()
            self.disk = DiskStore(root, identify, int(cache.kv_disk_size * GIB), key)
            stores.append(self.disk)
        if cache.kv_remote_url:
            stores.append(RedisStore(cache.kv_remote_url, identify, key, cache.kv_remote_ttl))
        return stores

    def _is_on_disk(self, key: Key) -> bool:
        return self.disk is not None and self.disk.is_open and key in self.disk

    def _takes_first_use(self) -> bool:
        """Whether a block is saved, with kv_disk_write=auto, that only one request has used: disks wear out."""
        return self.disk is None or self.disk.written_today < self.disk.limit

    def _refusal(self, engine: EngineParts, ranks: Sequence[RankBlocks]) -> str:
        """Why blocks of this engine cannot be kept; "": they can."""
        parallel = self.resolved.config.parallel
        num_bytes = sum(
            sum(one.group_bytes) + one.state_bytes * _keeps(self.resolved) for one in ranks
        )
        if not (engine.info.prefix_caching and num_bytes):
            return "this model has no prefix cache"
        if len(parallel.nodes_of_engine) > 1 or self.resolved.executor == "external_launcher":
            return "the ranks of an engine must be processes of one machine"
        if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
            return "ranks that divide the context keep other blocks each"
        if len(ranks) > MOST_RANKS:
            return f"an engine has more than {MOST_RANKS} ranks"
        return next((one.refusal for one in ranks if one.refusal), "")

    def _identify(self, facts: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        self.weights = self._weights_digest()
        whole = {"model": self.resolved.path, **facts, "weights": self.weights}
        return bytes.fromhex(digest_of({**whole, "model": ""})), whole

    def _weights_digest(self) -> str:
        folder = self.resolved.config.cache.kv_disk_dir or f"{env.get('CACHE_ROOT')}/kv"
        root = Path(folder).expanduser()
        with suppress(OSError):
            make_folder(root)
        specs = [self.resolved.spec]
        if (draft := self.resolved.draft_spec) is not None:
            specs.append(draft)
        return " ".join(weights_digest(one.path, one.load.load_format, root) for one in specs)

    def _open(self, store: BlockStore, transfers: Transfers) -> None:
        began = time.monotonic()
        try:
            rate = store.open()
        except Exception as why:  # a checkpoint that is replaced now, for example
            store.turn_off(why)
            return
        if self.gate is None:
            return
        if store.is_open:
            self._use(store, rate, time.monotonic() - began, transfers)
        while True:
            self.gate.counts.put(f"kv_tier_bytes:{store.kind}", store.num_bytes)
            self.gate.counts.put(f"kv_tier_limit:{store.kind}", store.limit)
            if store.why_off or self.has_ended.wait(REFRESH_S):
                return
            store.refresh()

    def _use(self, store: BlockStore, rate: float, seconds: float, transfers: Transfers) -> None:
        """The store is open, with this many bytes per second."""
        transfers.read_rate = transfers.read_rate or rate
        if store is self.disk:
            with suppress(OSError, ValueError):  # of an earlier process
                self.rates.tokens_per_second = max(
                    0.0, float((self.disk.folder / RATE).read_text())
                )
        if self.gate is None:
            return
        token_bytes = sum(self.gate.group_bytes) // self.resolved.block_size
        rates = [
            f"{rate / num_bytes:.{digits}f} {what} per second ({size(num_bytes)} each)"
            for num_bytes, digits, what in (
                (token_bytes, 0, "tokens"),
                (sum(self.gate.states.part_bytes), 1, "recurrent states"),
            )
            if num_bytes
        ]
        log.info(
            "kept KV blocks: %s (%.1f s); reads at %s per second give %s; prompts"
            " are loaded from %d tokens on, if that is faster than computing them, which is measured (%s)",
            store.describe(), seconds, size(int(rate)), " and ".join(rates), FEWEST_TOKENS, self._computing(),
        )  # fmt: skip

    def _computing(self) -> str:
        rate = self.rates.tokens_per_second
        return f"{rate:.0f} tokens per second so far" if rate else "no prompt yet"

    # -- what happens to the engine ---------------------------------------------------------------
    def on_cache_reset(self) -> None:
        if self.gate is not None:
            self.gate.on_cache_reset()

    def on_sleep(self, level: int) -> None:
        self.on_cache_reset()

    def on_wake_up(self, parts: Sequence[str]) -> None:
        """Weights that were replaced meanwhile have other keys and values."""
        if self.gate is None or "weights" not in parts or not self.gate.store.is_open:
            return
        if self._weights_digest() != self.weights:
            self.gate.store.turn_off(QuireError("the weights were replaced; restart the server to keep blocks of the new ones"))  # fmt: skip

    def on_close(self) -> None:
        gate, core = self.gate, self.core
        if gate is None or core is None:
            return
        end = time.monotonic() + FLUSH_S
        while gate.wants_plan() and not (core.scheduler.has_requests or core.broken):
            if time.monotonic() > end or not gate.store.is_open:
                break
            core.step()
            time.sleep(0.001)
        self.has_ended.set()
        if self.disk is not None and self.disk.is_open and self.rates.tokens_per_second:
            with suppress(OSError):
                (self.disk.folder / RATE).write_text(f"{self.rates.tokens_per_second:.1f}")
        if self.lookups is not None:
            self.lookups.close()
        gate.transfers.close()


def _keeps(resolved: Resolved) -> bool:
    """Whether blocks are kept for later requests."""
    return bool(resolved.config.cache.kv_disk_dir or resolved.config.cache.kv_remote_url)


def swap_bytes(resolved: Resolved) -> int:
    """Host memory for blocks of preempted requests."""
    mode, space = resolved.config.scheduler.preemption_mode, resolved.config.cache.swap_space
    if mode == "recompute":
        return 0
    return int((space or (SWAP_SPACE if mode == "swap" else 0)) * GIB)


def attach_staging(
    core: EngineCore, ranks: Sequence[RankBlocks], num_kept_bytes: int, keeps_states: bool
) -> tuple[Staging, list[int], list[int]]:
    """The memory that all ranks copy blocks to and from, the bytes of a block, by KV group, and those of each part of a state.

    num_kept_bytes: of it, for blocks that stay there.
    """
    num_groups = len(core.scheduler.kv.groups)
    padded = [one.group_bytes + [0] * (num_groups - len(one.group_bytes)) for one in ranks]
    largest = max(sum(column) for column in zip(*padded, strict=True))
    state_bytes = sum(one.state_bytes for one in ranks) * keeps_states
    if num_parts := -(-state_bytes // max(largest, PART_BYTES, state_bytes // MOST_PARTS)):
        for one, sizes in zip(ranks, padded, strict=True):
            sizes += part_bytes(one.state_bytes, num_parts)
    record_bytes = [sum(column) for column in zip(*padded, strict=True)]
    slot_bytes = record_size(max(record_bytes))
    num_slots = max(STAGING_BYTES // slot_bytes, FEWEST_SLOTS)
    staging = Staging(slot_bytes, num_slots, len(ranks), num_kept_bytes // slot_bytes)
    places = {
        one.id: (rank, [sum(other[g] for other in padded[:rank]) for g in range(len(record_bytes))])
        for rank, one in enumerate(ranks)
    }
    core.executor.call("kv_tier_attach", staging.path, places, slot_bytes, num_parts)
    return staging, record_bytes[:num_groups], record_bytes[num_groups:]
