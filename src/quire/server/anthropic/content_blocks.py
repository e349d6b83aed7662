"""Content blocks of Anthropic's protocol: input blocks -> chat messages, deltas -> output blocks.

Knows text, thinking, tool_use and tool_result blocks. Does not know whole requests or answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.frontend.media.content_parts import MediaPart
from quire.server.errors import invalid
from quire.server.openai.chat_output import OutputPiece, pieces
from quire.server.output_delta import OutputDelta
from quire.server.sse import event

JSON = dict[str, Any]
PICTURES = "image"
"""The kind of blocks that have been replaced by MediaParts where pictures are allowed."""


# -- in -------------------------------------------------------------------------------------------
def text_of(content: Any, where: str) -> str:
    """The text of a string, or of a list of text blocks.

    Raises:
        ApiError: 400 for other kinds of block.
    """
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in blocks_of(content, where, ("text",)))


def blocks_of(content: Any, where: str, kinds: tuple[str, ...]) -> list[JSON]:
    """The content as a list of blocks. Raises ApiError 400: a block of another kind than `kinds`."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(f"`{where}` must be a string or a list of blocks", where)
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(block, MediaPart) and PICTURES in kinds:
            continue
        need = {"text": "text", "thinking": "thinking"}.get(str(kind))
        if (
            kind not in kinds
            or kind == PICTURES
            or (need is not None and not isinstance(block.get(need), str))
        ):
            raise invalid(
                f"`{where}[{index}]`: blocks of type {kind!r} are not supported by this model",
                f"{where}[{index}]",
            )
    return content


def messages_of(role: str, content: Any, where: str) -> list[JSON]:
    """A message as one or several chat messages; tool results come before the user's text."""
    if role == "assistant":
        return [_of_assistant(content, where)]
    if role != "user":
        return [{"role": role, "content": text_of(content, where)}]
    messages, parts = list[JSON](), list[JSON]()
    for index, block in enumerate(blocks_of(content, where, ("text", "tool_result", PICTURES))):
        if block["type"] in ("text", "image"):
            parts.append(block)
            continue
        inner = blocks_of(
            block.get("content") or "", f"{where}[{index}].content", ("text", PICTURES)
        )
        result = {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": joined(inner),
        }
        messages.append(result)
    if parts or not messages:
        messages.append({"role": "user", "content": joined(parts)})
    return messages


def joined(blocks: list[JSON]) -> Any:
    """Blocks as the content of a chat message: one text; with pictures a list of parts, whose neighbouring texts are joined."""
    if not any(isinstance(block, MediaPart) for block in blocks):
        return "".join(block["text"] for block in blocks)
    parts: list[JSON] = []
    for block in blocks:
        if isinstance(block, MediaPart):
            parts.append(block)
        elif parts and "text" in parts[-1]:
            parts[-1]["text"] += block["text"]
        else:
            parts.append({"type": "text", "text": block["text"]})
    return parts


def _of_assistant(content: Any, where: str) -> JSON:
    kinds = ("text", "thinking", "redacted_thinking", "tool_use")
    blocks = blocks_of(content, where, kinds)
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = []
    for index, block in enumerate(blocks):
        if block["type"] != "tool_use":
            continue
        name, given = block.get("name"), block.get("input")
        if not isinstance(name, str) or not isinstance(given, dict):
            raise invalid(
                f"`{where}[{index}]` must have a `name`, and an object as `input`",
                f"{where}[{index}]",
            )
        function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
        calls.append({"id": block.get("id"), "type": "function", "function": function})
    message: JSON = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def tools_of(tools: list[JSON]) -> list[JSON]:
    """Tools in chat's form."""
    functions = []
    for index, tool in enumerate(tools):
        if tool.get("type", "custom") != "custom":
            raise invalid(
                f"`tools[{index}].type` is {tool.get('type')!r}; this server has no built-in tools: send tools with a name and an input_schema",
                "tools",
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        for name in ("description", "strict"):
            if tool.get(name) is not None:
                function[name] = tool[name]
        functions.append({"type": "function", "function": function})
    return functions


def choice_of(choice: JSON | None) -> Any:
    """`tool_choice` in chat's form."""
    kind = (choice or {}).get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": (choice or {}).get("name")}}
    known = {"auto": None, "any": "required", "none": "none"}
    if kind not in known:
        raise invalid("`tool_choice.type` must be auto, any, tool or none", "tool_choice")
    return known[kind]


# -- out ------------------------------------------------------------------------------------------
STARTS: dict[str, JSON] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


@dataclass(slots=True)
class ContentBlocks:
    """The content blocks of one answer, built from its deltas."""

    done: list[JSON] = field(default_factory=list)
    _kind: str = ""
    _call: int = -1
    _parts: list[str] = field(default_factory=list)
    _head: JSON = field(default_factory=dict)

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        """The events of a delta."""
        for new in pieces(delta):
            if (new.kind, new.index) != (self._kind, self._call):
                yield from self.close()
                yield self._open(new)
            if new.text:
                self._parts.append(new.text)
                yield self._event("content_block_delta", delta=_delta(new.kind, new.text))

    def end(self) -> Iterator[bytes]:
        """Close the last block. An answer has at least one block."""
        if not self._kind and not self.done:
            yield self._open(OutputPiece("text", ""))
        yield from self.close()

    def close(self) -> Iterator[bytes]:
        if not self._kind:
            return
        yield self._event("content_block_stop")
        text = "".join(self._parts)
        if self._kind == "call":
            self.done.append({**self._head, "input": as_object(text)})
        else:
            name = "thinking" if self._kind == "thinking" else "text"
            self.done.append({**self._head, name: text})
        self._kind, self._call, self._parts = "", -1, []

    def _open(self, new: OutputPiece) -> bytes:
        self._kind, self._call = new.kind, new.index
        if new.kind == "call":
            self._head = {"type": "tool_use", "id": new.id, "name": new.name, "input": {}}
        else:
            self._head = STARTS[new.kind]
        return self._event("content_block_start", content_block=self._head)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "index": len(self.done), **fields})


def _delta(kind: str, text: str) -> JSON:
    if kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": f"{kind}_delta", kind: text}


def as_object(text: str) -> Any:
    """A call's arguments; {} if they are truncated."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
