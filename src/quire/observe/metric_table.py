"""The table of all metrics, one entry each.

Names are those that dashboards, routers and autoscalers for vLLM read; old names are entries of their own.
The text format appends `_total` to a counter's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.protocol.output import FINISHES, EngineStats

Value = float | Mapping[str, float]
"""A number, or one number for each value of the entry's own label."""


@dataclass(frozen=True, slots=True)
class SnapshotMetric:
    """A metric that is read from the engine's statistics at each scrape."""

    name: str
    kind: str
    """gauge or counter."""
    help: str
    value: Callable[[EngineStats], Value]
    label: str | None = None
    legacy: bool = False


@dataclass(frozen=True, slots=True)
class ObservedMetric:
    """A histogram over requests."""

    name: str
    family: str
    """Names the buckets, as in `buckets.FAMILIES`."""
    help: str


STATES = ("awake", "weights_offloaded", "discard_all")


def finished(stats: EngineStats) -> Mapping[str, float]:
    return {reason: stats.finished.get(reason, 0) for reason in FINISHES}


def hit_rate(stats: EngineStats) -> float:
    return stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0


def external_hits(stats: EngineStats) -> float:
    """Prompt tokens whose KV was kept outside the KV cache."""
    return stats.counts.get("external_prefix_cache_hits", 0.0)


def by_tier(name: str) -> Callable[[EngineStats], Mapping[str, float]]:
    """What EngineStats.counts has as `name:KIND`, by kind of tier."""

    def read(stats: EngineStats) -> Mapping[str, float]:
        found = ((key.partition(":"), count) for key, count in stats.counts.items())
        return {kind: count for (first, _, kind), count in found if first == name}

    return read


KEPT_TOKENS = "kv_cached_tokens"
"""EngineStats.counts: prompt tokens that were loaded, by kind of store."""


def cached_by_source(stats: EngineStats) -> dict[str, float]:
    """`device`: the KV cache; then the kinds of stores that have kept blocks."""
    device = {"device": stats.prefix_hits - external_hits(stats), "disk": 0.0}
    return device | dict(by_tier(KEPT_TOKENS)(stats))


ENCODER_BYTES, ENCODER_BYTES_MAX = "encoder_cache_bytes", "encoder_cache_bytes_max"
"""EngineStats.counts: of the encoder cache, and its bound."""

