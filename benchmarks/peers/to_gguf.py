"""Write a random checkpoint as GGUF: `to_gguf.py CHECKPOINT FILE bf16|q8_0|q4_k_m`. llama.cpp itself quantizes.

A file from before checkpoints had a tokenizer is copied with one. The Python of the environment `llama-cpp` (install.py) runs it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.scripts.gguf_new_metadata import copy_with_new_metadata

KINDS = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h",
}
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
NEMOTRON_H = {
    "norm": "attn_norm", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
}  # fmt: skip
NAMES |= {"shared_mlp.output_linear": "ffn_down", **NEMOTRON_H}
MAMBA2 = {
    "in_proj": "ssm_in.weight", "conv1d": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias", "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a", "D": "ssm_d", "norm": "ssm_norm.weight", "out_proj": "ssm_out.weight",
}  # fmt: skip
RECURRENT = {
    "in_proj_qkv": "attn_qkv.weight", "in_proj_z": "attn_gate.weight", "in_proj_a": "ssm_alpha.weight", "in_proj_b": "ssm_beta.weight",
    "conv1d": "ssm_conv1d.weight", "norm": "ssm_norm.weight", "out_proj": "ssm_out.weight", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias",
}  # fmt: skip
WHOLE = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm",
    "lm_head": "output",
}  # fmt: skip


def tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, bfloat16 as uint16) of a safetensors file."""
    file = np.memmap(path, dtype=np.uint8, mode="r")
    length = int(file[:8].view(np.uint64)[0])
    header = json.loads(bytes(file[8 : 8 + length]))
    header.pop("__metadata__", None)
    for name, about in header.items():
        start, end = (8 + length + offset for offset in about["data_offsets"])
        yield (
            name.removesuffix(".weight"),
            np.frombuffer(file[start:end].tobytes(), np.uint16).reshape(about["shape"]),
        )


