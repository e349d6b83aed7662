"""Items of the Responses protocol: input items -> chat messages, deltas -> output items.

Knows messages, reasoning, function calls and their outputs. Does not know whole requests or answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.frontend.media.content_parts import MediaPart
from quire.server.errors import invalid
from quire.server.openai.chat_output import OutputPiece, pieces
from quire.server.output_delta import OutputDelta

JSON = dict[str, Any]
Namespaces = dict[str, tuple[str, str]]
"""A function's name for the model -> its namespace, and its name in it."""
SEPARATOR = "__"
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


# -- in -------------------------------------------------------------------------------------------
def text_of(content: Any, where: str) -> str:
    """Raises ApiError 400: a part is not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"`{where}` must be a string or a list of parts", where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise invalid(
                f"`{where}[{index}]`: parts of type {kind!r} are not supported by this model",
                f"{where}[{index}]",
            )
        texts.append(part["text"])
    return "".join(texts)


def content_of(content: Any, where: str) -> Any:
    """As `text_of`; with pictures a list of parts, whose neighbouring texts are joined. Raises: as `text_of`."""
    if not isinstance(content, list) or not any(isinstance(part, MediaPart) for part in content):
        return text_of(content, where)
    parts: list[JSON] = []
    for index, part in enumerate(content):
        if isinstance(part, MediaPart):
            parts.append(part)
            continue
        text = text_of([part], f"{where}[{index}]")
        if parts and "text" in parts[-1]:
            parts[-1]["text"] += text
        else:
            parts.append({"type": "text", "text": text})
    return parts


def messages_of(items: list[JSON]) -> list[JSON]:
    """Input items as chat messages; consecutive reasoning, text and calls become one assistant message.

    Raises:
        ApiError: 400 that names the place.
    """
    messages: list[JSON] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message" and isinstance(item.get("role"), str):
            role = "system" if item["role"] == "developer" else item["role"]
            text = content_of(item.get("content"), f"{where}.content")
            if (
                role == "assistant"
                and (last := _open(messages)) is not None
                and not last["content"]
            ):
                last["content"] = text
            else:
                messages.append({"role": role, "content": text})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            last = {"role": "assistant", "content": "", "reasoning": text_of(parts, where)}
            messages.append(last)
        elif kind == "function_call":
            _add_call(messages, item, where)
        elif kind == "function_call_output":
            text = content_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        else:
            raise invalid(
                f"`{where}`: only messages, reasoning, function_call and function_call_output are supported",
                where,
            )
    return messages


def _open(found: list[JSON]) -> JSON | None:
    """The last message, if it is the assistant's and can take further items."""
    last = found[-1] if found else None
    return last if last is not None and last["role"] == "assistant" else None


def _add_call(found: list[JSON], item: JSON, where: str) -> None:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise invalid(f"`{where}` must have a `name`, and `arguments` as a string", where)
    if (last := _open(found)) is None:
        last = {"role": "assistant", "content": ""}
        found.append(last)
    if isinstance(namespace := item.get("namespace"), str):
        name = namespace + SEPARATOR + name
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    last.setdefault("tool_calls", []).append(call)


def tools_of(tools: list[JSON] | None) -> list[JSON] | None:
    """Tools in chat's form; a function of a namespace is called `<namespace>__<name>`.

    Raises:
        ApiError: 400 that names the place.
    """
    if tools is None:
        return None
    return [
        function
        for index, tool in enumerate(tools)
        for function in _functions(tool, f"tools[{index}]")
    ]


def _functions(tool: JSON, where: str) -> list[JSON]:
    if tool.get("type") == "namespace":
        namespace, inner = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not isinstance(inner, list):
            raise invalid(
                f"`{where}` must have a `name`, and a list of functions in `tools`", "tools"
            )
        return [
            _function(one, f"{where}.tools[{index}]", namespace + SEPARATOR)
            for index, one in enumerate(inner)
        ]
    return [_function(tool, where, "")]


def _function(tool: Any, where: str, prefix: str) -> JSON:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        kinds = "function" if prefix else "function and namespace"
        raise invalid(
            f"`{where}.type` is {kind!r}; only tools of type {kinds} are supported", "tools"
        )
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    if prefix:
        if not isinstance(function.get("name"), str):
            raise invalid(f"`{where}.name` must be a string", "tools")
        function["name"] = prefix + function["name"]
    return {"type": "function", "function": function}


def namespaces_of(tools: list[JSON] | None) -> Namespaces:
    """The functions of namespaces, by the name that the model sees. `tools` are valid."""
    return {
        tool["name"] + SEPARATOR + inner["name"]: (tool["name"], inner["name"])
        for tool in tools or ()
        if tool.get("type") == "namespace"
        for inner in tool["tools"]
    }


def choice_of(choice: Any, tools: list[JSON] | None = None) -> Any:
    """`tool_choice` in chat's form. A function of a namespace may be named without the namespace, if no other has its name.

    Raises:
        ApiError: 400: several namespaces have this name.
    """
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    name = choice.get("name")
    namespaces = namespaces_of(tools)
    if name not in namespaces and all(tool.get("name") != name for tool in tools or ()):
        flat = [full for full, (_, local) in namespaces.items() if local == name]
        if len(flat) > 1:
            raise invalid(f"`tool_choice`: {name!r} is in several namespaces; name one of {', '.join(flat[:20])}", "tool_choice")  # fmt: skip
        name = flat[0] if flat else name
    return {"type": "function", "function": {"name": name}}


