"""Parses outputs with a plug-in's classes, which have vLLM's interface (`parser_classes.py`).

    text and tokens --reasoning: a class, or a table--> content --calls: a class, or a table--> content and calls

Knows when vLLM calls which method, and what the methods return. Nothing here bounds the time of a plug-in's code, or keeps it from
the event loop: the server calls it in a thread (`server/plugin_calls.py`). An output that is not streamed is read at its end, by
the methods for whole texts.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.frontend.parsers.call_writer import CallDelta, ParsedDelta, new_id
from quire.frontend.parsers.stream_parser import StreamParser


class RequestFields(dict[str, Any]):
    """A request's fields, or an object in them, as vLLM's requests have them: as attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the request has no field {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """The fields as a dict, as pydantic's models give it."""
        return {key: one for key, one in self.items() if not (exclude_none and one is None)}


def request_fields(value: Any) -> Any:
    """The value with its objects as `RequestFields`."""
    if isinstance(value, Mapping):
        return RequestFields({key: request_fields(one) for key, one in value.items()})
    return [request_fields(one) for one in value] if isinstance(value, list) else value


def made(kind: type, tokenizer: Any, *more: Any, **keywords: Any) -> Any:
    """An object of a class; further arguments only if the class takes them: classes for other versions of vLLM do not."""
    try:
        inspect.signature(kind).bind(tokenizer, *more, **keywords)
    except TypeError:
        return kind(tokenizer)
    return kind(tokenizer, *more, **keywords)


def method(parser: Any, *names: str) -> Any:
    """The first of these methods that the parser's own class has: vLLM has renamed some."""
    base = next(kind for kind in type(parser).__mro__ if kind.__module__ == BASES)
    for name in names:
        if getattr(type(parser), name, None) not in (None, getattr(base, name, None)):
            return getattr(parser, name)
    return getattr(parser, names[0])


BASES = "quire.frontend.parsers.parser_classes"


@dataclass
class Seen:
    """The text and the tokens that one stage has got."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)

    def grown(self, text: str, tokens: Sequence[int]) -> Seen:
        return Seen(self.text + text, [*self.tokens, *tokens])

    def arguments(self, text: str, tokens: Sequence[int]) -> tuple[Any, ...]:
        """The first six arguments of a streaming method; afterwards the text is seen."""
        now = self.grown(text, tokens)
        found = (self.text, now.text, text, self.tokens, now.tokens, list(tokens))
        self.text, self.tokens = now.text, now.tokens
        return found


class ClassReasoning:
    """Splits reasoning from content with a plug-in's class. `ended`: the prompt ends after reasoning."""

    def __init__(self, parser: Any, request: RequestFields, streamed: bool, ended: bool):
        self.parser, self.request, self.streamed, self.ended = parser, request, streamed, ended
        self.seen = Seen()

    def feed(self, text: str, tokens: Sequence[int]) -> ParsedDelta:
        if self.ended:
            return ParsedDelta(content=text)
        if not self.streamed:
            self.seen = self.seen.grown(text, tokens)
            return ParsedDelta()
        call = method(
            self.parser, "extract_reasoning_streaming", "extract_reasoning_content_streaming"
        )
        delta = message_of(call(*self.seen.arguments(text, tokens)))
        self.ended = bool(self.parser.is_reasoning_end(self.seen.tokens))
        return delta

    def finish(self) -> ParsedDelta:
        if self.streamed or self.ended:
            return ParsedDelta()
        call = method(self.parser, "extract_reasoning", "extract_reasoning_content")
        reasoning, content = call(self.seen.text, self.request)
        return ParsedDelta(reasoning or "", content or "")


class ClassCalls:
    """Finds calls in content with a plug-in's class."""

    def __init__(self, parser: Any, request: RequestFields, streamed: bool):
        self.parser, self.request, self.streamed = parser, request, streamed
        self.seen = Seen()

    def feed(self, text: str, tokens: Sequence[int]) -> ParsedDelta:
        if not self.streamed:
            self.seen = self.seen.grown(text, tokens)
            return ParsedDelta()
        arguments = self.seen.arguments(text, tokens)
        return message_of(self.parser.extract_tool_calls_streaming(*arguments, self.request))

    def finish(self) -> ParsedDelta:
        if self.streamed:
            return self._rest()
        found = self.parser.extract_tool_calls(self.seen.text, self.request)
        if not found.tools_called:
            return ParsedDelta(content=self.seen.text if found.content is None else found.content)
        calls = [
            CallDelta(index, call.function.arguments, call.id or new_id(""), call.function.name)
            for index, call in enumerate(found.tool_calls)
        ]
        return ParsedDelta(content=found.content or "", calls=calls)

    def _rest(self) -> ParsedDelta:
        """Arguments of the last call that the class has read and not streamed, as vLLM sends them at the end."""
        whole = getattr(self.parser, "prev_tool_call_arr", None) or []
        sent = getattr(self.parser, "streamed_args_for_tool", None) or []
        pos = len(whole) - 1
        if not whole or len(sent) <= pos or not isinstance(sent[pos], str):
            return ParsedDelta()
        arguments = whole[pos].get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)  # fmt: skip
        rest = text.removeprefix(sent[pos]) if text.startswith(sent[pos]) else ""
        return ParsedDelta(calls=[CallDelta(pos, rest)] if rest else [])


