"""A prompt of embeddings gives the tokens that its text gives, in bits, however the engine computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.frontend.prompt_embeddings import read_embeddings
from quire.ops.cpu.bindings import best
from quire.protocol.output import EngineOutput
from quire.protocol.request import EngineRequest
from tests.tiny_text import tiny_text

COUNT = 20


def lookup(path: str, dtype: torch.dtype = torch.float32) -> Any:
    """The embedding module of Transformers, as users have it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.get_input_embeddings().requires_grad_(False)


def run(
    one: Engine, asked: list[list[int]], table: Any, count: int = COUNT
) -> list[list[EngineOutput]]:
    """All outputs of the prompts: the odd ones as embeddings, the others as tokens, in one batch."""
    for number, prompt in enumerate(asked):
        tokens, media = prompt, []
        if number % 2:
            media = read_embeddings(table(torch.tensor(prompt))).media()
            tokens = [0] * len(prompt)
        one.client.submit(EngineRequest(str(number), tokens, greedy(count), media=media))
    got: dict[str, list[EngineOutput]] = {str(number): [] for number in range(len(asked))}
    while not all(outputs and outputs[-1].finish for outputs in got.values()):
        for output in one.client.outputs():
            assert output.finish != "error", output.error
            got[output.id].append(output)
    return list(got.values())


def tokens_of(outputs: list[list[EngineOutput]]) -> list[list[int]]:
    return [[token for one in each for token in one.tokens] for each in outputs]


def doubled(count: int, **more: Any) -> list[list[int]]:
    """Each prompt twice: as tokens and as embeddings."""
    return [prompt for prompt in prompts(count, **more) for _ in range(2)]


def check(path: str, depth: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Engine:
    asked = doubled(4)
    name = str(dtype).removeprefix("torch.")
    with engine(path, depth, dtype=name, **settings) as plain:
        wanted = plain.tokens(asked, greedy(COUNT))
    options = {
        "dtype": name,
        "enable_prompt_embeds": True,
        "max_num_batched_tokens": 40,
        **settings,
    }
    with engine(path, depth, **options) as one:
        assert tokens_of(run(one, asked, lookup(path, dtype))) == wanted
    return one


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_by_parts(depth: int, tmp_path: Path) -> None:
    check(make_checkpoint("llama", tmp_path), depth)


@pytest.mark.skipif(best() is None, reason="no native kernels run here")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_beside_the_fast_path(depth: int, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, intermediate_size=128)
    check(path, depth, torch.bfloat16)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["gemma3_text", "granite", "falcon_h1"])
def test_a_factor_of_embeddings_is_applied_once(kind: str, tmp_path: Path) -> None:
    """Transformers multiplies in the embedding module (Gemma), or after it (Granite, Falcon H1)."""
    factor = {} if kind == "gemma3_text" else {"embedding_multiplier": 3.5}
    check(make_checkpoint(kind, tmp_path, **factor), 2)