# -- out ------------------------------------------------------------------------------------------
def part_of(text: str, logprobs: Any) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def joined(before: Any, later: Any) -> Any:
    """Both lists in one; a LongList is never joined with another list that has entries."""
    return [*before, *later] if before and later else before or later


def thought_of(text: str) -> JSON:
    return {"type": "reasoning_text", "text": text}


@dataclass(slots=True)
class ResponseItems:
    """The output items of one answer, built from its deltas."""

    id: str
    """Suffix of the items' ids."""
    event: Callable[..., bytes]
    logprobs: Callable[[OutputDelta], Any]
    """Log-probabilities of a delta's tokens: a list, or a LongList if there is a single delta."""
    namespaces: Namespaces = field(default_factory=dict)
    stable_ids: bool = False
    """Ids of calls are made from `id`, not drawn: another process makes the same."""
    done: list[JSON] = field(default_factory=list)
    _new: OutputPiece | None = None
    _parts: list[str] = field(default_factory=list)
    _id: str = ""
    _logprobs: Any = ()
    """Log-probabilities of the current item's text."""
    _waiting: Any = ()
    """Log-probabilities of tokens whose text has not come yet."""

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        """The events of a delta."""
        self._waiting = joined(self._waiting, self.logprobs(delta))
        for new in pieces(delta):
            if self._new is None or (new.kind, new.index) != (self._new.kind, self._new.index):
                yield from self.close("completed")
                yield from self._open(new)
            if new.text:
                self._parts.append(new.text)
                yield self._delta(new)
        if delta.reasoning and not delta.text:
            self._waiting = ()  # they belong to the reasoning

    def end(self, status: str) -> Iterator[bytes]:
        """Close the last item. An answer has at least one item."""
        if self._new is None and not self.done:
            yield from self._open(OutputPiece("text", ""))
        yield from self.close(status)

    def _place(self) -> JSON:
        return {"output_index": len(self.done)}

    def _inside(self) -> JSON:
        return {**self._place(), "item_id": self._id, "content_index": 0}

    def _open(self, new: OutputPiece) -> Iterator[bytes]:
        self._new, self._parts, self._logprobs = new, [], ()
        kind = {"thinking": "rs", "text": "msg", "call": "fc"}[new.kind]
        again = sum(item["id"].startswith(f"{kind}_") for item in self.done)
        self._id = f"{kind}_{self.id}" + (f"_{again}" if again else "")
        yield self.event("output_item.added", **self._place(), item=self._item("in_progress", None))
        if new.kind != "call":
            part = part_of("", ()) if new.kind == "text" else thought_of("")
            yield self.event("content_part.added", **self._inside(), part=part)

    def _item(self, status: str, text: str | None) -> JSON:
        new, id_ = self._new, self._id
        if new is None or new.kind == "text":
            content = [] if text is None else [part_of(text, self._logprobs)]
            return {"id": id_, "type": "message", "role": "assistant", "status": status, "content": content}  # fmt: skip
        if new.kind == "thinking":
            thoughts = [] if text is None else [thought_of(text)]
            return {"id": id_, "type": "reasoning", "status": status, "summary": [], "content": thoughts}  # fmt: skip
        namespace, name = self.namespaces.get(new.name or "", (None, new.name))
        call = {
            "id": id_, "type": "function_call", "status": status, "name": name,
            "call_id": f"call_{id_}" if self.stable_ids else new.id,
            "arguments": text or "",
        }  # fmt: skip
        return call if namespace is None else call | {"namespace": namespace}

    def _delta(self, new: OutputPiece) -> bytes:
        if new.kind == "text":
            logprobs, self._waiting = self._waiting, ()
            self._logprobs = joined(self._logprobs, logprobs)
            return self.event(
                "output_text.delta", **self._inside(), delta=new.text, logprobs=logprobs
            )
        if new.kind == "thinking":
            return self.event("reasoning_text.delta", **self._inside(), delta=new.text)
        place = {**self._place(), "item_id": self._id}
        return self.event("function_call_arguments.delta", **place, delta=new.text)

    def close(self, status: str) -> Iterator[bytes]:
        if self._new is None:
            return
        text, kind = "".join(self._parts), self._new.kind
        if kind == "text":
            self._logprobs = joined(self._logprobs, self._waiting)
        self._waiting = ()
        item = self._item(status, text)
        if kind == "text":
            yield self.event(
                "output_text.done", **self._inside(), text=text, logprobs=self._logprobs
            )
            yield self.event(
                "content_part.done", **self._inside(), part=part_of(text, self._logprobs)
            )
        elif kind == "thinking":
            yield self.event("reasoning_text.done", **self._inside(), text=text)
            yield self.event("content_part.done", **self._inside(), part=thought_of(text))
        else:
            place = {**self._place(), "item_id": self._id}
            yield self.event("function_call_arguments.done", **place, name=item["name"], arguments=text)  # fmt: skip
        yield self.event("output_item.done", **self._place(), item=item)
        self.done.append(item)
        self._new = None
