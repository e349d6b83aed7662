"""Chat templates: a conversation -> the prompt format that the model was trained on.

Renders the same text as transformers' apply_chat_template (a test compares them). Knows the shape of a message and
where checkpoints keep their templates. Does not know Jinja (`jinja_sandbox` does) or tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from quire.errors import ConfigError, ValidationError
from quire.frontend.jinja_sandbox import SECONDS, render_template
from quire.models.json_files import read_object

ContentFormat = Literal["string", "openai"]

# Appended to the message to continue. Its last space shows whether the template trims.
MARK = "⁂continue⁂ "
PROBE = "⁂probe⁂"
PROBE_SECONDS = 1.0
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field, newest last
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
SETTINGS = (
    "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "tokenizer_kwargs", "return_assistant_tokens_mask", "conversation",
)  # fmt: skip


def plain(value: Any) -> Any:
    """A copy in JSON types, so that a template never sees an object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return plain(value.item())
    return f"<{type(value).__name__}>"


class Renderer(Protocol):
    """Renders templates elsewhere, as `render_template`."""

    def render_source(self, source: str, variables: Mapping[str, Any], seconds: float) -> str: ...
    def prepare(self) -> None: ...


class ChatTemplate:
    """A template's text, compiled at first use."""

    def __init__(self, source: str, named: dict[str, str] | None = None):
        self.source = source
        self.isolated: Renderer | None = None
        """Renders the template of a model by strangers; None: this process does."""
        self.named = named or {}
        """Other templates of the checkpoint, by name; `render` uses "tool_use" when there are tools."""

    @classmethod
    def of_argument(cls, template: str, may_be_path: bool = True) -> ChatTemplate:
        """From a path, or from the text itself. Cached by text, because its properties are costly to compute.

        Raises:
            ConfigError: neither a file nor a template.
        """
        return _of_source(read_given(template) if may_be_path else template)

    @classmethod
    def find(
        cls, folder: Path, config: dict[str, Any], template: str | None
    ) -> ChatTemplate | None:
        """The given template (a path, or the text itself), else the checkpoint's; None if it has none.

        Raises:
            ConfigError: `template` is neither a file nor a template.
        """
        if template is not None:
            return cls.of_argument(template)
        file, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
        named = {
            path.stem: path.read_text(encoding="utf-8") for path in sorted(more.glob("*.jinja"))
        }
        if file.is_file():
            return cls(file.read_text(encoding="utf-8"), named)
        source = config.get("chat_template")
        if isinstance(source, list):  # the older form of several templates
            named = {entry["name"]: entry["template"] for entry in source} | named
            source = named.pop("default", None)
        if source is None:
            source = read_object(folder / "chat_template.json").get("chat_template")
        return cls(source, named) if isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        seconds: float = SECONDS,
    ) -> str:
        """Render the prompt. `variables`: special tokens by name, and the request's own variables.

        Raises:
            ValidationError: the conversation is empty, or the template rejects it (the message quotes the template).
            TemplateTooSlow: it takes longer than `seconds`.
            ConfigError: the template does not parse.
        """
        if not messages:
            raise ValidationError("messages must not be empty", parameter="messages", value=[])
        if continue_final_message and add_generation_prompt:
            raise ValidationError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                parameter="continue_final_message",
                value=True,
            )
        chat = [_message(message) for message in messages]
        if continue_final_message:
            _mark_last(chat)
        extra = {
            k: v for k, v in plain(dict(variables or {})).items() if k not in RESERVED + SETTINGS
        }
        source = self.named.get("tool_use", self.source) if tools else self.source
        known = {
            "messages": chat,
            "tools": None if tools is None else [_tool(tool) for tool in tools],
            "documents": plain(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(source, known | extra, seconds)
        return _cut_at_mark(text) if continue_final_message else text

    def _render(self, source: str, variables: Mapping[str, Any], seconds: float) -> str:
        if self.isolated is not None:
            return self.isolated.render_source(source, variables, seconds)
        return render_template(source, variables, seconds)

    @functools.cached_property
    def content_format(self) -> ContentFormat:
        """Whether the template reads a message's content as a list of parts (openai) or as one string."""
        parts = [{"type": "text", "text": PROBE}]
        for role in ("user", "system"):
            before, mark, _ = self._probe(role, parts).partition(PROBE)
            if mark and not before.endswith(("'text': '", '"text": "', '"text":"')):
                return "openai"
        return "string"

    @functools.cached_property
    def takes_strings(self) -> bool:
        """Whether content may be a string; a template that reads parts often accepts both."""
        return PROBE in self._probe("user", PROBE)

    def _probe(self, role: str, content: Any) -> str:
        variables = {
            "messages": [{"role": role, "content": content}], "tools": None, "documents": None,
            "add_generation_prompt": False, "bos_token": "", "eos_token": "",
        }  # fmt: skip
        try:
            return self._render(self.source, variables, PROBE_SECONDS)
        except Exception:  # any error means that the template does not accept this form
            return ""


@functools.lru_cache(maxsize=32)
def _of_source(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def read_given(template: str) -> str:
    """The template text: the content of the file of that name, or `template` itself.

    Raises:
        ConfigError: `template` looks like a path, and there is no such file.
    """
    if "{" not in template and "\n" not in template:
        path = Path(template).expanduser()
        if not path.is_file():
            raise ConfigError(f"chat_template={template!r} is neither a file nor a Jinja template")
        return path.read_text(encoding="utf-8")
    return template


def _message(message: Any) -> dict[str, Any]:
    fields = plain(message)
    if not isinstance(fields, dict):
        raise ValidationError(
            f"each message must be an object with role and content, not {type(message).__name__}",
            parameter="messages",
        )
    fields = {key: value for key, value in fields.items() if value is not None}
    thought = next((fields[key] for key in REASONING if key in fields), None)
    if thought is not None:
        fields = {"thinking": thought, **fields, "reasoning_content": thought}
    return fields


def _tool(tool: Any) -> Any:
    if callable(tool):
        from transformers.utils import get_json_schema

        return plain(get_json_schema(tool))
    return plain(tool)


def _mark_last(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + MARK
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and "text" in part:
            part["text"] += MARK
            return
    raise ValidationError(
        "continue_final_message needs a final message with text to continue", parameter="messages"
    )


def _cut_at_mark(text: str) -> str:
    end = text.rfind(MARK.rstrip())
    if end < 0:
        raise ValidationError(
            "continue_final_message cannot be used here: the chat template changes or drops the final message",
            parameter="continue_final_message",
            value=True,
        )
    return text[:end] if text.startswith(MARK, end) else text[:end].rstrip()
