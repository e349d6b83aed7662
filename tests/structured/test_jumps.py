"""Forced tokens: the engine appends them without a step each, and the output is the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

from engines import Engine, engine

from quire.features.structured.masks import may_jump
from quire.frontend.request_manager import RequestManager
from quire.protocol.output import EngineOutput
from quire.protocol.sampling_params import RequestOutputKind, SamplingParams
from quire.protocol.structured_outputs import StructuredOutputsParams as Form

FIELDS = {
    "first_name": {"type": "string", "maxLength": 8},
    "unhappiness": {"type": "integer", "minimum": 0, "maximum": 999},
    "colour": {"enum": ["red", "green"]},
}
PERSON = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
FORMS = {
    "json": Form(json=PERSON, disable_any_whitespace=True),
    "spaced json": Form(json=PERSON),
    "regex": Form(regex="[0-9]{2}-hello-world-[a-z]{2}-and so good bye"),
    "choice": Form(choice=["the wind in the willows", "the wide ocean"]),
    "tag": Form(structural_tag={"type": "structural_tag", "format": {
        "type": "tag", "begin": "<answer>", "end": "</answer>",
        "content": {"type": "json_schema", "json_schema": PERSON}}}),
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "run ahead": {"async_scheduling": True},
    "run ahead of a process": {"async_scheduling": True, "distributed_executor_backend": "mp"},
    "depth 3, chunks of 2": {"depth": 3, "long_prefill_token_threshold": 2},
    "few blocks": {"num_gpu_blocks_override": 10, "block_size": 16, "max_model_len": 128},
}
PROMPT = "Once upon a time"


def ask(form: Form | None, seed: int, **more: Any) -> SamplingParams:
    settings = {"max_tokens": 60, "temperature": 1.0 if seed else 0.0, "seed": seed, **more}
    return SamplingParams(structured_outputs=form, **settings)


def tiny(jumps: bool = True, **settings: Any) -> Any:
    config = {"structured_outputs_config": {"jumps": jumps}}
    return engine("quire-tiny", max_num_seqs=16, **config, **settings)


def outputs(one: Engine, asked: list[SamplingParams]) -> list[list[EngineOutput]]:
    front = RequestManager(one.client)
    children = [front.accept(PROMPT, each, id="x").children[0] for each in asked]
    return one.run([c.tokens for c in children], [c.params for c in children])


def tokens(one: Engine, asked: list[SamplingParams]) -> list[list[int]]:
    return [[t for o in outs for t in o.tokens] for outs in outputs(one, asked)]


def crowd() -> list[SamplingParams]:
    """Each form at two seeds, two with limits, and two that are free."""
    held = [ask(form, seed) for form in FORMS.values() for seed in (0, 3)]
    odd = [ask(FORMS["json"], 4, min_tokens=50), ask(FORMS["regex"], 5, ignore_eos=True)]
    free = [ask(None, 6, max_tokens=25), ask(None, 0, max_tokens=25)]
    return [*free, *held, *odd]


@pytest.fixture(scope="module")
def drawn() -> list[list[int]]:
    """The crowd without jumps."""
    with tiny(jumps=False) as one:
        return tokens(one, crowd())


@pytest.fixture(scope="module")
def jumping() -> Iterator[Engine]:
    with tiny() as one:
        yield one


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_forced_tokens_change_no_output(setting: str, drawn: list[list[int]]):
    with tiny(**SETTINGS[setting]) as one:
        assert tokens(one, crowd()) == drawn
        if setting == "few blocks":
            assert one.stats()["preemptions"] > 0


def test_forced_tokens_cost_no_step(jumping: Engine):
    (said,) = outputs(jumping, [ask(FORMS["regex"], 0)])
    assert len(said) <= 6  # two digits, two letters and an end, if each comes alone
    assert sum(len(output.tokens) for output in said) > 15


def test_max_tokens_may_end_within_forced_tokens(jumping: Engine):
    limits = [1, 5, 9, 13]
    asked = [ask(FORMS["tag"], 3), *(ask(FORMS["tag"], 3, max_tokens=most) for most in limits)]
    whole, *cut = tokens(jumping, asked)
    assert cut == [whole[:most] for most in limits]


def test_stop_strings_and_streams(jumping: Engine):
    """A stop string within a jump: nothing after it is shown, as if tokens came one by one."""
    front = RequestManager(jumping.client)
    found = []
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        params = ask(FORMS["regex"], 3, stop=["world"], output_kind=kind)
        collector = front.submit(front.accept(PROMPT, params, id=kind.name))
        text, ids = "", []
        while not collector.finished:
            for ended in front.process_outputs(jumping.client.outputs()):
                if (taken := ended.take()) is not None:
                    text += taken.outputs[0].text
                    ids += taken.outputs[0].token_ids
                    reason = taken.outputs[0].stop_reason
        found.append((text, ids, reason))
        front.process_outputs(jumping.client.outputs())  # the engine's own word that it has ended
    assert found[0] == found[1]
    assert found[0][0].endswith("-hello-")
    assert found[0][2] == "world"


def test_forced_tokens_are_not_used_with_conflicting_parameters(jumping: Engine):
    """Not where forced tokens are reported, nor where another rule may bar one."""
    assert may_jump(SamplingParams(min_tokens=3, logit_bias={5: -100.0}, presence_penalty=2.0))
    for barred in (
        {"logprobs": 0},
        {"logprob_token_ids": [5]},
        {"allowed_token_ids": [5]},
        {"bad_word_ids": [[5]]},
        {"min_tokens": 2, "stop_token_ids": [5]},
    ):
        assert not may_jump(SamplingParams(**barred))
    (said,) = outputs(jumping, [ask(FORMS["json"], 3, logprobs=1)])
    (fast,) = outputs(jumping, [ask(FORMS["json"], 3)])
    assert all(len(o.tokens) == 1 and o.logprobs is not None for o in said)
    assert [t for o in said for t in o.tokens] == [t for o in fast for t in o.tokens]
