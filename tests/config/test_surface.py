"""Every flag that users of engines of this kind have been told: taken, taken with a warning, or refused by name.

The lists are written out here by hand, from documents and not from our tables, so that a lost row is seen.
"""

from __future__ import annotations

import pytest

from quire.config.flags import parse
from quire.config.from_keywords import engine_config
from quire.config.options import options
from quire.config.vllm_flags import OLD
from quire.errors import Unsupported

# field=value: the flag sets the field
TAKEN = """
model=some/model dtype=bfloat16 dtype=half dtype=float32 max_model_len=128 max_model_len=auto max_num_seqs=4 max_num_batched_tokens=512
gpu_memory_utilization=0.5 kv_cache_memory_bytes=1000 block_size=32 kv_cache_dtype=auto num_gpu_blocks_override=9 swap_space=4
cpu_offload_gb=0 seed=3 tokenizer=t tokenizer_mode=slow tokenizer_mode=auto max_logprobs=5 logprobs_mode=raw_logits load_format=dummy
load_format=hf load_format=npcache load_format=pt load_format=safetensors download_dir=/d revision=r code_revision=r tokenizer_revision=r config_format=hf
quantization=awq scheduling_policy=priority num_scheduler_steps=1 preemption_mode=recompute preemption_mode=swap runner=generate
model_impl=transformers model_impl=vllm generation_config=vllm chat_template=t chat_template_content_format=openai hf_token=secret
max_loras=4 max_lora_rank=64 max_cpu_loras=2 lora_dtype=float16 attention_backend=TORCH_SDPA attention_backend=XFORMERS worker_extension_cls=a.b distributed_executor_backend=mp distributed_executor_backend=uni
tensor_parallel_size=1 pipeline_parallel_size=1 data_parallel_size=1 expert_placement_strategy=round_robin long_prefill_token_threshold=7 max_num_queued_reqs=3
max_num_queued_tokens=99 host=h port=1 uds=/s root_path=/r ssl_keyfile=k ssl_certfile=c ssl_ca_certs=a ssl_cert_reqs=1 ssl_ciphers=x
api_server_count=2 data_parallel_size_local=1 data_parallel_rank=1 data_parallel_start_rank=1 data_parallel_address=1.2.3.4 data_parallel_rpc_port=9 data_parallel_backend=ray data_parallel_supervisor_port=9 shutdown_timeout=5 tool_call_parser=hermes reasoning_parser=qwen3 tool_parser_plugin=/p.py response_role=r sse_keep_alive_interval=5 uvicorn_log_level=info
otlp_traces_endpoint=http://c:4318 kv_cache_metrics_sample=0.5
disable_access_log_for_endpoints=/health,/metrics max_log_len=9 log_level=DEBUG prefix_caching_hash_algo=sha256 h11_max_incomplete_event_size=9
"""
SWITCHES = """
enable_prefix_caching enable_chunked_prefill enforce_eager trust_remote_code skip_tokenizer_init disable_log_stats enable_log_requests
enable_auto_tool_choice async_scheduling enable_prompt_tokens_details enable_force_include_usage enable_request_id_headers enable_lora fully_sharded_loras
enable_server_load_tracking trust_request_chat_template return_tokens_as_token_ids disable_uvicorn_access_log disable_fastapi_docs
headless data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb disable_frontend_multiprocessing fail_on_environ_validation legacy_metrics kv_cache_metrics allow_credentials enable_ssl_refresh use_tqdm_on_load enable_expert_parallel enable_eplb enable_prompt_embeds enable_mm_embeds trust_request_mm_kwargs interleave_mm_strings
"""
LISTS = "cudagraph_capture_sizes collect_detailed_traces served_model_name api_key allowed_hosts allowed_origins allowed_methods allowed_headers logits_processors ignore_patterns middleware lora_target_modules"
OBJECTS = (
    "hf_overrides override_generation_config model_loader_extra_config default_chat_template_kwargs"
    " custom_histogram_buckets structured_outputs_config eplb_config"
)

