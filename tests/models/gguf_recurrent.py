"""Writes GGUF files of tiny checkpoints with Mamba layers or delta nets, as llama.cpp's converter stores them.

Decays are as they are used; Mamba-2's vectors have a second dimension, its norms one for the groups; Falcon-H1's factors are in
its tensors; Qwen3-Next's projections are apart, or in the first files as they are in its checkpoint (`first`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quire.models.hf_config import TextConfig
from tests.models.gguf_files import EXPERT, KINDS, GgufCopy, in_order, interleaved, tensors_of

MAMBA2 = ("mamba2", "granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1")
KINDS |= {
    "falcon_mamba": "mamba", "granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1", "qwen3_next": "qwen3next",
}  # fmt: skip
RENAMED = (
    ("dt_bias", "dt_proj.bias"), ("shared_mlp.output_linear", "mlp.shared_expert.down_proj"),
    ("correction_bias", "correction.bias"), ("feed_forward.experts", "mlp.experts"), ("block_sparse_moe.experts", "mlp.experts"),
)  # fmt: skip


class RecurrentCopy(GgufCopy):
    def __init__(self, folder: Path, *, first: bool = False):
        self.first = first
        text = (folder / "config.json").read_text()
        KINDS["nemotron_h"] = "nemotron_h_moe" if '"moe"' in text else "nemotron_h"
        super().__init__(folder)
        self.cfg = TextConfig(self.config)

    def _tensors(self) -> list[tuple[str, np.ndarray]]:
        found, stacks = [], dict[str, list[np.ndarray]]()
        for name, values in sorted(tensors_of(self.folder).items(), key=in_order):
            if EXPERT.search(name):
                stacks.setdefault(EXPERT.sub("", name), []).append(values)
            else:
                found += self._parts(name, values)
        found += [(name, np.stack(stack)) for name, stack in stacks.items()]
        return [(self._name(name), values) for name, values in found]

    def _parts(self, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        c, base = self.cfg, name.rpartition(".")[0]
        if name.endswith("A_log"):
            values = -np.exp(values)
        if name.endswith("conv1d.weight"):
            values = values.squeeze(1)
        if self.arch in MAMBA2 and name.endswith(("A_log", ".D")):
            values = values[:, None]
        if self.arch in MAMBA2 and name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            values = values.reshape(c.get("mamba_n_groups") or c.n_groups, -1)
        if self.arch == "granitehybrid" and base.endswith(("q_proj", "k_proj")):
            heads = c.num_attention_heads if "q_proj" in base else c.num_key_value_heads
            values = interleaved(values, heads)
        if self.arch == "qwen3next" and base.endswith("norm") and "linear_attn" not in base:
            values = values + 1
        if self.arch == "falcon-h1":
            values = values * self._factor(name, values)
        if name.endswith("input_linear.weight"):
            shared = "shared_mlp" in name
            into = base.rpartition(".")[0].rpartition(".")[0] + ".mlp."
            into += (
                ""
                if shared and not c.num_local_experts
                else "shared_expert."
                if shared
                else "experts."
            )
            gate, up = np.split(values, 2, 0 if shared else 1)
            yield f"{into}gate_proj.weight", gate
            yield f"{into}up_proj.weight", up
        elif name.endswith("output_linear.weight"):
            one = "mlp." if not c.num_local_experts else "mlp.shared_expert."
            kind = one if "shared_mlp" in name else "mlp.experts."
            yield base.rpartition(".")[0].rpartition(".")[0] + f".{kind}down_proj.weight", values
        elif name.endswith("in_proj_qkvz.weight") and not self.first:
            layer = name.split(".")[2]
            by_head = values.reshape(c.linear_num_key_heads, -1, values.shape[1])
            size = c.linear_key_head_dim
            rows = c.linear_num_value_heads // c.linear_num_key_heads * c.linear_value_head_dim
            *qkv, z = np.split(by_head, (size, 2 * size, 2 * size + rows), 1)
            yield (
                f"blk.{layer}.attn_qkv.weight",
                np.concatenate([p.reshape(-1, values.shape[1]) for p in qkv]),
            )
            yield f"blk.{layer}.attn_gate.weight", z.reshape(-1, values.shape[1])
        else:
            yield name, values

    def _factor(self, name: str, values: np.ndarray) -> Any:
        c = self.cfg
        if name.endswith("mamba.in_proj.weight"):
            inner, shared = c.mamba_n_heads * c.mamba_d_head, c.mamba_n_groups * c.mamba_d_state
            sizes = (inner, inner, shared, shared, c.mamba_n_heads)
            return c.ssm_in_multiplier * np.repeat(c.ssm_multipliers, sizes)[:, None]
        into = c.attention_in_multiplier
        factors = {
            "mamba.out_proj": c.ssm_out_multiplier, "q_proj": into, "k_proj": into * c.key_multiplier, "v_proj": into,
            "o_proj": c.attention_out_multiplier, "gate_proj": c.mlp_multipliers[0], "down_proj": c.mlp_multipliers[1],
            "lm_head": c.lm_head_multiplier, "embed_tokens": c.embedding_multiplier,
        }  # fmt: skip
        return next((f for end, f in factors.items() if name.endswith(f"{end}.weight")), 1.0)

    def _name(self, name: str) -> str:
        if name.startswith("blk."):
            return name
        for end, called in RENAMED:
            name = name.replace(end, called)
        if ".mixer.experts" in name:
            name = f"model.layers.{name.split('.')[2]}.mlp.experts.{name.split('experts.')[1]}"
        if (mapped := self.names.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise KeyError(name)
        return mapped

    def _metadata(self, w: Any) -> None:
        c = self.cfg
        layers = range(c.get("num_hidden_layers") or len(c.layer_types))
        alone = self.arch.startswith("mamba")
        kinds = [""] * len(layers)
        if self.arch == "jamba":
            kinds = [
                "full_attention" if i % c.attn_layer_period == c.attn_layer_offset else ""
                for i in layers
            ]
        if self.arch.startswith(("granite", "nemotron", "qwen3")):
            kinds = [c.layer_type(i) for i in layers]
        w.add_context_length(
            1 << 20 if alone or self.arch == "granitehybrid" else c.max_position_embeddings
        )
        w.add_embedding_length(c.hidden_size)
        w.add_block_count(len(layers))
        w.add_feed_forward_length(0 if alone else self._widths(kinds))
        w.add_head_count(0 if alone else c.num_attention_heads)
        w.add_layer_norm_rms_eps(c.rms_norm_eps)
        w.add_ssm_conv_kernel(
            c.get("mamba_d_conv") or c.get("linear_conv_kernel_dim") or c.conv_kernel
        )
        if not alone:
            full = self.arch in ("falcon-h1", "qwen3next")
            kv = c.num_key_value_heads
            w.add_head_count_kv(kv if full else [kv * (kind == "full_attention") for kind in kinds])
            w.add_key_length(c.head_dim)
            w.add_rope_freq_base(c.rope_parameters["rope_theta"])
        if self.arch == "qwen3next":
            self._delta_net(w)
        elif self.arch in MAMBA2:
            heads = c.get("mamba_n_heads") or c.num_heads
            w.add_ssm_state_size(c.get("mamba_d_state") or c.state_size)
            w.add_ssm_inner_size(heads * (c.get("mamba_d_head") or c.head_dim))
            w.add_ssm_time_step_rank(heads)
            w.add_ssm_group_count(c.get("mamba_n_groups") or c.n_groups)
        else:
            w.add_ssm_inner_size(c.get("intermediate_size") if alone else 2 * c.hidden_size)
            w.add_ssm_state_size(c.get("mamba_d_state") or c.state_size)
            w.add_ssm_time_step_rank(c.get("mamba_dt_rank") or c.time_step_rank)
            if c.model_type == "falcon_mamba":
                w.add_ssm_dt_b_c_rms(True)
        if self.arch == "granitehybrid":
            w.add_rope_scaling_finetuned(c.get("position_embedding_type") == "rope")
        for key, add in (
            ("attention_multiplier", w.add_attention_scale), ("residual_multiplier", w.add_residual_scale),
            ("logits_scaling", w.add_logit_scale), ("embedding_multiplier", w.add_embedding_scale),
            ("shared_intermediate_size", w.add_expert_shared_feed_forward_length),
            ("shared_expert_intermediate_size", w.add_expert_shared_feed_forward_length),
            ("moe_shared_expert_intermediate_size", w.add_expert_shared_feed_forward_length),
            ("num_local_experts" if self.arch == "granitehybrid" else "num_experts", w.add_expert_count),
            ("num_experts_per_tok", w.add_expert_used_count),
            ("norm_topk_prob", w.add_expert_weights_norm), ("routed_scaling_factor", w.add_expert_weights_scale),
            ("n_group", w.add_expert_group_count), ("topk_group", w.add_expert_group_used_count),
            ("moe_latent_size", w.add_moe_latent_size), ("moe_intermediate_size", w.add_expert_feed_forward_length),
        ):  # fmt: skip
            if self.arch != "falcon-h1" and c.get(key) is not None:
                add(c.get(key))

    def _widths(self, kinds: list[Any]) -> Any:
        if not self.arch.startswith("nemotron"):
            return self.cfg.intermediate_size
        return [self.cfg.intermediate_size * (kind in ("mlp", "moe")) for kind in kinds]

    def _delta_net(self, w: Any) -> None:
        c = self.cfg
        w.add_ssm_state_size(c.linear_key_head_dim)
        w.add_ssm_group_count(c.linear_num_key_heads)
        w.add_ssm_time_step_rank(c.linear_num_value_heads)
        w.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
        w.add_full_attention_interval(c.layer_types.index("full_attention") + 1)
        w.add_rope_dimension_count(int(c.head_dim * c.rope_parameters["partial_rotary_factor"]))
