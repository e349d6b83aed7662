"""Text from tokens, however they come: the same as decoding them at once, never half a character."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import small_tokenizers

from quire.frontend.detokenize import Detokenizer, borders
from quire.frontend.tokenizer import Tokenizer, load

TEXTS = (
    "the cat and the hat", "é", "naïve café 👩‍👩‍👧‍👦!", "汉字 и кириллица", "a\n\n  b", "🎉🎉", "the🤷🏽‍♀️and",
    " leading", "the <tool> in", "",
)  # fmt: skip
KINDS = ("byte_level", "byte_fallback")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte_level": load(small_tokenizers.save_byte_level(folder / "bytes")),
        "byte_fallback": load(
            small_tokenizers.save(
                small_tokenizers.byte_fallback(), folder / "fallback", "<s>", "</s>"
            )
        ),
        "words": load(
            small_tokenizers.save(small_tokenizers.words(), folder / "words", None, "[SEP]")
        ),
    }


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """The text that a reader gets after every token; the last item comes with the end."""
    parts = []
    for token in ids:
        ended = detokenizer.add(token)
        parts.append(detokenizer.take(ended))
        if ended:
            return parts
    detokenizer.end()
    return [*parts, detokenizer.take(True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_restores_the_text(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    parts = stream(Detokenizer(tokenizer), ids)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_come_back(tokenizers: dict[str, Tokenizer], kind: str):
    tokenizer, draw = tokenizers[kind], random.Random(3)
    alphabet = "the and éß汉🎉👩‍👧 \n\u0301z"
    for _ in range(200):
        text = "x" + "".join(draw.choices(alphabet, k=draw.randint(1, 30)))
        ids = tokenizer.encode(text)
        cut = draw.randint(0, len(ids))
        context, rest = ids[:cut], ids[cut:]
        parts = stream(Detokenizer(tokenizer, context), rest)
        # The context may end inside a character: then the output completes it.
        known = b"".join(map(tokenizer.token_bytes, context)).decode(errors="ignore")
        assert known.removeprefix(" " if kind == "byte_fallback" else "") + "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


def test_random_tokens_decode_as_all_at_once(tokenizers: dict[str, Tokenizer]):
    """Tokens of no text at all, as a model at high temperature makes them."""
    tokenizer, draw = tokenizers["byte_level"], random.Random(4)
    for _ in range(300):
        ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 25))]
        raw = b"".join(tokenizer.raw_bytes(i) or b"" for i in ids if i not in tokenizer.special_ids)
        whole = raw.decode("utf-8", "replace")
        text = "".join(stream(Detokenizer(tokenizer), ids))
        # All but the beginning of a character at the very end, which no more tokens will complete.
        assert whole.startswith(text)
        assert set(whole[len(text) :]) <= {"\ufffd"}


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_bytes_do_not_delay_the_text(tokenizers: dict[str, Tokenizer], kind: str):
    tokenizer = tokenizers[kind]
    lone = tokenizer.token_id("<0xE2>" if kind == "byte_fallback" else "â")
    letter = tokenizer.encode("xa")[-1]
    parts = stream(Detokenizer(tokenizer, tokenizer.encode("x")), [lone] * 20 + [letter])
    assert "".join(parts).endswith("a")
    assert "\ufffd" in "".join(parts)


def test_words_keep_their_spaces_for_any_chunking(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["words"]
    ids = tokenizer.encode("the cats sat on the mat")
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "the cats sat on the mat"
    with_context = stream(Detokenizer(tokenizer, ids[:3]), ids[3:])
    assert "".join(with_context) == " sat on the mat"


def test_special_tokens_are_skipped_or_shown(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    ids = [*tokenizer.encode("the"), tokenizer.token_id("<|end|>"), *tokenizer.encode(" and")]
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "the and"
    shown = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(stream(shown, ids)) == "the<|end|> and"
    tool = tokenizer.encode("<tool>")
    assert "".join(stream(Detokenizer(tokenizer), tool)) == "<tool>"


# -- stop strings -----------------------------------------------------------------------------------


def plain_stop(text: str, stops: list[str], blind: int = 0) -> tuple[str, str | None]:
    """By the book: the first place where any stop string is complete, the longest of those there."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop) and end > blind]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_strings_are_found_at_every_chunking(tokenizers: dict[str, Tokenizer]):
    tokenizer, draw = tokenizers["byte_level"], random.Random(5)
    stopped = 0
    for _ in range(400):
        text = "".join(draw.choices("ab\n", k=draw.randint(0, 14)))
        stops = ["".join(draw.choices("ab\n", k=draw.randint(1, 4))) for _ in range(3)]
        ids = [tokenizer.encode(char)[0] for char in text]
        expected, by = plain_stop(text, stops)
        detokenizer = Detokenizer(tokenizer, stop=stops)
        parts = stream(detokenizer, ids)
        assert ("".join(parts), detokenizer.stopped_by) == (expected, by)
        stopped += by is not None
        # What was shown before the end is never taken back, and never more than is certain.
        shown = ""
        for part in parts[:-1]:
            shown += part
            assert expected.startswith(shown)
    assert 100 < stopped < 399


def test_a_stop_string_inside_a_token_of_several_characters(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    the = tokenizer.encode("the")
    assert len(the) == 1
    for include, text in ((False, "t"), (True, "th")):
        detokenizer = Detokenizer(tokenizer, stop=["h"], include_stop=include)
        assert detokenizer.add(the[0])
        assert detokenizer.take(True) == text
        assert detokenizer.stopped_by == "h"


def test_a_stop_string_that_begins_in_one_token_and_ends_in_another(
    tokenizers: dict[str, Tokenizer],
):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("the and")
    assert len(ids) == 2
    detokenizer = Detokenizer(tokenizer, stop=["e a"])
    assert not detokenizer.add(ids[0])
    assert detokenizer.take(False) == "th"  # the e may be a stop string's
    assert detokenizer.add(ids[1])
    assert detokenizer.take(True) == ""
    assert detokenizer.text == "th"


def test_stop_strings_do_not_count_before_min_tokens(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    ids = [tokenizer.encode(char)[0] for char in "abab"]
    detokenizer = Detokenizer(tokenizer, stop=["b"], min_tokens=3)
    assert "".join(stream(detokenizer, ids)) == "aba"


def test_incomplete_text_is_emitted_at_the_end(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    ids = [tokenizer.encode(char)[0] for char in "ab"]
    parts = stream(Detokenizer(tokenizer, stop=["bc"]), ids)
    assert parts == ["a", "", "b"]


def test_borders_are_the_longest_proper_ones():
    for word in ("a", "aa", "abab", "aabaaab", "abcabd"):
        for end, length in enumerate(borders(word), 1):
            own = [n for n in range(end) if word[:end].endswith(word[:n])]
            assert length == max(own)


def test_taking_is_in_order(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    settled = []
    for token in tokenizer.encode("the cat and é"):
        detokenizer.add(token)
        detokenizer.take(False)
        settled.append(detokenizer.settled)
    assert all(after.startswith(before) for before, after in pairwise(settled))
    assert settled[-1] == "the cat and é"


def test_a_saved_tokenizer_loads(tmp_path: Path):
    tokenizer = load(small_tokenizers.save_byte_level(tmp_path))
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.bos_token == "<|bos|>"
