"""vLLM's classes of parsers: one for each of Quire's formats, and a program's own, which it registers and gets.

Knows the tables of formats. The server reads its formats as tables; classes of a program's own that a plug-in registers are
called by `class_parser.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from quire.frontend.parsers.call_writer import ParsedDelta, new_id
from quire.frontend.parsers.format_table import compose
from quire.frontend.parsers.formats import REASONING, REASONING_NAMES, TOOL_NAMES, TOOLS
from quire.frontend.parsers.stream_parser import StreamParser
from quire.frontend.parsers.tool_schemas import ToolSchemas


class _Dumped:
    """vLLM's classes are models of pydantic, which programs turn into dicts."""

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        plain = asdict(self)  # type: ignore[call-overload]
        return {key: one for key, one in plain.items() if not (exclude_none and one is None)}


@dataclass
class FunctionCall(_Dumped):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass
class ToolCall(_Dumped):
    """One call of an answer."""

    id: str = field(default_factory=lambda: new_id(""))
    function: FunctionCall = field(default_factory=lambda: FunctionCall("", ""))
    type: str = "function"


@dataclass
class DeltaFunctionCall(_Dumped):
    """New text of a call: the name comes whole, the arguments in pieces."""

    name: str | None = None
    arguments: str | None = None


@dataclass
class DeltaToolCall(_Dumped):
    """New text of call number `index`."""

    index: int
    function: DeltaFunctionCall | None = None
    id: str | None = None
    type: str | None = None


@dataclass
class DeltaMessage(_Dumped):
    """New text of a streamed answer."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = field(default_factory=list)


@dataclass
class ExtractedToolCallInformation(_Dumped):
    """The calls of an answer, and its other text."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class ToolParser:
    """vLLM's interface: a parser of tool calls, for one answer at a time."""

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | None = None):
        self.model_tokenizer, self.tools = tokenizer, tools
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []

    @property
    def vocab(self) -> dict[str, int]:
        return dict(self.model_tokenizer.get_vocab())

    def adjust_request(self, request: Any) -> Any:
        """The request, as the parser needs it."""
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        raise NotImplementedError(f"{type(self).__name__}.extract_tool_calls")

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str,
        previous_token_ids: Sequence[int], current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int], request: Any,
    ) -> DeltaMessage | None:  # fmt: skip
        raise NotImplementedError(f"{type(self).__name__}.extract_tool_calls_streaming")


class ReasoningParser:
    """vLLM's interface: a parser that splits reasoning from the answer."""

    def __init__(self, tokenizer: Any, *args: Any, **keywords: Any):
        self.model_tokenizer = tokenizer

    @property
    def vocab(self) -> dict[str, int]:
        return dict(self.model_tokenizer.get_vocab())

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        raise NotImplementedError(f"{type(self).__name__}.is_reasoning_end")

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        raise NotImplementedError(f"{type(self).__name__}.extract_reasoning")

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str,
        previous_token_ids: Sequence[int], current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:  # fmt: skip
        raise NotImplementedError(f"{type(self).__name__}.extract_reasoning_streaming")


def _schemas(tools: Sequence[Any] | None) -> ToolSchemas:
    """The tools of a request or of a parser, which are dicts or objects of a client library."""
    plain = [tool if isinstance(tool, Mapping) else tool.model_dump() for tool in tools or ()]
    return ToolSchemas(plain)


def _message(delta: ParsedDelta) -> DeltaMessage | None:
    calls = [
        DeltaToolCall(
            call.index, DeltaFunctionCall(call.name, call.arguments or None), call.id,
            None if call.id is None else "function",
        )
        for call in delta.calls
    ]  # fmt: skip
    if not (delta.content or delta.reasoning or calls):
        return None
    return DeltaMessage(None, delta.content or None, delta.reasoning or None, calls)


class FormatToolParser(ToolParser):
    """A format of Quire."""

    format: ClassVar[str]

    def _new(self, request: Any) -> StreamParser:
        tools = getattr(request, "tools", None) or self.tools
        return StreamParser(compose(TOOLS[self.format], None, None), _schemas(tools))

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        stream = self._new(request)
        content, calls = "", list[ToolCall]()
        for delta in (stream.feed(model_output), stream.finish()):
            content += delta.content
            for call in delta.calls:
                if call.id is not None:
                    calls.append(ToolCall(call.id, FunctionCall(call.name or "", "")))
                calls[call.index].function.arguments += call.arguments
        return ExtractedToolCallInformation(bool(calls), calls, content or None)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str,
        previous_token_ids: Sequence[int], current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int], request: Any,
    ) -> DeltaMessage | None:  # fmt: skip
        if not previous_text:
            self._stream = self._new(request)
        return _message(self._stream.feed(delta_text))


