"""Streaming parser: generated text -> reasoning, content and tool calls, driven by a format's state table.

Knows tables, markers and white space. Does not know any format. The result does not depend on how the text is split
into deltas, the parser reads each character once, and no model output raises an exception:

    a call that is malformed before its name is emitted becomes content, its start included;
    one that is malformed later keeps the arguments emitted so far, and the rest becomes content.

`failures` records why. White space next to markers is layout and is not emitted.
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
from quire.frontend.parsers.value_reader import MalformedValue, ValueReader, escaped, quoted

MAX_WORD = 512  # characters of a name, a key, a head
MAX_FAILURES = 8
LETTERS = string.ascii_letters + string.digits
VALUES = ("value", "text")
NAME_ENDS = frozenset(" \t\r\n<:")
CUT_OFF = "the output ended within a tool call"


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
        self, table: ParserTable, tools: ToolSchemas | None = None,
        make_id: Callable[[str], str] = new_id,
    ):  # fmt: skip
        self.table, self.tools, self.make_id = table, tools or ToolSchemas(), make_id
        self.known_only = table.known_only
        self.failures: list[str] = []
        self.num_calls = 0
        """Number of calls begun."""
        self.reasoning_length = 0
        """Number of characters of reasoning and of its markers."""
        self._state = table.states[table.start]
        self._pattern = table.patterns[table.start]
        self._buffer, self._at = "", 0
        self._deltas: list[tuple[CallDelta, list[str]]] = []
        self._outputs = {"content": TrimmedText(), "reasoning": TrimmedText(at_border=True)}
        self._call_text: list[str] = []
        self._word: list[str] = []
        self._length = 0
        self._reader: ValueReader | CallObject | PythonCall | None = None
        self._name, self._id, self._key = "", "", ""
        self._call_started = False
        self._num_parameters = 0
        self._text_value = False
        self._held_newline = ""
        self._steps = {
            "content": self._read_text, "reasoning": self._read_text, "skip": self._read_space,
            "close": self._read_space, "name": self._read_word, "key": self._read_word,
            "head": self._read_word, "value": self._read_value,
            "text": self._read_value, "call": self._run_reader,
            "arguments": self._run_reader, "python": self._run_reader,
        }  # fmt: skip

    @property
    def pending_length(self) -> int:
        """Number of characters not classified yet."""
        return len(self._buffer) - self._at

    def feed(self, text: str) -> ParsedDelta:
        """Add text; returns the output that is complete."""
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        self._run()
        return self._take_delta()

    def _run(self) -> None:
        while self._at < len(self._buffer):
            try:
                if not self._steps[self._state.kind]():
                    return
            except MalformedValue as error:
                self._abandon_call(error)

    def _take_delta(self) -> ParsedDelta:
        calls = [call for call, _ in self._deltas]
        for call, parts in self._deltas:
            call.arguments = "".join(parts)
        self._deltas = []
        return ParsedDelta(
            self._outputs["reasoning"].take(), self._outputs["content"].take(), calls
        )

    def finish(self) -> ParsedDelta:
        """End the output; returns the withheld output."""
        kind = self._state.kind
        if kind in VALUES or (kind == "key" and self._call_started):
            self._end_inside_value(kind, self._buffer[self._at :])
            self._at = len(self._buffer)
        rest = self._buffer[self._at :]
        self._buffer, self._at = "", 0
        if kind in ("content", "reasoning"):
            self._emit_text(kind, rest)
        elif kind == "close":
            pass  # the call is complete, only its end marker is missing
        elif self._call_started:
            self._record_failure(CUT_OFF)
        else:
            raw = "".join(self._call_text) + rest
            if raw.strip() and self._state.fallback not in ("content", "reasoning"):
                self._record_failure(CUT_OFF)
            self._emit_text("reasoning" if self._state.fallback == "reasoning" else "content", raw)
        for output in self._outputs.values():
            output.end()
        return self._take_delta()

    def _end_inside_value(self, kind: str, rest: str) -> None:
        """The output ended inside a parameter: emit its text so far, without closing it."""
        if kind == "key":
            self.arguments((", " if self._num_parameters else "{") + '"')
        elif not self._text_value:
            self.arguments('"')
        self._emit_escaped("".join(self._word) + self._held_newline + rest)

    # -- output --------------------------------------------------------------------
    def _emit_text(self, kind: str, text: str) -> None:
        if text:
            self._outputs[kind].add(text)
            self.reasoning_length += len(text) if kind == "reasoning" else 0

    def _record_failure(self, reason: str) -> None:
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(reason)

    def _abandon_call(self, error: MalformedValue) -> None:
        """The call is malformed: return to the content state, which emits its text as content."""
        self._record_failure(f"malformed tool call: {error}")
        if self._call_started:
            self._call_text.append(error.unemitted)
        self._end_call()
        self._enter(Transition("content"))

    # -- from state to state --------------------------------------------------------------------
    def _consume(self, count: int) -> None:
        """Consume text of a call; keep it until the call has started, as it may become content."""
        if not self._call_started:
            self._call_text.append(self._buffer[self._at : self._at + count])
        self._at += count

    def _follow_marker(self, mark: str, target: Transition) -> None:
        if "reasoning" in (self._state.kind, self.table.states[target.state].kind):
            self.reasoning_length += len(mark)
        if target.consumes and target.restorable:
            self._consume(len(mark))
        elif target.consumes:
            self._at += len(mark)
            self._outputs["content"].at_border = True
        if target.ends:
            self._end_arguments()
        self._enter(target, marked=True)

    def _enter(self, target: Transition, marked: bool = False) -> None:
        """Enter a state. `marked`: by a marker; otherwise the kept text is content (or reasoning)."""
        state, before = self.table.states[target.state], self._state.kind
        if before in ("content", "reasoning"):
            self._outputs[before].is_left = True
        self._state, self._pattern = state, self.table.patterns[target.state]
        self._word.clear()
        self._length = 0
        self._reader = None
        if state.kind in ("content", "reasoning"):
            raw = "".join(self._call_text)
            self._call_text.clear()
            if marked:
                self._outputs[state.kind].at_border = True
            else:
                self._emit_text(state.kind, raw)
        elif state.kind in VALUES:
            text = state.kind == "text"
            self._text_value = text or self.tools.is_text(self._name, self._key)
            self._held_newline = ""
            self.arguments("{" if not self._num_parameters else ", ")
            self.arguments(quoted(self._key) + ": " + ('"' if self._text_value else ""))
            self._num_parameters += 1

    # -- CallSink -------------------------------------------------------------------------------
    def begin(self, name: str) -> None:
        """Set the name of the call. Raises MalformedValue."""
        name = name.strip()
        if not name or len(name) > MAX_WORD or any(char.isspace() for char in name):
            raise MalformedValue(f"{name[:40]!r} is not the name of a tool")
        if self.known_only and name not in self.tools:
            raise MalformedValue(f"unknown tool {name[:40]!r}")
        self._name = name

    def arguments(self, text: str) -> None:
        """Emit JSON of the call's arguments; the first piece starts the call."""
        if not self._call_started:
            self._call_started = True
            self._call_text.clear()
            id_ = self._id or self.make_id(self.table.ids)
            self._deltas.append((CallDelta(self.num_calls, "", id_, self._name), []))
            self.num_calls += 1
        if not self._deltas or self._deltas[-1][0].index != self.num_calls - 1:
            self._deltas.append((CallDelta(self.num_calls - 1), []))
        self._deltas[-1][1].append(text)

    def _end_arguments(self) -> None:
        """End a call whose parameters have markers of their own."""
        self.arguments("}" if self._num_parameters else "{}")
        self._end_call()

    def _end_call(self) -> None:
        self._call_started = False
        self._name = self._id = self._key = ""
        self._num_parameters = 0

    # -- one method per kind of state; returns False if it needs more text ----------------------
    def _read_text(self) -> bool:
        text, at, markers = self._buffer, self._at, self._pattern
        found = markers.pattern.search(text, at) if markers.pattern is not None else None
        if found is not None:
            self._emit_text(self._state.kind, text[at : found.start()])
            self._at = found.start()
            self._follow_marker(found[0], markers.transitions[found[0]])
            return True
        stop = len(text) - markers.partial_length(text, at)
        self._emit_text(self._state.kind, text[at:stop])
        self._at = stop
        return False

    def _read_space(self) -> bool:
        text, at, markers = self._buffer, self._at, self._pattern
        start = at
        while start < len(text) and text[start].isspace():
            start += 1
        self._consume(start - at)
        at = start
        if at == len(text):
            return False
        if len(text) - at <= markers.max_prefix and text[at:] in markers.prefixes:
            return False
        found = markers.pattern.match(text, at) if markers.pattern is not None else None
        if found is not None:
            self._follow_marker(found[0], markers.transitions[found[0]])
            return True
        if not self._state.fallback:
            raise MalformedValue(
                f"{text[at]!r} where one of {list(markers.transitions)} was expected"
            )
        self._enter(Transition(self._state.fallback))
        return True

    def _read_word(self) -> bool:
        """A name, a key or a head: the text up to a marker."""
        text, at, markers = self._buffer, self._at, self._pattern
        found = markers.pattern.search(text, at) if markers.pattern is not None else None
        stop = found.start() if found is not None else len(text) - markers.partial_length(text, at)
        if self._length + stop - at > MAX_WORD:
            self._consume(MAX_WORD - self._length)
            raise MalformedValue(f"a {self._state.kind} without an end")
        self._length += stop - at
        self._word.append(text[at:stop])
        self._consume(stop - at)
        if found is None:
            return False
        word, state = "".join(self._word).strip(), self._state
        target = markers.transitions[found[0]]
        if state.kind == "name":
            self.begin(word)
        elif state.kind == "key":
            self._key = word
        else:
            target = self._route_head(word, state, target)
        self._follow_marker(found[0], target)
        return True

    def _route_head(self, head: str, state: ParserState, target: Transition) -> Transition:
        if not state.allows_spaces and len(head.split()) > 1:
            raise MalformedValue(f"{head[:40]!r} where one word was expected")
        for needle, to in state.routes:
            at = head.find(needle)
            if at < 0:
                continue
            if self.table.states[to].kind in READERS:
                rest = head[at + len(needle) :]
                stop = next((i for i, char in enumerate(rest) if char in NAME_ENDS), len(rest))
                self.begin(rest[:stop])
                self._id = head if state.is_call_id else ""
            return Transition(to, consumes=target.consumes)
        return target

    def _read_value(self) -> bool:
        text, at, markers = self._buffer, self._at, self._pattern
        found = markers.pattern.search(text, at) if markers.pattern is not None else None
        stop = found.start() if found is not None else len(text) - markers.partial_length(text, at)
        piece = text[at:stop]
        self._at = stop
        if self._text_value:
            self._emit_string(piece, ended=found is not None)
        else:
            self._word.append(piece)
        if found is None:
            return False
        if self._text_value:
            self.arguments('"')
        else:
            value = "".join(self._word)
            value = value if self._state.verbatim else strip_newlines(value)
            self.arguments(self.tools.value(self._name, self._key, value))
        self._follow_marker(found[0], markers.transitions[found[0]])
        return True

    def _emit_string(self, piece: str, ended: bool) -> None:
        """Emit a piece of a string, without a line break at the start and end of the string (unless `verbatim`)."""
        if self._state.verbatim:
            self._emit_escaped(piece)
            return
        if not self._length and piece.startswith("\n"):
            piece, self._length = piece[1:], 1
        elif piece:
            self._length = 1
        whole = self._held_newline + piece
        self._held_newline = ""
        if whole.endswith("\n"):
            whole = whole[:-1]
            self._held_newline = "" if ended else "\n"
        self._emit_escaped(whole)

    def _emit_escaped(self, text: str) -> None:
        if text:
            self.arguments(escaped(text))

    def _run_reader(self) -> bool:
        reader = self._reader
        if reader is None:
            reader = self._reader = self._new_reader()
        at = self._at
        if isinstance(reader, ValueReader) and not self._name:
            raise MalformedValue("a call without a name")
        try:
            reached = reader.feed(self._buffer, at)
        except MalformedValue as error:
            self._forward_arguments(reader)
            self._consume(error.at - at)
            raise
        self._forward_arguments(reader)
        self._consume(reached - at)
        if not reader.done:
            return False
        then = self._state.next_state
        self._end_call()
        self._enter(Transition(then), marked=True)
        return True

    def _new_reader(self) -> ValueReader | CallObject | PythonCall:
        if self._state.kind == "call":
            return CallObject(self)
        if self._state.kind == "python":
            return PythonCall(self)
        return ValueReader(self._state.dialect, "{")

    def _forward_arguments(self, reader: ValueReader | CallObject | PythonCall) -> None:
        if isinstance(reader, ValueReader) and (text := reader.take()):
            self.arguments(text)


def strip_newlines(text: str) -> str:
    """The text without one line break at its start and one at its end."""
    return text.removeprefix("\n").removesuffix("\n")
