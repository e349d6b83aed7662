"""The tokenizer: bytes, so that any text survives a round trip; each word of the vocabulary as one token; Whisper's special tokens.

python -m tools.tiny_whisper.tokenizer OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.tiny_whisper.sentences import WORDS

SECONDS = 5  # of a window
STATES = 50 * SECONDS
END, START, ENGLISH, TRANSLATE, TRANSCRIBE = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>",
)  # fmt: skip
LANGUAGE_MODEL, PREVIOUS, NO_SPEECH, NO_TIMES = (
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
SPECIAL = (END, START, ENGLISH, TRANSLATE, TRANSCRIBE, LANGUAGE_MODEL, PREVIOUS, NO_SPEECH, NO_TIMES)  # fmt: skip
TIMES = tuple(f"<|{step / 50:.2f}|>" for step in range(STATES + 1))


def train() -> Tokenizer:
    """Merge bytes until each word with a space before it is one token; add the special tokens in Whisper's order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, min_frequency=1, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator([f" {word}" for word in WORDS], trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])  # fmt: skip
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in TIMES])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "WhisperTokenizer", "bos_token": END, "eos_token": END, "pad_token": END, "unk_token": END,
        "add_prefix_space": False, "clean_up_tokenization_spaces": False, "model_max_length": 64,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    write(train(), Path(sys.argv[1]))
