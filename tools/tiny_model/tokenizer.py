"""Trains the byte-level BPE tokenizer and writes the three files that go with it.

    python -m tools.tiny_model.tokenizer OUT

Every byte is a token, so any text survives a round trip; each digit stands alone, so sums can be learnt.
"""

import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.tiny_model import chat, corpus

VOCABULARY = 1536
DOCUMENTS = 40_000
SEED = 1
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # hidden from decoded text
MARKS = [  # part of the text a parser reads, so they are not hidden
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train() -> Tokenizer:
    """Return the tokenizer trained on the corpus's own text."""
    from tokenizers import AddedToken

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=CONTROL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = (_without_marks(text) for text in corpus.texts(SEED, DOCUMENTS))
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def _without_marks(text: str) -> str:
    for mark in (*CONTROL, *MARKS):
        text = text.replace(mark, "")
    return text


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": chat.END_OF_TURN,
        "pad_token": chat.END_OF_TEXT,
        "bos_token": None,
        "unk_token": None,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(chat.TEMPLATE.read_text())


if __name__ == "__main__":
    write(train(), Path(sys.argv[1]))
