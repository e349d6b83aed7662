"""Untrusted chat templates, rendered in child processes that have little memory and can be killed.

A request may bring its own template (`--trust-request-chat-template`). `jinja_sandbox` cannot interrupt one long
Python operation; killing the process does. Knows processes and their limits. Does not know HTTP.

    parent -> child: {"template": ..., "messages": ..., "options": ..., "specials": ...}
    child -> parent: {"text": ...}, or {"error": ..., "parameter": ...}       each as its length and JSON
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import IO, Any

import msgspec

from quire import env
from quire.errors import QuireError, ValidationError
from quire.frontend.chat import ChatOptions, rendered
from quire.frontend.chat_template import ChatTemplate, plain
from quire.frontend.jinja_sandbox import MOST_TEXT, deadline

SECONDS = 5.0
MOST_MEMORY = 512 << 20
MOST_ANSWER = 8 * MOST_TEXT  # bytes; a character takes six at most
GRACE_S = 2.0  # added to the template's time limit: the process may have to start
AT_ONCE = 2
NO_ANSWER = "the template of this request exceeds its limit of {}, or its limit of {} MiB of memory"


class UntrustedTemplateRenderer:
    """Renders in one process per calling thread; reuses a process until it times out or dies."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds = seconds
        self.idle: list[subprocess.Popen[bytes]] = []
        self.close = weakref.finalize(self, _close, self.idle)
        """Ends the idle processes; also runs when the renderer is garbage-collected."""

    def render(
        self, messages: Sequence[Any], options: ChatOptions, specials: Mapping[str, Any]
    ) -> str:
        """Render the prompt with `options.template`, which is a text, not a path. Blocks: call it in a thread.

        Raises:
            ValidationError: the template fails, or exceeds its time or memory.
        """
        given = replace(options, template=None, seconds=self.seconds)
        job = {
            "template": options.template, "messages": plain(list(messages)),
            "options": plain(asdict(given)), "specials": plain(dict(specials)),
        }  # fmt: skip
        process, answer = self._process(), None
        try:
            answer = receive_answer(process, job, time.monotonic() + self.seconds + GRACE_S)
        finally:
            if answer is None:
                end(process)
            else:
                self.idle.append(process)
        if answer is None:
            why = NO_ANSWER.format(f"{self.seconds:g} s", MOST_MEMORY >> 20)
            raise ValidationError(why, parameter="chat_template")
        if "text" in answer:
            return str(answer["text"])
        raise ValidationError(answer["error"], parameter=answer["parameter"])

    def _process(self) -> subprocess.Popen[bytes]:
        while self.idle:
            try:
                process = self.idle.pop()
            except IndexError:  # another thread took it
                break
            if process.poll() is None:
                return process
            end(process)
        return start()


def _close(idle: list[subprocess.Popen[bytes]]) -> None:
    while idle:
        end(idle.pop())


def start() -> subprocess.Popen[bytes]:
    """Start a process without the environment variables that hold secrets, in case a template escapes the sandbox."""
    command = [sys.executable, "-P", "-m", "quire.frontend.untrusted_templates"]
    environment = env.bare_for_a_child()
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def receive_answer(
    process: subprocess.Popen[bytes], job: Any, until: float
) -> dict[str, Any] | None:
    """Send the job and return the answer; None if the process died or did not answer in time."""
    if process.stdin is None or process.stdout is None:
        return None
    try:
        write(process.stdin, job)
        pipe = process.stdout.fileno()
        size = int.from_bytes(read(pipe, 4, until))
        found = msgspec.json.decode(read(pipe, size, until)) if size < MOST_ANSWER else None
    except (OSError, EOFError):
        return None
    return found if isinstance(found, dict) else None


def write(pipe: IO[bytes], message: Any) -> None:
    data = msgspec.json.encode(message)
    pipe.write(len(data).to_bytes(4) + data)
    pipe.flush()


def read(pipe: int, size: int, until: float) -> bytes:
    """Raises EOFError: the pipe is closed, or `until` has passed."""
    found, ready = bytearray(), select.poll()  # select.select handles only descriptors below 1,024
    ready.register(pipe, select.POLLIN)
    while len(found) < size:
        left = until - time.monotonic()
        if left <= 0 or not ready.poll(1000 * left):
            raise EOFError
        piece = os.read(pipe, min(size - len(found), 1 << 20))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


# -- in the child process -------------------------------------------------------------------------
def serve() -> None:
    """Answer jobs until stdin closes or a resource limit ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the server
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while len(head := sys.stdin.buffer.read(4)) == 4:
        job = msgspec.json.decode(sys.stdin.buffer.read(int.from_bytes(head)))
        options = ChatOptions(**job["options"])
        # Kills this process even if the parent is dead.
        signal.alarm(int(options.seconds + GRACE_S) + 1)
        write(sys.stdout.buffer, answered(job, options))
        signal.alarm(0)


def answered(job: dict[str, Any], options: ChatOptions) -> dict[str, Any]:
    try:
        template = ChatTemplate(job["template"])
        with deadline(options.seconds):
            return {"text": rendered(template, job["messages"], options, job["specials"])}
    except QuireError as error:
        parameter = getattr(error, "parameter", "chat_template")
        return {"error": str(error), "parameter": parameter}


if __name__ == "__main__":
    serve()
