"""A vision tower of SigLIP's form, LLaVA's projector, and quire-tiny that reads its rows; for training only.

Parameter names below `tower.` and `projector.` are those of Transformers' `SiglipVisionModel` and `LlavaMultiModalProjector`.

Shapes: B pictures, L patches of a picture and rows of it, I values of a patch, W width of the tower, D width of quire-tiny, T tokens
of a picture's conversations with its rows among them, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny_model.model import Network, rotate
from tools.tiny_vision.dense import (
    COLOUR_CLASSES,
    COUNTS,
    DIGIT_WEIGHT,
    DIGITS,
    DIGITS_FROM,
    KIND_CLASSES,
    OWN,
    OWN_CLASSES,
    RANKS,
    SLOT,
)
from tools.tiny_vision.scenes import COLOURS, MOST

SHARP = 16.0  # of a cosine in a softmax


@dataclass(frozen=True)
class Eyes:
    """The numbers of the tower."""

    image_size: int = 64
    patch_size: int = 8
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 4

    @property
    def rows(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def hf_config(self) -> dict[str, Any]:
        """`vision_config` of a LLaVA."""
        return {
            "model_type": "siglip_vision_model", **asdict(self), "num_channels": 3, "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6, "attention_dropout": 0.0, "vision_use_head": False,
        }  # fmt: skip


class Attention(nn.Module):
    def __init__(self, eyes: Eyes) -> None:
        super().__init__()
        size = eyes.hidden_size
        self.heads = eyes.num_attention_heads
        self.q_proj, self.k_proj = nn.Linear(size, size), nn.Linear(size, size)
        self.v_proj, self.out_proj = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x_BLW: Tensor) -> Tensor:
        q, k, v = (
            made(x_BLW).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        shares = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.out_proj((shares @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, eyes: Eyes) -> None:
        super().__init__()
        self.fc1 = nn.Linear(eyes.hidden_size, eyes.intermediate_size)
        self.fc2 = nn.Linear(eyes.intermediate_size, eyes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, eyes: Eyes) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(eyes.hidden_size, eps=1e-6)
        self.self_attn = Attention(eyes)
        self.layer_norm2 = nn.LayerNorm(eyes.hidden_size, eps=1e-6)
        self.mlp = Mlp(eyes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Tower(nn.Module):
    """Pixels to states."""

    def __init__(self, eyes: Eyes) -> None:
        super().__init__()
        self.eyes = eyes
        self.embeddings, self.encoder = nn.Module(), nn.Module()
        self.embeddings.patch_embedding = nn.Linear(3 * eyes.patch_size**2, eyes.hidden_size)
        self.embeddings.position_embedding = nn.Embedding(eyes.rows, eyes.hidden_size)
        self.encoder.layers = nn.ModuleList(Layer(eyes) for _ in range(eyes.num_hidden_layers))
        deep = 1 / math.sqrt(2 * eyes.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 1 / math.sqrt(parameter.shape[1])
                small = name.endswith(("out_proj.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=std * (deep if small else 1))

    def forward(self, pixels_BCHW: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """(states after `before` layers, states after all), each [B, L, W]."""
        patch = self.eyes.patch_size
        blocks = pixels_BCHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
        patches_BLI = blocks.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.embeddings.patch_embedding(patches_BLI) + self.embeddings.position_embedding.weight
        early = x
        for number, layer in enumerate(self.encoder.layers):
            early = x if number == before else early
            x = layer(x)
        return early, x


class Projector(nn.Module):
    """LLaVA's."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(width, size), nn.Linear(size, size)
        for one in (self.linear_1, self.linear_2):
            nn.init.normal_(one.weight, std=1 / math.sqrt(one.in_features))
            nn.init.zeros_(one.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))


