"""What a format is: a table of states, and in each the texts that lead to another.

Knows the notation. Does not know any format, and reads no text; `engine` does that.

    "content": State("content", {"<tool_call>": "call"}),
    "call": State("call", then="close"),
    "close": State("close", {"</tool_call>": "content"}),

A state's kind says what becomes of the text in it:

    content, reasoning   it is shown as such, until one of the marks
    skip                 white space only, and then a mark; anything else leads to `other`
    close                the same, after a call that is complete
    name, key, value     a tool's name, a parameter's name, its value: all the text before a mark
    text                 a value that is a string, whatever the tool says
    head                 the text before a mark says by `routes` what comes
    call                 a JSON object with a name and arguments
    arguments            one object of `dialect`: the arguments
    python               a call as Python writes it

A target may be preceded by "end " (the call is complete), "peek " (the mark is not taken: it belongs to what
follows) or "drop " (it is layout: not shown, whatever comes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

Kind = Literal[
    "content", "reasoning", "skip", "close", "name", "key", "value", "text", "head", "call", "arguments", "python",
]  # fmt: skip
READERS = ("call", "arguments", "python")


@dataclass(frozen=True, slots=True)
class Transition:
    """Where a mark leads."""

    to: str
    ends: bool = False
    takes: bool = True
    keeps: bool = True


@dataclass(frozen=True)
class ParserState:
    kind: Kind
    on: Mapping[str, str] = field(default_factory=dict)
    """Mark -> target."""
    then: str = ""
    """Where a reader leads when it is done."""
    other: str = ""
    """Where text leads that is no mark (skip, close); unset: it is malformed."""
    routes: tuple[tuple[str, str], ...] = ()
    """Of a head: text that it holds -> target, the first that fits; after the text stands a tool's name."""
    spaced: bool = False
    """A head may have white space in it."""
    gives_id: bool = False
    """The head is the call's id."""
    exact: bool = False
    """Of a value: line breaks at its beginning and its end are its own."""
    dialect: str = "json"


class FormatMarks:
    """A state's marks, ready to be found."""

    def __init__(self, on: Mapping[str, str]):
        self.go = {mark: read(target) for mark, target in on.items()}
        texts = sorted(on, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self.beginnings = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self.longest = max(map(len, texts), default=1) - 1

    def held(self, text: str, start: int) -> int:
        """Characters at the end of text[start:] that may be the beginning of a mark."""
        for length in range(min(self.longest, len(text) - start), 0, -1):
            if text[-length:] in self.beginnings:
                return length
        return 0


def read(target: str) -> Transition:
    how, _, to = target.rpartition(" ")
    return Transition(to, ends=how == "end", takes=how != "peek", keeps=how != "drop")


@dataclass(frozen=True, slots=True)
class Parameter:
    """How one parameter is written when the grammar decides; KEY stands for its name."""

    begin: str
    """Before a value, which is JSON."""
    end: str
    text: str = ""
    """Before a text, which is written as it is; where that is another mark."""
    before_end: str = ""
    """Between JSON and the end."""


@dataclass(frozen=True, slots=True)
class Wrap:
    """How a call is written when the grammar, and not the model, decides; NAME stands for the tool's name."""

    begin: str
    """Before the arguments, which are JSON where nothing below says another form."""
    end: str
    between: str = ""
    first: str = ""
    """Before all calls."""
    last: str = ""
    one: bool = False
    """There cannot be several."""
    parameter: Parameter | None = None
    """Arguments stand one by one, each in marks of its own."""
    dialect: str = ""
    """Arguments are written in this dialect (`literals`)."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    states: Mapping[str, ParserState]
    start: str = "content"
    known_only: bool = False
    """Nothing but a tool's name tells a call from an answer in JSON: another name is no call."""
    ids: Literal["random", "short"] = "random"
    """short: nine letters and digits, as some templates demand."""
    signs: tuple[str, ...] = ()
    """Texts in a chat template by which the format is recognised: all of them are there."""
    wrap: Wrap | None = None
    whole: bool = False
    """It tells reasoning from content as well."""


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its thoughts."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    after: str = ""
    """What models write between the end and the answer."""
    answer: str = ""
    """What an answer must begin with."""
    implied: bool = False
    """The output begins with thoughts, whether it says so or not."""
    again: bool = False
    """Thoughts may come between parts of the answer."""
    calls_end: bool = False
    """A tool call ends the thoughts too."""
    frame: tuple[str, ...] = ()
    """Marks around the answer, which are not shown."""
    signs: tuple[str, ...] = ()
    whole: str = ""
    """The tool format that tells thoughts and content apart itself."""


@dataclass(frozen=True)
class ParserTable:
    """A tool format and a way of reasoning, as one table."""

    states: Mapping[str, ParserState]
    start: str
    known_only: bool = False
    ids: Literal["random", "short"] = "random"

    @cached_property
    def marks(self) -> Mapping[str, FormatMarks]:
        """By state."""
        return {name: FormatMarks(state.on) for name, state in self.states.items()}


def with_marks(state: ParserState, on: Mapping[str, str]) -> ParserState:
    return replace(state, on={**state.on, **on})


PLAIN = ToolFormat({"content": ParserState("content")})


def compose(
    tools: ToolFormat | None, reasoning: ReasoningFormat | None, opened: bool | None = None
) -> ParserTable:
    """`opened`: whether the prompt ends within thoughts (True), or after them (False)."""
    tools = tools or PLAIN
    states = dict(tools.states)
    if reasoning is None or tools.whole:
        return ParserTable(states, tools.start, tools.known_only, tools.ids)
    begin = tools.start
    within = reasoning.implied if opened is None else opened
    starts = dict.fromkeys(reasoning.starts, "reasoning")
    ends = dict.fromkeys(reasoning.ends, f"drop {begin}")
    if reasoning.calls_end:
        ends = {**states["content"].on, **ends}
    states["reasoning"] = ParserState("reasoning", ends)
    states["first"] = ParserState("skip", starts, other="reasoning" if within else begin)
    if reasoning.again:
        states["content"] = with_marks(states["content"], starts)
    for name in ("content", begin):
        frame = dict.fromkeys(reasoning.frame, f"drop {name}")
        states[name] = with_marks(states[name], frame)
    return ParserTable(states, "first", tools.known_only, tools.ids)
