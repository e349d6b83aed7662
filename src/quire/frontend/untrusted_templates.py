"""Untrusted chat templates, rendered in child processes that have little memory and can be killed.

A model by strangers has one, and a request may bring its own (`--trust-request-chat-template`). `jinja_sandbox` cannot interrupt one long
Python operation; killing the process does. Knows processes and their limits. Does not know HTTP.

    parent -> child: {"template": ..., "messages": ..., "options": ..., "specials": ...}      of a request
                     {"source": ..., "variables": ..., "seconds": ...}                         of a model
    child -> parent: {"text": ...}, or {"error": ..., "parameter": ...}       JSON
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec

from quire.errors import QuireError, ValidationError
from quire.frontend.chat import ChatOptions, rendered
from quire.frontend.chat_template import ChatTemplate, plain
from quire.frontend.jinja_sandbox import MOST_TEXT, deadline, render_template
from quire.processes.child import leave_signals_to_parent
from quire.processes.isolated_child import IsolatedChild, ProcessEnded, receive, send

MODULE = "quire.frontend.untrusted_templates"
SECONDS = 5.0
MOST_MEMORY = 512 << 20
MOST_ANSWER = 8 * MOST_TEXT  # bytes; a character takes six at most
GRACE_S = 2.0  # added to the template's time limit: the process may have to start
MAX_CONCURRENT_RENDERS = 2
NO_ANSWER = "the template of this {} exceeds its limit of {:g} s, or its limit of {} MiB of memory"


class UntrustedTemplateRenderer:
    """Renders in one process per calling thread; reuses a process until it times out or dies."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds = seconds
        self.idle: list[IsolatedChild] = []
        self.close = weakref.finalize(self, _close, self.idle)
        """Ends the idle processes; also runs when the renderer is garbage-collected."""

    def render(
        self, messages: Sequence[Any], options: ChatOptions, specials: Mapping[str, Any]
    ) -> str:
        """Render the prompt with `options.template`, which is a text, not a path. Blocks: call it in a thread.

        Raises:
            ValidationError: the template fails, or exceeds its time or memory.
        """
        plain_options = replace(options, template=None, seconds=self.seconds)
        job = {
            "template": options.template, "messages": plain(list(messages)),
            "options": plain(asdict(plain_options)), "specials": plain(dict(specials)),
        }  # fmt: skip
        return self._answered(job, self.seconds, "request")

    def render_source(self, source: str, variables: Mapping[str, Any], seconds: float) -> str:
        """As `jinja_sandbox.render_template`, for the template of a model. `variables` are plain data. Blocks.

        Raises:
            ValidationError: as `render`.
        """
        job = {"source": source, "variables": variables, "seconds": seconds}
        return self._answered(job, seconds, "model")

    def prepare(self) -> None:
        """Start a process before the first template comes; does not wait for it."""
        self.idle.append(IsolatedChild(MODULE))

    def _answered(self, job: dict[str, Any], seconds: float, whose: str) -> str:
        try:
            message = msgspec.json.encode(job)
        except (
            UnicodeEncodeError,
            OverflowError,
            TypeError,
        ) as error:  # half a character, huge numbers
            raise ValidationError(
                f"the conversation cannot be sent to the chat template: {error}",
                parameter="messages",
            ) from None
        answer = self._ask(message, time.monotonic() + seconds + GRACE_S)
        if answer is None:
            reason = NO_ANSWER.format(whose, seconds, MOST_MEMORY >> 20)
            raise ValidationError(reason, parameter="chat_template")
        if "text" in answer:
            return str(answer["text"])
        raise ValidationError(answer["error"], parameter=answer["parameter"])

    def _ask(self, job: bytes, until: float) -> dict[str, Any] | None:
        """The answer; None if the process died or did not answer in time."""
        process, answer = self._process(), None
        try:
            answer = msgspec.json.decode(process.ask(job, until, MOST_ANSWER), type=dict[str, Any])
        except (ProcessEnded, msgspec.DecodeError):
            return None
        finally:
            if answer is None:
                process.end()
            else:
                self.idle.append(process)
        return answer

    def _process(self) -> IsolatedChild:
        while self.idle:
            try:
                process = self.idle.pop()
            except IndexError:  # another thread took it
                break
            if process.process.poll() is None:
                return process
            process.end()
        return IsolatedChild(MODULE)


def _close(idle: list[IsolatedChild]) -> None:
    while idle:
        idle.pop().end()


# -- in the child process -------------------------------------------------------------------------
def serve(pipe: socket.socket) -> None:
    """Answer jobs until the socket closes or a resource limit ends this process."""
    leave_signals_to_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ProcessEnded):
        while True:
            job = msgspec.json.decode(receive(pipe))
            seconds = job["seconds"] if "source" in job else job["options"]["seconds"]
            # Kills this process even if the parent is dead.
            signal.alarm(int(seconds + GRACE_S) + 1)
            send(pipe, msgspec.json.encode(answered(job)))
            signal.alarm(0)


def answered(job: dict[str, Any]) -> dict[str, Any]:
    try:
        if "source" in job:
            return {"text": render_template(job["source"], job["variables"], job["seconds"])}
        options, template = ChatOptions(**job["options"]), ChatTemplate(job["template"])
        with deadline(options.seconds):
            return {"text": rendered(template, job["messages"], options, job["specials"])}
    except QuireError as error:
        parameter = getattr(error, "parameter", "chat_template")
        return {"error": str(error), "parameter": parameter}


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