# Features of later work: a value that asks for one is refused, naming it
REFUSED = """
enable_prompt_adapter enable_moe_shared_loras enable_mixed_moe_lora_format
kv_transfer_config={"kv_connector":"NixlConnector"} kv_events_config={"a":1}
kv_offloading_size=4
io_processor_plugin=x
grpc enable_elastic_ep scheduler_cls=a.b worker_cls=a.b
tool_server=demo disable_sliding_window tokens_only
"""
# Nothing to tune here: taken, with a warning that says why
WARNED = """
speculative_draft_tensor_parallel_size=1 speculative_max_model_len=9 speculative_disable_by_batch_size=3 speculative_token_tree=x
lora_extra_vocab_size=512 specialize_active_lora max_lora_cls_labels=3 enable_tower_connector_lora
mm_processor_cache_type=shm compilation_config={"level":3}
optimization_level=3 performance_mode=throughput max_cudagraph_capture_size=8 cuda_graph_sizes=8
max_seq_len_to_capture=100 use_v2_block_manager disable_async_output_proc scheduler_delay_factor=0.5 multi_step_stream_outputs
max_num_partial_prefills=2 disable_hybrid_kv_cache_manager watermark=0.5 max_num_active_seqs=3 disable_cascade_attn
mamba_cache_dtype=float32 guided_decoding_backend=outlines
guided_decoding_disable_fallback tokenizer_pool_size=2 tokenizer_pool_type=x tokenizer_pool_extra_config={"a":1} renderer_num_workers=4
safetensors_load_strategy=eager show_hidden_metrics_for_version=0.9
enable_per_request_metrics logging_config={"a":1} log_config_file=/f
enable_log_outputs additional_config={"a":1} disable_custom_all_reduce max_parallel_loading_workers=2 all2all_backend=x
numa_bind enable_dbo enable_fault_tolerance worker_use_ray engine_use_ray disable_log_requests task=embed rope_scaling={"type":"linear"} rope_theta=9
attention_config={"backend":"TORCH_SDPA"} long_lora_scaling_factors=2 moe_backend=x exclude_tools_when_tool_choice_none
skip_mm_profiling video_pruning_rate=0.5 mm_encoder_attn_backend=TORCH_SDPA mm_encoder_attn_dtype=fp8
"""
# The flags that vLLM 0.32 has beside all of these
NEWER = """
--aggregate-engine-logging --anthropic-disabled-thinking-effort --aux-output-config --cohere-format --cohere-is-reasoning-model
--dcp-q-replicate --dp-supervisor-probe-failure-threshold
--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dp-sync-interval --ec-manager-config --elastic-ep-max-dp-size
--enable-batch-sharded-sampling --enable-cumem-allocator --enable-flashinfer-autotune --enable-hc-sp
--enable-moe-shared-loras --enable-nccl-comm-suspend --enable-shm-tensor-arena
--enable-trace-replay --fingerprint-value --grpc-port --jit-monitor-mode --jit-monitor-verbose --kda-decode-backend
--long-prefill-token-threshold-adaptive --mamba-ssu-algorithm --max-lora-cls-labels --max-num-scheduled-tokens
--mm-device-do-normalize --mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path --mm-hasher-algorithm
--mm-ipc-gpu-memory-gb --mm-processor-device --no-cohere-is-reasoning-model --no-dcp-q-replicate
--no-enable-batch-sharded-sampling --no-enable-cumem-allocator --no-enable-flashinfer-autotune --no-enable-hc-sp
--no-enable-mamba-shared-prefix-checkpoint --no-enable-moe-shared-loras --no-enable-nccl-comm-suspend --no-enable-shm-tensor-arena
--no-enable-trace-replay --no-jit-monitor-verbose --no-long-prefill-token-threshold-adaptive --no-mm-device-do-normalize
--no-sleep-mode-offload-cudagraph --no-swa-bounded-replay --no-use-fp64-gumbel --no-use-replayssm
--prefill-schedule-interval --prefix-match-unit
--replayssm-buffer-len --safetensors-prefetch-block-size --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names
--sparse-indexer-topk-backend --swa-bounded-replay --use-fp64-gumbel --use-replayssm --video-pruning-method
"""
SILENT = """
enable_reasoning enable_sleep_mode max_loras=1 swap_space=0 device=auto device=cpu task=generate
mm_encoder_tp_mode=weights mm_encoder_tp_mode=data scheduler_delay_factor=0 convert=none
"""


def words(line: str) -> list[list[str]]:
    """`name=value` as a command line has it."""
    found = []
    for word in line.split():
        name, equals, value = word.partition("=")
        flag = f"--{name.replace('_', '-')}"
        found.append([flag, value] if equals else [flag])
    return found


def as_id(value: object) -> str:
    return "=".join(value) if isinstance(value, list) else str(value)


def field(config, name):
    return getattr(getattr(config, options()[name].section), name)


@pytest.mark.parametrize("argv", words(TAKEN), ids=as_id)
def test_a_flag_sets_its_field(argv, warnings):
    flag, text = argv
    name = flag[2:].replace("-", "_")
    value = field(parse(argv), name)
    assert str(value) == text or float(value) == float(text)
    assert field(parse([f"{flag.replace('-', '_').replace('__', '--', 1)}={text}"]), name) == value
    assert not warnings


