"""The heads that propose tokens for quire-tiny, in plain PyTorch: EAGLE-3 and MTP, with the tensor names of their checkpoints.

Entry i of a head has the state of quire-tiny at token i and the embedding of token i + 1, and predicts token i + 2. In a chain of
proposals, an entry has the head's own state in place of quire-tiny's. Training unrolls the chains as they run later
(training-time test: EAGLE-3, arXiv 2503.01840). Knows nothing of text.

Shapes: B documents, T tokens, Q chains (one for each token after which a chain can begin), I inputs of the attention, D hidden,
H query heads, K key-value heads, E head size, V vocabulary of the head.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tools.tiny_model.model import Mlp, Network, Norm, Shape, rotary, rotate

AUX_LAYERS = (1, 3, 4)  # EAGLE-3 reads the states before these layers
DRAFT_VOCABULARY = 448  # the file stays below 1 MB
NEVER = -1e9  # finite: a padded query has no key at all

KeysValues = tuple[Tensor, Tensor]


@dataclass
class Documents:
    """Documents that end at the last column, and what quire-tiny computes of them."""

    tokens_BT: Tensor
    begins_B: Tensor  # the column of each document's first token
    answers_B: Tensor  # the column of the first token of its answer
    aux_BTA: Tensor  # the states before AUX_LAYERS, joined
    final_BTD: Tensor  # the states after the last norm

    @property
    def first(self) -> int:
        """The column of the first token after which a chain begins."""
        return max(1, int(self.answers_B.min()))

    def mask_BQ(self) -> Tensor:
        """Which chains begin in a document's own answer: the first has the last token of the prompt, and one drawn token."""
        columns_Q = torch.arange(self.first - 1, self.tokens_BT.shape[1] - 2)
        begins_B = torch.maximum(self.answers_B - 1, self.begins_B)
        return columns_Q[None] >= begins_B[:, None]


def pack(texts: list[tuple[list[int], list[int]]], network: Network) -> Documents:
    """Put (prompt, answer) pairs into columns, and run quire-tiny over them."""
    length = max(len(prompt) + len(answer) for prompt, answer in texts)
    tokens_BT = torch.zeros(len(texts), length, dtype=torch.long)
    for row, (prompt, answer) in enumerate(texts):
        tokens_BT[row, length - len(prompt) - len(answer) :] = torch.tensor(prompt + answer)
    begins_B = torch.tensor([length - len(prompt) - len(answer) for prompt, answer in texts])
    answers_B = torch.tensor([length - len(answer) for _, answer in texts])
    numbers_BT = (torch.arange(length)[None] >= begins_B[:, None]).long()
    with torch.no_grad():
        aux, final_BTD = network.states(tokens_BT, numbers_BT, AUX_LAYERS)
    return Documents(tokens_BT, begins_B, answers_B, torch.cat(aux, -1), final_BTD)