class Helpers(nn.Module):
    """Linear readers of states in the middle of the tower, which are not exported: what is seen in each patch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kind = nn.Linear(width, KIND_CLASSES)
        self.colour = nn.Linear(width, COLOUR_CLASSES)
        self.rank = nn.Linear(width, RANKS)
        self.digit = nn.Linear(width, DIGITS)
        weights_K = torch.ones(KIND_CLASSES)
        weights_K[DIGITS_FROM:] = DIGIT_WEIGHT
        self.register_buffer("weights_K", weights_K, persistent=False)

    def loss(self, states_BLW: Tensor, labels_BLN: Tensor) -> Tensor:
        """Of what `dense.labels` says of each patch; patches on an edge have -100."""
        heads = (
            (self.kind, self.weights_K.float()),
            (self.colour, None),
            (self.rank, None),
            (self.digit, None),
        )
        return sum(
            (
                F.cross_entropy(
                    head(states_BLW).flatten(0, 1).float(), labels_BLN[..., i].flatten(), weights
                )
                for i, (head, weights) in enumerate(heads)
            ),
            torch.zeros(()),
        )


class Relations(nn.Module):
    """Readers of the rows: `dense.relations`. What they read must be a large part of a row, as a cosine is all that counts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        classes = sum(OWN_CLASSES) + len(COLOURS) * COUNTS
        self.codes_embed = nn.Parameter(torch.randn(classes, size))

    def loss(self, rows_BLD: Tensor, relations_BN: Tensor) -> Tensor:
        codes = F.normalize(self.codes_embed.float(), dim=-1)
        scores_BLC = SHARP * F.normalize(rows_BLD.float(), dim=-1) @ codes.T
        things = MOST * SLOT
        own_BMSC = scores_BLC[:, :things, : sum(OWN_CLASSES)].unflatten(1, (MOST, SLOT))
        wanted_BMN = relations_BN[:, : MOST * len(OWN)].unflatten(1, (MOST, len(OWN)))
        found = []
        for number, one_BMSC in enumerate(own_BMSC.split(OWN_CLASSES, -1)):
            wanted_BMS = wanted_BMN[:, :, None, number].expand(one_BMSC.shape[:-1])
            found.append(F.cross_entropy(one_BMSC.flatten(0, 2), wanted_BMS.flatten()))
        counts_BLEC = scores_BLC[:, things:, sum(OWN_CLASSES) :].unflatten(-1, (len(COLOURS), COUNTS))  # fmt: skip
        wanted_BLE = relations_BN[:, None, MOST * len(OWN) :].expand(counts_BLEC.shape[:-1])
        found.append(F.cross_entropy(counts_BLEC.flatten(0, 2), wanted_BLE.flatten()))
        return torch.stack(found).mean()


class Batch(NamedTuple):
    """Pictures, and conversations about the pictures. `rows`: the place of a picture's first row among the tokens of its
    conversation, the same in all conversations."""

    pixels_BCHW: Tensor
    labels_BLN: Tensor
    caption_BL: Tensor
    relations_BN: Tensor
    tokens_BT: Tensor
    weights_BT: Tensor
    positions_BT: Tensor
    mask_BTT: Tensor
    rows: int


class Weights(NamedTuple):
    """The weight of each loss; a loss with weight 0 is not computed. `kept`: the weight of the loss of rows that differ from the teacher's rows."""

    answers: float
    dense: float
    caption: float
    kept: float = 0.0
    relations: float = 0.0


