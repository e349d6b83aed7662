"""Models with recurrent layers against Transformers, and against themselves, however their prompts are cut.

Transformers computes each prompt in one pass: some of its models are wrong when they continue one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.models.cases import Case, write
from tests.models.harness import Runner
from tests.models.recurrent_cases import CASES
from tests.models.test_native import CLOSE, build, in_pieces, plain, texts

LENGTHS = (37, 1, 2, 3)  # some are shorter than a convolution


def share_transformers(theirs: Any) -> None:
    """Zamba2's later uses of a transformer have the weights of its first use; a new model's do not have them yet."""
    if theirs.config.model_type != "zamba2":
        return
    layers = [layer for layer in theirs.model.layers if hasattr(layer, "shared_transformer")]
    for use, layer in enumerate(layers):
        first = layers[use % theirs.config.num_mem_blocks]
        layer.shared_transformer = first.shared_transformer


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name.replace(" ", "-")) for c in CASES])
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    theirs, prompts = write(case, tmp_path), texts(lengths=LENGTHS)
    share_transformers(theirs)
    ours = build(tmp_path, model_impl="quire")
    wanted = [plain(theirs, text) for text in prompts]
    assert wanted[0].std() > 0.1, "logits without a range prove nothing"
    whole = [Runner(ours).prefill(0, text) for text in prompts]
    for got, want in zip(whole, wanted, strict=True):
        assert (got - want).abs().max() < CLOSE * max(1.0, float(want.abs().max()))
    for most in (2, 13):
        pieces = in_pieces(Runner(ours, num_tokens=512, seed=most), prompts, seed=most, most=most)
        for got, alone in zip(pieces, whole, strict=True):
            assert torch.equal(got, alone)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "rwkv", "recurrent gemma"])
def test_the_engine_generates_as_transformers(name: str, tmp_path: Path) -> None:
    """Prompts side by side, with fewer rows than prompts and chunks of few tokens."""
    theirs = write(next(case for case in CASES if case.name == name), tmp_path)
    prompts, count = texts(lengths=(37, 2, 5, 21)), 6
    wanted = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(plain(theirs, tokens)[-1].argmax()))
        wanted.append(tokens[len(prompt) :])
    how = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "dtype": "float32"}
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, **how)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [list(each.outputs[0].token_ids) for each in found] == wanted


@pytest.mark.parametrize("name", ["qwen3_5 tiled", "granite 4 h", "lfm2"])
def test_in_bf16_the_engine_equals_itself(name: str, tmp_path: Path) -> None:
    """The same log-probabilities alone and whole, and beside others in chunks of few tokens, and after a hit of
    the prefix cache. (For sizes with kernels: plain torch multiplies other numbers of rows with other bits.)"""
    write(next(case for case in CASES if case.name == name), tmp_path)
    prompts = [{"prompt_token_ids": prompt} for prompt in texts(lengths=(37, 2, 5, 21))]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=2)

    def started(**how: Any) -> LLM:
        how = {"skip_tokenizer_init": True, "max_model_len": 64, "dtype": "bfloat16", **how}
        return LLM(str(tmp_path), **how)

    def run(llm: LLM) -> tuple[list[Any], int]:
        found = llm.generate(prompts, params)
        values = [[*each.outputs[0].token_ids, *each.outputs[0].logprobs] for each in found]
        return values, sum(each.num_cached_tokens or 0 for each in found)

    alone, _ = run(started(max_num_seqs=1, enable_prefix_caching=False))
    caching = started(max_num_seqs=3, max_num_batched_tokens=8, block_size=32, mamba_block_size=32)
    assert run(caching) == (alone, 0)
    again, cached = run(caching)
    assert cached > 0, "no state at the end of a block was found"
    assert again == alone
    if name == "qwen3_5 tiled":  # without log-probabilities, one call computes a step
        client: Any = caching.client
        worker = client.core.executor.worker
        assert worker.fast_step.model is not None
        steps: list[Any] = []
        worker.fast_step.run = lambda plan, run=worker.fast_step.run: (
            steps.append(plan),
            run(plan),
        )[1]
        plain = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        found = caching.generate(prompts, plain)
        assert steps
        assert [each.outputs[0].token_ids for each in found] == [each[:5] for each in alone]
