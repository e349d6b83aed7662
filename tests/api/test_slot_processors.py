"""Logits processors of vLLM's second interface: state by slot, tokens read where the worker keeps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ValidationError
from quire.worker.sampling.vllm_slot_processors import (
    LogitsContext,
    LogitsProcRequestState,
    SlotLogitsProcessor,
)


class NoRepeat(SlotLogitsProcessor):
    """Excludes the tokens of the output so far, in requests that ask for it."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState):
        self.states = req_states

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if "odd" in (sampling_params.extra_args or {}):
            raise ValueError("odd is not a parameter of NoRepeat")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return bool((sampling_params.extra_args or {}).get("no_repeat"))

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        assert logits.shape == (len(ctx.idx_mapping_np), self.states.vocab_size)
        for at, (slot, length) in enumerate(
            zip(ctx.idx_mapping_np, ctx.seq_lens_upper_bound_np, strict=True)
        ):
            assert self.states.total_len.np[slot] == length == ctx.pos[at] + 1
            tokens = self.states.all_token_ids.gpu[int(slot), :length]
            assert tokens[-1] == ctx.input_ids[at]
            logits[at, tokens[int(self.states.prompt_len.np[slot]) :].long()] = -torch.inf
        return logits


class Fails(NoRepeat):
    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState):
        raise ValueError("not with this engine")


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def tokens(llm: LLM, *wanted: bool) -> list[list[int]]:
    params = [SamplingParams(extra_args={"no_repeat": True} if on else None, **GREEDY) for on in wanted]  # fmt: skip
    outputs = llm.generate(["The end. The end. The"] * len(wanted), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with LLM("quire-tiny", max_model_len=128) as llm:
        return tokens(llm, False)[0]


@pytest.mark.parametrize("more", [
    {}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    {"num_gpu_blocks_override": 5, "block_size": 16, "max_model_len": 64},
], ids=["plain", "drafts", "preempted"])  # fmt: skip
def test_it_changes_the_requests_that_ask_for_it(plain, more):
    with LLM("quire-tiny", logits_processors=[NoRepeat], **{"max_model_len": 128, **more}) as llm:
        (alone,) = tokens(llm, True)
        assert len(set(alone)) == len(alone) == 24
        assert len(set(plain)) < 24
        assert tokens(llm, False, True, True, False) == [plain, alone, alone, plain]
        if "block_size" in more:
            assert llm.client.stats(fresh=True).preemptions > 0


def test_its_errors_name_it():
    params = SamplingParams(extra_args={"odd": 1})
    with (
        LLM("quire-tiny", max_model_len=64, logits_processors=[NoRepeat]) as llm,
        pytest.raises(ValidationError, match="NoRepeat: odd is not a parameter"),
    ):
        llm.generate(["a"], params, use_tqdm=False)
    with pytest.raises(ConfigError, match="Fails cannot be constructed: ValueError: not with this engine"):  # fmt: skip
        LLM("quire-tiny", max_model_len=64, logits_processors=[Fails])
