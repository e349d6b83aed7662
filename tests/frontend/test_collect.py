"""One request's outputs, however the engine cuts them: all kinds of output tell the same."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import small_tokenizers

from quire.errors import QueueFull, ValidationError
from quire.frontend.input_processor import InputProcessor
from quire.frontend.logprobs import FlatLogprobs
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import RequestOutput, error_of
from quire.frontend.tokenizer import Tokenizer, load
from quire.protocol.output import EngineOutput, Logprobs
from quire.protocol.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL = RequestOutputKind
NOW = 1e10  # later than any request of a test


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(small_tokenizers.save_byte_level(tmp_path_factory.mktemp("bytes")))


def collector(tokenizer: Tokenizer | None, prompt: Any = "the", **given: Any) -> OutputProcessor:
    inputs = InputProcessor(tokenizer, 200, 300)
    return OutputProcessor(inputs.accept(prompt, SamplingParams(**given), id="r"), tokenizer)


def logprobs(start: int, tokens: list[int]) -> Logprobs:
    """The chosen token's is -token / 10; token 7 would have been the likeliest, then 8."""
    return Logprobs(
        start,
        [[token, 7, 8] for token in tokens],
        [[-token / 10, -0.1, -0.2] for token in tokens],
        [token + 1 for token in tokens],
    )


def cut(tokens: list[int], draw: random.Random, **end: Any) -> list[EngineOutput]:
    """As an engine might send them."""
    outputs, at = [], 0
    while at < len(tokens):
        size = draw.randint(1, 4)
        part = tokens[at : at + size]
        outputs.append(EngineOutput("r", part, logprobs=logprobs(at + 1, part)))
        at += size
    for name, value in end.items():
        setattr(outputs[-1], name, value)
    return outputs


def feed(one: OutputProcessor, outputs: list[EngineOutput], index: int = 0) -> list[RequestOutput]:
    """All that a reader gets if it reads after each output."""
    told = []
    for output in outputs:
        one.add(index, output, NOW)
        if (new := one.take()) is not None:
            told.append(new)
        assert one.take() is None  # nothing is told twice
    return told


@pytest.mark.parametrize("stop", [[], ["the", "n\n"], ["zz"]])
def test_all_output_kinds_agree_for_any_chunking(tokenizer: Tokenizer, stop: list[str]):
    draw, stopped = random.Random(1), 0
    for _ in range(150):
        ids = tokenizer.encode("".join(draw.choices("tthhee an\né🎉", k=draw.randint(1, 20))))
        results = []
        for kind in (CUMULATIVE, DELTA, FINAL):
            one = collector(tokenizer, output_kind=kind, stop=stop, logprobs=2)
            told = feed(one, cut(ids, draw, finish="length"))
            assert [output.finished for output in told] == [False] * (len(told) - 1) + [True]
            if kind == DELTA:
                total = told[0]
                for more in told[1:]:
                    total.add(more)
            else:
                total = told[-1]
            assert kind != FINAL or len(told) == 1
            (output,) = total.outputs
            assert len(output.logprobs) == len(output.token_ids)
            assert all(
                token in entries
                for token, entries in zip(output.token_ids, output.logprobs, strict=True)
            )
            assert output.cumulative_logprob == pytest.approx(-sum(output.token_ids) / 10)
            results.append(
                (output.text, output.token_ids, output.finish_reason, output.stop_reason)
            )
        assert results[0] == results[1] == results[2]
        text, tokens, finish, reason = results[0]
        stopped += finish == "stop"
        assert (finish == "stop") == (reason in stop)
        whole = tokenizer.decode(tokens)
        assert whole.startswith(text)
        assert finish == "stop" or (text == whole and tokens == ids)
    assert (stopped > 10) == bool(stop and stop != ["zz"])


def test_cumulative_texts_only_grow(tokenizer: Tokenizer):
    ids = tokenizer.encode("the and é an the")
    one = collector(tokenizer, stop=["nd é x"])
    texts = [out.outputs[0].text for out in feed(one, cut(ids, random.Random(2), finish="length"))]
    assert texts == sorted(texts, key=len)
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == "the and é an the"


def test_a_stop_string_ends_the_request_here(tokenizer: Tokenizer):
    ids = tokenizer.encode("a\nb")
    one = collector(tokenizer, stop="\n", output_kind=FINAL)
    assert one.add(0, EngineOutput("r", ids), NOW)  # the engine still runs it
    output = one.take()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("a", ids[:2])
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "\n")
    # What the engine says afterwards changes nothing.
    assert not one.add(0, EngineOutput("r", [5], finish="abort"), NOW)
    assert one.take() is None


def test_the_token_that_stops_is_no_text(tokenizer: Tokenizer):
    ids = tokenizer.encode("the and")
    for include, text in ((False, "the"), (True, "the and")):
        one = collector(tokenizer, stop_token_ids=ids[-1:], include_stop_str_in_output=include)
        (output,) = feed(one, [EngineOutput("r", ids, finish="stop", stopped_by=ids[-1])])
        assert output.outputs[0].text == text
        assert output.outputs[0].token_ids == ids
        assert output.outputs[0].stop_reason == ids[-1]


