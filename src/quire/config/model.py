"""ModelConfig: which model, in which form: names, lengths and number formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

EMBEDDER = "quire-tiny-embed"
"""The embedded model of a pooling server that names no model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model and its tokenizer."""

    model: str = "quire-tiny"
    """A local directory, a hub id, or `quire-tiny`, the model embedded in the package."""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    """auto (by the checkpoint), generate, or pooling: vectors and scores in place of tokens."""
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    """Use a model for another task with the pooling runner: auto (by the checkpoint), none, embed or classify."""
    pooler_config: dict[str, Any] = field(default_factory=dict)
    """How hidden states are pooled: a JSON object with any of task, pooling_type (also seq_pooling_type, tok_pooling_type),
    use_activation, dimensions, enable_chunked_processing, max_embed_len, logit_mean, logit_sigma, step_tag_id, returned_token_ids;
    unset: as the checkpoint says."""
    model_impl: Literal["auto", "quire", "native", "vllm", "transformers"] = "auto"
    """Model code to run: auto, quire (also: vllm, native) or transformers."""
    device: str = "auto"
    """Device that the engine must use: auto, cpu, cuda or a platform plugin's. Quire detects the device, QUIRE_DEVICE forces one; another
    than `device` is refused."""
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = "auto"
    """auto, float16 (half), bfloat16 or float32 (float)."""
    max_model_len: int | str | None = None
    """Maximum tokens of prompt plus output; `auto` or -1: the most that fits in memory; unset: the model's context length."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; unset: the model's."""
    tokenizer_mode: Literal["auto", "hf", "slow", "mistral"] = "auto"
    """auto, hf, mistral (tekken.json), or slow (the Python tokenizer of Transformers)."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts and outputs are token ids."""
    trust_remote_code: bool = False
    """Allow Python code from the checkpoint to run."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    code_revision: str | None = None
    """Revision of the checkpoint's Python code on the hub."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer on the hub."""
    config_format: Literal["auto", "hf", "mistral"] = "auto"
    """auto, hf, or mistral: params.json, also where there is a config.json."""
    hf_overrides: dict[str, Any] | Callable[[Any], Any] = field(default_factory=dict)
    """Values that override the checkpoint's config.json (nested dicts are merged), or a function that returns the new config."""
    hf_token: str | bool | None = None
    """Access token for the hub; True: the token stored by `hf auth login`."""
    quantization: str | None = None
    """Quantize the weights while loading (int8, int4 or fp8), or name the method of a quantized checkpoint; unset: as the checkpoint says."""
    seed: int = 0
    """Seed for requests without one: request i gets a seed derived from this value and i."""
    served_model_name: list[str] | str | None = None
    """Model names that requests may use; responses and metrics show the first."""
    chat_template: str | None = None
    """Path of a Jinja chat template, or the template itself; unset: the tokenizer's template."""
    default_prompt_name: str | None = None
    """The prompt of a sentence-transformers model to put before texts that are embedded, for requests without `prompt_name`."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """How message content is passed to the template: auto, string or openai."""
    generation_config: str = "auto"
    """Source of default sampling parameters: auto (the model's generation_config.json), vllm or quire (none), or a directory."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Values that override the generation config, such as {"temperature": 0.5}."""
    max_logprobs: Annotated[int, Meta(ge=-1)] = 20
    """Maximum log-probabilities per position that a request may ask for; -1: no limit."""
    logprobs_mode: Literal[
        "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"
    ] = "raw_logprobs"
    """Values to return as log-probabilities: raw_logprobs, processed_logprobs, raw_logits or processed_logits."""
    logits_processors: list[Any] = field(default_factory=list)
    """Logits processors to run for every request, as classes or `module:Class`."""
    enable_prompt_embeds: bool = False
    """Accept prompts as embeddings: `prompt_embeds` of completions, and of a prompt dict."""

    @property
    def served_names(self) -> list[str]:
        """All names under which the model is served."""
        names = self.served_model_name
        return [names] if isinstance(names, str) else list(names or [self.model])
