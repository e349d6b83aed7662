"""Input processor: a prompt and its parameters -> valid engine requests, or an error that gives the reason.

Knows the tokenizer, the model's limits and defaults. All callers (Python, HTTP, command line) use
`InputProcessor.accept`, and every rule that needs a model is here. The server calls `tokenize` first: it needs the
prompt's tokens before it starts a request. Does not know how outputs return.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire import env
from quire.config.structured import StructuredOutputsOptions
from quire.errors import Unsupported, ValidationError
from quire.features.structured.check_process import ConstraintChecker
from quire.frontend.bounded_encoding import encode_enough
from quire.frontend.generation_config import GenerationDefaults
from quire.frontend.media.engine_items import salted
from quire.frontend.parallel_sampling import child_id, derive_seed, fan_out
from quire.frontend.parsers.format_table import ReasoningFormat
from quire.frontend.prompt_embeddings import check_has_tokens, fitting
from quire.frontend.prompts import NO_MEDIA, Prompt, read_prompt, tenant_salt
from quire.frontend.thinking_markers import thinking_markers
from quire.frontend.tokenizer import Tokenizer
from quire.protocol import validators as read
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams, StructuredOutputsParams, truncation

# A text may be this many times longer than `max_model_len` of the longest tokens before it is refused unread.
WIDEST = 4
LONGER_IF_TRUNCATED = 4  # a part of such a text is tokenized


@dataclass(slots=True)
class AcceptedRequest:
    """A request that passed every check."""

    id: str
    prompt: str | None
    """The prompt text, if given."""
    tokens: list[int]
    params: SamplingParams
    """The request's parameters, n included, with max_tokens, seed and logprobs resolved."""
    children: list[EngineRequest]
    """The engine requests, one for each output."""
    arrived: float
    is_subrequest: bool = False
    """As `EngineRequest.is_subrequest`."""
    lora_request: Any = None
    """The adapter, as the caller named it."""

    def rename_children(self, number: int) -> None:
        """Give the children ids that the engine does not know yet; the user's `id` stays."""
        count = len(self.children)
        for index, child in enumerate(self.children):
            child.id = child_id(f"{self.id}~{number}", index, count)


@dataclass(slots=True)
class TokenizeOptions:
    """Options for tokenizing a prompt."""

    add_special_tokens: bool = True
    truncate: int | None = None
    """Keep that many tokens; -1: as many as fit into the context with one output token."""
    keep_first: bool = False
    """Truncate the end instead of the beginning."""
    parameter: str = "prompt_token_ids"
    """The caller's name for token ids, for errors."""
    fits_model: bool = True
    """False: the tokens are only counted, so the model's limits do not apply."""

    @classmethod
    def read(cls, fields: Mapping[str, Any] | None) -> TokenizeOptions:
        """Read `tokenization_kwargs`.

        Raises:
            ValidationError: an unknown key or a wrong value.
        """
        options, fields = cls(), dict(fields or {})
        options.add_special_tokens = read.truth(
            "add_special_tokens", fields.pop("add_special_tokens", True)
        )
        side = fields.pop("truncation_side", None)
        if (
            fields.pop("truncation", False)
            and (length := fields.pop("max_length", None)) is not None
        ):
            options.truncate, options.keep_first = truncation(length), True
        if (limit := fields.pop("truncate_prompt_tokens", None)) is not None:
            options.truncate, options.keep_first = truncation(limit), False
        fields.pop("max_length", None)
        if side is not None:
            if side not in ("left", "right"):
                raise read.wrong(
                    "truncation_side", side, "left (keep the end) or right (keep the beginning)"
                )
            options.keep_first = side == "right"
        if fields:
            known = "add_special_tokens, truncate_prompt_tokens, truncation_side, truncation, max_length"
            raise ValidationError(
                f"tokenization_kwargs: unknown key {', '.join(sorted(fields))}; the keys are {known}",
                parameter="tokenization_kwargs", value=fields,
            )  # fmt: skip
        return options


