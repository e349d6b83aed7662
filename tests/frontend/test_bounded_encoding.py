"""Of a long text only a part is tokenized, and the kept tokens equal the tokens of the whole text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.errors import ValidationError
from quire.frontend import bounded_encoding
from quire.frontend.bounded_encoding import encode_enough
from quire.frontend.input_processor import InputProcessor, TokenizeOptions
from quire.frontend.pooling.tokenization import cut_text, encode_inputs
from quire.frontend.prompts import Prompt
from quire.frontend.tokenizer import Tokenizer, load
from quire.models.checkpoint_locator import EMBEDDED


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load(str(Path(EMBEDDED) / "quire-tiny"))


@pytest.fixture(scope="module")
def text() -> str:
    draw = random.Random(3)
    words = ["ship", "sea", "naïve", "\n\n", "  x", "1234", "日本", "q", "!?"]
    return " ".join(draw.choice(words) for _ in range(9000))


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_encoding, "FIRST_PART", 2000)
    monkeypatch.setattr("quire.frontend.pooling.tokenization.FIRST_PART", 2000)


@pytest.mark.parametrize("keep_first", [True, False])
@pytest.mark.parametrize("most", [1, 50, 1000])
def test_the_tokens_that_are_kept_are_those_of_the_whole_text(
    tokenizer: Tokenizer, text: str, most: int, keep_first: bool
):
    sizes = []

    def encode(part: str) -> list[int]:
        sizes.append(len(part))
        return tokenizer.encode(part, False)

    whole = tokenizer.encode(text, False)
    part, is_whole = encode_enough(encode, text, most, keep_first)
    assert not is_whole
    assert max(sizes) < len(text)
    assert (part[:most], part[-most:])[not keep_first] == (whole[:most], whole[-most:])[not keep_first]  # fmt: skip
    options = TokenizeOptions(truncate=most, keep_first=keep_first)
    inputs = InputProcessor(tokenizer, 4096, len(tokenizer))
    assert inputs.tokenize(Prompt(text), options).tokens == (whole[:most] if keep_first else whole[-most:])  # fmt: skip
    ((ids, _),) = encode_inputs(tokenizer, [text], False, most, keep_first)
    assert ids == (whole[:most] if keep_first else whole[-most:])


def test_a_text_is_cut_where_its_tokens_end(tokenizer: Tokenizer, text: str):
    cut = cut_text(tokenizer, text, 40)
    assert text.startswith(cut)
    assert tokenizer.encode(cut, False) == tokenizer.encode(text, False)[:40]
    assert cut_text(tokenizer, "a ship", 40) == "a ship"


def test_a_part_with_few_tokens_grows():
    parts = []

    def words(part: str) -> list[str]:
        parts.append(len(part))
        return part.split()

    found, is_whole = encode_enough(words, " " * 90_000 + "a b", 1)
    assert (found, is_whole) == (["a", "b"], True)
    assert parts == [2000, 8000, 32000, 90003]


def test_a_text_that_does_not_fit_is_refused_by_its_beginning(tokenizer: Tokenizer, text: str):
    inputs = InputProcessor(tokenizer, 300, len(tokenizer))
    with pytest.raises(ValidationError, match=r"context length is 300 tokens: the prompt has more than \d+, and"):  # fmt: skip
        inputs.tokenize(Prompt(text[:12_000]))
    inputs.max_text_bytes = 10_000
    with pytest.raises(ValidationError, match="the limit is 10000"):
        inputs.tokenize(Prompt(text), TokenizeOptions(fits_model=False))
    with pytest.raises(ValidationError, match="context length is 300"):  # no limit of its own
        inputs.tokenize(Prompt(text[:9000]), TokenizeOptions(truncate=10**9))
    with pytest.raises(ValidationError, match="the limit is 40000"):
        inputs.tokenize(Prompt(text * 2), TokenizeOptions(truncate=10))
