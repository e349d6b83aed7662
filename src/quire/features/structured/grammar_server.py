"""Grammar server: a program that reads the vocabulary once and forks a process per grammar, which can be killed alone.

Knows how a process limits itself. Does not know the engine or HTTP. It imports no torch, and has one thread, so that it
can fork.

    client -> fork server:   Prepare; then FORK, with a socket, and END
    client -> grammar:  Check, Compile, Begin, Step, LookAhead and Drop, on that socket

The kernel kills a grammar's process that exceeds its processor time for a message (ITIMER_PROF) or its memory
(RLIMIT_AS), so llguidance need not check a clock. When the client ends, the fork server kills all its children
and ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import sys

import msgspec

from quire.errors import ConfigError
from quire.features.structured.errors import UnsupportedConstraint, is_panic
from quire.features.structured.grammar_messages import (
    END,
    FORK,
    ORDER,
    STEP_CPU_S,
    Begin,
    Check,
    Compile,
    CompileReply,
    Drop,
    ForcedReply,
    LookAhead,
    LookAheadReply,
    MaskReply,
    Prepare,
    PrepareReply,
    Step,
)
from quire.features.structured.grammar_rows import GrammarStates
from quire.features.structured.matcher import PANIC, make_matcher
from quire.features.structured.validate import fault_of
from quire.features.structured.vocabulary import Vocabulary
from quire.processes.child import leave_signals_to_parent
from quire.processes.isolated_child import ProcessEnded, receive, send

ROW_CPU_S = 0.02  # added for each row of the message
REAP_S = 0.5  # children that have ended stay zombies no longer, also without orders
TOKENS_A_ROW = 200  # feeding this many tokens again takes as long as a row's mask
CHECK_MEMORY = 512 << 20
encode = msgspec.msgpack.encode


class ForkServer:
    def __init__(self, control: socket.socket):
        self.control = control
        self.pids: dict[int, int] = {}
        self.vocabulary: Vocabulary | None = None

    def run(self) -> None:
        message = msgspec.msgpack.decode(receive(self.control), type=Prepare)
        send(self.control, encode(self._prepare(message)))
        del message
        gc.collect()
        gc.freeze()  # a collection in a child would copy shared pages
        self.control.settimeout(REAP_S)
        try:
            while self._next():
                pass
        finally:
            for pid in self.pids.values():
                os.kill(pid, signal.SIGKILL)  # the pid stays valid until `_reap` waits for it

    def _prepare(self, message: Prepare) -> PrepareReply:
        if (text := message.tokenizer) is None:
            return PrepareReply()
        self.vocabulary = Vocabulary(lambda: text, message.size)
        try:
            return PrepareReply((self.vocabulary.tokenizer.vocab_size + 31) // 32)
        except ConfigError as error:
            return PrepareReply(error=str(error))

    def _reap(self) -> None:
        """Forget children that have ended. Not in a signal handler: a second signal would run it within itself."""
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                for number in [one for one, its in self.pids.items() if its == pid]:
                    del self.pids[number]

    def _next(self) -> bool:
        """Execute the client's next order; False: the client has closed the socket."""
        self._reap()
        try:
            data, files, _, _ = socket.recv_fds(self.control, ORDER.size, 1)
        except TimeoutError:
            return True
        if len(data) < ORDER.size:
            return False
        order, number = ORDER.unpack(data)
        if order == FORK and files:
            self._fork(number, files)
        elif order == END and (pid := self.pids.get(number)) is not None:
            os.kill(pid, signal.SIGKILL)
        return True

    def _fork(self, number: int, files: list[int]) -> None:
        pid = os.fork()
        if pid:
            self.pids[number] = pid
            for file in files:
                os.close(file)
            return
        code = 1
        try:
            self.control.close()
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), 2)  # hide backtraces of a killed grammar
            GrammarServer(socket.socket(fileno=files[0]), self.vocabulary).run()
            code = 0
        finally:
            os._exit(code)


