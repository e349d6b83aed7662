"""SamplingParams: how tokens are chosen, when to stop, what to report.

Knows the rules that a value must satisfy by itself. They are checked when the object is made, and again when it is
decoded from bytes. `frontend/input_processor.py` checks the rules that depend on a model (vocabulary size) or on a
server's limits. `validators.py` converts single values.
"""

from __future__ import annotations

import copy
from enum import IntEnum
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from quire import env
from quire.errors import Unsupported, ValidationError
from quire.logging import get_logger
from quire.protocol import validators as read
from quire.protocol.repetition import RepetitionDetectionParams as RepetitionDetectionParams
from quire.protocol.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

log = get_logger(__name__)

GREEDY_BELOW = 1e-5
MOST_DRAFT_TOKENS = 128
# below it, logits / temperature may overflow, and the result is the greedy choice anyway
LOWEST_TEMPERATURE = 0.01


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a stream contains."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """What is new since the previous output."""
    FINAL_ONLY = 2
    """Nothing until the end, then everything."""


class ThinkingMarkers(Struct, array_like=True):
    """The token sequences that start and end a model's thinking, and the most tokens it may have."""

    budget: int
    starts: list[list[int]]
    ends: list[list[int]]
    """The first one is used to end thinking that exceeds the budget."""
    opened: bool
    """The output begins inside thinking."""
    again: bool
    """The output may have more than one part of thinking."""


