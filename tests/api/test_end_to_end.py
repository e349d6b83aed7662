"""From text to text through the whole engine, on a tiny random checkpoint, against Transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import torch
import transformers

from quire.api.async_llm import AsyncLLM
from quire.api.llm import LLM
from quire.config.engine_args import AsyncEngineArgs
from quire.errors import Unsupported
from quire.protocol.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

VOCAB = small_tokenizers.byte_level().get_vocab_size()
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 16 << 20,
}
PROMPTS = ["the cat and the", "é🎉", "x"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers whose logits have a range, so that the best token is the best by far."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=VOCAB - 2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    model.save_pretrained(folder)
    small_tokenizers.save_byte_level(folder)
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **SETTINGS) as one:
        yield one


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def plain(theirs: Any, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        out = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]


def logprobs(theirs: Any, tokens: list[int]) -> torch.Tensor:
    """Of each next token, after all of them; shape [tokens, vocabulary]."""
    with torch.inference_mode():
        return torch.log_softmax(theirs(torch.tensor([tokens])).logits[0].double(), -1)


def test_greedy_text_equals_transformers(llm: LLM, theirs: Any):
    tokenizer = llm.get_tokenizer()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = plain(theirs, tokenizer.encode(prompt), 20)
        (one,) = output.outputs
        assert one.token_ids == expected
        ended = expected[-1] == tokenizer.eos_token_id
        assert one.finish_reason == ("stop" if ended else "length")


def test_logprobs_equal_transformers(llm: LLM, theirs: Any):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate("the cat", params, use_tqdm=False)
    (one,) = output.outputs
    tokens = [*output.prompt_token_ids, *one.token_ids]
    expected = logprobs(theirs, tokens)
    found = [*output.prompt_logprobs, *one.logprobs]
    for position in range(1, len(tokens)):
        row = expected[position - 1]
        for token, entry in found[position].items():
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert entry.rank == 1 + int((row > row[token]).sum())
    assert one.cumulative_logprob == pytest.approx(
        sum(float(expected[-6 + at][token]) for at, token in enumerate(one.token_ids)), abs=1e-3
    )


def test_beam_search_is_that_of_the_plain_algorithm(llm: LLM, theirs: Any):
    prompt = llm.get_tokenizer().encode("the")
    beams = [(prompt, 0.0)]
    for _ in range(4):
        nexts = []
        for tokens, total in beams:
            row = logprobs(theirs, tokens)[-1]
            nexts += [([*tokens, t], total + float(row[t])) for t in row.topk(6).indices.tolist()]
        beams = sorted(nexts, key=lambda item: -item[1])[:3]
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    (output,) = llm.beam_search("the", params)
    assert [one.tokens for one in output.sequences] == [tokens for tokens, _ in beams]
    for one, (_, total) in zip(output.sequences, beams, strict=True):
        assert one.cum_logprob == pytest.approx(total, abs=1e-3)


def test_a_chat_is_a_prompt(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "user", "content": "hi"}]
    (chat,) = llm.chat(messages, params, use_tqdm=False)
    text = llm.get_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    (same,) = llm.generate(text, params, use_tqdm=False)
    assert chat.outputs[0].token_ids == same.outputs[0].token_ids


def test_a_seed_gives_the_same_text_alone_and_batched(llm: LLM):
    params = SamplingParams(seed=11, max_tokens=12)
    (alone,) = llm.generate("the", params, use_tqdm=False)
    crowd = llm.generate([*PROMPTS, "the", *PROMPTS], params, use_tqdm=False)
    assert crowd[3].outputs[0].token_ids == alone.outputs[0].token_ids
    several = SamplingParams(seed=11, max_tokens=12, n=3)
    (output,) = llm.generate("the", several, use_tqdm=False)
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3


def test_calls_reach_the_model(llm: LLM, theirs: Any):
    (count,) = llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))
    assert count == sum(p.numel() for p in theirs.parameters())
    assert llm.collective_rpc("num_parameters") == [count]
    (found,) = llm.collective_rpc("get_model")
    inside = llm.collective_rpc(
        lambda worker, name: (worker.get_model() is worker.model_runner.model, worker.rank, worker.device.type, name),
        args=("x",),
    )  # fmt: skip
    assert inside == [(True, 0, "cpu", "x")]
    seen: list[int] = []
    llm.collective_rpc(
        lambda worker: worker.get_model().register_forward_hook(lambda *_: seen.append(1)) and None
    )
    llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
    assert seen
    llm.collective_rpc(lambda worker: worker.get_model()._forward_hooks.clear())
    assert sum(p.numel() for p in found.parameters()) == count
    llm.generate("the cat " * 20, SamplingParams(max_tokens=1), use_tqdm=False)
    (again,) = llm.generate("the cat " * 20, SamplingParams(max_tokens=1), use_tqdm=False)
    assert again.num_cached_tokens
    assert llm.reset_prefix_cache() is True


def test_streams_from_an_engine_in_its_own_process(llm: LLM, checkpoint: Path):
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    texts = [out.outputs[0].text for out in llm.generate(PROMPTS, params, use_tqdm=False)]
    other = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(checkpoint), **SETTINGS))

    async def one(number: int) -> str:
        delta = SamplingParams(
            temperature=0, max_tokens=10, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        stream = other.generate(PROMPTS[number], delta, f"r{number}")
        return "".join([output.outputs[0].text async for output in stream])

    async def main() -> list[str]:
        found = await asyncio.gather(*map(one, range(len(PROMPTS))))
        stream = other.generate("x", SamplingParams(max_tokens=100, ignore_eos=True), "long")
        await anext(stream)
        await stream.aclose()
        await other.check_health()
        assert await other.collective_rpc("num_parameters") == llm.collective_rpc("num_parameters")
        with pytest.raises(Unsupported, match="worker in another process"):
            await other.collective_rpc(lambda worker: worker)
        assert (await other.get_vllm_config()).model_config.max_model_len == SETTINGS[
            "max_model_len"
        ]
        return found

    try:
        assert asyncio.run(asyncio.wait_for(main(), 60)) == texts
    finally:
        other.shutdown()
