"""The network: Transformers' Whisper, and a helper that is not published.

The helper reads letters from the encoder's states by CTC (Graves et al. 2006): with it, the encoder learns where each sound is
within minutes, and the decoder's attention follows. It is dropped when the weights are exported.

Shape suffixes: B windows, M mel bins, F frames, T tokens, S states, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import WhisperConfig, WhisperForConditionalGeneration

from tools.tiny_whisper import tokenizer as vocabulary
from tools.tiny_whisper.spectrogram import MELS
from tools.tiny_whisper.windows import IGNORED

LETTERS = " abcdefghijklmnopqrstuvwxyz"
BLANK = len(LETTERS)
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


class Network(nn.Module):
    """`loss` is all that training needs."""

    def __init__(self, settings: WhisperConfig):
        super().__init__()
        self.whisper = WhisperForConditionalGeneration._from_config(
            settings, attn_implementation="eager"
        )
        self.whisper.model.encoder.embed_positions.requires_grad_(True)
        self.letters = nn.Linear(settings.d_model, len(LETTERS) + 1)

    def loss(self, mel_BMF: Tensor, tokens_BT: Tensor, labels_BT: Tensor, texts: Sequence[str], helper: float) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(of the tokens, of the letters): their sum, the second times `helper`, is what to lower."""
        inner = self.whisper.model
        states_BSD = inner.encoder(mel_BMF.to(self.letters.weight.dtype)).last_hidden_state
        hidden_BTD = inner.decoder(
            input_ids=tokens_BT, encoder_hidden_states=states_BSD, use_cache=False
        ).last_hidden_state
        logits = self.whisper.proj_out(hidden_BTD).float()
        words = F.cross_entropy(
            logits.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, label_smoothing=0.05
        )
        if not helper:
            return words, words.new_zeros(())
        spelled = self.letters(states_BSD).float().log_softmax(-1).transpose(0, 1)
        ids = [[LETTERS.index(letter) for letter in text] for text in texts]
        lengths = torch.tensor([len(one) for one in ids])
        states = torch.full_like(lengths, states_BSD.shape[1])
        flat = torch.tensor([id for one in ids for id in one])
        return words, F.ctc_loss(spelled, flat, states, lengths, blank=BLANK, zero_infinity=True)
