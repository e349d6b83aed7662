"""quire-tiny's eyes: the sample of the package, held-out scenes by kind of question, and the tokens that Transformers writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from quire import LLM, SamplingParams
from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_vision.accuracy import LONGEST, held_out
from tools.tiny_vision.evaluate import examine
from tools.tiny_vision.questions import DESCRIBE, KINDS
from tools.tiny_vision.samples import ANSWER, SCENE, sample

MODEL = EMBEDDED / "quire-tiny"
SAMPLE = MODEL / "sample.png"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with LLM("quire-tiny", kv_cache_memory_bytes="32M", max_num_seqs=16) as made:
        yield made
    torch.set_num_threads(threads)


def asked(picture: Image.Image, text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    return [{"role": "user", "content": [*parts, {"type": "image_pil", "image_pil": picture}]}]


def said(llm: LLM, *chats: list[dict[str, Any]]) -> list[str]:
    sampling = SamplingParams(temperature=0, max_tokens=LONGEST)
    return [one.outputs[0].text for one in llm.chat(list(chats), sampling, use_tqdm=False)]  # type: ignore[arg-type]


def test_the_sample(llm: LLM):
    """A combination of things that was never trained on; a picture alone is asked what is in it."""
    assert SCENE.held_out
    assert SAMPLE.stat().st_size < 20_000
    with Image.open(SAMPLE) as picture:
        assert picture.convert("RGB").tobytes() == sample().convert("RGB").tobytes()
        assert set(said(llm, *(asked(picture, text) for text in DESCRIBE))) == {ANSWER}


def test_another_turn_about_the_same_picture(llm: LLM):
    chat = asked(sample(), "What number is shown?")
    (first,) = said(llm, chat)
    assert first == "The number is 42."
    later = [*chat, {"role": "assistant", "content": first}, {"role": "user", "content": "Where is the green triangle?"}]  # fmt: skip
    assert said(llm, later) == ["It is at the top left."]


@pytest.mark.parametrize("size", [(90, 90), (640, 480), (1200, 1500)])
def test_other_sizes_and_forms(llm: LLM, size: tuple[int, int]):
    assert said(llm, asked(sample().resize(size), "What is in this picture?")) == [ANSWER]


def test_scenes_that_were_not_trained_on(llm: LLM):
    """Its card has 500 scenes; these are 30."""
    found = examine(llm, held_out(30))
    assert sum(found.asked.values()) > 150
    assert sum(found.right.values()) >= 0.93 * sum(found.asked.values()), found.wrong


@pytest.mark.slow
def test_500_scenes_by_kind(llm: LLM):
    found = examine(llm, held_out(500))
    for kind in KINDS:
        assert found.asked[kind] > 150
        assert found.of(kind) >= 0.95, str(found)


def test_texts_are_answered_as_by_the_language_model_alone(llm: LLM):
    """The tower is no part of a step without pictures."""
    with LLM(
        "quire-tiny", kv_cache_memory_bytes="16M", max_num_seqs=4, language_model_only=True
    ) as alone:
        chats = [[{"role": "user", "content": text}] for text in ("What is 34 + 58?", "Tell me a story about a fox.")]  # fmt: skip
        assert said(llm, *chats) == said(alone, *chats)


def test_transformers_writes_the_same_tokens():
    """`LlavaProcessor` and `generate`, on the folder as it is, in float32."""
    processor: Any = AutoProcessor.from_pretrained(MODEL)
    model: Any = LlavaForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()
    cases = held_out(4, seed=3)
    with LLM("quire-tiny", dtype="float32", kv_cache_memory_bytes="16M", max_num_seqs=8) as llm:
        for case in cases:
            for question in case.questions:
                messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question.text}]}]  # fmt: skip
                text = processor.apply_chat_template(messages, add_generation_prompt=True)
                given = processor(images=case.picture, text=text, return_tensors="pt")
                with torch.inference_mode():
                    ids = model.generate(**given, do_sample=False, max_new_tokens=LONGEST)
                expected = processor.decode(ids[0, given.input_ids.shape[1] :], skip_special_tokens=True)  # fmt: skip
                assert said(llm, asked(case.picture, question.text)) == [expected]
