"""Vocabularies of every make: the bytes of their tokens, and the one token that says an output may end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grammar_reader import Reader
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from quire.config.engine import EngineConfig
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.features.structured.feature import StructuredFeature
from quire.features.structured.vocabulary import Vocabulary, tokenizer_json
from quire.frontend.startup import load_tokenizer
from quire.models import checkpoint_locator
from quire.protocol.structured_outputs import StructuredOutputsParams as Form

SPECIAL = ["<unk>", "<s>", "</s>"]
PIECES = ["▁", "▁a", "a", "b", "ab", "▁ab", "1", "▁1", "é"]
TOKENS = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
IDS = {token: at for at, token in enumerate(TOKENS)}


def sentencepiece(kind: str, folder: Path) -> str:
    """A tokenizer.json as converted from sentencepiece: spaces are a sign, and what is unknown is bytes."""
    if kind == "bpe":
        model: Any = models.BPE(vocab=IDS, merges=[], unk_token="<unk>", byte_fallback=True)
    else:
        scores = [(token, -float(at)) for at, token in enumerate(TOKENS)]
        model = models.Unigram(scores, unk_id=0, byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(kind: str, tmp_path: Path):
    reader = Reader(sentencepiece(kind, tmp_path), len(TOKENS))
    for pattern, tokens, keeps in [
        (" ab", ["▁ab"], True), ("ab", ["ab"], True), ("ab", ["▁ab"], False), ("a a", ["a", "▁a"], True),
        ("é1", ["<0xC3>", "<0xA9>", "1"], True), ("é1", ["é", "1"], True), ("é", ["<0xC3>"], False),
        (".*", ["</s>"], False), ("(.|\\n)*", ["<s>"], False), (".{3}", ["<0x3C>", "<0x73>", "<0x3E>"], True),
    ]:  # fmt: skip
        assert reader.admits(Form(regex=pattern), *(IDS[token] for token in tokens)) is keeps, (
            pattern
        )


def test_the_end_is_a_token_of_its_own(checkpoint: str):
    for size in (10, 259, 1000):  # a model may have fewer logits than the tokenizer tokens, or more
        vocabulary = Vocabulary(tokenizer_json(checkpoint), size)
        assert vocabulary.accepts == 259
        assert vocabulary.tokenizer.vocab_size == max(260, size)
        assert vocabulary.specials == {"<|pad|>": 0, "<|bos|>": 1, "<|eos|>": 2}


def test_invalid_tokenizers_are_refused(tmp_path: Path, checkpoint: str):
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        Vocabulary(tokenizer_json(str(tmp_path)), 10).tokenizer  # noqa: B018
    for text in ("", "{}", '{"model": 5}', '{"model": {"vocab": {}}}'):
        with pytest.raises(ConfigError, match="cannot read"):
            Vocabulary(lambda text=text: text, 10).tokenizer  # noqa: B018


def test_ids_with_holes(checkpoint: str):
    found = json.loads((Path(checkpoint) / "tokenizer.json").read_text(encoding="utf-8"))
    found["model"]["vocab"]["far"] = 5000
    vocabulary = Vocabulary(lambda: json.dumps(found), 6000)
    tokenizer = vocabulary.tokenizer
    assert tokenizer.is_special_token(5000)  # lost to grammars, which spell it with other tokens
    assert vocabulary.accepts not in (5000, *range(259))
    assert tokenizer.is_special_token(vocabulary.accepts)


def test_grammars_and_text_have_the_tokenizer_of_one_revision(monkeypatch: pytest.MonkeyPatch):
    """(The engine took another revision, and fetched the weights beside it.)"""
    asked: list[tuple[str, str | None, list[str]]] = []
    folder = str(checkpoint_locator.EMBEDDED / "quire-tiny-draft")

    def from_hub(option: str, model: ModelConfig, load: LoadConfig, local: str) -> tuple[str, None]:
        asked.append((model.model, model.revision, list(load.ignore_patterns or [])))
        return folder, None

    monkeypatch.setattr(checkpoint_locator, "_from_hub", from_hub)
    resolved = resolve_config(
        EngineConfig.from_keywords(
            model="quire-tiny", tokenizer="some/where", tokenizer_revision="r7"
        )
    )
    assert resolved.tokenizer_folder == folder
    feature = StructuredFeature(resolved)
    feature.begin()
    assert feature.compiler
    load_tokenizer(resolved)
    assert len(asked) == 1
    assert asked[0][:2] == ("some/where", "r7")
    assert "*.safetensors" in asked[0][2]
