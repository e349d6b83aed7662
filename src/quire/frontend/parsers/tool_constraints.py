"""Tool constraints: structural tags that force or shape tool calls and answers.

Knows formats and the form of structural tags. Does not know grammars. Calls use the model's own format if a grammar
can express it, else a JSON list (`formats.ANY_CALLS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from quire.frontend.parsers.format_table import CallTemplate, Parameter, ReasoningFormat, ToolFormat
from quire.frontend.parsers.formats import ANY_CALLS
from quire.frontend.parsers.literal_constraints import any_arguments, arguments
from quire.frontend.parsers.tool_schemas import ToolSchemas, function
from quire.protocol.structured_outputs import FIELD, KINDS, StructuredOutputsParams

JSON = dict[str, Any]

# For calls that are not JSON, whose schemas the event loop converts.
MAX_SCHEMA_NODES = 10_000
MAX_TAG_NODES = 50_000  # 128 tools of six parameters: 20,000
ANY_OBJECT: JSON = {"type": "object"}
FREE_KEY = r"[^<>\"\s]{1,64}"
ANY_TEXT: JSON = {"type": "any_text"}
GAP: JSON = {"type": "optional", "content": {"type": "const_string", "value": "\n"}}
TO_THE_END = r"(.|\n)*"
# For formats with one marker per parameter: the allowed keywords of a tool's schema, and of a string parameter.
ROOT = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "description", "title",
     "$schema", "default", "examples", "strict")
)  # fmt: skip
TEXT = frozenset(("type", "description", "title", "default", "examples", "enum", "const", "deprecated"))  # fmt: skip


# -- constraints ----------------------------------------------------------------------------------
def forced_format(format: ToolFormat | None, tools: Sequence[Mapping[str, Any]] = ()) -> ToolFormat:
    """The format for forced calls: the model's own if a grammar can express it, else ANY_CALLS."""
    expressible = format is not None and _calls(format, tools, True, "parameter") is not None
    return format if format is not None and expressible else ANY_CALLS


def calls_only(
    format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool,
    reasoning: ReasoningFormat | None = None, reasoning_open: bool | None = None, reasons: bool = True,
) -> JSON:  # fmt: skip
    """A structural tag: optional reasoning (none without `reasons`), then one or more tool calls."""
    calls = _calls(format, tools, parallel, "parameter")
    if calls is None:
        raise ValueError("the grammar cannot express the format")
    return _whole([*_reasoning_parts(reasoning, reasoning_open, reasons), *calls])


def auto_calls(
    format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool, level: str,
    reasoning: ReasoningFormat | None = None, reasoning_open: bool | None = None,
) -> JSON | None:  # fmt: skip
    """A structural tag: free text with well-formed calls; None: a grammar cannot express the format.

    A call names one of the tools. Its arguments follow the schema if the tool is strict or `level` is "parameter";
    otherwise they are free.
    """
    calls = _calls(format, tools, parallel, level)
    if format.call is None or calls is None:
        return None
    if reasoning is not None and reasoning.answer_marker:
        # Answers have a marker too, so there is no free text.
        before = {"type": "star", "content": _between(reasoning.starts[0], reasoning.ends[0])}
        text = {"type": "regex", "pattern": TO_THE_END}
        answer = _sequence([*_text(reasoning.answer_marker), text])
        return _whole([before, {"type": "or", "elements": [answer, _sequence(calls)]}])
    opening = format.call.prefix or format.call.begin
    found = format.states["content"].markers.items()
    markers = [marker for marker, to in found if " " not in to and opening.startswith(marker)]
    if not markers:
        return None
    tags = {
        "type": "triggered_tags", "triggers": markers, "stop_after_first": not parallel,
        "tags": _marked_calls(format.call, calls),
    }  # fmt: skip
    return _whole([*_reasoning_parts(reasoning, reasoning_open), tags])