def test_stream_interval_counts_tokens(tokenizer: Tokenizer):
    one = collector(tokenizer, output_kind=DELTA, stream_interval=3)
    told = feed(
        one,
        [EngineOutput("r", [index]) for index in range(1, 8)]
        + [EngineOutput("r", [8], finish="length")],
    )
    assert [output.outputs[0].token_ids for output in told] == [[1], [2, 3, 4], [5, 6, 7], [8]]


def test_outputs_of_a_request_come_together(tokenizer: Tokenizer):
    one = collector(tokenizer, n=2, output_kind=DELTA)
    one.add(0, EngineOutput("r_0", [1]), NOW)
    assert [out.index for out in one.take().outputs] == [0]
    one.add(1, EngineOutput("r_1", [2], finish="length"), NOW)
    output = one.take()
    assert ([out.index for out in output.outputs], output.finished) == ([1], False)
    one.add(0, EngineOutput("r_0", [3], finish="length"), NOW)
    output = one.take()
    assert ([out.token_ids for out in output.outputs], output.finished) == ([[3]], True)


def test_cumulative_outputs_contain_the_whole_text(tokenizer: Tokenizer):
    one = collector(tokenizer, n=2)
    one.add(1, EngineOutput("r_1", [2]), NOW)
    assert [out.token_ids for out in one.take().outputs] == [[], [2]]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_best_of_outputs_are_ranked_at_the_end(tokenizer: Tokenizer, kind: RequestOutputKind):
    one = collector(tokenizer, n=2, best_of=4, output_kind=kind)
    told = []
    for index, value in enumerate([-3.0, -1.0, -4.0, -2.0]):
        found = Logprobs(1, [[index]], [[value]], [1])
        one.add(index, EngineOutput(f"r_{index}", [index], finish="length", logprobs=found), NOW)
        told.append(one.take())
    assert told[:3] == [None] * 3
    outputs = told[3].outputs
    assert [(out.index, out.token_ids, out.cumulative_logprob) for out in outputs] == [
        (0, [1], -1.0), (1, [3], -2.0),
    ]  # fmt: skip
    assert outputs[0].logprobs is None  # they were asked for to rank by, not by the user


# -- log-probabilities ------------------------------------------------------------------------------


def test_logprobs_have_rank_and_text(tokenizer: Tokenizer):
    one = collector(tokenizer, logprobs=2)
    (output,) = feed(one, [EngineOutput("r", [7], finish="length", logprobs=logprobs(1, [7]))])
    (position,) = output.outputs[0].logprobs
    # The chosen one is listed once, with its own rank.
    assert [(i, e.rank, e.logprob) for i, e in position.items()] == [(7, 8, -0.7), (8, 2, -0.2)]
    assert position[7].decoded_token == tokenizer.decode([7])


def test_named_tokens_have_no_rank(tokenizer: Tokenizer):
    one = collector(tokenizer, logprob_token_ids=[7, 8])
    (output,) = feed(one, [EngineOutput("r", [3], finish="length", logprobs=logprobs(1, [3]))])
    (position,) = output.outputs[0].logprobs
    assert [(i, e.rank) for i, e in position.items()] == [(3, 4), (7, None), (8, None)]