def float32(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def add(writer: Any, name: str, bits: Any) -> None:
    """Add a tensor: norms and routers as float32, matrices as bfloat16."""
    if bits.ndim == 1 or name.endswith("ffn_gate_inp.weight"):
        writer.add_tensor(name, float32(bits))
    else:
        raw = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def interleaved(bits: Any, heads: int) -> Any:
    """Rows of queries or keys in the order of llama's rotation by adjacent pairs."""
    halves = bits.reshape(heads, 2, bits.shape[0] // heads // 2, bits.shape[1])
    return halves.swapaxes(1, 2).reshape(bits.shape)


def write(source: Path, target: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    kind = KINDS[config["model_type"]]
    writer = gguf.GGUFWriter(str(target), kind)
    describe(writer, config)
    add_tokenizer(writer, source)
    experts: dict[str, dict[int, Any]] = {}
    for name, bits in tensors(source / "model.safetensors"):
        if name in WHOLE:
            add(writer, f"{WHOLE[name]}.weight", plus_one(kind, name, bits))
            continue
        layer, _, part = name.partition(".layers.")[2].partition(".")
        if ".experts." in name:
            number, _, part = part.removeprefix("mlp.experts.").partition(".")
            whole = experts.setdefault(f"blk.{layer}.{NAMES[f'mlp.{part}']}_exps.weight", {})
            whole[int(number)] = bits
            continue
        if part.startswith("linear_attn."):
            recurrent(writer, layer, part.removeprefix("linear_attn."), bits)
            continue
        inside = part.removeprefix("mamba.").removeprefix("mixer.")
        if inside != part and inside in MAMBA2:
            mamba2(writer, f"blk.{layer}.{MAMBA2[inside]}", bits, config)
            continue
        if part == "shared_mlp.input_linear":
            for to, half in zip(("ffn_gate", "ffn_up"), np.split(bits, 2), strict=True):
                add(writer, f"blk.{layer}.{to}.weight", half)
            continue
        to = NAMES[part]
        if kind in ("gemma3", "qwen35") and part == "post_attention_layernorm":
            to = "post_attention_norm"
        if kind in ("llama", "granitehybrid") and to in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if to == "attn_q" else "num_key_value_heads"]
            bits = interleaved(bits, heads)
        add(writer, f"blk.{layer}.{to}.weight", plus_one(kind, part, bits))
    for name, parts in experts.items():
        add(writer, name, np.stack([parts[number] for number in sorted(parts)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def recurrent(writer: Any, layer: str, part: str, bits: Any) -> None:
    """Add a tensor of a gated delta net. With as many key heads as value heads, the file has the checkpoint's order."""
    name = f"blk.{layer}.{RECURRENT[part]}"
    if part == "A_log":
        writer.add_tensor(name, -np.exp(float32(bits)))
    elif part == "conv1d":
        writer.add_tensor(name, float32(bits[:, 0]))
    else:
        add(writer, name, bits)


def mamba2(writer: Any, name: str, bits: Any, config: dict[str, Any]) -> None:
    """Add a tensor of a Mamba-2 layer: decays as they are used, a head's numbers in a column, a norm by groups."""
    if name.endswith("ssm_a"):
        writer.add_tensor(name, -np.exp(float32(bits))[:, None])
    elif name.endswith("ssm_d"):
        writer.add_tensor(name, float32(bits)[:, None])
    elif name.endswith("ssm_norm.weight"):
        groups = config.get("n_groups") or config["mamba_n_groups"]
        writer.add_tensor(name, float32(bits).reshape(groups, -1))
    elif name.endswith("ssm_conv1d.weight"):
        writer.add_tensor(name, float32(bits[:, 0]))
    else:
        add(writer, name, bits)


def plus_one(kind: str, name: str, bits: Any) -> Any:
    """Norms that multiply by 1 + weight, as GGUF files store them; all random norms of the checkpoints are ones."""
    return np.full_like(bits, 0x4000) if kind in ("gemma3", "qwen35") and "norm" in name else bits


def describe(writer: Any, config: dict[str, Any]) -> None:
    """The hyperparameters."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    width, kv_heads = config["intermediate_size"], config["num_key_value_heads"]
    if pattern := config.get("hybrid_override_pattern"):  # what a layer does not have is 0
        writer.add_feed_forward_length([width * (kind == "-") for kind in pattern])
        writer.add_head_count_kv([kv_heads * (kind == "*") for kind in pattern])
    else:
        writer.add_feed_forward_length(width)
        kinds = config.get("layer_types")
        writer.add_head_count_kv(
            [kv_heads * (kind == "attention") for kind in kinds] if kinds else kv_heads
        )
    writer.add_head_count(config["num_attention_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rotated = int(config["head_dim"] * config.get("partial_rotary_factor", 1))
    writer.add_rope_dimension_count(rotated)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if epsilon := config.get("layer_norm_epsilon"):
        writer.add_layer_norm_eps(epsilon)
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if heads := config.get("mamba_n_heads") or config.get("mamba_num_heads"):
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(config.get("mamba_d_state") or config["ssm_state_size"])
        writer.add_ssm_group_count(config.get("mamba_n_groups") or config["n_groups"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * (config.get("mamba_d_head") or config["mamba_head_dim"]))
    if config.get("embedding_multiplier"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    if heads := config.get("linear_num_value_heads"):
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
        writer.add_full_attention_interval(config["full_attention_interval"])
        # The pairs of a head take turns among three positions, which are equal in a text. llama.cpp gives the others position 0.
        third = -(-rotated // 6)
        writer.add_rope_dimension_sections([third, third, rotated // 2 - 2 * third, 0])


def add_tokenizer(writer: Any, source: Path) -> None:
    """The byte-level BPE of a checkpoint's tokenizer.json, whose special tokens end a text."""
    made = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    words = made["model"]["vocab"]
    special = {token["id"] for token in made["added_tokens"]}
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(words, key=words.get))
    writer.add_token_types([kinds[number in special] for number in range(len(words))])
    writer.add_token_merges([" ".join(pair) for pair in made["model"]["merges"]])
    writer.add_eos_token_id(max(special))
    writer.add_add_bos_token(False)


def with_tokenizer(file: Path, source: Path) -> None:
    """Put the tokenizer of a checkpoint into a file that has none."""
    reader = gguf.GGUFReader(file)
    if reader.get_field(gguf.Keys.Tokenizer.LIST):
        return
    half = file.with_suffix(".part")
    writer = gguf.GGUFWriter(str(half), reader.get_field(gguf.Keys.General.ARCHITECTURE).contents())
    add_tokenizer(writer, source)
    copy_with_new_metadata(reader, writer, {}, [gguf.Keys.Tokenizer.MODEL])
    half.rename(file)


def quantize(source: Path, target: Path, kind: str) -> None:
    """Raises SystemExit: llama.cpp refused."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {
        "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
        "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    }[kind]
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    if status:
        raise SystemExit(f"llama_model_quantize: status {status}")


source, file, form = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
plain = file.with_name(f"{source.name}.gguf")
if plain.exists():
    with_tokenizer(plain, source)
else:
    half = plain.with_suffix(".part")
    write(source, half)
    half.rename(plain)
if form != "bf16":
    if file.exists():
        with_tokenizer(file, source)
    else:
        half = file.with_suffix(".part")
        quantize(plain, half, form)
        half.rename(file)
