"""Speculator: a model that guesses tokens from the hidden states of its target, the model that it speculates for.

Knows one pass. Does not know how guesses are drawn or verified (`features/speculation`).

    pass 0   at position i, from the target's hidden state of token i, and token i + 1: a state, whose logits guess token i + 2
    pass j   at the next position, from the state of the pass before, and its guess: the logits guess one token more

Shape suffixes: T positions of a pass, S rows that draw, D features of a state, E features that the target gives,
V vocabulary of the guesses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.layers.decoder import Decoder, Layers, SpeculatorParts
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.native_parts import replaces
from quire.layers.norm import Norm, NormFactory
from quire.layers.rotary import LayerRotaries
from quire.models.base import CausalLM, LanguageModel
from quire.models.hf_config import TextConfig

READ_BEFORE = ("d2t", "t2d", "mask_hidden", "token_map")
"""Tensors that `speculators/spec.py` has read, or that are not needed."""


class SpeculatorDecoder(Decoder):
    """The layers of a speculator; the norm after them and a table of embeddings, if it has these."""

    def __init__(
        self,
        cfg: TextConfig,
        layers: Iterable[nn.Module] = (),
        max_length: int = 0,
        *,
        norm: Norm | None = None,
    ):
        nn.Module.__init__(self)
        self.layers = Layers(layers)
        self.norm = norm  # type: ignore[assignment]
        self.embed_tokens: Embedding | None = None  # type: ignore[assignment]
        if cfg.get("own_table"):
            self.embed_tokens = Embedding(cfg.vocab_size, cfg.hidden_size)
        ropes = [cfg.rope(0)] * len(self.layers)
        self.rotary = LayerRotaries(cfg.head_dim, ropes, max_length)


class Fusion(nn.Module):
    """fc(cat(norm(embedding), norm(state))).

    Args:
        norm: makes the norms; None: there are none.
        names: of the norms and the projection in checkpoints.
    """

    def __init__(
        self,
        size: int,
        names: Sequence[str],
        *,
        bias: bool = False,
        norm: NormFactory | None = None,
    ):
        super().__init__()
        own_names = ("embedding_norm", "state_norm", "fc")
        self.checkpoint_names = dict(zip(own_names, names, strict=True))
        self.embedding_norm = None if norm is None else norm(size)
        self.state_norm = None if norm is None else norm(size)
        self.fc = Linear(2 * size, size, bias=bias)

    def forward(self, embeddings_TD: Tensor, states_TD: Tensor) -> Tensor:
        """The input of the first layer."""
        if self.embedding_norm is not None and self.state_norm is not None:
            embeddings_TD = self.embedding_norm(embeddings_TD)
            states_TD = self.state_norm(states_TD)
        return self.fc(torch.cat((embeddings_TD, states_TD), -1))


class Speculator(CausalLM):
    """The interface of all speculators. What a checkpoint has is in `cfg` (`speculators/spec.py`).

    Attributes:
        after: numbers of the target's layers; it reads the hidden states after these numbers of layers, concatenated
            (`LanguageModel.record_hidden_states`); none: those after the last norm.
        most: the most tokens that it can guess in a step; None: any number.
        target_ids_V: the target's id of each token; None: the ids are the same.
    """

    spellings: ClassVar[Sequence[tuple[str, str]]] = ()
    """Patterns of tensor names in checkpoints, and what replaces them, in order."""
    after: tuple[int, ...] = ()
    most: int | None = None
    target_ids_V: Tensor | None
    mask_state_1E: Tensor | None

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        self.target: list[LanguageModel] = []  # a list, because it is not a module of this model
        self.register_buffer("target_ids_V", cfg.get("target_ids"), persistent=False)
        self.register_buffer("mask_state_1E", cfg.get("mask_state"), persistent=False)

    def head(self, cfg: TextConfig, tied: Embedding | None) -> Head | None:  # type: ignore[override]
        """The head of the checkpoint; None: it has none, and the target's is used."""
        return Head(cfg.draft_vocab_size, cfg.hidden_size) if cfg.get("own_head") else None

    def use_target(self, target: LanguageModel) -> None:
        """Use the table and the head of this model where the checkpoint has none."""
        self.target[:] = [target]

    @property
    def mask(self) -> tuple[int, Tensor] | None:
        """The token, and the target's hidden states [1, E], that stand for tokens to come: one pass makes all guesses.

        None: each guess takes a pass.
        """
        if self.mask_state_1E is None:
            return None
        return int(self.cfg.mask_token_id), self.mask_state_1E

    def parts(
        self,
        embedding_norm: Norm | None,
        state_norm: Norm | None,
        last_norm: Norm | None,
        **more: Any,
    ) -> SpeculatorParts | None:
        """What it consists of, for `native()` of a subclass whose passes have that form; None: the target has a table or a head of another form, or ranks split it."""
        target = self.target[0]
        if not isinstance(target, CausalLM) or target.model.ranks is not None:
            return None
        if replaces(target, CausalLM, "embed", "logits"):
            return None
        return SpeculatorParts(
            self.model, self.model.embed_tokens or target.model.embed_tokens, self.lm_head or target.lm_head,
            self.cfg.get("draft_vocab_size") or self.vocab_size, target.vocab_size, self.target_ids_V,
            embedding_norm, state_norm, last_norm, **more,
        )  # fmt: skip

    def target_states(self, states_TE: Tensor) -> Tensor:
        """states_TD: what pass 0 takes of the target's hidden states."""
        return states_TE

    def embed(self, token_ids_T: Tensor, step: int = 0) -> Tensor:
        """embeddings_TD of tokens, by the target's ids, for pass `step`."""
        table = self.model.embed_tokens
        return self.target[0].embed(token_ids_T) if table is None else table(token_ids_T)

    def forward(  # type: ignore[override]
        self, embeddings_TD: Tensor, positions_T: Tensor, states_TD: Tensor, step: int = 0
    ) -> Tensor:
        """states_TD: of pass `step`, for its logits and for the next pass."""
        raise NotImplementedError

    def logits(self, states_SD: Tensor, step: int = 0) -> Tensor:
        """logits_SV."""
        if self.lm_head is None:
            return self.target[0].logits(states_SD)
        return self.lm_head(states_SD)

    @classmethod
    def usual_name(cls, name: str) -> str:
        """The name of a tensor in the newest of the checkpoint forms."""
        for pattern, replacement in cls.spellings:
            name = re.sub(pattern, replacement, name)
        return name

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See `LanguageModel`. Leaves out what is read before, and what is the target's."""
        name = self.usual_name(name)
        shared = {"embed_tokens.weight": "own_table", "lm_head.weight": "own_head"}
        if name not in READ_BEFORE and self.cfg.get(shared.get(name, ""), name not in shared):
            yield name, tensor
