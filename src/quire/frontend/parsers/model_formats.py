"""One model's tool and reasoning formats, and the parser of a request's outputs.

Knows which formats are chosen, and why. Does not know HTTP. One ModelFormats per model, one parser per output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from quire.config.server import ServerConfig
from quire.frontend.parsers import plugins, tool_constraints
from quire.frontend.parsers.format_registry import FormatChoice, FormatRegistry
from quire.frontend.parsers.format_table import ParserTable, ReasoningFormat, ToolFormat, compose
from quire.frontend.parsers.stream_parser import StreamParser
from quire.frontend.parsers.tool_schemas import ToolSchemas
from quire.logging import get_logger

log = get_logger(__name__)


class ModelFormats:
    """A model's formats, chosen by name or by the chat template.

    Args:
        specials: texts of the special tokens; the detokenizer skips them unless they are part of markers.

    Raises:
        ConfigError: an unknown name.
    """

    def __init__(
        self, tools: str | None, reasoning: str | None, template: str,
        specials: Iterable[str] = (), registry: FormatRegistry | None = None,
    ):  # fmt: skip
        registry = registry or FormatRegistry()
        self.tool_choice: FormatChoice = registry.choose_tools(tools, template)
        self.reasoning_choice: FormatChoice = registry.choose_reasoning(reasoning, template)
        self.tool_class: type | None = registry.tool_classes.get(self.tool_choice.name)
        """A plug-in's class with vLLM's interface, in the place of a table."""
        self.reasoning_class: type | None = registry.reasoning_classes.get(self.reasoning_choice.name)  # fmt: skip
        self.tools: ToolFormat | None = None
        if self.tool_class is None:
            self.tools = registry.tools.get(self.tool_choice.name)
        self.reasoning: ReasoningFormat | None = None
        if self.reasoning_class is None:
            self.reasoning = registry.reasoning.get(self.reasoning_choice.name)
        if self.reasoning is not None and self.reasoning.tool_format:
            self.tools = registry.tools[self.reasoning.tool_format]
        elif self.tools is not None and self.tools.splits_reasoning and not self.reasoning_class:
            name = self.tool_choice.name
            self.reasoning = next(r for r in registry.reasoning.values() if r.tool_format == name)
        self.specials = frozenset(specials)

    @classmethod
    def of(cls, config: ServerConfig, template: str = "", specials: Iterable[str] = ()) -> Self:
        """The formats that a configuration names, or that the template shows.

        Raises:
            ConfigError: an unknown parser, or a plugin that fails.
        """
        files = [
            file for file in (config.tool_parser_plugin, config.reasoning_parser_plugin) if file
        ]
        return cls(
            config.tool_call_parser, config.reasoning_parser, template, specials, plugins.registry(files)
        )  # fmt: skip

    def runs_code(self, tools: Sequence[Any]) -> bool:
        """Whether a plug-in's class reads the outputs of a request that may call these tools."""
        return self.reasoning_class is not None or (self.tool_class is not None and bool(tools))

    def log_choices(self) -> None:
        for what, choice in (("tool calls", self.tool_choice), ("thoughts", self.reasoning_choice)):
            log.info("format of %s: %s (%s)", what, choice.name or "none", choice.why)

    def output_format(
        self, tools: Sequence[Mapping[str, Any]], must: bool = False, reasoning_open: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> OutputFormat | None:  # fmt: skip
        """The format for parsing a request's outputs; None: all output is content.

        `tools`: the tools that may be called. `must`: a constraint forces the output to call one.
        """
        format = self.tools if tools else None
        if must:
            format = tool_constraints.forced_format(self.tools, tools)
        if self.tools is not None and self.tools.splits_reasoning and not must:
            format = self.tools
        if format is None and self.reasoning is None:
            return None
        reasoning = None if self.reasoning is None or self.reasoning.tool_format else self.reasoning
        options = template_kwargs or {}
        if (
            reasoning is not None
            and reasoning.text_if_off
            and options.get("enable_thinking") is False
        ):
            reasoning = None
        table = compose(format, reasoning, reasoning_open)
        asked = (
            options.get("force_nonempty_content") is True or options.get("enable_thinking") is False
        )
        never_empty = reasoning is not None and reasoning.never_empty and asked
        return OutputFormat(
            table, ToolSchemas(tools), self.specials, self.reasoning is not None, never_empty
        )


@dataclass
class OutputFormat:
    """Makes the parsers for the outputs of one request."""

    table: ParserTable
    tools: ToolSchemas
    specials: frozenset[str] = frozenset()
    splits_reasoning: bool = False
    """The parser separates reasoning from content."""
    never_empty: bool = False
    """An output without content and calls has its reasoning as content, too."""
    markers_are_special: bool = field(init=False)
    """Some special tokens are in markers, so the detokenizer must not skip special tokens."""

    def __post_init__(self) -> None:
        marks = [mark for state in self.table.states.values() for mark in state.markers]
        self.markers_are_special = any(token in mark for token in self.specials for mark in marks)

    def parser(self) -> StreamParser:
        return StreamParser(self.table, self.tools, never_empty=self.never_empty)
