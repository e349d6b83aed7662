"""Streaming parser: generated text -> reasoning, content and tool calls, driven by a format's state table.

Knows tables, markers and white space. Does not know any format. The result does not depend on how the text is split
into deltas, the parser reads each character once, and no model output raises an exception:

    a call that is malformed before its name is emitted becomes content, its start included;
    one that is malformed later keeps the arguments emitted so far, and the rest becomes content.

`reasons` records why. White space next to markers is layout and is not emitted.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.frontend.parsers.call_readers import CallObject, PythonCall
from quire.frontend.parsers.format_table import READERS, ParserState, ParserTable, Transition
from quire.frontend.parsers.tool_schemas import ToolSchemas
from quire.frontend.parsers.trimmed_text import TrimmedText
from quire.frontend.parsers.value_reader import MalformedValue, ValueReader, inside, quoted

MOST_WORD = 512  # characters of a name, a key, a head
MOST_REASONS = 8
LETTERS = string.ascii_letters + string.digits
VALUES = ("value", "text")
NAME_ENDS = frozenset(" \t\r\n<:")
CUT = "the output ended within a tool call"


@dataclass(slots=True)
class CallDelta:
    """New data of one call; the first delta has id and name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class ParsedDelta:
    """New reasoning, content and call deltas."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, later: ParsedDelta) -> None:
        self.reasoning += later.reasoning
        self.content += later.content
        for call in later.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


def new_id(kind: str) -> str:
    if kind == "short":
        return "".join(secrets.choice(LETTERS) for _ in range(9))
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


class StreamParser:
    """Parses one output. `feed` it the text, then `finish`.

    Args:
        tools: the tools that may be called, with their parameter types.
        make_id: makes a new call id of a kind (`ParserTable.ids`).
    """

    def __init__(
        self, grammar: ParserTable, tools: ToolSchemas | None = None,
        make_id: Callable[[str], str] = new_id,
    ):  # fmt: skip
        self.grammar, self.tools, self.make_id = grammar, tools or ToolSchemas(), make_id
        self.known_only = grammar.known_only
        self.reasons: list[str] = []
        self.calls = 0
        """Number of calls begun."""
        self.thought = 0
        """Number of characters of reasoning and of its markers."""
        self._state = grammar.states[grammar.start]
        self._marks = grammar.marks[grammar.start]
        self._buffer, self._at = "", 0
        self._calls: list[tuple[CallDelta, list[str]]] = []
        self._flows = {"content": TrimmedText(), "reasoning": TrimmedText(border=True)}
        self._raw: list[str] = []
        self._word: list[str] = []
        self._length = 0
        self._reader: ValueReader | CallObject | PythonCall | None = None
        self._name, self._id, self._key = "", "", ""
        self._announced = False
        self._parameters = 0
        self._text_value = False
        self._line = ""
        self._steps = {
            "content": self._shown, "reasoning": self._shown, "skip": self._skip,
            "close": self._skip, "name": self._spelled, "key": self._spelled,
            "head": self._spelled, "value": self._value,
            "text": self._value, "call": self._read,
            "arguments": self._read, "python": self._read,
        }  # fmt: skip

    @property
    def waiting(self) -> int:
        """Number of characters not classified yet."""
        return len(self._buffer) - self._at

    def feed(self, text: str) -> ParsedDelta:
        """Add text; returns what it settles."""
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        self._run()
        return self._taken()

    def _run(self) -> None:
        while self._at < len(self._buffer):
            try:
                if not self._steps[self._state.kind]():
                    return
            except MalformedValue as error:
                self._give_up(error)

    def _taken(self) -> ParsedDelta:
        calls = [call for call, _ in self._calls]
        for call, parts in self._calls:
            call.arguments = "".join(parts)
        self._calls = []
        return ParsedDelta(self._flows["reasoning"].take(), self._flows["content"].take(), calls)

    def finish(self) -> ParsedDelta:
        """End the output; returns what was withheld."""
        kind = self._state.kind
        if kind in VALUES or (kind == "key" and self._announced):
            self._cut(kind, self._buffer[self._at :])
            self._at = len(self._buffer)
        rest = self._buffer[self._at :]
        self._buffer, self._at = "", 0
        if kind in ("content", "reasoning"):
            self._show(kind, rest)
        elif kind == "close":
            pass  # the call is complete, only its end marker is missing
        elif self._announced:
            self._note(CUT)
        else:
            raw = "".join(self._raw) + rest
            if raw.strip() and self._state.other not in ("content", "reasoning"):
                self._note(CUT)
            self._show("reasoning" if self._state.other == "reasoning" else "content", raw)
        for flow in self._flows.values():
            flow.end()
        return self._taken()

    def _cut(self, kind: str, rest: str) -> None:
        """The output ended inside a parameter: emit its text so far, without closing it."""
        if kind == "key":
            self.arguments((", " if self._parameters else "{") + '"')
        elif not self._text_value:
            self.arguments('"')
        self._value_text("".join(self._word) + self._line + rest)

    # -- where the text goes --------------------------------------------------------------------
    def _show(self, kind: str, text: str) -> None:
        if text:
            self._flows[kind].add(text)
            self.thought += len(text) if kind == "reasoning" else 0

    def _note(self, reason: str) -> None:
        if len(self.reasons) < MOST_REASONS:
            self.reasons.append(reason)

    def _give_up(self, error: MalformedValue) -> None:
        """The call is malformed: return to the content state, which emits its text as content."""
        self._note(f"malformed tool call: {error}")
        if self._announced:
            self._raw.append(error.lost)
        self._end_call()
        self._to(Transition("content"))

    # -- from state to state --------------------------------------------------------------------
    def _take(self, count: int) -> None:
        """Consume text of a call; keep it until the call is announced, as it may become content."""
        if not self._announced:
            self._raw.append(self._buffer[self._at : self._at + count])
        self._at += count

    def _follow(self, mark: str, target: Transition) -> None:
        if "reasoning" in (self._state.kind, self.grammar.states[target.to].kind):
            self.thought += len(mark)
        if target.takes and target.keeps:
            self._take(len(mark))
        elif target.takes:
            self._at += len(mark)
            self._flows["content"].border = True
        if target.ends:
            self._end_arguments()
        self._to(target, marked=True)

    def _to(self, target: Transition, marked: bool = False) -> None:
        """Enter a state. `marked`: by a marker; otherwise the kept text is content (or reasoning)."""
        state, before = self.grammar.states[target.to], self._state.kind
        if before in ("content", "reasoning"):
            self._flows[before].left = True
        self._state, self._marks = state, self.grammar.marks[target.to]
        self._word.clear()
        self._length = 0
        self._reader = None
        if state.kind in ("content", "reasoning"):
            raw = "".join(self._raw)
            self._raw.clear()
            if marked:
                self._flows[state.kind].border = True
            else:
                self._show(state.kind, raw)
        elif state.kind in VALUES:
            text = state.kind == "text"
            self._text_value = text or self.tools.is_text(self._name, self._key)
            self._line = ""
            self.arguments("{" if not self._parameters else ", ")
            self.arguments(quoted(self._key) + ": " + ('"' if self._text_value else ""))
            self._parameters += 1

    # -- CallSink -------------------------------------------------------------------------------
    def begin(self, name: str) -> None:
        """Set the name of the call. Raises MalformedValue."""
        name = name.strip()
        if not name or len(name) > MOST_WORD or any(char.isspace() for char in name):
            raise MalformedValue(f"{name[:40]!r} is not the name of a tool")
        if self.known_only and name not in self.tools:
            raise MalformedValue(f"unknown tool {name[:40]!r}")
        self._name = name

    def arguments(self, text: str) -> None:
        """Emit JSON of the call's arguments; the first piece announces the call."""
        if not self._announced:
            self._announced = True
            self._raw.clear()
            id_ = self._id or self.make_id(self.grammar.ids)
            self._calls.append((CallDelta(self.calls, "", id_, self._name), []))
            self.calls += 1
        if not self._calls or self._calls[-1][0].index != self.calls - 1:
            self._calls.append((CallDelta(self.calls - 1), []))
        self._calls[-1][1].append(text)

    def _end_arguments(self) -> None:
        """End a call whose parameters have markers of their own."""
        self.arguments("}" if self._parameters else "{}")
        self._end_call()

    def _end_call(self) -> None:
        self._announced = False
        self._name = self._id = self._key = ""
        self._parameters = 0

    # -- one method per kind of state; returns False if it needs more text ----------------------
    def _shown(self) -> bool:
        text, at, marks = self._buffer, self._at, self._marks
        found = marks.pattern.search(text, at) if marks.pattern is not None else None
        if found is not None:
            self._show(self._state.kind, text[at : found.start()])
            self._at = found.start()
            self._follow(found[0], marks.go[found[0]])
            return True
        stop = len(text) - marks.held(text, at)
        self._show(self._state.kind, text[at:stop])
        self._at = stop
        return False

    def _skip(self) -> bool:
        text, at, marks = self._buffer, self._at, self._marks
        start = at
        while start < len(text) and text[start].isspace():
            start += 1
        self._take(start - at)
        at = start
        if at == len(text):
            return False
        if len(text) - at <= marks.longest and text[at:] in marks.beginnings:
            return False
        found = marks.pattern.match(text, at) if marks.pattern is not None else None
        if found is not None:
            self._follow(found[0], marks.go[found[0]])
            return True
        if not self._state.other:
            raise MalformedValue(f"{text[at]!r} where one of {list(marks.go)} was expected")
        self._to(Transition(self._state.other))
        return True

    def _spelled(self) -> bool:
        """A name, a key or a head: the text up to a marker."""
        text, at, marks = self._buffer, self._at, self._marks
        found = marks.pattern.search(text, at) if marks.pattern is not None else None
        stop = found.start() if found is not None else len(text) - marks.held(text, at)
        if self._length + stop - at > MOST_WORD:
            self._take(MOST_WORD - self._length)
            raise MalformedValue(f"a {self._state.kind} without an end")
        self._length += stop - at
        self._word.append(text[at:stop])
        self._take(stop - at)
        if found is None:
            return False
        word, state, target = "".join(self._word).strip(), self._state, marks.go[found[0]]
        if state.kind == "name":
            self.begin(word)
        elif state.kind == "key":
            self._key = word
        else:
            target = self._routed(word, state, target)
        self._follow(found[0], target)
        return True

    def _routed(self, head: str, state: ParserState, target: Transition) -> Transition:
        if not state.spaced and len(head.split()) > 1:
            raise MalformedValue(f"{head[:40]!r} where one word was expected")
        for needle, to in state.routes:
            at = head.find(needle)
            if at < 0:
                continue
            if self.grammar.states[to].kind in READERS:
                rest = head[at + len(needle) :]
                stop = next((i for i, char in enumerate(rest) if char in NAME_ENDS), len(rest))
                self.begin(rest[:stop])
                self._id = head if state.gives_id else ""
            return Transition(to, takes=target.takes)
        return target

    def _value(self) -> bool:
        text, at, marks = self._buffer, self._at, self._marks
        found = marks.pattern.search(text, at) if marks.pattern is not None else None
        stop = found.start() if found is not None else len(text) - marks.held(text, at)
        piece = text[at:stop]
        self._at = stop
        if self._text_value:
            self._value_piece(piece, ended=found is not None)
        else:
            self._word.append(piece)
        if found is None:
            return False
        if self._text_value:
            self.arguments('"')
        else:
            value = "".join(self._word)
            value = value if self._state.exact else unwrapped(value)
            self.arguments(self.tools.value(self._name, self._key, value))
        self._follow(found[0], marks.go[found[0]])
        return True

    def _value_piece(self, piece: str, ended: bool) -> None:
        """Emit a piece of a string, without a line break at the start and end of the string (unless `exact`)."""
        if self._state.exact:
            self._value_text(piece)
            return
        if not self._length and piece.startswith("\n"):
            piece, self._length = piece[1:], 1
        elif piece:
            self._length = 1
        whole = self._line + piece
        self._line = ""
        if whole.endswith("\n"):
            whole = whole[:-1]
            self._line = "" if ended else "\n"
        self._value_text(whole)

    def _value_text(self, text: str) -> None:
        if text:
            self.arguments(inside(text))

    def _read(self) -> bool:
        reader = self._reader
        if reader is None:
            reader = self._reader = self._made()
        at = self._at
        if isinstance(reader, ValueReader) and not self._name:
            raise MalformedValue("a call without a name")
        try:
            reached = reader.feed(self._buffer, at)
        except MalformedValue as error:
            self._forward(reader)
            self._take(error.at - at)
            raise
        self._forward(reader)
        self._take(reached - at)
        if not reader.done:
            return False
        then = self._state.then
        self._end_call()
        self._to(Transition(then), marked=True)
        return True

    def _made(self) -> ValueReader | CallObject | PythonCall:
        if self._state.kind == "call":
            return CallObject(self)
        if self._state.kind == "python":
            return PythonCall(self)
        return ValueReader(self._state.dialect, "{")

    def _forward(self, reader: ValueReader | CallObject | PythonCall) -> None:
        if isinstance(reader, ValueReader) and (text := reader.take()):
            self.arguments(text)


def unwrapped(text: str) -> str:
    """The text without one line break at its start and one at its end."""
    return text.removeprefix("\n").removesuffix("\n")