SNAPSHOTS: tuple[SnapshotMetric, ...] = (
    SnapshotMetric("vllm:num_requests_running", "gauge", "Running requests.", lambda s: s.running),
    SnapshotMetric("vllm:num_requests_waiting", "gauge", "Waiting requests.", lambda s: s.waiting),
    SnapshotMetric(
        "vllm:num_requests_waiting_by_reason", "gauge", "Waiting requests, by the reason of waiting.",
        lambda s: {"capacity": s.waiting - s.deferred, "deferred": s.deferred}, label="reason",
    ),
    SnapshotMetric("vllm:kv_cache_usage_perc", "gauge", "Fraction of KV blocks in use, 0 to 1.", lambda s: s.kv_usage),
    SnapshotMetric("vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    SnapshotMetric("vllm:prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    SnapshotMetric("vllm:num_preemptions", "counter", "Requests preempted for lack of KV blocks.", lambda s: s.preemptions),
    SnapshotMetric("vllm:prompt_tokens", "counter", "Prompt tokens processed.", lambda s: s.prompt_tokens),
    SnapshotMetric(
        "vllm:prompt_tokens_by_source", "counter", "Prompt tokens, by the source of their KV.",
        lambda s: {
            "local_compute": max(0, s.prompt_tokens - s.prefix_hits),
            "local_cache_hit": s.prefix_hits - external_hits(s),
            "external_kv_transfer": external_hits(s),
        },
        label="source",
    ),
    SnapshotMetric("vllm:prompt_tokens_cached", "counter", "Prompt tokens that were not computed.", lambda s: s.prefix_hits),
    SnapshotMetric("vllm:prompt_tokens_cached_by_source", "counter", "Prompt tokens that were not computed, by the source of their KV.",
             cached_by_source, label="source"),
    SnapshotMetric("vllm:generation_tokens", "counter", "Tokens generated.", lambda s: s.generation_tokens),
    SnapshotMetric("vllm:request_success", "counter", "Finished requests, by finish reason.", finished, label="finished_reason"),
    SnapshotMetric("vllm:engine_sleep_state", "gauge", "1 for the engine's current state.",
             lambda s: {state: state == s.state for state in STATES}, label="sleep_state"),
    SnapshotMetric("quire:engine_steps", "counter", "Forward passes.", lambda s: s.steps),
    # old names
    SnapshotMetric("vllm:gpu_cache_usage_perc", "gauge", "Old name of kv_cache_usage_perc.", lambda s: s.kv_usage, legacy=True),
    SnapshotMetric("vllm:gpu_prefix_cache_queries", "counter", "Old name of prefix_cache_queries.", lambda s: s.prefix_queries, legacy=True),
    SnapshotMetric("vllm:gpu_prefix_cache_hits", "counter", "Old name of prefix_cache_hits.", lambda s: s.prefix_hits, legacy=True),
    SnapshotMetric("vllm:gpu_prefix_cache_hit_rate", "gauge", "prefix_cache_hits / prefix_cache_queries.", hit_rate, legacy=True),
    SnapshotMetric("vllm:num_requests_swapped", "gauge", "Preempted requests whose KV blocks have a place in the swap space.", lambda s: s.counts.get("requests_swapped", 0)),
    SnapshotMetric("vllm:cpu_cache_usage_perc", "gauge", "Used part of the swap space, from 0 to 1.", lambda s: s.counts.get("host_cache_usage", 0)),
    SnapshotMetric("vllm:kv_offload_cpu_cache_usage_perc", "gauge", "Used part of the swap space, from 0 to 1: vLLM's new name.", lambda s: s.counts.get("host_cache_usage", 0)),
    SnapshotMetric("vllm:kv_offload_cpu_allocation_size", "gauge", "Bytes of the swap space.", lambda s: s.counts.get("kv_tier_limit:host", 0)),
    SnapshotMetric("vllm:kv_offload_tiering_active_promotion_jobs", "gauge", "Requests that wait for KV blocks from a tier.", lambda s: s.counts.get("kv_active_loads", 0)),
    SnapshotMetric("vllm:kv_offload_tiering_active_cascade_jobs", "gauge", "KV blocks that wait to be written to a tier, or are being written.", lambda s: s.counts.get("kv_active_saves", 0)),
    SnapshotMetric("vllm:kv_offload_tiering_read_bytes", "counter", "As kv_offload_load_bytes: vLLM's name for tiers.", by_tier("kv_load_bytes"), label="tier"),
    SnapshotMetric("vllm:kv_offload_tiering_write_bytes", "counter", "As kv_offload_store_bytes: vLLM's name for tiers.", by_tier("kv_store_bytes"), label="tier"),
    SnapshotMetric("vllm:kv_offload_tiering_read_time", "counter", "As kv_offload_load_time: vLLM's name for tiers.", by_tier("kv_load_time"), label="tier"),
    SnapshotMetric("vllm:kv_offload_tiering_write_time", "counter", "As kv_offload_store_time: vLLM's name for tiers.", by_tier("kv_store_time"), label="tier"),
    SnapshotMetric("quire:kv_tier_bytes", "gauge", "Bytes that a tier uses now: KV blocks of all models in the folder; the swap space; the whole memory of a redis server.", by_tier("kv_tier_bytes"), label="tier"),
    SnapshotMetric("quire:kv_tier_limit_bytes", "gauge", "Bytes that a tier may use; 0: a redis server without a limit.", by_tier("kv_tier_limit"), label="tier"),
    SnapshotMetric("quire:encoder_cache_bytes", "gauge", "Bytes of encoded pictures, videos and sound that the encoder cache of a rank has.", lambda s: s.counts.get(ENCODER_BYTES, 0)),
    SnapshotMetric("quire:encoder_cache_bytes_max", "gauge", "Bound of these bytes; known after the first picture.", lambda s: s.counts.get(ENCODER_BYTES_MAX, 0)),
)  # fmt: skip

OBSERVED: tuple[ObservedMetric, ...] = (
    ObservedMetric("vllm:time_to_first_token_seconds", "time_to_first_token", "Arrival to first token."),
    ObservedMetric("vllm:inter_token_latency_seconds", "inter_token_latency", "Seconds between two outputs of a request."),
    ObservedMetric("vllm:request_time_per_output_token_seconds", "inter_token_latency", "A request's mean time per token after its first."),
    ObservedMetric("vllm:e2e_request_latency_seconds", "request_latency", "Arrival to last token."),
    ObservedMetric("vllm:request_queue_time_seconds", "request_latency", "Arrival to first step."),
    ObservedMetric("vllm:request_inference_time_seconds", "request_latency", "First step to last token."),
    ObservedMetric("vllm:request_prefill_time_seconds", "request_latency", "First step to first token."),
    ObservedMetric("vllm:request_decode_time_seconds", "request_latency", "First token to last token."),
    ObservedMetric("vllm:request_prompt_tokens", "request_tokens", "Prompt tokens of a request."),
    ObservedMetric("vllm:request_generation_tokens", "request_tokens", "Tokens generated for a request."),
    ObservedMetric("vllm:request_max_num_generation_tokens", "request_tokens", "Tokens of the longest completion of a request."),
    ObservedMetric("vllm:request_params_max_tokens", "request_tokens", "max_tokens of a request."),
    ObservedMetric("vllm:request_prefill_kv_computed_tokens", "request_tokens", "Prompt tokens computed, without those found in the cache."),
    ObservedMetric("vllm:request_params_n", "request_params_n", "n of a request."),
    ObservedMetric("vllm:request_num_preemptions", "request_num_preemptions", "How often a request was preempted."),
)  # fmt: skip

ITERATION, RESIDENCY = "iteration_tokens", "kv_cache_residency"
TRANSFER, LOOKUP_WAIT = "kv_transfer_size", "kv_lookup_wait"
ENGINE_HISTOGRAMS: dict[str, ObservedMetric] = {
    "step_tokens": ObservedMetric("vllm:iteration_tokens_total", ITERATION, "Tokens per step: prompt tokens and generated tokens."),
    "lifetime": ObservedMetric("vllm:kv_block_lifetime_seconds", RESIDENCY, "Seconds from the allocation of a KV block to its eviction."),
    "idle": ObservedMetric("vllm:kv_block_idle_before_evict_seconds", RESIDENCY, "Seconds since the last use of an evicted KV block."),
    "gap": ObservedMetric("vllm:kv_block_reuse_gap_seconds", RESIDENCY, "Seconds between two uses of a KV block."),
    "kv_load_size": ObservedMetric("vllm:kv_offload_load_size", TRANSFER, "Bytes that one request loaded from tiers."),
    "kv_store_size": ObservedMetric("vllm:kv_offload_store_size", TRANSFER, "Bytes that one step copied for tiers."),
    "kv_lookup": ObservedMetric("vllm:kv_offload_lookup_sync_delay_seconds", "kv_lookup", "Seconds in which the scheduler looked for the blocks of a waiting request."),
    "kv_lookup_wait": ObservedMetric("vllm:kv_offload_lookup_async_delay_seconds", LOOKUP_WAIT, "Seconds that a request waited until a shared store said which blocks it has."),
    "kv_tier_lookup_wait": ObservedMetric("vllm:kv_offload_tiering_lookup_async_delay_seconds", LOOKUP_WAIT, "The same: vLLM's name for tiers."),
}  # fmt: skip
"""Histograms that the engine fills, by their names in EngineStats.histograms."""

GAUGES = {
    "kv_tier_bytes", "kv_tier_limit", "kv_active_loads", "kv_active_saves", "requests_swapped", "host_cache_usage", KEPT_TOKENS,
    ENCODER_BYTES, ENCODER_BYTES_MAX,
}  # fmt: skip
"""Names in EngineStats.counts that entries of SNAPSHOTS read."""

PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
COUNT_LABELS: dict[str, str] = {
    PER_POSITION: "position",
    **dict.fromkeys(("kv_load_bytes", "kv_store_bytes", "kv_load_time", "kv_store_time"), "tier"),
    **dict.fromkeys(("kv_tier_queries", "kv_tier_hits", "kv_tier_errors"), "tier"),
    "kv_load_failures": "reason",
}
COUNTS: dict[str, tuple[str, str]] = {
    "flops": ("vllm:estimated_flops_per_gpu", "Floating-point operations of all steps, estimated."),
    "read_bytes": ("vllm:estimated_read_bytes_per_gpu", "Bytes of weights and KV that steps read, estimated."),
    "write_bytes": ("vllm:estimated_write_bytes_per_gpu", "Bytes of KV that steps wrote, estimated."),
    "prefix_kv_hits": ("quire:prefix_cache_kv_hits", "Prompt tokens whose KV blocks were cached; a model with recurrent states can use only those before a copy of its states."),
    "prefix_state_hits": ("quire:prefix_cache_state_hits", "Prompt tokens before the last cached copy of the recurrent states: those that were not computed."),
    "spec_decode_num_drafts": ("vllm:spec_decode_num_drafts", "How often draft tokens of a request were verified."),
    "spec_decode_num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    "spec_decode_num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were right."),
    PER_POSITION: (f"vllm:{PER_POSITION}", "Draft tokens that were right, by their position in the draft."),
    "mm_cache_queries": ("vllm:mm_cache_queries", "Pictures that steps looked up in the encoder cache."),
    "mm_cache_hits": ("vllm:mm_cache_hits", "Of these, pictures that were there."),
    "encoder_passes": ("quire:encoder_passes", "Pictures that the vision tower encoded."),
    "encoder_seconds": ("quire:encoder_seconds", "Seconds that the vision tower took."),
    "encoder_rows": ("quire:encoder_rows", "Tokens of these pictures."),
    "requests_resumed": ("quire:requests_resumed", "Requests that went on in this engine after another process died while they ran; it does not restart at 0 with the process."),
    "external_prefix_cache_queries": ("vllm:external_prefix_cache_queries", "Prompt tokens that the KV cache lacked, in full blocks, while a tier was open."),
    "external_prefix_cache_hits": ("vllm:external_prefix_cache_hits", "Of these, tokens whose blocks were loaded from a tier."),
    "kv_tier_queries": ("vllm:kv_offload_tiering_chunk_queries", "Blocks of prompts that the KV cache and nearer tiers lacked."),
    "kv_tier_hits": ("vllm:kv_offload_tiering_chunk_hits", "Of these, blocks that were loaded from the tier."),
    "kv_tier_errors": ("vllm:kv_offload_tiering_promotion_job_failures", "Blocks that a tier should have had, and did not give as they should be."),
    "kv_load_bytes": ("vllm:kv_offload_load_bytes", "Bytes of KV blocks read from a tier."),
    "kv_store_bytes": ("vllm:kv_offload_store_bytes", "Bytes of KV blocks written to a tier."),
    "kv_load_time": ("vllm:kv_offload_load_time", "Seconds in which threads read KV blocks from stores; several may read at once."),
    "kv_store_time": ("vllm:kv_offload_store_time", "Seconds in which a thread wrote KV blocks to stores."),
    "kv_stores_skipped": ("vllm:kv_offload_stores_skipped", "KV blocks that should have been written to a tier, and were dropped."),
    "kv_load_failures": ("quire:kv_tier_load_failures", "Loads of a prompt that ended before their last block, by reason."),
    "recorder_stops": ("quire:flight_recorder_stops", "1: the flight recorder has stopped after a write error."),
}  # fmt: skip
"""Counters that the engine computes at each scrape, by their names in EngineStats.counts."""

INFOS: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm:lora_requests_info": (
        "LoRA adapters of running and of waiting requests, as labels; the value is the time of the scrape. Only with `--enable-lora`.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
}
"""Gauges whose labels are texts of the engine, by their names in EngineStats.labels."""

ALIASES: dict[str, str] = {
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
"""Old histogram -> the one that replaced it."""