class Sight(nn.Module):
    """`joint`: `language` learns, too; else its parameters take no gradients. `word_weights_V`: in the loss of captions.

    `teacher`: the tower and projector of the run's start, for the loss `kept`. `reading`: the tower does not learn, and the language
    model is shown what a tower without mistakes would show.
    """

    def __init__(
        self, eyes: Eyes, language: Network, joint: bool = False, word_weights_V: Tensor | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.word_weights_V = word_weights_V
        self.eyes, self.middle = eyes, eyes.num_hidden_layers // 2 + 1
        self.tower = Tower(eyes)
        self.projector = Projector(eyes.hidden_size, language.shape.hidden_size)
        self.helpers = Helpers(eyes.hidden_size)
        self.relations = Relations(language.shape.hidden_size)
        self.language = language.requires_grad_(joint)
        self.teacher: list[nn.Module] = []
        self.reading = False

    def remember(self) -> None:
        """Keep the tower and the projector of now as the teacher."""
        self.teacher = [copy.deepcopy(one).requires_grad_(False) for one in (self.tower, self.projector)]  # fmt: skip

    def losses(self, batch: Batch, weights: Weights) -> tuple[Tensor, list[Tensor]]:
        """(their weighted sum, each)."""
        with torch.set_grad_enabled(not self.reading):
            early_BLW, last_BLW = self.tower(batch.pixels_BCHW, self.middle)
            rows_BLD = self.projector(last_BLW)
        if self.reading:
            rows_BLD = self.corrected(rows_BLD, batch.caption_BL)
        nothing = torch.zeros(())
        found = [
            self._of_answers(rows_BLD, batch) if weights.answers else nothing,
            self.helpers.loss(early_BLW, batch.labels_BLN) if weights.dense else nothing,
            self._of_caption(rows_BLD, batch.caption_BL) if weights.caption else nothing,
            self._of_kept(rows_BLD, batch) if weights.kept else nothing,
            self.relations.loss(rows_BLD, batch.relations_BN) if weights.relations else nothing,
        ]
        return sum((w * one for w, one in zip(weights, found, strict=True)), nothing), found

    def words(self, rows_BLD: Tensor) -> Tensor:
        """[B, L, V]: the cosine of each row and the embedding of each word."""
        table_VD = self.language.model.embed_tokens.weight
        return F.normalize(rows_BLD.float(), dim=-1) @ F.normalize(table_VD.float(), dim=-1).T

    @torch.no_grad()
    def corrected(self, rows_BLD: Tensor, caption_BL: Tensor) -> Tensor:
        """The rows, with the word's embedding in the place of each that does not say its word."""
        right_BL = self.words(rows_BLD).argmax(-1) == caption_BL
        return torch.where(right_BL[..., None], rows_BLD, self.language.model.embed_tokens(caption_BL))  # fmt: skip

    def _of_kept(self, rows_BLD: Tensor, batch: Batch) -> Tensor:
        """The loss of rows that differ from the teacher's rows. Only rows count in which the teacher says the right word: the language model can read
        these already."""
        tower, projector = self.teacher
        with torch.no_grad():
            old_BLD = projector(tower(batch.pixels_BCHW, 0)[1])
            right_BL = self.words(old_BLD).argmax(-1) == batch.caption_BL
        old = old_BLD[right_BL].float()
        return F.mse_loss(rows_BLD[right_BL].float(), old) / old.square().mean()

    def _of_caption(self, rows_BLD: Tensor, caption_BL: Tensor) -> Tensor:
        """Each row is to be near the embedding of its word of the caption."""
        table_VD = self.language.model.embed_tokens.weight
        wanted = table_VD[caption_BL]
        right = F.cross_entropy(
            SHARP * self.words(rows_BLD).flatten(0, 1), caption_BL.flatten(), self.word_weights_V
        )
        size = wanted.float().square().mean()
        return right + 0.2 * F.mse_loss(rows_BLD.float(), wanted.float()) / size

    def hidden(self, rows_BLD: Tensor, batch: Batch) -> Tensor:
        """States after quire-tiny's last norm, [B, T, D]."""
        body, rows = self.language.model, self.eyes.rows
        x = body.embed_tokens(batch.tokens_BT)
        x = torch.cat((x[:, : batch.rows], rows_BLD.to(x.dtype), x[:, batch.rows + rows :]), 1)
        cos, sin = turns(self.language, batch.positions_BT, x.dtype)
        mask = torch.zeros_like(batch.mask_BTT, dtype=x.dtype).masked_fill_(~batch.mask_BTT, -1e4)[
            :, None
        ]
        for layer in body.layers:
            x = layer(x, cos, sin, mask)
        return body.norm(x)

    def _of_answers(self, rows_BLD: Tensor, batch: Batch) -> Tensor:
        # Token i + 1 of a row is predicted from the hidden state of token i: both belong to the same conversation.
        weights = batch.weights_BT[:, 1:]
        asked = weights > 0
        hidden = self.hidden(rows_BLD, batch)[:, :-1][asked]
        each = F.cross_entropy(self.language.logits(hidden).float(), batch.tokens_BT[:, 1:][asked], reduction="none")  # fmt: skip
        return (each * weights[asked]).sum() / weights.sum()


def turns(language: Network, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, E] of the positions."""
    shape = language.shape
    half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    angles = positions_BT[:, None, :, None] / shape.rope_theta**half
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


__all__ = ["Batch", "Eyes", "Sight", "Weights", "rotate"]
