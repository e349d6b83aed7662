"""vLLM's flags that are no field of Quire: one row each, with how Quire handles it.

    A  accepted: `to` gives its meaning in Quire, or Quire always behaves that way
    W  accepted with a warning that says why it has no effect, or what replaces it
    E  refused, with the missing feature's name; its default value is accepted

Read by `from_keywords.py`. A flag is in a dataclass or in this table, never in both, never in neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from quire.config.unsupported import LORA, SPECULATION

Treatment = Literal["A", "W", "E"]


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """One flag."""

    name: str
    kind: Literal["flag", "value", "list"]
    """Its form on a command line: --x, --x VALUE, --x A B."""
    treatment: Treatment
    say: str
    """W: why it has no effect, or what replaces it. E: "feature: remedy"."""
    quiet: tuple[Any, ...] = ()
    """Values that are accepted without a warning, besides None and (for a flag) False."""
    to: Callable[[Any], dict[str, Any]] | None = None
    """Returns the fields that it sets."""

    @property
    def default(self) -> Any:
        """A value that requests nothing."""
        if self.to is not None:
            return None
        return False if self.kind == "flag" else next(iter(self.quiet), None)


OLD: dict[str, VllmFlag] = {}
SHORT = {
    "speculative_config": "-sc",
    "compilation_config": "-cc",
    "optimization_level": "-O",
    "attention_config": "-ac",
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
    "nnodes": "-n",
    "node_rank": "-r",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
}


def _rows(treatment: Treatment, say: str, names: str, *, kind: str = "") -> None:
    """Add rows of one treatment. `names`: words: name (a flag), name=default[,default] (a value), name* (a list)."""
    for word in names.split():
        name, equals, defaults = word.partition("=")
        how = kind or ("value" if equals else "list" if name.endswith("*") else "flag")
        quiet = tuple(_literal(text) for text in defaults.split(",")) if defaults else ()
        _row(VllmFlag(name.rstrip("*"), how, treatment, say, quiet))  # type: ignore[arg-type]


def _row(row: VllmFlag) -> None:
    if row.name in OLD:
        raise ValueError(f"{row.name} is in the table twice")
    OLD[row.name] = row


def _literal(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return "" if text == "''" else text


def _to(
    name: str,
    kind: str,
    treatment: Treatment,
    say: str,
    to: Callable[[Any], dict[str, Any]],
    *quiet: Any,
) -> None:
    _row(VllmFlag(name, kind, treatment, say, quiet, to))  # type: ignore[arg-type]


# fmt: off
# Planned for later: refused by name

_rows("E", ": ".join(LORA), """
    enable_lora lora_modules* default_mm_loras= fully_sharded_loras enable_mixed_moe_lora_format
    enable_tower_connector_lora enable_prompt_adapter prompt_adapters*""")
_rows("W", "it configures LoRA, which is not supported yet", """
    max_loras=1 max_lora_rank=16 max_cpu_loras= lora_dtype=auto lora_extra_vocab_size=256,0 lora_target_modules*
    long_lora_scaling_factors= max_prompt_adapters=1 max_prompt_adapter_token=0 specialize_active_lora""")
_rows("E", ": ".join(SPECULATION), """
    speculative_config= spec_method= spec_model= spec_tokens= speculative_model= num_speculative_tokens=
    speculative_draft_tensor_parallel_size= speculative_max_model_len= speculative_disable_by_batch_size=
    speculative_model_quantization= ngram_prompt_lookup_max= ngram_prompt_lookup_min= speculative_token_tree=""")
_rows("W", "it tunes speculative decoding, which is not supported yet", """
    spec_decoding_acceptance_method=rejection_sampler typical_acceptance_sampler_posterior_threshold=
    typical_acceptance_sampler_posterior_alpha= speculative_disable_mqa_scorer disable_logprobs_during_spec_decoding
    num_lookahead_slots=0""")
_rows("E", "media input: send text; of a multimodal checkpoint only the text model is served", """
    limit_mm_per_prompt= mm_processor_kwargs= media_io_kwargs= default_mm_processor_kwargs= mm_encoder_only
    mm_encoder_attn_backend= mm_encoder_attn_dtype= mm_encoder_fp8_scale_path= enable_mm_embeds""")
_rows("W", "media input is not supported yet, so nothing is cached, split or guarded", """
    mm_processor_cache_gb=4,0 mm_processor_cache_type=lru mm_encoder_tp_mode=weights,data mm_shm_cache_max_object_size_mb=128
    allowed_media_domains* allowed_local_media_path='' disable_mm_preprocessor_cache interleave_mm_strings
    skip_mm_profiling video_pruning_rate= mm_tensor_ipc= trust_request_mm_kwargs disable_chunked_mm_input
    mm_encoder_attn_config= """)
_rows("A", "only text is served", "language_model_only")
_rows("E", "pooling (embedding, classifying, scoring): serve a model that generates", """
    convert=auto,none pooler_config= override_pooler_config= io_processor_plugin=""")
_rows("E", "several devices: start one server for each device", """
    decode_context_parallel_size=1 prefill_context_parallel_size=1 nnodes=1 node_rank=0 enable_eplb num_redundant_experts=0
    enable_dbo data_parallel_rank= data_parallel_start_rank= data_parallel_size_local= data_parallel_hybrid_lb
    data_parallel_external_lb data_parallel_multi_port_external_lb headless worker_use_ray engine_use_ray
    enable_elastic_ep enable_ep_weight_filter enable_fault_tolerance""")
_rows("W", "it tunes work on several devices, which is not supported yet", """
    data_parallel_address= data_parallel_rpc_port= data_parallel_backend=mp master_addr=127.0.0.1 master_port=29501
    disable_custom_all_reduce disable_nccl_for_dp_synchronization max_parallel_loading_workers= ray_workers_use_nsight
    all2all_backend= expert_placement_strategy=linear eplb_config= eplb_window_size= eplb_step_interval=
    eplb_log_balancedness dbo_decode_token_threshold= dbo_prefill_token_threshold= ubatch_size=
    cp_kv_cache_interleave_size=1 dcp_kv_cache_interleave_size=1 dcp_comm_backend= distributed_timeout_seconds= fault_tolerance_config=
    numa_bind numa_bind_nodes* numa_bind_cpus* engine_recovery_timeout_sec= """)
_rows("E", "KV transfer between servers: let each server prefill its own requests", """
    kv_transfer_config= ec_transfer_config= weight_transfer_config= kv_connector= kv_role=""")
_rows("E", "KV cache in host memory: raise gpu_memory_utilization; preempted requests are recomputed", """
    kv_offloading_size=0 kv_events_config=""")
_rows("E", "weights in host memory by group: use cpu_offload_gb, or serve a smaller model", """
    offload_group_size=0 offload_params* cpu_offload_params* offload_backend=auto""")
_rows("W", "it tunes a feature that is not supported yet", """
    kv_offloading_backend=native offload_num_in_group=1 offload_prefetch_step=1 kv_sharing_fast_prefill""")
_rows("E", "prompt embeddings and hidden states: send text or token ids", "enable_return_routed_experts return_sampling_mask")
_rows("A", "every engine supports sleep mode", "enable_sleep_mode")
_rows("W", "spans always contain all latencies", "collect_detailed_traces*")
_rows("E", "profiling: use py-spy on the engine's process, or QUIRE_LOGGING_LEVEL=DEBUG", "profiler_config=")
_rows("E", "custom reasoning markers: name a format with reasoning_parser", "reasoning_config=")
_rows("E", "this kind of plugin: register one by an entry point of the group quire.general_plugins", """
    scheduler_cls= worker_cls=auto worker_extension_cls='' tool_server= hf_config_path=
    quantization_param_path= quantization_config= """)
_rows("E", "gRPC, rendering servers and scale-out: use the HTTP server", "grpc omni tokens_only enable_scale_out")

# Not needed by this engine: accepted with a warning

_rows("W", "nothing is compiled, and steps are recorded at first use (cudagraph_capture_sizes, enforce_eager)", """
    compilation_config= optimization_level= performance_mode=balanced max_cudagraph_capture_size=
    cuda_graph_sizes* max_seq_len_to_capture=8192 max_context_len_to_capture= full_cuda_graph cudagraph_metrics use_cudagraph
    enable_layerwise_nvtx_tracing kernel_config= moe_backend=auto linear_backend=auto ir_op_priority= jit_monitor_config=     debug_dump_path=""")
_rows("W", "the scheduler and the block manager do not have this option", """
    use_v2_block_manager disable_async_output_proc scheduler_delay_factor=0 multi_step_stream_outputs
    max_num_partial_prefills=1 max_long_partial_prefills=1 disable_hybrid_kv_cache_manager watermark=0,0.01
    scheduler_reserve_full_isl max_num_active_seqs= disable_cascade_attn     hash_block_size=""")
_rows("W", "the engine has no such cache or state", """
    mamba_cache_dtype=auto mamba_ssm_cache_dtype=auto mamba_block_size= mamba_cache_mode=none,auto
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds= gdn_prefill_backend= kda_prefill_backend= replayssm_config= mamba_config=
    engram_config= diffusion_config= watermark_config= calculate_kv_scales kv_cache_dtype_skip_layers*
    kv_cache_quant_config= mamba_backend=""")
_rows("E", "a limit of the context to the sliding window: set --max-model-len to the window", "disable_sliding_window")
_rows("W", "a request that the backend of structured_outputs_config cannot serve is always refused", "guided_decoding_disable_fallback")
_rows("W", "the HTTP processes tokenize: api_server_count sets their number", """
    tokenizer_pool_size=0 tokenizer_pool_type=ray tokenizer_pool_extra_config= renderer_num_workers=1""")
_rows("W", "weights are memory-mapped from safetensors files", """
    safetensors_load_strategy=lazy,auto pt_load_map_location=cpu safetensors_prefetch_num_threads= """)
_rows("W", "logging is set by QUIRE_LOGGING_LEVEL and QUIRE_LOGGING_CONFIG_PATH", """
    logging_config= log_config_file= enable_log_outputs enable_log_deltas log_error_stack""")
_rows("W", "these metrics are not supported yet; the others are on", """
    show_hidden_metrics_for_version=
    enable_per_request_metrics enable_logging_iteration_details""")
_rows("W", "the server does not have this option", """
    enable_offline_docs h11_max_header_count= fingerprint_mode=full exclude_tools_when_tool_choice_none enable_tokenizer_info_endpoint enable_flash_late_interaction
    use_gpu_for_pooling_score use_trtllm_ragged_deepseek_prefill""")
_rows("W", "the engine does not have this option", """
    additional_config= override_neuron_config= override_attention_dtype= allow_deprecated_quantization
    device_ids* disable_frontend_logging model_class_overrides= enable_multi_modal_encoder_data_parallel""")
_rows("A", "reasoning_parser enables it", "enable_reasoning")

# Accepted under another name


def _hf(key: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {"hf_overrides": {key: value}}


def _structured(key: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {"structured_outputs_config": {key: value}}


def _guided_backend(value: Any) -> dict[str, Any]:
    name = str(value).partition(":")[0]
    name = name if name in ("guidance", "xgrammar") else "auto"  # other backends no longer exist
    return {"structured_outputs_config": {"backend": name}}


def _backend(value: Any) -> dict[str, Any]:
    backend = value.get("backend") if isinstance(value, dict) else getattr(value, "backend", None)
    return {"attention_backend": str(getattr(backend, "name", backend))} if backend else {}


_to("disable_log_requests", "flag", "W", "use enable_log_requests (off unless asked)", lambda v: {"enable_log_requests": not v})
_to("task", "value", "W", "use runner", lambda v: {"runner": v if v in ("auto", "generate") else "pooling"}, "generate", "auto")
_to("rope_scaling", "value", "W", "use hf_overrides={'rope_scaling': ...}", _hf("rope_scaling"))
_to("rope_theta", "value", "W", "use hf_overrides={'rope_theta': ...}", _hf("rope_theta"))
_to("attention_config", "value", "W", "use attention_backend; its other keys do nothing here", _backend)
_to("guided_decoding_backend", "value", "W", "use structured_outputs_config={'backend': ...}", _guided_backend, "auto")
_to("guided_decoding_disable_any_whitespace", "flag", "W", "use structured_outputs_config={'disable_any_whitespace': true}",
    _structured("disable_any_whitespace"))
_to("guided_decoding_disable_additional_properties", "flag", "W",
    "use structured_outputs_config={'disable_additional_properties': true}", _structured("disable_additional_properties"))
_to("model_tag", "value", "A", "", lambda v: {"model": v})
_to("device", "value", "W", "the device is detected; QUIRE_DEVICE=cpu or cuda forces one", lambda v: {}, "auto", "cpu")
