"""What the grammar demands when a call must come, or must keep to its tool's schema: a structural tag.

Knows formats and the shape of structural tags. Does not know grammars. The calls are written as the model's own
format writes them, where a grammar can write it, and else as a JSON list (`formats.ANY_CALLS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from quire.frontend.parsers.formats import ANY_CALLS
from quire.frontend.parsers.schema import function
from quire.frontend.parsers.table import Format, Reasoning, Wrap
from quire.protocol.constraint import KINDS, StructuredOutputsParams

JSON = dict[str, Any]


def forced(format: Format | None) -> Format:
    """The format in which calls are written that must come: the model's, or one that any model can follow."""
    return format if format is not None and format.wrap is not None else ANY_CALLS


def calls_only(
    format: Format, tools: Sequence[Mapping[str, Any]], parallel: bool,
    reasoning: Reasoning | None = None, opened: bool | None = None,
) -> JSON:  # fmt: skip
    """A structural tag: thoughts, if the model has any, and then one of the tools or several."""
    wrap = format.wrap
    if wrap is None:
        raise ValueError("the format has no wrap")
    calls: JSON = {
        "type": "tags_with_separator", "tags": [_tag(wrap, tool) for tool in tools],
        "separator": wrap.between, "at_least_one": True,
        "stop_after_first": wrap.one or not parallel,
    }  # fmt: skip
    parts = [*_thoughts(reasoning, opened), *_text(wrap.first), calls, *_text(wrap.last)]
    form = parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}
    return {"type": "structural_tag", "format": form}


def strict_calls(format: Format, tools: Sequence[Mapping[str, Any]]) -> JSON | None:
    """A structural tag: any text, in which calls keep to the schemas of their tools; None: it cannot be said.

    A tool that is not strict may have any object.
    """
    wrap = format.wrap
    if wrap is None or wrap.first or not any(is_strict(tool) for tool in tools):
        return None
    content = format.states["content"].on
    trigger = next((mark for mark in content if wrap.begin.startswith(mark)), None)
    if trigger is None:
        return None
    tags = [_tag(wrap, tool, free=not is_strict(tool)) for tool in tools]
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": [trigger], "tags": tags},
    }


def after_thoughts(
    form: StructuredOutputsParams, reasoning: Reasoning, opened: bool | None
) -> StructuredOutputsParams:
    """The same form for the answer alone: the model may think first. A form that cannot be so put stays as it is."""
    inner = _as_part(form)
    parts = [*_thoughts(reasoning, opened), *_text(reasoning.answer)]
    if inner is None or not parts:
        return form
    whole = {"type": "sequence", "elements": [*parts, inner]}
    others = {kind: None for kind in KINDS}
    tag = {"type": "structural_tag", "format": whole}
    return replace(form, **{**others, "structural_tag": tag})


def _as_part(form: StructuredOutputsParams) -> JSON | None:
    if form.json is not None:
        return {"type": "json_schema", "json_schema": form.json}
    if form.json_object is not None:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if form.regex is not None:
        return {"type": "regex", "pattern": form.regex}
    if form.grammar is not None:
        return {"type": "grammar", "grammar": form.grammar}
    if form.choice is not None:
        texts = [{"type": "const_string", "value": text} for text in form.choice]
        return {"type": "or", "elements": texts}
    tag = form.structural_tag
    return tag.get("format") if isinstance(tag, dict) else None


def is_strict(tool: Mapping[str, Any]) -> bool:
    return function(tool).get("strict", tool.get("strict")) is True


def _tag(wrap: Wrap, tool: Mapping[str, Any], free: bool = False) -> JSON:
    found = function(tool)
    schema = {"type": "object"} if free else found.get("parameters") or {"type": "object"}
    return {
        "type": "tag", "begin": wrap.begin.replace("NAME", str(found.get("name"))),
        "content": {"type": "json_schema", "json_schema": schema}, "end": wrap.end,
    }  # fmt: skip


def _text(text: str) -> list[JSON]:
    return [{"type": "const_string", "value": text}] if text else []


def _thoughts(reasoning: Reasoning | None, opened: bool | None) -> list[JSON]:
    if reasoning is None or not reasoning.ends or opened is False:
        return []
    begin = "" if opened or (reasoning.implied and opened is None) else reasoning.starts[0]
    tag: JSON = {
        "type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": reasoning.ends[0],
    }  # fmt: skip
    after = [{"type": "optional", "content": part} for part in _text(reasoning.after)]
    if begin:
        whole = {"type": "sequence", "elements": [tag, *after]} if after else tag
        return [{"type": "optional", "content": whole}]
    return [tag, *after]
