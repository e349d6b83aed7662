"""Masks laid over logits, by the host's way and by a device's; and what the gate tells a worker elsewhere."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from grammar_reader import Reader

from quire.errors import ValidationError
from quire.features.structured.compiler import MAX_CACHED, THREADS, GrammarCompiler, digest
from quire.features.structured.errors import UnsupportedConstraint
from quire.features.structured.gate import CompileRequests, GrammarGate, apply_compile_requests
from quire.features.structured.grammar_messages import GrammarRowSettings
from quire.features.structured.grammar_process import GrammarProcess
from quire.features.structured.grammar_rows import LIBRARY_FAILED, GrammarStates
from quire.features.structured.masks import GrammarMasks
from quire.features.structured.row_grammar import RowGrammar
from quire.features.structured.validate import check_constraint
from quire.ops.masked_argmax import bits, num_words
from quire.protocol.plan import EnteredRow, StepPlan
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import StructuredOutputsParams as Form
from quire.scheduler.request import Request
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.logits_processors import ProcessorRows

EOS, A, B = 2, 3 + ord("a") - 33, 3 + ord("b") - 33
WIDTH = 259


def entered(row: int, form: Form | None, outputs: list[int], **more: Any) -> EnteredRow:
    params = SamplingParams(
        structured_outputs=None if form is None else form.plain(),
        eos_token_ids=[EOS], seed=0, max_tokens=40, **more,
    )  # fmt: skip
    return EnteredRow(row, str(row), [5, 6, *outputs], 2, 0, [[]], params)


def masks(reader: Reader, *new: EnteredRow) -> GrammarMasks:
    made = GrammarMasks(reader.compiler, RequestRows(8, 64, 1, 8))
    for one in new:
        made.rows.enter(one)
        made.enter(one)
    return made


def allowed(made: GrammarMasks, rows: list[int], width: int = WIDTH) -> list[set[int]]:
    """What is left of logits that are all finite, by row; and the masks for greedy rows say the same."""
    logits = torch.arange(len(rows) * width, dtype=torch.float32).view(len(rows), width)
    at = np.arange(len(rows))
    selected = ProcessorRows(at, np.array(rows), made.rows.length[rows], made.rows)
    out = made.apply(logits.clone(), selected)
    assert not selected.errors
    left = out.isfinite()
    assert torch.equal(out[left], logits[left])
    words = np.full((len(rows), num_words(width)), -1, np.int32)
    made.mask(words, selected)
    assert torch.equal(bits(torch.from_numpy(words), width), left)
    return [set(row.nonzero().flatten().tolist()) for row in left]


def test_masks_equal_the_grammars_allowed_tokens(reader: Reader):
    forms = [
        entered(0, Form(regex="a*"), []),
        entered(1, Form(regex="a*b"), [A, A]),
        entered(3, Form(regex="ab"), [A, B]),
        entered(4, Form(regex="ab"), [A, B, EOS, EOS]),
        entered(6, Form(regex="a*"), [A], ignore_eos=True),
    ]
    made = masks(reader, *forms)
    expected = [{A, EOS}, {A, B}, {EOS}, {EOS}, {A}]
    assert allowed(made, [0, 1, 3, 4, 6]) == expected
    assert allowed(made, [6, 0]) == [{A}, {A, EOS}]
    # a model may have more logits than the tokenizer has tokens
    assert allowed(made, [1, 3], width=WIDTH + 100) == [{A, B}, {EOS}]


def test_tokens_that_are_drawn_move_the_grammar_on(reader: Reader):
    made = masks(reader, entered(0, Form(regex="ab?"), []), entered(2, Form(regex="b+"), []))
    for drawn, left in (([A, B], [{B, EOS}, {B, EOS}]), ([B, B], [{EOS}, {B, EOS}])):
        allowed(made, [0, 2])
        rows = np.array([0, 2])
        made.rows.token_ids_RL[rows, made.rows.length[rows]] = torch.tensor(
            drawn, dtype=torch.int32
        )
        made.rows.length[rows] += 1
        made.hook.after(StepPlan(1, [], [], []))
        assert allowed(made, [0, 2]) == left
    made.leave(0)
    made.rows.leave(0)
    again = entered(0, Form(regex="b"), [])
    made.rows.enter(again)
    made.enter(again)
    assert allowed(made, [0]) == [{B}]


def test_a_request_that_left_does_not_mask_the_next_one_in_its_row(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
):
    """A second thread had put the old request into a new process, and stored its mask by the row."""
    made = masks(reader, entered(0, Form(regex="a*"), []))
    assert allowed(made, [0]) == [{A, EOS}]
    old, enter = made.row_grammars[0], made._enter
    begun, goes_on = threading.Event(), threading.Event()

    def late(grammar: RowGrammar) -> None:
        if grammar is old:
            begun.set()
            goes_on.wait(60)
        enter(grammar)

    monkeypatch.setattr(made, "_enter", late)
    made._replace_process(old)
    assert begun.wait(60)
    made.leave(0)
    made.rows.leave(0)
    again = entered(0, Form(regex="b"), [])
    made.rows.enter(again)
    made.enter(again)
    made.row_grammars[0].job.result(60)
    goes_on.set()
    old.restart.result(60)
    assert allowed(made, [0]) == [{B}]


class PanicException(BaseException):  # as Rust's is called
    pass


class Panics:
    """A matcher that fails in one of its two ways."""

    def __init__(self, when: str):
        self.when = when

    def consume_token(self, token: int) -> bool:
        if self.when == "token":
            raise PanicException("out of range")
        return True

    def is_error(self) -> bool:
        return False

    def fill(self, masks_NW: np.ndarray, row: int) -> None:
        raise PanicException("out of range")


@pytest.mark.parametrize("when", ["token", "mask"])
def test_a_library_that_fails_fails_one_row(reader: Reader, when: str):
    accepts = reader.compiler.vocabulary.accepts
    states = GrammarStates(lambda: reader.matcher(Form(regex="a*b")), accepts, (accepts + 32) // 32)
    for number in (0, 1):
        states.begin(number, GrammarRowSettings([EOS], False, 40, 40, False), [])
    states.states[0].matcher = Panics(when)  # type: ignore[assignment]
    assert [states.feed(number, [A]) for number in (0, 1)] == [[], []]
    masks_NW = states.fill([0, 1])
    assert states.states[0].error == LIBRARY_FAILED
    assert states.states[1].error is None
    left = np.unpackbits(masks_NW[1].view(np.uint8), bitorder="little").nonzero()[0]
    assert set(left.tolist()) == {A, B}


def test_a_library_that_fails_is_a_refusal(reader: Reader, monkeypatch: pytest.MonkeyPatch):
    """The client does not see the library's error text."""

    def fails(*args: Any, **more: Any) -> Any:
        raise PanicException("out of range")

    stub = SimpleNamespace(validate_grammar_with_warnings=fails)
    monkeypatch.setattr("quire.features.structured.validate.LLMatcher", stub)
    monkeypatch.setattr("quire.features.structured.matcher.LLMatcher", fails)
    form = Form(regex="a{3}unlike any other")
    with pytest.raises(ValidationError, match="regex: the grammar library"):
        check_constraint(form)
    with pytest.raises(UnsupportedConstraint, match="the grammar library"):
        reader.matcher(form)


