"""MTP: the layers that some checkpoints have after their own to predict further tokens.

A family's class gives the decoder layer; these classes say what is around it. Layer `step` makes guess `step` + 1; the last
layer also makes the guesses after it.

Sources: DeepSeek-V3 (arXiv 2412.19437); the checkpoints of DeepSeek, GLM and Qwen.

Shape suffixes: T positions of a pass, D features of a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.forward_context import current_batch
from quire.layers.decoder import SpeculatorParts
from quire.layers.decoder_layer import normed_sum
from quire.layers.native_parts import replaces
from quire.models.deepseek import DeepseekV3, Glm4MoeLite
from quire.models.hf_config import TextConfig
from quire.models.llama import Qwen3
from quire.models.mixtures import Glm4Moe
from quire.models.qwen3_next import Qwen3_5, Qwen3_5Moe, Qwen3Next
from quire.models.speculators.base import Fusion, Speculator, SpeculatorDecoder


class NextTokenLayers(Speculator):
    """One or several MTP layers. The state after a norm is for the logits and for the next pass.

    The keys of layers after the first are approximate at positions of earlier steps: that costs right guesses only.
    """

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        self.fusions = nn.ModuleList(self.fusion() for _ in self.numbers[: self.num_fusions])
        self.norms = nn.ModuleList(self.norm(cfg.hidden_size) for _ in self.fusions)

    @property
    def numbers(self) -> Sequence[int]:
        """The number of each layer in the checkpoint."""
        raise NotImplementedError

    follows_target: ClassVar[bool]
    """Whether the layers have the numbers after the target's last layer."""
    num_fusions: int | None = None
    """How many projections and norms there are; None: one for each layer."""

    def fusion(self) -> Fusion:
        """What is before a layer."""
        raise NotImplementedError

    def decoder(self, cfg: TextConfig, max_length: int) -> SpeculatorDecoder:
        return SpeculatorDecoder(cfg, (self.layer(number) for number in self.numbers), max_length)

    def forward(  # type: ignore[override]
        self, embeddings_TD: Tensor, positions_T: Tensor, states_TD: Tensor, step: int = 0
    ) -> Tensor:
        """See `Speculator`."""
        count = len(self.model.layers)
        found_TD = self.run(min(step, count - 1), embeddings_TD, positions_T, states_TD)
        x_TD = found_TD
        for number in range(1, count if step == 0 else 1):  # for their keys
            x_TD = self.run(number, embeddings_TD, positions_T, self.before(x_TD))
        return found_TD

    def native(self) -> SpeculatorParts | None:
        """See `Speculator`. Several layers have norms between them, and all run in pass 0."""
        if replaces(self, NextTokenLayers, "forward") or len(self.model.layers) > 1:
            return None
        fusion: Any = self.fusions[0]
        last: Any = self.norms[0]
        return self.parts(fusion.embedding_norm, fusion.state_norm, last, join=fusion.fc)

    def run(
        self, number: int, embeddings_TD: Tensor, positions_T: Tensor, states_TD: Tensor
    ) -> Tensor:
        """The state after one of the layers and its norm."""
        own = min(number, len(self.fusions) - 1)
        x_TD = self.fusions[own](embeddings_TD, states_TD)
        decoder = self.model
        if len(decoder.layers) == 1:
            return self.norms[own](decoder(x_TD, positions_T))
        angles = decoder.rotary(positions_T)[number]
        return normed_sum(self.norms[own], *decoder.layers[number](x_TD, None, angles))[0]  # type: ignore[arg-type]

    def before(self, states_TD: Tensor) -> Tensor:
        """The state of the position before each; of the first position of a row, its own."""
        starts = current_batch().query_start_B1[:-1].long()
        before_TD = torch.cat((states_TD[:1], states_TD[:-1]))
        before_TD[starts] = states_TD[starts]
        return before_TD

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See `LanguageModel`. Of the target's checkpoint, only the MTP layers."""
        shared = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        if name.startswith(self.prefixes()) and not shared:
            yield name, tensor

    def prefixes(self) -> tuple[str, ...]:
        """How the names of its tensors begin."""
        raise NotImplementedError


class QwenMtp(NextTokenLayers):
    """One projection and one norm for all layers, under `mtp.`."""

    follows_target = False
    num_fusions = 1

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        self.checkpoint_names = {"model": "mtp", "fusions": "mtp", "norms": "mtp"}
        self.fusions.checkpoint_names = {"0": ""}  # type: ignore[assignment]
        self.norms.checkpoint_names = {"0": "norm"}  # type: ignore[assignment]

    @property
    def numbers(self) -> Sequence[int]:
        return range(self.cfg.num_hidden_layers)

    def fusion(self) -> Fusion:
        names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"
        return Fusion(self.cfg.hidden_size, names, norm=self.norm)

    def prefixes(self) -> tuple[str, ...]:
        return ("mtp.",)


class Qwen3Mtp(QwenMtp, Qwen3):
    """MTP layers in Qwen3-Next's form for a dense Qwen 3."""


class Qwen3_5Mtp(QwenMtp, Qwen3_5):
    """Qwen 3.5, dense."""


class Qwen3NextMtp(QwenMtp, Qwen3Next):
    """Qwen3-Next."""


class Qwen3_5MoeMtp(QwenMtp, Qwen3_5Moe):
    """Qwen 3.5 with experts."""


class DeepseekForm(NextTokenLayers):
    """Each layer has its own projection and norm, under the numbers after the target's last layer."""

    follows_target = True

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        numbers = {str(index): str(number) for index, number in enumerate(self.numbers)}
        self.checkpoint_names = {"fusions": "model.layers", "norms": "model.layers"}
        self.model.layers.checkpoint_names = numbers  # type: ignore[assignment]
        self.fusions.checkpoint_names = numbers  # type: ignore[assignment]
        self.norms.checkpoint_names = {  # type: ignore[assignment]
            index: f"{number}.shared_head.norm" for index, number in numbers.items()
        }

    @property
    def numbers(self) -> Sequence[int]:
        first = self.cfg.num_hidden_layers
        return range(first, first + self.cfg.num_nextn_predict_layers)

    def fusion(self) -> Fusion:
        return Fusion(self.cfg.hidden_size, ("enorm", "hnorm", "eh_proj"), norm=self.norm)

    def is_dense(self, i: int) -> bool:
        """See `DeepseekV2`."""
        return False

    def forward(  # type: ignore[override]
        self, embeddings_TD: Tensor, positions_T: Tensor, states_TD: Tensor, step: int = 0
    ) -> Tensor:
        """See `Speculator`. The embedding at position 0 is zero."""
        embeddings_TD = embeddings_TD.masked_fill(positions_T[:, None] == 0, 0)
        return super().forward(embeddings_TD, positions_T, states_TD, step)

    def prefixes(self) -> tuple[str, ...]:
        return tuple(f"model.layers.{number}." for number in self.numbers)


class DeepseekMtp(DeepseekForm, DeepseekV3):
    """DeepSeek-V3 and R1."""


class Glm4MoeLiteMtp(DeepseekForm, Glm4MoeLite):
    """GLM-4.7-Flash."""


class Glm4MoeMtp(DeepseekForm, Glm4Moe):
    """GLM 4.5 and 4.6."""
