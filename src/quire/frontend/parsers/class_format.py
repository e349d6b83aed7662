"""The format of a request's outputs where a plug-in's class reads reasoning or calls; a table of ours may do the other.

Knows the classes, the request, and what a class may change in it. Every function here runs a plug-in's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.frontend.parsers.class_parser import (
    ClassCalls,
    ClassParser,
    ClassReasoning,
    RequestFields,
    Stage,
    TableStage,
    made,
)
from quire.frontend.parsers.format_table import compose
from quire.frontend.parsers.model_formats import ModelFormats
from quire.frontend.parsers.stream_parser import StreamParser
from quire.frontend.parsers.tool_constraints import forced_format
from quire.frontend.parsers.tool_schemas import ToolSchemas
from quire.frontend.tokenizer import Tokenizer


@dataclass
class ClassOutputFormat:
    """Makes the parsers for the outputs of one request, as `OutputFormat` does."""

    reasoning: Callable[[], Stage] | None
    calls: Callable[[], Stage] | None
    tools: ToolSchemas
    markers_are_special: bool
    """The detokenizer must not skip special tokens."""
    never_empty = False

    @property
    def splits_reasoning(self) -> bool:
        return self.reasoning is not None

    def parser(self) -> ClassParser:
        """Raises: whatever the constructors of the classes raise."""
        return ClassParser(
            None if self.reasoning is None else self.reasoning(),
            None if self.calls is None else self.calls(),
        )


@dataclass
class ClassFormatMaker:
    """What a format is made of.

    Attributes:
        tools: those that may be called. `must`: a constraint forces the output to call one.
        constrained: a constraint holds from the first token on, so there is no reasoning.
        prompt: its tokens, which may end inside reasoning (`reasoning_open`, as a table sees it) or after it.
    """

    formats: ModelFormats
    tokenizer: Tokenizer
    request: RequestFields
    tools: Sequence[Mapping[str, Any]]
    must: bool
    constrained: bool
    prompt: Sequence[int]
    reasoning_open: bool | None

    def format(self) -> ClassOutputFormat | None:
        """None: all output is content. Raises: whatever the classes raise."""
        reasoning, calls = self._reasoning(), self._calls()
        if reasoning is None and calls is None:
            return None
        special = self.request.get("skip_special_tokens") is False
        formats = self.formats
        # A table's markers may be special tokens.
        tables = formats.output_format(self.tools, self.must, self.reasoning_open)
        special |= tables is not None and tables.markers_are_special
        return ClassOutputFormat(reasoning, calls, ToolSchemas(self.tools), special)

    def _reasoning(self) -> Callable[[], Stage] | None:
        formats, streamed = self.formats, bool(self.request.get("stream"))
        if (kind := formats.reasoning_class) is not None:
            if self.constrained:
                return None
            first = self._adjusted(self._new_reasoning(kind))
            ended = bool(first.is_reasoning_end(list(self.prompt)))
            return lambda: ClassReasoning(self._new_reasoning(kind), self.request, streamed, ended)
        if formats.reasoning is None or formats.reasoning.tool_format:
            return None
        table = compose(None, formats.reasoning, self.reasoning_open)
        return lambda: TableStage(StreamParser(table))

    def _calls(self) -> Callable[[], Stage] | None:
        if not self.tools:
            return None
        if self.must or (kind := self.formats.tool_class) is None:
            format = forced_format(self.formats.tools, self.tools) if self.must else self.formats.tools  # fmt: skip
            if format is None:
                return None
            table, schemas = compose(format, None, None), ToolSchemas(self.tools)
            return lambda: TableStage(StreamParser(table, schemas))
        self._adjusted(self._new_calls(kind))
        streamed = bool(self.request.get("stream"))
        return lambda: ClassCalls(self._new_calls(kind), self.request, streamed)

    def _new_reasoning(self, kind: type) -> Any:
        kwargs = self.request.get("chat_template_kwargs") or {}
        return made(kind, self.tokenizer, chat_template_kwargs=kwargs)

    def _new_calls(self, kind: type) -> Any:
        return made(kind, self.tokenizer, self.request.get("tools"))

    def _adjusted(self, parser: Any) -> Any:
        """The parser, after it has changed the request."""
        if (adjust := getattr(parser, "adjust_request", None)) is not None:
            adjust(self.request)
        return parser
