"""Format tables: a format is a table of parser states, each with the markers that lead to other states.

Knows the notation. Does not know any format, and does not parse (`stream_parser` does).

    "content": ParserState("content", {"<tool_call>": "call"}),
    "call": ParserState("call", next_state="close"),
    "close": ParserState("close", {"</tool_call>": "content"}),

A state's kind defines the meaning of its text:

    content, reasoning   emitted as such, up to a marker
    skip                 white space, then a marker; anything else leads to `fallback`
    close                the same, after a complete call
    name, key, value     a tool's name, a parameter's name, its value: all text up to a marker
    text                 a value that is a string, whatever the tool's schema says
    head                 the text up to a marker chooses the next state, by `routes`
    call                 a JSON object with name and arguments
    arguments            the arguments: one object in `dialect`
    python               a Python call expression
    elements             the arguments: nested elements, `prefix` before each tag

A prefix of a target: "end " (the call is complete), "peek " (do not consume the marker: it belongs to the next state),
"drop " (the marker is layout: never emit it), "show " (the marker is text), "bare " (a call without its first marker, which
cannot end reasoning).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

Kind = Literal[
    "content", "reasoning", "skip", "close", "name", "key", "value", "text", "head", "call", "arguments", "python",
    "elements",
]  # fmt: skip
READERS = ("call", "arguments", "python", "elements")


@dataclass(frozen=True, slots=True)
class Transition:
    """The effect of a marker."""

    state: str
    ends: bool = False
    consumes: bool = True
    restorable: bool = True
    is_text: bool = False


@dataclass(frozen=True)
class ParserState:
    kind: Kind
    markers: Mapping[str, str] = field(default_factory=dict)
    """Marker -> target."""
    next_state: str = ""
    """Next state when a reader is done."""
    fallback: str = ""
    """Next state for text that is not a marker (skip, close); unset: such text is malformed."""
    routes: tuple[tuple[str, str], ...] = ()
    """For a head: substring -> target, first match; if the target is a reader, a tool's name follows the substring."""
    allows_spaces: bool = False
    """The head may contain white space."""
    is_call_id: bool = False
    """The head is the call's id."""
    known_only: bool = False
    """The name must be a known tool's."""
    verbatim: bool = False
    """For a value: line breaks at its start and end belong to it."""
    dialect: str = "json"
    prefix: str = ""
    """What precedes each tag of an element."""


HOW = ("end", "peek", "drop", "show", "bare")


