"""Streaming parser: generated text -> reasoning, content and tool calls, driven by a format's state table.

Knows tables, markers and white space. Does not know any format. The result does not depend on how the text is split
into deltas, the parser reads each character once, and no model output raises an exception:

    a call that is malformed before its name is emitted becomes content, its start included;
    one that is malformed later keeps the arguments emitted so far, and the rest becomes content.

`failures` records why. White space next to markers is layout and is not emitted. Reasoning that quotes the start of a call
stays reasoning. If the format says so, no text follows a call.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.frontend.parsers.call_readers import CallObject, PythonCall
from quire.frontend.parsers.call_writer import CallWriter, ParsedDelta, new_id
from quire.frontend.parsers.element_reader import ElementArguments
from quire.frontend.parsers.format_table import READERS, ParserState, ParserTable, Transition
from quire.frontend.parsers.tool_schemas import ToolSchemas
from quire.frontend.parsers.value_reader import MalformedValue, ValueReader
from quire.frontend.parsers.whitespace import TrimmedText, strip_newlines, unquoted

MAX_WORD = 512  # characters of a name, a key, a head
MAX_FAILURES = 8
VALUES = ("value", "text")
Reader = ValueReader | CallObject | PythonCall | ElementArguments
NAME_ENDS = frozenset(" \t\r\n<:")
CUT_OFF = "the output ended within a tool call"


class StreamParser:
    """Parses one output. `feed` it the text, then `finish`.

    Args:
        tools: the tools that may be called, with their parameter types.
        make_id: makes a new call id of a kind (`ToolFormat.ids`).
        never_empty: the reasoning of an output without content and calls is its content. Reasoning waits for either.
    """

    def __init__(
        self, table: ParserTable, tools: ToolSchemas | None = None,
        make_id: Callable[[str], str] = new_id, never_empty: bool = False,
    ):  # fmt: skip
        self.table = table
        self.failures: list[str] = []
        self.reasoning_length = 0
        """Number of characters of reasoning and of its markers."""
        self._writer = CallWriter(
            tools or ToolSchemas(), lambda: make_id(table.calls.ids), table.calls.known_only,
            table.calls.types_apply, table.calls.untyped_text, table.calls.wrappers,
            table.calls.checks_schema, table.calls.aliases,
        )  # fmt: skip
        self._state = table.states[table.start]
        self._pattern = table.patterns[table.start]
        self._buffer, self._at = "", 0
        self._outputs = {"content": TrimmedText(), "reasoning": TrimmedText(at_border=True)}
        self._waiting: list[str] | None = [] if never_empty else None
        """Reasoning that may become content."""
        self._text_kind = "content"
        """Kind of the text before the current call."""
        self._call_text: list[str] = []
        self._in_call = False
        """A marker of a call came after the text."""
        self._shows_end = False
        """The content has a malformed call: its end is text, too."""
        self._word: list[str] = []
        self._length = 0
        self._reader: Reader | None = None
        self._text_value = False
        self._held_newline = ""
        self._steps = {
            "content": self._read_text, "reasoning": self._read_text, "skip": self._read_space,
            "close": self._read_space, "name": self._read_word, "key": self._read_word,
            "head": self._read_word, "value": self._read_value,
            "text": self._read_value,
            **dict.fromkeys(READERS, self._run_reader),
        }  # fmt: skip
        self._emit_text("content", table.prepend)

    @property
    def num_calls(self) -> int:
        """Number of calls begun."""
        return self._writer.num_calls

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
        if self.num_calls:
            self._release_reasoning()
        reasoning, content = self._outputs["reasoning"].take(), self._outputs["content"].take()
        return ParsedDelta(reasoning, content, self._writer.take())

    def finish(self) -> ParsedDelta:
        """End the output; returns the withheld output."""
        kind, started = self._state.kind, self._writer.started
        rest = self._buffer[self._at :]
        if kind in VALUES and started:
            self._writer.cut_value(
                "".join(self._word) + self._held_newline + rest, self._text_value
            )
        elif kind == "key" and started:
            key = "".join(self._word) + rest
            if not self.table.calls.cut_starts_call or len(key.split()) > 1:
                self._writer.cut_key(key)
        elif self._reader is not None:
            self._reader.release()
            self._forward_arguments(self._reader)
        self._buffer, self._at = "", 0
        if kind in ("content", "reasoning"):
            self._emit_text(kind, self._without_cut_marker(rest))
        elif kind == "close":
            pass  # the call is complete, only its end marker is missing
        elif (self.table.calls.cut_starts_call and self._finish_call()) or started:
            self._record_failure(CUT_OFF)
        else:
            raw = "".join(self._call_text) + self._without_cut_marker(rest)
            if raw.strip() and self._state.fallback not in ("content", "reasoning"):
                self._record_failure(CUT_OFF)
            inside = "reasoning" in (self._state.fallback, self._text_kind)
            self._emit_text("reasoning" if inside else "content", raw)
        if self._waiting is not None and not self.num_calls:
            reasoning, self._waiting = "".join(self._waiting).strip(), None
            self._emit_text("content", reasoning)
        for output in self._outputs.values():
            output.end()
        return self._take_delta()

    def _without_cut_marker(self, rest: str) -> str:
        begin = self.table.calls.cut_marker
        if not begin or not rest.startswith(begin):
            return rest
        self._record_failure(CUT_OFF)
        return ""

    def _finish_call(self) -> bool:
        """End the call that the end of the output cuts off; returns whether the kept text belongs to a call."""
        state, writer = self._state, self._writer
        unnamed = state.kind in READERS and not (writer.started or writer.name)
        word = "".join(self._word).strip()
        is_text = state.kind == "key" and len(word.split()) > 1
        if state.kind in VALUES or unnamed or is_text or not self._in_call:
            return False
        if writer.started:
            if state.kind in ("skip", "key"):
                writer.end_parameters()
            return True
        try:
            if word and state.kind == "name":
                writer.begin(unquoted(word), state.known_only)
            elif word and state.kind == "head":
                self._route_head(word, state, Transition(""))
        except MalformedValue:
            return False  # it is text
        if writer.name:
            writer.arguments("{}")
            writer.end()
        return True

    # -- output --------------------------------------------------------------------
    def _emit_text(self, kind: str, text: str) -> None:
        if not text or (
            kind == "content" and self._writer.has_ended and self.table.calls.ends_text
        ):
            return
        if kind == "reasoning":
            self.reasoning_length += len(text)
            if self._waiting is not None:
                self._waiting.append(text)
                return
        else:
            self._release_reasoning()
        self._outputs[kind].add(text)

    def _release_reasoning(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = "".join(self._waiting), None
            self._outputs["reasoning"].add(waiting.rstrip())

    def _record_failure(self, reason: str) -> None:
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(reason)

    def _abandon_call(self, error: MalformedValue) -> None:
        """The call is malformed: return to the text before it, to which its own text then belongs."""
        self._record_failure(f"malformed tool call: {error}")
        kind = self._text_kind
        if self._writer.started:
            kind, self._call_text = "content", [error.unemitted]
        self._shows_end = not self._writer.started and kind == "content"
        self._writer.end(complete=False)
        self._enter(Transition(kind))

    # -- from state to state --------------------------------------------------------------------
    def _consume(self, count: int) -> None:
        """Consume text of a call; keep it until the call has started, as it may become content."""
        if not self._writer.started:
            self._call_text.append(self._buffer[self._at : self._at + count])
        self._at += count

    def _follow_marker(self, mark: str, target: Transition) -> None:
        kind, to = self._state.kind, self.table.states[target.state].kind
        if target.state.startswith("reasoning") or (kind == "reasoning" and not target.restorable):
            self.reasoning_length += len(mark)
        stray = kind == to == "content" and not target.restorable
        shown = stray and self._shows_end and mark in self.table.calls.states["content"].markers
        self._shows_end &= stray
        if target.is_text or shown:
            self._emit_text(kind, mark)
            self._at += len(mark)
        elif target.consumes and target.restorable:
            self._in_call = True
            self._consume(len(mark))
        elif target.consumes:
            self._in_call = False
            self._at += len(mark)
            for output in self._outputs.values():
                output.at_border = True
        if target.ends:
            self._writer.end_parameters()
        if target.ends or (kind == "close" and to in ("close", "content")):
            self._call_text.clear()  # the end of a call is not text
        self._enter(target, marked=target.consumes and not target.is_text and not stray)
        if not target.restorable:
            self._text_kind = "content"

    def _enter(self, target: Transition, marked: bool = False) -> None:
        """Enter a state. `marked`: by a marker; otherwise the kept text is content (or reasoning)."""
        state, before = self.table.states[target.state], self._state.kind
        if before in ("content", "reasoning"):
            self._outputs[before].is_left = True
            self._text_kind = before
        self._state, self._pattern = state, self.table.patterns[target.state]
        self._word.clear()
        self._length = 0
        self._reader = None
        if state.kind in ("content", "reasoning"):
            self._in_call = False
            raw = "".join(self._call_text)
            self._call_text.clear()
            if marked:
                self._outputs[state.kind].at_border = True
            else:
                self._emit_text(state.kind, raw)
        elif state.kind in VALUES:
            self._held_newline = ""
            self._text_value = self._writer.begin_value(state.kind == "text")
            if self._writer.started:
                self._call_text.clear()

    # -- one method per kind of state; returns False if it needs more text ----------------------
    def _read_text(self) -> bool:
        text, pos, markers = self._buffer, self._at, self._pattern
        found = markers.pattern.search(text, pos) if markers.pattern is not None else None
        if found is not None:
            self._emit_text(self._state.kind, text[pos : found.start()])
            self._at = found.start()
            self._follow_marker(found[0], markers.transitions[found[0]])
            return True
        stop = len(text) - markers.partial_length(text, pos)
        self._emit_text(self._state.kind, text[pos:stop])
        self._at = stop
        return False

    def _read_space(self) -> bool:
        text, pos, markers = self._buffer, self._at, self._pattern
        start = pos
        while start < len(text) and text[start].isspace():
            start += 1
        self._consume(start - pos)
        pos = start
        if pos == len(text):
            return False
        if len(text) - pos <= markers.max_prefix and text[pos:] in markers.prefixes:
            return False
        found = markers.pattern.match(text, pos) if markers.pattern is not None else None
        if found is not None:
            self._follow_marker(found[0], markers.transitions[found[0]])
            return True
        if not self._state.fallback:
            raise MalformedValue(
                f"{text[pos]!r} where one of {list(markers.transitions)} was expected"
            )
        self._enter(Transition(self._state.fallback))
        return True

    def _read_word(self) -> bool:
        """A name, a key or a head: the text up to a marker."""
        text, pos, markers = self._buffer, self._at, self._pattern
        found = markers.pattern.search(text, pos) if markers.pattern is not None else None
        stop = found.start() if found is not None else len(text) - markers.partial_length(text, pos)
        if self._length + stop - pos > MAX_WORD:
            self._consume(MAX_WORD - self._length)
            raise MalformedValue(f"a {self._state.kind} without an end")
        self._length += stop - pos
        self._word.append(text[pos:stop])
        self._consume(stop - pos)
        if found is None:
            return False
        word, state = "".join(self._word).strip(), self._state
        target = markers.transitions[found[0]]
        if state.kind == "name":
            self._writer.begin(unquoted(word), state.known_only)
        elif state.kind == "key":
            self._writer.begin_key(unquoted(word))
        else:
            target = self._route_head(word, state, target)
        self._follow_marker(found[0], target)
        return True

    def _route_head(self, head: str, state: ParserState, target: Transition) -> Transition:
        if not state.allows_spaces and len(head.split()) > 1:
            raise MalformedValue(f"{head[:40]!r} where one word was expected")
        for needle, to in state.routes:
            pos = head.find(needle)
            if pos < 0:
                continue
            if self.table.states[to].kind in READERS:
                rest = head[pos + len(needle) :]
                stop = next((i for i, char in enumerate(rest) if char in NAME_ENDS), len(rest))
                self._writer.begin(rest[:stop])
                self._writer.id = head if state.is_call_id else ""
            return Transition(to, consumes=target.consumes)
        return target

    def _read_value(self) -> bool:
        text, pos, markers = self._buffer, self._at, self._pattern
        found = markers.pattern.search(text, pos) if markers.pattern is not None else None
        stop = found.start() if found is not None else len(text) - markers.partial_length(text, pos)
        piece = text[pos:stop]
        self._consume(stop - pos)
        if self._text_value:
            self._emit_string(piece, ended=found is not None)
        else:
            self._word.append(piece)
        if found is None:
            return False
        if self._text_value:
            self._writer.arguments('"')
        else:
            value = "".join(self._word)
            self._writer.add_value(value if self._state.verbatim else strip_newlines(value))
        self._follow_marker(found[0], markers.transitions[found[0]])
        return True

    def _emit_string(self, piece: str, ended: bool) -> None:
        """Emit a piece of a string, without a line break at the start and end of the string (unless `verbatim`)."""
        if self._state.verbatim:
            self._writer.add_text(piece)
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
        self._writer.add_text(whole)

    def _run_reader(self) -> bool:
        reader = self._reader
        if reader is None:
            reader = self._reader = self._new_reader()
        pos = self._at
        if isinstance(reader, ValueReader) and not self._writer.name:
            raise MalformedValue("a call without a name")
        try:
            reached = reader.feed(self._buffer, pos)
        except MalformedValue as error:
            self._forward_arguments(reader)
            self._consume(error.pos - pos)
            raise
        self._forward_arguments(reader)
        self._consume(reached - pos)
        if self._writer.started:
            self._call_text.clear()
        if not reader.done:
            return False
        self._writer.end()
        self._enter(Transition(self._state.next_state), marked=True)
        return True

    def _new_reader(self) -> Reader:
        if self._state.kind == "call":
            return CallObject(self._writer)
        if self._state.kind == "python":
            return PythonCall(self._writer)
        if self._state.kind == "elements":
            return ElementArguments(self._writer, self._state.prefix)
        return ValueReader(self._state.dialect, "{", self._writer.types())

    def _forward_arguments(self, reader: Reader) -> None:
        if isinstance(reader, ValueReader) and (text := reader.take()):
            self._writer.arguments(text)
