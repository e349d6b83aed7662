"""The table of sampling parameters: what each takes, what it refuses, and that the error names it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.errors import Unsupported, ValidationError
from quire.protocol.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

NAN, INF = float("nan"), float("inf")
TAKEN: dict[str, list[Any]] = {
    "n": [1, 2, 128],
    "presence_penalty": [-2, 0, 2, np.float32(0.5)],
    "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty": [0.01, 1, 50],
    "temperature": [0.5, 1, 2],
    "top_p": [0.001, 1],
    "top_k": [0, 1, 100_000, np.int64(3)],
    "min_p": [0, 1],
    "seed": [0, 1, (1 << 63) - 1, -2],
    "max_tokens": [1, None, 5.0],
    "min_tokens": [0, 16],
    "logprobs": [None, 0, 1, -1],
    "prompt_logprobs": [0, -1],
    "output_kind": list(RequestOutputKind),
    "stream_interval": [1, 7, None],
    "truncate_prompt_tokens": [1, -1],
    "best_of": [1, 5],
    "allowed_token_ids": [[0], [3, 4]],
    "logprob_token_ids": [[0], list(range(128))],
    "extra_args": [{}, {"a": [1]}],
}
REFUSED: dict[str, list[Any]] = {
    "n": [0, -1, 129, 1.5, "2", True, None],
    "presence_penalty": [-2.1, 2.1, NAN, "0"],
    "frequency_penalty": [-3, INF, None],
    "repetition_penalty": [0, -1, NAN, INF],
    "temperature": [-0.1, 2.1, NAN, INF, "hot", True],
    "top_p": [0, 1.01, -1, NAN],
    "top_k": [-2, 1.5, "5"],
    "min_p": [-0.01, 1.01, NAN],
    "seed": [1 << 63, "x", 0.5],
    "max_tokens": [0, -1, 1.5, "16"],
    "min_tokens": [-1, 17],
    "logprobs": [-2, 1.5, "all"],
    "prompt_logprobs": [-2],
    "output_kind": [3, "delta"],
    "stream_interval": [0],
    "truncate_prompt_tokens": [0, -2],
    "best_of": [0, 129],
    "stop": ["", ["a", ""], [1], 5, b"x"],
    "stop_token_ids": [[-1], ["a"], 5, [1.5]],
    "bad_words": ["", [""], [3]],
    "allowed_token_ids": [[], [-1], 3],
    "logprob_token_ids": [list(range(129)), [-1]],
    "logit_bias": [{"a": 1}, {1: "x"}, {1: NAN}, [1], {-1: 1}],
    "extra_args": [[], {1: 2}],
    "ignore_eos": [1, "yes", None],
    "detokenize": ["no"],
    "skip_special_tokens": [0],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in TAKEN.items() for v in vs])
def test_valid_parameters_are_accepted(name: str, value: Any):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in REFUSED.items() for v in vs])
def test_invalid_parameters_are_refused(name: str, value: Any):
    with pytest.raises(ValidationError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ("x", "y")}, {"stop": ["x", "y"]}),
        ({"stop": None}, {"stop": []}),
        ({"stop_token_ids": [3, 1, 3]}, {"stop_token_ids": [3, 1]}),
        ({"stop_token_ids": None}, {"stop_token_ids": []}),
        ({"bad_words": None}, {"bad_words": []}),
        ({"logprobs": True}, {"logprobs": 1}),
        ({"logprobs": False}, {"logprobs": None}),
        ({"logit_bias": {"3": 1000, 4: -1000.0}}, {"logit_bias": {3: 100.0, 4: -100.0}}),
        (
            {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
            {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0},
        ),
        ({"temperature": 1e-6}, {"temperature": 0}),
    ],
)
def test_alternative_spellings_are_accepted(given: dict[str, Any], kept: dict[str, Any]):
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in kept} == kept


def test_a_very_low_temperature_is_raised_with_a_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=0.005).temperature == 0.01
    assert "raised to 0.01" in caplog.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
        ({"best_of": 2, "temperature": 0}, "best_of must be 1 with temperature 0"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 must not exceed max_tokens=4"),
        ({"stop": "x", "detokenize": False}, "use stop_token_ids"),
    ],
)
def test_conflicting_parameters_are_refused(given: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        SamplingParams(**given)


@pytest.mark.parametrize("name", sorted(SamplingParams.REFUSED))
def test_later_features_are_refused_by_name(name: str):
    with pytest.raises(Unsupported, match=name):
        SamplingParams(**{name: {"x": 1}})


def test_the_limit_of_n_can_be_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "4")
    assert SamplingParams(n=4).n == 4
    with pytest.raises(ValidationError, match="QUIRE_MAX_N_SEQUENCES=4"):
        SamplingParams(n=5)


def test_rules_apply_to_encoded_parameters():
    sent = msgspec.msgpack.encode(SamplingParams(top_p=0.5, logit_bias={3: 1}, stop=["a"]))
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == SamplingParams(
        top_p=0.5, logit_bias={3: 1}, stop=["a"]
    )
    with pytest.raises((ValidationError, msgspec.ValidationError), match="top_p"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"top_p": 5}), type=SamplingParams)


def test_from_optional_and_clone():
    params = SamplingParams.from_optional(n=None, temperature=0.5, max_tokens=None, logit_bias=None)
    assert (params.n, params.temperature, params.max_tokens) == (1, 0.5, None)
    with pytest.raises(TypeError):
        SamplingParams.from_optional(nonsense=1)


@pytest.mark.parametrize(
    "given",
    [
        {"beam_width": 0, "max_tokens": 1},
        {"beam_width": 2, "max_tokens": 0},
        {"beam_width": 2, "max_tokens": 1, "temperature": -1},
        {"beam_width": 2, "max_tokens": 1, "length_penalty": NAN},
    ],
)
def test_beam_search_parameters_are_checked(given: dict[str, Any]):
    with pytest.raises(ValidationError):
        BeamSearchParams(**given)


def nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = {"a": [value]}
    return {"deep": value}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": 1 << 64}, "64 bits"),
        ({"a": [-(1 << 63) - 1]}, "64 bits"),
        ({"a": "x" * (1 << 16)}, "the limit is 65536"),
        ({"a": [[]] * (1 << 20)}, "the limit is 65536"),
        (nested(40), "64 levels"),
        (nested(100_000), "64 levels"),
    ],
)
def test_extra_args_that_cannot_be_sent_are_refused(value: Any, words: str):
    """(They were refused while being sent, and ended the server at the engine's next restart.)"""
    with pytest.raises(ValidationError, match=words) as caught:
        SamplingParams(extra_args=value)
    assert caught.value.parameter == "extra_args"
    assert len(str(caught.value)) < 200


def test_extra_args_within_the_limits_pass():
    for value in ({"a": "x" * 65_000}, nested(30), {"a": (1 << 64) - 1}, {"callback": len}):
        assert SamplingParams(extra_args=value).extra_args == value