class SamplingParams(Struct, omit_defaults=True, kw_only=True, tag="sampling"):
    """The parameters of one generation. The constructor validates them.

    Raises:
        ValidationError: a value is out of its range; `parameter` names the field.
        Unsupported: a field that is known but not implemented yet.
    """

    n: int = 1
    """Outputs to return."""
    best_of: int | None = None
    """Outputs to generate, of which the n with the highest cumulative log-probability are returned."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 (or -1): all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    """Texts that end the output; given as one string or a list."""
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as fit in the context."""
    min_tokens: int = 0
    logprobs: int | None = None
    """How many of the most likely tokens to report besides the chosen one, with log-probabilities; -1: all."""
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Report the log-probabilities of these tokens, besides the chosen one's, in place of the `logprobs` most likely."""
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    """Tokens between two outputs of a stream; None: one output whenever there is something new."""
    truncate_prompt_tokens: int | None = None
    """Keep only this number of the prompt's last tokens; -1: as many as fit in the context."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None

    structured_outputs: StructuredOutputsParams | None = None
    """The format that the output must have."""
    guided_decoding: StructuredOutputsParams | None = None
    """The older name of structured_outputs."""

    thinking_token_budget: int | None = None
    """The most tokens of thinking; then the end marker is forced. -1: no limit."""

    repetition_detection: RepetitionDetectionParams | None = None
    """End a repetitive output with finish_reason "repetition"."""

    speculative: dict[str, Any] | None = None
    """{"k": N}: at most N draft tokens in a step, 0: none. The same under this name in extra_args."""

    trace_decode_token_ids: list[int] | None = None
    """The tokens of the output, in place of sampled ones: only their scores are the model's. The output ends with the last
    one, and not at a stop string or an end token before it."""

    # known names that are refused until they are implemented: `REFUSED`
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Any = None
    watermarking: Any = None
    routed_experts_prompt_start: Any = None
    logits_processors: Any = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    skip_clone: bool = False
    """Accepted, and without effect."""

    # set by frontend/input_processor.py
    eos_token_ids: list[int] = []
    """The model's end-of-text tokens. They end the output unless ignore_eos, and are masked before min_tokens."""
    bad_word_ids: list[list[int]] = []
    """Token sequences that must not occur: the last token of one is masked when the others precede it."""
    thoughts: ThinkingMarkers | None = None
    """thinking_token_budget, resolved for this model and prompt."""
    num_searched_tokens: int | None = None
    """How many of the prompt's last tokens a beam search has found so far: the constraint continues after them, and `logprobs`
    counts only tokens that it allows. None: the request is no step of a search with a constraint."""
    checked: bool = False
    """The values were validated, and the engine must not do it again: `frontend/parallel_sampling.py` sets values that
    break rules for user input."""

    REFUSED: ClassVar[dict[str, str]] = {
        "prompt_logprob_token_ids": "use prompt_logprobs",
        "prompt_logprob_start": "use prompt_logprobs",
        "watermarking": "leave it out",
        "routed_experts_prompt_start": "leave it out",
        "logits_processors": "pass logits processors to the engine: LLM(logits_processors=[...])",
        "use_beam_search": "call LLM.beam_search(prompts, BeamSearchParams(beam_width=...))",
        "length_penalty": "it belongs to beam search: BeamSearchParams(length_penalty=...)",
        "early_stopping": "it belongs to beam search: LLM.beam_search",
    }

    def __post_init__(self) -> None:
        if self.checked:
            return
        for name, remedy in self.REFUSED.items():
            if (value := getattr(self, name)) is not None and value is not False:
                raise Unsupported(f"sampling parameter {name}={value!r}", remedy)
        self._read_counts()
        self._read_numbers()
        self._read_stops()
        self._read_logprobs()
        self._read_vocabulary()
        self._read_constraint()
        self._read_speculative()
        self._check_together()
        if self.trace_decode_token_ids is not None:
            self._read_trace()

    def __setattr__(self, name: str, value: Any) -> None:
        """Programs change fields until they pass the object: a request gets a validated copy, and the engine's is frozen."""
        if self.checked:
            raise AttributeError(f"{name}: parameters in the engine cannot change; make a copy")
        super().__setattr__(name, value)

    def _read_trace(self) -> None:
        name = "trace_decode_token_ids"
        self.trace_decode_token_ids = trace = read.token_ids(name, self.trace_decode_token_ids)
        if not trace:
            raise ValidationError(f"{name} must not be empty; leave it out", parameter=name)
        for other in (
            "best_of", "prompt_logprobs", "structured_outputs", "repetition_detection", "thinking_token_budget", "bad_words",
            "allowed_token_ids",
        ):  # fmt: skip
            if getattr(self, other):
                raise ValidationError(f"{name} cannot be combined with {other}", parameter=other)
        if self.n > 1:
            raise ValidationError(f"{name} needs n=1, because all outputs would be equal", parameter="n")  # fmt: skip
        self.max_tokens = min(len(trace), self.max_tokens or len(trace))
        self.min_tokens, self.ignore_eos, self.stop, self.stop_token_ids = 0, True, [], []

    def _read_speculative(self) -> None:
        name, value = "speculative", self.speculative
        if value is None and (self.extra_args is None or (value := self.extra_args.get(name)) is None):  # fmt: skip
            return
        self.speculative = options = read.mapping(name, value)
        if unknown := [key for key in options if key != "k"]:
            raise ValidationError(
                f"{name}.{unknown[0]}: unknown key; the only one is k", parameter=name
            )
        if (count := options.get("k")) is not None:
            count = read.whole_number(f"{name}.k", count, 0, None, "0 for no draft tokens")
            options["k"] = min(count, MOST_DRAFT_TOKENS)

    def _read_constraint(self) -> None:
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise ValidationError(
                    "guided_decoding is the old name of structured_outputs; give only structured_outputs",
                    parameter="guided_decoding",
                )
            log.warning_every(
                "guided_decoding", 3600.0, "guided_decoding is now structured_outputs"
            )
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)

    def _read_counts(self) -> None:
        maximum = int(env.get("MAX_N_SEQUENCES")) if self.n != 1 or self.best_of is not None else 1
        limit = f"(the limit is QUIRE_MAX_N_SEQUENCES={maximum})"
        self.n = read.whole_number("n", self.n, 1, maximum, limit)
        if self.best_of is not None:
            self.best_of = read.whole_number(
                "best_of", self.best_of, self.n, maximum, f"at least n {limit}"
            )
        self.top_k = read.whole_number("top_k", self.top_k, -1, None, "0 or -1 for all tokens")
        # -1 means all. So does any number above the vocabulary size, even one that does not fit a machine word.
        self.top_k = 0 if self.top_k < 0 else min(self.top_k, (1 << 31) - 1)
        if self.seed is not None:
            self.seed = read.whole_number("seed", self.seed, -(1 << 63), (1 << 63) - 1)
            if self.seed == -1:
                self.seed = None
        if self.max_tokens is not None:
            remedy = "or None for as many as fit"
            self.max_tokens = read.whole_number("max_tokens", self.max_tokens, 1, None, remedy)
        self.min_tokens = read.whole_number("min_tokens", self.min_tokens, 0)
        if self.thinking_token_budget is not None:
            self.thinking_token_budget = read.whole_number(
                "thinking_token_budget", self.thinking_token_budget, -1, None, "-1 for no limit"
            )
        if self.stream_interval is not None:
            self.stream_interval = read.whole_number("stream_interval", self.stream_interval, 1)
        if self.truncate_prompt_tokens is not None:
            self.truncate_prompt_tokens = truncation(self.truncate_prompt_tokens)
        self.output_kind = read.member("output_kind", self.output_kind, RequestOutputKind)

    def _read_numbers(self) -> None:
        self.presence_penalty = read.number("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = read.number("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = read.number(
            "repetition_penalty", self.repetition_penalty, 0, None, open_low=True
        )
        self.temperature = read.number("temperature", self.temperature, 0, 2)
        self.top_p = read.number("top_p", self.top_p, 0, 1, open_low=True)
        self.min_p = read.number("min_p", self.min_p, 0, 1)
        if self.greedy:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < LOWEST_TEMPERATURE:
            log.warning_every(
                "temperature", 60.0, "temperature %g was raised to %g; use 0 for greedy sampling",
                self.temperature, LOWEST_TEMPERATURE,
            )  # fmt: skip
            self.temperature = LOWEST_TEMPERATURE

    def _read_stops(self) -> None:
        if self.repetition_detection is not None:  # may be a dict, from JSON or older programs
            self.repetition_detection = RepetitionDetectionParams.read(self.repetition_detection)
        self.stop = read.texts("stop", self.stop)
        self.bad_words = read.texts("bad_words", self.bad_words)
        ids = read.token_ids(
            "stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids
        )
        self.stop_token_ids = list(dict.fromkeys(ids))
        for name in (
            "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens",
            "spaces_between_special_tokens", "flat_logprobs",
        ):  # fmt: skip
            setattr(self, name, read.truth(name, getattr(self, name)))
        if self.skip_reading_prefix_cache is not None:
            self.skip_reading_prefix_cache = read.truth(
                "skip_reading_prefix_cache", self.skip_reading_prefix_cache
            )

    def _read_logprobs(self) -> None:
        self.logprobs = read.count_or_switch("logprobs", self.logprobs)
        self.prompt_logprobs = read.count_or_switch("prompt_logprobs", self.prompt_logprobs)

    def _read_vocabulary(self) -> None:
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = read.token_ids("logprob_token_ids", self.logprob_token_ids)
            if len(self.logprob_token_ids) > (limit := env.get("MAX_LIST_ENTRIES")):
                raise ValidationError(
                    f"logprob_token_ids has {len(self.logprob_token_ids)} entries; the limit is {limit}",
                    parameter="logprob_token_ids", value=len(self.logprob_token_ids),
                )  # fmt: skip
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = read.token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValidationError(
                    "allowed_token_ids must not be empty; leave it out to allow every token",
                    parameter="allowed_token_ids", value=[],
                )  # fmt: skip
        if self.logit_bias is not None:
            self.logit_bias = read.biases("logit_bias", self.logit_bias)
        if self.extra_args is not None:
            self.extra_args = read.small_data("extra_args", self.extra_args)

    def _check_together(self) -> None:
        if self.greedy and max(self.n, self.best_of or 1) > 1:
            name = "n" if self.n > 1 else "best_of"
            raise ValidationError(
                f"{name} must be 1 with temperature 0: all outputs would be equal; raise temperature",
                parameter=name, value=getattr(self, name),
            )  # fmt: skip
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError(
                f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}",
                parameter="min_tokens", value=self.min_tokens,
            )  # fmt: skip
        if self.stop and not self.detokenize:
            raise ValidationError(
                "stop needs detokenize=True, because stop strings are searched in the text; use stop_token_ids",
                parameter="stop", value=self.stop,
            )  # fmt: skip

    @property
    def max_draft_tokens(self) -> int | None:
        """The most draft tokens in a step; None: as many as the engine proposes."""
        return None if self.speculative is None else self.speculative.get("k")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def settled(self, **values: Any) -> SamplingParams:
        """A copy with values that are known to be valid: it skips the validation, which costs time."""
        params = copy.copy(self)
        for name, value in values.items():
            msgspec.structs.force_setattr(params, name, value)
        return params

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Like the constructor, but None means "not given".

        Raises:
            ValidationError, Unsupported: as the constructor.
            TypeError: an unknown sampling parameter.
        """
        keeps_none = ("max_tokens",)
        return cls(**{k: v for k, v in fields.items() if v is not None or k in keeps_none})

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this one."""
        changed = {
            name: value.copy()
            for name in self.__struct_fields__
            if isinstance(value := getattr(self, name), (list, dict))
        }
        return msgspec.structs.replace(self, **changed)

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={value!r}"
            for field in msgspec.structs.fields(self)
            if (value := getattr(self, field.name)) != field.default
            and not (field.default is msgspec.NODEFAULT and not value)
        ]
        return f"SamplingParams({', '.join(changed)})"