class MarkerPattern:
    """A state's markers, compiled for searching."""

    def __init__(self, markers: Mapping[str, str]):
        self.transitions = {mark: parse_target(target) for mark, target in markers.items()}
        texts = sorted(markers, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self.prefixes = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self.max_prefix = max(map(len, texts), default=1) - 1

    def partial_length(self, text: str, start: int) -> int:
        """Number of characters at the end of text[start:] that may be the start of a marker."""
        for length in range(min(self.max_prefix, len(text) - start), 0, -1):
            if text[-length:] in self.prefixes:
                return length
        return 0


def parse_target(target: str) -> Transition:
    how, space, to = target.partition(" ")
    if not space or how not in HOW:
        how, to = "", target
    return Transition(to, how == "end", how != "peek", how != "drop", how == "show")


@dataclass(frozen=True, slots=True)
class Parameter:
    """How a grammar writes one parameter; KEY is a placeholder for its name."""

    begin: str
    """Before a JSON value."""
    end: str
    text_begin: str = ""
    """Before a verbatim string, if that differs from `begin`."""
    before_end: str = ""
    """Between a JSON value and the end."""


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """How a grammar writes a call; NAME is a placeholder for the tool's name."""

    begin: str
    """Before the arguments, which are JSON unless `parameter` or `dialect` is set."""
    end: str
    separator: str = ""
    prefix: str = ""
    """Before all calls."""
    suffix: str = ""
    single: bool = False
    """The format allows only one call."""
    parameter: Parameter | None = None
    """Each argument has markers of its own."""
    dialect: str = ""
    """The arguments are in this dialect (`literal_constraints`)."""


@dataclass(frozen=True, slots=True)
class Alias:
    """What a model means by the name of a tool that does not exist."""

    tool: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    """The model's name of a parameter -> the tool's."""
    adds: Mapping[str, bool | int | str] = field(default_factory=dict)
    """Arguments that the name implies."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    states: Mapping[str, ParserState]
    start: str = "content"
    known_only: bool = False
    """A call of an unknown tool is content."""
    ends_text: bool = False
    """Text after a call is not part of the answer."""
    types_apply: bool = False
    """The schema's types also apply to arguments that have types of their own."""
    untyped_text: bool = False
    """A parameter without a type in the schema is a string."""
    checks_schema: bool = False
    """A call waits for its end: parameters that the tool lacks are dropped, and a call with a parameter twice or without
    a required one is text."""
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    """Name of an unknown tool -> the tool that is called if the request has it. Only with `checks_schema`."""
    wrappers: tuple[str, ...] = ()
    """Parameters in which models write all arguments, although the tool has no parameter of that name."""
    ids: Literal["random", "short"] = "random"
    """short: nine letters and digits, which some templates require."""
    cut_starts_call: bool = False
    """Where the output ends inside a call: the name is enough for a call, complete parameters make its arguments, and
    what precedes the name is not text. Otherwise the call stays as it is, and a call without arguments is text."""
    cut_marker: str = ""
    """A marker that the end of the output cuts off is not text if it begins so."""
    detect: tuple[str, ...] = ()
    """A chat template that contains all these texts uses the format."""
    call: CallTemplate | None = None
    splits_reasoning: bool = False
    """The format also separates reasoning from content."""


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks reasoning."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    forced_end: str = ""
    """What ends reasoning that exceeds its budget; "": the first end marker."""
    separator: str = ""
    """What models write between the end marker and the answer."""
    label: str = ""
    """A word that may follow the start marker, and is not emitted."""
    bare_label: bool = False
    """The label may begin the output without a start marker, on a line of its own."""
    answer_marker: str = ""
    """What an answer must begin with."""
    starts_in_reasoning: bool = False
    """The output begins with reasoning, even without a start marker."""
    may_repeat: bool = False
    """Reasoning may occur between parts of the answer."""
    ended_by_call: bool = False
    """A tool call also ends reasoning, and markers that are out of place are not emitted."""
    prepend: str = ""
    """Reasoning is content, after this text."""
    never_empty: bool = False
    """The request may ask that the reasoning is the content if there is neither content nor a call."""
    text_if_off: bool = False
    """If the request turns thinking off, the markers are text."""
    answer_frame: tuple[str, ...] = ()
    """Markers around the answer, which are not emitted."""
    detect: tuple[str, ...] = ()
    tool_format: str = ""
    """Name of the tool format that separates reasoning and content itself."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Texts with which a prompt opens reasoning."""
        return (*self.starts, *(start + self.label for start in self.starts))

    def is_open(self, prompt: str, last: str = "") -> bool | None:
        """Whether a prompt ends inside reasoning (True) or after it (False); None: it does not show.

        `last`: the message that the output continues, if any.
        """
        if self.tool_format:
            return None
        markers = self.openings, self.ends
        if last:
            starts, ends = (
                max((last.rfind(mark) for mark in marks), default=-1) for marks in markers
            )
            return None if starts == ends else starts > ends
        prompt = prompt.rstrip()
        if markers[0] and prompt.endswith(markers[0]):
            return True
        return False if markers[1] and prompt.endswith(markers[1]) else None


@dataclass(frozen=True)
class ParserTable:
    """A tool format and a reasoning format, combined."""

    states: Mapping[str, ParserState]
    start: str
    calls: ToolFormat
    prepend: str = ""
    """Text at the start of the content."""

    @cached_property
    def patterns(self) -> Mapping[str, MarkerPattern]:
        """State name -> its compiled markers."""
        return {name: MarkerPattern(state.markers) for name, state in self.states.items()}


def with_markers(state: ParserState, markers: Mapping[str, str]) -> ParserState:
    return replace(state, markers={**state.markers, **markers})


PLAIN = ToolFormat({"content": ParserState("content")})


def compose(
    tools: ToolFormat | None, reasoning: ReasoningFormat | None, reasoning_open: bool | None = None
) -> ParserTable:
    """Combine two formats. `reasoning_open`: the prompt ends inside reasoning (True), after it (False), or unknown (None)."""
    tools = tools or PLAIN
    states, begin = dict(tools.states), tools.start
    if reasoning is None or tools.splits_reasoning:
        return ParserTable(states, begin, tools)
    if reasoning.prepend:
        states["first"] = ParserState(
            "skip", dict.fromkeys(reasoning.starts, f"drop {begin}"), fallback=begin
        )
        return ParserTable(states, "first", tools, reasoning.prepend)
    inside = reasoning.starts_in_reasoning if reasoning_open is None else reasoning_open
    starts = dict.fromkeys(
        reasoning.starts, "drop reasoning label" if reasoning.label else "reasoning"
    )
    ends = dict.fromkeys(reasoning.ends, f"drop {begin}")
    if reasoning.label:
        states["reasoning label"] = ParserState(
            "skip", {reasoning.label: "drop reasoning"}, fallback="reasoning"
        )
    if reasoning.ended_by_call:
        calls = {mark: to for mark, to in states["content"].markers.items() if " " not in to}
        ends = {**calls, **dict.fromkeys(reasoning.starts, "drop reasoning"), **ends}
        strays = dict.fromkeys(reasoning.ends, "drop content")
        states["content"] = with_markers(states["content"], strays)
    states["reasoning"] = ParserState("reasoning", ends)
    bare = {f"{reasoning.label}\n": "drop reasoning"} if reasoning.bare_label else {}
    first = {**starts, **bare}
    states["first"] = ParserState("skip", first, fallback="reasoning" if inside else begin)
    if reasoning.may_repeat:
        states["content"] = with_markers(states["content"], starts)
    for name in ("content", begin):
        frame = dict.fromkeys(reasoning.answer_frame, f"drop {name}")
        states[name] = with_markers(states[name], frame)
    return ParserTable(states, "first", tools)
