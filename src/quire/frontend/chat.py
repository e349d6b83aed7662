"""Chat rendering: a conversation in the chat API's form -> the prompt text.

Knows messages, content parts and templates. Does not know tokens, requests or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from quire.errors import ConfigError, Unsupported, ValidationError
from quire.frontend.chat_template import ChatTemplate, plain
from quire.frontend.jinja_sandbox import SECONDS, compile_template
from quire.protocol.validators import wrong

if TYPE_CHECKING:
    from quire.frontend.tokenizer import Tokenizer

TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
KEYWORDS = {
    "chat_template": "template", "chat_template_content_format": "content_format",
    "chat_template_kwargs": "template_kwargs", "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message", "tools": "tools", "documents": "documents",
}  # fmt: skip
"""Keyword of vLLM's `chat` -> field of ChatOptions."""
KINDS: dict[str, tuple[Any, str]] = {
    "chat_template": (str, "a template or its path"), "chat_template_kwargs": (Mapping, "a dict"),
    "tools": (Sequence, "a list"), "documents": (Sequence, "a list"),
}  # fmt: skip
FORMATS = ("auto", "string", "openai")
IN_PLACE = "string, placeholders in place"
NO_MEDIA: Mapping[str, str] = {}
MEDIA_PARTS = ("image", "video", "audio", "file")  # substrings of image_url, input_audio, ...


@dataclass(slots=True)
class ChatOptions:
    """Options for rendering messages as a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    """A path or the template itself; None: the checkpoint's."""
    template_may_be_path: bool = True
    """False for a client's template, which must not read files of this machine."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None
    content_format: str = "auto"
    """string: join the parts into one text; openai: pass the parts on; auto: what the template reads."""
    seconds: float = SECONDS
    """Time limit of the template."""
    media_in_place: bool = False
    """In a text, placeholders of pictures are where their parts are, not before the texts of the message."""
    media: dict[str, str] = field(default_factory=dict)
    """By type of part, image or video: what stands for one in a text; the other types are refused."""

    @classmethod
    def of_keywords(cls, keywords: dict[str, Any]) -> Self:
        """Take these options out of `keywords`, where they have vLLM's names.

        Raises:
            ValidationError: a value of another kind.
        """
        for name, (kind, must) in KINDS.items():
            if not isinstance(value := keywords.get(name), (kind, type(None))):
                raise wrong(name, value, must)
        form = keywords.get("chat_template_content_format") or "auto"
        if form not in FORMATS:
            raise wrong("chat_template_content_format", form, f"one of {', '.join(FORMATS)}")
        fields = {field: keywords.pop(name, None) for name, field in KEYWORDS.items()}
        return cls(**{field: value for field, value in fields.items() if value is not None})


def render(
    tokenizer: Tokenizer, messages: Sequence[Any], options: ChatOptions | None = None
) -> str:
    """Render the prompt text.

    Raises:
        ValidationError: no template, or messages that the template rejects; the given template does not
            parse or does not exist.
        TemplateTooSlow: the template takes longer than `options.seconds`.
        Unsupported: images, audio, video.
        ConfigError: the checkpoint's own template does not parse.
    """
    options = options or ChatOptions()
    template = tokenizer.template
    if options.template is not None:
        template = _own(options.template, options.template_may_be_path)
    if template is None:
        raise ValidationError(
            "this model has no chat template: start it with --chat-template (Python: chat_template=...), or send a text (prompt, input)",
            parameter="chat_template",
        )
    return rendered(template, messages, options, tokenizer.special_tokens_map)


def rendered(
    template: ChatTemplate, messages: Sequence[Any], options: ChatOptions, specials: Mapping[str, Any]
) -> str:  # fmt: skip
    """Render with this template; ignores `options.template`. `specials`: special tokens by name."""
    form = options.content_format
    wrap = form == "openai"
    if form == "auto":
        form = template.content_format
        wrap = form == "openai" and not template.takes_strings
    if form == "string" and options.media_in_place:
        form = IN_PLACE
    return template.render(
        [
            read_message(message, number, form, wrap, options.media)
            for number, message in enumerate(messages)
        ],
        tools=options.tools or None,
        documents=options.documents,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        variables={**specials, **options.template_kwargs},
        seconds=options.seconds,
    )


def _own(text: str, may_be_path: bool) -> ChatTemplate:
    try:
        template = ChatTemplate.of_argument(text, may_be_path)
        compile_template(template.source)
    except (ConfigError, OSError) as error:
        raise ValidationError(str(error), parameter="chat_template", value=text) from error
    return template


def read_message(
    message: Any, number: int, form: str, wrap: bool, media: Mapping[str, str] = NO_MEDIA
) -> dict[str, Any]:
    """Convert one message to JSON types.

    A list of parts becomes one text with `form` string and stays a list with openai; `wrap` makes a text a list.
    `media`: see `ChatOptions`; in a text they are before the texts of their message.
    """
    fields = plain(message)
    if not isinstance(fields, dict) or not isinstance(fields.get("role"), str):
        raise ValidationError(
            f"messages[{number}] must be a dict with role and content", parameter="messages"
        )
    content = fields.get("content")
    if content is None and fields["role"] != "assistant":
        content = fields["content"] = ""  # templates would write None
    if isinstance(content, list):
        parts: list[dict[str, Any]] = [
            dict(part)
            if isinstance(part, Mapping) and len(part) == 1 and part.get("type") in media
            else {"type": "text", "text": _text(part, f"messages[{number}].content[{index}]")}
            for index, part in enumerate(content)
        ]
        fields["content"] = parts if form == "openai" else _joined(parts, media, form == IN_PLACE)
    elif isinstance(content, str) and wrap:
        fields["content"] = [{"type": "text", "text": content}]
    elif content is not None and not isinstance(content, str):
        raise ValidationError(
            f"messages[{number}].content must be a string or a list of parts", parameter="messages"
        )
    return fields


def _joined(parts: list[dict[str, Any]], media: Mapping[str, str], in_place: bool) -> str:
    """The texts of parts as one, after the placeholders of its pictures and videos; or each in its place."""
    if in_place:
        return "\n".join(part["text"] if "text" in part else media[part["type"]] for part in parts)
    texts = [part["text"] for part in parts if "text" in part]
    return "\n".join([media[part["type"]] for part in parts if "text" not in part] + texts)


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        kind = str(part.get("type", "text"))
        key = "text" if kind in ("text", "input_text", "output_text") else kind
        if kind in TEXT_PARTS and isinstance(part.get(key), str):
            return str(part[key])
        if any(name in kind for name in MEDIA_PARTS):
            raise Unsupported(f"{where} of type {kind}", "send text here")
    raise ValidationError(
        f'{where} must be a string or {{"type": "text", "text": ...}}', parameter="messages"
    )


def conversations(messages: Any) -> list[list[Any]]:
    """Normalize one conversation or several to a list of conversations.

    Raises:
        ValidationError: neither a list of messages nor a list of such lists.
    """
    if isinstance(messages, (list, tuple)) and messages:
        if all(isinstance(one, (list, tuple)) for one in messages):
            return [list(one) for one in messages]
        if not any(isinstance(one, (list, tuple, str)) for one in messages):
            return [list(messages)]
    raise ValidationError(
        "messages must be a list of messages ({role, content}), or a list of such lists",
        parameter="messages",
        value=messages,
    )
