"""Prompt forms: reads every accepted form of a prompt as text or token ids, and a cache salt.

Knows only the forms. Does not know tokenizers, limits or parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NotRequired, TypedDict

from quire.config.unsupported import PROMPT_KEYS
from quire.errors import Unsupported, ValidationError
from quire.frontend.media.content_parts import GivenMedia
from quire.frontend.media.program_items import given_items, options_text
from quire.protocol.media import KINDS
from quire.protocol.request import MediaItem


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Any]
    mm_processor_kwargs: NotRequired[Any]
    multi_modal_uuids: NotRequired[Any]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt`, its text, is only returned in the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    token_type_ids: NotRequired[Sequence[int]]
    multi_modal_data: NotRequired[Any]
    mm_processor_kwargs: NotRequired[Any]
    multi_modal_uuids: NotRequired[Any]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, a tensor or array [tokens, hidden_size]; `prompt`, its text, is only returned in the output."""

    prompt_embeds: Any
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]

KNOWN = (
    "prompt",
    "prompt_token_ids",
    "cache_salt",
    "token_type_ids",
    "prompt_embeds",
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
)
MAX_SALT = 128
NO_MEDIA = dict.fromkeys(KINDS, "this model reads text only: send text")


@dataclass(slots=True)
class Prompt:
    """A text, token ids, or both: then the engine uses the ids, and the output returns the text."""

    text: str | None = None
    tokens: list[int] = field(default_factory=list)
    """Empty: the text is not tokenized yet."""
    salt: str = ""
    is_checked: bool = False
    """The tokens fit the model (`InputProcessor.tokenize`)."""
    second: str | None = None
    """The second text of a pair, for pooling models that read pairs."""
    second_text: int = 0
    """Where the tokens of the second text begin; 0: there is none."""
    pool_from: int = 0
    """The first token that counts in the output of a pooling model."""
    embeddings: Any = None
    """The prompt as embeddings, not checked yet (`prompt_embeddings.py`); None: it has text or tokens."""
    media: list[MediaItem] = field(default_factory=list)
    """What stands in the place of some of the tokens."""
    items: list[GivenMedia] = field(default_factory=list)
    """Pictures, videos and sounds as a program gives them, whose placeholders are in the text or the tokens."""
    extras: dict[str, bytes] = field(default_factory=dict)
    """Data for features, by their names; see `EngineRequest.extras`."""
    num_encoder_tokens: int = 0
    """States that the model's encoder makes of `media`."""


def read_prompt(prompt: Any) -> Prompt:
    """Read one prompt.

    Raises:
        ValidationError: an unknown form or an unknown key.
        Unsupported: media, encoder-decoder.
    """
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt)
    if is_token_list(prompt):
        return Prompt(tokens=_tokens(prompt))
    raise ValidationError(
        "a prompt must be a string, a list of token ids, or a dict with prompt or prompt_token_ids,"
        f" not {type(prompt).__name__}",
        parameter="prompt",
        value=prompt,
    )


def _read_mapping(prompt: Mapping[str, Any]) -> Prompt:
    if "decoder_prompt" in prompt or "encoder_prompt" in prompt:
        prompt = _of_both(prompt)
    for name, remedy in PROMPT_KEYS.items():
        if prompt.get(name) is not None and prompt[name] != {}:
            raise Unsupported(f"{name} in a prompt", remedy)
    if unknown := [str(key) for key in prompt if key not in KNOWN and key not in PROMPT_KEYS]:
        raise ValidationError(
            f"prompt: unknown key {', '.join(sorted(unknown))}; the keys are {', '.join(KNOWN)}",
            parameter="prompt",
            value=unknown,
        )
    text, tokens, salt, types, embeddings, media, uuids, options = map(prompt.get, KNOWN)
    items = given_items(media, uuids, options_text(options))
    if text is not None and not isinstance(text, str):
        raise ValidationError(
            f"prompt must be a string, not {type(text).__name__}; token ids go in prompt_token_ids",
            parameter="prompt",
            value=text,
        )
    if embeddings is not None:
        if tokens is not None or items:
            raise ValidationError(
                "a prompt dict with prompt_embeds has no prompt_token_ids and no multi_modal_data",
                parameter="prompt",
            )
        return Prompt(text, salt=read_salt(salt), embeddings=embeddings)
    if text is None and tokens is None:
        raise ValidationError(
            "a prompt dict must have prompt (text), prompt_token_ids or prompt_embeds",
            parameter="prompt",
        )
    ids = [] if tokens is None else _tokens(tokens)
    # An empty list of ids is an empty prompt, also beside a text.
    has_text = tokens is None or bool(ids)
    second = 0 if types is None else _second_text(_tokens(types, "token_type_ids"), len(ids))
    return Prompt(
        text if has_text else None, ids, read_salt(salt), second_text=second, items=items,
    )  # fmt: skip