NUMBERS = itertools.count()


def asked(form: Form | None) -> Request:
    params = SamplingParams(structured_outputs=form, max_tokens=5, seed=0)
    return Request.of(EngineRequest(str(next(NUMBERS)), [1], params), 0, b"", False)


@contextmanager
def held_up(compiler: GrammarCompiler) -> Iterator[None]:
    """Inside, no compilation starts."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def busy() -> None:
        begun.release()
        go_on.wait()

    for _ in range(THREADS):
        compiler.quick.pool.submit(busy)
    for _ in range(THREADS):
        begun.acquire()
    try:
        yield
    finally:
        go_on.set()


def test_a_remote_worker_receives_the_grammars_to_compile(reader: Reader):
    gate = GrammarGate(reader.compiler, elsewhere=True)
    plan = StepPlan(1, [], [], [])
    assert gate.ready(asked(None))
    assert gate.data_for_hook(plan) is None
    forms = [Form(regex=f"[a-z]{{{n},900}}-{n}") for n in range(1, 9)]
    with held_up(reader.compiler):
        assert not any(gate.ready(asked(form)) for form in forms)
        told = gate.data_for_hook(plan)
    assert told is not None
    assert msgspec.msgpack.decode(told, type=CompileRequests).to_compile == forms
    assert gate.data_for_hook(plan) is None
    for form in forms:
        reader.compiler.submit(form).result()
        assert gate.ready(asked(form))


def test_all_requests_waiting_for_a_grammar_are_woken(reader: Reader):
    """The worker asks too, for a grammar whose limits are spent. Regression: the worker asked first, and the loop did not wake up."""
    form, woken = Form(regex="[a-z]{1,901}-woken"), threading.Event()
    request = asked(form)
    gate = GrammarGate(reader.compiler, wake=woken.set)
    with held_up(reader.compiler):
        reader.compiler.submit(form)
        assert not gate.ready(request)
    assert woken.wait(60)
    assert gate.ready(request)


def test_more_requests_may_wait_than_the_cache_has_entries(reader: Reader):
    """Regression: the last requests evicted the grammars of the first ones again and again, and none became ready."""
    woken = threading.Event()
    gate = GrammarGate(reader.compiler, wake=woken.set)
    forms = [Form(regex=f"x{{{n}}}-many") for n in range(1, MAX_CACHED + 9)]
    waiting = [asked(form) for form in forms]
    ready: list[bool] = []
    for _ in range(2 * len(waiting)):
        if all(ready := [gate.ready(request) for request in waiting]):
            break
        assert woken.wait(60)
        woken.clear()
    assert all(ready)
    # The first is forgotten by now. A request that enters gets it all the same, and a preempted one asks again.
    assert reader.compiler.submit(forms[0]).result(60).alive
    gate.leave(waiting[0])
    assert gate.ready(waiting[0])


def compiled(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> list[Form]:
    """What is compiled from now on."""
    seen: list[Form] = []
    compile = reader.compiler._compile

    def seeing(key: bytes, form: Form, slow: bool) -> GrammarProcess:
        seen.append(form)
        return compile(key, form, slow)

    monkeypatch.setattr(reader.compiler, "_compile", seeing)
    return seen


def pass_on(gate: GrammarGate, compiler: GrammarCompiler) -> None:
    if (extra := gate.data_for_hook(StepPlan(1, [], [], []))) is not None:
        apply_compile_requests(compiler, extra)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_aborted_requests_compile_nothing(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
):
    """(Who sent and aborted again and again filled the queue, and others waited for it.)"""
    seen = compiled(reader, monkeypatch)
    gate = GrammarGate(reader.compiler, elsewhere=elsewhere)
    other = GrammarCompiler(reader.compiler.vocabulary)  # the worker's, where it is elsewhere
    forms = [Form(regex=f"[a-z]{{{n},903}}-{elsewhere}") for n in range(1, 40)]
    with held_up(reader.compiler), held_up(other):
        waiting = [asked(form) for form in (*forms, forms[0], forms[1])]
        assert not any(gate.ready(request) for request in waiting)
        pass_on(gate, other)
        for request in waiting[1:-1]:  # two more wait for the first, and one more for the second
            gate.on_waiting_ended(request)
        anew = asked(forms[5])
        assert not gate.ready(anew)
        pass_on(gate, other)
        left = [digest(form) for form in (forms[0], forms[1], forms[5])]
        assert list(reader.compiler.quick.waiting) == left
        assert list(other.quick.waiting) == (left if elsewhere else [])
    for form in (forms[0], forms[1], forms[5]):
        reader.compiler.submit(form).result(60)
    assert seen == [forms[0], forms[1], forms[5]]


def test_a_compilation_of_an_aborted_request_serves_the_next(reader: Reader):
    form, request = Form(regex="[a-z]{2,904}"), asked(Form(regex="[a-z]{2,904}"))
    gate = GrammarGate(reader.compiler)
    gate.ready(request)
    begun = reader.compiler.submit(form)
    begun.result(60)
    gate.on_waiting_ended(request)
    assert reader.compiler.submit(form) is begun


def test_statistics_begin_no_compilation(reader: Reader):
    """(Every `stats()` asked `ready`, which asks the compiler.)"""
    gate, request = GrammarGate(reader.compiler), asked(Form(regex="[a-z]{3,905}"))
    with held_up(reader.compiler):
        assert not gate.is_blocking(request)  # nothing is asked for yet: it waits for room
        assert not reader.compiler.quick.waiting
        assert not gate.ready(request)
        assert gate.is_blocking(request)
    made = reader.compiler.submit(request.params.structured_outputs)
    called = threading.Event()
    made.add_done_callback(lambda _: called.set())  # after the gate's own callback
    assert called.wait(60)
    assert gate.ready(request)
    assert not gate.is_blocking(request)


def test_a_step_does_not_wait_for_other_compilations(reader: Reader):
    form = Form(regex="abc-now")
    with held_up(reader.compiler):
        later = reader.compiler.submit(form)
        assert reader.compiler.submit(form, now=True).result(60).alive
        assert later.done()  # a request that waited for it has it too
        assert not reader.compiler.quick.waiting
