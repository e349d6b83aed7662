"""The tokenizer's small face against Transformers' tokenizer of the same files."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from quire.errors import ConfigError, ModelNotFound
from quire.frontend.detokenize import Detokenizer
from quire.frontend.tokenizer import Tokenizer, load

KINDS: dict[str, tuple[Callable[[], Backend], str | None, str]] = {
    "byte_level": (small_tokenizers.byte_level, "<|bos|>", "<|end|>"),
    "byte_level_bos": (lambda: small_tokenizers.with_bos(small_tokenizers.byte_level(), "<|bos|>"), "<|bos|>", "<|end|>"),
    "byte_fallback": (small_tokenizers.byte_fallback, "<s>", "</s>"),
    "byte_fallback_bos": (lambda: small_tokenizers.with_bos(small_tokenizers.byte_fallback(), "<s>"), "<s>", "</s>"),
    "metaspace": (small_tokenizers.metaspace, None, "</s>"),
    "words": (small_tokenizers.words, None, "[SEP]"),
}  # fmt: skip
TEXTS = (
    "",
    "the cat and",
    " the  cat ",
    "é汉🎉",
    "the<tool>and<|end|>",
    "sat sitting.",
    "a\nb\t c",
)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    make, bos, eos = KINDS[request.param]
    folder = small_tokenizers.save(make(), tmp_path_factory.mktemp(request.param), bos, eos)
    return load(folder), AutoTokenizer.from_pretrained(folder)


def test_ids(pair: tuple[Tokenizer, Any]):
    ours, theirs = pair
    for special in (True, False):
        for text in TEXTS:
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)
        assert ours.encode_batch(TEXTS, special) == [ours.encode(text, special) for text in TEXTS]
    assert ours(TEXTS[1]).input_ids == theirs(TEXTS[1]).input_ids
    assert ours(list(TEXTS[1:3]))["attention_mask"] == theirs(list(TEXTS[1:3]))["attention_mask"]


def test_texts(pair: tuple[Tokenizer, Any]):
    ours, theirs = pair
    draw = random.Random(1)
    for _ in range(100):
        ids = [draw.randrange(len(ours)) for _ in range(draw.randint(0, 12))]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_names(pair: tuple[Tokenizer, Any]):
    ours, theirs = pair
    for name in ("eos_token", "eos_token_id", "bos_token", "bos_token_id", "pad_token"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids)
    ids = list(range(len(ours)))
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    tokens = theirs.convert_ids_to_tokens(ids)
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)


def test_pieces_join_to_the_text(pair: tuple[Tokenizer, Any]):
    ours, _ = pair
    for text in ("the cat", "the cats the cat"):
        joined = "".join(map(ours.piece, ours.encode(text, False)))
        assert joined.strip() == text
    assert ours.piece(len(ours) + 5) == ""


def test_a_stream_of_any_tokens_is_their_text(pair: tuple[Tokenizer, Any]):
    """Also after a prompt, whose text the first tokens may need."""
    ours, theirs = pair
    draw = random.Random(2)
    bytes_of = ours.is_byte_level or ours.token_id("<0x00>") is not None
    usable = [i for i in range(len(ours)) if i not in ours.special_ids]
    if bytes_of:  # parts of characters are test_detokenize.py's
        usable = [i for i in usable if "\ufffd" not in ours.decode([i])]
    for _ in range(150):
        ids = [draw.choice(usable) for _ in range(draw.randint(2, 20))]
        cut = draw.randint(0, len(ids))
        detokenizer = Detokenizer(ours, ids[:cut])
        for token in ids[cut:]:
            detokenizer.add(token)
        detokenizer.end()
        assert theirs.decode(ids[:cut]) + detokenizer.text == theirs.decode(ids)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    "name", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"]
)
@pytest.mark.parametrize("adds", [True, False])
def test_tokenizer_config_flags_equal_transformers(
    tmp_path: Path, flag: bool, name: str, adds: bool
):
    folder = small_tokenizers.save_byte_level(
        tmp_path, adds, add_bos_token=flag, add_eos_token=flag, tokenizer_class=name
    )
    expected = AutoTokenizer.from_pretrained(folder).encode("the cat")
    assert load(folder).encode("the cat") == expected


def test_tokens_of_the_config_are_added(tmp_path: Path):
    """Older checkpoints name tokens in tokenizer_config.json that tokenizer.json does not have."""
    size = small_tokenizers.byte_level().get_vocab_size()
    added = {str(size): {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}}  # fmt: skip
    folder = small_tokenizers.save_byte_level(
        tmp_path, added_tokens_decoder=added, pad_token="<pad>"
    )
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("a<extra>b") == theirs.encode("a<extra>b")
    assert ours.decode([size], skip_special_tokens=True) == ""
    assert ours.pad_token_id == theirs.pad_token_id


def test_the_slow_tokenizer(tmp_path: Path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    ours, theirs = load(str(tmp_path), mode="slow"), ByT5Tokenizer.from_pretrained(tmp_path)
    assert ours.is_slow
    ids = theirs.encode("naïve 🎉")
    assert ours.encode("naïve 🎉") == ids
    assert ours.eos_token_id == theirs.eos_token_id
    detokenizer = Detokenizer(ours)
    parts = []
    for token in ids:
        detokenizer.add(token)
        parts.append(detokenizer.take(False))
    detokenizer.end()
    parts.append(detokenizer.take(True))
    assert "".join(parts) == "naïve 🎉"
    assert not any("\ufffd" in part for part in parts)


OWN_TOKENIZER = """
import pathlib
from transformers import PreTrainedTokenizerFast
pathlib.Path({mark!r}).touch()
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("mode", ["auto", "slow"])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_tokenizers_own_code_needs_trust_remote_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, trusted: bool
):
    folder, mark = Path(small_tokenizers.save_byte_level(tmp_path / "own")), tmp_path / "imported"
    (folder / "own.py").write_text(OWN_TOKENIZER.format(mark=str(mark)))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {
        "auto_map": {
            "AutoTokenizer": [None if mode == "auto" else "own.OwnTokenizer", "own.OwnTokenizer"]
        }
    }
    file.write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.syspath_prepend(str(tmp_path / "m"))
    if trusted or mode == "auto":
        assert load(str(folder), mode=mode, trust_remote_code=trusted).encode("ab")
    else:
        with contextlib.suppress(ModelNotFound):
            load(str(folder), mode=mode)
    assert mark.exists() is trusted


def test_names_that_only_transformers_has(tmp_path: Path):
    ours = load(small_tokenizers.save_byte_level(tmp_path))
    assert ours.full.encode("the") == ours.encode("the")
    assert ours.model_max_length == ours.full.model_max_length
    with pytest.raises(AttributeError):
        ours.nonsense  # noqa: B018


def test_a_failed_tokenizer_load_names_the_remedy(tmp_path: Path):
    with pytest.raises(ModelNotFound, match="skip_tokenizer_init"):
        load(str(tmp_path))
    with pytest.raises(ConfigError, match="tokenizer_mode"):
        load(str(tmp_path), mode="quick")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(tmp_path))


def test_a_fast_tokenizer_needs_no_transformers(tmp_path: Path):
    folder = small_tokenizers.save_byte_level(tmp_path)
    code = (
        "import sys; from quire.frontend.tokenizer import load;"
        f"t = load({folder!r}); t.apply_chat_template([{{'role': 'user', 'content': t.decode(t.encode('x'))}}]);"
        "sys.exit(bool({'transformers', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0
