"""The Qwen3 network in plain PyTorch, for training only: packed rows, per-document attention, a weighted loss.

Parameter names are those of the published checkpoint, so a state dict goes both ways. Knows nothing of text.

Shapes: B rows, T tokens of a row, N = B*T, D hidden, H query heads, K key-value heads, E head size.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The numbers of a Qwen3 config that differ between our models."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    def hf_config(self) -> dict[str, Any]:
        """Return the config.json of this model."""
        numbers = asdict(self)
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **numbers,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "initializer_range": 0.02,
            "dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, size = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(hidden, shape.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * size, hidden, bias=False)
        self.q_norm = Norm(size, shape.rms_norm_eps)
        self.k_norm = Norm(size, shape.rms_norm_eps)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        heads = (batch, length, -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x_BTD).view(heads)).transpose(1, 2), cos_TE, sin_TE)
        k = rotate(self.k_norm(self.k_proj(x_BTD).view(heads)).transpose(1, 2), cos_TE, sin_TE)
        v = self.v_proj(x_BTD).view(heads).transpose(1, 2)
        shared = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        # A CPU's fused attention takes four times as long backward, for documents this short.
        scores_BHTT = (q * self.shape.head_dim**-0.5) @ k.mT + mask
        o = scores_BHTT.softmax(-1) @ v
        return self.o_proj(o.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, blocks and the last norm: what the checkpoint calls `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Network(nn.Module):
    """Qwen3 with tied embeddings over packed rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self._initialize()

    def _initialize(self) -> None:
        deep = 1 / math.sqrt(2 * self.shape.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 0.02 if "embed" in name else 1 / math.sqrt(parameter.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= deep
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """Return the hidden states [B, T, D]; a token sees the earlier tokens of its own document only."""
        return self.states(tokens_BT, documents_BT)[1]

    def states(
        self, tokens_BT: Tensor, documents_BT: Tensor, before: Sequence[int] = ()
    ) -> tuple[list[Tensor], Tensor]:
        """Return the states before some layers, and those after the last norm, each [B, T, D]."""
        length = tokens_BT.shape[1]
        weight = self.model.embed_tokens.weight
        mask = hiding(documents_BT, weight.dtype)
        cos, sin = rotary(self.shape, length, weight.device, weight.dtype)
        x = self.model.embed_tokens(tokens_BT)
        kept = []
        for number, layer in enumerate(self.model.layers):
            if number in before:
                kept.append(x)
            x = layer(x, cos, sin, mask)
        return kept, self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the vocabulary for hidden states [..., D]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def loss(self, tokens_BT: Tensor, weights_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """Return the weighted mean cross entropy of each token after its predecessors."""
        hidden = self(tokens_BT[:, :-1], documents_BT[:, :-1])
        weights = weights_BT[:, 1:] * (documents_BT[:, 1:] == documents_BT[:, :-1])
        asked = weights > 0
        scores = self.logits(hidden[asked]).float()
        each = F.cross_entropy(scores, tokens_BT[:, 1:][asked], reduction="none")
        return (each * weights[asked]).sum() / weights.sum()


def hiding(documents_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of attention, [B or 1, 1, T, T]: -10,000 for later tokens and for other documents."""
    length = documents_BT.shape[1]
    seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=documents_BT.device).tril()
    if bool(((documents_BT != documents_BT[:, :1]) & (documents_BT >= 0)).any()):
        seen = seen & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -1e4)


def rotary(shape: Shape, length: int, device: Any, dtype: Any) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, E]; positions count through the row, as only distances matter."""
    half = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
    angles = torch.arange(length, device=device)[:, None] / shape.rope_theta**half
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys [..., T, E] by their positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
