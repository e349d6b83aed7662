"""Prompt forms: reads every accepted form of a prompt as text or token ids, and a cache salt.

Knows only the forms. Does not know tokenizers, limits or parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from quire.config.unsupported import PROMPT_KEYS
from quire.errors import Unsupported, ValidationError


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
    """A prompt as embeddings: recognized, but not supported yet."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]

KNOWN = ("prompt", "prompt_token_ids", "cache_salt")
MAX_SALT = 128


@dataclass(slots=True)
class Prompt:
    """A text, token ids, or both: then the engine uses the ids, and the output returns the text."""

    text: str | None = None
    tokens: list[int] = field(default_factory=list)
    """Empty: the text is not tokenized yet."""
    salt: str = ""
    is_checked: bool = False
    """The tokens fit the model (`InputProcessor.tokenize`)."""


def read_prompt(given: Any) -> Prompt:
    """Read one prompt.

    Raises:
        ValidationError: an unknown form or an unknown key.
        Unsupported: embeddings, media, encoder-decoder.
    """
    if isinstance(given, Prompt):
        return given
    if isinstance(given, str):
        return Prompt(text=given)
    if isinstance(given, Mapping):
        return _read_mapping(given)
    if is_token_list(given):
        return Prompt(tokens=_tokens(given))
    raise ValidationError(
        "a prompt must be a string, a list of token ids, or a dict with prompt or prompt_token_ids,"
        f" not {type(given).__name__}",
        parameter="prompt", value=given,
    )  # fmt: skip


def _read_mapping(given: Mapping[str, Any]) -> Prompt:
    for name, remedy in PROMPT_KEYS.items():
        if given.get(name) is not None and given[name] != {}:
            raise Unsupported(f"{name} in a prompt", remedy)
    if unknown := [str(key) for key in given if key not in KNOWN and key not in PROMPT_KEYS]:
        raise ValidationError(
            f"prompt: unknown key {', '.join(sorted(unknown))}; the keys are {', '.join(KNOWN)}",
            parameter="prompt", value=unknown,
        )  # fmt: skip
    text, tokens, salt = (given.get(name) for name in KNOWN)
    if text is not None and not isinstance(text, str):
        raise ValidationError(
            f"prompt must be a string, not {type(text).__name__}; token ids go in prompt_token_ids",
            parameter="prompt", value=text,
        )  # fmt: skip
    if text is None and tokens is None:
        raise ValidationError(
            "a prompt dict must have prompt (text) or prompt_token_ids", parameter="prompt"
        )
    ids = [] if tokens is None else _tokens(tokens)
    has_text = tokens is None or bool(
        ids
    )  # an empty list of ids is an empty prompt, also beside a text
    return Prompt(text if has_text else None, ids, read_salt(salt))


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


def is_token_list(given: Any) -> bool:
    if isinstance(given, (str, bytes, Mapping)):
        return False
    if hasattr(given, "dtype") and getattr(given, "ndim", 0) == 1:
        return True
    return isinstance(given, Sequence) and bool(given) and hasattr(given[0], "__index__")


def _tokens(given: Any) -> list[int]:
    try:
        values = given.tolist() if hasattr(given, "tolist") else given
        return [operator.index(value) for value in values]
    except TypeError:
        raise ValidationError(
            "prompt_token_ids must be a list of whole numbers",
            parameter="prompt_token_ids",
            value=given,
        ) from None


def read_prompts(given: Any) -> list[Prompt]:
    """Read one prompt or a sequence of them, in any mixture of forms.

    Raises:
        ValidationError, Unsupported: as `read_prompt`, with the number of the prompt in the message.
    """
    if isinstance(given, list) and given and isinstance(given[0], Prompt):
        return given  # already read
    if isinstance(given, (str, Mapping, Prompt)) or is_token_list(given):
        return [read_prompt(given)]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        return [read_prompt(given)]
    found = []
    for number, one in enumerate(given):
        try:
            found.append(read_prompt(one))
        except ValidationError as error:
            raise ValidationError(
                f"prompt {number}: {error}", parameter=error.parameter, value=error.value
            ) from error
    return found