class BeamSearchParams(Struct, omit_defaults=True, kw_only=True):
    """The parameters of `LLM.beam_search`.

    Raises:
        ValidationError: a value is out of its range.
    """

    beam_width: int
    """The number of sequences kept at each step, and returned."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    """A sequence's score is its log-probability divided by its length to this power."""
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    """The format of the sequences. A beam continues only with tokens that it allows; their log-probabilities are the model's."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValidationError(
                "ignore_eos cannot be combined with structured_outputs in beam search: a complete output has no next token; leave one out",
                parameter="ignore_eos",
            )
        self.beam_width = read.whole_number("beam_width", self.beam_width, 1, 128)
        self.max_tokens = read.whole_number("max_tokens", self.max_tokens, 1)
        self.temperature = read.number("temperature", self.temperature, 0, 2)
        self.length_penalty = read.number("length_penalty", self.length_penalty, None, None)


def truncation(value: Any) -> int:
    """Validate truncate_prompt_tokens: at least 1 token, or -1 for as many as fit in the context."""
    number = read.whole_number("truncate_prompt_tokens", value, -1)
    if number == 0:
        raise ValidationError(
            "truncate_prompt_tokens must be at least 1 (or -1 for as many as the context holds)",
            parameter="truncate_prompt_tokens", value=0,
        )  # fmt: skip
    return number