@pytest.mark.parametrize("kind", ["granite", "gpt2", "mamba"])
def test_through_transformers(kind: str, tmp_path: Path) -> None:
    factor = {"embedding_multiplier": 3.5} if kind == "granite" else {}
    path = make_checkpoint(kind, tmp_path, **factor)
    check(path, 2, model_impl="transformers")


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests(depth: int, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    tight = {"block_size": 16, "num_gpu_blocks_override": 14, "max_model_len": 128}
    asked = doubled(4)
    with engine(path, depth, **tight) as plain:
        wanted = plain.tokens(asked, greedy(COUNT))
    with engine(path, depth, enable_prompt_embeds=True, **tight) as one:
        assert tokens_of(run(one, asked, lookup(path))) == wanted
        assert one.stats()["preemptions"] > 0


def test_blocks_are_shared_only_by_equal_embeddings(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    table, start = lookup(path), prompts(1, seed=5, longest=60)[0] * 3
    start = start[:48]
    first, second = [*start, 7, 8, 9], [*start, 9, 8, 7, 6]
    other = [*(token % 200 + 5 for token in first)]  # as long, and placeholders have no other ids
    asked = [[5], first, [5], other, [5], second, [5], first]
    with engine(path, block_size=16) as plain:
        wanted = plain.tokens(asked, greedy(COUNT))
    with engine(path, enable_prompt_embeds=True, block_size=16, max_num_seqs=1) as one:
        outputs = run(one, asked, table)
    assert tokens_of(outputs) == wanted
    assert [outputs[number][-1].num_cached_tokens for number in (1, 3, 5, 7)] == [0, 0, 48, 48]


def test_draft_tokens(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    check(
        path,
        2,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    )


TEXTS = ["The quick brown fox", "Once upon a time there was", "1 2 3 4 5"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2)
TINY: dict[str, Any] = {
    "model": "quire-tiny",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
}
DRAFTS = {
    "draft_model": {
        "method": "draft_model",
        "model": "quire-tiny-draft",
        "num_speculative_tokens": 3,
    },
    "eagle3": {"method": "eagle3", "model": "quire-tiny-eagle3", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "model": "quire-tiny-mtp", "num_speculative_tokens": 2},
}


def embedded(llm: LLM) -> list[dict[str, Any]]:
    from safetensors.torch import load_file

    table_VD = load_file(tiny_text() / "model.safetensors")["model.embed_tokens.weight"]
    ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
    return [{"prompt_embeds": table_VD[torch.tensor(one)]} for one in ids]


def outcomes(llm: LLM, asked: Any) -> list[Any]:
    found = llm.generate(asked, GREEDY, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].logprobs) for o in found]


@pytest.fixture(scope="module")
def of_texts() -> list[Any]:
    with LLM(**TINY, dtype="bfloat16") as llm:
        return outcomes(llm, TEXTS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        *({"speculative_config": drafts} for drafts in DRAFTS.values()),
    ],
    ids=lambda layout: next(iter(layout), "one process"),
)
def test_python_prompts_in_every_layout(layout: dict[str, Any], of_texts: list[Any]) -> None:
    with LLM(**TINY, **layout, dtype="bfloat16", enable_prompt_embeds=True) as llm:
        asked = embedded(llm)
        assert outcomes(llm, asked) == of_texts
        mixture = [asked[0], TEXTS[1], asked[2]]
        assert outcomes(llm, mixture) == of_texts


@pytest.mark.slow
def test_after_sleep_and_with_n(of_texts: list[Any]) -> None:
    with LLM(**TINY, dtype="bfloat16", enable_prompt_embeds=True) as llm:
        asked = embedded(llm)
        llm.sleep(level=1)
        llm.wake_up()
        assert outcomes(llm, asked) == of_texts
        sampled = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=8)
        texts, embeds = (
            [
                [one.text for one in out.outputs]
                for out in llm.generate(prompts, sampled, use_tqdm=False)
            ]
            for prompts in (TEXTS, asked)
        )
        assert embeds == texts
        (out,) = llm.generate({**asked[0], "prompt": "shown"}, GREEDY, use_tqdm=False)
        assert out.prompt == "shown"
        assert out.prompt_token_ids == [0] * len(asked[0]["prompt_embeds"])


def test_what_cannot_be_computed_from_embeddings_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("gemma4_text", tmp_path)
    with pytest.raises(ConfigError, match="hidden_size_per_layer_input"):
        engine(path, enable_prompt_embeds=True).__enter__()
    with pytest.raises(ConfigError, match="enable_prompt_embeds: this model pools"):
        LLM("quire-tiny-embed", enable_prompt_embeds=True)


def test_huge_numbers_end_their_request_alone(of_texts: list[Any]) -> None:
    """The first rounds to infinity in bfloat16; the square of the second is not finite."""
    with LLM(**TINY, dtype="bfloat16", enable_prompt_embeds=True) as llm:
        huge = [{"prompt_embeds": np.full((20, 256), one, np.float32)} for one in (3.4e38, 3e38)]
        first, *others = llm.generate([huge[0], *TEXTS, huge[1]], GREEDY, use_tqdm=False)
        assert first.outputs[0].finish_reason == "error"
        assert [one.outputs[0].text for one in others[:3]] == [text for _, text, _ in of_texts]
        again = llm.generate(huge[0], GREEDY, use_tqdm=False)
        assert again[0].outputs[0].finish_reason == "error"
        assert outcomes(llm, TEXTS) == of_texts
