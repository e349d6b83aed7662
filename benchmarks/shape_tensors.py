"""The tensors of each family of the benchmarks' models, and random values for them.

Knows names, sizes and values of tensors, and which layer computes what. `shapes.py` has the sizes of the models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from benchmarks.shapes import Shape

Size = tuple[int, ...]
Tensors = Iterator[tuple[str, Size]]
ATTENTION, RECURRENT, MLP = "full_attention", "linear_attention", "mlp"


def layer_types(shape: Shape) -> list[str]:
    """What each layer computes: ATTENTION and RECURRENT with or without an MLP, or an MLP alone."""
    if shape.family == "qwen3_5_text":
        return [ATTENTION if layer % 4 == 3 else RECURRENT for layer in range(shape.layers)]
    if pattern := shape.more.get("hybrid_override_pattern"):
        return [{"M": RECURRENT, "*": ATTENTION, "-": MLP}[letter] for letter in pattern]
    names = {"mamba": RECURRENT, "attention": ATTENTION}
    return [names[name] for name in shape.more.get("layer_types", ["attention"] * shape.layers)]


def layer_state(shape: Shape) -> int:
    """Elements of a request's state in a recurrent layer, without the last inputs of its convolution."""
    more = shape.more
    if shape.family == "qwen3_5_text":
        key, value = more["linear_key_head_dim"], more["linear_value_head_dim"]
        return int(more["linear_num_value_heads"] * key * value)
    if shape.family not in MAMBA2:
        return 0
    heads, size, state, _ = _mamba2_sizes(shape)
    return heads * size * state


def _attention(shape: Shape, gated: int = 1) -> Tensors:
    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    yield "self_attn.q_proj.weight", (gated * q, hidden)
    yield "self_attn.k_proj.weight", (kv, hidden)
    yield "self_attn.v_proj.weight", (kv, hidden)
    yield "self_attn.o_proj.weight", (hidden, q)


def _head_norms(shape: Shape) -> Tensors:
    yield "self_attn.q_norm.weight", (shape.head_dim,)
    yield "self_attn.k_norm.weight", (shape.head_dim,)


def _mlp(shape: Shape, at: str = "mlp") -> Tensors:
    yield f"{at}.gate_proj.weight", (shape.ff, shape.hidden)
    yield f"{at}.up_proj.weight", (shape.ff, shape.hidden)
    yield f"{at}.down_proj.weight", (shape.hidden, shape.ff)


def _norms(shape: Shape, *names: str) -> Tensors:
    for name in ("input_layernorm", "post_attention_layernorm", *names):
        yield f"{name}.weight", (shape.hidden,)


def _llama(shape: Shape, layer: int) -> Tensors:
    yield from (*_attention(shape), *_mlp(shape), *_norms(shape))


def _qwen3(shape: Shape, layer: int) -> Tensors:
    yield from (*_llama(shape, layer), *_head_norms(shape))