@pytest.mark.parametrize("name", SWITCHES.split())
def test_a_switch_has_two_forms(name):
    dashed = name.replace("_", "-")
    assert field(parse([f"--{dashed}"]), name) is True
    assert field(parse([f"--no-{dashed}"]), name) is False
    assert field(parse([f"--no_{name}"]), name) is False
    assert field(parse([f"--{dashed}=false"]), name) is False


@pytest.mark.parametrize("name", LISTS.split())
def test_a_list_option_consumes_all_following_values(name):
    items, given = ["one", "two"], ["one", "two"]
    if name == "cudagraph_capture_sizes":
        items, given = [1, 2], ["1", "2"]
    config = parse(["m", f"--{name.replace('_', '-')}", *given, "--seed", "3"])
    assert list(field(config, name)) == items


@pytest.mark.parametrize("name", OBJECTS.split())
def test_an_object_is_json_or_dotted(name):
    flag = f"--{name.replace('_', '-')}"
    whole = field(parse([flag, '{"a": {"b": 1}, "c": [1, "x"]}']), name)
    assert whole == {"a": {"b": 1}, "c": [1, "x"]}
    assert field(parse([f"{flag}.a.b", "1", f"{flag}.c+", "1,x"]), name) == whole
    assert field(parse([flag, '{"a": {"b": 2}}', f"{flag}.c", "[1]"]), name) == {
        "a": {"b": 2},
        "c": [1],
    }