class ChainAttention(nn.Module):
    """Attention of an entry over the true entries up to the one where its chain began, and over its chain."""

    def __init__(self, inputs: int, shape: Shape, normed: bool) -> None:
        super().__init__()
        self.shape = shape
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.q_proj = nn.Linear(inputs, heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * shape.head_dim, shape.hidden_size, bias=False)
        if normed:
            self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.normed = normed

    def _heads(self, x: Tensor, start: int, norm: nn.Module | None) -> Tensor:
        """Projections [B, Q, heads * E] as rotated heads [B, heads, Q, E]; the first is at position `start`."""
        x = x.view(*x.shape[:2], -1, self.shape.head_dim)
        x = (x if norm is None else norm(x)).transpose(1, 2)
        cos, sin = rotary(self.shape, start + x.shape[2], x.device, x.dtype)
        return rotate(x, cos[start:], sin[start:])

    def keys_values(self, x_BTI: Tensor, start: int) -> KeysValues:
        """Keys and values [B, H, T, E], repeated for each query head."""
        shared = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k = self._heads(self.k_proj(x_BTI), start, self.k_norm if self.normed else None)
        v = self.v_proj(x_BTI).view(*x_BTI.shape[:2], -1, self.shape.head_dim).transpose(1, 2)
        return k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)

    def forward(
        self,
        x_BQI: Tensor,
        start: int,
        known: KeysValues,
        mask_BQT: Tensor,
        chain: list[KeysValues],
    ) -> Tensor:
        """Entry q of `x` attends the `known` entries in its mask, and entry q of each in `chain`."""
        count = x_BQI.shape[1]
        q = self._heads(self.q_proj(x_BQI), start, self.q_norm if self.normed else None)
        scores = (q @ known[0].mT).masked_fill(~mask_BQT[:, None, :count], NEVER)
        own = [(q * k[:, :, :count]).sum(-1, keepdim=True) for k, _ in chain]
        shares = (torch.cat([scores, *own], -1) * self.shape.head_dim**-0.5).softmax(-1)
        out = shares[..., : scores.shape[-1]] @ known[1]
        for place, (_, v) in enumerate(chain, scores.shape[-1]):
            out = out + shares[..., place, None] * v[:, :, :count]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Head(nn.Module, ABC):
    """One layer that proposes tokens, `self.layer`.

    Args:
        target: quire-tiny; its embedding is shared.
    """

    folder: str  # the name of the published folder

    def __init__(self, target: Network) -> None:
        super().__init__()
        self.table_VD = target.model.embed_tokens.weight.detach()

    @property
    @abstractmethod
    def layer(self) -> nn.Module:
        """Has self_attn, mlp and post_attention_layernorm."""

    @abstractmethod
    def features(self, documents: Documents) -> Tensor:
        """The target's states [B, T, D] as the head takes them."""

    @abstractmethod
    def entry(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The residual [..., D], and the input of the attention [..., I]."""

    @abstractmethod
    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The state for the chain's next entry [..., D], and logits [..., V]."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The config.json of the published folder."""

    def ids_V(self) -> Tensor:
        """The target's token id of each logit."""
        return torch.arange(len(self.table_VD))

    def weights(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint."""
        return {name: w.detach() for name, w in self.state_dict().items()}

    def proposals(self, documents: Documents, steps: int) -> Iterator[Tensor]:
        """Yield the logits [B, Q - step, V] of each step; place q is of the chain that begins at column `first - 1 + q`."""
        begin, end = documents.first - 1, documents.tokens_BT.shape[1] - 2
        embedding = self.table_VD[documents.tokens_BT[:, 1:]]
        residual, x = self.entry(embedding, self.features(documents)[:, :-1])
        attention, mlp, norm = (
            self.layer.self_attn, self.layer.mlp, self.layer.post_attention_layernorm,
        )  # fmt: skip
        known = attention.keys_values(x, 0)
        columns_T = torch.arange(end + 1)
        mask_BQT = (columns_T <= torch.arange(begin, end)[:, None]) & (
            columns_T >= documents.begins_B[:, None, None]
        )
        residual, x, chain = residual[:, begin:end], x[:, begin:end], []
        state = residual
        for step in range(steps):
            if step:
                residual, x = self.entry(embedding[:, begin + step : end], state[:, :-1])
                chain.append(attention.keys_values(x, begin + step))
            x = residual + attention(x, begin + step, known, mask_BQT, chain)
            state, logits = self.finish(x + mlp(norm(x)))
            yield logits


class Eagle3(Head):
    """An EAGLE-3 head: reads the states of several layers, and has a small vocabulary of its own."""

    folder = "quire-tiny-eagle3"

    def __init__(self, target: Network, ids: list[int]) -> None:
        super().__init__(target)
        self.ids = sorted(ids)
        self.shape = replace(
            target.shape, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1, head_dim=32, intermediate_size=64,
        )  # fmt: skip
        hidden, eps = self.shape.hidden_size, self.shape.rms_norm_eps
        self.fc = nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.midlayer = nn.Module()
        self.midlayer.self_attn = ChainAttention(2 * hidden, self.shape, normed=False)
        self.midlayer.mlp = Mlp(self.shape)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self.midlayer, name, Norm(hidden, eps))
        self.norm = Norm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(self.ids), bias=False)
        _initialize(self)
        with torch.no_grad():
            self.norm.weight.copy_(target.model.norm.weight)
            self.lm_head.weight.copy_(self.table_VD[self.ids])

    @property
    def layer(self) -> nn.Module:
        return self.midlayer

    def features(self, documents: Documents) -> Tensor:
        return self.fc(documents.aux_BTA)

    def entry(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        return state, torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(state)], -1)

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.lm_head(self.norm(x))

    def ids_V(self) -> Tensor:
        return torch.tensor(self.ids)

    def weights(self) -> dict[str, Tensor]:
        known = torch.zeros(len(self.table_VD), dtype=torch.bool)
        known[self.ids] = True
        offsets = self.ids_V() - torch.arange(len(self.ids))
        return {**super().weights(), "d2t": offsets, "t2d": known}

    def config(self) -> dict[str, Any]:
        layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [*AUX_LAYERS]}
        return {
            **self.shape.hf_config(), "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
            "tie_word_embeddings": False, "target_hidden_size": self.shape.hidden_size,
            "draft_vocab_size": len(self.ids), "eagle_config": layers,
        }  # fmt: skip


class Mtp(Head):
    """A multi-token-prediction layer of the form of Qwen3-Next, with a layer of Qwen3, that is used again for further tokens."""

    folder = "quire-tiny-mtp"

    def __init__(self, target: Network) -> None:
        super().__init__(target)
        self.shape = replace(target.shape, num_hidden_layers=1, intermediate_size=128)
        hidden, eps = self.shape.hidden_size, self.shape.rms_norm_eps
        self.mtp = nn.Module()
        self.mtp.pre_fc_norm_embedding = Norm(hidden, eps)
        self.mtp.pre_fc_norm_hidden = Norm(hidden, eps)
        self.mtp.fc = nn.Linear(2 * hidden, hidden, bias=False)
        layer = nn.Module()
        layer.self_attn = ChainAttention(hidden, self.shape, normed=True)
        layer.mlp = Mlp(self.shape)
        layer.input_layernorm, layer.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.mtp.layers = nn.ModuleList([layer])
        self.mtp.norm = Norm(hidden, eps)
        _initialize(self)
        with torch.no_grad():
            self.mtp.norm.weight.copy_(target.model.norm.weight)

    @property
    def layer(self) -> nn.Module:
        return self.mtp.layers[0]

    def features(self, documents: Documents) -> Tensor:
        return documents.final_BTD

    def entry(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.mtp.pre_fc_norm_embedding(embedding), self.mtp.pre_fc_norm_hidden(state)
        x = self.mtp.fc(torch.cat(parts, -1))
        return x, self.layer.input_layernorm(x)

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = self.mtp.norm(x)
        return state, F.linear(state, self.table_VD)

    def config(self) -> dict[str, Any]:
        return {**self.shape.hf_config(), "architectures": ["Qwen3MTP"], "mtp_num_hidden_layers": 1}


def load(folder: Path, target: Network) -> Head:
    """Return the published head of a folder."""
    weights = load_file(folder / "model.safetensors")
    head: Head = Mtp(target)
    if "d2t" in weights:
        weights.pop("t2d")
        ids = weights.pop("d2t") + torch.arange(len(weights["lm_head.weight"]))
        head = Eagle3(target, ids.tolist())
    head.load_state_dict({name: w.float() for name, w in weights.items()}, strict=True)
    return head


def _initialize(head: nn.Module) -> None:
    """Like `Network`: each output of a projection has the size of its inputs; what is added to the residual begins small."""
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            small = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(parameter, std=small / parameter.shape[1] ** 0.5)