def _gemma3(shape: Shape, layer: int) -> Tensors:
    more = _norms(shape, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    yield from (*_attention(shape), *_head_norms(shape), *_mlp(shape), *more)


def _phi3(shape: Shape, layer: int) -> Tensors:
    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    yield "self_attn.qkv_proj.weight", (q + 2 * kv, hidden)
    yield "self_attn.o_proj.weight", (hidden, q)
    yield "mlp.gate_up_proj.weight", (2 * shape.ff, hidden)
    yield "mlp.down_proj.weight", (hidden, shape.ff)
    yield from _norms(shape)


def _qwen3_moe(shape: Shape, layer: int) -> Tensors:
    yield from (*_attention(shape), *_head_norms(shape), *_norms(shape))
    yield "mlp.gate.weight", (shape.experts, shape.hidden)
    for expert in range(shape.experts):
        yield from _mlp(shape, f"mlp.experts.{expert}")


def _qwen3_5(shape: Shape, layer: int) -> Tensors:
    yield from (*_mlp(shape), *_norms(shape))
    if layer % 4 == 3:
        yield from (*_attention(shape, gated=2), *_head_norms(shape))
        return
    heads, key_heads = shape.more["linear_num_value_heads"], shape.more["linear_num_key_heads"]
    size, hidden = shape.more["linear_key_head_dim"], shape.hidden
    inner, channels = heads * size, (2 * key_heads + heads) * size
    yield "linear_attn.in_proj_qkv.weight", (channels, hidden)
    yield "linear_attn.in_proj_z.weight", (inner, hidden)
    yield "linear_attn.in_proj_a.weight", (heads, hidden)
    yield "linear_attn.in_proj_b.weight", (heads, hidden)
    yield "linear_attn.conv1d.weight", (channels, 1, 4)
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.norm.weight", (size,)
    yield "linear_attn.out_proj.weight", (hidden, inner)


MAMBA2 = {
    "granitemoehybrid": ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups"),
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups"),
}
"""Family -> keys of its config.json for the number and size of the heads, the state of a channel, and the groups."""


def _mamba2_sizes(shape: Shape) -> tuple[int, ...]:
    """(heads, size of a head, state of a channel, groups)."""
    return tuple(shape.more[key] for key in MAMBA2[shape.family])


def _mamba2(shape: Shape, at: str) -> Tensors:
    """The tensors of a Mamba-2 layer; `in_proj` computes gate, convolved channels and steps."""
    heads, size, state, groups = _mamba2_sizes(shape)
    inner, channels = heads * size, heads * size + 2 * groups * state
    yield f"{at}.in_proj.weight", (inner + channels + heads, shape.hidden)
    yield f"{at}.conv1d.weight", (channels, 1, 4)
    yield f"{at}.conv1d.bias", (channels,)
    yield f"{at}.dt_bias", (heads,)
    yield f"{at}.A_log", (heads,)
    yield f"{at}.D", (heads,)
    yield f"{at}.norm.weight", (inner,)
    yield f"{at}.out_proj.weight", (shape.hidden, inner)


def _granite4h(shape: Shape, layer: int) -> Tensors:
    attends = layer_types(shape)[layer] == ATTENTION
    yield from _attention(shape) if attends else _mamba2(shape, "mamba")
    yield "shared_mlp.input_linear.weight", (2 * shape.ff, shape.hidden)
    yield "shared_mlp.output_linear.weight", (shape.hidden, shape.ff)
    yield from _norms(shape)


def _nemotron_h(shape: Shape, layer: int) -> Tensors:
    yield "norm.weight", (shape.hidden,)
    kind = layer_types(shape)[layer]
    if kind == RECURRENT:
        yield from _mamba2(shape, "mixer")
    elif kind == MLP:
        yield "mixer.up_proj.weight", (shape.ff, shape.hidden)
        yield "mixer.down_proj.weight", (shape.hidden, shape.ff)
    else:
        for name, size in _attention(shape):
            yield name.replace("self_attn", "mixer"), size


LAYERS: dict[str, Callable[[Shape, int], Tensors]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "qwen3_5_text": _qwen3_5,
    "granitemoehybrid": _granite4h,
    "nemotron_h": _nemotron_h,
}
"""Family (`model_type`) -> (name, shape) of each tensor of a layer."""
NAMES = {"nemotron_h": ("backbone", "embeddings", "norm_f")}
"""Family -> other names of the decoder, its embeddings and its last norm."""


def random_weight(name: str, size: Size, dtype: Any, generator: Generator) -> Tensor:
    """A norm is ones, a matrix normal; a recurrence begins as Mamba-2 is initialized (arXiv:2405.21060, its code).

    With ones as its decays and steps, a state would keep 3 % of itself from a token to the next.
    """
    import torch

    weight = torch.ones(size, dtype=dtype)
    if ".conv1d." in name:
        return weight.uniform_(-0.5, 0.5, generator=generator)
    if name.endswith(".A_log"):  # A of -1 to -16
        return weight.uniform_(1, 16, generator=generator).log_()
    if name.endswith(".dt_bias"):  # softplus(dt_bias) of 0.001 to 0.1
        step = torch.empty(size).uniform_(-6.9, -2.3, generator=generator).exp_()
        return (step + torch.log(-torch.expm1(-step))).to(dtype)
    return weight if len(size) == 1 else weight.normal_(0.0, 0.02, generator=generator)