@pytest.mark.parametrize("argv", words(REFUSED), ids=as_id)
def test_later_work_is_refused_by_name(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert argv[0] in said
    assert "not supported yet: " in said  # ... and what to do about it
    value = argv[1] if len(argv) > 1 else True
    with pytest.raises(Unsupported, match=argv[0][2:].replace("-", "_")):
        engine_config({argv[0][2:].replace("-", "_"): value})


@pytest.mark.parametrize("argv", words(WARNED), ids=as_id)
def test_ineffective_vllm_options_are_reported(argv, warnings):
    parse(argv)
    assert len(warnings) == 1
    assert warnings[0].startswith((f"{argv[0]} has no effect: ", f"{argv[0]} is an old name: "))


@pytest.mark.parametrize(
    ("more", "level"), [({}, "INFO"), ({"use_v2_block_manager": True}, "WARNING")], ids=as_id
)
def test_all_of_them_are_in_one_line_also_with_the_default_of_vllm(more, level, caplog):
    names = {
        "tokenizer_pool_type": "ray",
        "lora_extra_vocab_size": 256,
        "max_prompt_adapters": None,
    }
    with caplog.at_level("INFO", "quire"):
        engine_config({**names, **more})
    (record,) = caplog.records
    assert record.levelname == level
    said = [part.split(" has no effect: ")[0] for part in record.getMessage().split("; ")]
    assert said == ["tokenizer_pool_type", "lora_extra_vocab_size", *more]


@pytest.mark.parametrize("flag", NEWER.split())
def test_a_flag_of_vllm_0_32_is_known(flag, warnings):
    """None ends the start with "unknown flag"; one that asks for something is answered."""
    name = flag[2:].replace("-", "_")
    if flag.startswith("--no-"):
        parse([flag])
        assert not warnings
        return
    row = OLD[name]
    try:
        parse([flag] if row.kind == "flag" else [flag, "7"])
    except SystemExit:
        assert row.treatment == "E"
    else:
        assert [text.split()[0] for text in warnings] == [flag]


def test_the_number_of_scheduled_tokens_is_that_of_a_step(warnings):
    assert parse(["--max-num-scheduled-tokens", "4K"]).scheduler.max_num_batched_tokens == 4096
    both = ["--max-num-scheduled-tokens", "4096", "--max-num-batched-tokens", "512"]
    assert parse(both).scheduler.max_num_batched_tokens == 512
    assert len(warnings) == 2


@pytest.mark.parametrize("argv", words(SILENT), ids=as_id)
def test_defaults_of_ineffective_options_are_not_reported(argv, warnings):
    parse(argv)
    assert not warnings


def test_a_name_is_a_field_or_a_row_and_not_both():
    assert not set(options()) & set(OLD)


@pytest.mark.parametrize(
    ("short", "name", "value"),
    [
        ("-tp", "tensor_parallel_size", "2"),
        ("-pp", "pipeline_parallel_size", "2"),
        ("-dp", "data_parallel_size", "2"),
        ("-asc", "api_server_count", "3"),
        ("-q", "quantization", "awq"),
        ("--device-memory-utilization", "gpu_memory_utilization", "0.5"),
    ],
)
def test_short_forms(short, name, value):
    assert str(field(parse([short, value]), name)) == value
    assert str(field(parse([f"{short}={value}"]), name)) == value


@pytest.mark.parametrize(
    "argv",
    [["-O3"], ["-O", "3"], ["-O=3"], ["-cc.mode=3"], ["-cc", '{"mode": 3}'], ["-ac.x=1"]],
    ids=as_id,
)
def test_short_forms_of_ineffective_options(argv, warnings):
    parse(argv)
    assert len(warnings) == 1


def test_the_short_forms_of_several_machines():
    found = parse(["-n", "2", "-r", "1", "--headless"])
    assert (found.parallel.nnodes, found.parallel.node_rank, found.server.headless) == (2, 1, True)


def test_expert_parallel_has_a_short_form():
    assert parse(["-ep"]).parallel.enable_expert_parallel


# The same names as keywords of a program, with values as Python has them

KEYWORDS = {
    "taken": {
        "model": "m", "dtype": "float16", "gpu_memory_utilization": 0.9, "max_model_len": 128, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "enable_prefix_caching": False, "enable_chunked_prefill": True, "enforce_eager": True,
        "trust_remote_code": True, "served_model_name": ["a", "b"], "chat_template": "{{ x }}", "seed": 1,
        "disable_log_stats": True, "scheduling_policy": "priority", "num_scheduler_steps": 1, "preemption_mode": "swap",
        "kv_cache_dtype": "fp8", "block_size": 16, "num_gpu_blocks_override": 8, "swap_space": 4, "cpu_offload_gb": 0,
        "tokenizer": "t", "tokenizer_mode": "slow", "skip_tokenizer_init": True, "max_logprobs": 20, "load_format": "dummy",
        "download_dir": "/d", "revision": "r", "code_revision": "r", "tokenizer_revision": "r", "config_format": "hf",
        "model_loader_extra_config": {"a": 1}, "hf_overrides": {"a": 1}, "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes", "reasoning_parser": "qwen3", "distributed_executor_backend": "mp", "attention_backend": "FLASH_ATTN",
        "runner": "generate", "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2,
        "enable_expert_parallel": True, "quantization": "awq", "logits_processors": ["a:B"], "logprobs_mode": "raw_logits",
        "override_generation_config": {"top_p": 0.5}, "hf_token": True, "kv_cache_memory_bytes": 1 << 30,
        "pooler_config": {"task": "embed"}, "enable_lora": True, "max_loras": 4, "max_lora_rank": 64, "async_scheduling": True, "generation_config": "vllm", "structured_outputs_config": {"backend": "auto"},
    },
    "warned": {
        "disable_log_requests": True, "tokenizer_pool_size": 2, "tokenizer_pool_type": "thread", "lora_extra_vocab_size": 9,
        "mm_processor_cache_type": "shm",
        "task": "embed", "compilation_config": 3, "disable_custom_all_reduce": True,
        "guided_decoding_backend": "xgrammar", "use_v2_block_manager": True, "max_seq_len_to_capture": 9, "otlp_traces_endpoint": "http://c:4318",
    },
    "refused": {
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        "kv_offloading_size": 4.0,
    },
    "silent": {
        "enable_sleep_mode": True, "mm_encoder_tp_mode": "weights", "enable_reasoning": True, "max_loras": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("treatment", "name", "value"),
    [(how, name, value) for how, names in KEYWORDS.items() for name, value in names.items()],
    ids=as_id,
)
def test_keywords(treatment, name, value, warnings):
    if treatment == "refused":
        with pytest.raises(Unsupported, match=rf"^{name} \(.*\) is not supported yet: "):
            engine_config({name: value})
        return
    config = engine_config({name: value})
    assert len(warnings) == (treatment == "warned")
    if treatment == "taken":
        assert field(config, name) == value
    elif treatment == "warned":
        assert warnings[0].startswith(f"{name} ")


def test_a_number_format_of_torch_is_a_name():
    class Dtype:
        def __str__(self):
            return "torch.bfloat16"

    assert engine_config({"dtype": Dtype()}).model.dtype == "bfloat16"


def test_a_pooling_server_without_a_model_serves_the_embedder():
    assert parse(["--runner", "pooling"]).model.model == "quire-tiny-embed"
    assert parse(["--runner", "pooling", "--model", "m"]).model.model == "m"
    assert parse([]).model.model == "quire-tiny"
