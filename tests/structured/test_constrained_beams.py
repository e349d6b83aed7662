"""Beam search with a constraint, against the plain algorithm over the model's own log-probabilities and a finite language."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from asgi import browser
from scripted import make_state

from quire import LLM, BeamSearchParams, SamplingParams
from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.errors import ValidationError
from quire.server.state import ServerState

WORDS = ["aye", "ay", "no", "not", "nor", "12", "13", "123"]
"""A matcher allows only the usual tokens of a text that is certain to follow, so no two letters are certain here."""
LANGUAGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "choice": ({"choice": WORDS}, WORDS),
    "regex": (
        {"regex": "[abc]{1,3}( x)?"},
        [
            "".join(letters) + end
            for count in (1, 2, 3)
            for letters in itertools.product("abc", repeat=count)
            for end in ("", " x")
        ],
    ),
    "json": (
        {"json": {"enum": ["a", "b", 12, 17]}},
        ['"a"', '"b"', "12", "17"],
    ),
}
PROMPTS = ["Is it so? ", "Once upon a time", "1 2 3 4 "]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "quire-tiny", dtype="float32", max_num_seqs=8, max_logprobs=-1, max_model_len=256
    ) as one:
        yield one


def all_logprobs(llm: LLM, sequences: list[tuple[int, ...]]) -> list[dict[int, float]]:
    """Of each next token of the vocabulary."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    prompts = [{"prompt_token_ids": list(tokens)} for tokens in sequences]
    found = [out.outputs[0].logprobs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
    return [{token: entry.logprob for token, entry in entries.items()} for entries in found]


def by_hand(
    llm: LLM, prompt: list[int], width: int, steps: int, language: list[str], penalty: float
) -> list[tuple[list[int], float, str]]:
    """Tokens, sum of log-probabilities and reason of the best `width` sequences, best first."""
    texts = {token: llm.get_tokenizer().decode([token]) for token in range(1536)}
    ends = llm.front.inputs.eos_token_ids
    beams: list[tuple[tuple[int, ...], str, float]] = [((), "", 0.0)]
    done: list[tuple[float, tuple[int, ...], float, str]] = []

    def score(total: float, length: int) -> float:
        return float(total / length**penalty)

    for _ in range(steps):
        values = all_logprobs(llm, [(*prompt, *tokens) for tokens, _, _ in beams])
        nexts = []
        for (tokens, text, total), row in zip(beams, values, strict=True):
            allowed = [
                token for token, more in texts.items()
                if more and token not in ends and any(word.startswith(text + more) for word in language)
            ]  # fmt: skip
            allowed += ends if text in language else []
            ended = False  # of several end tokens the likeliest counts
            for token in sorted(allowed, key=lambda token: -row[token])[: 2 * width]:
                if token in ends and ended:
                    continue
                if token in ends:
                    ended = True
                    value = score(total + row[token], len(prompt) + len(tokens))
                    done.append((value, tokens, total + row[token], "stop"))
                else:
                    nexts.append(((*tokens, token), text + texts[token], total + row[token]))
        beams = sorted(nexts, key=lambda beam: -beam[2])[:width]
        if not beams:
            break
    done += [
        (score(total, len(prompt) + len(tokens)), tokens, total, "length")
        for tokens, _, total in beams
    ]
    done.sort(key=lambda one: -one[0])
    return [(list(tokens), total, why) for _, tokens, total, why in done[:width]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("name", LANGUAGES)
def test_equals_the_plain_algorithm(llm: LLM, name: str, width: int) -> None:
    constraint, language = LANGUAGES[name]
    params = BeamSearchParams(
        beam_width=width, max_tokens=12, structured_outputs=constraint, length_penalty=0.5
    )
    found = llm.beam_search(PROMPTS, params)
    tokenizer = llm.get_tokenizer()
    for prompt, output in zip(PROMPTS, found, strict=True):
        ids = tokenizer.encode(prompt)
        wanted = by_hand(llm, ids, width, 12, language, 0.5)
        assert [one.tokens[len(ids) :] for one in output.sequences] == [one[0] for one in wanted]
        assert [one.finish_reason for one in output.sequences] == [one[2] for one in wanted]
        for one, (_, total, _) in zip(output.sequences, wanted, strict=True):
            assert one.cum_logprob == pytest.approx(total, abs=1e-4)
            text = tokenizer.decode(one.tokens[len(ids) :])
            assert one.finish_reason == "stop" or any(word.startswith(text) for word in language)


def test_a_beam_may_start_with_a_token_that_is_unlikely(llm: LLM) -> None:
    """The first tokens of the language are none of the 2 x width likeliest ones of the model."""
    ids = llm.get_tokenizer().encode("The quick brown")
    (row,) = all_logprobs(llm, [tuple(ids)])
    likeliest = sorted(row, key=lambda token: -row[token])
    rare = [llm.get_tokenizer().decode([token]) for token in likeliest[500:900]]
    words = [text for text in rare if text.isascii() and text.strip() == text and text.isalpha()][
        :3
    ]
    params = BeamSearchParams(beam_width=2, max_tokens=8, structured_outputs={"choice": words})
    (output,) = llm.beam_search(["The quick brown"], params)
    assert len({one.text for one in output.sequences}) == 2
    assert all(any(one.text.endswith(word) for word in words) for one in output.sequences)


def test_a_schema(llm: LLM) -> None:
    schema = {
        "type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
        "required": ["name", "old"], "additionalProperties": False,
    }  # fmt: skip
    params = BeamSearchParams(
        beam_width=4,
        max_tokens=60,
        structured_outputs={"json": schema, "disable_any_whitespace": True},
    )
    prompt = "A person: "
    (output,) = llm.beam_search([prompt], params)
    ended = [one for one in output.sequences if one.finish_reason == "stop"]
    assert ended
    for one in ended:
        assert set(json.loads(one.text.removeprefix(prompt))) == {"name", "old"}


def test_what_is_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="ignore_eos cannot be combined"):
        BeamSearchParams(
            beam_width=2, max_tokens=4, ignore_eos=True, structured_outputs={"regex": "a"}
        )
    with pytest.raises(ValidationError, match="structured_outputs"):
        BeamSearchParams(beam_width=2, max_tokens=4, structured_outputs="a+")  # type: ignore[arg-type]
    bad = BeamSearchParams(beam_width=2, max_tokens=4, structured_outputs={"regex": "(a"})
    with pytest.raises(ValidationError, match="regex"):
        llm.beam_search(["x"], bad)
    (fine,) = llm.beam_search(["x"], BeamSearchParams(beam_width=2, max_tokens=4))
    assert len(fine.sequences) == 2


# -- HTTP ------------------------------------------------------------------------------------------
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def state() -> Iterator[ServerState]:
    config = EngineConfig.from_keywords(
        model="quire-tiny",
        dtype="float32",
        max_num_seqs=8,
        kv_cache_memory_bytes=16 << 20,
        max_model_len=256,
    )
    made = make_state(None)
    made.attach(engine := AsyncEngine(make_client(config), config))
    yield made
    engine.shutdown()


def post(state: ServerState, path: str, body: dict[str, Any]) -> Any:
    async def main() -> Any:
        async with browser(state) as client:
            return await asyncio.wait_for(client.post(path, json=body), 60)

    return asyncio.run(main())


def test_completions_find_what_python_finds(llm: LLM, state: ServerState) -> None:
    more = {
        "use_beam_search": True,
        "n": 3,
        "max_tokens": 12,
        "temperature": 0,
        "length_penalty": 0.5,
    }
    for constraint in (
        {"structured_outputs": {"choice": WORDS}},
        {"guided_regex": "[abc]{1,3}( x)?"},
    ):
        form = constraint.get("structured_outputs") or {"regex": constraint["guided_regex"]}
        params = BeamSearchParams(
            beam_width=3, max_tokens=12, length_penalty=0.5, structured_outputs=form  # type: ignore[arg-type]
        )  # fmt: skip
        answer = post(state, TEXT, {"prompt": PROMPTS[0], **more, **constraint})
        assert answer.status_code == 200, answer.text
        (output,) = llm.beam_search([PROMPTS[0]], params)
        texts = [one.text.removeprefix(PROMPTS[0]) for one in output.sequences]
        assert [choice["text"] for choice in answer.json()["choices"]] == texts


def test_chats_have_the_format(state: ServerState) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 2, "max_tokens": 40,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", 1]}}},
    }  # fmt: skip
    answer = post(state, CHAT, body)
    assert answer.status_code == 200, answer.text
    said = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert sorted(map(str, map(json.loads, said))) == ["1", "a"]  # not twice, with two end tokens
    answer = post(state, CHAT, {**body, "ignore_eos": True})
    assert answer.status_code == 400
    answer = post(
        state, CHAT, {**body, "response_format": None, "structured_outputs": {"regex": "(a"}}
    )
    assert answer.status_code == 400
