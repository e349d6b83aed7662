"""`quire chat`: talk with a model, in this process or on a server.

Knows the terminal. `completion_client.py` gets the answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

from quire import env
from quire.cli.answer_printer import print_answer, print_notice
from quire.cli.completion_client import (
    SAMPLING,
    ClientOptions,
    CompletionClient,
    connect,
    read,
)
from quire.errors import QuireError
from quire.logging import configure
from quire.startup_timer import no_report

PROMPT = "> "
HISTORY_LINES = 1000
HELP = """\
/help                 this list
/clear                start a new conversation (also /reset)
/system [TEXT]        set the system message and start a new conversation; without TEXT, remove it
/set [NAME VALUE]     set a sampling parameter: max_tokens, temperature, top_p or seed; /set NAME: back to the default
/exit                 leave (also Ctrl-D)
//TEXT                send a message that begins with a slash
Ctrl-C stops an answer, or clears the line. Up and Down recall earlier lines."""


def main(argv: Sequence[str]) -> int:
    """Chat until the end of input; returns the exit status."""
    return run_in_terminal("chat", argv, conversation)


def run_in_terminal(
    command: str, argv: Sequence[str], session: Callable[[ClientOptions, CompletionClient], int]
) -> int:
    """Connect to the model that the flags name and run `session`. An error is one line on stderr and exit status 1."""
    options = read(command, argv)
    configure(command, options.config.observe.log_level)
    report = no_report
    if options.url is None and sys.stderr.isatty():
        print_notice(f"Loading {options.config.model.model} ...")
        report = print_long_stage
    try:
        with closing(connect(options, report)) as client:
            return session(options, client)
    except KeyboardInterrupt:  # while it loads
        return 130
    except QuireError as why:
        print_notice(f"quire {command}: error: {why}")
        return 1


def print_long_stage(stage: str, share: float) -> None:
    """Of the stages of a start, the one that happens once and takes long; others have bars, or are short."""
    if stage.startswith("compiling"):
        print_notice(f"{stage} ...")


class Conversation:
    """The messages so far, and the commands that change them."""

    def __init__(self, client: CompletionClient, system_prompt: str | None):
        self.client = client
        self.begin(system_prompt)

    def begin(self, system_prompt: str | None) -> None:
        self.system_prompt = system_prompt
        self.messages: list[dict[str, str]] = []
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})

    def ask(self, text: str, stats: bool) -> None:
        """Send a message and show the answer. If it fails, the conversation continues without the message.

        Raises:
            QuireError: it failed.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            answer = print_answer(self.client.chat(self.messages), stats)
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def command(self, line: str) -> str:
        """Carry out a line that begins with a slash; returns the notice to print."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name == "help":
            return HELP
        if name in ("clear", "reset"):
            self.begin(self.system_prompt)
            return "new conversation"
        if name == "system":
            self.begin(rest or None)
            return f"new conversation {'with' if rest else 'without'} a system message"
        if name == "set":
            return self._set(rest)
        return f"unknown command /{name}; /help lists the commands, and //{name} sends the text"

    def _set(self, rest: str) -> str:
        sampling = self.client.sampling
        name, _, value = rest.replace("=", " ", 1).partition(" ")
        if name and name not in SAMPLING:
            return f"{name} cannot be set; choose from {', '.join(SAMPLING)}"
        if name and not value.strip():
            sampling.pop(name, None)
        elif name:
            try:
                sampling[name] = SAMPLING[name](value)
            except ValueError:
                return f"{name}={value.strip()}: must be a number"
        values = (f"{each}={sampling[each]}" for each in SAMPLING if each in sampling)
        return ", ".join(values) or "all sampling parameters have the model's defaults"


def conversation(options: ClientOptions, client: CompletionClient) -> int:
    """Send messages and show answers in turn."""
    talk = Conversation(client, options.system_prompt)
    if options.quick is not None:
        talk.ask(options.quick, options.stats)
        return 0
    print_notice(
        f"Chatting with {client.name}. Ctrl-C stops an answer, Ctrl-D exits, /help lists commands."
    )
    for line in input_lines():
        if line.startswith("/") and not line.startswith("//"):
            print_notice(talk.command(line))
            continue
        try:
            talk.ask(line.removeprefix("/"), options.stats)
        except QuireError as why:
            print_notice(f"error: {why}")
    return 0


def input_lines() -> Iterator[str]:
    """The lines that the user types, until the end of input; skips empty lines. Ctrl-C clears a line."""
    typed = sys.stdin.isatty()
    with _history() if typed else nullcontext():
        while True:
            try:
                line = input(PROMPT if typed else "").strip()
            except EOFError:
                if typed:
                    print_notice("")
                return
            except KeyboardInterrupt:
                print_notice("\n(Ctrl-D or /exit leaves)" if typed else "interrupted")
                if typed:
                    continue
                return
            if line in ("/exit", "/quit"):
                return
            if line:
                yield line


@contextmanager
def _history() -> Iterator[None]:
    """Line editing, and a history of lines that outlives the session, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = Path(str(env.get("CACHE_ROOT"))).expanduser() / "chat_history"
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