class TableStage:
    """A stage that a table of ours does."""

    def __init__(self, parser: StreamParser):
        self.parser = parser

    def feed(self, text: str, tokens: Sequence[int]) -> ParsedDelta:
        return self.parser.feed(text)

    def finish(self) -> ParsedDelta:
        return self.parser.finish()


Stage = ClassReasoning | ClassCalls | TableStage


class ClassParser:
    """Parses one output, as `StreamParser` does; `feed` needs the tokens, too. The stages are made when it gets the first text."""

    pending_length = 0
    """The classes do not say what they hold back."""

    def __init__(self, reasoning: Stage | None, calls: Stage | None):
        self.reasoning, self.calls = reasoning, calls
        self.failures: list[str] = []
        self.num_calls = self.reasoning_length = 0

    def feed(self, text: str, tokens: Sequence[int]) -> ParsedDelta:
        """Raises: whatever the plug-in's code raises."""
        if self.reasoning is None:
            return self._called(ParsedDelta(content=text), tokens)
        return self._called(self.reasoning.feed(text, tokens), tokens)

    def finish(self) -> ParsedDelta:
        """Raises: as `feed`."""
        delta = ParsedDelta()
        if self.reasoning is not None:
            delta = self._called(self.reasoning.finish(), ())
        if self.calls is not None:
            delta.add(self._counted(self.calls.finish()))
        return delta

    def _called(self, delta: ParsedDelta, tokens: Sequence[int]) -> ParsedDelta:
        """The delta of the first stage, with the calls of its content."""
        self.reasoning_length += len(delta.reasoning)
        if self.calls is None or not delta.content:
            return delta
        found = self._counted(self.calls.feed(delta.content, tokens))
        return ParsedDelta(delta.reasoning, found.content, found.calls)

    def _counted(self, delta: ParsedDelta) -> ParsedDelta:
        self.num_calls = max([self.num_calls, *(call.index + 1 for call in delta.calls)])
        return delta


def message_of(found: Any) -> ParsedDelta:
    """What a streaming method returns, a DeltaMessage or None."""
    if found is None:
        return ParsedDelta()
    reasoning = getattr(found, "reasoning", None) or getattr(found, "reasoning_content", None)
    calls = [call_of(call) for call in getattr(found, "tool_calls", None) or ()]
    return ParsedDelta(reasoning or "", found.content or "", calls)


def call_of(call: Any) -> CallDelta:
    """A DeltaToolCall; its function is an object or a dict."""
    function = call.function
    if not isinstance(function, Mapping):
        function = {"name": getattr(function, "name", None), "arguments": getattr(function, "arguments", None)}  # fmt: skip
    name = function.get("name")
    return CallDelta(
        call.index, function.get("arguments") or "", (call.id or new_id("")) if name else None, name
    )
