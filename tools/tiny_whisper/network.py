"""The network: Transformers' Whisper, and helpers of its training that are not published.

The synthesizer says when each phoneme and each word is said. One helper reads the phoneme from each state of the encoder; the other
wants one head of the decoder to look at the word that comes next. So the model need not find out by itself what belongs together.

Shape suffixes: B windows, M mel bins, F frames, T tokens, S states, D features, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import WhisperConfig, WhisperForConditionalGeneration

from tools.tiny_whisper import tokenizer as vocabulary
from tools.tiny_whisper.spectrogram import MELS
from tools.tiny_whisper.synthesize import PHONEMES
from tools.tiny_whisper.windows import IGNORED, Window

OFFSETS = (3, 6, 2)  # states that the heads of each encoder layer look away at first
ALIGNED = (1, 0)  # decoder layer and head that follow the words
SHAPE: dict[str, int] = {
    "d_model": 128, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 512,
    "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 384,
}  # fmt: skip
TEXT_LENGTH = 64


def config(tokenizer: Any, shape: dict[str, int]) -> WhisperConfig:
    """The published config.json."""
    end = tokenizer.token_to_id(vocabulary.END)
    return WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(), num_mel_bins=MELS, max_source_positions=vocabulary.STATES,
        max_target_positions=TEXT_LENGTH, pad_token_id=end, bos_token_id=end, eos_token_id=end,
        decoder_start_token_id=tokenizer.token_to_id(vocabulary.START), num_hidden_layers=shape["encoder_layers"],
        suppress_tokens=None, begin_suppress_tokens=None, **shape,
    )  # fmt: skip


@torch.no_grad()
def look_nearby(encoder: nn.Module) -> None:
    """Begin with heads that look some states back and ahead, where a phoneme's neighbours are; training moves them.

    Positions are sines and cosines, so the product of one with another that is turned by OFFSET is greatest OFFSET states away. Without
    this, the encoder first has to learn what "nearby" is.
    """
    for number, layer in enumerate(encoder.layers):
        attention = layer.self_attn
        size, half = attention.head_dim, attention.embed_dim // 2
        rates_P = torch.exp(-math.log(10_000) / (half - 1) * torch.arange(min(size // 2, half)))
        sines_P, cosines_P = torch.arange(len(rates_P)), torch.arange(len(rates_P)) + half
        for head in range(attention.num_heads):
            turn_P = rates_P * OFFSETS[number % len(OFFSETS)] * (1 if head % 2 else -1)
            rows_P = head * size + 2 * torch.arange(len(rates_P))
            for weight, cos_P, sin_P in (
                (attention.q_proj.weight, torch.ones_like(turn_P), torch.zeros_like(turn_P)),
                (attention.k_proj.weight, turn_P.cos(), turn_P.sin()),
            ):
                weight[rows_P, sines_P] = weight[rows_P + 1, cosines_P] = cos_P
                weight[rows_P, cosines_P], weight[rows_P + 1, sines_P] = -sin_P, sin_P


class Losses(NamedTuple):
    """Of the tokens, of the phonemes, and of where the decoder looks."""

    tokens: Tensor
    phonemes: Tensor
    places: Tensor

    @property
    def total(self) -> Tensor:
        return self.tokens + 1.5 * self.phonemes + 0.3 * self.places


class Network(nn.Module):
    """`losses` is all that training needs."""

    def __init__(self, settings: WhisperConfig):
        super().__init__()
        self.whisper = WhisperForConditionalGeneration._from_config(
            settings, attn_implementation="eager"
        )
        self.whisper.model.encoder.embed_positions.requires_grad_(True)
        look_nearby(self.whisper.model.encoder)
        self.phonemes = nn.Linear(settings.d_model, len(PHONEMES))

    def losses(self, mel_BMF: Tensor, windows: Sequence[Window], filler: int) -> Losses:
        """`filler`: a token for places after the end."""
        tokens_BT = padded([one.tokens for one in windows], filler)
        labels_BT = padded([one.labels for one in windows], IGNORED)
        inner = self.whisper.model
        states_BSD = inner.encoder(mel_BMF.to(self.phonemes.weight.dtype)).last_hidden_state
        found = inner.decoder(
            input_ids=tokens_BT, encoder_hidden_states=states_BSD, use_cache=False, output_attentions=True
        )  # fmt: skip
        logits = self.whisper.proj_out(found.last_hidden_state).float()
        tokens = F.cross_entropy(
            logits.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, label_smoothing=0.05
        )
        heard_BS = torch.from_numpy(np.stack([one.phonemes_S for one in windows]))
        phonemes = F.cross_entropy(self.phonemes(states_BSD).float().flatten(0, 1), heard_BS.flatten())  # fmt: skip
        layer, head = ALIGNED
        looks_BTS = found.cross_attentions[layer][:, head].float()
        seen = [
            looks_BTS[row, place, first:end].sum()
            for row, one in enumerate(windows)
            for place, first, end in one.spans
        ]
        places = -(torch.stack(seen) + 1e-4).log().mean() if seen else looks_BTS.new_zeros(())
        return Losses(tokens, phonemes, places)


def padded(rows: list[list[int]], filler: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])
