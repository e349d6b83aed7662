"""Writes GGUF files of tiny checkpoints, with the `gguf` package: its names and its quantization, not ours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from quire.layers.rotary import ROPE_INIT_FUNCTIONS
from tests.tiny_text import tiny_text

TINY = tiny_text()
KINDS = {
    "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "gemma4_text": "gemma4", "llama4_text": "llama4",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "lfm2_moe": "lfm2moe",
    "ernie4_5_moe": "ernie4_5-moe", "granitemoeshared": "granitemoe", "qwen2_vl_text": "qwen2vl", "qwen2_5_vl_text": "qwen2vl",
}  # fmt: skip
"""model_type -> general.architecture, where they differ."""
PERMUTED = ("llama", "granite", "granitemoe", "smollm3")
PLUS_ONE = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe")
HALVES = {
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ1_M: (),
    Kind.TQ1_0: (52,), Kind.TQ2_0: (64,), Kind.Q1_0: (0,), Kind.NVFP4: (),
    **dict.fromkeys((Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ1_S), (0,)),
}  # fmt: skip
"""Where a block has its float16 numbers. (The package decodes these types; it does not encode them.)"""


def random_blocks(kind: Kind, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Blocks of any bit pattern with small finite scales; [O, bytes]."""
    draw = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for at in HALVES[kind]:
        d = (draw.uniform(0.5, 1.5, blocks.shape[:2]) * 4e-5).astype(np.float16)
        blocks[..., at : at + 2] = d[..., None].view(np.uint8)
    if kind == Kind.NVFP4:  # e4m3
        blocks[..., :4] &= 31
    if kind == Kind.IQ1_M:  # a nibble of the number in each of four
        blocks[..., 49::2] = blocks[..., 49::2] & 15 | np.array([9, 8, 7, 0], np.uint8) << 4
    return blocks.reshape(shape[0], -1)


QWEN = ("qwen2", "qwen3", "qwen2moe", "qwen3moe")
EXPERT = re.compile(r"(?<=experts)\.(\d+)(?=\.)")


def in_order(item: tuple[str, Any]) -> tuple[str, int]:
    """By name, experts by number."""
    number = EXPERT.search(item[0])
    return EXPERT.sub("", item[0]), int(number[1]) if number else 0


def unstacked(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of gpt-oss as llama.cpp has them: gate and up apart, outputs before inputs."""
    parts = {}
    for name, values in found.items():
        base, _, last = name.rpartition(".")
        if not base.endswith("experts") or "proj" not in last:
            parts[name] = values
            continue
        end = "bias" if last.endswith("_bias") else "weight"
        values = values if end == "bias" else values.swapaxes(1, 2)
        if last.startswith("down"):
            parts[f"{base}.down_proj.{end}"] = values
        else:
            parts[f"{base}.gate_proj.{end}"] = values[:, 0::2]
            parts[f"{base}.up_proj.{end}"] = values[:, 1::2]
    return parts


def apart(found: dict[str, np.ndarray], c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Granite's and DeepSeek's joined tensors in the parts that llama.cpp stores."""
    parts = {}
    for name, values in found.items():
        if name.endswith("shared_mlp.input_linear.weight"):
            base = name.replace("shared_mlp.input_linear.weight", "mlp.shared_expert")
            parts[f"{base}.gate_proj.weight"], parts[f"{base}.up_proj.weight"] = np.split(values, 2)
        elif name.endswith("shared_mlp.output_linear.weight"):
            parts[name] = values
        elif name.endswith("input_linear.weight"):
            half, base = (
                values.shape[1] // 2,
                name.replace("block_sparse_moe.input_linear.weight", "mlp.experts"),
            )
            parts[f"{base}.gate_proj.weight"] = values[:, :half]
            parts[f"{base}.up_proj.weight"] = values[:, half:]
        elif name.endswith("output_linear.weight"):
            parts[name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")] = values
        elif c["model_type"] == "llama4_text" and name.endswith("experts.gate_up_proj"):
            half, base = values.shape[2] // 2, name.removesuffix("gate_up_proj")
            parts[base + "gate_proj.weight"] = values[:, :, :half].swapaxes(1, 2)
            parts[base + "up_proj.weight"] = values[:, :, half:].swapaxes(1, 2)
        elif c["model_type"] == "llama4_text" and name.endswith("experts.down_proj"):
            parts[name + ".weight"] = values.swapaxes(1, 2)
        elif name.endswith("kv_b_proj.weight") and c["model_type"] == "deepseek_v3":  # newer files
            heads = values.reshape(c["num_attention_heads"], -1, values.shape[1])
            nope = c["qk_nope_head_dim"]
            parts[name.replace("kv_b_proj", "k_b_proj")] = heads[:, :nope].swapaxes(1, 2)
            parts[name.replace("kv_b_proj", "v_b_proj")] = heads[:, nope:]
        else:
            parts[name] = values
    return parts


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name).float().numpy() for name in opened.keys()}  # noqa: SIM118
    return found


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp's converter stores them."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