def _of_both(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's prompt, with the media of the encoder's.

    Raises:
        ValidationError: one of them is missing, or has another form.
    """
    encoder, decoder = prompt.get("encoder_prompt"), prompt.get("decoder_prompt")
    if isinstance(decoder, str):
        decoder = {"prompt": decoder}
    elif is_token_list(decoder):
        decoder = {"prompt_token_ids": decoder}
    rest = {key: value for key, value in prompt.items() if key not in ("encoder_prompt", "decoder_prompt")}  # fmt: skip
    if not isinstance(encoder, Mapping) or not isinstance(decoder, Mapping) or rest:
        raise ValidationError(
            'a prompt for encoder and decoder is {"encoder_prompt": {"multi_modal_data": ...}, "decoder_prompt": "text"}',
            parameter="prompt",
        )
    if encoder.get("prompt") or encoder.get("prompt_token_ids"):
        raise Unsupported("text for an encoder", "pass multi_modal_data in encoder_prompt")
    return {**decoder, "multi_modal_data": encoder.get("multi_modal_data")}


def _second_text(types: list[int], num_tokens: int) -> int:
    """Where the tokens of type 1 begin; 0: there are none.

    Raises:
        ValidationError: not a type for each token, first 0, then 1.
    """
    ones = types.count(1)
    start = num_tokens - ones
    if types != [0] * start + [1] * ones or (ones and not start):
        raise ValidationError(
            f"token_type_ids must have a type for each of the {num_tokens} prompt_token_ids: 0 for the first text, then 1"
            " for the second",
            parameter="token_type_ids",
            value=types,
        )
    return start if ones else 0


def read_salt(salt: Any) -> str:
    """Raises ValidationError: not a string of 1 to 128 characters."""
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT:
        raise ValidationError(
            f"cache_salt must be a string of 1 to {MAX_SALT} characters",
            parameter="cache_salt",
            value=salt,
        )
    return salt


def tenant_salt(salt: str, tenant: str) -> str:
    """Tenants share no cached prefixes: the latency of an answer would reveal other tenants' prompts."""
    return sha256(f"{tenant}\0{salt}".encode()).hexdigest()[:32] if tenant else salt


def is_token_list(value: Any) -> bool:
    if isinstance(value, (str, bytes, Mapping)):
        return False
    if hasattr(value, "dtype") and getattr(value, "ndim", 0) == 1:
        return True
    return isinstance(value, Sequence) and bool(value) and hasattr(value[0], "__index__")


def _tokens(value: Any, name: str = "prompt_token_ids") -> list[int]:
    try:
        values = value.tolist() if hasattr(value, "tolist") else value
        return [operator.index(token) for token in values]
    except TypeError:
        raise ValidationError(
            f"{name} must be a list of whole numbers",
            parameter=name,
            value=value,
        ) from None


def read_prompts(prompts: Any) -> list[Prompt]:
    """Read one prompt or a sequence of them, in any mixture of forms.

    Raises:
        ValidationError, Unsupported: as `read_prompt`, with the number of the prompt in the message.
    """
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], Prompt):
        return prompts  # already read
    if isinstance(prompts, (str, Mapping, Prompt)) or is_token_list(prompts):
        return [read_prompt(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        return [read_prompt(prompts)]
    parsed = []
    for number, one in enumerate(prompts):
        try:
            parsed.append(read_prompt(one))
        except ValidationError as error:
            raise ValidationError(
                f"prompt {number}: {error}", parameter=error.parameter, value=error.value
            ) from error
    return parsed