def answer_or_calls(
    form: StructuredOutputsParams, reasoning: ReasoningFormat | None, reasoning_open: bool | None,
    calls: Sequence[JSON] = (), reasons: bool = True,
) -> StructuredOutputsParams:  # fmt: skip
    """Apply a constraint to the answer only: reasoning may precede it (with `reasons`), and `calls` may replace it.

    Returns the constraint unchanged if a structural tag cannot express it or need not.
    """
    inner = _as_part(form)
    before = _reasoning_parts(reasoning, reasoning_open, reasons)
    marker = [] if reasoning is None else _text(reasoning.answer_marker)
    if inner is None or not (before or marker or calls):
        return form
    answer = [*marker, inner]
    if calls:
        answer = [{"type": "or", "elements": [_sequence(answer), _sequence(list(calls))]}]
    others: dict[str, Any] = {kind: None for kind in KINDS}
    others["field_name"] = form.field_name if form.field_name != FIELD else f"{FIELD}.{form.kind}"
    return replace(form, **{**others, "structural_tag": _whole([*before, *answer])})


def call_parts(
    format: ToolFormat | None, tools: Sequence[Mapping[str, Any]], parallel: bool, level: str
) -> list[JSON]:
    """Calls only, as parts of a tag; []: a grammar cannot express them."""
    return [] if format is None else _calls(format, tools, parallel, level) or []


def is_strict(tool: Mapping[str, Any]) -> bool:
    return function(tool).get("strict", tool.get("strict")) is True


# -- calls ----------------------------------------------------------------------------------------
def _calls(
    format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool, level: str
) -> list[JSON] | None:
    template = format.call
    if template is None:
        return None
    is_not_json = template.parameter is not None or template.dialect
    schemas = [function(tool).get("parameters") for tool in tools]
    if is_not_json and not weighs_at_most(MAX_SCHEMA_NODES, schemas):
        return None
    tags = [_tag(template, tool, level != "parameter" and not is_strict(tool)) for tool in tools]
    if None in tags or (is_not_json and not weighs_at_most(MAX_TAG_NODES, tags)):
        return None
    calls: JSON = {
        "type": "tags_with_separator", "tags": tags, "separator": template.separator, "at_least_one": True,
        "stop_after_first": template.single or not parallel,
    }  # fmt: skip
    return [*_text(template.prefix), calls, *_text(template.suffix)]


def weighs_at_most(most: int, parts: Any) -> bool:
    """Whether there are at most that many nested parts, counting a shared part as often as it is serialized."""
    todo, count = [parts], 0
    while todo:
        node = todo.pop()
        inner = (
            node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
        )
        count += len(inner)
        if count > most:
            return False
        todo += inner
    return True


def _marked_calls(template: CallTemplate, calls: list[JSON]) -> list[JSON]:
    """The calls as tags that each begin with the opening marker."""
    (inner,) = (part for part in calls if part["type"] == "tags_with_separator")
    if not template.prefix:
        return list(inner["tags"])
    return [{"type": "tag", "begin": template.prefix, "content": inner, "end": template.suffix}]


def _tag(template: CallTemplate, tool: Mapping[str, Any], free: bool = False) -> JSON | None:
    """One call; None: this format cannot express the tool's schema."""
    definition = function(tool)
    name = str(definition.get("name"))
    schema = ANY_OBJECT if free else definition.get("parameters") or ANY_OBJECT
    begin, end = template.begin.replace("NAME", name), template.end
    parts: list[JSON] | None = [{"type": "json_schema", "json_schema": schema}]
    if template.dialect:
        parts = any_arguments(template.dialect) if free else arguments(template.dialect, schema)
    elif template.parameter is not None:
        parts = _parameters(template.parameter, ToolSchemas([tool]), name, schema)
    if parts is None:
        return None
    if not parts:
        return {"type": "tag", "begin": begin, "content": _text(end)[0], "end": ""}
    return {"type": "tag", "begin": begin, "content": _sequence(parts), "end": end}