class GgufCopy:
    """A GGUF file of a checkpoint; `kind_of(name in GGUF)` gives each matrix its type, float32 by default."""

    def __init__(self, folder: Path, kind_of: Callable[[str], Kind] = lambda name: Kind.F32):
        self.folder, self.kind_of = folder, kind_of
        self.config = json.loads((folder / "config.json").read_text())
        if by_layer := self.config.get("per_layer_config"):  # Transformers 5's way to say it
            full = by_layer.get(str(self.config["layer_types"].index("full_attention")), {})
            self.config |= {"global_head_dim": full.get("head_dim", self.config["head_dim"])}
            self.config["num_global_key_value_heads"] = full.get("num_key_value_heads")
        self.arch = KINDS.get(self.config["model_type"], self.config["model_type"])
        number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == self.arch)
        layers = self.config.get("num_hidden_layers") or len(self.config["layers_block_type"])
        self.names = gguf.get_tensor_name_map(number, layers)
        self.head: Kind | None = None
        self.floats: dict[str, np.ndarray] = {}
        """What the written tensors mean, by GGUF name."""

    def write(self, file: Path, head: Kind | None = None) -> Path:
        """`head`: the type of a head beside a tied table."""
        self.head = head
        self.fill(gguf.GGUFWriter(file, self.arch))
        return file

    def fill(self, writer: Any) -> None:
        self._metadata(writer)
        self._tokenizer(writer)
        for name, values in self._tensors():
            self._add(writer, name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _tensors(self) -> list[tuple[str, np.ndarray]]:
        c, found, stacks = self.config, [], dict[str, list[np.ndarray]]()
        tensors = tensors_of(self.folder)
        tensors = apart(unstacked(tensors) if self.arch == "gpt-oss" else tensors, c)
        for name, values in sorted(tensors.items(), key=in_order):
            base = name.rpartition(".")[0]
            if EXPERT.search(base):
                stacks.setdefault(EXPERT.sub("", name), []).append(values)
                continue
            if self.arch in PERMUTED and base.endswith(("q_proj", "k_proj")):
                values = interleaved(
                    values, c["num_attention_heads" if "q_proj" in base else "num_key_value_heads"]
                )
            if self.arch.startswith("qwen35") and "linear_attn" in name:
                values = self._tiled(name, values)
            if name.endswith(("conv1d.weight", "conv.conv.weight")):
                values = values.squeeze(1)
            if self.arch in PLUS_ONE and base.endswith("norm") and "linear_attn" not in base:
                values = values + 1
            found.append((name, values))
        found += [(name, np.stack(stack)) for name, stack in stacks.items()]
        found = [(self._name(name), values) for name, values in found]
        if self.head is not None:
            found.append(("output.weight", -dict(found)["token_embd.weight"]))
        return found

    def _tiled(self, name: str, values: np.ndarray) -> np.ndarray:
        """The n-th value heads of all key heads beside each other, and decays as they are used."""
        c, part = self.config, name.split("linear_attn.")[1]
        keys, per_key = (
            c["linear_num_key_heads"],
            c["linear_num_value_heads"] // c["linear_num_key_heads"],
        )
        if part == "A_log":
            values = -np.exp(values)
        if part == "norm.weight":
            return values
        axis = int(part == "out_proj.weight")
        first = (
            2 * keys * c["linear_key_head_dim"]
            if part in ("in_proj_qkv.weight", "conv1d.weight")
            else 0
        )
        before, rest = np.split(values, [first], axis)
        shape = (*rest.shape[:axis], keys, per_key, -1, *rest.shape[axis + 1 :])
        rest = rest.reshape(shape).swapaxes(axis, axis + 1).reshape(rest.shape)
        return np.concatenate([before, rest], axis)

    def _name(self, name: str) -> str:
        for end, called in (
            ("A_log", "ssm_a"),
            ("dt_bias", "ssm_dt.bias"),
            ("expert_bias", "exp_probs_b.bias"),
        ):
            if name.endswith(end):
                return f"blk.{name.split('.')[2]}.{called}"
        name = name.replace("correction_bias", "correction.bias")
        if self.arch == "lfm2moe":
            name = name.replace("feed_forward.experts", "block_sparse_moe.experts")
            name = name.replace("feed_forward.gate", "block_sparse_moe.gate")
        for end, called in (
            ("router.scale", "ffn_gate_inp.scale"),
            ("router.per_expert_scale", "ffn_down_exps.scale"),
        ):
            if name.endswith(end):
                return f"blk.{name.split('.')[2]}.{called}"
        if name.endswith(("sinks", "layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
            name += ".weight"
        if (mapped := self.names.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise KeyError(name)
        return mapped

    def _add(self, writer: Any, name: str, values: np.ndarray) -> None:
        kind = self.kind_of(name) if values.ndim > 1 else Kind.F32
        kind = self.head if self.head is not None and name == "output.weight" else kind
        if kind in HALVES:
            stored = random_blocks(kind, values.shape, seed=len(self.floats))
            self.floats[name] = gguf.quants.dequantize(stored, kind)
        else:
            stored = gguf.quants.quantize(values.astype(np.float32), kind)
            self.floats[name] = gguf.quants.dequantize(stored, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)

    def _metadata(self, w: Any) -> None:
        c = self.config
        rope = c.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)
        w.add_context_length(c["max_position_embeddings"])
        w.add_embedding_length(c["hidden_size"])
        w.add_block_count(c["num_hidden_layers"])
        width, layers = (
            c.get("intermediate_size_mlp") or c["intermediate_size"],
            c["num_hidden_layers"],
        )
        if self.arch.startswith("lfm2"):  # the width that its config.json leads to
            dense = "model.layers.0.feed_forward.w1.weight"
            width = len(tensors_of(self.folder)[dense])
        if self.arch == "llama4":
            w.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
            w.add_expert_feed_forward_length(c["intermediate_size"])
        first = layers - (c.get("num_kv_shared_layers") or 0)
        wide = c.get("use_double_wide_mlp")
        w.add_feed_forward_length(
            [width * (1 + (i >= first)) for i in range(layers)] if wide else width
        )
        w.add_head_count(c["num_attention_heads"])
        kv_heads, of_full = c["num_key_value_heads"], c.get("num_global_key_value_heads")
        if of_full:
            kinds = c["layer_types"]
            kv_heads = [of_full if kind == "full_attention" else kv_heads for kind in kinds]
        if self.arch.startswith("lfm2"):
            kv_heads = [kv_heads * (kind == "full_attention") for kind in c["layer_types"]]
        w.add_head_count_kv(kv_heads)
        if c.get("head_dim") and not c.get("kv_lora_rank"):
            w.add_key_length(c.get("global_head_dim") or c["head_dim"])
        if c.get("rms_norm_eps"):
            w.add_layer_norm_rms_eps(c["rms_norm_eps"])
        w.add_rope_freq_base(rope.get("rope_theta", 10000.0))
        if c.get("sliding_window") and self.arch not in QWEN:
            w.add_sliding_window(c["sliding_window"])
        for key, add in (
            ("attention_multiplier", w.add_attention_scale), ("embedding_multiplier", w.add_embedding_scale),
            ("residual_multiplier", w.add_residual_scale), ("logits_scaling", w.add_logit_scale),
            ("logit_scale", w.add_logit_scale), ("layer_norm_eps", w.add_layer_norm_eps),
            ("attn_logit_softcapping", w.add_attn_logit_softcapping), ("final_logit_softcapping", w.add_final_logit_softcapping),
            ("num_experts", w.add_expert_count), ("num_local_experts", w.add_expert_count),
            ("num_experts_per_tok", w.add_expert_used_count if not c.get("top_k_experts") else lambda _: None),
            ("shared_expert_intermediate_size", w.add_expert_shared_feed_forward_length),
            ("n_routed_experts", w.add_expert_count), ("n_shared_experts", w.add_expert_shared_count),
            ("first_k_dense_replace", w.add_leading_dense_block_count), ("n_group", w.add_expert_group_count),
            ("topk_group", w.add_expert_group_used_count), ("routed_scaling_factor", w.add_expert_weights_scale),
            ("norm_topk_prob", w.add_expert_weights_norm),
            ("shared_intermediate_size", w.add_expert_shared_feed_forward_length), ("moe_num_experts", w.add_expert_count),
            ("moe_k", w.add_expert_used_count), ("moe_num_shared_experts", w.add_expert_shared_count),
            ("moe_layer_start_index", w.add_leading_dense_block_count), ("moe_layer_interval", w.add_interleave_moe_layer_step),
        ):  # fmt: skip
            if c.get(key) is not None:
                add(c[key])
        if self.arch in (*QWEN, "gpt-oss", "glm4moe", "qwen35moe") and c.get("num_experts_per_tok"):
            w.add_expert_feed_forward_length(
                c.get("moe_intermediate_size") if self.arch != "gpt-oss" else c["intermediate_size"]
            )
        if c.get("kv_lora_rank"):
            key, rotated = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["qk_rope_head_dim"]
            w.add_kv_lora_rank(c["kv_lora_rank"])
            if c.get("q_lora_rank"):
                w.add_q_lora_rank(c["q_lora_rank"])
            new = c["model_type"] == "deepseek_v3"
            (w.add_key_length_mla if new else w.add_key_length)(key)
            (w.add_value_length_mla if new else w.add_value_length)(c["v_head_dim"])
            w.add_rope_dimension_count(rotated)
            if new:
                w.add_key_length(c["kv_lora_rank"] + rotated)
                w.add_value_length(c["kv_lora_rank"])
                w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if self.arch.startswith("qwen35"):
            w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
            w.add_ssm_state_size(c["linear_key_head_dim"])
            w.add_ssm_group_count(c["linear_num_key_heads"])
            w.add_ssm_time_step_rank(c["linear_num_value_heads"])
            w.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
            w.add_full_attention_interval(c["layer_types"].index("full_attention") + 1)
        if self.arch.startswith("lfm2"):
            w.add_shortconv_l_cache(c["conv_L_cache"])
            w.add_layer_norm_rms_eps(c["norm_eps"])
            if c.get("num_dense_layers") is not None:
                w.add_leading_dense_block_count(c["num_dense_layers"])
                w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        if self.arch == "gemma4":
            self._gemma4(w, rope)
        if c["model_type"] == "ernie4_5_moe":
            w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        if c["model_type"] == "minimax_m2":
            w.add_expert_feed_forward_length(c["intermediate_size"])
        if c.get("n_routed_experts") and c.get("moe_intermediate_size") and c.get("kv_lora_rank"):
            w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        if (part := rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))) != 1.0:
            w.add_rope_dimension_count(
                int(part * (c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]))
            )
        if rope.get("rope_type") == "longrope":
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            for which in ("long", "short"):
                w.add_tensor(
                    f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32)
                )
        if rope.get("rope_type") in ("linear", "yarn"):
            w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            w.add_rope_scaling_factor(rope["factor"])
            if trained := rope.get("original_max_position_embeddings"):
                w.add_rope_scaling_orig_ctx_len(trained)
        if rope.get("rope_type") == "llama3":
            plain = 1 / rope["rope_theta"] ** (np.arange(0, c["head_dim"], 2) / c["head_dim"])
            made, _ = ROPE_INIT_FUNCTIONS["llama3"](c["head_dim"], rope, 0)
            w.add_tensor("rope_freqs.weight", (plain / made.numpy()).astype(np.float32))

    def _gemma4(self, w: Any, rope: dict[str, Any]) -> None:
        c, sliding = self.config, [kind != "full_attention" for kind in self.config["layer_types"]]
        shared, size = c["num_kv_shared_layers"], c["global_head_dim"]
        w.add_shared_kv_layers(shared)
        w.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"] or 0)
        w.add_sliding_window_pattern(sliding)
        w.add_key_length_swa(c["head_dim"])
        w.add_value_length(size)
        w.add_value_length_swa(c["head_dim"])
        w.add_rope_dimension_count(size)
        w.add_rope_dimension_count_swa(c["head_dim"])
        w.add_rope_freq_base_swa(c["rope_parameters"]["sliding_attention"]["rope_theta"])
        if c.get("enable_moe_block"):
            w.add_expert_used_count(c["top_k_experts"])
            w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        turned = int(size * rope.get("partial_rotary_factor", 1.0) / 2)
        factors = [1.0] * turned + [1e30] * (size // 2 - turned)
        w.add_tensor("rope_freqs.weight", np.array(factors, np.float32))

    def _tokenizer(self, w: Any) -> None:
        if not (self.folder / "tokenizer.json").is_file():
            return
        tokenizer = json.loads((self.folder / "tokenizer.json").read_text())
        config = json.loads((self.folder / "tokenizer_config.json").read_text())
        ids = dict(tokenizer["model"]["vocab"])
        kinds = dict.fromkeys(ids, gguf.TokenType.NORMAL)
        for token in tokenizer["added_tokens"]:
            ids[token["content"]] = token["id"]
            kinds[token["content"]] = (
                gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
            )
        tokens = sorted(ids, key=lambda token: ids[token])
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("default")
        w.add_token_list(tokens)
        w.add_token_types([kinds[token] for token in tokens])
        w.add_token_merges(
            [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
        )
        for name, add in (("bos", w.add_bos_token_id), ("eos", w.add_eos_token_id)):
            if (token := config.get(f"{name}_token")) is not None:
                add(ids[token if isinstance(token, str) else token["content"]])
        if (template := config.get("chat_template")) or (
            self.folder / "chat_template.jinja"
        ).is_file():
            w.add_chat_template(template or (self.folder / "chat_template.jinja").read_text())


def mixed(name: str) -> Kind:
    """Types by part, as llama.cpp mixes them in Q4_K_M and Q5_K_M; of inputs that are no multiple of 256, Q8_0 and Q4_0."""
    kinds = {
        "attn_v": Kind.Q6_K,
        "attn_output": Kind.Q5_K,
        "ffn_down": Kind.Q8_0,
        "token_embd": Kind.Q6_K,
    }
    part = name.split(".")[-2]
    return kinds.get(part, Kind.Q4_0 if name.startswith("blk.2.") else Kind.Q4_K)
