"""`quire chat` and `quire complete`: conversations, and a server at the other end."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from scripted import ScriptedEngine, make_state

from quire.cli import chat as chat_command
from quire.cli import complete as complete_command
from quire.cli.answer_printer import print_answer
from quire.cli.chat import conversation
from quire.cli.completion_client import AnswerDelta, ClientOptions, LocalClient, RemoteClient, read
from quire.config.engine import EngineConfig
from quire.config.server import ServerConfig
from quire.errors import ConfigError, QuireError
from quire.server.app import build_app
from quire.server.process import sockets
from quire.server.state import ServerState


class Parrot:
    """A client whose answer is the last message, word by word."""

    name = "parrot"

    def __init__(self) -> None:
        self.requests: list[list[dict[str, str]]] = []
        self.sampling: dict[str, Any] = {}

    def chat(self, messages: list[dict[str, str]]) -> Iterator[AnswerDelta]:
        self.requests.append([dict(message) for message in messages])
        words = messages[-1]["content"]
        if words == "bad":
            raise QuireError("no such word")
        for word in words.split():
            if word == "STOP":
                raise KeyboardInterrupt
            yield AnswerDelta(word + " ")

    def complete(self, prompt: str) -> Iterator[AnswerDelta]:
        yield AnswerDelta(prompt.upper())

    def close(self) -> None:
        self.requests.clear()


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    left = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read_line)


def options_of(**more: object) -> ClientOptions:
    return ClientOptions(EngineConfig(), **more)  # type: ignore[arg-type]


def test_a_conversation_is_remembered(monkeypatch, capsys):
    typed(monkeypatch, "one two", "", "bad", "three", "/reset", "four")
    parrot = Parrot()
    assert conversation(options_of(system_prompt="be kind"), parrot) == 0
    assert [[one["content"] for one in messages] for messages in parrot.requests] == [
        ["be kind", "one two"],
        ["be kind", "one two", "one two ", "bad"],
        ["be kind", "one two", "one two ", "three"],
        ["be kind", "four"],
    ]
    out, err = capsys.readouterr()
    assert out == "one two \n\nthree \nfour \n"
    assert "error: no such word" in err


def test_an_interrupted_answer_stays_in_the_conversation(monkeypatch, capsys):
    typed(monkeypatch, "a STOP b", "c", "/exit", "never")
    parrot = Parrot()
    conversation(options_of(), parrot)
    assert [one["content"] for one in parrot.requests[1]] == ["a STOP b", "a ", "c"]
    assert capsys.readouterr().out == "a  ...\nc \n"


def test_an_unanswered_message_leaves_the_conversation(monkeypatch):
    typed(monkeypatch, "STOP", "c")
    parrot = Parrot()
    conversation(options_of(), parrot)
    assert [one["content"] for one in parrot.requests[1]] == ["c"]


def test_commands_change_the_conversation_and_the_sampling(monkeypatch, capsys):
    typed(monkeypatch, "/help", "/system be brief", "/set temperature 0.5", "/set seed=7", "/set max_tokens x", "/set top_k 3", "/set seed", "/nothing", "//help", "/system", "b")  # fmt: skip
    parrot = Parrot()
    conversation(options_of(), parrot)
    assert [[one["content"] for one in messages] for messages in parrot.requests] == [
        ["be brief", "/help"],
        ["b"],
    ]
    assert parrot.sampling == {"temperature": 0.5}
    notices = capsys.readouterr().err
    for words in (
        "/clear ",
        "temperature=0.5, seed=7",
        "max_tokens=x: must be a number",
        "top_k cannot be set; choose from max_tokens",
        "unknown command /nothing",
    ):
        assert words in notices


def test_one_message_and_nothing_else_on_stdout(capsys):
    conversation(options_of(quick="hi there", stats=True), Parrot())
    out, err = capsys.readouterr()
    assert out == "hi there \n"
    assert "2 chunks" in err


@contextmanager
def serving(state: ServerState) -> Iterator[str]:
    """A real server in a thread; its URL."""
    config = ServerConfig(host="127.0.0.1", port=0)
    listener = sockets.bind(config)
    server = sockets.http_server(build_app(state), config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    url = sockets.address(config, listener)
    listener.listen()  # or a client may come before the thread does
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()


def test_the_servers_first_model_is_used(capsys):
    engine = ScriptedEngine("Hé", "llo")
    with serving(make_state(engine, api_key="k", served_model_name=["m1", "m2"])) as url:
        flags = ["--url", url, "--api-key", "k", "--max-tokens", "5", "--temperature", "0.5"]
        assert chat_command.main([*flags, "-q", "hi", "--system-prompt", "be"]) == 0
        assert complete_command.main([*flags, "-q", "Once"]) == 0
    assert capsys.readouterr().out == "Héllo\nHéllo\n"
    params = engine.asked[0].params
    assert (params.max_tokens, params.temperature) == (5, 0.5)
    assert engine.asked[0].prompt.text == "s:be\nu:hi\na:"
    assert engine.asked[1].prompt.text == "Once"


@pytest.mark.parametrize(
    ("flags", "words"),
    [([], "answered 401: Unauthorized"), (["--api-key", "k", "--model-name", "other"], "answered 404: The model `other`")],
)  # fmt: skip
def test_a_servers_refusal_is_shown(flags: list[str], words: str, capsys):
    with serving(make_state(ScriptedEngine(), api_key="k")) as url:
        assert chat_command.main(["--url", url, "-q", "hi", *flags]) == 1
    assert words in capsys.readouterr().err


def test_an_error_in_a_stream_is_shown(capsys):
    with serving(make_state(ScriptedEngine("a", QuireError("it broke")))) as url:
        assert chat_command.main(["--url", f"{url}/v1", "-q", "hi"]) == 1
    out, err = capsys.readouterr()
    assert out == "a\n"
    assert "it broke" in err


@pytest.mark.parametrize(("finish", "notice"), [("length", "(cut at 2 tokens)"), ("stop", "")])
def test_an_answer_that_the_maximum_cut_says_so(finish: str, notice: str, capsys):
    with serving(make_state(ScriptedEngine("a", "b", finish=finish))) as url:
        assert chat_command.main(["--url", url, "-q", "hi"]) == 0
        assert complete_command.main(["--url", url, "-q", "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "ab\nab\n"
    assert err.count("(cut") == 2 * bool(notice)
    assert notice in err


def test_reasoning_is_not_part_of_the_answer(monkeypatch, capsys):
    typed(monkeypatch, "hi", "again")
    engine = ScriptedEngine("<think>h", "m</think>y", "es")
    with serving(make_state(engine, reasoning_parser="qwen3")) as url:
        conversation(options_of(), RemoteClient(options_of(url=url)))
    assert capsys.readouterr().out == "yes\nyes\n"
    assert "<think>" not in engine.asked[1].prompt.text


@pytest.fixture(scope="module")
def embedded() -> Iterator[LocalClient]:
    flags = ["--max-model-len", "300", "--temperature", "0"]
    with closing(LocalClient(read("chat", flags))) as client:
        yield client


def test_an_answer_of_a_model_in_this_process_ends_itself(embedded: LocalClient):
    told = list(embedded.chat([{"role": "user", "content": "Tell me a story about a fox."}]))
    assert told[-1].finish_reason == "stop"
    assert 16 < (told[-1].num_tokens or 0) < 256


def test_a_model_in_this_process_is_cut_at_the_given_number_or_its_context(embedded: LocalClient, monkeypatch, capsys):  # fmt: skip
    story = "Tell me a story about a fox."
    monkeypatch.setitem(embedded.sampling, "max_tokens", 7)
    conversation(options_of(quick=story), embedded)
    assert "(cut at 7 tokens)" in capsys.readouterr().err
    monkeypatch.delitem(embedded.sampling, "max_tokens")
    prompt = "fox " * 240
    conversation(options_of(quick=prompt), embedded)
    assert re.search(r"\(cut at [1-5]\d tokens\)", capsys.readouterr().err)


def test_a_model_in_this_process_has_its_reasoning_apart(embedded: LocalClient):
    pieces = list(embedded.chat([{"role": "user", "content": "What is 7 plus 5?"}]))
    reasoning, answer = ("".join(getattr(one, kind) for one in pieces) for kind in ("reasoning", "text"))  # fmt: skip
    assert "7 + 5" in reasoning
    assert "12" in answer
    assert "think>" not in reasoning + answer


def test_a_terminal_shows_reasoning_dimmed(monkeypatch, capsys):
    told = [AnswerDelta(reasoning="h"), AnswerDelta(reasoning="m"), AnswerDelta("yes")]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert print_answer(iter(told), stats=False) == "yes"
    assert capsys.readouterr().out == "\x1b[2mhm\x1b[22m\n\nyes\n"
    control = AnswerDelta("\x1b]52;c;aGk=\x07a\n\tb")
    assert print_answer(iter([control]), stats=False) == control.text
    assert capsys.readouterr().out == "\\x1b]52;c;aGk=\\x07a\n\tb\n"
    monkeypatch.setenv("TERM", "dumb")
    print_answer(iter(told[:2]), stats=False)
    assert capsys.readouterr().out == "hm\n"


def test_a_missing_server_is_reported(capsys):
    assert complete_command.main(["--url", "127.0.0.1:9", "-q", "x"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_an_invalid_address_is_refused():
    with pytest.raises(ConfigError, match="--url ftp://x"):
        RemoteClient(ClientOptions(EngineConfig(), url="ftp://x"))


def test_flags_of_the_engine_work_too():
    found = read("chat", ["a/model", "--max-model-len", "4k", "-q", "hi", "--max_tokens", "7", "--seed", "3"])  # fmt: skip
    assert (found.config.model.model, found.config.model.max_model_len) == ("a/model", 4000)
    assert (found.quick, found.sampling, found.config.model.seed) == ("hi", {"max_tokens": 7}, 3)
    assert found.url is None


@pytest.mark.parametrize("words", [["--no-such-flag"], ["--temperature", "warm"]])
def test_a_mistake_in_the_flags_ends_with_status_2(words: list[str], capsys):
    with pytest.raises(SystemExit) as end:
        read("chat", words)
    assert end.value.code == 2
    assert "quire chat: error:" in capsys.readouterr().err
