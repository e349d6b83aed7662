"""The parser driven by tests: texts cut at random, and what came out put together."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from call_writers import TOOLS

from quire.frontend.parsers.format_table import compose
from quire.frontend.parsers.formats import REASONING
from quire.frontend.parsers.formats import TOOLS as FORMATS
from quire.frontend.parsers.stream_parser import StreamParser
from quire.frontend.parsers.tool_schemas import ToolSchemas


@dataclass
class Read:
    reasoning: str = ""
    content: str = ""
    ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(n, json.loads(a)) for n, a in zip(self.names, self.arguments, strict=True)]


def parser(tools: str, reasoning: str = "", opened: bool | None = None) -> StreamParser:
    grammar = compose(FORMATS.get(tools), REASONING.get(reasoning), opened)
    return StreamParser(grammar, ToolSchemas(TOOLS), make_id=lambda kind: kind)


def together(made: StreamParser, pieces: list[str]) -> Read:
    """What the pieces come to; each delta is checked for its shape."""
    read = Read()
    for parsed in [*(made.feed(piece) for piece in pieces), made.finish()]:
        read.reasoning += parsed.reasoning
        read.content += parsed.content
        for call in parsed.calls:
            if call.id is not None:
                assert call.index == len(read.names)
                assert call.name
                read.ids.append(call.id)
                read.names.append(call.name)
                read.arguments.append("")
            else:
                assert call.name is None
                assert call.index == len(read.names) - 1
            read.arguments[call.index] += call.arguments
    read.reasons = list(made.failures)
    return read


def cuts(rng: random.Random, text: str) -> list[str]:
    """Pieces of random length: often single characters, sometimes nothing."""
    pieces, at = [], 0
    typical = rng.choice([1, 2, 5, 20])
    while at < len(text):
        size = min(rng.randrange(typical * 2 + 1), len(text) - at)
        pieces.append(text[at : at + size])
        at += size
    return pieces
