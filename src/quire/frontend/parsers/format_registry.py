"""Format registry: chooses a model's tool and reasoning formats, by configured name or by its chat template.

Knows how a template shows a format. Does not parse output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from quire.config.nearest_name import choose_from
from quire.config.unsupported import PARSERS
from quire.errors import ConfigError
from quire.frontend.parsers.format_table import ReasoningFormat, ToolFormat
from quire.frontend.parsers.formats import (
    REASONING,
    REASONING_NAMES,
    REASONING_ORDER,
    TOOL_NAMES,
    TOOL_ORDER,
    TOOLS,
)

AUTO, OFF = "auto", ("", "none", "off")


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A format's name ("": none) and the reason for the choice."""

    name: str
    why: str


class FormatRegistry:
    """Formats by name: built-in formats and plugins' formats."""

    def __init__(self) -> None:
        self.tools: dict[str, ToolFormat] = dict(TOOLS)
        self.reasoning: dict[str, ReasoningFormat] = dict(REASONING)
        self.tool_classes: dict[str, type] = {}
        """Classes of plug-ins with vLLM's interface; they come before formats of the same name."""
        self.reasoning_classes: dict[str, type] = {}

    def add_tools(self, name: str, format: ToolFormat) -> None:
        self.tools[name] = format

    def add_reasoning(self, name: str, reasoning: ReasoningFormat) -> None:
        self.reasoning[name] = reasoning

    def choose_tools(self, requested: str | None, template: str) -> FormatChoice:
        """`template`: text of the chat templates and of the checkpoint's response_template.

        Raises:
            ConfigError: an unknown name.
        """
        detect = {name: self.tools[name].detect for name in TOOL_ORDER}
        known = {*self.tools, *self.tool_classes}
        return _choose(requested, template, "tool_call_parser", known, TOOL_NAMES, detect)

    def choose_reasoning(self, requested: str | None, template: str) -> FormatChoice:
        """As `choose_tools`."""
        detect = {name: self.reasoning[name].detect for name in REASONING_ORDER}
        known = {*self.reasoning, *self.reasoning_classes}
        return _choose(requested, template, "reasoning_parser", known, REASONING_NAMES, detect)


def _choose(
    requested: str | None, template: str, field: str, known: Collection[str],
    others: Mapping[str, str], detect: Mapping[str, tuple[str, ...]],
) -> FormatChoice:  # fmt: skip
    if requested in OFF:
        return FormatChoice("", f"{field}={requested!r}")
    if requested is None or requested == AUTO:
        text = template.replace('\\"', '"').replace("\\'", "'")
        for name, texts in detect.items():
            if texts and all(one in text for one in texts):
                return FormatChoice(
                    name, "the checkpoint's template has " + " and ".join(map(repr, texts))
                )
        return FormatChoice("", "the checkpoint's template shows no known format")
    name = requested if requested in known else others.get(requested, "")
    if not name:
        names = ("auto", "none", *sorted({*known, *others}))
        remedy = PARSERS.get(requested) or choose_from(requested, names)
        what = "is not supported yet" if requested in PARSERS else "is unknown"
        raise ConfigError(f"{field}={requested!r} {what}; {remedy}")
    reason = f"{field}={requested!r}"
    return FormatChoice(
        name, reason if name == requested else f"{reason}, which uses the format {name}"
    )
