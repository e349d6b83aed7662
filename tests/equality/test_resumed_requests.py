"""A request that goes on in another engine after any of its tokens gets the tokens and log-probabilities of an undisturbed run,
where the worker says that bits do not depend on the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Engine, engine, make_checkpoint, prompts

from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

COUNT = 40
WISHES = [
    SamplingParams(temperature=0.0, logprobs=2, max_tokens=COUNT, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=5, top_p=0.9, logprobs=0, max_tokens=COUNT, ignore_eos=True),
    SamplingParams(seed=6, presence_penalty=0.7, repetition_penalty=1.3, logprobs=2, max_tokens=COUNT, ignore_eos=True),
    SamplingParams(seed=7, min_tokens=20, stop_token_ids=list(range(40)), max_tokens=COUNT, eos_token_ids=[2]),
]  # fmt: skip
Answer = list[tuple[list[int], list[list[float]], str | None]]


def collected(one: Engine, requests: list[EngineRequest]) -> Answer:
    """Tokens, log-probabilities and finish reason of each."""
    for request in requests:
        one.client.submit(request)
    got: dict[str, Any] = {request.id: ([], [], None) for request in requests}
    while not all(finish for _, _, finish in got.values()):
        for output in one.client.outputs():
            tokens, values, _ = got[output.id]
            assert output.finish != "error", output.error
            values += [] if output.logprobs is None else output.logprobs.values
            got[output.id] = tokens + output.tokens, values, output.finish
    return [got[request.id] for request in requests]


def asked(number: int, prompt: list[int]) -> EngineRequest:
    return EngineRequest(f"r{number}", prompt, WISHES[number % len(WISHES)])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {}),
        ("mistral", {"max_num_batched_tokens": 23}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "bfloat16", "quantization": "int8"}),
    ],
    ids=str,
)
def test_a_request_goes_on_after_any_token(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:  # fmt: skip
    path = make_checkpoint(kind, tmp_path, intermediate_size=128, head_dim=32)
    given = prompts(8)
    with engine(path, **settings) as one:
        assert one.client.ready.batch_invariant
        whole = collected(one, [asked(number, prompt) for number, prompt in enumerate(given)])
    with engine(path, **settings) as other:
        for cut in (0, 1, 16, COUNT - 1):
            again, wanted = [], []
            for number, prompt in enumerate(given):
                tokens, values, finish = whole[number]
                if cut >= len(tokens):
                    continue
                request = asked(number, [*prompt, *tokens[:cut]])
                request.num_prompt, request.trial_length = len(prompt), len(prompt) + cut + 1
                again.append(request)
                wanted.append((tokens[cut:], values[cut:], finish))
            assert collected(other, again) == wanted, f"after {cut} tokens"
        assert other.stats()["counts"]["requests_resumed"] > 20


def test_where_bits_may_differ_nothing_is_promised(tmp_path: Path) -> None:
    path = make_checkpoint("cwm", tmp_path)  # through Transformers
    with engine(path, dtype="bfloat16") as one:
        assert not one.client.ready.batch_invariant
