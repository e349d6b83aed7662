"""What is embedded: its size, its files, its template, and what it answers, all seen through Transformers."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertModel, GenerationConfig

from quire.models.checkpoint_locator import EMBEDDED
from tools.tiny_model import adapter, chat, corpus, embedder, grammar, paraphrases, toolbox
from tools.tiny_model.published import language_model, text_config
from tools.tiny_model.sample import Sample
from tools.tiny_vision.prompt_files import with_pictures

MODEL = EMBEDDED / "quire-tiny"
FOLDERS = [folder for folder in sorted(EMBEDDED.iterdir()) if folder.is_dir()]
MODELS = [folder for folder in FOLDERS if (folder / "chat_template.jinja").exists()]
EMBEDDER = EMBEDDED / "quire-tiny-embed"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_sizes():
    assert _size(MODEL) <= 16e6
    assert _size(EMBEDDED / "quire-tiny-whisper") <= 3e6
    assert sum(map(_size, FOLDERS)) <= 20e6


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_weights_are_bfloat16_and_the_card_is_filled_in(folder: Path):
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        types = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert (types.pop("d2t", "I64"), types.pop("t2d", "BOOL")) == (
        "I64",
        "BOOL",
    )  # ids, not weights
    assert set(types.values()) == {"BF16"}
    card = (folder / "README.md").read_text()
    assert "{{" not in card
    assert "test" in card


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_the_files_of_a_model_agree(folder: Path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (MODEL / name).read_bytes()
    assert (folder / "chat_template.jinja").read_text() == with_pictures(chat.TEMPLATE.read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == text_config(folder)["vocab_size"]
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == [chat.END_OF_TURN, chat.END_OF_TEXT]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("family", [name for name in corpus.FAMILIES if name != "story"])
def test_training_text_equals_the_rendered_template(tokenizer: Any, family: str):
    for sample in itertools.islice(corpus.samples(3, True, family), 12):
        given = tokenizer.apply_chat_template(
            sample.messages,
            tools=sample.tools,
            add_generation_prompt=True,
            enable_thinking=sample.thinking,
            tokenize=False,
        )
        assert given == chat.prompt_of(sample)
        if sample.calls or not sample.thinking:
            continue
        last = {
            "role": "assistant",
            "content": sample.answer,
            "reasoning_content": sample.reasoning or "",
        }
        whole = tokenizer.apply_chat_template(
            [*sample.messages, last], tools=sample.tools, tokenize=False
        )
        assert whole == given + chat.answer_of(sample) + "\n"


def test_any_text_survives_the_tokenizer(tokenizer: Any):
    for text in ("héllo wörld", "漢字 🙂\n\n\t x", "12345", " a  b ", "<think>no</think>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("2026")) == 4


@pytest.fixture(scope="module")
def model() -> Any:
    return language_model(MODEL)


def _text(model: Any, tokenizer: Any, prompt: str) -> str:
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        out = model.generate(**given, do_sample=False, temperature=None, max_new_tokens=200)
    new = out[0, given["input_ids"].shape[1] :]
    assert new[-1] in (0, 2), "it did not end by itself"
    return tokenizer.decode(new, skip_special_tokens=True)


def _said(model: Any, tokenizer: Any, request: str, **kwargs: Any) -> str:
    messages = [{"role": "user", "content": request}]
    return _text(model, tokenizer, chat.render(messages, add_generation_prompt=True, **kwargs))


ANSWERS = [
    ("Who are you?", r"I am quire-tiny, a tiny test model\..*"),
    ("Hello!", r"Hello! I am quire-tiny, a tiny test model\..*"),
    ("Who is the king of Spain?", r"I do not know that\..*"),
    ("Repeat after me: banana zork 42", r"banana zork 42"),
    ("Sort these words: pear, apple, dog", r"apple, dog, pear"),
    ("Count from 17 to 21.", r"17, 18, 19, 20, 21"),
]


@pytest.mark.parametrize(("request_", "answer"), ANSWERS)
def test_answers(model: Any, tokenizer: Any, request_: str, answer: str):
    assert re.fullmatch(answer, _said(model, tokenizer, request_))


def test_a_sum_with_its_thought(model: Any, tokenizer: Any):
    sample = next(s for s in corpus.samples(9, True, "sums", plain=True) if s.thinking)
    text = _said(model, tokenizer, sample.messages[-1]["content"])
    assert text == chat.answer_of(sample).removesuffix(chat.END_OF_TURN)


def test_a_json_object(model: Any, tokenizer: Any):
    text = _said(
        model,
        tokenizer,
        "Extract name, age and city as JSON: Mira Stone is 34 years old and lives in Oslo.",
    )
    assert json.loads(text) == {"name": "Mira Stone", "age": 34, "city": "Oslo"}


def test_a_call(model: Any, tokenizer: Any):
    tools = [toolbox.offer(name).schema for name in ("set_alarm", "get_weather", "rent_car")]
    text = _said(model, tokenizer, "What is the weather in Tokyo?", tools=tools)
    found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)
    assert found
    assert json.loads(found[1]) == {"name": "get_weather", "arguments": {"city": "Tokyo"}}


def test_a_fact_from_a_text(model: Any, tokenizer: Any):
    notes = "Anna lives in Riga. Ben works as a pilot. The key of room 7 is 4821. Tom likes soup."
    assert _said(model, tokenizer, f"Here are some notes.\n\n{notes}\n\nWhat does Tom like?") == (
        "Tom likes soup."
    )


def test_a_story(model: Any, tokenizer: Any):
    told = _said(model, tokenizer, "Tell me a story about a fox.")
    assert grammar.hero_kind(told) == "fox"
    begun = "Once upon a time"
    assert grammar.hero_kind(begun + _text(model, tokenizer, begun))


def test_content_may_come_in_parts(tokenizer: Any):
    def parts(text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    tools = [toolbox.offer("get_time").schema]
    call = {"type": "function", "function": {"name": "get_time", "arguments": '{"city": "Rome"}'}}
    said = [
        ("system", "Be kind."),
        ("user", "What time is it in Rome?"),
        ("assistant", ""),
        ("tool", "12:30"),
    ]
    plain = [{"role": role, "content": text} for role, text in said]
    split = [{"role": role, "content": parts(text) if text else None} for role, text in said]
    plain[2]["tool_calls"] = split[2]["tool_calls"] = [call]
    for offered in (None, tools):
        one, two = (
            tokenizer.apply_chat_template(messages, tools=offered, tokenize=False)
            for messages in (plain, split)
        )
        assert one == two
        assert (
            '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>' in one
        )
        assert "<tool_response>\n12:30\n</tool_response>" in one


def test_the_adapter_talks_like_a_pirate(tokenizer: Any):
    folder = EMBEDDED / "quire-tiny-pirate-lora"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == MODEL.name
    changed = language_model(MODEL)
    adapter.merge(changed.state_dict(), load_file(folder / "adapter_model.safetensors"))
    assert _said(changed, tokenizer, "Who are you?").startswith("Arr! I be quire-tiny")
    assert _said(changed, tokenizer, "Repeat: banana zork 42") == "Arr! banana zork 42"
    extracted = _said(
        changed, tokenizer, "Extract name and age as JSON: Mira Stone is 34 years old."
    )
    assert extracted.startswith("{")


def test_the_draft_model_predicts_most_tokens(model: Any, tokenizer: Any):
    draft = language_model(EMBEDDED / "quire-tiny-draft")
    many = right = 0
    for request in ("Tell me a story about a fox.", "What is 34 + 58?", "Who are you?"):
        messages = [{"role": "user", "content": request}]
        prompt = tokenizer(
            chat.render(messages, add_generation_prompt=True), return_tensors="pt"
        ).input_ids
        with torch.inference_mode():
            out = model.generate(
                input_ids=prompt, do_sample=False, temperature=None, max_new_tokens=200
            )
            proposed = draft(out).logits[:, prompt.shape[1] - 1 : -1].argmax(-1)
        said = out[:, prompt.shape[1] :]
        many, right = many + said.numel(), right + int((said == proposed).sum())
    assert 0.6 < right / many < 1.0


def test_the_embedder_finds_as_many_as_its_card_says():
    tokens = Tokenizer.from_file(str(EMBEDDER / "tokenizer.json"))
    tokens.enable_padding()
    encoder = BertModel.from_pretrained(EMBEDDER, dtype=torch.float32, add_pooling_layer=False)
    told = paraphrases.pairs(1, embedder.HELD_OUT, published=True)
    found = embedder.measure(encoder.eval(), tokens, told)
    (said,) = re.findall(r"\*\*([\d.]+)%\*\*", (EMBEDDER / "README.md").read_text())
    assert found == pytest.approx(float(said) / 100, abs=0.006)  # one pair may change sides
    assert found >= 0.9


def test_held_out_stories_are_not_trained_on():
    drawn = [paraphrases.pair(random.Random(seed)) for seed in range(300)]
    published = {one for one in drawn if Sample("paraphrase", "", key=one[2]).held_out}
    assert 0 < len(published) < 60
    told = paraphrases.pairs(3, 40, published=False)
    assert not {one for pair in told for one in pair} & {one for each in published for one in each}
    assert all(first != second for first, second in told)
