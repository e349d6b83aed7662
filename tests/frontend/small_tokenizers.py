"""Small tokenizers of the three kinds there are, made here: byte-level BPE, byte fallback, plain words."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from quire.models.bytes_in_tokens import byte_alphabet

MERGES = ["t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and", "Ġ a", "e r", "o u", "Ã ©", "ð Ł"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|bos|>", "<|end|>"]


def byte_level() -> Tokenizer:
    """All 256 bytes, a few merges (two of them cut characters), two special tokens, one added word."""
    vocab = {char: number for number, char in enumerate(byte_alphabet())}
    merges = []
    for merge in MERGES:
        left, right = merge.split()
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece models have it: ▁ for a space, <0xNN> for what has no piece of its own."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in [*"▁abcdefghijklmnoprstuwyé", "th", "the", "▁the", "an", "and", "▁and"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "n"), ("an", "d"), ("▁", "and")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def words() -> Tokenizer:
    """One token a word, as WordPiece has it; decoding puts spaces between."""
    pieces = [
        "[UNK]",
        "[SEP]",
        "the",
        "cat",
        "sat",
        "##s",
        "##ting",
        "on",
        "mat",
        "un",
        "##kind",
        ".",
    ]
    tokenizer = Tokenizer(models.WordPiece({p: n for n, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram pieces, as T5 and Gemma have them: the first space is not written."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -3.0)]
    pieces += [(piece, -2.0) for piece in ("▁the", "▁cat", "▁and", "s", "ing", "▁a", "▁é")]
    pieces += [(char, -5.0) for char in "abcdefghijklmnopqrstuvwxyzé.,"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    """One that puts `bos` before each text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, bos: str | None, eos: str, **config: object) -> str:
    """As a checkpoint's directory; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, **config}
    if bos is not None:
        settings["bos_token"] = bos
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def save_byte_level(folder: Path, adds_bos: bool = False, **config: object) -> str:
    config.setdefault("chat_template", TEMPLATE)
    tokenizer = with_bos(byte_level(), "<|bos|>") if adds_bos else byte_level()
    return save(tokenizer, folder, "<|bos|>", "<|end|>", **config)
