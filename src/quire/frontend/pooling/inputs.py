"""Pooling inputs: prompts and PoolingParams -> valid engine requests, or an error that gives the reason.

Knows the tasks of the model, its tokenizer and its lengths. A text that is longer than the model is embedded in pieces
where `--pooler-config` allows it. Does not know how outputs return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.errors import Unsupported, ValidationError
from quire.frontend.input_processor import InputProcessor, TokenizeOptions
from quire.frontend.media.engine_items import salted
from quire.frontend.parallel_sampling import child_id
from quire.frontend.pooling.tokenization import encode_inputs
from quire.frontend.prompts import Prompt, read_prompt, tenant_salt
from quire.protocol import validators as read
from quire.protocol.pooling_info import PoolingInfo
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import EngineRequest

VECTORS, NUMBERS = ("embed", "token_embed"), ("classify", "token_classify")
WAYS = {
    "embed": "LLM.embed, or /v1/embeddings",
    "classify": "LLM.classify, or /classify",
    "token_embed": 'LLM.encode(pooling_task="token_embed"), or /pooling with this task',
    "token_classify": 'LLM.encode(pooling_task="token_classify"), or /pooling with this task',
    "generate": "LLM.generate and LLM.chat, or /v1/completions and /v1/chat/completions",
}
"""Task -> the method and the route for it."""
OLD_TASKS = {
    "embedding": ("embed",), "score": ("classify",), "reward": ("classify", "token_classify"),
    "encode": ("token_embed", "token_classify"),
}  # fmt: skip
"""Old name of a task -> what it is called now; the first that the model has is used."""


def ways(tasks: Iterable[str]) -> str:
    """How to ask for each of these tasks, for errors."""
    return "; ".join(f"{task}: {WAYS[task]}" for task in tasks if task in WAYS)


def not_generating(info: PoolingInfo, what: str) -> ValidationError:
    """The error for a generation that a pooling model is asked for."""
    return ValidationError(
        f"{what} needs a model that generates text, but this one computes vectors or scores; use {ways(info.tasks)}; or"
        " start a model that generates (--runner generate)"
    )


def not_pooling(what: str) -> ValidationError:
    """The error for a pooling request to a model that generates."""
    return ValidationError(
        f"{what} needs a pooling model, but this model generates text (use {WAYS['generate']}); to get vectors of its"
        " hidden states, start it with --runner pooling"
    )


@dataclass(slots=True)
class AcceptedPooling:
    """A request that passed every check."""

    id: str
    prompt: str | None
    """The prompt text, if requested."""
    tokens: list[int]
    params: PoolingParams
    children: list[EngineRequest]
    """One; several if the text is embedded in pieces."""
    arrived: float
    normalizes: bool = False
    """The mean of the pieces' vectors gets length 1."""
    lora_request: Any = None
    """The adapter, as the caller named it."""
    is_subrequest: bool = False

    def rename_children(self, number: int) -> None:
        """Give the children ids that the engine does not know yet; the user's `id` stays."""
        for index, child in enumerate(self.children):
            child.id = child_id(f"{self.id}~{number}", index, len(self.children))