def test_flat_logprobs_are_the_same(tokenizer: Tokenizer):
    found = []
    for flat in (False, True):
        one = collector(tokenizer, logprobs=2, prompt_logprobs=2, flat_logprobs=flat, prompt=[4, 5, 6])  # fmt: skip
        outputs = cut([3, 4, 5], random.Random(1), finish="length")
        outputs[0].prompt_logprobs = logprobs(1, [5, 6])
        output = feed(one, outputs)[-1]
        assert isinstance(output.outputs[0].logprobs, FlatLogprobs) == flat
        assert isinstance(output.prompt_logprobs, FlatLogprobs) == flat
        found.append((list(output.outputs[0].logprobs), list(output.prompt_logprobs)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 3
    assert found[0][1][0] is None


def test_flat_logprobs_are_a_sequence():
    flat = FlatLogprobs()
    one = collector(None, prompt=[1], logprobs=2)
    (output,) = feed(
        one, [EngineOutput("r", [3, 4], finish="length", logprobs=logprobs(1, [3, 4]))]
    )
    flat.extend([None, *output.outputs[0].logprobs])
    assert len(flat) == 3
    assert flat[0] is None
    assert flat[-1] == flat[2] == output.outputs[0].logprobs[1]
    assert list(flat[1:]) == output.outputs[0].logprobs
    with pytest.raises(IndexError):
        flat[3]


def test_prompt_logprobs_in_parts_and_twice(tokenizer: Tokenizer):
    """A preempted request computes its prompt again; the first answer stands."""
    one = collector(tokenizer, prompt=[3, 4, 5, 6], prompt_logprobs=2, output_kind=DELTA)
    one.add(0, EngineOutput("r", [], prompt_logprobs=logprobs(1, [4, 5])), NOW)
    again = logprobs(1, [4, 5, 6])
    again.values = [[-9.0, -9.0, -9.0]] * 2 + [again.values[2]]
    one.add(0, EngineOutput("r", [1], prompt_logprobs=again), NOW)
    output = one.take()
    assert output.prompt_logprobs[0] is None
    chosen = zip([4, 5, 6], output.prompt_logprobs[1:], strict=True)
    assert [entries[token].logprob for token, entries in chosen] == [-0.4, -0.5, -0.6]
    one.add(0, EngineOutput("r", [2], finish="length"), NOW)
    assert one.take().prompt_logprobs is None  # told once in a stream of deltas


# -- ids only, errors, times ------------------------------------------------------------------------


def test_without_text(tokenizer: Tokenizer):
    for given in ({"tokenizer": None}, {"tokenizer": tokenizer, "detokenize": False}):
        one = collector(prompt=[1], logprobs=2, **given)
        (output,) = feed(one, [EngineOutput("r", [3], finish="length", logprobs=logprobs(1, [3]))])
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [3])
        assert output.outputs[0].logprobs[0][3].decoded_token is None


@pytest.mark.parametrize(
    ("kind", "raised"), [("invalid", ValidationError), ("overloaded", QueueFull)]
)
def test_errors_reach_the_caller(tokenizer: Tokenizer, kind: Any, raised: type[Exception]):
    one = collector(tokenizer)
    (output,) = feed(
        one, [EngineOutput("r", [], finish="error", error="so it is", error_kind=kind)]
    )
    assert output.finished
    error = error_of(output)
    assert isinstance(error, raised)
    assert "so it is" in str(error)
    assert (
        error_of(feed(collector(tokenizer), [EngineOutput("r", [1], finish="length")])[0]) is None
    )


def test_an_abort_returns_the_text_so_far(tokenizer: Tokenizer):
    one = collector(tokenizer, n=2, stop=["b"], output_kind=FINAL)
    one.add(0, EngineOutput("r_0", tokenizer.encode("a"), finish="length"), NOW)
    one.add(1, EngineOutput("r_1", tokenizer.encode("a")), NOW)
    assert one.end("abort") == ["r_1"]
    output = one.take()
    assert [(out.text, out.finish_reason) for out in output.outputs] == [
        ("a", "length"), ("a", "abort"),
    ]  # fmt: skip


def test_times_and_counts(tokenizer: Tokenizer):
    one = collector(tokenizer)
    one.add(0, EngineOutput("r", [1, 2], num_cached_tokens=3, queued=0.5), NOW)
    one.add(0, EngineOutput("r", [3], finish="length", num_cached_tokens=3, preemptions=1), NOW)
    output = one.take()
    metrics = output.metrics
    assert output.num_cached_tokens == 3
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (3, 1)
    assert metrics.queued == pytest.approx(0.5)
    assert metrics.arrival_time <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.finished_time >= metrics.last_token_ts


def test_repetition_ends_a_request(tokenizer: Tokenizer):
    """Two tokens, three times; however they come, later tokens do not count."""
    ids = tokenizer.encode("the nd x nd x nd x and the")
    asked = {"max_pattern_size": 5, "min_pattern_size": 2, "min_count": 3}
    for given in (ids, [ids[-1], *ids]):
        ends = next(
            at for at in range(len(given))
            for size in range(2, 6)
            if at >= 3 * size and given[at - size : at] * 3 == given[at - 3 * size : at]
        )  # fmt: skip
        for seed in range(5):
            for who in (tokenizer, None):
                one = collector(
                    who,
                    [5] if who is None else "the",
                    output_kind=DELTA,
                    repetition_detection=asked,
                )
                pieces = cut(given, random.Random(seed))
                told = feed(one, pieces)
                assert [token for out in told for token in out.outputs[0].token_ids] == given[:ends]
                assert told[-1].outputs[0].finish_reason == "repetition"


def test_similar_but_different_patterns_do_not_end_a_request(tokenizer: Tokenizer):
    for given, asked in (
        ([20, 21, 20, 21, 20], {"max_pattern_size": 2, "min_count": 3}),
        ([20] * 9, {"max_pattern_size": 4, "min_pattern_size": 4, "min_count": 3}),
        ([*range(20, 60), *range(20, 60)], {"max_pattern_size": 39, "min_count": 2}),
        ([20] * 9, {"max_pattern_size": 0}),
    ):
        one = collector(None, [5], output_kind=FINAL, repetition_detection=asked)
        feed(one, [EngineOutput("r", [token]) for token in given])
        assert one.children[0].tokens == given
    one = collector(None, [5], output_kind=FINAL, min_tokens=7, repetition_detection={"max_pattern_size": 1, "min_count": 2})  # fmt: skip
    feed(one, [EngineOutput("r", [20] * 9)])
    assert len(one.children[0].tokens) == 7
