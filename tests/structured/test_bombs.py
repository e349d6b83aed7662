"""Grammars that ask for too much: refused by arithmetic, or ended in their own process; others notice nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_reader import Reader
from test_engine import finished, params, prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

from engines import Engine, engine

from quire.errors import ValidationError
from quire.features.structured import check_process, grammar_dialect, grammar_process
from quire.features.structured import compiler as compile
from quire.features.structured.check_process import ConstraintChecker
from quire.features.structured.compiler import GrammarCompiler
from quire.features.structured.errors import CompileDelayed, UnsupportedConstraint
from quire.features.structured.grammar_messages import GrammarRowSettings
from quire.features.structured.grammar_process import GrammarForkServer
from quire.features.structured.grammar_rows import GrammarStates
from quire.features.structured.validate import check_constraint
from quire.observe.process_memory import process_tree
from quire.protocol.request import EngineRequest
from quire.protocol.structured_outputs import StructuredOutputsParams as Form

PRIMES = (999983, 999979, 999961, 999959, 999953)
REVIEWED = {
    "multiples": Form(json={"allOf": [{"type": "integer", "multipleOf": p} for p in PRIMES]}),
    "multiples in another order": Form(
        json={"allOf": [{"type": "integer", "multipleOf": p} for p in reversed(PRIMES)]}
    ),
    "100^4": Form(regex="((((a{100}){100}){100}){100})"),
    "100^4x": Form(regex="((((a{100}){100}){100}){100})x"),
    "60^4": Form(regex="((((a{60}){60}){60}){60})"),
    "1000^2": Form(regex="(a{1000}){1000}"),
    "long choice": Form(choice=["ab" * (1 << 19)]),
    "long regex": Form(regex="ab" * (1 << 19)),
    "lark": Form(grammar="start: /(a{1000}){1000}/"),
    "gbnf": Form(grammar="root ::= " + " | ".join(f'"x{n}"' for n in range(100_000))),
    "pattern": Form(json={"type": "string", "pattern": "^(a{1000}){1000}$"}),
    "spaces": Form(json={}, whitespace_pattern="(a{1000}){1000}"),
    "tag": Form(
        structural_tag={
            "type": "structural_tag",
            "format": {"type": "regex", "pattern": "(a{1000}){1000}"},
        }
    ),
    "repetition": Form(grammar='start: ("a"){1000000}'),
}

HIDDEN = {
    # Arithmetic does not follow references: these are for the process to end.
    "multiples": Form(
        json={
            "$defs": {f"p{p}": {"type": "integer", "multipleOf": p} for p in (99991, 99989, 99971)},
            "allOf": [{"$ref": f"#/$defs/p{p}"} for p in (99991, 99989, 99971)],
        }
    ),
    "doubling": Form(
        grammar="start: r0\n"
        + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(20))
        + '\nr20: "'
        + "a" * 4000
        + '"'
    ),
}
# Its first masks are small. Then 4 GB of text are forced.
LATER = Form(
    json={"type": "array", "prefixItems": [{"enum": [1, 2]}], "items": {"const": "a" * 4000}, "minItems": 10**6},
    disable_any_whitespace=True,
)  # fmt: skip
HONEST = [
    Form(regex="[a-z]{1,100000}"),
    Form(regex="((a{1,20}){1,20}){1,20}"),
    Form(json={"type": "string", "maxLength": 10**9}),
    Form(json={"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    Form(json={"type": "number", "multipleOf": 0.01}),
    Form(json={"allOf": [{"type": "integer", "multipleOf": 60}, {"multipleOf": 1000}]}),
    Form(grammar="root ::= " + " | ".join(f'"x{n}"' for n in range(2000))),
    Form(choice=["a" * 60_000, "b"]),
]


@pytest.mark.parametrize("name", REVIEWED)
def test_oversized_constraints_are_refused_before_compiling(name: str):
    began = time.thread_time()
    with pytest.raises(ValidationError, match="limit"):
        check_constraint(REVIEWED[name])
    assert time.thread_time() - began < 5  # (40 s and a panic)


def test_the_estimate_refuses_what_compiles_and_fails_later(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
):
    """Without the estimate, this grammar and its first mask are quick, and its output fails at the second token."""
    form = REVIEWED["repetition"]
    with pytest.raises(ValidationError, match="limit is 65536"):
        check_constraint(form)
    monkeypatch.setattr(grammar_dialect, "check_grammar", lambda text: None)
    began = time.thread_time()
    states = GrammarStates(lambda: reader.matcher(form), reader.compiler.vocabulary.accepts, 9)
    assert time.thread_time() - began < compile.SLOW_CPU_S
    ends = reader.compiler.vocabulary.accepts
    states.begin(1, GrammarRowSettings([ends], False, 100, 100, jumps=True), [])
    states.fill([1])
    assert states.states[1].error is None
    states.feed(1, reader.compiler.vocabulary.tokenizer.tokenize_str("a"))
    states.fill([1])
    assert "too complex" in (states.states[1].error or "")


@pytest.mark.parametrize("form", HONEST, ids=str)
def test_large_feasible_constraints_are_accepted(reader: Reader, form: Form):
    assert reader.compiler.submit(check_constraint(form).plain()).result(60).alive


@pytest.mark.parametrize("name", HIDDEN)
def test_a_compilation_beyond_its_limits_is_ended(reader: Reader, name: str):
    """The process of such a grammar ends; other requests do not wait for that."""
    compiler = GrammarCompiler(reader.compiler.vocabulary)
    compiler.fork_server.fork_spare()
    bombs = [
        compiler.submit(
            Form(**{**_fields(HIDDEN[name]), "whitespace_pattern": f"[ ]{{1,{n}}}"}).plain()
        )
        for n in (3, 4)
    ]
    assert compiler.submit(Form(regex=f"{name}[0-9]")).result(60).alive
    for bomb in bombs:
        with pytest.raises(UnsupportedConstraint, match="make it smaller"):
            bomb.result(60)
    assert not compiler._running
    assert compiler.submit(Form(regex=f"{name}[0-9]{{2}}")).result(60).alive


def test_a_busy_machine_is_no_fault_of_the_grammar(reader: Reader, monkeypatch: pytest.MonkeyPatch):
    """Without an answer in time the request may come again: the grammar compiles then, and nothing says that it is too large."""
    compiler, form = GrammarCompiler(reader.compiler.vocabulary), Form(regex="busy[0-9]")
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process, "COMPILE_WALL", 1e-6)
        with pytest.raises(CompileDelayed, match="send the request again"):
            compiler.submit(form).result(60)
    assert compiler.submit(form).result(60).alive


def test_a_check_on_a_busy_machine_is_not_cached(monkeypatch: pytest.MonkeyPatch):
    checker, form = ConstraintChecker(), Form(regex="busy[0-9]")
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process, "COMPILE_WALL", 1e-6)
        with pytest.raises(CompileDelayed):
            checker.checked(form)
    assert checker.checked(form) == form


def _fields(form: Form) -> dict[str, Any]:
    return {form.kind: getattr(form, form.kind)}


def test_a_compilation_without_waiting_requests_is_ended(reader: Reader):
    compiler = GrammarCompiler(reader.compiler.vocabulary)
    form = HIDDEN["multiples"].plain()
    bomb = compiler.submit(form)
    while not (compiler._running or bomb.done()):
        time.sleep(0.001)
    (process,) = compiler._running.values()
    compiler.cancel(form)
    assert not process.alive
    with pytest.raises(UnsupportedConstraint):
        bomb.result(60)
    assert compiler.submit(form) is not bomb


def test_cached_grammars_are_bounded_by_bytes(reader: Reader, monkeypatch: pytest.MonkeyPatch):
    compiler = GrammarCompiler(reader.compiler.vocabulary)
    one = compiler.submit(Form(regex="[0-9]-one")).result(60).bytes
    assert one > 1 << 16
    monkeypatch.setattr(compile, "MAX_CACHED_BYTES", int(3.5 * one))
    for number in range(8):
        compiler.submit(Form(regex=f"[0-9]-{number}")).result(60)
    assert len(compiler._cached) <= 4
    assert compiler.cached_bytes() < 4 * one


def test_idle_grammars_end(reader: Reader, monkeypatch: pytest.MonkeyPatch):
    """A grammar that a row uses stays; a process that nobody uses is no more there, in the table of processes too."""
    monkeypatch.setattr(compile, "IDLE_S", 0.5)
    compiler = GrammarCompiler(reader.compiler.vocabulary)
    used = compiler.submit(Form(regex="[0-9]-used"))
    assert used.result(60).alive
    for number in range(4):
        compiler.submit(Form(regex=f"[0-9]-{number}-idle")).result(60)
    server = compiler.fork_server.server
    assert server is not None
    assert len(process_tree(server.process.pid)) >= 6  # the fork server's and these five
    until = time.monotonic() + 60
    while len(process_tree(server.process.pid)) > 3:  # itself, the used one, a spare one
        assert time.monotonic() < until
        time.sleep(0.05)
    assert compiler.cached_bytes() == 0
    assert compiler.submit(Form(regex="[0-9]-used")) is used
    assert used.result().alive
    assert compiler.submit(Form(regex="[0-9]-1-idle")).result(60).alive  # it is compiled again


def test_refusals_are_cached(reader: Reader):
    compiler = GrammarCompiler(reader.compiler.vocabulary)
    first = compiler.submit(Form(regex="["))
    with pytest.raises(UnsupportedConstraint):
        first.result(60)
    assert compiler.submit(Form(regex="[")) is first


def test_the_frontends_check_is_ended(monkeypatch: pytest.MonkeyPatch):
    """It has a bound of its own, whatever llguidance does with a text; the next check has a new process."""
    monkeypatch.setattr(check_process, "CPU_S", 0.02)
    one = ConstraintChecker()
    large = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1000)}}
    schema = {"anyOf": [{**large, "title": str(n)} for n in range(4)]}
    with pytest.raises(ValidationError, match="processor time or memory; make it smaller"):
        one.checked(Form(json=schema))
    monkeypatch.setattr(check_process, "CPU_S", 1.0)
    assert one.checked(Form(regex="[0-9]")).regex == "[0-9]"
    with pytest.raises(ValidationError, match="regex parse error"):
        one.checked(Form(regex="(" * 3))


# -- on an engine ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def plain(checkpoint: str) -> Iterator[Engine]:
    with engine(checkpoint, max_num_seqs=8) as one:
        yield one


def processes(one: Engine) -> list[int]:
    """Of grammars, by their ids."""
    compiler = one.client.core.executor.worker.hooks[0].masks.compiler  # type: ignore[attr-defined]
    (server_pid,) = [pid for pid in _children(os.getpid()) if _holds(pid, compiler)]
    return _children(server_pid)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def _holds(pid: int, compiler: GrammarCompiler) -> bool:
    server = compiler.fork_server.server
    return server is not None and server.process.pid == pid


@pytest.mark.parametrize("jumps", [True, False])
def test_a_bomb_in_the_middle_of_an_output_fails_alone(plain: Engine, jumps: bool):
    """(It stalled all for a minute, and 8 GB later the allocator ended the engine.)"""
    more: dict[str, Any] = {} if jumps else {"logprobs": 0}
    expected = plain.tokens([prompt(1)], params(Form(regex="[a-z]{30}"), max_tokens=40))
    for name, form in (("bomb", LATER), ("same", LATER), ("good", Form(regex="[a-z]{30}"))):
        extra = more if form is LATER else {}
        asked = params(form, max_tokens=40, **extra)
        plain.client.submit(EngineRequest(name, prompt(1), asked))
    outputs: dict[str, list[Any]] = {"bomb": [], "same": [], "good": []}
    ended: set[str] = set()
    while ended != set(outputs):
        for out in plain.client.outputs():
            outputs[out.id].append(out)
            if out.finish is not None:
                ended.add(out.id)
    assert [token for out in outputs["good"] for token in out.tokens] == expected[0]
    for name in ("bomb", "same"):
        last = outputs[name][-1]
        assert (last.finish, last.error_kind) == ("error", "invalid")
        assert "structured_outputs.json: its grammar needed too much" in last.error
    assert plain.tokens([prompt(1)], params(Form(regex="[a-z]{30}"), max_tokens=40)) == expected


def test_a_grammar_that_a_busy_machine_delays_asks_to_send_again(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
):
    """HTTP 503 with Retry-After, not 400."""
    form = Form(regex="delayed[0-9]{2}")
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process, "COMPILE_WALL", 1e-6)
        plain.client.submit(EngineRequest("late", prompt(1), params(form, max_tokens=20)))
        ended: list[Any] = []
        while not ended:
            ended = [out for out in plain.client.outputs() if out.finish is not None]
    assert (ended[0].finish, ended[0].error_kind) == ("error", "overloaded")
    assert "send the request again" in ended[0].error
    assert plain.tokens([prompt(1)], params(form, max_tokens=20))[0]


def test_a_process_that_is_killed_is_replaced(plain: Engine):
    form = Form(regex="[0-9]{3}-[a-z]{30}")
    expected = plain.tokens([prompt(2)] * 2, params(form, max_tokens=40))
    for pid in processes(plain):
        os.kill(pid, signal.SIGKILL)
    # The two rows share a process. Each enters a new one.
    assert plain.tokens([prompt(2)] * 2, params(form, max_tokens=40)) == expected


def test_many_distinct_bombs_use_bounded_memory(plain: Engine):
    """(24 of them took 19 GB.)"""
    before = _resident()
    names = {f"bomb{number}" for number in range(4)}
    for number, name in enumerate(sorted(names)):
        form = Form(regex="((((a{100}){100}){100}){100})" + "x" * number)
        plain.client.submit(EngineRequest(name, prompt(3), params(form)))
    ended = finished(plain, names)
    assert all("the limit is 10000" in (one.error or "") for one in ended.values())
    assert _resident() - before < 64 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_many_processes_that_end_at_once_do_not_end_their_program() -> None:
    """A signal handler that reaped them ran within itself and raised."""
    fork_server = GrammarForkServer()
    first = fork_server.fork()
    program = fork_server.close
    for _ in range(6):
        for process in [fork_server.fork() for _ in range(16)]:
            process.close()
    assert fork_server.close is program
    assert first.alive
    asked = Form(regex="a")
    assert fork_server.fork().check(asked, 1.0) is None


def test_a_spare_process_serves_one_grammar_and_a_killed_one_none() -> None:
    fork_server = GrammarForkServer()
    fork_server.fork_spare()
    spare = fork_server._spare
    fork_server.fork_spare()  # there is one already
    assert fork_server._spare is spare
    assert fork_server.fork() is spare
    assert fork_server.fork() is not spare
    fork_server.fork_spare()
    killed = fork_server._spare
    assert killed is not None
    assert fork_server.close is not None
    assert fork_server.server is not None
    program = fork_server.server.process.pid
    while killed.ready():
        for pid in _children(program):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    process = fork_server.fork()
    assert process is not killed
    assert process.check(Form(regex="a"), 1.0) is None


def doubling(depth: int) -> dict[str, Any]:
    """A schema of size 2^depth, if every reference is expanded."""
    parts = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{depth}": {"type": "null"}}}


EXPANDING: dict[str, tuple[dict[str, Any], str | None]] = {
    "$ref, 2^25": (doubling(25), None),
    "allOf of anyOf, 2^20": (
        {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": -n}]} for n in range(20)]},
        "too large",
    ),
    "a file": ({"$ref": "file:///etc/passwd"}, "does not fetch"),
}


@pytest.mark.parametrize("name", EXPANDING)
def test_references_and_products_stay_within_their_limits(reader: Reader, name: str) -> None:
    """Each ends soon, in a process with limits: it is refused, or its references are never expanded."""
    schema, refusal = EXPANDING[name]
    memory, began = _resident(), time.process_time()
    if refusal is not None:
        with pytest.raises(ValidationError, match=refusal):
            ConstraintChecker().checked(Form(json=schema))
    else:
        constraint = ConstraintChecker().checked(Form(json=schema))
        assert reader.compiler.submit(constraint).result(60).bytes < 64 << 20
    assert time.process_time() - began < 2
    assert _resident() - memory < 64 << 20
