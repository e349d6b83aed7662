"""TierCounts: what metrics and the live view say of kept blocks. Names end with `:KIND` if each tier has its own count.

Knows numbers. The engine's thread counts here; `kvstore/store_list.py` counts what threads read and write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.config.observe import ObserveConfig
from quire.observe.buckets import buckets, checked
from quire.observe.metric_table import ENGINE_HISTOGRAMS
from quire.protocol.bucket_counts import BucketCounts

LOAD_SIZE, STORE_SIZE = "kv_load_size", "kv_store_size"
LOOKUP, LOOKUP_WAIT, TIER_LOOKUP_WAIT = "kv_lookup", "kv_lookup_wait", "kv_tier_lookup_wait"
PLAIN = ("external_prefix_cache_queries", "external_prefix_cache_hits", "kv_stores_skipped")
BY_TIER = ("kv_cached_tokens", "kv_tier_queries", "kv_tier_hits", "kv_load_bytes", "kv_store_bytes")
BY_STORE = ("kv_load_time", "kv_store_time", "kv_tier_errors")


class TierCounts:
    """`counts`: of the engine. `kinds`: of all tiers, the nearest first; `stores`: of those that threads read and write."""

    def __init__(self, counts: dict[str, float], kinds: Sequence[str], stores: Sequence[str], observe: ObserveConfig):  # fmt: skip
        self.counts, self.kinds = counts, kinds
        self.names = [
            *PLAIN,
            *(f"{name}:{kind}" for name in BY_TIER for kind in kinds),
            *(f"{name}:{kind}" for name in BY_STORE for kind in stores),
        ]
        custom = checked(observe.custom_histogram_buckets)
        sizes = LOAD_SIZE, STORE_SIZE, LOOKUP, LOOKUP_WAIT
        families = {name: ENGINE_HISTOGRAMS[name].family for name in sizes}
        made = {name: BucketCounts(buckets(of, 0, custom)) for name, of in families.items()}
        self.histograms = made | {TIER_LOOKUP_WAIT: made[LOOKUP_WAIT]}

    def add(self, name: str, number: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + number

    def put(self, name: str, number: float) -> None:
        """The value of a gauge."""
        self.counts[name] = number

    def observe(self, histogram: str, value: float) -> None:
        self.histograms[histogram].add(value)

    def looked_for(self, num_blocks: int, size: int, loaded: Mapping[str, int]) -> None:
        """A prompt had this many blocks of `size` tokens after its cached prefix. `loaded`: tokens, by tier."""
        self.add(PLAIN[0], num_blocks * size)
        self.add(PLAIN[1], sum(loaded.values()))
        for kind in self.kinds:
            found = loaded.get(kind, 0)
            self.add(f"kv_tier_queries:{kind}", num_blocks)
            self.add(f"kv_tier_hits:{kind}", found // size)
            self.add(f"kv_cached_tokens:{kind}", found)
            num_blocks -= found // size