@dataclass(slots=True)
class InputProcessor:
    """One per frontend; `accept` may be called from any thread."""

    tokenizer: Tokenizer | None
    max_model_len: int
    vocab_size: int
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    max_logprobs: int = 20
    seed: int = 0
    client: int = 0
    """Number of this frontend; different frontends draw different seeds."""
    eos_token_ids: list[int] = field(default_factory=list)
    structured: StructuredOutputsOptions = field(default_factory=StructuredOutputsOptions)
    reasoning: Callable[[], ReasoningFormat | None] = lambda: None
    """Returns the model's reasoning format."""
    embedding_size: int = 0
    """Features of an embedding, if prompts may be embeddings; 0: they may not."""
    max_text_bytes: int = 0
    """Bytes of UTF-8 that are tokenized in one piece; 0: any number."""
    checker: ConstraintChecker = field(default_factory=ConstraintChecker)
    no_media: Mapping[str, str] = field(default_factory=lambda: dict(NO_MEDIA))
    """Why prompts may not have pictures, videos and sound, by kind."""
    _numbers: Iterable[int] = field(default_factory=itertools.count)
    _longest: int = 0
    """Length of the vocabulary's longest token in characters; 0: not computed yet."""
    _words: tuple[list[str], list[list[int]]] | None = None
    """The last bad words, and their token ids."""

    def __post_init__(self) -> None:
        ends = list(self.defaults.eos_token_ids)
        if self.tokenizer is not None and (own := self.tokenizer.eos_token_id) is not None:
            ends.append(own)
        self.eos_token_ids = sorted({i for i in ends if 0 <= i < self.vocab_size})

    def accept(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        id: str,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        lora_request: Any = None,
        arrived: float | None = None,
        is_subrequest: bool = False,
        tenant: str = "",
    ) -> AcceptedRequest:
        """Validate and complete one request. `is_subrequest`: a part of a larger request, exempt from max_logprobs.

        `adapter`: the name of a loaded adapter (`adapters.py`); `lora_request`: what its outputs show for it.

        Raises:
            ValidationError: `parameter` names the wrong parameter; the message says how to correct it.
            Unsupported: a feature that Quire does not have yet.
        """
        arrived = (
            time.time() if arrived is None else read.number("arrival_time", arrived, 0.0, None)
        )
        params = self.defaults.params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise read.wrong("sampling_params", params, "a SamplingParams")
        params = msgspec.structs.replace(
            params
        )  # validates fields that were set after construction
        given = read_prompt(prompt)
        if given.second_text:
            raise Unsupported("token_type_ids in a prompt", "it belongs to pooling models")
        options = TokenizeOptions.read(tokenization_kwargs)
        if params.truncate_prompt_tokens is not None:
            options.truncate = params.truncate_prompt_tokens
        if given.is_checked and given.media and options.truncate is not None:
            raise Unsupported("truncate_prompt_tokens beside media", "shorten the text")
        checked = self.tokenize(given, options)
        salt = tenant_salt(given.salt, tenant)
        tokens, media = checked.tokens, salted(checked.media, salt)
        if params.prompt_logprobs is not None:
            check_has_tokens(media)
        settled = self._settle(params, len(tokens), limited=not is_subrequest)
        if (budget := params.thinking_token_budget) is not None and budget >= 0:
            marks = thinking_markers(budget, self.reasoning(), self.tokenizer, tokens)
            settled = settled.settled(thoughts=marks)
        request = EngineRequest(
            id=id, tokens=tokens, params=settled, arrived=arrived, client=self.client,
            priority=read.whole_number("priority", priority, -(1 << 31), (1 << 31) - 1), salt=salt,
            tenant=tenant, is_subrequest=is_subrequest, adapter=adapter, media=media, extras=dict(checked.extras),
            num_encoder_tokens=checked.num_encoder_tokens,
        )  # fmt: skip
        asked = params.settled(
            max_tokens=settled.max_tokens, seed=settled.seed, logprobs=settled.logprobs
        )
        return AcceptedRequest(
            id, given.text, tokens, asked, fan_out(request), arrived, is_subrequest, lora_request
        )

    # -- the prompt -----------------------------------------------------------------------------
    def tokenize(self, prompt: Prompt, options: TokenizeOptions | None = None) -> Prompt:
        """The prompt as token ids, truncated if requested; without its text if that is truncated.

        Raises:
            ValidationError: a text without a tokenizer; or the prompt is empty, does not fit into the context, or
                has ids outside the vocabulary.
        """
        if prompt.is_checked:
            return prompt
        if prompt.items:
            raise ValidationError(self.no_media[prompt.items[0].kind], parameter="multi_modal_data")
        options = options or TokenizeOptions()
        text, tokens, limit = prompt.text, prompt.tokens, options.truncate
        if limit == -1:
            limit = self.max_model_len - 1
        if prompt.embeddings is not None:
            given = fitting(prompt.embeddings, self.embedding_size, limit, options.keep_first)
            self.check_length(given.num_tokens)
            tokens = [0] * given.num_tokens
            return Prompt(text, tokens, prompt.salt, True, media=given.media())
        if not tokens and text is not None:
            tokens = self._encode(text, options)
        if limit is not None and len(tokens) > limit:
            text, tokens = None, tokens[:limit] if options.keep_first else tokens[-limit:]
        found = dataclasses.replace(prompt, text=text, tokens=tokens)
        return self.checked(found, options.parameter) if options.fits_model else found

    def checked(self, prompt: Prompt, parameter: str = "prompt") -> Prompt:
        """The prompt, whose tokens fit the model. Raises ValidationError: as `tokenize`."""
        if not prompt.tokens:
            raise ValidationError(
                "the prompt is empty: it needs a token", parameter="prompt", value=[]
            )
        self.check_length(len(prompt.tokens))
        self.check_ids(parameter, prompt.tokens)
        prompt.is_checked = True
        return prompt

    def _encode(self, text: str, options: TokenizeOptions) -> list[int]:
        """The tokens of a text; if it is truncated, of a part that has enough of them.

        Raises:
            ValidationError: the text is too long.
        """
        limit, special, fits = options.truncate, options.add_special_tokens, options.fits_model
        self.check_text(text, fits and limit is None, truncated=limit is not None)
        tokenizer = self.need_tokenizer()
        if limit is None and not fits:
            return tokenizer.encode(text, special)
        most = self.max_model_len if limit is None or limit < 0 else min(limit, self.max_model_len)
        tokens, is_whole = encode_enough(
            lambda part: tokenizer.encode(part, special), text, most, options.keep_first
        )
        if limit is None and not is_whole:
            raise self._too_long(f"more than {len(tokens)}")
        return tokens

    def need_tokenizer(self, parameter: str = "prompt") -> Tokenizer:
        """Raises ValidationError: there is no tokenizer for this parameter."""
        if self.tokenizer is None:
            raise ValidationError(
                "text needs a tokenizer, but skip_tokenizer_init=True is set; pass token ids (prompt_token_ids)",
                parameter=parameter,
            )
        return self.tokenizer

    def check_size(self, text: str, truncated: bool = False) -> None:
        """Raises ValidationError: the text has more bytes than `max_text_bytes`, or than four times that if it is truncated."""
        limit = self.max_text_bytes * (LONGER_IF_TRUNCATED if truncated else 1)
        if not limit or 4 * len(text) <= limit:
            return
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size > limit:
            raise ValidationError(
                f"the text has {size} bytes of UTF-8; the limit is {limit}: shorten it, or send it in parts",
                parameter="input_tokens", value=size,
            )  # fmt: skip

    def check_text(self, text: str, fits: bool, truncated: bool = False) -> None:
        """Refuse a long text before spending time and memory on tokenizing it.

        Raises:
            ValidationError: as `check_size`; or, if it must fit the context, it is WIDEST times longer than
                `max_model_len` of the vocabulary's longest tokens.
        """
        if len(text) <= self.max_model_len:
            return
        self.check_size(text, truncated)
        if not fits:
            return
        if not self._longest and self.tokenizer is not None:
            self._longest = max(map(len, self.tokenizer.get_vocab()), default=1)
        if len(text) > self.max_model_len * self._longest * WIDEST:
            raise ValidationError(
                f"This model's maximum context length is {self.max_model_len} tokens; the prompt's"
                f" {len(text)} characters cannot fit. Shorten it, or set truncate_prompt_tokens.",
                parameter="input_tokens", value=len(text),
            )  # fmt: skip

    def check_length(self, num_tokens: int) -> None:
        """Raises ValidationError: a prompt of this number of tokens leaves no room for output."""
        if num_tokens >= self.max_model_len:
            raise self._too_long(str(num_tokens))

    def _too_long(self, count: str) -> ValidationError:
        return ValidationError(
            f"This model's maximum context length is {self.max_model_len} tokens: the prompt has {count}, and an output"
            " needs at least 1. Shorten the prompt, set truncate_prompt_tokens, or start the engine with a larger"
            " max_model_len.",
            parameter="input_tokens", value=count,
        )  # fmt: skip

    def check_ids(self, name: str, ids: Collection[int]) -> None:
        if not ids:
            return
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise ValidationError(
                f"{name} has {wrong}, which is not a token id of this model; ids are 0 to"
                f" {self.vocab_size - 1}",
                parameter=name, value=wrong,
            )  # fmt: skip

    # -- the parameters -------------------------------------------------------------------------
    def _settle(self, params: SamplingParams, num_prompt: int, *, limited: bool) -> SamplingParams:
        """The engine's parameters: all defaults resolved, fields that only the frontend reads removed."""
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self.check_ids("logit_bias", params.logit_bias or ())
        self.check_ids("logprob_token_ids", params.logprob_token_ids or ())
        self.check_ids("trace_decode_token_ids", params.trace_decode_token_ids or ())
        if self.tokenizer is None and params.stop:
            raise ValidationError(
                "stop needs a tokenizer, but skip_tokenizer_init=True is set; use stop_token_ids",
                parameter="stop", value=params.stop,
            )  # fmt: skip
        room = self.max_model_len - num_prompt
        if params.min_tokens > room:
            raise ValidationError(
                f"min_tokens={params.min_tokens} is too large: the context of {self.max_model_len} tokens has room"
                f" for {room} after the prompt's {num_prompt}",
                parameter="min_tokens", value=params.min_tokens,
            )  # fmt: skip
        skip = params.skip_reading_prefix_cache
        own_seed = derive_seed(self.seed, self.client, next(iter(self._numbers)))
        return params.settled(
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=own_seed if params.seed is None else params.seed & ((1 << 63) - 1),
            logprobs=self._count("logprobs", params.logprobs, limited),
            prompt_logprobs=self._count("prompt_logprobs", params.prompt_logprobs, limited),
            # Prompt log-probabilities need every prompt position computed.
            skip_reading_prefix_cache=params.prompt_logprobs is not None if skip is None else skip,
            eos_token_ids=self.eos_token_ids,
            bad_word_ids=self._bad_word_ids(params.bad_words),
            structured_outputs=self._constraint(params),
            num_searched_tokens=None if limited else params.num_searched_tokens, checked=True,
            stop=[], bad_words=[], truncate_prompt_tokens=None, stream_interval=None,
        )  # fmt: skip

    def _constraint(self, params: SamplingParams) -> StructuredOutputsParams | None:
        if params.structured_outputs is None:
            return None
        if not self.eos_token_ids:
            raise ValidationError(
                "structured_outputs needs an end-of-text token, but this model has none; set eos_token_id in its"
                " generation_config.json",
                parameter="structured_outputs",
            )
        ours = ("disable_any_whitespace", "disable_additional_properties")
        form = params.structured_outputs
        if more := {name: True for name in ours if getattr(self.structured, name)}:
            form = msgspec.structs.replace(form, **more)
        return self.checker.checked(form)

    def _count(self, name: str, requested: int | None, limited: bool) -> int | None:
        if requested is None:
            return None
        count = self.vocab_size if requested == -1 else requested
        if limited and self.max_logprobs != -1 and count > self.max_logprobs:
            raise ValidationError(
                f"{name}={requested} is more than the engine's max_logprobs of {self.max_logprobs}; request fewer (a chat: top_logprobs), or"
                " start the engine with a larger max_logprobs (-1: no limit)",
                parameter=name, value=requested,
            )  # fmt: skip
        return min(count, self.vocab_size)

    def _bad_word_ids(self, words: list[str]) -> list[list[int]]:
        """Token ids of each word, tokenized at the start of a text and after a space."""
        if not words:
            return []
        if self.tokenizer is None:
            raise ValidationError(
                "bad_words needs a tokenizer, but skip_tokenizer_init=True is set; use logit_bias",
                parameter="bad_words", value=words,
            )  # fmt: skip
        before = self._words  # the prompts of one request have the same words
        if before is not None and before[0] == words:
            return before[1]
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        found = [list(ids) for ids in dict.fromkeys(map(tuple, encoded)) if ids]
        if len(found) > (most := env.get("MAX_LIST_ENTRIES")):  # every step checks all of them
            raise ValidationError(
                f"bad_words makes {len(found)} token sequences; the limit is {most}: pass fewer words",
                parameter="bad_words", value=len(found),
            )  # fmt: skip
        self._words = (list(words), found)
        return found
