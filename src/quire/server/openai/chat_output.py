"""Parses the outputs of a chat request: splits each delta into reasoning, content and tool calls.

Knows model formats, the request's options and deltas, and the constraint that the request's tools put on the output.
Does not know answer shapes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from quire.config.structured import structured_options
from quire.errors import ValidationError
from quire.frontend.parsers.call_writer import ParsedDelta
from quire.frontend.parsers.class_format import ClassFormatMaker, ClassOutputFormat
from quire.frontend.parsers.class_parser import ClassParser, request_fields
from quire.frontend.parsers.format_registry import OFF
from quire.frontend.parsers.model_formats import ModelFormats, OutputFormat
from quire.frontend.parsers.stream_parser import StreamParser
from quire.frontend.parsers.tool_constraints import (
    answer_or_calls,
    auto_calls,
    call_parts,
    calls_only,
    forced_format,
    is_strict,
)
from quire.frontend.prompts import Prompt
from quire.logging import get_logger
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_outputs import StructuredOutputsParams
from quire.server.endpoint import RequestContext
from quire.server.errors import invalid
from quire.server.openai.tools import ToolChoice
from quire.server.output_delta import OutputDelta
from quire.server.schemas import ChatRequest
from quire.server.state import ServerState

log = get_logger(__name__)

Reading = OutputFormat | ClassOutputFormat


async def output_reader(
    body: ChatRequest, choice: ToolChoice, params: SamplingParams, prompt: Prompt, context: RequestContext,
) -> tuple[SamplingParams, ChatOutputReader | None]:  # fmt: skip
    """As `make_output_reader`, in a thread if that runs the code of a plug-in.

    Raises:
        ApiError: as there. PluginFailed: the plug-in failed.
    """
    call = partial(make_output_reader, body, choice, params, prompt, context)
    if not context.engine.front.formats.runs_code(choice.tools):
        return call()
    return await context.state.plugin_calls.run(call)


def make_output_reader(
    body: ChatRequest, choice: ToolChoice, params: SamplingParams, prompt: Prompt, context: RequestContext,
) -> tuple[SamplingParams, ChatOutputReader | None]:  # fmt: skip
    """The parameters with the constraint of the request's tool calls, and a reader; None: outputs are plain content.

    Raises:
        ApiError: 400: the model's call format is unknown, or the request has two constraints on its output.
    """
    state, engine = context.state, context.engine
    formats = engine.front.formats
    last = body.messages[-1].get("content") if body.continue_final_message else None
    last = last if isinstance(last, str) else ""
    reasoning_open = None
    if formats.reasoning is not None:
        reasoning_open = formats.reasoning.is_open(prompt.text or "", last)
    if choice.kind == "auto" and formats.tools is None and formats.tool_class is None:
        hint = "the server was started with --tool-call-parser none" if state.config.server.tool_call_parser in OFF else "start the server with --tool-call-parser NAME"  # fmt: skip
        raise invalid(
            "`tools`: the format of this model's tool calls is unknown"
            f' ({formats.tool_choice.why}); {hint}, or send `tool_choice: "required"`',
            "tools",
        )
    kwargs, reading = body.chat_template_kwargs, None  # type: Any, Reading | None
    if formats.runs_code(choice.tools):
        constrained = choice.must or params.structured_outputs is not None
        asked = request_fields({**msgspec.to_builtins(body), "tool_choice": body.tool_choice or choice.kind})  # fmt: skip
        reading = ClassFormatMaker(
            formats, engine.front.need_tokenizer(), asked, choice.tools, choice.must, constrained, prompt.tokens,
            reasoning_open,
        ).format()  # fmt: skip
    else:
        reading = formats.output_format(choice.tools, choice.must, reasoning_open, kwargs)
    if reading is None:
        return params, None
    level = state.config.server.tool_strict_level
    reasons = may_reason(body, state)
    if params.structured_outputs is None:
        constraint = tool_constraint(body, choice, formats, reasoning_open, level, reasons)
    elif choice.must:
        said = params.structured_outputs.field_name
        raise invalid(f"`{said}` and a `tool_choice` that forces a tool call cannot be combined: an output has one constraint; leave one of them out", said)  # fmt: skip
    else:
        calls = call_parts(formats.tools, choice.tools, body.parallel_tool_calls, level) if choice.tools else []  # fmt: skip
        options = state.config.structured.structured_outputs_config
        thoughts = None if structured_options(options).enable_in_reasoning else formats.reasoning
        constraint = answer_or_calls(
            params.structured_outputs, thoughts, reasoning_open, calls, reasons
        )
    skip = params.skip_special_tokens and not reading.markers_are_special

    def decode(tokens: list[int]) -> str:
        return engine.decode(tokens, skip_special=skip)

    reader = ChatOutputReader(
        reading, decode, include_reasoning=body.include_reasoning, parallel=body.parallel_tool_calls,
        named=choice.kind == "named",
    )  # fmt: skip
    return params.settled(structured_outputs=constraint, skip_special_tokens=skip), reader


def may_reason(body: ChatRequest, state: ServerState) -> bool:
    """Whether reasoning may come before constrained output.

    As in vLLM, only if the operator has chosen a reasoning parser (or the client a budget): it could use up `max_tokens`.
    """
    chosen = state.config.server.reasoning_parser is not None
    return chosen or body.thinking_token_budget is not None


def tool_constraint(
    body: ChatRequest, choice: ToolChoice, formats: ModelFormats, reasoning_open: bool | None, level: str,
    reasons: bool,
) -> StructuredOutputsParams | None:  # fmt: skip
    """The constraint that the request's tools put on the output."""
    tag: dict[str, Any] | None = None
    parallel, tools = body.parallel_tool_calls, choice.tools
    must_hold = choice.must or level in ("function", "parameter") or any(map(is_strict, tools))
    if choice.must:
        format = forced_format(formats.tools, tools)
        parallel = parallel and choice.kind == "required"
        tag = calls_only(format, tools, parallel, formats.reasoning, reasoning_open, reasons)
    elif tools and formats.tools is not None and (must_hold or level != "strict"):
        tag = auto_calls(formats.tools, tools, parallel, level, formats.reasoning, reasoning_open)
        if tag is None and must_hold:
            log.warning_every("strict", 3600, "`strict` is not enforced: the grammar cannot express calls in the format %s, or the schema of a tool in it", formats.tool_choice.name)  # fmt: skip
    if tag is None:
        return None
    try:
        return StructuredOutputsParams(structural_tag=tag, field_name="tools")
    except ValidationError as error:
        if not must_hold:
            return None  # the request needs its calls parsed only
        raise invalid(f"`tools`: {error}", "tools") from error