class FormatReasoningParser(ReasoningParser):
    """A format of Quire."""

    format: ClassVar[str]

    def _new(self) -> StreamParser:
        return StreamParser(compose(None, REASONING[self.format], None))

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last marker of the text ends reasoning."""
        text = self.model_tokenizer.decode(list(input_ids))
        markers = REASONING[self.format]
        begin, end = (
            max((text.rfind(mark) for mark in marks), default=-1)
            for marks in (markers.starts, markers.ends)
        )
        return end > begin

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        stream = self._new()
        deltas = [stream.feed(model_output), stream.finish()]
        reasoning = "".join(delta.reasoning for delta in deltas)
        return reasoning or None, "".join(delta.content for delta in deltas) or None

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str,
        previous_token_ids: Sequence[int], current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:  # fmt: skip
        if not previous_text:
            self._stream = self._new()
        return _message(self._stream.feed(delta_text))


class _Manager:
    """Classes by name: a program's own, then one for each of Quire's formats."""

    base: ClassVar[type]
    of_format: ClassVar[type]
    formats: ClassVar[Mapping[str, Any]]
    other_names: ClassVar[Mapping[str, str]]
    own: ClassVar[dict[str, type]]
    lazy: ClassVar[dict[str, tuple[str, str]]]

    @classmethod
    def _get(cls, name: str) -> Any:
        if (known := cls.own.get(name)) is not None:
            return known
        if name in cls.lazy:
            module, attribute = cls.lazy[name]
            return cls._register(getattr(importlib.import_module(module), attribute), [name])
        format = name if name in cls.formats else cls.other_names.get(name)
        if format is None:
            raise KeyError(f"{name!r} is no parser; choose from {', '.join(cls.list_registered())}")
        return type(f"{cls.of_format.__name__}_{format}", (cls.of_format,), {"format": format})

    @classmethod
    def _register(cls, kind: Any, names: Sequence[str]) -> Any:
        if not (isinstance(kind, type) and issubclass(kind, cls.base)):
            raise TypeError(f"{kind!r} is not a subclass of {cls.base.__name__}")
        cls.own.update(dict.fromkeys(names or [kind.__name__], kind))
        return kind

    @classmethod
    def register_module(
        cls, name: str | Sequence[str] | None = None, force: bool = True, module: Any = None
    ) -> Callable[[Any], Any] | Any:
        """Register a class, or return a decorator that does.

        Raises:
            KeyError: the name is taken, and `force` is False.
            TypeError: not a class of parsers.
        """
        names = [name] if isinstance(name, str) else list(name or ())
        if not force and (taken := sorted({*names} & {*cls.own, *cls.formats})):
            raise KeyError(f"{taken[0]!r} is registered already")
        if module is not None:
            return cls._register(module, names)
        return lambda kind: cls._register(kind, names)

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a class that is imported when it is asked for."""
        cls.lazy[name] = module_path, class_name

    @classmethod
    def list_registered(cls) -> list[str]:
        return sorted({*cls.own, *cls.lazy, *cls.formats, *cls.other_names})


class ToolParserManager(_Manager):
    """Classes of tool parsers by name."""

    base, of_format, formats, other_names = ToolParser, FormatToolParser, TOOLS, TOOL_NAMES
    own: ClassVar[dict[str, type]] = {}
    lazy: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        """Raises KeyError: an unknown name."""
        kind: type[ToolParser] = cls._get(name)
        return kind


class ReasoningParserManager(_Manager):
    """Classes of reasoning parsers by name."""

    base, of_format, formats, other_names = ReasoningParser, FormatReasoningParser, REASONING, REASONING_NAMES  # fmt: skip
    own: ClassVar[dict[str, type]] = {}
    lazy: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def get_reasoning_parser(cls, name: str) -> type[ReasoningParser]:
        """Raises KeyError: an unknown name."""
        kind: type[ReasoningParser] = cls._get(name)
        return kind
