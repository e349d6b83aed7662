"""From the user's configuration to the resolved one: lengths, dtypes, the token budget of a step, refusals."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from small_llama import CPU, LLAMA

import quire
from quire.config.checkpoint_dtype import stored_dtype
from quire.config.context_length import model_length
from quire.config.options import options
from quire.config.resolve import overridden
from quire.errors import ConfigError, Unsupported

# Lengths


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 512}, 512),
        ({"max_position_embeddings": 4096, "model_max_length": 2048}, 2048),
        ({}, 2048),
        ({"max_position_embeddings": 1000, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4000),
        ({"max_position_embeddings": 1000, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 2000),
        ({"max_position_embeddings": 8000, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 8000),
        ({"max_position_embeddings": 8000, "rope_scaling": {"type": "su", "factor": 8.0}}, 8000),
        ({"max_position_embeddings": 8000, "rope_scaling": {"rope_type": "longrope", "factor": 8}}, 8000),
        ({"max_position_embeddings": 8000, "rope_scaling": {"type": "mrope"}}, 8000),
        # yarn counts from the length before scaling, whichever of the two config.json has
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 1000, "rope_scaling": {"type": "yarn", "factor": 2.0}}, 2000),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 4000,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            4000,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_the_context_length_comes_from_the_model(config, length):
    assert model_length(config)[0] == length


def test_the_models_own_length_is_the_default(settle):
    assert (settle().max_model_len, settle().auto_max_model_len) == (1024, False)
    assert settle(max_model_len=100).max_model_len == 100
    assert settle(max_model_len=1024).max_model_len == 1024


@pytest.mark.parametrize("auto", ["auto", -1])
def test_auto_leaves_the_length_to_memory(settle, auto):
    resolved = settle(max_model_len=auto)
    assert (resolved.max_model_len, resolved.auto_max_model_len) == (1024, True)


def test_longer_than_the_model_is_refused(settle, monkeypatch, warnings):
    with pytest.raises(ConfigError) as why:
        settle(max_model_len=1025)
    said = str(why.value)
    assert "max_model_len=1025" in said
    assert "max_position_embeddings=1024" in said
    assert "--max-model-len 1024" in said
    assert "--hf-overrides" in said
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert settle(max_model_len=1025).max_model_len == 1025
    assert "may be nonsense" in warnings[0]
    with pytest.raises(ConfigError, match="no positions beyond"):
        settle({"model_type": "gpt2"}, max_model_len=1025)


@pytest.mark.parametrize("length", [0, -2, "long"])
def test_invalid_lengths_are_refused(settle, length):
    with pytest.raises(ConfigError, match=f"max_model_len='?{length}'?: "):
        settle(max_model_len=length)


def test_a_config_without_a_length(settle, warnings):
    assert settle({"max_position_embeddings": None}).max_model_len == 2048
    assert "--max-model-len" in warnings[0]
    assert settle({"max_position_embeddings": None}, max_model_len=5000).max_model_len == 5000


# Number formats


@pytest.mark.parametrize(
    ("stored", "native", "asked", "dtype"),
    [
        ("bfloat16", ("bfloat16", "float32"), "auto", "bfloat16"),
        ("bfloat16", ("float32",), "auto", "bfloat16"),
        ("float16", ("bfloat16", "float16", "float32"), "auto", "float16"),
        ("float16", ("bfloat16", "float32"), "auto", "bfloat16"),
        ("float16", ("float32",), "auto", "float32"),
        ("float32", ("bfloat16", "float32"), "auto", "bfloat16"),
        ("float32", ("float32",), "auto", "float32"),
        ("bfloat16", ("bfloat16", "float32"), "float", "float32"),
        ("bfloat16", ("bfloat16", "float32"), "half", "float16"),
        ("float32", ("float32",), "bfloat16", "bfloat16"),
    ],
)
def test_the_compute_dtype_is_resolved(settle, stored, native, asked, dtype):
    facts = replace(CPU, dtypes=native)
    assert settle({"dtype": stored}, facts, dtype=asked).dtype == dtype
    assert (
        settle({"dtype": None, "torch_dtype": f"torch.{stored}"}, facts, dtype=asked).dtype == dtype
    )


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text"])
def test_models_that_overflow_in_float16(settle, kind):
    facts = replace(CPU, dtypes=("float16", "float32"))
    gemma = {"model_type": kind, "dtype": "float16"}
    assert settle(gemma, facts).dtype == "bfloat16"
    with pytest.raises(
        ConfigError, match=f"{kind} models overflow in float16; use --dtype bfloat16"
    ):
        settle(gemma, facts, dtype="half")


def test_the_format_of_the_weight_files(tmp_path):
    header = {
        "a": {"dtype": "F16"},
        "b": {"dtype": "F16"},
        "c": {"dtype": "F32"},
        "__metadata__": {},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert stored_dtype(str(tmp_path), {}) == "float16"
    assert stored_dtype(str(tmp_path), {"dtype": "bfloat16"}) == "bfloat16"
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert stored_dtype(str(tmp_path), {}) == "float32"


# The step


@pytest.mark.parametrize(
    ("keywords", "rows", "tokens"),
    [
        ({}, 256, 2048),
        ({"max_num_seqs": 8}, 8, 2048),
        ({"max_num_seqs": 1}, 1, 1024),  # one request cannot use more
        ({"max_num_batched_tokens": 100}, 100, 100),
        ({"max_num_seqs": 4000}, 4000, 4000),
        ({"enable_chunked_prefill": False}, 256, 2048),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}, 256, 1024),
        ({"max_model_len": 16, "max_num_seqs": 4}, 4, 64),
    ],
    ids=str,
)
def test_the_steps_budget(settle, keywords, rows, tokens):
    resolved = settle(**keywords)
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (rows, tokens)


def test_without_chunks_a_prompt_must_fit_into_a_step(settle):
    long = {"max_position_embeddings": 5000}
    assert settle(long, enable_chunked_prefill=False).max_num_batched_tokens == 5000
    with pytest.raises(ConfigError) as why:
        settle(enable_chunked_prefill=False, max_num_batched_tokens=512)
    said = str(why.value)
    assert "max_num_batched_tokens=512 is less than max_model_len=1024" in said
    assert "enable_chunked_prefill is off" in said
    for remedy in (
        "--max-num-batched-tokens 1024",
        "--max-model-len 512",
        "--enable-chunked-prefill",
    ):
        assert remedy in said
    assert settle(enable_chunked_prefill=False, max_num_batched_tokens=512, max_model_len=512)
    assert settle(max_num_batched_tokens=512).chunked_prefill


def test_a_step_has_a_token_for_each_request(settle):
    with pytest.raises(ConfigError, match="--max-num-seqs 8 or --max-num-batched-tokens 9"):
        settle(max_num_seqs=9, max_num_batched_tokens=8)


# The rest


def test_defaults_of_the_platform(settle):
    resolved = settle()
    assert (resolved.block_size, resolved.depth, resolved.executor) == (64, 1, "uni")
    assert (resolved.prefix_caching, resolved.attention_backend) == (True, None)
    assert settle(facts=replace(CPU, depth=2, block_size=16)).depth == 2
    assert settle(block_size=32).block_size == 32


@pytest.mark.parametrize(
    ("keywords", "depth", "words"),
    [
        ({"async_scheduling": True}, 2, 0),
        ({"async_scheduling": False, "num_scheduler_steps": 8}, 1, 0),
        ({"num_scheduler_steps": 1}, 1, 0),
        ({"num_scheduler_steps": 8}, 2, 1),
    ],
    ids=str,
)
def test_depth(settle, warnings, keywords, depth, words):
    assert settle(**keywords).depth == depth
    assert len(warnings) == words


def test_prefix_caching(settle, warnings):
    assert settle(enable_prefix_caching=True).prefix_caching
    assert not settle(enable_prefix_caching=False).prefix_caching
    assert not settle(per_request_cache=True).prefix_caching
    assert not warnings
    assert not settle(per_request_cache=True, enable_prefix_caching=True).prefix_caching
    assert "prefix caching stays off" in warnings[0]


def test_attention_backends(settle, monkeypatch, warnings):
    assert settle(attention_backend="torch_sdpa").attention_backend == "TORCH_SDPA"
    assert settle(attention_backend="auto").attention_backend is None
    assert not warnings
    assert settle(attention_backend="XFORMERS").attention_backend is None
    assert (
        warnings.pop() == "attention_backend=XFORMERS is an old name: using the platform's backend"
    )
    assert (
        settle(attention_backend="FLASHINFER").attention_backend == "FLASHINFER"
    )  # refused where it is looked up
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")  # set for a whole fleet, though
    assert settle(attention_backend="FLASHINFER").attention_backend is None
    assert "VLLM_ATTENTION_BACKEND=FLASHINFER does not support a test" in warnings.pop()
    assert (
        settle(facts=replace(CPU, device="cuda"), attention_backend="FLASHINFER").attention_backend
        == "FLASHINFER"
    )


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"swap_space": 0, "preemption_mode": "recompute"}, ""),
        ({"swap_space": 4}, ""),
        ({"preemption_mode": "swap"}, ""),
        ({"swap_space": 4, "preemption_mode": "recompute"}, "swap_space=4 has no effect: preemption_mode=recompute computes"),
        ({"swap_space": 4, "enable_prefix_caching": False}, "swap_space has no effect: without enable_prefix_caching"),
        ({"prefix_caching_hash_algo": "sha256"}, ""),
        ({"prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo=xxhash has no effect: blocks are found by blake2b"),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, "prefix_caching_hash_algo=sha256_cbor has no effect: blocks are found by sha256"),
        ({"model_loader_extra_config": {"a": 1}}, "model_loader_extra_config has no effect: "),
        ({"enforce_eager": True}, "enforce_eager has no effect: on a CPU"),
        ({"trust_remote_code": True}, "trust_remote_code has no effect: the checkpoint contains no code"),
    ],
    ids=str,
)  # fmt: skip
def test_ineffective_options_are_reported(settle, warnings, keywords, says):
    settle(**keywords)
    assert len(warnings) == bool(says)
    assert "".join(warnings).startswith(says)


def test_all_ineffective_options_are_in_one_line(settle, warnings):
    settle(swap_space=4, preemption_mode="recompute", enforce_eager=True, trust_remote_code=True)
    (line,) = warnings
    assert [part.split()[0] for part in line.split("; ")] == ["swap_space=4", "enforce_eager", "trust_remote_code"]  # fmt: skip


def test_options_that_work_on_this_machine_are_not_reported(settle, warnings, tmp_path):
    settle(facts=replace(CPU, device="cuda"), enforce_eager=True)
    settle({"auto_map": {"AutoModel": "own.Own"}}, trust_remote_code=True)
    assert not warnings


# Fields that no room reads, and why that is no lie.
UNREAD = {
    "enable_auto_tool_choice": "calls are read wherever their format is known; the help says so",
    "enable_server_load_tracking": "/load always counts",
    "kv_transfer_config": "it becomes kv_disk_dir, before there is a configuration",
    "fail_on_environ_validation": "read from the keywords, before there is a configuration",
}


def test_every_field_is_read():
    """A flag that is taken and does nothing is a lie."""
    source = Path(quire.__file__).parent
    text = "\n".join(file.read_text(encoding="utf-8") for file in source.rglob("*.py"))
    unread = {name for name in options() if not re.search(rf"\.{name}\b", text)}
    assert unread == set(UNREAD)


def test_overrides_merge():
    base = {"a": 1, "rope": {"x": 1, "y": 2}}
    assert overridden(base, {"rope": {"y": 3}, "b": 2}) == {
        "a": 1,
        "rope": {"x": 1, "y": 3},
        "b": 2,
    }
    assert overridden(base, lambda config: {**config, "a": 2})["a"] == 2
    assert overridden(base, lambda config: config["rope"].update(x=9)) == {
        "a": 1,
        "rope": {"x": 9, "y": 2},
    }
    assert base == {"a": 1, "rope": {"x": 1, "y": 2}}
    with pytest.raises(ConfigError, match="hf_overrides returned a int"):
        overridden(base, lambda config: 1)


# Refusals

REFUSED = [
    ({"tensor_parallel_size": 3}, ConfigError, "tensor_parallel_size=3 does not divide the .* attention heads"),
    ({"tensor_parallel_size": 0}, ConfigError, "tensor_parallel_size=0"),
    ({"enable_eplb": True}, ConfigError, "enable_eplb moves whole experts .*add --enable-expert-parallel"),
    ({"nnodes": 2}, ConfigError, "nnodes=2 with data_parallel_size=1 and 1 ranks in each engine .*use 1"),
    ({"distributed_executor_backend": "x"}, ConfigError, "distributed_executor_backend='x': choose from uni, mp, ray, external_launcher"),
    ({"load_format": "tensorizer"}, Unsupported, "load_format=tensorizer .*safetensors are mapped"),
    ({"load_format": "zip"}, ConfigError, "load_format='zip': choose from auto"),
    ({"kv_cache_dtype": "nvfp4"}, Unsupported, "kv_cache_dtype=nvfp4 .*int8, .*fp8"),
    ({"quantization": "quark"}, Unsupported, "quantization=quark"),
    ({"gpu_memory_utilization": 0.0}, ConfigError, "gpu_memory_utilization=0.0: must be a number above 0"),
    ({"gpu_memory_utilization": 1.5}, ConfigError, "gpu_memory_utilization=1.5: must be a number of at most 1"),
    ({"block_size": 0}, ConfigError, "block_size=0"),
    ({"max_num_seqs": 0}, ConfigError, "max_num_seqs=0"),
    ({"max_num_batched_tokens": 0}, ConfigError, "max_num_batched_tokens=0"),
    ({"num_gpu_blocks_override": 0}, ConfigError, "num_gpu_blocks_override=0"),
    ({"kv_cache_memory_bytes": 0}, ConfigError, "kv_cache_memory_bytes=0"),
    ({"max_logprobs": -2}, ConfigError, "max_logprobs=-2"),
    ({"num_scheduler_steps": 0}, ConfigError, "num_scheduler_steps=0"),
    ({"cudagraph_capture_sizes": [1, "x"]}, ConfigError, "cudagraph_capture_sizes=.*must be a whole number"),
    ({"cudagraph_capture_sizes": [0]}, ConfigError, "cudagraph_capture_sizes=.*must be a whole number of at least 1"),
    ({"api_server_count": 0}, ConfigError, "api_server_count=0"),
    ({"port": 70000}, ConfigError, "port=70000: must be a whole number of at most 65535"),
    ({"scheduling_policy": "lifo"}, ConfigError, "scheduling_policy='lifo': choose from fcfs, priority"),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "error", "says"), REFUSED, ids=str)
def test_refusals_name_the_flag_and_the_remedy(settle, keywords, error, says):
    with pytest.raises(error, match=says):
        settle(**keywords)


def test_a_checkpoint_without_architectures(settle):
    with pytest.raises(ConfigError, match="no `architectures`; name one with --hf-overrides"):
        settle({"architectures": None})


def test_a_quantized_checkpoint(settle):
    with pytest.raises(
        Unsupported, match=r"a checkpoint quantized with quark .*bfloat16 or float16"
    ):
        settle({"quantization_config": {"quant_method": "quark"}})


def test_small_weights_are_computed_in_bfloat16(settle):
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 4}, "dtype": "float16"}
    assert settle(gptq).dtype == "bfloat16"
    assert settle({"dtype": "float16"}, quantization="int8").dtype == "bfloat16"
    assert settle({"dtype": "float16"}, quantization="int8", dtype="float16").dtype == "float16"


def test_one_log_line_contains_the_resolved_config(settle, caplog):
    with caplog.at_level("INFO", logger="quire"):
        settle(max_num_seqs=3)
    line = caplog.records[-1].getMessage()
    assert line.startswith(
        "LlamaForCausalLM on cpu (a test): dtype=bfloat16 max_model_len=1024 max_num_seqs=3"
    )
    assert LLAMA["max_position_embeddings"] == 1024


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "CUDA", "gpu", "xpu", "tpu"])
def test_another_device_than_the_detected_one_is_refused(settle, device):
    with pytest.raises(ConfigError, match=f"device='{device}': the device of this process is cpu"):
        settle(device=device)


@pytest.mark.parametrize("device", ["auto", "cpu", "cpu:0", ""])
def test_the_detected_device_may_be_named(settle, device):
    assert settle(device=device).device == "cpu"
    gpu = replace(CPU, device="cuda")
    assert settle(facts=gpu, device="cuda:0").device == settle(facts=gpu, device="gpu").device == "cuda"  # fmt: skip
    with pytest.raises(ConfigError, match="is cuda"):
        settle(facts=gpu, device="cpu")