class GrammarServer:
    """The process of one grammar."""

    def __init__(self, pipe: socket.socket, vocabulary: Vocabulary | None):
        self.pipe, self.vocabulary = pipe, vocabulary
        self.states: GrammarStates | None = None
        self._faults, self._bytes = -1, 0
        self._limited = False

    def run(self) -> None:
        kinds = Check | Compile | Begin | Step | LookAhead | Drop
        with contextlib.suppress(ProcessEnded):
            while True:
                message = msgspec.msgpack.decode(receive(self.pipe), type=kinds)
                match message:
                    case Check():
                        self._limit(message.cpu_s, CHECK_MEMORY)
                        send(self.pipe, encode(CompileReply(error=fault_of(message.constraint))))
                    case Compile():
                        os.nice(message.nice)
                        self._limit(message.cpu_s, message.memory)
                        send(self.pipe, encode(self._compile(message)))
                    case _ if self.states is None:
                        return
                    case Begin():
                        for_rows(1 + len(message.outputs) // TOKENS_A_ROW)
                        self.states.begin(message.number, message.settings, message.outputs)
                        self._fill([message.number])
                    case Step():
                        for_rows(len(message.rows))
                        forced = [self.states.feed(*row) for row in message.rows]
                        send(self.pipe, encode(ForcedReply(forced)))
                        self._fill([number for number, _ in message.rows])
                    case LookAhead():
                        for_rows(sum(1 + most for _, _, most in message.rows))
                        found = [self.states.look_ahead(*row) for row in message.rows]
                        drafts, over, masks = zip(*found, strict=True)
                        send(self.pipe, encode(LookAheadReply(list(drafts), list(over))))
                        if any(masks):
                            send(self.pipe, b"".join(mask for own in masks for mask in own))
                    case Drop():
                        self.states.drop(message.number)
                signal.setitimer(signal.ITIMER_PROF, 0)

    def _limit(self, cpu_s: float, memory: int) -> None:
        """Set the kernel's limits of this process: processor time, and memory above what the fork server already uses."""
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        if self._limited:
            return
        self._limited = True
        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def _compile(self, message: Compile) -> CompileReply:
        vocabulary = self.vocabulary
        if vocabulary is None:
            return CompileReply(error="the vocabulary is missing")
        words = (vocabulary.tokenizer.vocab_size + 31) // 32
        try:
            self.states = GrammarStates(
                lambda: make_matcher(message.constraint, vocabulary),
                vocabulary.accepts,
                words,
            )
        except (UnsupportedConstraint, ConfigError) as error:
            return CompileReply(error=str(error), cause=repr(error.__cause__ or ""))
        except BaseException as error:
            if not is_panic(error):
                raise
            return CompileReply(error=PANIC)
        return CompileReply(self._num_taken())

    def _fill(self, numbers: list[int]) -> None:
        if self.states is None:
            return
        masks_NW = self.states.fill(numbers)
        states = [self.states.states[number] for number in numbers]
        reply = MaskReply(
            [one.over for one in states], [one.error for one in states], self._num_taken()
        )
        send(self.pipe, encode(reply))
        send(self.pipe, memoryview(masks_NW.data).cast("B"))

    def _num_taken(self) -> int:
        """Private memory of this process in bytes. Reads it from the kernel again after 1 MiB of page faults."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if self._faults < 0 or faults - self._faults > 256:
            self._faults, self._bytes = faults, _private() or 4096 * faults
        return self._bytes


def _private() -> int:
    """Private memory in bytes; 0 if the kernel does not report it."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("Private")]
    except OSError:
        return 0
    return sum(1024 * int(line[1]) for line in lines)


def for_rows(number: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, STEP_CPU_S + number * ROW_CPU_S)


def main() -> None:
    leave_signals_to_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ProcessEnded):
        ForkServer(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
