"""A chat request's tools: validation, `tool_choice`, and the tool calls of earlier messages.

Knows OpenAI's shapes of tools, `tool_choice` and messages. Does not know how a model writes a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from quire import env
from quire.frontend.parsers.tool_schemas import function
from quire.server.errors import invalid
from quire.server.schemas import ChatRequest

NAME = re.compile(r"[A-Za-z0-9_.:/\-]{1,256}")


@dataclass(slots=True)
class ToolChoice:
    """The tools that the model may call, and whether it must call one."""

    kind: Literal["none", "auto", "required", "named"]
    tools: list[dict[str, Any]]

    @property
    def must(self) -> bool:
        return self.kind in ("required", "named")


def tool_choice_of(body: ChatRequest) -> ToolChoice:
    """Parse `tools` and `tool_choice`.

    Raises:
        ApiError: 400 that names the field.
    """
    tools = checked(body.tools)
    asked = body.tool_choice
    if asked is None:
        asked = "auto" if tools else "none"
    if asked == "none" or (asked == "auto" and not tools):
        return ToolChoice("none", [])
    if not tools:
        raise invalid("`tool_choice` requires a call, but `tools` is missing", "tool_choice")
    if asked == "auto":
        return ToolChoice("auto", tools)
    if asked == "required":
        return ToolChoice("required", tools)
    name = function(asked).get("name") if isinstance(asked, Mapping) else None
    if not isinstance(name, str) or asked.get("type", "function") != "function":
        raise invalid(
            "`tool_choice` must be none, auto, required, or"
            ' {"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    named = [tool for tool in tools if function(tool)["name"] == name]
    if not named:
        known = ", ".join(function(tool)["name"] for tool in tools[:20])
        raise invalid(
            f"`tool_choice`: unknown tool {name[:200]!r}; the tools are {known}", "tool_choice"
        )
    return ToolChoice("named", named)


def checked(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools, validated. Raises ApiError 400."""
    if tools is None:
        return []
    if not tools:
        raise invalid("`tools` is empty; leave it out", "tools")
    if len(tools) > (limit := env.get("MAX_TOOLS")):
        raise invalid(f"`tools` has {len(tools)} entries; the limit is {limit}", "tools")
    seen = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type", "function") != "function":
            raise invalid(
                f"`{where}.type` is {tool.get('type')!r}; only tools of type function are supported",
                "tools",
            )
        definition = function(tool)
        name, schema = definition.get("name"), definition.get("parameters")
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise invalid(
                f"`{where}.function.name` must be 1 to 256 letters, digits or _ . : / -", "tools"
            )
        if schema is not None and not isinstance(schema, dict):
            raise invalid(f"`{where}.function.parameters` must be a JSON schema", "tools")
        if name in seen:
            raise invalid(f"`{where}`: two tools are named {name!r}", "tools")
        seen.add(name)
    return tools


def with_calls_read(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the arguments of their tool calls as objects, as chat templates expect them.

    Raises:
        ApiError: 400 that names the place.
    """
    if not any(message.get("tool_calls") for message in messages):
        return messages
    return [
        {**message, "tool_calls": _calls(message["tool_calls"], f"messages[{index}].tool_calls")}
        if message.get("tool_calls")
        else message
        for index, message in enumerate(messages)
    ]


def _calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise invalid(f"`{where}` must be a list", where)
    found = []
    for index, call in enumerate(calls):
        inner = call.get("function") if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise invalid(f"`{where}[{index}].function.name` is missing", where)
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
            except (msgspec.DecodeError, RecursionError) as error:
                raise invalid(f"`{where}[{index}].function.arguments` is not JSON: {error}", where) from error  # fmt: skip
        if not isinstance(arguments, dict | None):
            raise invalid(f"`{where}[{index}].function.arguments` must be a JSON object", where)
        found.append({**call, "function": {**inner, "arguments": arguments or {}}})
    return found
