"""Logits processors of programs for vLLM: they act, and an error of theirs leaves LLM.generate as an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from torch import Tensor

from quire.api.llm import LLM
from quire.errors import ProcessorFailed, ValidationError
from quire.protocol.sampling_params import SamplingParams
from quire.worker.sampling.vllm_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
    process_dict_updates,
)


def target(params: SamplingParams) -> Any:
    return (params.extra_args or {}).get("target")


class ForBatches(LogitsProcessor):
    """Forces the token `target`; fails where it is "raise"."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool):
        self.targets: dict[int, Any] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (
            not isinstance(target(sampling_params), int | None)
            and target(sampling_params) != "raise"
        ):
            raise ValueError(f"target value {target(sampling_params)} is not int")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.targets, batch_update, lambda params, prompt, output: target(params)
        )

    def apply(self, logits: Tensor) -> Tensor:
        for index, token in self.targets.items():
            force(logits[index], token)
        return logits


class ForRequests(AdapterLogitsProcessor):
    """The same, as a function of each request."""

    validate_params = ForBatches.validate_params

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        token = target(params)
        return None if token is None else lambda output_ids, logits: force(logits, token)


def force(logits: Tensor, token: Any) -> Tensor:
    if token == "raise":
        raise RuntimeError("told to")
    kept = logits[token].clone()
    logits.fill_(float("-inf"))
    logits[token] = kept
    return logits


@pytest.fixture(scope="module", params=[ForBatches, ForRequests])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    settings: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 8 << 20,
    }
    with LLM("quire-tiny", logits_processors=[request.param], **settings) as one:
        yield one


def params(token: Any = None) -> SamplingParams:
    extra = None if token is None else {"target": token}
    return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=extra)


def test_a_processor_changes_only_its_own_requests(llm: LLM):
    free, forced, other = llm.generate(
        ["Once"] * 3, [params(), params(300), params(301)], use_tqdm=False
    )
    assert forced.outputs[0].token_ids == [300] * 4
    assert other.outputs[0].token_ids == [301] * 4
    assert free.outputs[0].token_ids == llm.generate("Once", params(), use_tqdm=False)[0].outputs[0].token_ids  # fmt: skip


@pytest.mark.parametrize("call", [
    lambda llm, given: llm.generate(["Once"] * 2, given, use_tqdm=False),
    lambda llm, given: llm.wait_for_completion(llm.enqueue(["Once"] * 2, given), use_tqdm=False),
])  # fmt: skip
def test_its_errors_are_exceptions(llm: LLM, call: Callable[[LLM, Any], Any]):
    with pytest.raises(ValidationError, match="target value a is not int"):
        call(llm, [params(), params("a")])
    with pytest.raises(ProcessorFailed, match=r"For\w+ failed; the log has the exception"):
        call(llm, [params("raise"), params()])
    with suppress(ProcessorFailed):  # an exception of a processor of batches fails the whole batch
        llm.wait_for_completion(use_tqdm=False)
    (after,) = llm.generate("Once", params(300), use_tqdm=False)
    assert after.outputs[0].token_ids == [300] * 4