@dataclass(slots=True)
class ChatOutput:
    """One completion, while it is parsed."""

    parser: StreamParser | ClassParser
    tokens: list[int] = field(default_factory=list)
    """Tokens not yet classified as reasoning or content."""
    size: int = 0
    """Number of characters of their text."""


@dataclass(slots=True)
class ChatOutputReader:
    """Parses the completions of one request, each with its own parser."""

    reading: Reading
    decode: Callable[[list[int]], str]
    include_reasoning: bool = True
    """Whether the answer includes the reasoning."""
    parallel: bool = True
    named: bool = False
    reasoning_tokens: int = 0
    outputs: dict[int, ChatOutput] = field(default_factory=dict)

    def read(self, delta: OutputDelta) -> None:
        """Split the delta's text into reasoning, content and calls, in place."""
        output = self.outputs.get(delta.index)
        if output is None:
            output = self.outputs[delta.index] = ChatOutput(self.reading.parser())
        parser, ended = output.parser, delta.finish_reason is not None
        before = parser.reasoning_length
        if isinstance(parser, ClassParser):
            parsed = parser.feed(delta.text, delta.tokens)
        else:
            parsed = parser.feed(delta.text)
        if ended:
            parsed.add(parser.finish())
        if self.reading.splits_reasoning:
            output.tokens += delta.tokens
            output.size += len(delta.text)
            count = self._thoughts(output, parser.reasoning_length - before)
            self.reasoning_tokens += count
            if not self.include_reasoning:
                self._hide(delta, parsed, count)
        delta.text, delta.reasoning = parsed.content, parsed.reasoning
        delta.calls = parsed.calls if self.parallel else [c for c in parsed.calls if c.index == 0]
        if ended:
            self._ended(delta, parser)

    def _thoughts(self, output: ChatOutput, thought: int) -> int:
        """How many of the unclassified tokens are reasoning, of which the text has `thought` more characters."""
        tokens, known = output.tokens, output.size - output.parser.pending_length
        if thought <= 0:
            count = 0
        elif thought >= output.size:
            count = len(tokens)
        else:
            count = bisect_left(range(len(tokens)), thought, key=self._length(tokens))
        if not output.parser.pending_length:
            output.tokens, output.size = [], 0
        elif known > 0:
            done = bisect_right(range(1, len(tokens) + 1), known, key=self._length(tokens))
            output.tokens = tokens[max(done, count) :]
            output.size = output.parser.pending_length
        return min(count, len(tokens))

    def _length(self, tokens: list[int]) -> Callable[[int], int]:
        return lambda count: len(self.decode(tokens[:count]))

    def _hide(self, delta: OutputDelta, parsed: ParsedDelta, count: int) -> None:
        parsed.reasoning = ""
        delta.tokens = delta.tokens[count:]
        if delta.logprobs is not None:
            delta.logprobs = delta.logprobs[count:]

    @property
    def runs_code(self) -> bool:
        """Whether `read` runs the code of a plug-in."""
        return isinstance(self.reading, ClassOutputFormat)

    def _ended(self, delta: OutputDelta, parser: StreamParser | ClassParser) -> None:
        if parser.num_calls and delta.finish_reason == "stop" and not self.named:
            delta.finish_reason = "tool_calls"
        for reason in parser.failures:
            log.warning_every(
                reason,
                60,
                "part of an output could not be parsed and was sent as content: %s",
                reason,
            )


@dataclass(slots=True)
class OutputPiece:
    """New output of one kind: thinking, text, or a call's arguments."""

    kind: str
    text: str
    index: int = -1
    """Index of the call."""
    id: str | None = None
    name: str | None = None


def pieces(delta: OutputDelta) -> list[OutputPiece]:
    """The pieces of a delta, in the order of the answer."""
    parts = []
    if delta.reasoning:
        parts.append(OutputPiece("thinking", delta.reasoning))
    if delta.text:
        parts.append(OutputPiece("text", delta.text))
    return parts + [OutputPiece("call", c.arguments, c.index, c.id, c.name) for c in delta.calls]
