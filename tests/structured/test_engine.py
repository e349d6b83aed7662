"""Constrained requests on a real engine: each keeps to its form, in every setting and in any company."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from constraint_cases import KINDS
from grammar_reader import Reader
from llguidance import LLMatcher

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

from engines import Engine, engine

from quire.features.structured.compiler import GrammarCompiler
from quire.features.structured.grammar import limits
from quire.features.structured.grammar_messages import GrammarRowSettings
from quire.features.structured.grammar_rows import GrammarStates
from quire.protocol.output import EngineOutput
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import StructuredOutputsParams as Form

EOS, SPECIALS = 2, 3  # ids of tests/tiny_llama.py: three special tokens, then the bytes
MOST = 48

SETTINGS: dict[str, dict[str, Any]] = {
    "few rows": {"max_num_seqs": 3},
    "chunks of 8": {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 8},
    "one token a chunk": {"long_prefill_token_threshold": 1},
    "no prefix caching": {"enable_prefix_caching": False},
    "run ahead": {"async_scheduling": True},
    "run ahead, chunks": {"async_scheduling": True, "long_prefill_token_threshold": 3},
    "depth 4": {"depth": 4},
}


def params(form: Form | None, seed: int = 0, **more: Any) -> SamplingParams:
    settings = {"max_tokens": MOST, "eos_token_ids": [EOS], "seed": seed, **more}
    form = None if form is None else form.plain()
    return SamplingParams(structured_outputs=form, **settings)


def text_of(reader: Reader, tokens: list[int]) -> str:
    return reader.compiler.vocabulary.tokenizer.decode_str([t for t in tokens if t >= SPECIALS])


def hold(reader: Reader, kind: str, outputs: list[EngineOutput]) -> str:
    """The text of a finished output keeps to its form: the whole of it, or what came before the cut."""
    form, keeps = KINDS[kind]
    tokens = [token for output in outputs for token in output.tokens]
    text = text_of(reader, tokens)
    if outputs[-1].finish == "stop":
        assert tokens[-1] == EOS
        assert keeps(text), text
    else:
        assert outputs[-1].finish == "length"
        matcher = reader.matcher(form)
        assert matcher.try_consume_tokens(tokens) == len(tokens)
    return text


def prompt(number: int, length: int = 20) -> list[int]:
    return [SPECIALS + (number * 37 + 11 * place) % 256 for place in range(length)]


def crowd() -> tuple[list[list[int]], list[SamplingParams]]:
    """32 requests: each kind at two temperatures, and others without a constraint between them."""
    kinds = list(KINDS) + [None] * 7
    prompts = [prompt(number, 5 + number % 23) for number in range(32)]
    each = [
        params(
            KINDS[kind][0] if kind else None,
            seed=number,
            temperature=(0.0, 1.0)[number // 16],
            max_tokens=24 if kind is None else MOST,
        )
        for number, kind in zip(range(32), itertools.cycle(kinds), strict=False)
    ]
    return prompts, each


@pytest.fixture(scope="module")
def plain(checkpoint: str) -> Iterator[Engine]:
    with engine(checkpoint, max_num_seqs=32) as one:
        yield one


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[list[int]]:
    """What the crowd's requests say when each is alone, and every token is drawn."""
    with engine(checkpoint, structured_outputs_config={"jumps": False}) as one:
        return [one.tokens([p], [q])[0] for p, q in zip(*crowd(), strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_constraint_is_satisfied(plain: Engine, reader: Reader, kind: str):
    form = KINDS[kind][0]
    each = [params(form, seed, temperature=0.3 * seed) for seed in range(6)]
    runs = plain.run([prompt(9)] * 6, each)
    texts = [hold(reader, kind, outputs) for outputs in runs]
    assert sum(outputs[-1].finish == "stop" for outputs in runs) >= (
        1 if kind in ("ebnf", "json_object") else 4
    )
    if kind != "choice":
        assert len(set(texts)) > 1


def test_outputs_are_the_same_alone_and_batched(
    plain: Engine, reader: Reader, expected: list[list[int]]
):
    prompts, each = crowd()
    runs = plain.run(prompts, each)
    assert [[t for o in outputs for t in o.tokens] for outputs in runs] == expected
    kind_of = {form.plain().key: kind for kind, (form, _) in KINDS.items()}
    held = 0
    for asked, outputs in zip(each, runs, strict=True):
        if asked.structured_outputs is not None:
            hold(reader, kind_of[asked.structured_outputs.key], outputs)
            held += 1
    assert held == 18


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_changes_a_token(checkpoint: str, setting: str, expected: list[list[int]]):
    settings = {"max_num_seqs": 32, **SETTINGS[setting]}
    with engine(checkpoint, **settings) as one:
        assert one.tokens(*crowd()) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_no_token(checkpoint: str, depth: int, expected: list[list[int]]):
    tight = {"block_size": 8, "num_gpu_blocks_override": 40, "max_model_len": 128}
    with engine(checkpoint, depth, max_num_seqs=32, **tight) as one:
        assert one.tokens(*crowd()) == expected
        assert one.stats()["preemptions"] >= 5


@pytest.mark.slow  # test_jumps.py has a quick one
def test_a_worker_in_its_own_process(checkpoint: str, expected: list[list[int]]):
    with engine(checkpoint, max_num_seqs=32, distributed_executor_backend="mp") as one:
        prompts, each = crowd()
        assert one.tokens(prompts[:12], each[:12]) == expected[:12]


# -- beside other parameters ----------------------------------------------------------------------
def test_a_cut_is_of_length(plain: Engine):
    (outputs,) = plain.run([prompt(1)], params(Form(regex="[0-9]{40}"), max_tokens=7))
    assert outputs[-1].finish == "length"
    assert sum(len(output.tokens) for output in outputs) == 7


def test_min_tokens_continues_while_the_grammar_allows(plain: Engine, reader: Reader):
    for form, least in ((Form(regex="[0-9]{2,20}"), 9), (Form(regex="[0-9]{3}"), 9)):
        (tokens,) = plain.tokens([prompt(2)], params(form, min_tokens=least))
        assert len(tokens) > least
        assert set(tokens[least:]) == {EOS} or form.regex == "[0-9]{2,20}"
        digits = text_of(reader, tokens)
        assert digits.isdigit()
        assert len(digits) >= least or len(digits) == 3


def test_ignore_eos_pads_with_end_of_text_tokens(plain: Engine, reader: Reader):
    (tokens,) = plain.tokens(
        [prompt(3)], params(Form(choice=["ab"]), ignore_eos=True, max_tokens=6)
    )
    assert text_of(reader, tokens) == "ab"
    assert tokens[2:] == [EOS] * 4
    (tokens,) = plain.tokens(
        [prompt(3)], params(Form(regex="[a-c]*"), ignore_eos=True, max_tokens=20)
    )
    assert EOS not in tokens
    assert set(text_of(reader, tokens)) <= set("abc")


def test_a_finished_grammar_may_always_end(plain: Engine, reader: Reader):
    digits = [SPECIALS + ord(digit) - 33 for digit in "0123456789"]
    for more in (
        {"allowed_token_ids": digits},
        {"logit_bias": {EOS: -100.0}},
        {"bad_word_ids": [[EOS]]},
    ):
        (tokens,) = plain.tokens([prompt(4)], params(Form(regex="[0-9]{5}"), **more))
        assert text_of(reader, tokens).isdigit(), more
        assert len(tokens) == 6
        assert tokens[-1] == EOS


def test_a_request_without_an_allowed_token_fails_alone(plain: Engine):
    letters = [SPECIALS + ord("a") - 33]
    plain.client.submit(
        EngineRequest("x", prompt(5), params(Form(regex="[0-9]+"), allowed_token_ids=letters))
    )
    plain.client.submit(EngineRequest("y", prompt(5), params(Form(regex="[0-9]{3}"))))
    ended = finished(plain, {"x", "y"})
    assert ended["x"].error_kind == "invalid"
    assert ended["x"].error == (
        "no token is left to sample: structured_outputs and allowed_token_ids together exclude them all; allow more tokens"
    )
    assert ended["y"].finish == "stop"


def test_every_end_token_may_end_a_grammar(plain: Engine):
    each = [params(Form(regex="[0-9]{2}"), seed, eos_token_ids=[0, 1, EOS]) for seed in range(12)]
    ends = {tokens[-1] for tokens in plain.tokens([prompt(6)] * 12, each)}
    assert ends <= {0, 1, EOS}
    assert len(ends) > 1


def test_stop_tokens_end_a_grammar(plain: Engine):
    seven = SPECIALS + ord("7") - 33
    (outputs,) = plain.run(
        [prompt(7)], params(Form(regex="[0-9]{200}"), stop_token_ids=[seven], max_tokens=150)
    )
    assert outputs[-1].finish == "stop"
    assert outputs[-1].stopped_by == seven


@pytest.mark.parametrize(("mode", "whole"), [("raw_logprobs", False), ("processed_logprobs", True)])
def test_logprobs(checkpoint: str, mode: str, whole: bool):
    """Raw: of the model, as without a constraint. Processed: of the ten digits that are left."""
    with engine(checkpoint, logprobs_mode=mode) as one:
        (outputs,) = one.run([prompt(8)], params(Form(regex="[0-9]{3}"), logprobs=10))
        (free,) = one.run([prompt(8)], params(None, logprobs=10, max_tokens=1))
    first, alone = outputs[0].logprobs, free[0].logprobs
    assert first is not None
    assert alone is not None
    best = sorted(zip(first.token_ids[0][1:], first.values[0][1:], strict=True))
    if whole:
        assert sum(math.exp(value) for _, value in best) == pytest.approx(1, abs=1e-5)
        assert {token for token, _ in best} == set(range(18, 28))
    else:
        same = sorted(zip(alone.token_ids[0][1:], alone.values[0][1:], strict=True))
        assert [token for token, _ in best] == [token for token, _ in same]
        assert [value for _, value in best] == pytest.approx([value for _, value in same])


# -- what goes wrong ------------------------------------------------------------------------------
def finished(one: Engine, ids: set[str]) -> dict[str, EngineOutput]:
    ended: dict[str, EngineOutput] = {}
    while set(ended) != ids:
        ended |= {out.id: out for out in one.client.outputs() if out.finish is not None}
    return ended


def test_a_bad_constraint_fails_alone(plain: Engine, reader: Reader):
    bad = [
        Form(regex="["),
        Form(json='{"not": {}}'),
        Form(grammar="nonsense"),
        Form(structural_tag="{}"),
        Form(regex="((a{0,100}){0,100}){0,100}"),
    ]
    for number, form in enumerate(bad):
        asked = params(form, ignore_eos=True, max_tokens=100)
        plain.client.submit(EngineRequest(f"bad{number}", prompt(number), asked))
    plain.client.submit(EngineRequest("good", prompt(1), params(Form(choice=["red", "green"]))))
    plain.client.submit(EngineRequest("free", prompt(1), params(None, max_tokens=30)))
    names = {f"bad{number}" for number in range(len(bad))}
    ended = finished(plain, names | {"good", "free"})
    assert ended["good"].finish == "stop"
    assert ended["free"].finish in ("stop", "length")
    for number in range(len(bad)):
        assert ended[f"bad{number}"].finish == "error"
    assert "class" in (ended["bad0"].error or "")
    assert "not" in (ended["bad1"].error or "")
    assert "nested repetitions" in (ended["bad4"].error or "")
    plain.client.call("stats")


def test_compiling_delays_no_other_request(checkpoint: str, monkeypatch: pytest.MonkeyPatch):
    go, compile_ = threading.Event(), GrammarCompiler._compile

    def slow(self: GrammarCompiler, *asked: Any) -> Any:
        go.wait(60)
        return compile_(self, *asked)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    with engine(checkpoint) as one:
        one.client.submit(EngineRequest("held", prompt(1), params(Form(regex="[0-9]{3}"))))
        one.client.submit(EngineRequest("free", prompt(2), params(None, max_tokens=30)))
        assert set(finished(one, {"free"})) == {"free"}
        threading.Timer(0.05, go.set).start()  # the loop sleeps now, and is woken
        assert finished(one, {"held"})["held"].finish == "stop"


def test_time_used_by_other_grammars_is_not_charged_to_a_request(reader: Reader):
    """Copies of a compiled grammar share its lexer, and the limit on what that may learn."""
    tokenizer, accepts = reader.compiler.vocabulary.tokenizer, reader.compiler.vocabulary.accepts
    text = LLMatcher.grammar_from_regex("((a{1,100}){1,100}){1,100}b")
    token = SPECIALS + ord("a") - 33
    states = GrammarStates(
        lambda: LLMatcher(tokenizer, text, log_level=0, limits=limits()),
        accepts,
        (accepts + 32) // 32,
    )
    first = states.grammar.deep_copy()
    while first.consume_token(token):
        first.compute_bitmask()
    copy = states.grammar.deep_copy()
    assert not copy.consume_token(token), (
        "copies share nothing any more: GrammarState.renewed can go"
    )
    states.begin(0, GrammarRowSettings([EOS], False, 40, 40, False), [token])
    states.fill([0])
    assert states.states[0].error is None
    assert states.states[0].renewed


def test_an_abort_leaves_nothing_behind(checkpoint: str):
    with engine(checkpoint, max_num_seqs=2) as one:
        for number in range(6):
            asked = params(Form(regex="[a-z]{2000}"), max_tokens=150)
            one.client.submit(EngineRequest(f"gone{number}", prompt(number), asked))
        for _ in range(4):
            one.client.outputs()
        gone = {f"gone{number}" for number in range(6)}
        one.client.abort(list(gone))
        finished(one, gone)
        tokens = one.tokens([prompt(1)] * 4, params(Form(choice=["ab"])))
        assert tokens == [tokens[0]] * 4
        one.tokens([prompt(1)], params(None, max_tokens=1))  # rows are left with the next plan
        worker = one.client.core.executor.worker  # type: ignore[attr-defined]
        assert not worker.hooks[0].masks.row_grammars