class PoolingInputs:
    """The pooling side of an InputProcessor; `accept` may be called from any thread."""

    def __init__(
        self, inputs: InputProcessor, info: PoolingInfo, default_prompt: str | None = None,
        read_media: Callable[[Prompt], Prompt] | None = None,
    ):  # fmt: skip
        """`read_media`: completes a prompt of a program that has pictures or sound; None: there can be none.

        Raises:
            ValidationError: the model has no prompt of the name `default_prompt`.
        """
        self.inputs, self.info = inputs, info
        self.default_prompt = self.prompt_text(default_prompt) if default_prompt else ""
        self._read_media = read_media

    # -- parameters -----------------------------------------------------------------------------
    def task(self, name: str | None) -> str:
        """The task of a request; None: the model's.

        Raises:
            ValidationError: the model does not have it; the message names those that it has, and their routes.
        """
        if name is None:
            return self.info.tasks[0]
        for task in OLD_TASKS.get(name, (name,)):
            if task in self.info.tasks:
                return task
        if name == "plugin":
            raise ValidationError("task plugin needs an IO processor plugin, and none is installed", parameter="task", value=name)  # fmt: skip
        raise ValidationError(
            f"task must be one that this model supports, not {str(name)[:80]!r} ({ways(self.info.tasks)})",
            parameter="task",
            value=name,
        )

    def params(
        self, requested: PoolingParams | None = None, task: str | None = None
    ) -> PoolingParams:
        """The engine's parameters for a request of this task.

        Raises:
            ValidationError: a parameter does not fit the task or the model.
        """
        if requested is not None and not isinstance(requested, PoolingParams):
            raise read.wrong("pooling_params", requested, "a PoolingParams")
        requested = requested or PoolingParams()
        if task is not None and requested.task not in (None, task):
            raise ValidationError(
                f"pooling_params.task is {requested.task!r}, but the call asks for {task!r}: leave one of them out",
                parameter="task",
                value=requested.task,
            )
        task = self.task(task or requested.task)
        if requested.dimensions is not None:
            self._check_dimensions(requested.dimensions, task)
        skips = requested.skip_reading_prefix_cache
        if skips is None and task not in self.info.cached_tasks:
            # the output needs hidden states of all tokens, and a cached token has none
            skips = True
        return msgspec.structs.replace(requested, task=task, skip_reading_prefix_cache=skips)

    def _check_dimensions(self, dimensions: int, task: str) -> None:
        allowed, num_dimensions = self.info.matryoshka, self.info.num_dimensions
        if task not in VECTORS:
            reason = f"is a length of vectors, which {task} does not have: leave it out"
        elif allowed is None:
            reason = f"cannot change the length of this model's vectors, which is {num_dimensions}: the model is not trained for it (is_matryoshka, matryoshka_dimensions in config.json)"
        elif allowed and dimensions not in allowed:
            reason = f"must be one of {', '.join(map(str, allowed))}, not {dimensions}"
        elif dimensions > num_dimensions:
            reason = f"must be at most {num_dimensions}, not {dimensions}"
        else:
            return
        raise ValidationError(f"dimensions {reason}", parameter="dimensions", value=dimensions)

    def prompt_text(self, name: str, parameter: str = "prompt_name") -> str:
        """The text of a prompt that comes with the model. Raises ValidationError: there is none of this name."""
        known = {**self.info.prompts, **self.info.task_instructions}
        if name not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise ValidationError(
                f"{parameter} must name a prompt of the model; it has {names}, not {name[:80]!r}",
                parameter=parameter,
                value=name,
            )
        return known[name]

    def with_prompt(self, name: str | None, texts: Sequence[str]) -> list[Prompt]:
        """Texts with a prompt of the model before each; None: the prompt of --default-prompt-name, if any.

        Raises:
            ValidationError: as `prompt_text`.
        """
        before = self.default_prompt if name is None else self.prompt_text(name)
        prompts = [Prompt(before + text) for text in texts]
        if before and not self.info.include_prompt:
            ids = self.inputs.need_tokenizer("prompt_name").encode(before)
            special = self.inputs.need_tokenizer().special_ids
            while len(ids) > 1 and ids[-1] in special:
                ids.pop()
            for one in prompts:
                one.pool_from = len(ids)
        return prompts

    # -- prompts --------------------------------------------------------------------------------
    @property
    def max_tokens(self) -> int:
        """The longest prompt in one piece."""
        return self.inputs.max_model_len

    @property
    def keeps_first(self) -> bool:
        """Whether the tokenizer truncates the end of a text unless a request says otherwise."""
        tokenizer = self.inputs.tokenizer
        return tokenizer is None or tokenizer.config.get("truncation_side") != "left"

    def read_options(self, fields: Mapping[str, Any] | None) -> TokenizeOptions:
        """Read `tokenization_kwargs`. Raises ValidationError: an unknown key or a wrong value."""
        options = TokenizeOptions.read(fields)
        if "truncation_side" not in (fields or {}):
            options.keep_first = self.keeps_first
        return options

    def options(self, requested: TokenizeOptions) -> TokenizeOptions:
        """Complete the options of a request. Raises ValidationError: it asks for more tokens than the model takes."""
        limit = requested.truncate
        if limit is not None and limit > self.max_tokens:
            raise ValidationError(
                f"truncate_prompt_tokens must be at most {self.max_tokens} (max_model_len), or -1 for that; it is {limit}",
                parameter="truncate_prompt_tokens",
                value=limit,
            )
        return replace(requested, truncate=self.max_tokens) if limit == -1 else requested

    def tokenize(
        self, prompts: Sequence[Prompt], options: TokenizeOptions, task: str
    ) -> list[Prompt]:
        """Prompts as token ids that the model takes; special tokens stay where a text is truncated.

        Raises:
            ValidationError: a text is empty or too long, or there is no tokenizer.
        """
        options = self.options(options)
        prompts = [self._with_media(one, options) if one.items else one for one in prompts]
        texts = [
            one for one in prompts if not one.is_checked and not one.tokens and one.text is not None
        ]
        encoded = iter(self._encoded(texts, options))
        return [
            one if one.is_checked else self._checked(one, *(next(encoded) if not one.tokens and one.text is not None else (one.tokens, one.second_text)), options, task)
            for one in prompts
        ]  # fmt: skip

    def _with_media(self, prompt: Prompt, options: TokenizeOptions) -> Prompt:
        """Raises ValidationError: the model takes none. Unsupported: the prompt must be truncated."""
        if self._read_media is None:
            raise ValidationError(self.inputs.no_media[prompt.items[0].kind], parameter="multi_modal_data")  # fmt: skip
        if options.truncate is not None:
            raise Unsupported("truncation of a prompt with media", "shorten its text")
        return self._read_media(prompt)

    def _encoded(
        self, prompts: Sequence[Prompt], options: TokenizeOptions
    ) -> list[tuple[list[int], int]]:
        if not prompts:
            return []
        fits = options.truncate is None and not (self.info.chunked and not self.info.max_embed_len)
        texts: list[str | tuple[str, str]] = []
        for one in prompts:
            for text in (one.text or "", one.second or ""):
                self.inputs.check_text(text, fits, truncated=options.truncate is not None)
            parts = [one.text or "", *([] if one.second is None else [one.second])]
            if self.info.do_lower_case:
                parts = [part.lower() for part in parts]
            texts.append(parts[0] if one.second is None else (parts[0], parts[1]))
        return encode_inputs(
            self.inputs.need_tokenizer("input"), texts, options.add_special_tokens, options.truncate, options.keep_first
        )  # fmt: skip

    def _checked(
        self, prompt: Prompt, tokens: list[int], second: int, options: TokenizeOptions, task: str
    ) -> Prompt:
        if options.truncate is not None and len(tokens) > options.truncate:  # token ids
            limit = options.truncate
            cut = 0 if options.keep_first else len(tokens) - limit
            tokens, second = tokens[cut : cut + limit], max(0, second - cut)
            second = second if second < limit else 0
        if not tokens:
            raise ValidationError(
                "an input is empty: it needs at least one token", parameter="input", value=[]
            )
        self.check_length(len(tokens), task)
        if prompt.tokens:
            self._check_given_ids(options.parameter, tokens)
        from_ = prompt.pool_from if prompt.pool_from < len(tokens) else 0
        return Prompt(prompt.text, tokens, prompt.salt, True, None, second, from_)

    def check_length(self, num_tokens: int, task: str) -> None:
        """Raises ValidationError: the model does not take this number of tokens."""
        limit = self.max_tokens
        if task == "embed" and self.info.chunked:
            limit = self.info.max_embed_len or num_tokens
        if num_tokens > limit:
            raise ValidationError(
                f"This model's maximum context length is {limit} tokens: an input has {num_tokens}. Shorten it, or set"
                " truncate_prompt_tokens (-1: as many as fit).",
                parameter="input_tokens",
                value=num_tokens,
            )

    def _check_given_ids(self, name: str, tokens: list[int]) -> None:
        try:
            self.inputs.check_ids(name, tokens)
        except ValidationError as error:
            raise ValidationError(
                f"{error}. Clients that send ids of another tokenizer (LangChain's OpenAIEmbeddings) send texts with"
                " check_embedding_ctx_length=False",
                parameter=error.parameter,
                value=error.value,
            ) from None

    # -- requests -------------------------------------------------------------------------------
    def accept(
        self, prompt: Any, requested: PoolingParams | None, *, id: str, priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None, arrived: float | None = None, tenant: str = "",
        adapter: str | None = None, lora_request: Any = None,
    ) -> AcceptedPooling:  # fmt: skip
        """Validate and complete one request.

        Raises:
            ValidationError: `parameter` names the wrong parameter; the message says how to correct it.
        """
        tokenized, params = read_prompt(prompt), self.params(requested)
        if tokenized.embeddings is not None:
            raise Unsupported("prompt_embeds for a pooling model", "pass text or token ids")
        if not tokenized.is_checked:
            options = self.read_options(tokenization_kwargs)
            (tokenized,) = self.tokenize([tokenized], options, params.task or "")
        if tokenized.second_text or tokenized.pool_from:
            params = msgspec.structs.replace(
                params, second_text=tokenized.second_text, pool_from=tokenized.pool_from
            )
        arrived = (
            time.time() if arrived is None else read.number("arrival_time", arrived, 0.0, None)
        )
        salt = tenant_salt(tokenized.salt, tenant)
        request = EngineRequest(
            id=id, tokens=tokenized.tokens, params=params, arrived=arrived, client=self.inputs.client, adapter=adapter,
            priority=read.whole_number("priority", priority, -(1 << 31), (1 << 31) - 1),
            salt=salt, tenant=tenant, media=salted(tokenized.media, salt),
        )  # fmt: skip
        normalizes = self.info.normalizes if params.use_activation is None else params.use_activation  # fmt: skip
        return AcceptedPooling(
            id, tokenized.text, tokenized.tokens, params, self._pieces(request), arrived, normalizes, lora_request
        )  # fmt: skip

    def _pieces(self, request: EngineRequest) -> list[EngineRequest]:
        tokens, piece_size = request.tokens, self.max_tokens
        if len(tokens) <= piece_size:
            return [request]
        starts = range(0, len(tokens), piece_size)
        return [
            msgspec.structs.replace(request, id=child_id(request.id, index, len(starts)), tokens=tokens[start : start + piece_size])
            for index, start in enumerate(starts)
        ]  # fmt: skip
