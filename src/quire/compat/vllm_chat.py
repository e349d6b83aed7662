"""vLLM's functions for tokenizers and chat templates. They work on tokenizers of Transformers, as in vLLM."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.frontend.chat_template import read_given
from quire.models.checkpoint_locator import NO_TOKENIZER_FILES, locate

ChatCompletionMessageParam = dict[str, Any]
ChatTemplateContentFormatOption = Literal["auto", "string", "openai"]
TokenizerLike = Any


def get_tokenizer(
    tokenizer_name: str | Path, *args: Any, tokenizer_mode: str = "auto", trust_remote_code: bool = False,
    revision: str | None = None, download_dir: str | None = None, runner_type: str = "generate",
    **keywords: Any,
) -> Any:  # fmt: skip
    """The Transformers tokenizer of a directory, a hub id, or a model embedded in Quire.

    Args:
        keywords: passed to `AutoTokenizer.from_pretrained`.

    Raises:
        ModelNotFound: there is no such directory or repository.
        OSError, ValueError: it has no tokenizer that Transformers can read.
    """
    from transformers import AutoTokenizer

    model = ModelConfig(model=str(tokenizer_name), revision=revision)
    if Path(tokenizer_name).is_dir():
        folder = str(tokenizer_name)
    else:
        folder = locate(
            model, LoadConfig(download_dir=download_dir, ignore_patterns=NO_TOKENIZER_FILES)
        )
    keywords.setdefault("use_fast", tokenizer_mode != "slow")
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **keywords)


@functools.lru_cache(maxsize=16)
def cached_get_tokenizer(tokenizer_name: str | Path, *args: Any, **keywords: Any) -> Any:
    """As `get_tokenizer`; the same arguments give the same object."""
    return get_tokenizer(tokenizer_name, *args, **keywords)


def cached_tokenizer_from_config(model_config: Any, **keywords: Any) -> Any:
    """The tokenizer of an engine's `model_config`; None: it has none (skip_tokenizer_init)."""
    if getattr(model_config, "skip_tokenizer_init", False):
        return None
    trust = bool(getattr(model_config, "trust_remote_code", False))
    return cached_get_tokenizer(model_config.tokenizer, trust_remote_code=trust, **keywords)


def get_config(
    model: str | Path, trust_remote_code: bool, revision: str | None = None, **keywords: Any
) -> Any:
    """The Transformers configuration of a checkpoint.

    Raises:
        ModelNotFound: there is no such directory or repository.
    """
    from transformers import AutoConfig

    folder = locate(ModelConfig(model=str(model), revision=revision), LoadConfig())
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def load_chat_template(chat_template: Path | str | None, *, is_literal: bool = False) -> str | None:
    """The text of a chat template, given as a path or as the template itself (`is_literal`: always itself).

    Raises:
        ConfigError: the file cannot be read.
    """
    if chat_template is None or is_literal:
        return None if chat_template is None else str(chat_template)
    return read_given(str(chat_template))


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None = None, tools: list[dict[str, Any]] | None = None,
    *, model_config: Any = None, trust_remote_code: bool | None = None,
) -> str | None:  # fmt: skip
    """The given template, else the tokenizer's; None: it has none. A tokenizer may have templates by name."""
    try:
        return str(tokenizer.get_chat_template(chat_template, tools=tools))
    except (ValueError, AttributeError):
        return chat_template or getattr(tokenizer, "chat_template", None)


def apply_hf_chat_template(
    tokenizer: Any, conversation: list[dict[str, Any]], chat_template: str | None = None,
    tools: list[dict[str, Any]] | None = None, *, model_config: Any = None, tokenize: bool = False,
    **keywords: Any,
) -> Any:  # fmt: skip
    """Render a conversation with a tokenizer of Transformers.

    Raises:
        ValueError: there is no template, or it refuses the conversation.
    """
    template = resolve_chat_template(tokenizer, chat_template, tools)
    render: Callable[..., Any] = tokenizer.apply_chat_template
    return render(conversation, tools=tools, chat_template=template, tokenize=tokenize, **keywords)


def make_tool_call_id(
    id_type: str = "random", func_name: str | None = None, idx: int | None = None
) -> str:
    """The id of a new tool call; id_type="kimi_k2": from the function's name and the call's index."""
    if id_type == "kimi_k2":
        return f"functions.{func_name}:{idx}"
    return f"chatcmpl-tool-{uuid.uuid4().hex}"