def _parameters(
    parameter: Parameter, tools: ToolSchemas, name: str, schema: Mapping[str, Any]
) -> list[JSON] | None:
    """One part for each parameter, in the schema's order; None: the schema cannot be expressed."""
    if "properties" not in schema and set(schema) <= ROOT:
        return [_free_parameters(parameter)]
    properties, required = schema.get("properties"), schema.get("required", [])
    if (
        not set(schema) <= ROOT
        or schema.get("type", "object") != "object"
        or not isinstance(properties, Mapping)
        or not isinstance(required, list)
        or not all(isinstance(key, str) and key in properties for key in required)
    ):
        return None
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts: list[JSON] = []
    for key, value in properties.items():
        if not isinstance(value, Mapping):
            return None
        text = tools.is_text(name, key)
        content = _as_text(value) if text else {"type": "json_schema", "json_schema": {**value, **shared}}  # fmt: skip
        if content is None:
            return None
        begin = (parameter.text_begin or parameter.begin) if text else parameter.begin
        end = parameter.end if content is ANY_TEXT else parameter.before_end + parameter.end
        tag = {"type": "tag", "begin": begin.replace("KEY", key), "content": content, "end": end}
        part = _sequence([tag, GAP])
        parts.append(part if key in required else {"type": "optional", "content": part})
    return parts


def _as_text(schema: Mapping[str, Any]) -> JSON | None:
    """A string between markers, without quotes; None: the schema restricts it other than by a list of values."""
    if not set(schema) <= TEXT:
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is None:
        return ANY_TEXT
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(value, str) and value for value in values)
    ):
        return None
    return {"type": "or", "elements": [part for value in values for part in _text(value)]}


def _free_parameters(parameter: Parameter) -> JSON:
    """Any parameters with any values."""
    before, _, after = (parameter.text_begin or parameter.begin).partition("KEY")
    named = [*_text(before), {"type": "regex", "pattern": FREE_KEY}]
    text: JSON = {"type": "tag", "begin": after, "content": ANY_TEXT, "end": parameter.end}
    if parameter.text_begin:
        json_ = {
            "type": "tag", "begin": parameter.begin.partition("KEY")[2],
            "content": {"type": "json_schema", "json_schema": {}}, "end": parameter.end,
        }  # fmt: skip
        text = {"type": "or", "elements": [text, json_]}
    return {"type": "star", "content": _sequence([*named, text, GAP])}


# -- parts ----------------------------------------------------------------------------------------
def _whole(parts: list[JSON]) -> JSON:
    return {"type": "structural_tag", "format": _sequence(parts)}


def _sequence(parts: list[JSON]) -> JSON:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _text(text: str) -> list[JSON]:
    return [{"type": "const_string", "value": text}] if text else []


def _between(begin: str, end: str) -> JSON:
    return {"type": "tag", "begin": begin, "content": ANY_TEXT, "end": end}


def _as_part(form: StructuredOutputsParams) -> JSON | None:
    if form.json is not None:
        return {"type": "json_schema", "json_schema": form.json}
    if form.json_object is not None:
        return {"type": "json_schema", "json_schema": ANY_OBJECT}
    if form.regex is not None:
        return {"type": "regex", "pattern": form.regex}
    if form.grammar is not None:
        return {"type": "grammar", "grammar": form.grammar}
    if form.choice is not None:
        texts = [{"type": "const_string", "value": text} for text in form.choice]
        return {"type": "or", "elements": texts}
    tag = form.structural_tag
    return tag.get("format") if isinstance(tag, dict) else None


def _reasoning_parts(
    reasoning: ReasoningFormat | None, reasoning_open: bool | None, reasons: bool = True
) -> list[JSON]:
    """Reasoning before an answer. Without `reasons`: only the end of reasoning that the prompt has begun."""
    if reasoning is None or not reasoning.ends or reasoning_open is False:
        return []
    inside = reasoning.starts_in_reasoning if reasoning_open is None else reasoning_open
    begin = "" if inside else reasoning.starts[0]
    if begin and not reasons:
        return []
    end = reasoning.ends[0]
    tag = _between(begin, end) if reasons else {"type": "const_string", "value": end}
    after = [{"type": "optional", "content": part} for part in _text(reasoning.separator)]
    if begin:
        return [{"type": "optional", "content": _sequence([tag, *after])}]
    return [tag, *after]
