"""Request bodies of the endpoints: one Struct each, with a base for the common fields.

Knows names, types and defaults. Contains known fields that are not supported, so that they are refused by name
(`openai/sampling_params.py`) and not silently ignored. Nulls mean "absent", and are removed before.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class StreamOptions(Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationFields(Struct, kw_only=True):
    """The common fields of completions, chat and responses. None: the model's default, or SamplingParams' default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool = True
    stream: bool = False
    user: str | None = None
    priority: int = 0
    request_id: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    speculative: dict[str, Any] | None = None
    # Known but not supported: refused.
    kv_transfer_params: dict[str, Any] | None = None


class Sampling(GenerationFields, kw_only=True):
    """The common fields of completions and chat."""

    n: int = 1
    best_of: int | None = None
    min_tokens: int = 0
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    repetition_detection: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool = False
    timeout: float | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    thinking_token_budget: int | None = None
    # Known but not supported: refused.
    ec_transfer_params: dict[str, Any] | None = None
    watermarking: Any = None
    routed_experts_prompt_start: int | None = None
    return_token_offsets: bool | None = None
    mm_payload: Any = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: int = 16
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True
    prompt_embeds: str | list[str] | None = None


class ChatFields(Sampling, kw_only=True):
    """The fields of chat, without the conversation."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None


class ChatRequest(ChatFields, kw_only=True):
    messages: list[dict[str, Any]]


class BatchChatRequest(ChatFields, kw_only=True):
    messages: list[list[dict[str, Any]]]


class GenerateRequest(Struct, kw_only=True):
    """Tokens in, tokens out."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = None
    output_mode: str = "tokens"
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int = 0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    token_offsets: list[Any] | None = None
    # Known but not supported: refused.
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class MessagesRequest(Struct, kw_only=True):
    """Anthropic's Messages."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


class ResponsesRequest(GenerationFields, kw_only=True):
    """OpenAI's Responses. Fields that concern stored responses are accepted if they change no answer."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    store: bool = True
    metadata: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] | None = None
    include_reasoning: bool = True
    text: dict[str, Any] | None = None
    include: list[str] = []
    top_logprobs: int | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    # Accepted without effect (`config/unsupported.py` says why).
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    background: bool = False
    previous_response_id: str | None = None
    # Known but not supported: refused.
    conversation: Any = None
    prompt: Any = None
    previous_input_messages: list[Any] | None = None
    enable_response_messages: bool = False


class TokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class LoadAdapterRequest(Struct, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    base_model_name: str | None = None


class UnloadAdapterRequest(Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None


class SageMakerAdapterRequest(Struct, kw_only=True):
    name: str
    src: str


class RpcRequest(Struct, kw_only=True):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class StartProfileRequest(Struct, kw_only=True):
    profile_prefix: str | None = None
    delay_iterations: int | None = None
    max_iterations: int | None = None


class AbortRequest(Struct, kw_only=True):
    request_ids: list[str] = []
